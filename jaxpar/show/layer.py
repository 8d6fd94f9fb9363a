"""The picture of one layer: its matrices and its activations, each with where it lies on the mesh.

Nothing here knows a model: other parameters and other named activations make another picture.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure, SubFigure

from jaxpar.base.console import bytes_text
from jaxpar.base.layout.activation_names import NAMES, Action
from jaxpar.base.layout.placements import Placement, placements
from jaxpar.base.layout.plan import Plan, is_matrix
from jaxpar.base.layout.sharding import output_axis
from jaxpar.models import in_parts
from jaxpar.show.shards import draw_array
from jaxpar.train.activations import Activation, activations
from jaxpar.train.experiment import Experiment

_COLUMNS = 4
_WORDS: dict[Action, str] = {
    "save": "kept",
    "offload": "kept in host memory",
    "recompute": "made again",
}
"""The fate of an activation until the backward."""
_WIDTH = 4.0
_HEIGHT = 3.1
_HEADING = 0.45
"""The height of the heading above the panels of a kind, in inches, as `_WIDTH` and `_HEIGHT` of a
panel.
"""


class Panel(NamedTuple):
    """Arrays of a layer that lie alike, and a line to show below their names."""

    row: Placement
    """The first of the arrays."""
    says: str
    names: tuple[str, ...]


def _each_once(panels: Sequence[Panel]) -> list[Panel]:
    """Join arrays of one shape that lie alike, whose pictures would be the same."""
    found = dict[tuple[object, ...], Panel]()
    for panel in panels:
        row = panel.row
        key = (row.shape, row.axes, str(row.spec), panel.says)
        first = found.get(key, panel._replace(names=()))
        found[key] = first._replace(names=first.names + panel.names)
    return list(found.values())


def layer_figure(experiment: Experiment, title: str) -> Figure:
    """Draw the matrices of one layer as they are stored, and the activations of one microbatch in
    the order in which a block makes them, as rectangles of shards coloured by the devices that hold
    them.

    Args:
      experiment: an experiment whose devices are here, or simulated.

    Raises:
      UserError: the model is a whole one of a program's own, which has no layers that are known.
    """
    in_parts(experiment.model, "the picture of a layer")
    plan = experiment.plan
    matrices = _matrices(experiment)
    made, local = _activations(activations(experiment), plan)
    groups = {
        "matrices of one layer, as they are stored": _each_once(matrices),
        "activations of one layer, for one microbatch": _each_once(made),
    }
    lines = [-(-len(panels) // _COLUMNS) for panels in groups.values()]
    figure = Figure(
        figsize=(
            _WIDTH * _COLUMNS,
            _HEIGHT * sum(lines) + _HEADING * (len(lines) + 1),
        ),
        dpi=100,
        layout="constrained",
    )
    figure.suptitle(title, fontsize=15)
    parts = figure.subfigures(len(groups), 1, height_ratios=lines, squeeze=False).ravel()
    for part, (heading, panels) in zip(parts, groups.items(), strict=True):
        part.suptitle(heading, fontsize=13, weight="bold")
        _draw_panels(part, panels, plan)
    if local:
        names = ", ".join(local)
        figure.supxlabel(f"not drawn, as each device has rows of its own: {names}", fontsize=11)
    return figure


def _matrices(experiment: Experiment) -> list[Panel]:
    """List the parameters of a layer that have two dims or more, the largest first."""
    plan = experiment.plan
    blocks = experiment.state.params["blocks"]
    layer = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
        blocks,
    )
    axes = jax.tree.map(
        lambda names: tuple(names)[1:],
        experiment.model.axes["blocks"],
        is_leaf=lambda names: isinstance(names, tuple),
    )
    rows = sorted(placements(layer, axes, plan), key=lambda row: -row.bytes)
    return [
        Panel(row, f"{bytes_text(row.bytes_per_device)} a device", (row.name,))
        for row in rows
        if is_matrix(row.axes)
    ]


def _activations(found: Sequence[Activation], plan: Plan) -> tuple[list[Panel], list[str]]:
    """List the activations that lie on the mesh as a whole, and the names of those of which each
    device has its own.
    """
    panels = []
    local = []
    for one in found:
        names = NAMES[one.name].axes[: len(one.shape)]
        axes = tuple(output_axis(axis, plan) for axis in names)
        pieces = math.prod(plan.size(axis) for axis in axes)
        whole = math.prod(one.shape) * np.dtype(one.dtype).itemsize
        if len(axes) != len(one.shape) or one.bytes * pieces != whole:
            local.append(one.name)
            continue
        spec = plan.sharding(axes, one.shape, one.name).spec
        row = Placement(one.name, one.shape, axes, spec, one.bytes, whole)
        says = f"{bytes_text(one.bytes)} a device, {_WORDS[one.action]}"
        panels.append(Panel(row, says, (one.name,)))
    return panels, local


def _draw_panels(part: SubFigure, panels: Sequence[Panel], plan: Plan) -> None:
    lines = -(-len(panels) // _COLUMNS)
    grid = part.subplots(lines, _COLUMNS, squeeze=False).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        draw_array(axes, panel.row, plan)
        shape = " x ".join(map(str, panel.row.shape))
        names = textwrap.fill(f"{', '.join(panel.names)}  {shape}", 48)
        axes.set_title(f"{names}\n{panel.says}", fontsize=10)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
