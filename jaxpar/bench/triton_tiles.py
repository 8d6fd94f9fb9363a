"""Find the fastest tiles of the Triton kernels on the GPU at hand, by trying them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxpar.base.errors import UserError
from jaxpar.bench.alternate import alternate
from jaxpar.kernels.attention import triton
from jaxpar.kernels.attention.call import DEFAULT, Call
from jaxpar.kernels.attention.tuned import Sizes, Tile, keep_sizes, sizes_here
from jaxpar.kernels.masks import Causal

CANDIDATES = tuple(Tile(*sizes) for sizes in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (2, 3)))


def tune(
    h: int,
    dtype: DTypeLike,
    shape: tuple[int, int, int, int],
    say: Callable[[str], None],
    candidates: Iterable[Tile] = CANDIDATES,
    call: Call = DEFAULT,
) -> Sizes:
    """Find the fastest tiles for this head_dim and dtype and keep them for `tuned.sizes_for`; this takes minutes.

    Args:
      shape: B, S, H and K of the arrays that the tiles are timed with, under a causal mask.
      say: receives a line for each candidate.

    Raises:
      UserError: there is no GPU here, or no candidate compiles for it.
    """
    device, mask = jax.devices()[0], Causal()
    if device.platform != "gpu" and not call.interpret:
        raise UserError(f"Triton kernels are tuned on a GPU, and this is {device.device_kind}")
    B, S, H, K = shape
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (jax.random.normal(key, (B, S, n, h), dtype) for key, n in zip(keys, (H, K, K, H), strict=True))
    sizes = sizes_here(h, dtype)
    arrays = q, k, v, dout, triton.forward(q, k, v, mask, call, sizes)[1], jnp.zeros((B, H, S))

    def run(
        kernel: str, tried: Sizes, q: Array, k: Array, v: Array, dout: Array, lse: Array, delta: Array
    ) -> Array | tuple[Array, Array]:
        if kernel == "forward":
            return triton.forward(q, k, v, mask, call, tried)
        dq, dk, dv = triton.backward(q, k, v, dout, lse, delta, mask, call, tried)
        return dq if kernel == "dq" else (dk, dv)  # the other kernel is left out of the program

    for kernel in Sizes._fields:
        tiles, ready = {str(tile): tile for tile in candidates}, {}
        for name, tile in tiles.items():
            timed = partial(jax.jit(partial(run, kernel, sizes._replace(**{kernel: tile}))), *arrays)
            try:
                jax.block_until_ready(timed())
                ready[name] = timed
            except jax.errors.JaxRuntimeError:  # these tiles ask for more shared memory than there is
                say(f"{kernel} {name}: does not compile")
        if not ready:
            raise UserError(f"no candidate of {kernel} compiles for {device.device_kind}")
        timings = alternate(ready, rounds=5)
        for name, timing in timings.items():
            say(f"{kernel} {name}: {timing.seconds:.2e} s")
        fastest = min(timings, key=lambda name: timings[name].seconds)
        sizes = sizes._replace(**{kernel: tiles[fastest]})
    keep_sizes(h, dtype, device.device_kind, sizes)
    return sizes
