"""The query layer on top of a stack gives on every kind of mesh the answer of one device."""

from __future__ import annotations

from typing import Any

import pytest
from tiers import refused_by_newest_cpu

from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError
from jaxpar.verify.of_config import checks as verify

SMALL: dict[str, Any] = {
    "model.query_layer": True,
    "model.vocab_size": 61,
    "model.layers": 3,
    "model.embed": 16,
    "model.heads": 2,
    "model.mlp": 32,
    "model.max_seq_len": 48,
    "data.seq_len": 24,
    "train.batch": 16,
    "train.warmup_steps": 0,
    "mesh.platform": "cpu",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        {
            "mesh.data": 2,
            "mesh.fsdp": 2,
            "mesh.tensor": 2,
            "train.accumulation": 2,
            "memory.policy": "full",
        },
        {
            "mesh.data": 2,
            "mesh.fsdp": 2,
            "mesh.tensor": 2,
            "overlap.domino": "on",
            "memory.policy": "full",
        },
        {
            "mesh.context": 2,
            "mesh.tensor": 2,
            "context.strategy": "ring",
            "data.pack": True,
            "model.masks": ["window(6)", "causal"],
            "precision.compute": "bfloat16",
        },
        {
            "mesh.stage": 2,
            "mesh.fsdp": 2,
            "mesh.tensor": 2,
            "pipeline.microbatches": 4,
            "data.pack": True,
        },
        {
            "mesh.stage": 2,
            "mesh.context": 2,
            "pipeline.microbatches": 4,
            "pipeline.stash": "stage",
            "memory.policy": "full",
        },
    ],
)
def test_every_layout_gives_the_gradients_of_one_device(plan: dict[str, Any]) -> None:
    with refused_by_newest_cpu():
        found = verify.verify(override(Config(), SMALL | plan))
    assert found.equal, str(found)


@pytest.mark.slow
def test_what_a_cpu_may_run_at_once_is_refused() -> None:
    """The gradient of the positions after waits for nothing but its own op."""
    plan = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
    plan |= {"overlap.domino": "on", "train.accumulation": 2}
    with pytest.raises(UserError, match=r"query_layer.*mix up"):
        verify.verify(override(Config(), SMALL | plan))
