"""`verify` with a split sequence: every strategy gives the gradients of one device, and planted
faults do not.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tiers import some

from jaxpar.base.config import Config, override
from jaxpar.kernels.attention import chunked
from jaxpar.kernels.masks import Causal, Tiles, dense
from jaxpar.models import Model
from jaxpar.models import loss as losses
from jaxpar.parallel import zigzag as batches
from jaxpar.parallel.context import split as context
from jaxpar.parallel.context.task import ContextTask
from jaxpar.verify.of_config import checks as verify
from jaxpar.verify.of_config.losses_and_gradients import parameter_order


def config_of(
    family: str,
    strategy: str = "ring",
    packed: bool = False,
    **changes: Any,
) -> Config:
    keys = {
        "model.family": family,
        "model.heads": 8,
        "model.vocab_size": 250,
        "model.tied_head": family == "gpt2",
    }
    keys |= {
        "data.pack": packed,
        "train.batch": 8,
        "context.strategy": strategy,
        "model.scan_layers": False,
    }
    keys |= {"model.kv_heads": 4} if family == "llama" else {}
    return override(
        Config(), keys | {name.replace("__", "."): value for name, value in changes.items()}
    )


SPLIT_IN_ALL = {
    "rules__heads": (),
    "rules__kv_heads": (),
    "rules__attention_seq": ("context", "tensor"),
}
PLANS = {
    "llama, ring of 4 x tensor, packed, window": config_of(
        "llama", packed=True, mesh__context=4, mesh__tensor=2, model__masks=("window(100)",)
    ),
    "gpt2, ring of 8": config_of("gpt2", mesh__context=8),
    "llama, data x ring of 2 x tensor, parameters over context": config_of(
        "llama",
        mesh__data=2,
        mesh__context=2,
        mesh__tensor=2,
        rules__embed=("fsdp", "context"),
        memory__policy="full",
        train__accumulation=2,
        train__batch=16,
    ),
    "llama, ring over context x tensor": config_of(
        "llama", mesh__context=2, mesh__tensor=2, **SPLIT_IN_ALL
    ),
    "llama, ulysses over 4, packed": config_of(
        "llama", "ulysses", True, mesh__context=4, model__scan_layers=True
    ),
    "gpt2, ulysses over 2 x tensor": config_of("gpt2", "ulysses", mesh__context=2, mesh__tensor=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some([*PLANS], 8))
def test_a_split_sequence_gives_the_gradients_of_one_device(name: str) -> None:
    found = verify.verify(PLANS[name], jax.devices())
    assert found.equal, str(found)
    errors = [row.error for row in found.checks[0].rows]
    # merged softmaxes round a little more: 2.1e-6 was seen, of 1e-5
    assert 0 < max(errors) < verify.FLOAT32 / 3


# Planted faults. Each is a mistake of several devices only: one device has no split sequence.

FAULTY = config_of("llama", mesh__context=4)


def failed_with(
    monkeypatch: pytest.MonkeyPatch, home: Any, name: str, fault: Any, config: Config = FAULTY
) -> Any:
    monkeypatch.setattr(home, name, fault)
    failed = verify.verify(config, jax.devices()).first_difference
    assert failed is not None
    assert not failed.on_one_device
    wrong = [row.name for row in failed.wrong]
    return failed, wrong, parameter_order(Model(config.model))


@pytest.mark.slow
def test_positions_that_stay_behind_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are put in zigzag order, and are rotated as if each stood where it is put."""
    own = batches.in_order

    def left_behind(batch: Any, plan: Any, *strategy: Any) -> Any:
        positions = jnp.broadcast_to(
            jnp.arange(batch["tokens"].shape[1]),
            batch["tokens"].shape,
        )
        return own(batch, plan, *strategy) | {"positions": positions}

    failed, wrong, names = failed_with(monkeypatch, losses, "in_order", left_behind)
    assert not failed.loss_ok
    assert wrong == names


@pytest.mark.slow
def test_a_mask_that_is_off_by_one_at_a_border_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first query of a chunk does not see the last key of the chunk before it."""

    def late(self: Any, q_chunk: Any, k_chunk: Any, C: int) -> Any:
        mask, call = own(self, q_chunk, k_chunk, C)
        return mask & Causal(), call._replace(q_start=C - 2)

    own = ContextTask.pair
    failed, wrong, names = failed_with(monkeypatch, ContextTask, "pair", late)
    assert not failed.loss_ok
    assert wrong == names


@pytest.mark.slow
def test_merging_without_the_maximum_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is weighed by its sum of exponentials as it has them, less its own largest
    score.
    """

    def without(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: Any,
        call: Any,
    ) -> Any:
        scores = jnp.einsum(
            "bshd,bthd->bhst",
            q,
            jnp.repeat(
                k,
                q.shape[2] // k.shape[2],
                axis=2,
            ),
        ) / math.sqrt(q.shape[-1])
        scores = jnp.where(
            dense(mask, Tiles(*scores.shape[2:], 1, 1)),
            scores,
            -jnp.inf,
        )
        out, lse = forward(q, k, v, mask, call)
        return out, lse - jnp.max(scores, axis=-1)

    forward = chunked.forward
    failed, wrong, names = failed_with(monkeypatch, chunked, "forward", without)
    assert not failed.loss_ok
    assert wrong == names


@pytest.mark.slow
def test_gradients_of_keys_that_are_sent_the_wrong_way_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loss is right, and so is what lies nearer to it than the keys and values of the last
    layer.
    """
    own = ContextTask.hop
    backward = context.ring_backward

    def wrong_way(*args: Any) -> Any:
        sent: list[Any] = []

        def hop(self: Any, tree: Any) -> Any:
            sent.append(tree)
            if len(sent) < self.size:  # keys and values: they are sent on first
                return own(self, tree)
            there = [((i + 1) % self.size, i) for i in range(self.size)]
            return jax.tree.map(
                lambda x: jax.lax.ppermute(x, self.axes, there),
                tree,
            )

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ContextTask, "hop", hop)
            sums = backward(*args)
        assert len(sent) == 2 * 3
        return sums

    failed, wrong, names = failed_with(monkeypatch, context, "ring_backward", wrong_way)
    assert failed.loss_ok
    assert wrong == [name for name in names if not name.startswith("head.")]
    assert failed.origin in ("blocks.k of layer 1", "blocks.v of layer 1")
