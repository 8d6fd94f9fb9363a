"""The fastest tiles of the Triton kernels on the GPU at hand, by trying them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxpar.base.errors import UserError
from jaxpar.kernels.attention import triton
from jaxpar.kernels.attention.call import DEFAULT, Call
from jaxpar.kernels.attention.tuned import Sizes, Tile, keep_sizes, sizes_here
from jaxpar.kernels.masks import Causal, Mask

CANDIDATES = tuple(Tile(*sizes) for sizes in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (2, 3)))

_CAUSAL = Causal()


def tune(
    h: int,
    dtype: DTypeLike,
    shape: tuple[int, int, int, int] = (1, 8192, 16, 4),
    mask: Mask = _CAUSAL,
    candidates: Iterable[Tile] = CANDIDATES,
    call: Call = DEFAULT,
    say: Callable[[str], None] = lambda line: None,
) -> Sizes:
    """The fastest tiles for this head_dim and dtype, kept for `tuned.sizes_for`; several minutes.

    Args:
      shape: B, S, H, K that they are timed with, under `mask`.
      say: told of each candidate, a line.

    Raises:
      UserError: no GPU is here, or no candidate compiles for it.
    """
    device = jax.devices()[0]
    if device.platform != "gpu" and not call.interpret:
        raise UserError(f"Triton kernels are tuned on a GPU, and this is {device.device_kind}")
    B, S, H, K = shape
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (jax.random.normal(key, (B, S, n, h), dtype) for key, n in zip(keys, (H, K, K, H), strict=True))
    sizes = sizes_here(h, dtype)
    arrays = q, k, v, dout, triton.forward(q, k, v, mask, call, sizes)[1], jnp.zeros((B, H, S))

    def seconds_of(kernel: str, tile: Tile) -> float:
        tried = sizes._replace(**{kernel: tile})

        def run(q: Array, k: Array, v: Array, dout: Array, lse: Array, delta: Array) -> Array | tuple[Array, Array]:
            if kernel == "forward":
                return triton.forward(q, k, v, mask, call, tried)
            dq, dk, dv = triton.backward(q, k, v, dout, lse, delta, mask, call, tried)
            return dq if kernel == "dq" else (dk, dv)  # the other kernel is left out of the program

        try:
            return seconds(jax.jit(run).lower(*arrays).compile(), arrays)
        except jax.errors.JaxRuntimeError:  # more shared memory than there is
            return float("inf")

    for kernel in Sizes._fields:
        times = {}
        for tile in candidates:
            took = times[tile] = seconds_of(kernel, tile)
            say(f"{kernel} {tile.block_q} x {tile.block_k}, {tile.warps} warps, {tile.stages} stages: {took:.2e} s")
        best = min(times, key=times.__getitem__)
        if times[best] == float("inf"):
            raise UserError(f"no candidate of {kernel} compiles for {device.device_kind}")
        sizes = sizes._replace(**{kernel: best})
    keep_sizes(h, dtype, device.device_kind, sizes)
    return sizes


def seconds(run: Callable[..., object], arrays: Sequence[Array], rounds: int = 5, runs: int = 10) -> float:
    """The seconds of one run: the mean of the fastest round."""
    jax.block_until_ready(run(*arrays))
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        jax.block_until_ready([run(*arrays) for _ in range(runs)])
        times.append((time.perf_counter() - begin) / runs)
    return min(times)
