"""Each rule of the linter beside a program that breaks it and one that does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import pytest
from rehearsed_mlp import BATCH, BYTES, MLP, SEQ, WIDTH, gathered, library, plain, tasks_of, turned
from report_types import problems

from jaxpar.base.config import Config, DataConfig, ModelConfig, TrainConfig
from jaxpar.base.plan import Pipeline, Plan
from jaxpar.base.sharding import ShardingRules, placements
from jaxpar.hlo.tasks import Place, Task
from jaxpar.models import Model
from jaxpar.rehearse.of_config import step_sizes
from jaxpar.rehearse.report import lint
from jaxpar.rehearse.report.collectives import collective_rows
from jaxpar.rehearse.report.schema import CollectiveRow, LintFinding
from jaxpar.rehearse.timeline.timeline import TaskTime


@pytest.fixture(scope="module")
def plan(plan_of: Callable[..., Plan]) -> Plan:
    return plan_of(data=2, fsdp=4)


def assert_well_formed(found: list[LintFinding]) -> None:
    for finding in found:
        assert finding["rule"] in lint.RULES
        assert list(problems(finding, LintFinding)) == []


def is_in_the_mlp(finding: LintFinding) -> bool:
    return (finding["scope"], finding["source"].partition(":")[0]) == ("block/mlp", "tests/rehearsed_mlp.py")


# Collectives.


def rows_of(form: Callable[..., Any], plan: Plan) -> list[CollectiveRow]:
    """A form's collectives beside what the library's form asks for."""
    _, asked = tasks_of(library, plan)
    return collective_rows(tasks_of(form, plan)[0], asked, dict(plan.mesh.shape), lambda found: "")


def test_a_weight_gradient_summed_whole(plan):
    (found,) = lint.unplanned_collectives(rows_of(plain, plan), lint.logical_axes(plan))
    assert_well_formed([found])
    assert (found["rule"], found["severity"], found["axis"]) == ("whole-all-reduce", "error", "batch, embed")
    assert is_in_the_mlp(found)
    assert found["message"] == (
        "all-reduce of 2.00 MiB over fsdp, 1 a step: "
        "the plan has a reduce-scatter over fsdp here: summed whole, twice the bytes"
    )
    assert found["bytes"] == 2 * BYTES * 3 / 4, "what is sent: twice three quarters of it"


def test_an_activation_gathered_by_xla_is_an_unplanned_collective(plan):
    found = lint.unplanned_collectives(rows_of(gathered, plan), lint.logical_axes(plan))
    assert_well_formed(found)
    gathers = [finding for finding in found if finding["message"].startswith("all-gather")]
    assert {finding["rule"] for finding in gathers} == {"unplanned-collective"}
    assert all(map(is_in_the_mlp, gathers)) and gathers


def test_the_librarys_own_collectives_are_no_finding(plan):
    assert lint.unplanned_collectives(rows_of(library, plan), lint.logical_axes(plan)) == []


def test_the_logical_axes_of_mesh_axes(plan_of):
    axes = lint.logical_axes(plan_of(fsdp=4, tensor=2))
    assert axes["fsdp"] == "batch, embed"
    assert axes["tensor"] == "residual_seq, heads, kv_heads, mlp, vocab"
    assert axes["data"] == axes["context"] == ""


# Parameters.

MODEL = ModelConfig("gpt2", vocab_size=4096, layers=1, embed=256, heads=4, mlp=1024, max_seq_len=2048)


def replicated(plan: Plan, model: ModelConfig = MODEL) -> list[LintFinding]:
    subject = Model(model)
    found = lint.replicated_parameters(placements(subject.shapes(), subject.axes, plan), plan)
    assert_well_formed(found)
    return found


def test_parameters_that_the_rules_split_are_no_finding(plan_of):
    assert replicated(plan_of(fsdp=8)) == []
    assert replicated(plan_of(data=8)) == [], "a plan of copies: nothing could be split"


def test_a_parameter_that_no_rule_splits(plan_of):
    (found,) = replicated(plan_of(tensor=4))
    assert (found["rule"], found["severity"], found["axis"]) == ("replicated-parameter", "warning", "embed")
    assert (found["scope"], found["bytes"]) == ("embed.positions", 4 * 2048 * 256)
    assert found["message"] == (
        "embed.positions [2048, 256] (-, embed) is whole on every device, 2.00 MiB: "
        "no rule splits any of its dims over tensor"
    )


def test_parameters_in_bfloat16_may_be_whole_too(plan_of):
    """A table of positions of 2 MiB in float32 has one of 1 MiB."""
    plan, subject = plan_of(tensor=4), Model(MODEL)
    shapes = jax.tree.map(lambda leaf: leaf.update(dtype="bfloat16"), subject.shapes())
    (found,) = lint.replicated_parameters(placements(shapes, subject.axes, plan), plan)
    assert (found["scope"], found["bytes"]) == ("embed.positions", 2 * 2048 * 256)
    assert "1.00 MiB" in found["message"]


def test_a_rule_taken_away_shows(plan_of):
    plan = plan_of(fsdp=2, tensor=2)
    without = Plan(plan.mesh, ShardingRules(embed=(), mlp=()))
    names = {finding["scope"]: finding["axis"] for finding in replicated(without)}
    assert names == {"blocks.up": "embed", "blocks.down": "mlp", "embed.positions": "embed"}


def test_vectors_and_small_matrices_may_be_whole(plan_of):
    vectors = ModelConfig("gpt2", vocab_size=256, layers=2000, embed=256, heads=4, mlp=256, max_seq_len=16)
    assert replicated(plan_of(tensor=4), vectors) == []


def test_on_a_stage_a_parameter_may_be_whole_too(plan_of):
    """The stages have layers of their own, and nothing else is split over them."""
    model = dataclasses.replace(MODEL, layers=4)
    assert replicated(plan_of(stage=4, fsdp=2), model) == []
    assert replicated(plan_of(stage=8), dataclasses.replace(model, layers=8)) == [], "a plan of copies"
    plan = plan_of(stage=4, tensor=2)
    without = {finding["scope"]: finding for finding in replicated(Plan(plan.mesh, ShardingRules(mlp=())), model)}
    assert without.keys() == {"blocks.up", "blocks.down", "embed.positions"}
    assert without["blocks.up"]["message"] == (
        "blocks.up [4, 256, 1024] (layers, embed, mlp) is whole on every device of a stage, 1.00 MiB: "
        "no rule splits any of its dims over tensor"
    )
    assert " of a stage" not in without["embed.positions"]["message"]


# Activations.

CONFIG = Config(
    model=ModelConfig("gpt2", vocab_size=4096, layers=1, embed=WIDTH, heads=4, mlp=MLP), data=DataConfig(seq_len=SEQ),
    train=TrainConfig(batch=BATCH),
)  # fmt: skip


def whole_of(tasks: list[TaskTime], config: Config, plan: Plan) -> list[LintFinding]:
    sizes = step_sizes(config, plan).sizes
    return lint.replicated_activations(tasks, plan, sizes, lint.axes_of_sizes(plan, sizes))


def activations(form: Callable[..., Any], plan: Plan) -> list[LintFinding]:
    found = whole_of(tasks_of(form, plan)[0], CONFIG, plan)
    assert_well_formed(found)
    return found


def test_an_activation_that_holds_every_sequence(plan):
    found = activations(gathered, plan)
    assert {(finding["rule"], finding["severity"], finding["axis"]) for finding in found} == {
        ("replicated-activation", "error", "batch")
    }
    assert all(map(is_in_the_mlp, found))
    assert any(
        finding["message"] == f"f32[{BATCH},{SEQ},{MLP}] holds all 16 sequences, which the plan splits over 8"
        or finding["message"] == f"f32[{BATCH * SEQ},{MLP}] holds all 16 sequences, which the plan splits over 8"
        for finding in found
    ), [finding["message"] for finding in found]


def test_activations_split_as_the_plan_says_are_no_finding(plan):
    assert activations(library, plan) == activations(plain, plan) == []


def at(shape: str, size: int, seconds: float, line: int = 1) -> TaskTime:
    place = Place("block/mlp", f"models/llama.py:{line}", "forward")
    task = Task("fusion.1", "fusion", "fusion", place, bytes=size, shape=shape, split_by="compiler")
    return TaskTime(task, (0,), 1, seconds, 0.0)


def test_a_line_is_one_finding_with_its_largest_array(plan):
    rows = [at("f32[16,24,32]", 10, 1.0), at("f32[384,64]", 30, 2.0), at("f32[2,16,24,32]", 20, 4.0)]
    rows.append(at("f32[16,24,4]", 5, 8.0, line=2))
    first, second = whole_of(rows, CONFIG, plan)
    assert (first["message"].split()[0], first["bytes"], first["seconds"]) == ("f32[384,64]", 30, 7.0)
    assert (second["source"], second["seconds"]) == ("models/llama.py:2", 8.0)


@pytest.mark.parametrize("shape", ["f32[2,24,32]", "f32[16,32,24]", "f32[16,24]", "s32[384]", "f32[2,2,16,24,32]"])
def test_other_shapes_are_no_finding(plan, shape):
    assert whole_of([at(shape, 10, 1.0)], CONFIG, plan) == []


def test_as_many_rows_as_tokens_may_be_something_else(plan):
    as_wide = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, mlp=BATCH * SEQ))
    rows = [at("f32[384,512]", 10, 1.0)]
    assert whole_of(rows, as_wide, plan) == []
    assert len(whole_of(rows, CONFIG, plan)) == 1


@pytest.mark.parametrize("change", [
    {"split_by": "author"}, {"split_by": ""}, {"place": Place("update", "", "update")},
    {"place": Place("accumulate", "", "backward")},
])  # fmt: skip
def test_only_activations_that_the_compiler_split_count(plan, change):
    """A matmul in 16 parts along what is contracted is [16, S, D]; copies of a compiler's own have no known author."""
    row = at("f32[16,24,32]", 10, 1.0)
    changed = dataclasses.replace(row, task=dataclasses.replace(row.task, **change))
    assert whole_of([changed], CONFIG, plan) == []


def test_rows_of_experts_may_be_as_many_as_tokens(plan):
    routed = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, experts=4))
    assert whole_of([at("f32[384,512]", 10, 1.0)], routed, plan) == []
    assert len(whole_of([at("f32[16,24,32]", 10, 1.0)], routed, plan)) == 1


def test_as_many_sequences_as_heads_or_as_pieces_may_be_something_else(plan_of):
    """With stages a microbatch has few: [1, heads, S, head_dim] of one sequence is no array of four."""
    mesh, sizes = plan_of(stage=2, fsdp=4).mesh, dataclasses.replace(MODEL, layers=2, heads=8)
    plan, config = Plan(mesh, pipeline=Pipeline(microbatches=4)), dataclasses.replace(CONFIG, model=sizes)

    def found(shape: str, **changes: Any) -> int:
        changed = dataclasses.replace(config, model=dataclasses.replace(sizes, **changes))
        return len(whole_of([at(shape, 10, 1.0)], changed, plan))

    per_head, gradient = f"f32[1,4,{SEQ},64]", f"f32[4,{SEQ},1024]"  # gradient: in pieces for each of fsdp=4
    assert found(per_head) == found(gradient) == 1
    assert found(per_head, heads=4) == 0
    assert found(gradient, embed=SEQ, head_dim=8) == 0


def test_nothing_is_split_on_a_plan_without_data_parallelism(plan_of):
    assert whole_of([at("f32[16,24,32]", 10, 1.0)], CONFIG, plan_of(tensor=2)) == []


def test_a_mesh_axis_that_leaves_the_residual_stream_whole(plan_of):
    mesh = plan_of(fsdp=2, tensor=4).mesh
    (found,) = lint.whole_residual_stream(Plan(mesh, ShardingRules(residual_seq=())))
    assert_well_formed([found])
    assert (found["axis"], found["severity"]) == ("residual_seq", "warning")
    assert found["message"] == "the residual stream is whole over tensor=4: add it to rules.residual_seq"
    assert lint.whole_residual_stream(Plan(mesh)) == []


def test_stages_split_no_activation(plan_of):
    """A microbatch is on one of them at a time: its sequences are what must be split."""
    mesh, four = plan_of(stage=2, fsdp=4).mesh, Pipeline(microbatches=4)
    plan, sizes = Plan(mesh, pipeline=four), dataclasses.replace(MODEL, layers=2, heads=8)
    config = dataclasses.replace(CONFIG, model=sizes)
    assert lint.whole_residual_stream(plan) == []
    one = BATCH // 4
    (found,) = whole_of([at(f"f32[3,{one},{SEQ},32]", 10, 1.0)], config, plan)
    assert found["message"] == f"f32[3,{one},{SEQ},32] holds all {one} sequences, which the plan splits over 4"
    assert whole_of([at(f"f32[{one // 4},{SEQ},32]", 10, 1.0)], config, plan) == []
    elsewhere = Plan(mesh, ShardingRules(stage=("fsdp",), batch=("data",)), pipeline=four)
    (found,) = lint.whole_residual_stream(elsewhere)
    assert found["message"].startswith("the residual stream is whole over stage=2"), "no stage here, but by its name"


# Copies.


def copies(form: Callable[..., Any], plan: Plan) -> list[LintFinding]:
    tasks, _ = tasks_of(form, plan)
    found = lint.large_copies(tasks, sum(row.seconds for row in tasks), {MLP: {"mlp"}, SEQ: {"seq"}})
    assert_well_formed(found)
    return found


def test_a_transposed_copy_is_named_with_its_axes(plan):
    """How the copies are shared out among fusions differs between versions of XLA:CPU."""

    def forward(form: Callable[..., Any]) -> list[LintFinding]:
        return [finding for finding in copies(form, plan) if "of the forward pass" in finding["message"]]

    found = forward(turned)
    assert found and all(map(is_in_the_mlp, found))
    for finding in found:
        assert (finding["rule"], finding["severity"]) == ("large-copy", "warning")
        assert finding["axis"] in ("mlp", "mlp, seq")
        assert f",{MLP}" in finding["message"] and ", 1 times" in finding["message"]
    assert forward(plain) == []


def copied(seconds: float, asynchronous: bool = False) -> TaskTime:
    place = Place("update", "jaxpar/train/step.py:1", "update")
    task = Task("copy.7", "copy", "copy", place, bytes=100, shape="bf16[2,128]{1,0}", asynchronous=asynchronous)
    return TaskTime(task, (0,), 3, seconds, 0.0)


def test_copies_of_a_line_count_together_and_only_a_share_of_the_step():
    (found,) = lint.large_copies([copied(0.003), copied(0.002)], 1.0)
    assert (found["seconds"], found["bytes"], found["axis"]) == (0.005, 600, "")
    assert found["message"] == (
        "copies of the update pass take 0.5 % of the step, most of it copy.7, bf16[2,128]{1,0}, 3 times"
    )
    assert lint.large_copies([copied(0.003), copied(0.001)], 1.0) == []
    assert lint.large_copies([copied(0.5, asynchronous=True)], 1.0) == [], "beside compute it costs nothing"


def test_sizes_that_only_one_axis_has(plan_of):
    config = Config(
        model=ModelConfig("llama", vocab_size=1000, layers=3, embed=256, heads=8, kv_heads=2, mlp=704, max_seq_len=128),
        data=DataConfig(seq_len=128), train=TrainConfig(batch=48, accumulation=2),
    )  # fmt: skip

    def names(plan: Plan) -> dict[int, str]:
        axes = lint.axes_of_sizes(plan, step_sizes(config, plan).sizes)
        return {size: min(known) for size, known in axes.items() if len(known) == 1}

    sizes = names(plan_of(fsdp=4, tensor=2))
    assert sizes[24] == "batch" and sizes[6] == "batch"
    assert sizes[704] == sizes[352] == "mlp"
    assert sizes[1024] == sizes[512] == "vocab", "rounded up"
    assert sizes[256] == "embed" and sizes[3] == "layers"
    assert sizes[128] == "seq"
    assert 64 not in sizes, "embed on each fsdp rank, and the residual stream's sequence"
    assert 8 in sizes
    assert sizes[32] == "head_dim"
    stages = Plan(plan_of(stage=2, fsdp=4).mesh, pipeline=Pipeline(microbatches=2))
    sizes = names(stages)
    assert sizes[12] == sizes[3] == "batch", "of a microbatch of the pipeline"
    assert sizes[4] == "layers", "three, in four places"
