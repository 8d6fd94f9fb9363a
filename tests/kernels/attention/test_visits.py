"""The lists of tiles: walking them as a kernel does gives the dense mask, and visits no empty
tile.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import KERNEL_MASKS, MASKS, Case
from tiers import third_quick

from jaxpar.kernels.attention.call import Unserved
from jaxpar.kernels.attention.visits import in_tile, visits
from jaxpar.kernels.masks import (
    EMPTY,
    BlockSparse,
    Causal,
    Segments,
    Tiles,
    Window,
    dense,
    tile_states,
)

SIZES = [
    (96, 96, 16, 32),
    (50, 75, 32, 16),
    (33, 130, 8, 16),
]


@pytest.mark.parametrize("of_keys", [False, True], ids=["of_queries", "of_keys"])
@pytest.mark.parametrize(
    "case", third_quick(itertools.product(KERNEL_MASKS, SIZES)), ids=lambda case: f"{case}"
)
def test_walking_the_tiles_gives_the_dense_mask(
    case: tuple[str, tuple[int, ...]], of_keys: bool
) -> None:
    name, (S, T, block_q, block_k) = case
    case = Case(name, 2, S, T)
    mask = MASKS[name](np.random.default_rng(0), case)
    tiles = Tiles(S, T, block_q, block_k)
    entries, full, some = visits(mask, tiles, of_keys)
    Q, K = tiles.shape
    seen = np.zeros((2, Q * block_q, K * block_k), bool)
    ids = [leaf for leaf in mask.leaves() if isinstance(leaf, Segments)]
    visited = 0
    for b in range(2):
        of_b = min(b, len(some) - 1)
        for row in range(some.shape[1]):
            for w in range(int(some[of_b, row])):
                entry = int(entries[of_b, row, w])
                q, k = (entry, row) if of_keys else (row, entry)
                rows = np.arange(block_q) + q * block_q
                columns = np.arange(block_k) + k * block_k
                pairs = [(_at(one.q_ids, b, rows), _at(one.kv_ids, b, columns)) for one in ids]
                masked = w >= int(full[of_b, row])
                if masked:
                    part = in_tile(mask, rows[:, None], columns[None], pairs)
                else:
                    part = np.bool_(True)
                assert not seen[b, rows[:, None], columns].any(), "a tile twice"
                seen[b, rows[:, None], columns] = part & (columns < T) if masked else part
                visited += 1
    want = np.broadcast_to(
        np.asarray(dense(mask, tiles)),
        (2, S, T),
    )
    np.testing.assert_array_equal(seen[:, :S, :T], want)
    states = np.broadcast_to(
        np.asarray(tile_states(mask, tiles)),
        (2, Q, K),
    )
    assert visited == np.sum(states != EMPTY)


def _at(ids: jax.Array, b: int, places: np.ndarray) -> np.ndarray:
    return np.asarray(ids)[
        b,
        np.minimum(
            places,
            ids.shape[1] - 1,
        ),
    ]


def test_rows_are_as_long_as_the_longest_that_ids_allow() -> None:
    ids = jnp.zeros((2, 64), jnp.int32)
    assert visits(Causal() & Segments(ids, ids), Tiles(64, 64, 8, 16)).entries.shape == (2, 8, 4)
    assert visits(
        BlockSparse(np.eye(4), 16, 16) & Segments(ids, ids), Tiles(64, 64, 8, 16)
    ).entries.shape == (2, 8, 1)


def test_blocks_must_not_be_cut() -> None:
    with pytest.raises(Unserved, match=r"tiles of 24 x 16 cut the blocks of BlockSparse"):
        visits(
            BlockSparse(np.eye(4), 16, 16),
            Tiles(64, 64, 24, 16),
        )
    traced = Tiles(16, 16, 16, 16, jnp.int32(16), 0)
    with pytest.raises(Unserved, match="cut the blocks"):
        visits(BlockSparse(np.eye(4), 16, 16), traced)
    assert visits(BlockSparse(np.eye(4), 16, 16), traced._replace(multiple=16)).some.tolist() == [
        [0]
    ]


def test_a_union_with_blocks_is_left_to_plain_xla() -> None:
    with pytest.raises(Unserved, match=r"\| in Causal\(offset=0\) & \(Window"):
        visits(
            Causal()
            & (
                Window(3)
                | BlockSparse(
                    np.eye(4),
                    16,
                    16,
                )
            ),
            Tiles(64, 64, 16, 16),
        )
