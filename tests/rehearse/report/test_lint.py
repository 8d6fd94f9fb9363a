"""Each rule of the linter beside a program that breaks it and one that does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import pytest
from rehearsed_mlp import BYTES, MLP, gathered, library, plain, tasks_of, turned
from report_types import problems

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.base.layout.placements import placements
from jaxpar.base.layout.plan import Pipeline, Plan
from jaxpar.base.layout.sharding import ShardingRules
from jaxpar.hlo.program.tasks import Origin, Task
from jaxpar.models import Model
from jaxpar.rehearse.cost import Cost
from jaxpar.rehearse.report import lint
from jaxpar.rehearse.report.collectives import collective_rows
from jaxpar.rehearse.report.schema import CollectiveRow, LintFinding, Memory
from jaxpar.rehearse.timeline import TaskTime


@pytest.fixture(scope="module")
def plan(plan_of: Callable[..., Plan]) -> Plan:
    return plan_of(data=2, fsdp=4)


def assert_well_formed(found: list[LintFinding]) -> None:
    for finding in found:
        assert finding["rule"] in lint.LINTS
        assert list(problems(finding, LintFinding)) == []


def is_in_the_mlp(finding: LintFinding) -> bool:
    return (finding["scope"], finding["source"].partition(":")[0]) == (
        "block/mlp",
        "tests/rehearsed_mlp.py",
    )


# What `--fail-on` reads.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "large-copy, unplaned-collective",
            "unknown condition .*'unplanned-collective'",
        ),
        ("xyzzy", "unknown condition: .*does-not-fit, unplanned-collective, "),
        ("memory+5%", r"--fail-on memory\+5%: unknown condition"),
    ],
)
def test_what_is_wrong_with_a_condition_is_said(text, message):
    with pytest.raises(UserError, match=message):
        lint.parse_rules(text)
    assert lint.parse_rules("large-copy, does-not-fit,") == ["large-copy", "does-not-fit"]


def test_a_step_that_does_not_fit():
    memory: Memory = {
        "hbm_bytes": 2**30,
        "usable_bytes": 2**30,
        "total": 3 * 2**30,
        "fits": False,
        "categories": {},
        "host": {},
        "advice": [],
    }
    (found,) = lint.find("does-not-fit", lint.LintedStep(memory=memory))
    assert_well_formed([found])
    assert (found["severity"], found["message"], found["bytes"]) == (
        "error",
        "more than 1.00 GiB of HBM",
        2 * 2**30,
    )
    assert lint.find("does-not-fit", lint.LintedStep(memory={**memory, "fits": True})) == []


# Collectives.


def rows_of(form: Callable[..., Any], plan: Plan) -> list[CollectiveRow]:
    """A form's collectives beside what the library's form asks for."""
    _, asked = tasks_of(library, plan)
    return collective_rows(tasks_of(form, plan)[0], asked, dict(plan.mesh.shape))


def test_a_weight_gradient_summed_whole(plan):
    (found,) = lint.find("unplanned-collective", lint.LintedStep(collectives=rows_of(plain, plan)))
    assert_well_formed([found])
    assert (found["rule"], found["severity"]) == ("unplanned-collective", "error")
    assert is_in_the_mlp(found)
    assert found["message"] == (
        "all-reduce of 2.00 MiB over fsdp, 1 a step: "
        "the plan has a reduce-scatter over fsdp here: summed whole, twice the bytes"
    )
    assert found["bytes"] == 2 * BYTES * 3 / 4, "what is sent: twice three quarters of it"


def test_an_activation_gathered_by_xla_is_an_unplanned_collective(plan):
    found = lint.find("unplanned-collective", lint.LintedStep(collectives=rows_of(gathered, plan)))
    assert_well_formed(found)
    gathers = [finding for finding in found if finding["message"].startswith("all-gather")]
    assert {finding["rule"] for finding in gathers} == {"unplanned-collective"}
    assert all(map(is_in_the_mlp, gathers)) and gathers


def test_the_librarys_own_collectives_are_no_finding(plan):
    assert (
        lint.find("unplanned-collective", lint.LintedStep(collectives=rows_of(library, plan))) == []
    )


# Parameters.

MODEL = ModelConfig(
    "gpt2", vocab_size=4096, layers=1, embed=256, heads=4, mlp=1024, max_seq_len=2048
)


def replicated(plan: Plan, model: ModelConfig = MODEL) -> list[LintFinding]:
    subject = Model(model)
    found = lint.find(
        "replicated-parameter",
        lint.LintedStep(parameters=placements(subject.shapes(), subject.axes, plan), plan=plan),
    )
    assert_well_formed(found)
    return found


def test_parameters_that_the_rules_split_are_no_finding(plan_of):
    assert replicated(plan_of(fsdp=8)) == []
    assert replicated(plan_of(data=8)) == [], "a plan of copies: nothing could be split"


def test_a_parameter_that_no_rule_splits(plan_of):
    (found,) = replicated(plan_of(tensor=4))
    assert (found["rule"], found["severity"]) == ("replicated-parameter", "warning")
    assert (found["scope"], found["bytes"]) == ("embed.positions", 4 * 2048 * 256)
    assert found["message"] == (
        "embed.positions [2048, 256] (-, embed) is whole on every device, 2.00 MiB: "
        "no rule splits any of its dims over tensor"
    )


def test_parameters_in_bfloat16_may_be_whole_too(plan_of):
    """A table of positions of 2 MiB in float32 has one of 1 MiB."""
    plan = plan_of(tensor=4)
    subject = Model(MODEL)
    shapes = jax.tree.map(
        lambda leaf: leaf.update(dtype="bfloat16"),
        subject.shapes(),
    )
    (found,) = lint.find(
        "replicated-parameter",
        lint.LintedStep(parameters=placements(shapes, subject.axes, plan), plan=plan),
    )
    assert (found["scope"], found["bytes"]) == ("embed.positions", 2 * 2048 * 256)
    assert "1.00 MiB" in found["message"]


def test_a_rule_taken_away_shows(plan_of):
    plan = plan_of(fsdp=2, tensor=2)
    without = Plan(plan.mesh, ShardingRules(embed=(), mlp=()))
    names = {finding["scope"] for finding in replicated(without)}
    assert names == {"blocks.up", "blocks.down", "embed.positions"}


def test_vectors_and_small_matrices_may_be_whole(plan_of):
    vectors = ModelConfig(
        "gpt2", vocab_size=256, layers=2000, embed=256, heads=4, mlp=256, max_seq_len=16
    )
    assert replicated(plan_of(tensor=4), vectors) == []


def test_on_a_stage_a_parameter_may_be_whole_too(plan_of):
    """The stages have layers of their own, and nothing else is split over them."""
    model = dataclasses.replace(MODEL, layers=4)
    assert replicated(plan_of(stage=4, fsdp=2), model) == []
    assert replicated(plan_of(stage=8), dataclasses.replace(model, layers=8)) == [], (
        "a plan of copies"
    )
    plan = plan_of(stage=4, tensor=2)
    without = {
        finding["scope"]: finding
        for finding in replicated(Plan(plan.mesh, ShardingRules(mlp=())), model)
    }
    assert without.keys() == {"blocks.up", "blocks.down", "embed.positions"}
    assert without["blocks.up"]["message"] == (
        "blocks.up [4, 256, 1024] (layers, embed, mlp) is whole on every device of a stage, "
        "1.00 MiB: "
        "no rule splits any of its dims over tensor"
    )
    assert " of a stage" not in without["embed.positions"]["message"]


# Activations.


def test_a_mesh_axis_that_leaves_the_residual_stream_whole(plan_of):
    mesh = plan_of(fsdp=2, tensor=4).mesh
    (found,) = lint.find(
        "replicated-activation", lint.LintedStep(plan=Plan(mesh, ShardingRules(residual_seq=())))
    )
    assert_well_formed([found])
    assert (found["rule"], found["severity"]) == ("replicated-activation", "warning")
    assert (
        found["message"]
        == "the residual stream is whole over tensor=4: add it to rules.residual_seq"
    )
    assert lint.find("replicated-activation", lint.LintedStep(plan=Plan(mesh))) == []


def test_stages_split_no_activation(plan_of):
    """A microbatch is on one of them at a time."""
    mesh = plan_of(stage=2, fsdp=4).mesh
    four = Pipeline(microbatches=4)
    assert lint.find("replicated-activation", lint.LintedStep(plan=Plan(mesh, pipeline=four))) == []
    elsewhere = Plan(
        mesh,
        ShardingRules(stage=("fsdp",), batch=("data",)),
        pipeline=four,
    )
    (found,) = lint.find("replicated-activation", lint.LintedStep(plan=elsewhere))
    assert found["message"].startswith("the residual stream is whole over stage=2"), (
        "no stage here, but by its name"
    )


# Copies.


def copies(form: Callable[..., Any], plan: Plan) -> list[LintFinding]:
    tasks, _ = tasks_of(form, plan)
    found = lint.find(
        "large-copy", lint.LintedStep(tasks=tasks, seconds=sum(row.seconds for row in tasks))
    )
    assert_well_formed(found)
    return found


def test_a_transposed_copy_is_named(plan):
    """How the copies are shared out among fusions differs between versions of XLA:CPU."""

    def forward(form: Callable[..., Any]) -> list[LintFinding]:
        return [
            finding for finding in copies(form, plan) if "of the forward pass" in finding["message"]
        ]

    found = forward(turned)
    assert found and all(map(is_in_the_mlp, found))
    for finding in found:
        assert (finding["rule"], finding["severity"]) == ("large-copy", "warning")
        assert f",{MLP}" in finding["message"] and ", 1 times" in finding["message"]
    assert forward(plain) == []


def copied(seconds: float, asynchronous: bool = False) -> TaskTime:
    origin = Origin("update", "jaxpar/train/step/train_step.py:1", "update")
    task = Task(
        "copy.7",
        "copy",
        "copy",
        origin,
        bytes=100,
        shape="bf16[2,128]{1,0}",
        asynchronous=asynchronous,
    )
    return TaskTime(task, Cost(seconds / 3, ("compute",)), 3, 0.0)


def test_copies_of_a_line_count_together_and_only_a_share_of_the_step():
    (found,) = lint.find(
        "large-copy", lint.LintedStep(tasks=[copied(0.003), copied(0.002)], seconds=1.0)
    )
    assert (found["seconds"], found["bytes"]) == (0.005, 600)
    assert found["message"] == (
        "copies of the update pass take 0.5 % of the step, most of it copy.7, bf16[2,128]{1,0}, "
        "3 times"
    )
    assert (
        lint.find("large-copy", lint.LintedStep(tasks=[copied(0.003), copied(0.001)], seconds=1.0))
        == []
    )
    assert (
        lint.find(
            "large-copy", lint.LintedStep(tasks=[copied(0.5, asynchronous=True)], seconds=1.0)
        )
        == []
    ), "beside compute it costs nothing"


def test_a_lint_of_ones_own_is_a_rule_like_ours():
    @lint.register_lint("few-collectives", "error")
    def few(step):
        if not step.collectives:
            yield lint.Finding("nothing is sent", bytes=3)

    try:
        assert lint.parse_rules("few-collectives") == ["few-collectives"]
        (found,) = lint.find_all(lint.LintedStep())
        assert_well_formed([found])
        assert (found["rule"], found["severity"], found["bytes"]) == ("few-collectives", "error", 3)
        with pytest.raises(UserError, match=r"it may be does-not-fit, .*, few-collectives"):
            lint.parse_rules("many-collectives")
    finally:
        lint.LINTS.remove("few-collectives")
    assert lint.find_all(lint.LintedStep()) == []
