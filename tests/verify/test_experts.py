"""`verify` for shared experts and for experts that choose their tokens, on every parallelism."""

from __future__ import annotations

from typing import Any

import pytest

from jaxpar.base.config import Config, override
from jaxpar.verify.of_config import checks as verify

pytestmark = pytest.mark.slow

COMMON = {
    "model.family": "llama",
    "model.heads": 8,
    "model.kv_heads": 4,
    "model.vocab_size": 250,
    "model.experts": 8,
    "train.batch": 48,
}
RESIDUAL = {"model.shared_experts": 1, "model.experts_per_token": 1}
SHARED = {"model.shared_experts": 3, "train.balance_loss": 0.1, "train.router_z_loss": 0.1}
BY_EXPERTS = {
    "model.router": "expert_choice",
    "model.masks": ("full",),
    "model.shared_experts": 1,
    "train.router_z_loss": 0.1,
}
PACKED = {"data.pack": True, "train.accumulation": 2}
PIPED = {"pipeline.schedule": "1f1b", "pipeline.microbatches": 4}
PLANS: list[Any] = [
    pytest.param({"data": 8}, BY_EXPERTS | PACKED, marks=pytest.mark.users_flags),
    ({"fsdp": 4, "expert": 2}, BY_EXPERTS),
    ({"expert": 4, "tensor": 2}, BY_EXPERTS | {"memory.policy": "dots"}),
    ({"context": 2, "expert": 2, "tensor": 2}, BY_EXPERTS | PACKED),
    ({"stage": 2, "expert": 2}, BY_EXPERTS | PIPED),
    ({"data": 2, "fsdp": 2, "tensor": 2}, RESIDUAL),
    pytest.param(
        {"expert": 4, "tensor": 2},
        SHARED | {"memory.policy": "dots"},
        marks=pytest.mark.users_flags,
    ),
    ({"stage": 2, "expert": 2}, SHARED | PIPED),
]


@pytest.mark.parametrize(("mesh", "changes"), PLANS, ids=str)
def test_a_plan_gives_the_gradients_of_one_device(
    mesh: dict[str, int], changes: dict[str, Any]
) -> None:
    sizes = {f"mesh.{axis}": size for axis, size in mesh.items()}
    found = verify.verify(override(Config(), COMMON | sizes | changes))
    assert found.equal, str(found)
