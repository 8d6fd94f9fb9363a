"""The picture of a layer: every matrix and activation is in it, where it lies."""

from __future__ import annotations

import re

import jax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from traced_steps import config_of

from jaxpar.base.config import Config, override
from jaxpar.base.layout.mesh import devices_needed
from jaxpar.show.layer import layer_figure
from jaxpar.train.activations import activations
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment


def experiment_of(config: Config) -> Experiment:
    return make_experiment(config, jax.devices()[: devices_needed(config.mesh)])


def panels(figure: Figure) -> dict[str, tuple[str, int]]:
    """The last line of a panel's title and its number of shards, by each name that it has, with the
    shape.
    """
    found = {}
    for axes in figure_axes(figure):
        *lines, says = axes.get_title().split("\n")
        names, shape = re.split(r"\s+(?=\d)", " ".join(lines), maxsplit=1)
        for name in names.split(", "):
            found[f"{name}  {shape}"] = (says, len(axes.patches))
    return found


def figure_axes(figure: Figure) -> list[Axes]:
    return [axes for part in figure.subfigs for axes in part.axes if axes.get_visible()]


def test_every_matrix_and_activation_lies_where_the_plan_says() -> None:
    experiment = experiment_of(config_of("llama", "full", fsdp=4, tensor=2))
    figure = layer_figure(experiment, "a title")
    found = panels(figure)
    drawn = [axes.get_title() for axes in figure_axes(figure)]
    assert any(title.startswith("gate, up  ") for title in drawn), "alike, so drawn once"
    blocks = experiment.state.params["blocks"]
    for name, array in blocks.items():
        if hasattr(array, "ndim") and array.ndim > 2:
            shape = " x ".join(map(str, array.shape[1:]))
            assert found[f"{name}  {shape}"][1] == 8, "fsdp x tensor"
    for one in activations(experiment):
        shape = " x ".join(map(str, one.shape))
        says, shards = found[f"{one.name}  {shape}"]
        assert shards == 8
        assert says.endswith("kept" if one.action == "save" else "made again")


def test_what_each_device_has_of_its_own_is_named() -> None:
    mesh = config_of("llama", "full", expert=2, fsdp=2, tensor=2)
    config = override(mesh, {"model.experts": 4})
    figure = layer_figure(experiment_of(config), "experts")
    (below,) = [text.get_text() for text in figure.texts if "not drawn" in text.get_text()]
    assert "mlp_hidden" in below
    assert not any(name.startswith("mlp_hidden ") for name in panels(figure))
