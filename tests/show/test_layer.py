"""The picture of one layer: every collective of the rows is in it, and it can be read."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import combinations

import jax
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from traced_steps import config_of

from jaxpar.base.config import Config, override
from jaxpar.base.console import bytes_text
from jaxpar.base.mesh import MESH_AXES, describe, devices_needed
from jaxpar.base.plan import Overlap
from jaxpar.base.sharding import ShardingRules
from jaxpar.models import Model
from jaxpar.plan.communication import Site, arrays, sites
from jaxpar.show.figures import save_figure
from jaxpar.show.layer import layer_figure
from jaxpar.train.plans import make_plan
from jaxpar.train.state import param_shapes

pytestmark = pytest.mark.quick

HSDP = ShardingRules(state_embed=("fsdp", "data"))
EXPERTS = config_of("llama", "full", expert=2, fsdp=2, tensor=2)
PLANS = {
    "experts": dataclasses.replace(EXPERTS, model=dataclasses.replace(EXPERTS.model, experts=4)),
    "one device": config_of("gpt2"),
    "llama, fsdp x tensor, remat": config_of("llama", "full", compute="bfloat16", fsdp=4, tensor=2),
    "llama, rings, accumulation": dataclasses.replace(
        config_of("llama", accumulation=2, data=2, fsdp=2, tensor=2), rules=HSDP, overlap=Overlap("ring", "ring")
    ),
    "gpt2, ZeRO-1": dataclasses.replace(
        config_of("gpt2", data=8), rules=ShardingRules(embed=(), state_embed=("data",))
    ),
    "gpt2, data x context x tensor": config_of("gpt2", data=2, context=2, tensor=2),
    "llama, stage x fsdp x tensor, remat": override(
        config_of("llama", "full", accumulation=2, stage=2, fsdp=2, tensor=2),
        {"model.layers": 3, "pipeline.microbatches": 2, "train.batch": 16},
    ),
}  # fmt: skip


def drawn(config: Config) -> tuple[Figure, list[Site]]:
    model, plan = Model(config.model), make_plan(config, jax.devices()[: devices_needed(config.mesh)])
    parameters = arrays(param_shapes(model, plan), model.axes)
    found = sites(parameters, config, plan)
    return layer_figure(parameters, found, config, plan, describe(dict(plan.mesh.shape))), found


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def label(site: Site, config: Config) -> str:
    """One execution's: the rows have a step's."""
    times = {"block": config.train.accumulation * config.model.layers, "update": 1}
    size = site.sent / times.get(site.scope.split("/")[0], config.train.accumulation)
    if config.mesh.stage > 1:
        size = site.sent_once
    name = "ring (ppermute)" if site.kind == "ppermute" else site.kind
    return f"{name} over {' x '.join(axis for axis in MESH_AXES if axis in site.axes)}, {bytes_text(size)}"


@pytest.mark.parametrize("name", PLANS)
def test_every_collective_is_in_it_as_often_as_in_the_rows(name):
    figure, found = drawn(PLANS[name])
    labels = Counter(label(site, PLANS[name]) for site in found)
    shown = [text.split(": ")[-1] for text in texts(figure) if " over " in text and "cut into" not in text]
    assert Counter(shown) == labels


@pytest.mark.parametrize("name", PLANS)
def test_no_text_runs_into_another_or_out_of_its_box(name):
    figure, _ = drawn(PLANS[name])
    renderer = FigureCanvasAgg(figure).get_renderer()
    placed = [text for text in figure.axes[0].texts if text.get_text()]
    boxes = {text: text.get_window_extent(renderer) for text in placed}
    for first, second in combinations(placed, 2):
        assert Bbox.intersection(boxes[first], boxes[second]) is None, (first.get_text(), second.get_text())
    frames = [patch.get_window_extent(renderer) for patch in figure.axes[0].patches]
    for text, box in boxes.items():
        assert figure.bbox.x0 < box.x0 and box.x1 < figure.bbox.x1, text.get_text()
        inside = [frame for frame in frames if frame.contains((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)]
        assert all(frame.x0 < box.x0 and box.x1 < frame.x1 for frame in inside), text.get_text()


def test_arrays_lie_where_the_plan_puts_them():
    """LLaMA over fsdp=4 x tensor=2 in bfloat16: B=16, S=64, D=64, 2 kv heads of 32, 256 mlp."""
    shown = texts(drawn(PLANS["llama, fsdp x tensor, remat"])[0])
    for name, split in {
        "residual stream [16, 64, 64], 16.00 KiB": "batch / fsdp=4 x seq / tensor=2 x embed",
        "gathered [16, 64, 64], 32.00 KiB": "batch / fsdp=4 x seq x embed",
        "k, v [64, 2, 32], 2.00 KiB each": "embed / fsdp=4 x kv_heads / tensor=2 x head_dim",
        "k, v [16, 64, 2, 32], 16.00 KiB each": "batch / fsdp=4 x seq x kv_heads / tensor=2 x head_dim",
        "gate, up [64, 256], 8.00 KiB each": "embed / fsdp=4 x mlp / tensor=2",
        "down [256, 64], 8.00 KiB": "mlp / tensor=2 x embed / fsdp=4",
    }.items():
        assert shown[shown.index(name) + 1] == split


def test_weights_are_as_wide_as_they_are_stored():
    shown = texts(drawn(override(PLANS["llama, fsdp x tensor, remat"], {"precision.params": "bfloat16"}))[0])
    assert "gate, up [64, 256], 4.00 KiB each" in shown


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("gpt2, data x context x tensor", "“seq / context=2 tensor=2”: cut into 4 over context and tensor."),
        ("gpt2, ZeRO-1", "“batch / data=8”: cut into 8 over data."),
        ("one device", "the bytes of it on each device."),
    ],
)
def test_the_legend_speaks_of_this_mesh(plan, says):
    (note,) = [text for text in texts(drawn(PLANS[plan])[0]) if text.startswith("Boxes: ")]
    assert note.endswith(says) and "`" not in note


def test_each_tables_gather_stands_under_it_by_name():
    shown = texts(drawn(config_of("gpt2", fsdp=4))[0])
    gathers = [i for i, text in enumerate(shown) if ": all-gather over fsdp" in text]
    assert [shown[i].split(":")[0] for i in gathers] == ["positions", "tokens"]
    assert all(shown[i - 2].startswith(shown[i].split(":")[0]) for i in gathers)


def test_the_head_of_a_pipeline_has_a_stages_part_of_the_tokens():
    """2 parts of 2 microbatches of B=4, S=64, D=64, of which a stage of 2 scores half."""
    shown = texts(drawn(PLANS["llama, stage x fsdp x tensor, remat"])[0])
    assert "residual stream [4, 64, 64], 16.00 KiB" in shown
    assert shown[shown.index("gathered [4, 32, 64], 16.00 KiB") + 1] == "batch / fsdp=2 x seq x embed"
    assert "attention, one of 3 layers" in shown
    section = shown.index("between the 2 stages, each tick")
    assert shown[section + 1 : section + 3] == ["activations", "ring (ppermute) over stage, 16.00 KiB"]
    assert "sums of all stages, after the last tick" in shown


def test_it_is_drawn_from_the_model():
    gpt2, llama = (" ".join(texts(drawn(config_of(family))[0])) for family in ("gpt2", "llama"))
    assert ("positions" in gpt2, "gate" in gpt2) == (True, False)
    assert ("positions" in llama, "gate" in llama) == (False, True)


def test_it_is_written_as_an_svg_the_same_each_time(tmp_path):
    paths = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in paths:
        save_figure(drawn(PLANS["gpt2, ZeRO-1"])[0], path)
    first, second = (path.read_text() for path in paths)
    assert first == second
    assert "updated parameters" in first
    assert first.rstrip().endswith("</svg>")
