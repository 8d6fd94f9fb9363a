"""Attention by tiles in plain XLA against the definition; its dropout."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import EVERY_MASK, SIZES, Case, answer, assert_right, inputs, of_pair, part
from tiers import some

from jaxpar.kernels.attention import chunked
from jaxpar.kernels.attention.call import Call, merge
from jaxpar.kernels.masks import EMPTY, Causal, Full, Tiles, tile_states


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    with chunked.tiles_at_most(chunked.TileSize(20, 24)):
        yield


@pytest.mark.users_flags
@pytest.mark.parametrize(
    "case",
    some([*EVERY_MASK, *SIZES], 6, pytest.mark.long),
    ids=str,
)
def test_tiles_are_the_definition(case: Case) -> None:
    given = inputs(case)
    assert_right(
        of_pair(chunked.forward, chunked.backward, case, given), answer(case, given), case.dtype
    )


@pytest.mark.parametrize(
    "name", ["causal", "window", "documents", "causal_blocks", "window_documents"]
)
def test_a_shard_begins_anywhere(name: str) -> None:
    """Queries 40 to 79 against keys 20 to 69, their places known or not."""
    case = Case(name, S=96, T=96, block=20)
    given = part(inputs(case), slice(40, 80), slice(20, 70))
    want = answer(case, given, 40, 20)
    pair = chunked.forward, chunked.backward
    assert_right(
        of_pair(*pair, case, given, q_start=40, k_start=20),
        want,
        case.dtype,
    )
    traced = jax.jit(
        lambda *starts: of_pair(
            *pair,
            case,
            given,
            q_start=starts[0],
            k_start=starts[1],
        )
    )
    assert_right(traced(40, 20), want, case.dtype)


@pytest.mark.parametrize("name", ["causal", "window", "documents", "causal_bigbird"])
def test_empty_tiles_are_not_looked_at(name: str) -> None:
    """Keys in which the first tile of queries sees nothing may be anything."""
    case = Case(name, B=1, S=80, T=96)
    given = inputs(case)
    states = np.asarray(tile_states(given.mask, Tiles(80, 96, 20, 24))).reshape(
        -1,
        4,
        4,
    )
    unseen = np.repeat(states[0, 0] == EMPTY, 24)
    assert unseen.any()
    first = part(given, slice(20), slice(None))
    k, v = (jnp.where(unseen[:, None, None], jnp.nan, x) for x in (first.k, first.v))
    pair = chunked.forward, chunked.backward
    poisoned, clean = (of_pair(*pair, case, x) for x in (first._replace(k=k, v=v), first))
    for ours, theirs in zip(poisoned, clean, strict=True):
        np.testing.assert_array_equal(ours, theirs)


RATE = 0.3


def dropping(
    key: Any,
    q: Any,
    k: Any,
    v: Any,
    rate: float = RATE,
) -> Any:
    return chunked.forward(q, k, v, Causal(), Call(), chunked.Dropout(rate, key))[0]


def test_dropout_has_the_gradient_of_its_own_forward() -> None:
    given = inputs(Case("causal", S=50, T=50, H=4))
    key = jax.random.key(0)
    args = (given.q, given.k, given.v)
    out, pull = jax.vjp(partial(dropping, key), *args)  # differentiated by jax
    _, lse = chunked.forward(*args, Causal(), Call())
    delta = jnp.einsum("bshd,bshd->bhs", given.dout, out)
    ours = chunked.backward(
        *args, given.dout, lse, delta, Causal(), Call(), chunked.Dropout(RATE, key)
    )
    for found, want in zip(ours, pull(given.dout), strict=True):
        np.testing.assert_allclose(
            found,
            want,
            atol=1e-5 * np.max(np.abs(want)),
        )


def test_dropout_depends_on_the_key_only() -> None:
    given = inputs(Case("causal", S=50, T=50))
    drop = jax.jit(
        lambda key: dropping(
            key,
            given.q,
            given.k,
            given.v,
        )
    )
    first, again, other = (np.asarray(drop(jax.random.key(seed))) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other)


def test_dropout_draws_every_weight_on_its_own() -> None:
    """With equal scores and one-hot values the output is the weights: each is zero or 1 / (1 -
    rate) of its share.
    """
    B = 2
    S = 48
    H = 3
    v = jnp.broadcast_to(
        jnp.eye(S)[None, :, None],
        (B, S, H, S),
    )
    zeros = jnp.zeros((B, S, H, S))
    out, _ = chunked.forward(
        zeros,
        zeros,
        v,
        Full(),
        Call(),
        chunked.Dropout(
            RATE,
            jax.random.key(3),
        ),
    )
    kept = np.asarray(out) * S * (1 - RATE)
    assert np.all(np.isclose(kept, 0) | np.isclose(kept, 1, atol=1e-5))
    draws = (
        np.rint(kept)
        .astype(bool)
        .transpose(0, 2, 1, 3)
        .reshape(
            B * H,
            -1,
        )
    )
    assert abs(draws.mean() - (1 - RATE)) < 4 * np.sqrt(RATE * (1 - RATE) / draws.size)
    agree = [np.mean(draws[a] == draws[b]) for a in range(B * H) for b in range(a)]
    assert max(agree) < (1 - RATE) ** 2 + RATE**2 + 5 * 0.5 / np.sqrt(S * S), (
        "two heads have one draw"
    )


def test_parts_of_the_keys_merge_also_where_one_has_nothing_to_see_and_scores_are_large() -> None:
    case = Case("causal", S=40, T=60, H=4)
    given = inputs(case)
    given = given._replace(q=12 * given.q)  # exp of some hundreds would be infinite
    parts = [
        chunked.forward(
            given.q, given.k[:, at : at + 20], given.v[:, at : at + 20], Causal(), Call(k_start=at)
        )
        for at in (40, 0, 20)  # of the first nothing is seen
    ]
    out, lse = functools.reduce(merge, parts)
    want = answer(case, given)
    # An ulp of a score of 300 is 3e-5.
    np.testing.assert_allclose(
        out,
        want.out,
        atol=1e-4 * np.max(np.abs(want.out)),
    )
    np.testing.assert_allclose(lse, want.lse, rtol=1e-5)
