"""Over which mesh axes a collective runs, and whether the plan asked for it: by hand, and in
programs XLA made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import jax
import numpy as np
import pytest
from rehearsed_mlp import BYTES, library, plain, tasks_of
from traced_steps import FAST, config_of, staged, traced

from jaxpar.base.layout.plan import Plan
from jaxpar.hlo.program.tasks import Collective, CollectiveKind, Origin, Task, walk
from jaxpar.hlo.read import read_program
from jaxpar.rehearse.cost import Cost
from jaxpar.rehearse.report import collectives as subject
from jaxpar.rehearse.report.collectives import (
    SMALL,
    RequestedRows,
    axes_of,
    collective_rows,
    scope_of,
    sent_bytes,
)
from jaxpar.rehearse.requested_collectives import Requested
from jaxpar.rehearse.timeline import TaskTime

MESH = {"data": 2, "fsdp": 4, "tensor": 3}
GRID = np.arange(24).reshape(2, 4, 3)
MIB = 2**20


def groups_along(*axes: str) -> tuple[tuple[int, ...], ...]:
    """Groups of devices that differ along these axes of MESH."""
    order = [axis for axis in MESH if axis not in axes] + list(axes)
    size = int(np.prod([MESH[axis] for axis in axes]))
    turned = GRID.transpose([list(MESH).index(axis) for axis in order]).reshape(
        -1,
        size,
    )
    return tuple(tuple(int(device) for device in row) for row in turned)


def collective(kind: CollectiveKind, axes: tuple[str, ...], size: int) -> Collective:
    return Collective(kind, groups_along(*axes), size, "f32")


def row(found: Collective, scope: str = "block/mlp", count: int = 1) -> TaskTime:
    task = Task(
        "x",
        found.kind,
        "collective",
        Origin(scope, "models/llama.py:1", "forward"),
        collective=found,
    )
    return TaskTime(task, Cost(1e-3, ()), count, 0.0)


def asks(
    kind: CollectiveKind, axes: str, size: int, count: int = 1, scope: str = "jvp(block)/mlp"
) -> Requested:
    return Requested(kind, frozenset(axes.split()), size, count, scope, "float32")


def answer(plan: list[Requested], *rows: TaskTime) -> str:
    """What there is against the first, the others beside it; empty = it is the plan's."""
    return RequestedRows(plan, MESH, rows).objection(rows[0])


# Axes.


@pytest.mark.parametrize(
    "axes",
    [
        ("data",),
        ("fsdp",),
        ("tensor",),
        ("data", "fsdp"),
        ("fsdp", "tensor"),
        ("data", "tensor"),
        ("data", "fsdp", "tensor"),
    ],
)
def test_the_axes_of_groups(axes):
    assert axes_of(collective("all-reduce", axes, 4), MESH) == axes


def test_the_order_inside_a_group_does_not_matter():
    turned = tuple(tuple(reversed(group)) for group in groups_along("fsdp"))
    assert axes_of(Collective("all-gather", turned, 4, "f32"), MESH) == ("fsdp",)


def test_part_of_an_axis_is_that_axis():
    assert axes_of(Collective("all-gather", ((0, 3), (6, 9)), 4, "f32"), MESH) == ("fsdp",)


def test_the_axes_of_a_ring_are_those_along_which_it_steps():
    ring = tuple((group[i], group[(i + 1) % 4]) for group in groups_along("fsdp") for i in range(4))
    assert axes_of(Collective("ppermute", ring, 4, "f32"), MESH) == ("fsdp",)
    diagonal = tuple((int(GRID[0, i, 0]), int(GRID[1, (i + 1) % 4, 0])) for i in range(4))
    assert axes_of(Collective("ppermute", diagonal, 4, "f32"), MESH) == ("data", "fsdp")
    still = tuple((device, device) for device in range(24))
    assert axes_of(Collective("ppermute", still, 4, "f32"), MESH) == ()


def test_axes_of_one_device_are_never_among_them():
    assert axes_of(
        Collective("all-gather", ((0, 1), (2, 3)), 4, "f32"), {"a": 1, "b": 2, "c": 1, "d": 2}
    ) == ("d",)


@pytest.mark.parametrize(
    "kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ppermute"]
)
def test_bytes_sent_are_those_of_the_reader(kind):
    found = collective(kind, ("fsdp",), 1200)
    assert sent_bytes(asks(kind, "fsdp", 1200), MESH) == found.sent_bytes


def test_scopes_are_those_of_the_reader():
    paths = {
        "jvp(block)/mlp": "block/mlp",
        "transpose(jvp())/block/mlp": "block/mlp",
        "transpose(jvp())/rematted_computation/block/attention/core": "block/attention/core",
        "checkpointed/jvp(loss)": "checkpointed/loss",
        "backward_tick/transpose(jvp(jvp()))/rematted_computation/block/mlp": "block/mlp",
        "backward_tick/transpose(backward_tick)/jvp(embed)": "embed",
        "forward_tick/send": "send",
        "": "",
    }
    assert {path: scope_of(asks("all-gather", "fsdp", 4, scope=path)) for path in paths} == paths


# What was asked for.


def test_as_written():
    found = answer(
        [asks("all-gather", "fsdp", MIB)],
        row(collective("all-gather", ("fsdp",), MIB)),
    )
    assert found == ""


def test_merged_in_its_scope():
    plan = [
        asks("reduce-scatter", "fsdp", 2 * MIB),
        asks("reduce-scatter", "fsdp", 3 * MIB),
    ]
    found = answer(plan, row(collective("reduce-scatter", ("fsdp",), 5 * MIB)))
    assert found == ""


def test_merged_over_scopes():
    plan = [
        asks("all-reduce", "data", 2 * MIB),
        asks("all-reduce", "data", 3 * MIB, scope="loss"),
    ]
    for scope in ("block/mlp", "", "update"):
        found = answer(
            plan,
            row(collective("all-reduce", ("data",), 5 * MIB), scope),
        )
        assert found == ""


def test_moved_to_another_scope():
    plan = [
        asks("all-gather", "fsdp", 2 * MIB),
        asks("all-gather", "fsdp", 3 * MIB, scope="loss"),
    ]
    assert answer(plan, row(collective("all-gather", ("fsdp",), 3 * MIB), "head")) == ""


def test_a_little_more_than_asked_for_is_padding():
    plan = [asks("all-gather", "fsdp", 100 * MIB)]
    assert answer(plan, row(collective("all-gather", ("fsdp",), 104 * MIB))) == ""
    assert answer(plan, row(collective("all-gather", ("fsdp",), 106 * MIB)))


def test_more_than_asked_for_in_a_scope_that_asks_is_not_planned():
    """A small sum in the loss does not excuse one of all its scores."""
    plan = [asks("all-reduce", "tensor", 4096, scope="jvp(loss)")]
    small, large = (
        row(collective("all-reduce", ("tensor",), size), "loss") for size in (4096, 64 * MIB)
    )
    assert answer(plan, small, large) == ""
    assert (
        answer(plan, large, small)
        == "the plan has a smaller all-reduce over tensor here, not this one"
    )


def test_more_often_than_asked_for_is_planned_by_its_size_only():
    plan = [asks("all-gather", "fsdp", 2 * MIB, count=4)]
    assert answer(plan, row(collective("all-gather", ("fsdp",), 2 * MIB), count=8)) == ""
    assert answer(
        plan,
        row(collective("all-gather", ("fsdp",), 4 * MIB), count=8),
    )


def test_over_other_axes_is_not_planned():
    found = answer(
        [asks("all-gather", "fsdp", MIB)],
        row(
            collective(
                "all-gather",
                ("fsdp", "tensor"),
                MIB,
            )
        ),
    )
    assert found == "the plan has no all-gather over fsdp x tensor here"


def test_of_another_kind_is_not_planned():
    found = answer(
        [asks("all-gather", "tensor", 8 * MIB)],
        row(
            collective(
                "all-to-all",
                ("tensor",),
                8 * MIB,
            )
        ),
    )
    assert found == "the plan has no all-to-all over tensor here"


@pytest.mark.parametrize("axes", [("fsdp",), ("data", "fsdp")])
def test_summed_whole_where_the_plan_scatters(axes):
    plan = [
        asks("reduce-scatter", "fsdp", 8 * MIB),
        asks("all-reduce", "data", 2 * MIB),
    ]
    found = answer(plan, row(collective("all-reduce", axes, 8 * MIB)))
    assert found == "the plan has a reduce-scatter over fsdp here: summed whole, twice the bytes"


def test_a_small_one_is_xlas_own():
    found = answer([], row(collective("all-reduce", ("data",), SMALL - 1)))
    assert found == ""
    assert answer([], row(collective("all-reduce", ("data",), SMALL)))


def ring(axis: str, size: int, steps: int) -> TaskTime:
    k = MESH[axis]
    pairs = tuple((group[i], group[(i + 1) % k]) for group in groups_along(axis) for i in range(k))
    return row(Collective("ppermute", pairs, size, "bf16"), count=steps)


def test_a_ring_stands_for_what_it_makes():
    plan = [asks("all-gather", "fsdp", 8 * MIB)]
    found = answer(plan, ring("fsdp", 2 * MIB, 3))
    assert found == ""
    more = answer(plan, ring("fsdp", 2 * MIB, 6))
    assert more == "the plan has no ppermute over fsdp here"


def test_a_ring_over_two_axes_steps_along_one_at_a_time():
    plan = [asks("all-gather", "fsdp tensor", 12 * MIB, scope="loss")]
    assert answer(plan, ring("tensor", MIB, 2)) == ""
    assert answer(plan, ring("data", MIB, 1))


# As XLA makes them.


@pytest.fixture(scope="module")
def plan(plan_of: Callable[..., Plan]) -> Plan:
    return plan_of(data=2, fsdp=4)


def test_an_mlp_of_this_library_sends_what_it_asks_for(plan):
    tasks, asked = tasks_of(library, plan)
    rows = collective_rows(tasks, asked, dict(plan.mesh.shape))
    assert all(row["planned"] for row in rows)
    sent: Counter[str] = Counter()
    for row in rows:
        assert row["axes"] == (["data"] if row["kind"] == "all-reduce" else ["fsdp"])
        sent[row["kind"]] += row["bytes"] * row["count"]
    # Two weights, gathered once for both directions; their gradients scattered, and a quarter of
    # each summed over data.
    assert sent == {
        "all-gather": 2 * BYTES,
        "reduce-scatter": 2 * BYTES,
        "all-reduce": 2 * BYTES / 4,
    }
    assert {row["scope"] for row in rows} == {"block/mlp"}


def test_an_mlp_left_to_xla_sums_a_weight_gradient_whole(plan):
    (_, asked), (tasks, own) = (
        tasks_of(library, plan),
        tasks_of(
            plain,
            plan,
        ),
    )
    assert own == [], "no op of it asks for anything"
    rows = collective_rows(tasks, asked, dict(plan.mesh.shape))
    (found,) = [row for row in rows if not row["planned"]]
    assert (found["kind"], found["axes"], found["bytes"]) == ("all-reduce", ["fsdp"], BYTES)
    assert (found["scope"], found["phase"], found["source"].partition(":")[0]) == (
        "block/mlp",
        "backward",
        "tests/rehearsed_mlp.py",
    )
    assert (
        found["reason"]
        == "the plan has a reduce-scatter over fsdp here: summed whole, twice the bytes"
    )


@pytest.mark.slow
def test_a_pipeline_sends_what_it_asks_for(monkeypatch):
    """In every scope, small ones too but for norms and biases; as often as there are ticks."""
    monkeypatch.setattr(subject, "SMALL", 7 * 2**10)
    config = staged(
        config_of("llama", "full", stage=2, fsdp=2, tensor=2),
        "1f1b",
        4,
    )
    step, asked, mesh = traced(config, jax.devices())
    program = read_program(step.lower().compile(compiler_options=FAST["cpu"]).as_text())
    tasks = [TaskTime(task, Cost(0.0, ()), count, 0.0) for task, count in walk(program.nodes)]
    rows = collective_rows(tasks, asked, mesh)
    assert [row for row in rows if not row["planned"]] == []
    stages = Counter[tuple[str, str]]()
    for row in rows:
        if row["axes"] == ["stage"] and row["bytes"] > 100:
            stages[row["scope"], row["kind"]] += row["count"]
    ticks = 4 + 2 - 1
    assert stages.pop(("send", "ppermute")) == 2 * ticks
    assert stages.pop(("share", "reduce-scatter")) == stages.pop(("share", "all-gather")) == 4
    assert {kind for _, kind in stages} == {"all-reduce"}, (
        "of the ends' gradients, in one or in several"
    )
    phases = {row["phase"] for row in rows if row["scope"].startswith("block/")}
    assert phases == {"forward", "recomputed", "backward"}
