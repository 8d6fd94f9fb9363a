"""`verify` with stages: every schedule gives the gradients of one device, alone and with everything
else, and planted faults do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import a_third, some
from verified_tables import print_table

from jaxpar.base.config import Config, override
from jaxpar.models import Model
from jaxpar.parallel.pipeline import executor, ticks
from jaxpar.parallel.pipeline.program import Rows, TickProgram
from jaxpar.verify.of_config import checks as verify
from jaxpar.verify.of_config.losses_and_gradients import parameter_order

Plan = tuple[str, dict[str, int], dict[str, Any]]
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"model.family": "gpt2", "model.heads": 8},
    "gpt2 untied": {"model.family": "gpt2", "model.heads": 8, "model.tied_head": False},
    "llama": {
        "model.family": "llama",
        "model.heads": 8,
        "model.kv_heads": 4,
        "model.tied_head": False,
    },
    "llama tied": {
        "model.family": "llama",
        "model.heads": 8,
        "model.kv_heads": 4,
        "train.label_smoothing": 0.1,
    },
    "moe": {
        "model.family": "llama",
        "model.heads": 8,
        "model.experts": 8,
        "train.balance_loss": 0.1,
        "train.router_z_loss": 0.05,
    },
}
COMMON = {"model.vocab_size": 250, "data.seq_len": 240, "precision.compute": "float32"}
RING = {"overlap.gather": "ring", "overlap.scatter": "ring"}
FULL = {"memory.policy": "full", "pipeline.stash": "stage"}
BLOCKS = {"memory.policy": "full", "pipeline.stash": "blocks"}
PACKED = {"data.pack": True}
TWICE = {"train.accumulation": 2}
BFLOAT16 = {"precision.compute": "bfloat16"}


def config_of(
    model: str,
    mesh: dict[str, int],
    changes: dict[str, Any],
) -> Config:
    """A config whose batch has two sequences for each microbatch and shard."""
    stages = mesh["stage"]
    v = changes.get("pipeline.virtual", 1)
    sizes = {f"mesh.{axis}": size for axis, size in mesh.items()}
    shards = mesh.get("data", 1) * mesh.get("fsdp", 1) * mesh.get("expert", 1)
    batch = (
        2
        * shards
        * changes.get("pipeline.microbatches", stages)
        * changes.get("train.accumulation", 1)
    )
    more = {"train.batch": batch, "model.layers": 2 * stages * v}
    return override(Config(), COMMON | MODELS[model] | sizes | more | changes)


def piped(
    schedule: str,
    M: int,
    virtual: int = 1,
) -> dict[str, Any]:
    return {"pipeline.schedule": schedule, "pipeline.microbatches": M, "pipeline.virtual": virtual}


def uneven(stages: int, virtual: int = 1) -> dict[str, Any]:
    """One layer more than there are virtual stages, and two on one in the middle."""
    counts = [1] * (stages * virtual)
    counts[len(counts) // 2] = 2
    return {"model.layers": sum(counts), "pipeline.layers": tuple(counts)}


def listed() -> list[Plan]:
    plans: list[Plan] = []
    forms = [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 2),
        ("looped", 2),
    ]
    others = [FULL, {}, BLOCKS, PACKED]
    for P in (2, 4, 8):
        for at, M in enumerate((P, 2 * P, 3 * P + 1)):
            for n, (schedule, v) in enumerate(forms):
                # so that models, policies and layers meet every schedule and size
                turn = P // 2 + at + n
                changes = piped(schedule, M, v) | others[turn % 4]
                changes |= uneven(P, v) if turn % 3 == 0 else {}
                plans.append((list(MODELS)[turn % 4], {"stage": P}, changes))
    plans += [
        ("llama", {"stage": 2}, piped(name, 5, 1) | uneven(2)) for name in ("interleaved", "looped")
    ]
    # With everything else inside a stage.
    for n, (schedule, v) in enumerate(forms):
        models = [*MODELS][n % 4], [*MODELS][(n + 2) % 4]
        plans += [
            (
                models[0],
                {"stage": 2, "fsdp": 4},
                piped(schedule, 4, v) | FULL | TWICE,
            ),
            (
                models[1],
                {"stage": 4, "tensor": 2},
                piped(schedule, 5, v) | RING | uneven(4, v),
            ),
            (
                models[0],
                {"stage": 2, "context": 2, "fsdp": 2},
                piped(schedule, 7, v) | PACKED | BLOCKS,
            ),
            # GPT-2's key bias has no gradient but rounding, in bfloat16 near the tolerance on one
            # device too.
            (
                ("llama", "llama tied")[n % 2],
                {"stage": 2, "tensor": 2, "context": 2},
                piped(schedule, 4, v) | RING | BFLOAT16,
            ),
        ]
    plans += [
        (
            "moe",
            {"stage": 2, "expert": 4},
            piped("1f1b", 5) | uneven(2),
        ),
        (
            "moe",
            {"stage": 2, "expert": 2, "tensor": 2},
            piped("gpipe", 4) | RING,
        ),
        (
            "moe",
            {"stage": 2, "expert": 2, "fsdp": 2},
            piped("interleaved", 4, 2) | FULL | PACKED,
        ),
        (
            "llama",
            {"stage": 2, "data": 2, "tensor": 2},
            piped("1f1b", 4) | {"overlap.domino": "on"} | FULL,
        ),
        (
            "llama",
            {"stage": 2, "data": 2, "tensor": 2},
            piped("1f1b", 4) | {"model.sublayers": "parallel"},
        ),
        (
            "llama",
            {"stage": 2, "data": 4},
            piped("1f1b", 4) | {"rules.state_embed": ("data",), "rules.embed": ()},
        ),
        (
            "llama",
            {"stage": 2, "tensor": 4},
            piped("gpipe", 4) | {"model.heads": 6, "model.kv_heads": 2, "model.embed": 96},
        ),
        (
            "gpt2",
            {"stage": 4, "data": 2},
            piped("1f1b", 6) | {"model.scan_layers": False} | FULL,
        ),
    ]
    return plans


PLANS = listed()


def words(
    mesh: dict[str, int],
    changes: dict[str, Any],
) -> tuple[str, str, str]:
    """A plan in a table's cells."""
    sizes = " x ".join(f"{axis}={size}" for axis, size in mesh.items())
    parts = [
        f"{name.partition('.')[2]} "
        f"{' '.join(map(str, value)) if isinstance(value, tuple) else str(value).lower()}"
        for name, value in changes.items()
        if name not in ("pipeline.schedule", "model.layers")
        and (name, value) != ("pipeline.virtual", 1)
    ]
    return sizes, changes["pipeline.schedule"], ", ".join(parts)


@pytest.mark.slow
@pytest.mark.parametrize("plan", a_third(PLANS))
def test_a_plan_of_the_table(plan: Any) -> None:
    found = verified(plan)
    assert found.equal, str(found)


@pytest.mark.long
def test_the_table_of_pipelines(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the table of docs/pipeline.md."""
    head = ["model", "mesh", "schedule", "with"]
    assert not print_table(
        head, (([plan[0], *words(*plan[1:])], verified(plan)) for plan in PLANS), capsys
    )


def verified(plan: Plan) -> verify.Verification:
    return verify.verify(
        config_of(*plan),
        jax.devices()[: math.prod(plan[1].values())],
    )


FAST = [
    (
        "llama",
        {"stage": 2, "tensor": 2, "fsdp": 2},
        piped("1f1b", 5) | RING | uneven(2),
    ),
    (
        "llama tied",
        {"stage": 2, "context": 2},
        piped("interleaved", 5, 2) | BLOCKS | PACKED,
    ),
    ("moe", {"stage": 2, "expert": 2}, piped("looped", 4, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    some(FAST, len(FAST)),  # the others are of the kinds that plans at random have
    ids=lambda plan: f"{plan[0]}, {plan[2]['pipeline.schedule']}",
)
def test_a_pipeline_gives_the_gradients_of_one_device(plan: Plan) -> None:
    found = verified(plan)
    assert found.equal, str(found)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A model, stages and one more axis, a schedule, and what may be chosen beside."""
    P = draw(st.sampled_from((2, 4)))
    axis = draw(st.sampled_from(("data", "fsdp", "tensor", "context")))
    schedule = draw(st.sampled_from(("gpipe", "1f1b", "interleaved", "looped")))
    if schedule in ("interleaved", "looped"):
        v = draw(st.sampled_from((1, 2, 3)))
    else:
        v = 1
    changes = piped(schedule, draw(st.integers(1, 3 * P + 1)), v)
    changes |= draw(st.sampled_from((FULL, BLOCKS, {})))
    changes |= draw(st.sampled_from((uneven(P, v), {}))) | draw(st.sampled_from((RING, {})))
    changes |= {
        "data.pack": draw(st.booleans()),
        "train.accumulation": draw(st.sampled_from((1, 3))),
    }
    return draw(st.sampled_from([*MODELS])), {"stage": P, axis: 2}, changes


@pytest.mark.slow
@settings(max_examples=1, suppress_health_check=list(HealthCheck))
@given(plans())
def test_a_pipeline_at_random(plan: Plan) -> None:
    found = verified(plan)
    assert found.equal, str(found)


@pytest.mark.slow
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(plans())
def test_more_pipelines_at_random(plan: Plan) -> None:
    found = verified(plan)
    assert found.equal, str(found)


# Planted faults: one is quick.

FAULTY: Plan = ("gpt2", {"stage": 4}, piped("1f1b", 9) | FULL)


def failed_with(monkeypatch: pytest.MonkeyPatch, home: Any, name: str, fault: Any) -> Any:
    monkeypatch.setattr(home, name, fault)
    failed = verified(FAULTY).first_difference
    assert failed is not None
    assert not failed.on_one_device
    wrong = [row.name for row in failed.wrong]
    return failed, wrong, parameter_order(Model(config_of(*FAULTY).model))


def rewritten(change: Callable[[str, Rows], Rows]) -> Callable[..., TickProgram]:
    """`program` with its rows changed: `change(kind, rows)`."""
    own = executor.program

    def program(*args: Any, **kwargs: Any) -> TickProgram:
        found = own(*args, **kwargs)
        segments = tuple(
            segment._replace(
                ticks={kind: change(kind, rows) for kind, rows in segment.ticks.items()}
            )
            for segment in found.segments
        )
        return found._replace(segments=segments)

    return program


@pytest.mark.slow
def test_a_stale_slot_of_the_stash_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward reads what the microbatch before it left."""
    fault = rewritten(
        lambda kind, rows: (
            rows._replace(kept=np.roll(rows.kept, 1, 0)) if kind == "backward" else rows
        )
    )
    failed, wrong, names = failed_with(monkeypatch, executor, "program", fault)
    assert failed.loss_ok
    assert set(wrong) >= {
        name for name in names if name.startswith("blocks.") and "bias" not in name
    }


@pytest.mark.slow
def test_a_last_microbatch_that_is_dropped_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward is thrown away; its loss counts."""

    def drop(kind: str, rows: Rows) -> Rows:
        kept = rows.microbatch < 8
        if kind == "backward":
            return rows._replace(on=rows.on * kept, ends=rows.ends * kept)
        return rows

    failed, wrong, _ = failed_with(monkeypatch, executor, "program", rewritten(drop))
    assert failed.loss_ok
    assert set(wrong) >= {"embed.positions", "blocks.up", "blocks.attention_norm.scale"}
    kinds = {row.finding.kind for row in failed.rows if row.finding is not None}
    assert "microbatch" in kinds  # and it says which


@pytest.mark.slow
def test_a_tied_gradient_counted_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's part of a tied table is added by every stage that has the table, as if they did
    not share it out.
    """
    own = ticks.Stage._score

    def twice(self: Any, carry: Any, y_BSD: Any, row: Any) -> Any:
        found = own(self, carry, y_BSD, row)
        more = jax.tree.map(jnp.subtract, found.ends, carry.ends)
        ends = found.ends | {
            "embed": jax.tree.map(
                jnp.add,
                found.ends["embed"],
                more["embed"],
            )
        }
        return found._replace(ends=ends)

    failed, wrong, _ = failed_with(monkeypatch, ticks.Stage, "_score", twice)
    assert failed.loss_ok
    assert wrong == ["embed.tokens"]


@pytest.mark.slow
def test_a_tick_that_is_off_by_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stage runs its backwards a tick late, when its neighbours' messages are others."""

    def late(kind: str, rows: Rows) -> Rows:
        if kind != "backward":
            return rows
        arrays = ("on", "microbatch", "kept", "taken", "ends")
        return rows._replace(
            **{
                name: np.where(
                    np.arange(4) == 1,
                    np.roll(x := getattr(rows, name), 1, 0),
                    x,
                )
                for name in arrays
            }
        )

    failed, wrong, _ = failed_with(monkeypatch, executor, "program", rewritten(late))
    assert failed.loss_ok
    assert "blocks.up" in wrong
    assert "head.norm.scale" not in wrong


@pytest.mark.slow
def test_places_of_another_microbatch_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage takes the documents of the microbatch before."""

    def early(kind: str, rows: Rows) -> Rows:
        if kind != "forward":
            return rows
        return rows._replace(
            microbatch=np.maximum(
                rows.microbatch - (np.arange(4) == 2),
                0,
            )
        )

    monkeypatch.setattr(executor, "program", rewritten(early))
    failed = verified((FAULTY[0], FAULTY[1], FAULTY[2] | PACKED)).first_difference
    assert failed is not None
    assert not failed.loss_ok


@pytest.mark.slow
def test_a_stage_that_never_sends_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ticks.Stage._send

    def lost(self: Any, x_BSD: Any, by: int) -> Any:
        there = jax.lax.axis_index(self.axes) != 2
        return own(self, x_BSD if by > 0 else jnp.where(there, x_BSD, 0), by)

    failed, wrong, _ = failed_with(monkeypatch, ticks.Stage, "_send", lost)
    assert failed.loss_ok
    assert "head.norm.scale" not in wrong
    assert {"embed.positions", "blocks.up"} <= set(wrong)
