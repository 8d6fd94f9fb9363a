"""`verify` with a sequence that is split: every strategy gives the gradients of one device, and planted faults do not."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jaxpar import verify
from jaxpar.config import Config, override
from jaxpar.verdict import verdict


def config_of(family: str, strategy: str = "ring", packed: bool = False, **changes: Any) -> Config:
    keys = {"model.family": family, "model.heads": 8, "model.vocab_size": 250, "model.tied_head": family == "gpt2"}
    keys |= {"data.pack": packed, "train.batch": 8, "context.strategy": strategy, "model.scan_layers": False}
    keys |= {"model.kv_heads": 4} if family == "llama" else {}
    return override(Config(), keys | {name.replace("__", "."): value for name, value in changes.items()})


SPLIT_IN_ALL = {"rules__heads": (), "rules__kv_heads": (), "rules__attention_seq": ("context", "tensor")}
PLANS = {
    "gpt2, ring of 8": config_of("gpt2", mesh__context=8),
    "llama, ring of 4 x tensor, packed, window": config_of(
        "llama", packed=True, mesh__context=4, mesh__tensor=2, model__window=100
    ),
    "llama, data x ring of 2 x tensor, parameters over context": config_of(
        "llama", mesh__data=2, mesh__context=2, mesh__tensor=2, rules__embed=("fsdp", "context"),
        memory__policy="full", train__accumulation=2, train__batch=16,
    ),
    "llama, ring over context x tensor": config_of("llama", mesh__context=2, mesh__tensor=2, **SPLIT_IN_ALL),
    "gpt2, all-gather over 4, packed": config_of("gpt2", "all_gather", True, mesh__context=4),
    "llama, all-gather over 2 x fsdp": config_of("llama", "all_gather", mesh__context=2, mesh__fsdp=2),
    "llama, ulysses over 4, packed": config_of("llama", "ulysses", True, mesh__context=4, model__scan_layers=True),
    "gpt2, ulysses over 2 x tensor": config_of("gpt2", "ulysses", mesh__context=2, mesh__tensor=2),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_a_split_sequence_gives_the_gradients_of_one_device(name: str) -> None:
    found = verify.verify(PLANS[name], jax.devices())
    assert found.equal, verdict(found)
    errors = [row.error for row in found.checks[0].rows]
    assert 0 < max(errors) < verify.FLOAT32 / 3  # merged softmaxes round a little more: 2.1e-6 was seen, of 1e-5
