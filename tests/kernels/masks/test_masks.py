"""Masks: tile states against the dense mask, for masks and combinations at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxpar.base.errors import UserError
from jaxpar.kernels.masks import (
    EMPTY,
    FULL,
    PARTIAL,
    And,
    BlockSparse,
    Causal,
    Dilated,
    First,
    Full,
    Mask,
    Or,
    Segments,
    Tiles,
    Window,
    bigbird,
    dense,
    in_documents,
    of_distance,
    places_in_documents,
    tile_states,
)

small = st.integers(-9, 9)
sizes = st.integers(1, 5)


@st.composite
def block_maps(draw: st.DrawFn) -> BlockSparse:
    M = draw(sizes)
    N = draw(sizes)
    blocks = draw(
        st.lists(
            st.lists(st.booleans(), min_size=N, max_size=N),
            min_size=M,
            max_size=M,
        )
    )
    return BlockSparse(
        blocks,
        draw(st.integers(1, 9)),
        draw(st.integers(1, 9)),
    )


reaches = st.none() | small
LEAVES = st.one_of(
    st.just(Full()),
    st.builds(Causal, small),
    st.builds(Window, reaches, reaches),
    st.builds(First, st.integers(0, 12)),
    st.builds(Dilated, sizes, sizes),
    st.builds(
        bigbird, st.integers(1, 40), st.sampled_from((1, 3)), sizes, sizes, sizes, st.integers(1, 7)
    ),
    block_maps(),
)
MASKS = st.recursive(
    LEAVES, lambda masks: st.builds(And, masks, masks) | st.builds(Or, masks, masks), max_leaves=3
)
TILES = st.builds(
    Tiles,
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 12),
    small,
    small,
)


def from_dense(seen: np.ndarray, tiles: Tiles) -> np.ndarray:
    """States by the definition [..., Q, K], from every place [..., S, T]."""
    Q, K = tiles.shape
    found = np.empty(
        (*seen.shape[:-2], Q, K),
        np.int8,
    )
    for q in range(Q):
        for k in range(K):
            rows = slice(q * tiles.block_q, (q + 1) * tiles.block_q)
            columns = slice(k * tiles.block_k, (k + 1) * tiles.block_k)
            part = seen[..., rows, columns]
            every = part.all(axis=(-1, -2))
            some = part.any(axis=(-1, -2))
            found[..., q, k] = np.where(
                every,
                FULL,
                np.where(some, PARTIAL, EMPTY),
            )
    return found


@settings(max_examples=300)
@given(MASKS, TILES)
def test_states_are_those_of_the_dense_mask(mask: Mask, tiles: Tiles) -> None:
    """Of other combinations than of distances, an empty or full tile may be called partial."""
    found = tile_states(mask, tiles)
    want = from_dense(np.asarray(dense(mask, tiles)), tiles)
    exact = len(list(mask.leaves())) == 1 or of_distance(mask)
    assert np.all(found == want if exact else (found == want) | (found == PARTIAL))


@pytest.mark.slow
@settings(max_examples=25)
@given(MASKS, TILES)
def test_places_known_at_run_time_only_give_the_same_or_partial(mask: Mask, tiles: Tiles) -> None:
    """As where they are known before."""
    want = from_dense(np.asarray(dense(mask, tiles)), tiles)
    traced = tiles._replace(
        q_start=jnp.int32(tiles.q_start),
        k_start=jnp.int32(tiles.k_start),
    )
    found = np.asarray(tile_states(mask, traced))
    same = found == want
    assert np.all(
        same if len(list(mask.leaves())) == 1 or of_distance(mask) else same | (found == PARTIAL)
    )
    np.testing.assert_array_equal(dense(mask, traced), dense(mask, tiles))


def ids(seed: int, B: int, S: int, rising: bool) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if rising:
        return np.cumsum(rng.random((B, S)) < 0.2, axis=1)
    return rng.integers(0, 3, (B, S))


@pytest.mark.slow
@settings(max_examples=25)
@given(
    MASKS,
    TILES,
    st.integers(0, 99),
    st.booleans(),
    st.booleans(),
)
def test_ids_are_exact_where_they_rise_and_never_wrongly_empty(
    mask: Mask, tiles: Tiles, seed: int, rising: bool, on_device: bool
) -> None:
    given_ids: list[Any] = [
        ids(seed, 2, tiles.S, rising),
        ids(seed + 1, 2, tiles.T, rising),
    ]
    if on_device:
        given_ids = [jnp.asarray(x) for x in given_ids]
    in_turn = in_documents(mask, *(places_in_documents(x) for x in given_ids))
    for packed in (
        Segments(*given_ids),
        And(in_turn, Segments(*given_ids)),
        mask | Segments(*given_ids),
    ):
        want = from_dense(np.asarray(dense(packed, tiles)), tiles)
        found = np.asarray(tile_states(packed, tiles))
        exact = rising and isinstance(packed, Segments)
        assert np.all((found == want) | ((not exact) & (found == PARTIAL)))


FOLLOWING = st.one_of(
    st.builds(First, st.integers(0, 12)),
    st.builds(Window, reaches, reaches),
    st.builds(
        bigbird, st.just(30), st.just(1), sizes, sizes, sizes, st.integers(1, 4), st.just(True)
    ),
)


@settings(max_examples=40)
@given(
    st.recursive(
        FOLLOWING,
        lambda masks: st.builds(And, masks, masks) | st.builds(Or, masks, masks),
        max_leaves=3,
    ),
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
)
def test_a_document_in_a_row_sees_what_it_sees_alone(mask: Mask, lengths: list[int]) -> None:
    documents: Any = np.repeat(np.arange(len(lengths)), lengths)[None].astype(np.int32)
    S = sum(lengths)
    want = np.zeros((sum(lengths),) * 2, bool)
    for start, n in zip(
        np.cumsum([0, *lengths]),
        lengths,
        strict=False,
    ):
        want[start : start + n, start : start + n] = dense(mask, Tiles(n, n, n, n))
    for packed in (mask & Segments(documents, documents), Segments(documents, documents) & mask):
        np.testing.assert_array_equal(
            dense(packed, Tiles(S, S, S, S))[0],
            want,
        )
        tiles = Tiles(S, S, 3, 5)
        found = np.asarray(tile_states(packed, tiles))
        states = from_dense(want[None], tiles)
        assert np.all((found == states) | (found == PARTIAL))


def test_queries_that_begin_within_a_document_are_told_their_places() -> None:
    """`&` would count their places from the first query at hand, and the last query would see other
    blocks.
    """
    documents: Any = np.array(
        [[1] * 4 + [2] * 8],
        np.int32,
    )
    places: Any = places_in_documents(documents)
    mask = Causal() & (
        First(1)
        | bigbird(
            16,
            window=1,
            globals=0,
            random=1,
            block=2,
            causal=True,
        )
    )
    whole = dense(mask & Segments(documents, documents), Tiles(12, 12, 12, 12))
    last = slice(9, None)
    part = And(
        in_documents(mask, places[:, last], places),
        Segments(documents[:, last], documents),
    )
    np.testing.assert_array_equal(
        dense(part, Tiles(3, 12, 3, 12, q_start=9)),
        whole[:, last],
    )
    with pytest.raises(UserError, match=r"write Segments\(ids, ids\)"):
        _ = mask & Segments(documents[:, last], documents)


def test_documents_of_two_kinds_do_not_say_where_a_document_begins() -> None:
    a = jnp.array([[0, 0, 1, 1]])
    b = jnp.array([[0, 1, 1, 1]])
    one = Segments(a, a)
    two = Segments(b, b)
    for join in (
        lambda: First(1) & (one & two),
        lambda: (First(1) & one) & two,
        lambda: two & (one & First(1)),
    ):
        with pytest.raises(UserError, match="those of one sequence"):
            join()
    again = dense(
        one & (one & First(1)),
        Tiles(4, 4, 4, 4),
    )
    np.testing.assert_array_equal(
        again,
        dense(First(1) & one, Tiles(4, 4, 4, 4)),
    )
    assert (one & two).visible(0, 0).shape == (1, 4, 4)  # which count from nothing


IDS: Any = np.array([[0, 0, 1, 1]])
NONSENSE: dict[str, tuple[Callable[[], Any], str]] = {
    "an offset": (
        lambda: Causal(0.5),
        "Causal takes offset .*offset=0.5",
    ),  # pyright: ignore[reportArgumentType]
    "a reach": (lambda: Window(3.5), "Window takes left .*left=3.5"),  # pyright: ignore[reportArgumentType]
    "a reach in words": (lambda: Window(1, "3"), "was given right='3'"),  # pyright: ignore[reportArgumentType]
    "a reach that is true": (lambda: Window(True), "was given left=True"),
    "fewer than no keys": (
        lambda: First(-1),
        "First takes n .*n=-1",
    ),
    "no stride": (lambda: Dilated(3, 0), "Dilated takes stride"),
    "no window": (lambda: Dilated(0, 1), "was given window=0"),
    "empty blocks": (
        lambda: BlockSparse([[1]], 0, 0),
        "BlockSparse takes block_q",
    ),
    "a window without a middle": (
        lambda: bigbird(256, window=2),
        "was given window=2: make it odd",
    ),
    "random blocks": (
        lambda: bigbird(256, random=-1),
        "bigbird takes random",
    ),
    "a length": (lambda: bigbird(0), "bigbird takes length"),
    "a number": (lambda: Causal() & 3, "& takes a mask of jaxpar.kernels.masks, .* was given 3"),  # pyright: ignore[reportOperatorIssue]
    "a number in front": (
        lambda: 3 | Causal(),
        r"\| takes a mask of jaxpar.kernels.masks, .* was given 3",
    ),
    "an array": (
        lambda: Causal() & np.ones((4, 4), bool),
        r"bool\[4, 4\]: .*Block",
    ),  # pyright: ignore[reportOperatorIssue]
    "an array in front": (
        lambda: np.ones((4, 4), bool) & Causal(),
        r"an array bool\[4, 4\]",
    ),
    "jax's in front": (
        lambda: jnp.ones((4, 4), bool) | Causal(),
        r"an array bool\[4, 4\]",
    ),
    "a class": (lambda: Causal() | Window, "the class Window: write"),  # pyright: ignore[reportOperatorIssue]
    "ids in lists": (
        lambda: (
            First(1)
            & Segments(
                [[1, 2]],
                [[1, 2]],
            )
        ),
        "Segments needs q_ids as an array",
    ),  # pyright: ignore[reportArgumentType]
    "ids of floats": (
        lambda: First(1) & Segments(IDS / 2, IDS),
        "q_ids of an integer dtype, .* was given float64",
    ),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_a_sentence_and_no_mask(what: str) -> None:
    do, says = NONSENSE[what]
    with pytest.raises(UserError, match=says):
        do()


def test_places_in_documents_are_counted_on_the_device_too() -> None:
    documents = [[4, 4, 4, 7, 2, 2]]
    places = [[0, 1, 2, 0, 0, 1]]
    assert places_in_documents(jnp.array(documents)).tolist() == places
    numbers: Any = np.array(documents)
    assert places_in_documents(numbers).tolist() == places


def test_a_map_of_the_whole_sequence_stays_where_it_is() -> None:
    documents: Any = np.array([[0, 0, 1, 1]])
    found = dense(
        BlockSparse([[1], [0]], 2, 4) & Segments(documents, documents),
        Tiles(4, 4, 4, 4),
    )
    assert found.astype(int).tolist() == [
        [
            [1, 1, 0, 0],
            [1, 1, 0, 0],
            [0, 0, 0, 0],
            [0, 0, 0, 0],
        ]
    ]


LOCAL = 5 / 1024


@pytest.mark.parametrize(
    ("mask", "share"),
    [
        (Causal(), 0.5),
        (Window(1023, 0), LOCAL),
        (Causal() & Window(1023), LOCAL),
    ],
    ids=str,
)
def test_a_long_sequence_costs_no_square(mask: Mask, share: float) -> None:
    tiles = Tiles(1 << 18, 1 << 18, 256, 256)
    states = tile_states(mask, tiles)
    assert np.mean(states != EMPTY) == pytest.approx(share, rel=0.01)
    assert np.sum(states == PARTIAL) <= 3 * tiles.shape[0]


def test_bigbird_has_the_blocks_that_it_names() -> None:
    mask = bigbird(
        1024,
        window=3,
        globals=2,
        random=3,
        seed=1,
        block=64,
    )
    blocks = mask.map
    assert blocks[:2].all()
    assert blocks[:, :2].all()
    np.testing.assert_array_equal(
        blocks[6:-1].sum(axis=1),
        2 + 3 + 3,
    )
    assert (blocks == bigbird(1024, 3, 2, 3, 1, 64).map).all()
    assert (blocks != bigbird(1024, 3, 2, 3, 2, 64).map).any()


def test_a_causal_bigbird_of_a_shorter_sequence_is_the_beginning_of_a_longer_one() -> None:
    long, short = (
        bigbird(length, window=3, globals=2, random=3, block=64, causal=True).map
        for length in (2048, 700)
    )
    np.testing.assert_array_equal(long[:11, :11], short)
    # neither near nor global: the random ones, all before the query's own
    chosen = np.tril(long, -2)[8:, 2:]
    assert np.all(chosen.sum(axis=1) == 3)


def test_masks_are_values() -> None:
    mask = Causal() & (Window(3) | BlockSparse(np.eye(2)))
    assert hash(mask) == hash(Causal(0) & (Window(3) | BlockSparse([[1, 0], [0, 1]])))
    assert mask == Causal(0) & (Window(3) | BlockSparse([[1, 0], [0, 1]]))
    assert str(mask) == (
        "Causal(offset=0) & (Window(left=3, right=None) | BlockSparse(2 x 2 blocks of 128 x "
        "128, 50% seen))"
    )
    leaves, tree = jax.tree.flatten(mask)
    assert leaves == []
    assert hash(tree) == hash(jax.tree.structure(mask))
    assert jax.tree.leaves(mask & Segments(np.zeros((1, 4)), np.ones((1, 4))))[0].shape == (1, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        [True],
        np.zeros((0, 2)),
        np.zeros((2, 2, 2)),
    ],
)
def test_a_map_of_blocks_has_two_dims(wrong: Any) -> None:
    with pytest.raises(UserError, match=r"BlockSparse .*\[M, N\]"):
        BlockSparse(wrong)
