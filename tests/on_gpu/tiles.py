"""Times the Triton attention kernels with other tiles than those of the chip's file, in turns: what
meshes/chips should say.

Shapes: as in `jaxpar.kernels.attention.call`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled
from on_gpu.attention import visible_places
from on_gpu.pieces import Say

from jaxpar.base.jax_compat import compiler_message
from jaxpar.bench.measure import BenchRow, alternate
from jaxpar.kernels.attention import triton
from jaxpar.kernels.attention.call import DEFAULT, Call
from jaxpar.kernels.attention.triton_tiles import Tile, TileSizes, tile_sizes_here
from jaxpar.kernels.masks import Causal

MATMULS = {"forward": 2, "dq": 3, "dkv": 4}
"""Of a visited tile."""
OTHERS: dict[tuple[str, int], list[Tile]] = {
    ("forward", 64): [Tile(128, 64, 4, 3), Tile(128, 128, 8, 3), Tile(64, 64, 4, 3)],
    ("forward", 128): [
        Tile(128, 64, 4, 3),
        Tile(128, 128, 8, 2),
        Tile(128, 128, 8, 3),
        Tile(128, 64, 8, 2),
        Tile(64, 64, 4, 3),
        Tile(64, 128, 4, 2),
    ],
    ("forward", 256): [Tile(64, 64, 4, 2), Tile(128, 32, 8, 2), Tile(128, 64, 8, 2)],
    ("dq", 64): [Tile(64, 64, 4, 3), Tile(128, 64, 4, 3), Tile(64, 128, 4, 2)],
    ("dq", 128): [
        Tile(64, 64, 4, 2),
        Tile(64, 64, 4, 3),
        Tile(128, 64, 8, 3),
        Tile(128, 32, 4, 3),
        Tile(128, 128, 8, 2),
    ],
    ("dkv", 64): [Tile(64, 64, 4, 3), Tile(64, 128, 4, 2), Tile(128, 128, 8, 2)],
    ("dkv", 128): [
        Tile(64, 64, 4, 2),
        Tile(64, 64, 4, 3),
        Tile(64, 128, 8, 2),
        Tile(32, 128, 4, 2),
        Tile(128, 64, 8, 2),
    ],
}
"""What is tried beside the chip's own, by kernel and head_dim."""


def tile_rows(
    kernel: str,
    h: int,
    S: int,
    heads: int,
    rounds: int,
    say: Say,
    options: Call = DEFAULT,
) -> list[BenchRow]:
    """A row for each tile, the chip's own first, of one causal sequence in bfloat16.

    Args:
      kernel: one of MATMULS.
      h: the head_dim.
      S: the tokens of the sequence.
      heads: as many kv heads.
      rounds: how many turns each takes; the median counts.
      say: told of tiles that do not compile.
      options: of the kernels.
    """
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        jnp.asarray(rng.standard_normal((1, S, heads, h)), jnp.bfloat16) for _ in range(4)
    )
    out, lse = jax.jit(lambda q, k, v: triton.forward(q, k, v, Causal(), options))(q, k, v)
    delta = jnp.einsum("bshd,bshd->bhs", dout.astype(jnp.float32), out.astype(jnp.float32))
    arrays = (q, k, v) if kernel == "forward" else (q, k, v, dout, lse, delta)
    own = tile_sizes_here(h, jnp.bfloat16)
    tiles = [getattr(own, kernel), *OTHERS[kernel, h]]
    ready: dict[Tile, Callable[[], object]] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiling: dict[Tile, Future[Compiled]] = {
            tile: pool.submit(_compile, kernel, own._replace(**{kernel: tile}), options, *arrays)
            for tile in dict.fromkeys(tiles)
        }
        for tile, compiled in compiling.items():
            try:
                ready[tile] = partial(compiled.result(), *arrays)
            except (jax.errors.JaxRuntimeError, ValueError) as error:
                say(f"not {_text(tile)}: {compiler_message(str(error))}")
    results = {tile: _in_float32(call()) for tile, call in ready.items()}
    right = results[tiles[0]]
    flops = 2 * MATMULS[kernel] * h * heads * visible_places(Causal(), 1, S)
    timings = alternate({_text(tile): call for tile, call in ready.items()}, rounds)
    return [
        {
            "tile": _text(tile),
            "ms": 1e3 * timings[_text(tile)].seconds,
            "TFLOP/s": flops / timings[_text(tile)].seconds / 1e12,
            "time of the chip's own": timings[_text(tile)].ratio,
            "largest difference from it": max(
                float(np.max(np.abs(x - y)) / np.max(np.abs(y)))
                for x, y in zip(results[tile], right, strict=True)
            ),
        }
        for tile in ready
    ]


def _compile(kernel: str, sizes: TileSizes, options: Call, *arrays: jax.Array) -> Compiled:
    """What computes the results of one kernel; those of the other backward are left out."""

    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        if kernel == "forward":
            return triton.forward(*arrays, Causal(), options, sizes)
        dq, dk, dv = triton.backward(*arrays, Causal(), options, sizes)
        return (dq,) if kernel == "dq" else (dk, dv)

    return jax.jit(call).lower(*arrays).compile()


def _in_float32(arrays: object) -> list[np.ndarray]:
    return [np.asarray(array, np.float32) for array in jax.tree.leaves(arrays)]


def _text(tile: Tile) -> str:
    return f"{tile.block_q} x {tile.block_k}, {tile.warps} warps, {tile.stages} stages"
