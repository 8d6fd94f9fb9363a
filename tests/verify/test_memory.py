"""`verify` with every policy and with activations in host memory: the gradients are those of one
device, and those of the same plan with everything kept, to the bit where both run the same
operations.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.base.config import Config, override
from jaxpar.parallel import remat as remat_module
from jaxpar.verify.comparison import Answer
from jaxpar.verify.of_config import checks as verify
from jaxpar.verify.of_config.losses_and_gradients import Case, one_device, under_plan

Changes = dict[str, Any]
COMMON = {
    "model.vocab_size": 250,
    "data.seq_len": 240,
    "precision.compute": "float32",
    "train.batch": 16,
}
GPT2 = {"model.family": "gpt2", "model.heads": 8}
LLAMA = {"model.family": "llama", "model.heads": 8, "model.kv_heads": 4, "model.tied_head": False}
MOE = {"model.family": "llama", "model.heads": 8, "model.experts": 8, "train.balance_loss": 0.1}
UNROLLED = {"model.scan_layers": False}
RINGS = {"overlap.gather": "ring", "overlap.scatter": "bidirectional"}


def piped(
    schedule: str,
    microbatches: int,
    virtual: int = 1,
    **more: Any,
) -> Changes:
    changes = {"schedule": schedule, "microbatches": microbatches, "virtual": virtual} | more
    return {f"pipeline.{name}": value for name, value in changes.items()}


def keep(policy: str, action: str, *names: str) -> Changes:
    return {"memory.policy": policy} | {f"memory.keep.{name}": action for name in names}


def policy(name: str) -> Changes:
    return {"memory.policy": name}


PARAMETERS = keep("dots", "offload", "block_input") | {"memory.parameters": "offload"}
PRESETS = [policy(name) for name in ("full", "block_inputs", "attention_out", "selective", "dots")]
OFFLOAD_INPUT = keep("full", "offload", "block_input")
OFFLOAD_DOTS = keep(
    "dots", "offload", "block_input", "q", "k", "v", "attention_out", "mlp_input", "gate", "up"
)
OFFLOAD_UP = keep("none", "offload", "up", "mlp_hidden")
OFFLOAD_INPUTS = keep("block_inputs", "offload", "block_input", "mlp_input")
OFFLOAD_ATTENTION = keep("attention_out", "offload", "attention_out", "attention_lse")

TABLES: dict[str, tuple[Changes, dict[str, int], list[Changes]]] = {
    "llama alone": (
        LLAMA,
        {},
        [*PRESETS, OFFLOAD_INPUT, OFFLOAD_DOTS, keep("none", "recompute", "gate", "q")],
    ),
    "gpt2, data x fsdp x tensor": (
        GPT2,
        {"data": 2, "fsdp": 2, "tensor": 2},
        [*PRESETS, OFFLOAD_INPUT, OFFLOAD_UP, PARAMETERS],
    ),
    "llama, fsdp x tensor, rings, kv heads copied": (
        LLAMA | RINGS,
        {"fsdp": 2, "tensor": 4},
        [*PRESETS[1:], OFFLOAD_INPUTS],
    ),
    "llama, fsdp x context, ring attention": (
        LLAMA,
        {"fsdp": 2, "context": 4},
        [*PRESETS, OFFLOAD_ATTENTION, OFFLOAD_DOTS, PARAMETERS],
    ),
    "gpt2, context x tensor, Ulysses, unrolled": (
        GPT2 | UNROLLED | {"context.strategy": "ulysses"},
        {"context": 2, "tensor": 2},
        [policy("attention_out"), policy("dots"), policy("selective"), OFFLOAD_INPUT],
    ),
    "llama, context, packed": (
        LLAMA | {"data.pack": True},
        {"data": 2, "context": 2},
        [policy("attention_out"), policy("block_inputs"), OFFLOAD_ATTENTION],
    ),
    "moe, expert x fsdp x tensor": (
        MOE,
        {"expert": 2, "fsdp": 2, "tensor": 2},
        [
            policy("full"),
            policy("dots"),
            policy("block_inputs"),
            keep("dots", "offload", "expert_input", "gate", "up", "expert_out"),
        ],
    ),
    "llama, Domino, accumulation": (
        LLAMA | {"overlap.domino": "on", "train.accumulation": 2},
        {"fsdp": 2, "tensor": 2},
        [policy("dots"), OFFLOAD_INPUTS],
    ),
    "llama, 1F1B x fsdp x tensor": (
        LLAMA | piped("1f1b", 4),
        {"stage": 2, "fsdp": 2, "tensor": 2},
        [
            *PRESETS,
            policy("attention_out") | {"pipeline.stash": "stage"},
            OFFLOAD_INPUT,
            OFFLOAD_DOTS,
            PARAMETERS,
        ],
    ),
    "llama, interleaved x context": (
        LLAMA | piped("interleaved", 4, 2) | {"model.layers": 4},
        {"stage": 2, "context": 2},
        [policy("block_inputs"), policy("attention_out"), OFFLOAD_ATTENTION],
    ),
}
"""What the model and the plan are, its mesh, and what is kept. The first row of each is everything
kept.
"""

IN_CI = ("llama, fsdp x context, ring attention",)

# Float32, the same matmuls in the same order: what is made again may be fused otherwise, an ulp
# (6e-8) here or there.
AGAIN = 1e-6


def case_of(changes: Changes, mesh: dict[str, int]) -> Case:
    sizes = {f"mesh.{axis}": size for axis, size in mesh.items()}
    devices = jax.devices()[: math.prod(mesh.values())]
    setup = verify.prepare(override(Config(), COMMON | sizes | changes), devices)
    return Case.draw(setup)


def reference(case: Case) -> Answer:
    return one_device(case, "float32", exact=True)(case.params, case.batch)


def largest_difference(got: Answer, other: Answer) -> float:
    """Of a gradient's entry, relative to the largest entry; 0 = to the bit."""
    pairs = [(got.grads[name], other.grads[name]) for name in other.grads]
    return max(float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in pairs)


def saved(changes: Changes) -> Changes:
    """What is offloaded, saved on the device instead."""
    there = {
        key: "save" if ".keep." in key else "device"
        for key, value in changes.items()
        if value == "offload"
    }
    return changes | there


def words(changes: Changes) -> str:
    """`dots, offload q, k`."""
    actions = [
        f"{value} {key.removeprefix('memory.keep.')}"
        for key, value in changes.items()
        if "keep" in key
    ]
    others = [
        f"{key}={value}"
        for key, value in changes.items()
        if not key.startswith(("memory.keep", "memory.policy"))
    ]
    return ", ".join([changes["memory.policy"], *actions, *others])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in IN_CI else pytest.mark.long)
        for name in TABLES
    ],
)
def test_the_table_of_memory(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the rows of docs/verified.md."""
    base, mesh, kept = TABLES[name]
    case = case_of(base, mesh)
    want = reference(case)
    whole = under_plan(case, "float32", exact=True)
    for changes in kept:
        case = case_of(base | changes, mesh)
        got = under_plan(case, "float32", exact=True)
        check = verify.compare_answers("float32", case, got, want)
        off = largest_difference(got, whole)
        worst = max(row.error for row in check.rows)
        row = [name, words(changes), f"{worst:.1e}", "to the bit" if off == 0 else f"{off:.0e}"]
        with capsys.disabled():
            print(f"\n| {' | '.join(row)} |", end="")
        assert check.equal, str(check)
        assert off <= AGAIN
        if "offload" in changes.values():
            on_device = case_of(base | saved(changes), mesh)
            assert largest_difference(got, under_plan(on_device, "float32", exact=True)) <= AGAIN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2, data x fsdp x tensor", policy("dots")),
        ("llama, 1F1B x fsdp x tensor", OFFLOAD_INPUT),
    ],
)
def test_what_is_kept_changes_no_gradient(name: str, changes: Changes) -> None:
    base, mesh, _ = TABLES[name]
    case = case_of(base | changes, mesh)
    check = verify.compare_answers(
        "float32", case, under_plan(case, "float32", exact=True), reference(case)
    )
    assert check.equal, str(check)


@pytest.mark.slow
def test_a_wrong_offload_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in openxla/xla#46231, where the backward pass read another layer's: what comes back is of
    the wrong rows.
    """
    own = remat_module.named

    @jax.custom_vjp
    def shifted(x: Any) -> Any:
        return x

    shifted.defvjp(
        lambda x: (x, None),
        lambda _, dx: (jax.numpy.roll(dx, 1, axis=0),),
    )
    from jaxpar.models import transformer

    def wrong(x: Any, name: str) -> Any:
        if name == "mlp_input":
            return shifted(own(x, name))
        return own(x, name)

    monkeypatch.setattr(transformer, "named", wrong)
    found = verify.verify(
        override(Config(), COMMON | LLAMA | OFFLOAD_INPUTS | {"mesh.fsdp": 2}), jax.devices()[:2]
    )
    assert not found.equal
    failed = found.first_difference
    assert failed is not None and failed.loss_ok
    assert {row.name for row in failed.wrong} >= {"blocks.q", "blocks.attention_norm.scale"}
