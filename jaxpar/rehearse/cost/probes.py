"""Small programs whose tasks a calibration times: the shapes and forms that a training step is made of.

B batch, T tokens (or queries), S keys, H heads, h head_dim, K and N the dims of a matmul.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Probe(NamedTuple):
    """A small program and what it is fed."""

    name: str
    """A Python identifier, its own: the profiler tells programs apart by it."""
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"


def suite() -> list[Probe]:
    """Everything that is timed on one device."""
    return [*_matmuls(), *_attention(), *_maps()]


def _matmuls() -> list[Probe]:
    """Linear layers, forward and backward."""
    dims = [(64, 256), (128, 128), (128, 512), (512, 128), (256, 1024), (1024, 256), (512, 2048), (128, 8192)]
    sizes = [(T, K, N, "float32") for T in (256, 1024, 4096) for K, N in dims if T * K * N <= 2**31]
    sizes += [(T, K, N, "bfloat16") for T, K, N in ((256, 128, 512), (1024, 256, 1024))]
    found = []
    for T, K, N, dtype in sizes:
        size = f"{T}x{K}x{N}_{dtype}"
        found += [
            Probe(f"forward_{size}", lambda x, w: x @ w, ((T, K), (K, N)), dtype),
            Probe(f"input_gradient_{size}", lambda dy, w: dy @ w.T, ((T, N), (K, N)), dtype),
            Probe(f"weight_gradient_{size}", lambda x, dy: x.T @ dy, ((T, K), (T, N)), dtype),
        ]
    return found


def _attention() -> list[Probe]:
    """Attention's matmuls, softmax and transposes."""
    found = []
    for B, H, S, h in ((8, 4, 64, 32), (4, 4, 256, 64), (2, 8, 512, 64)):
        heads, square, size = (B, H, S, h), (B, H, S, S), f"{B}x{H}x{S}x{h}"
        found += [
            Probe(f"scores_{size}", lambda q, k: jnp.einsum("bhtd,bhsd->bhts", q, k), (heads, heads)),
            Probe(f"mix_{size}", lambda p, v: jnp.einsum("bhts,bhsd->bhtd", p, v), (square, heads)),
            Probe(f"mix_gradient_{size}", lambda p, dy: jnp.einsum("bhts,bhtd->bhsd", p, dy), (square, heads)),
            Probe(f"softmax_{size}", _softmax_and_gradient, (square, square)),
            Probe(f"heads_first_{size}", lambda x: x.transpose(0, 2, 1, 3), ((B, S, H, h),)),
            Probe(f"heads_swapped_{size}", lambda x: x.transpose(0, 1, 3, 2), (heads,)),
        ]
    return found


def _maps() -> list[Probe]:
    """What maps, sums, copies, gathers and scatters; AdamW."""
    found = []
    for rows, width in ((64, 128), (256, 128), (1024, 128), (1024, 512), (4096, 512), (8192, 512)):
        flat, size = (rows, width), f"{rows}x{width}"
        found += [
            Probe(f"add_{size}", lambda x, y: x + y, (flat, flat)),
            Probe(f"three_{size}", lambda x, y, z: (x + y) * z, (flat, flat, flat)),
            Probe(f"gelu_{size}", jax.nn.gelu, (flat,)),
            Probe(f"norm_{size}", _norm_and_gradient, (flat, flat)),
            Probe(f"column_sum_{size}", lambda x: x.sum(0), (flat,)),
            Probe(f"transposed_{size}", lambda x: x.T, (flat,)),
            Probe(f"embedding_{size}", _embedding_and_gradient, ((4096, width), (rows,))),
            Probe(f"adam_{size}", _adam, (flat, flat, flat, flat)),
            Probe(f"slice_{size}", lambda x: x[1], ((4, rows, width),)),
        ]
    return found


def _softmax_and_gradient(x: jax.Array, dy: jax.Array) -> Any:
    y, back = jax.vjp(lambda x: jax.nn.softmax(x, axis=-1), x)
    return y, back(dy)


def _norm_and_gradient(x: jax.Array, dy: jax.Array) -> Any:
    def norm(x: jax.Array) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)

    y, back = jax.vjp(norm, x)
    return y, back(dy)


def _embedding_and_gradient(table: jax.Array, numbers: jax.Array) -> Any:
    ids = (jnp.abs(numbers) * 1000).astype(jnp.int32) % table.shape[0]
    rows, back = jax.vjp(lambda table: table[ids], table)
    return rows, back(rows)


def _adam(p: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array) -> Any:
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    return p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), m, v


CHAIN = 200


def chain(x: jax.Array, w: jax.Array) -> jax.Array:
    """`CHAIN` small matmuls, which XLA does not fuse, one after another: what lies between tasks."""
    for _ in range(CHAIN):
        x = x @ w
    return x
