"""Attention of one block against another: values, gradients and merging against the definition, block by block.

Tolerance: sums of at most a few hundred float32 terms of size one in another order: 1e-5 of the largest entry, as in
test_attention, or of a tenth where it is smaller.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import local_attention
from jaxpar.attention import MASKED
from jaxpar.local_attention import Block, attend, attend_backward, merge

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_attention, "ROWS", 5)
    monkeypatch.setattr(local_attention, "COLUMNS", 7)


def arrays(R: int, C: int, size: float = 1) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = (2, 2, 3, R, 4), (2, 2, C, 4), (2, 2, C, 4), (2, 2, 3, R, 4)
    return [jnp.asarray(size * rng.standard_normal(shape), jnp.float32) for shape in shapes]


def ids(length: int, seed: int) -> jax.Array:
    return jnp.asarray(np.cumsum(np.random.default_rng(seed).random((2, length)) < 0.2, axis=1), jnp.int32)


def defined(q: jax.Array, k: jax.Array, v: jax.Array, block: Block) -> jax.Array:
    """What the mask leaves of every score; zeros for a row that sees nothing."""
    scores = jnp.einsum("bkgrh,bkch->bkgrc", q, k) / math.sqrt(q.shape[-1])
    behind = block.q_start - block.k_start + jnp.arange(q.shape[3])[:, None] - jnp.arange(k.shape[2])
    visible = (behind >= 0) & (behind < (block.window or 10**9))
    if block.q_segments_BR is not None and block.k_segments_BC is not None:
        same = block.q_segments_BR[:, :, None] == block.k_segments_BC[:, None, :]
        visible = visible & same[:, None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, MASKED), axis=-1)
    return jnp.einsum("bkgrc,bkch->bkgrh", jnp.where(visible, weights, 0), v)


def assert_close(found: Any, wanted: Any) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        assert np.all(np.isfinite(a))
        assert np.max(np.abs(a - b)) <= 1e-5 * max(0.1, np.max(np.abs(b)))


# Rows, columns, first row, first column, window, packed: on the diagonal, before and behind it, wholly hidden.
BLOCKS = [
    (13, 17, 0, 0, 0, False), (13, 17, 3, 0, 4, True), (5, 7, 30, 0, 0, False), (5, 7, 0, 30, 0, False),
    (12, 22, 30, 0, 5, True), (12, 22, 9, 0, 0, True), (1, 1, 0, 0, 1, False),
]  # fmt: skip


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(("R", "C", "q_start", "k_start", "window", "packed"), BLOCKS)
def test_a_block_is_what_its_mask_says(R, C, q_start, k_start, window, packed, traced):
    q, k, v, dout = arrays(R, C)
    segments = (ids(R, 1), ids(C, 2)) if packed else (None, None)

    def both(q_start: Any, k_start: Any) -> Any:
        block = Block(q_start, k_start, window, *segments)
        out, lse = attend(q, k, v, block)
        return out, *attend_backward(q, k, v, dout, lse, jnp.sum(out * dout, axis=-1), block)

    found = jax.jit(both)(q_start, k_start) if traced else jax.jit(lambda: both(q_start, k_start))()
    wanted, vjp = jax.vjp(lambda *x: defined(*x, Block(q_start, k_start, window, *segments)), q, k, v)
    assert_close(found, (wanted, *vjp(dout)))


def test_blocks_of_keys_merge_also_where_one_has_nothing_to_see_and_scores_are_large():
    """Scores of some hundreds: exp of them alone would be infinite."""
    q, k, v, _ = arrays(12, 20, size=15)
    segments = ids(12, 1), ids(20, 1)
    whole, lse = attend(q, k, v, Block(8, 0, 0, *segments))
    parts = [
        attend(q, k[:, :, at : at + 5], v[:, :, at : at + 5], Block(8, at, 0, segments[0], segments[1][:, at : at + 5]))
        for at in range(0, 20, 5)
    ]
    assert float(jnp.max(lse)) > 100
    assert any(bool(jnp.any(part_lse == MASKED)) for _, part_lse in parts)
    merged = parts[0]
    for part in parts[1:]:
        merged = merge(merged, part)
    assert_close(merged, (whole, lse))


def test_a_block_that_is_hidden_is_not_computed():
    q, k, v, _ = arrays(5, 7)
    hidden = jax.make_jaxpr(lambda: attend(q, k, v, Block(0, 30)))()
    assert "dot_general" not in str(hidden)
    full = str(jax.make_jaxpr(lambda: attend(q, k, v, Block(30, 0)))())
    assert full.count("dot_general") == 2
    assert MASKED not in [float(word) for word in full.split() if word.startswith("-1.0000000")]


def test_memory_grows_with_the_length_and_not_with_its_square():
    def temporaries(S: int) -> int:
        q, k, v, dout = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays(S, S))

        def both(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
            out, lse = attend(q, k, v, Block(0, 0))
            return attend_backward(q, k, v, dout, lse, jnp.sum(out * dout, axis=-1), Block(0, 0))

        return jax.jit(both).lower(q, k, v, dout).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(800) < 2.2 * temporaries(400)
