"""The TPU kernels: interpreted against the definition in float64, and compiled for chips that are
not here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    KERNEL_CASES,
    KERNEL_MASKS,
    SIZES,
    Answer,
    Case,
    Inputs,
    answer,
    assert_right,
    inputs,
    of_pair,
)
from tiers import needs_libtpu, some

from jaxpar.base.console import bytes_text
from jaxpar.base.hardware import LANES
from jaxpar.kernels.attention import tpu, tpu_grid
from jaxpar.kernels.attention.call import Call, Unserved
from jaxpar.kernels.masks import (
    EMPTY,
    BlockSparse,
    Causal,
    Full,
    Mask,
    Segments,
    Window,
    bigbird,
    tile_states,
)
from jaxpar.rehearse.targets import load_target

TILE = 16
forward = partial(tpu.forward, tile=TILE)
backward = partial(tpu.backward, tile=TILE)


@pytest.fixture
def lightly_compiled() -> Iterator[None]:
    """An interpreted kernel is a large program, and runs once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("lightly_compiled")
@pytest.mark.parametrize(
    "case",
    some([*KERNEL_CASES, *SIZES], 6, pytest.mark.long),
    ids=str,
)
def test_interpreted_it_is_the_definition(case: Case) -> None:
    given = inputs(case)
    assert_right(
        of_pair(forward, backward, case, given, interpret=True), answer(case, given), case.dtype
    )


ACROSS = [
    Case("causal_end", 2, 200, 150, 4, 1, 32),
    Case("window_documents", 1, 130, 300, 2, 2, 64, "bfloat16"),
    Case("causal_bigbird", 1, 256, 256, 4, 2, 80, "float32", 5.0, LANES),
]
"""Tiles of whole lanes, and a head_dim of none: places lie along the lanes."""


@pytest.mark.slow
@pytest.mark.usefixtures("lightly_compiled")
@pytest.mark.parametrize("case", ACROSS, ids=str)
def test_interpreted_across_the_lanes_it_is_the_definition(case: Case) -> None:
    given = inputs(case)
    tile = LANES
    assert tpu_grid.make_walk(given.q, given.k, given.mask, Call(), tile).across
    pair = (partial(way, tile=tile) for way in (tpu.forward, tpu.backward))
    assert_right(
        of_pair(*pair, case, given, interpret=True),
        answer(case, given),
        case.dtype,
    )


@pytest.mark.users_flags
@pytest.mark.usefixtures("lightly_compiled")
@pytest.mark.parametrize("name", some(["causal_late", "dilated", "causal_bigbird"], 3))
def test_parts_at_traced_places_make_the_whole(name: str) -> None:
    """Halves of the queries by halves of the keys, with the log-sum-exp over all keys, as in ring
    attention.
    """
    case = Case(name, S=64, T=64, H=4)
    given = inputs(case)
    half = 32
    starts = [(jnp.int32(q), jnp.int32(k)) for q in (0, half) for k in (0, half)]

    def part(x: Any, start: Any, axis: int = 1) -> Any:
        return jax.lax.dynamic_slice_in_dim(x, start, half, axis)

    def call(q_start: Any, k_start: Any) -> Call:
        return Call(
            q_start=q_start, k_start=k_start, multiple=half, out_dtype=jnp.float32, interpret=True
        )

    @jax.jit
    def ahead(given: Inputs, q: Any, k: Any) -> Any:
        return forward(
            part(given.q, q),
            part(given.k, k),
            part(given.v, k),
            given.mask,
            call(q, k),
        )

    @jax.jit
    def back(
        given: Inputs,
        lse: Any,
        delta: Any,
        q: Any,
        k: Any,
    ) -> Any:
        of_queries = (
            part(given.q, q),
            part(given.k, k),
            part(given.v, k),
            part(
                given.dout,
                q,
            ),
        )
        return backward(
            *of_queries,
            part(lse, q, 2),
            part(delta, q, 2),
            given.mask,
            call(q, k),
        )

    # [query half, key half, ...]
    outs, lses = (
        np.stack(x).reshape(2, 2, *x[0].shape)
        for x in zip(*(ahead(given, *at) for at in starts), strict=True)
    )
    lse = np.logaddexp(lses[:, 0], lses[:, 1])
    shares = np.exp(lses - lse[:, None]).swapaxes(3, 4)[..., None]
    out = np.concatenate((outs * shares).sum(axis=1), axis=1)
    lse = np.concatenate(lse, axis=2)
    delta = np.einsum("bshd,bshd->bhs", given.dout, out) - given.dlse
    found = [back(given, lse, delta, *at) for at in starts]
    dq, dk, dv = (np.stack(x).reshape(2, 2, *x[0].shape) for x in zip(*found, strict=True))
    dq = np.concatenate(dq.sum(axis=1), axis=1)
    dk, dv = (np.concatenate(x.sum(axis=0), axis=1) for x in (dk, dv))
    assert_right(Answer(out, lse, dq, dk, dv), answer(case, given), "float32")


def test_empty_tiles_are_not_touched() -> None:
    """Keys and queries that only empty tiles have may be anything."""
    case = Case("window", B=1, S=32, T=64)
    given = inputs(case)._replace(mask=Causal() & Window(9))
    found, want = (
        of_pair(
            forward,
            backward,
            case,
            given._replace(k=k, v=v),
            interpret=True,
        )
        for k, v in (((x.at[:, 32:].set(jnp.nan) for x in (given.k, given.v))), (given.k, given.v))
    )
    for ours, theirs in zip(found, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert np.all(np.asarray(found.dk)[:, 32:] == 0)


@pytest.mark.parametrize("of_keys", [False, True], ids=["of_queries", "of_keys"])
@pytest.mark.parametrize("name", some(KERNEL_MASKS, 3))
def test_a_step_for_each_tile_that_is_seen_and_each_row_of_none(name: str, of_keys: bool) -> None:
    case = Case(name, B=2, S=96, T=160)
    given = inputs(case)
    walk = tpu_grid.make_walk(
        given.q,
        given.k,
        given.mask,
        Call(),
        TILE,
        of_keys,
    )
    states = np.broadcast_to(
        tile_states(given.mask, walk.tiles),
        (2, *walk.tiles.shape),
    )
    if of_keys:
        states = states.swapaxes(1, 2)
    seen = np.sum(states != EMPTY, axis=2)
    assert int(walk.length) == np.max(
        np.sum(
            np.maximum(seen, 1),
            axis=1,
        )
    )
    for b in range(2):
        own = slice(b * walk.stride, b * walk.stride + int(walk.length))
        rows = np.asarray(walk.rows)[own]
        codes = np.asarray(walk.codes)[own]
        visited = codes & 3 != EMPTY
        np.testing.assert_array_equal(
            np.bincount(rows[visited], minlength=len(seen[b])),
            seen[b],
        )
        assert np.array_equal(np.unique(rows), np.arange(len(seen[b]))) and np.all(
            np.diff(rows) >= 0
        )
        tiles = codes[visited] >> 2
        np.testing.assert_array_equal(
            codes[visited] & 3,
            states[b, rows[visited], tiles],
        )


def test_tiles_are_the_fewest_equal_ones_or_cut_no_block() -> None:
    def of(S: int, mask: Mask, **options: Any) -> tuple[int, int]:
        return tpu_grid.cut_tiles((1, S, 1, 64), S, "bfloat16", mask, Call(**options), 512)[2:4]

    assert [of(S, Causal())[0] for S in (1, 128, 512, 513, 1100, 4096)] == [
        128,
        128,
        512,
        384,
        384,
        512,
    ]
    assert of(4096, bigbird(4096)) == (64, 64)
    assert of(4096, Causal() & BlockSparse(np.eye(4), 1024, 768)) == (512, 384)
    assert of(4096, BlockSparse(np.eye(4), 1024, 1024), q_start=256) == (256, 512)
    assert of(4096, BlockSparse(np.eye(4), 1024, 1024), q_start=jnp.int32(0), multiple=128) == (
        128,
        512,
    )
    with pytest.raises(
        Unserved,
        match="multiples of 20 places",
    ):
        of(4096, BlockSparse(np.eye(4), 20, 64))


@pytest.mark.parametrize(
    ("h", "dtype", "mask", "why"),
    [
        (64, "float32", Full(), ""),
        (80, "bfloat16", Causal() & bigbird(64), ""),
        (320, "float32", Full(), "head_dim 320 is more than 256"),
        (64, "float16", Full(), "float16 is not float32 or bfloat16"),
        (
            64,
            "float32",
            BlockSparse(np.eye(4), 64, 4),
            "blocks of a mask at multiples of 4 places are no tiles",
        ),
    ],
)
def test_what_is_refused(h: int, dtype: str, mask: Mask, why: str) -> None:
    found = tpu.refusal(
        (1, 64, 4, h),
        (1, 64, 2, h),
        dtype,
        mask,
    )
    assert found.startswith(why) and bool(found) == bool(why)


def test_more_tiles_than_scalar_memory_holds_are_refused() -> None:
    q = jax.ShapeDtypeStruct((1, 2**17, 1, 64), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, 2**17), jnp.int32)
    mask = Segments(ids, ids) & BlockSparse(np.ones((512, 512)), 256, 256)  # pyright: ignore[reportArgumentType]
    with pytest.raises(Unserved, match="262144 tiles to visit"):
        jax.eval_shape(
            lambda q, mask: tpu.forward(q, q, q, mask),
            q,
            mask,
        )


# Compiled, for chips that are not here.

CHIPS = {"v4": "v4-4", "v5e": "v5e-1", "v5p": "v5p-4", "v6e": "v6e-1", "tpu7x": "tpu7x-4"}
LONG_MASKS = {
    "causal": lambda S: Causal(),
    "window": lambda S: Causal() & Window(1023),
    "documents": lambda S: Causal(),
    "encoder_documents": lambda S: Full(),
    "both_ways": lambda S: Window(64, 64),
    "bigbird": lambda S: bigbird(S, block=512),
}


def compiled(
    chip: str,
    S: int,
    h: int,
    mask: str,
    dtype: str = "bfloat16",
) -> tuple[Any, Any]:
    """The forward and the backward of one sequence, four query heads to two kv heads."""
    sharding = jax.sharding.SingleDeviceSharding(load_target(CHIPS[chip]).devices()[0])

    def array(*shape: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def shown(ids: Any) -> Mask:
        known = LONG_MASKS[mask](S)
        if mask.endswith("documents"):
            return known & Segments(ids, ids)
        return known

    q = array(1, S, 4, h)
    k = array(1, S, 2, h)
    lse = array(1, 4, S, dtype=jnp.float32)
    ids = array(1, S, dtype="int32")
    ahead = jax.jit(lambda q, k, v, ids: tpu.forward(q, k, v, shown(ids))).trace(
        q,
        k,
        k,
        ids,
    )
    back = jax.jit(
        lambda q, k, v, dout, lse, delta, ids: tpu.backward(
            q,
            k,
            v,
            dout,
            lse,
            delta,
            shown(ids),
        )
    )
    traced = ahead, back.trace(q, k, k, q, lse, lse, ids)
    forward, backward = (x.lower(lowering_platforms=("tpu",)).compile() for x in traced)
    return forward, backward


def vmem(*programs: Any) -> dict[str, int]:
    """Bytes of VMEM that each kernel takes."""
    lines = [line for program in programs for line in program.as_text().splitlines()]
    kernels = [line for line in lines if 'custom_call_target="tpu_custom_call"' in line]
    found = [
        re.search(r'/attention_(\w+)/.*"used_scoped_[^]]*"size":"(\d+)"', line) for line in kernels
    ]
    return {match[1]: int(match[2]) for match in found if match}


@needs_libtpu
@pytest.mark.parametrize(
    "mask",
    [
        "documents",
        pytest.param("encoder_documents", marks=pytest.mark.slow),
        pytest.param("both_ways", marks=pytest.mark.slow),
    ],
)
def test_it_compiles_for_an_absent_chip(mask: str) -> None:
    used = vmem(*compiled("v5e", 1024, 64, mask))
    assert used.keys() == {"forward", "dq", "dkv"}
    assert all(0 < size < 2**24 for size in used.values())


@needs_libtpu
@pytest.mark.long
@pytest.mark.parametrize("mask", LONG_MASKS)
@pytest.mark.parametrize("h", [64, 128])
@pytest.mark.parametrize("chip", CHIPS)
def test_it_compiles_for_every_chip(
    chip: str, h: int, mask: str, capsys: pytest.CaptureFixture[str]
) -> None:
    used = vmem(*compiled(chip, 4096, h, mask))
    assert used.keys() == {"forward", "dq", "dkv"}
    with capsys.disabled():
        print(
            f"\n{chip} head_dim {h} {mask}: VMEM",
            *(f"{name} {bytes_text(size)}" for name, size in used.items()),
        )


@needs_libtpu
@pytest.mark.long
@pytest.mark.parametrize(
    ("chip", "mask"),
    [
        *(("v5e", mask) for mask in LONG_MASKS),
        *((chip, "causal") for chip in CHIPS if chip != "v5e"),
    ],
)
def test_memory_grows_as_the_sequence(
    chip: str, mask: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to 131,072, where scores alone would take 64 GiB a head: at most the arrays, heads first,
    128 lanes wide.
    """
    for S in (32768, 131072):
        sizes = [
            program.memory_analysis().temp_size_in_bytes for program in compiled(chip, S, 64, mask)
        ]
        with capsys.disabled():
            print(
                f"\n{chip} {mask} {S}: MiB of temporaries,",
                *(f"{size / 2**20:.1f}" for size in sizes),
            )
        of_head = S * LANES * 2
        lists = 2**22
        # q, out, k and v; q, dout, dq, k, v, dk and dv.
        for size, heads in zip(
            sizes,
            (4 + 4 + 2 * 2, 3 * 4 + 4 * 2),
            strict=True,
        ):
            assert size <= heads * of_head + lists
