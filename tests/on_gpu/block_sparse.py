"""Holds the block-sparse matmul against its reference, and times it beside a dense one, in turns.

Shapes: T rows of x, I and O the dims of the matrix, M by N its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.bench.measure import BenchRow, alternate
from jaxpar.kernels import block_sparse

BOUND = 2**-7
"""Of an error, as a part of the largest entry: bfloat16 rounds a sum once, by up to 2^-8, and the
reference on the same inputs once too."""


class Product(NamedTuple):
    """x [rows, inputs] by a matrix [inputs, outputs]."""

    rows: int
    inputs: int
    outputs: int


def sparse_rows(
    sizes: Product,
    block: int,
    kept: float,
    implementation: str,
    rounds: int,
    interpret: bool = False,
) -> list[BenchRow]:
    """A row for `jnp.matmul` on the whole matrix and one for the kernel, in bfloat16; each column
    of blocks keeps as many at random.

    Args:
      sizes: of the product.
      block: rows and columns of a block.
      kept: the share of blocks that is kept.
      implementation: one of `block_sparse`.
      rounds: how many turns each takes; the median counts.
      interpret: whether the kernel is interpreted.
    """
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((sizes.rows, sizes.inputs)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((sizes.inputs, sizes.outputs)), jnp.bfloat16)
    dy = jnp.asarray(rng.standard_normal((sizes.rows, sizes.outputs)), jnp.bfloat16)
    blocks_MN = random_blocks(sizes.inputs // block, sizes.outputs // block, kept)
    sparse = partial(
        block_sparse.matmul,
        blocks_MN=blocks_MN,
        implementation=implementation,
        interpret=interpret,
    )
    exact = partial(block_sparse.reference, blocks_MN=blocks_MN)
    errors = [
        float(jnp.max(jnp.abs(found - right)) / jnp.max(jnp.abs(right)) / BOUND)
        for found, right in zip(
            _in_float32(jax.jit(partial(_with_gradients, sparse))(x, weight, dy)),
            _in_float32(jax.jit(partial(_with_gradients, exact))(x, weight, dy)),
            strict=True,
        )
    ]
    calls: dict[str, Callable[[], object]] = {}
    for name, product in (("dense", jnp.matmul), (implementation, sparse)):
        calls[f"{name} forward"] = partial(jax.jit(product), x, weight)
        calls[f"{name} both"] = partial(jax.jit(partial(_with_gradients, product)), x, weight, dy)
    timings = alternate(calls, rounds)
    rows: list[BenchRow] = []
    for name in ("dense", implementation):
        forward, both = (timings[f"{name} {way}"].seconds for way in ("forward", "both"))
        multiplied = 1.0 if name == "dense" else float(blocks_MN.mean())
        flops = 2.0 * sizes.rows * sizes.inputs * sizes.outputs * multiplied
        rows.append(
            {
                "implementation": name,
                "forward, ms": 1e3 * forward,
                "forward, TFLOP/s": flops / forward / 1e12,
                "both, ms": 1e3 * both,
                "both, TFLOP/s": 3 * flops / both / 1e12,
                "dense / this, both": timings["dense both"].seconds / both,
                "worst error of what is allowed": None if name == "dense" else float(max(errors)),
            }
        )
    return rows


def random_blocks(M: int, N: int, kept: float) -> np.ndarray:
    """A map [M, N] of which each column keeps `kept` of its blocks, at least one."""
    rng = np.random.default_rng(1)
    ranks_MN = np.argsort(rng.random((M, N)), axis=0)
    return ranks_MN < max(1, round(kept * M))


def _with_gradients(
    product: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    weight: jax.Array,
    dy: jax.Array,
) -> tuple[jax.Array, ...]:
    out, pull = jax.vjp(product, x, weight)
    return out, *pull(dy)


def _in_float32(arrays: tuple[jax.Array, ...]) -> list[jax.Array]:
    return [array.astype(jnp.float32) for array in arrays]
