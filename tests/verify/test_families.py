"""`verify` for every family, and for layers of several kinds, on every parallelism.

The quick suite takes one; each of the listed ones has a row in the table of docs/verified.md.
"""

from __future__ import annotations

from typing import Any

import jax
import pytest
from tiers import WHY_REFUSED, a_third, refused_by_newest_cpu
from verified_tables import print_table

from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError
from jaxpar.verify.of_config import checks as verify

FULL = {"memory.policy": "full", "pipeline.stash": "stage"}
BLOCKS = {"memory.policy": "full", "pipeline.stash": "blocks"}
BFLOAT16 = {"precision.compute": "bfloat16"}
RING = {"overlap.gather": "ring", "overlap.scatter": "bidirectional"}
LOCAL = {"model.masks": ("window(90)", "causal")}
SPARSE = {"model.masks": ("longformer(60, 3)", "bigbird(1, 1, 1, block=16)")}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"model.family": "qwen2"},
    "qwen3": {"model.family": "qwen3", "model.head_dim": 24},
    "mistral": {"model.family": "llama", "model.masks": ("window(90)",)},
    "gemma2": {
        "model.family": "gemma2",
        "model.attention_softcap": 5.0,
        "model.logit_softcap": 3.0,
        "model.query_scale": 0.3,
    }
    | LOCAL,
    "gemma3": {
        "model.family": "gemma3",
        "model.masks": ("window(90)",) * 5 + ("causal",),
        "model.layers": 20,
        "model.rope_local_theta": 100.0,
        "model.rope_factor": 8.0,
        "model.rope_scaling": "linear",
    },
    "sparse": {"model.family": "llama"} | SPARSE,
}
COMMON = {"model.heads": 8, "model.kv_heads": 4, "model.vocab_size": 250, "train.batch": 48}
Plan = tuple[str, dict[str, int], dict[str, Any]]


def piped(
    schedule: str,
    M: int,
    virtual: int = 1,
) -> dict[str, Any]:
    return {"pipeline.schedule": schedule, "pipeline.microbatches": M, "pipeline.virtual": virtual}


# Stages begin with the first of six kinds.
PIPED: dict[str, dict[str, Any]] = {
    "gemma3": {
        "model.layers": 26,
        "pipeline.layers": (12, 14),
    }
}
VIRTUAL: dict[str, dict[str, Any]] = {
    "gemma3": {"model.layers": 24},
    "gemma2": {"model.layers": 8},
}
VIRTUAL["sparse"] = VIRTUAL["gemma2"]
FAST: list[Plan] = [
    ("gemma2", {"context": 2, "fsdp": 2}, {"memory.policy": "dots"}),
    ("gemma3", {"context": 2, "fsdp": 2}, {"memory.policy": "dots"}),
    ("gemma2", {"stage": 2, "tensor": 2}, piped("1f1b", 4)),
]
STRATEGIES = ("ring", "ring", "ulysses") * 2
POLICIES = ("full", "block_inputs", "attention_out", "selective", "dots", "none")
PLANS: list[Plan] = [
    *FAST,
    *((model, {"fsdp": 2, "tensor": 4}, BFLOAT16 | {"train.accumulation": 3}) for model in MODELS),
    *(
        (
            model,
            {"data": 2, "context": 4},
            {"context.strategy": name, "data.pack": True, "model.layers": 5},
        )
        for model, name in zip(MODELS, STRATEGIES, strict=True)
    ),
    *(
        (
            model,
            {"fsdp": 2, "tensor": 2},
            RING | {"overlap.domino": "on", "memory.policy": policy},
        )
        for model, policy in zip(MODELS, POLICIES, strict=True)
    ),
    *(
        (
            model,
            {"stage": 2, "fsdp": 2},
            piped("1f1b", 4) | PIPED.get(model, {}),
        )
        for model in [*MODELS][::2]
    ),
    *(
        (
            model,
            {"stage": 2, "context": 2},
            piped("interleaved", 4, 2) | BLOCKS | VIRTUAL.get(model, {}),
        )
        for model in [*MODELS][1::2]
    ),
    (
        "gemma3",
        {"stage": 2, "tensor": 2},
        piped("1f1b", 4) | FULL | PIPED["gemma3"],
    ),
    (
        "gemma3",
        {"fsdp": 8},
        {"memory.parameters": "offload", "memory.optimizer": "offload", "memory.policy": "full"},
    ),
    ("gemma3", {"tensor": 8}, {"model.heads": 4, "model.kv_heads": 2}),
]


def verified(plan: Plan) -> verify.Verification:
    model, mesh, changes = plan
    sizes: dict[str, Any] = {f"mesh.{axis}": size for axis, size in mesh.items()}
    return verify.verify(override(Config(), COMMON | MODELS[model] | sizes | changes))


REFUSED = pytest.mark.xfail(
    jax.__version_info__ >= (0, 11), reason=WHY_REFUSED, raises=UserError, strict=True
)


@pytest.mark.slow
@pytest.mark.users_flags
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(FAST[0], marks=REFUSED),
        pytest.param(FAST[1], marks=pytest.mark.slow),
        pytest.param(FAST[2], marks=pytest.mark.slow),
    ],
    ids=lambda plan: plan[0],
)
def test_a_family_gives_the_gradients_of_one_device(plan: Plan) -> None:
    found = verified(plan)
    assert found.equal, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("plan", a_third(PLANS[len(FAST) :]))
def test_a_plan_of_the_table(plan: Any) -> None:
    with refused_by_newest_cpu():
        found = verified(plan)
    assert found.equal, str(found)


@pytest.mark.long
def test_the_table_of_families(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the table of docs/verified.md."""
    rows = (([plan[0], *words(plan)], verified(plan)) for plan in PLANS)
    assert not print_table(["model", "mesh", "with"], rows, capsys)


def words(plan: Plan) -> tuple[str, str]:
    """A plan in a table's cells."""
    _, mesh, changes = plan
    parts = [
        f"{name.partition('.')[2]} "
        f"{' '.join(map(str, value)) if isinstance(value, tuple) else str(value).lower()}"
        for name, value in changes.items()
        if value not in ("off", "xla")
    ]
    return " x ".join(f"{axis}={size}" for axis, size in mesh.items()), ", ".join(parts)
