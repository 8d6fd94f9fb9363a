"""The picture of one layer: every collective of the step is in it, and it can be read."""

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
from jaxpar.base.mesh import describe, devices_needed
from jaxpar.base.plan import Overlap
from jaxpar.base.sharding import ShardingRules, placements
from jaxpar.models import Model
from jaxpar.plan.communication import StepCollective, step_collectives
from jaxpar.show.figures import save_figure
from jaxpar.show.layer import layer_figure
from jaxpar.train.plans import make_plan
from jaxpar.train.saved_activations import activations
from jaxpar.train.state import param_shapes

pytestmark = pytest.mark.quick

PLANS = {
    "experts": override(config_of("llama", "full", expert=2, fsdp=2, tensor=2), {"model.experts": 4}),
    "one device": config_of("gpt2"),
    "llama, fsdp x tensor, remat": config_of("llama", "full", compute="bfloat16", fsdp=4, tensor=2),
    "llama, rings, accumulation": dataclasses.replace(
        config_of("llama", accumulation=2, data=2, fsdp=2, tensor=2),
        rules=ShardingRules(state_embed=("fsdp", "data")), overlap=Overlap("ring", "ring"),
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


def drawn(config: Config) -> tuple[Figure, tuple[StepCollective, ...]]:
    model, plan = Model(config.model), make_plan(config, jax.devices()[: devices_needed(config.mesh)])
    rows, found = placements(param_shapes(model, plan), model.axes, plan), step_collectives(config, plan)
    return layer_figure(rows, activations(config, plan), found, plan, describe(dict(plan.mesh.shape))), found


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def label(one: StepCollective) -> str:
    times = f" x {one.count}" if one.count > 1 else ""
    return f"{one.kind} over {' x '.join(one.axes)}, {bytes_text(one.step_bytes / one.count)}{times}"


@pytest.mark.parametrize("name", PLANS)
def test_every_collective_is_in_it_once_and_no_text_runs_into_another_or_out_of_its_box(name):
    figure, found = drawn(PLANS[name])
    shown = [text for text in texts(figure) if " over " in text and "each dim is cut" not in text]
    assert Counter(shown) == Counter(map(label, found))
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
        "block_input [16, 64, 64], 16.00 KiB": "batch / fsdp=4 x seq / tensor=2 x whole",
        "k, v [64, 2, 32], 2.00 KiB each": "embed / fsdp=4 x kv_heads / tensor=2 x head_dim",
        "k [16, 64, 2, 32], 16.00 KiB": "batch / fsdp=4 x seq x kv_heads / tensor=2 x head_dim",
        "gate, up [64, 256], 8.00 KiB each": "embed / fsdp=4 x mlp / tensor=2",
        "down [256, 64], 8.00 KiB": "mlp / tensor=2 x embed / fsdp=4",
    }.items():
        assert shown[shown.index(name) + 1] == split
    gathered = shown.index("all-gather over tensor, 16.00 KiB x 2")
    assert shown[gathered + 1] == "attention: bfloat16 [4, 64, 64]"
    assert "attention: bfloat16 [4, 64, 64], again" in shown


def test_weights_are_as_wide_as_they_are_stored():
    shown = texts(drawn(override(PLANS["llama, fsdp x tensor, remat"], {"precision.params": "bfloat16"}))[0])
    assert "gate, up [64, 256], 4.00 KiB each" in shown


def test_a_pipeline_shows_what_its_stages_send():
    shown = texts(drawn(PLANS["llama, stage x fsdp x tensor, remat"])[0])
    assert {"from stage to stage", "sums of all stages, after the last tick", "head and loss"} <= set(shown)
    assert sum(text.startswith("ppermute over stage, 16.00 KiB") for text in shown) == 2


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
    assert "all-gather over data" in first
    assert first.rstrip().endswith("</svg>")
