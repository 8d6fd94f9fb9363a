"""Times every implementation of attention that serves, in one run and in turns.

Whichever serves, it counts the FLOPs of the tiles of 128 x 128 in which the mask shows something.
The forward has two matmuls, 4 H h FLOPs a place; the backward has five, 2.5 times that
(FlashAttention-2, arXiv:2307.08691, section 4.1).

Shapes: as in `jaxpar.kernels.attention.call`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from on_gpu.pieces import Say

from jaxpar.base.errors import UserError
from jaxpar.base.jax_compat import compiler_message
from jaxpar.bench.measure import BenchRow, alternate
from jaxpar.kernels.attention import dispatch
from jaxpar.kernels.attention.call import Call
from jaxpar.kernels.attention.kernel import AttentionRequest
from jaxpar.kernels.masks import (
    EMPTY,
    Causal,
    Full,
    Mask,
    Segments,
    Tiles,
    Window,
    bigbird,
    tile_states,
)

TILE = 128
WINDOW = 1024  # the window of the masks here, at most the whole sequence
DOCUMENT = 1024  # the tokens of a document, on average
MASKS: dict[str, Callable[[int, int], Mask]] = {
    "full": lambda B, S: Full(),
    "causal": lambda B, S: Causal(),
    "window": lambda B, S: Causal() & Window(min(WINDOW, S // 4) - 1),
    "documents": lambda B, S: Causal() & _documents(B, S),
    "bigbird": lambda B, S: bigbird(
        S,
        window=3,
        globals=1,
        random=2,
        block=TILE,
    ),
}


def attention_rows(
    name: str,
    S: int,
    h: int,
    implementations: Sequence[str],
    tokens: int,
    heads: int,
    rounds: int,
    say: Say,
) -> list[BenchRow]:
    """A row for each implementation that serves, in bfloat16 with as many kv heads as heads.

    Args:
      name: the mask, one of MASKS.
      tokens: those of a batch, which has as many sequences as that makes, but at least one.
      rounds: how many turns each takes; the median counts.
      say: is told of implementations that cannot serve.
    """
    B = max(1, tokens // S)
    mask = MASKS[name](B, S)
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        jnp.asarray(rng.standard_normal((B, S, heads, h)), jnp.bfloat16) for _ in range(4)
    )
    request = AttentionRequest(q, k, mask, Call(), with_lse=False)
    ready: dict[str, Callable[[], object]] = {}
    for implementation in implementations:
        why = dispatch.refusal(implementation, request, jax.default_backend())
        if not why:
            forward = partial(_attend, implementation, mask)
            calls = {
                f"{implementation} forward": partial(jax.jit(forward), q, k, v),
                f"{implementation} both": partial(
                    jax.jit(partial(_with_gradients, forward)), q, k, v, dout
                ),
            }
            try:
                jax.block_until_ready([call() for call in calls.values()])
                ready |= calls
            except (
                jax.errors.JaxRuntimeError,
                NotImplementedError,
                UserError,
                ValueError,
            ) as error:
                why = compiler_message(str(error) or repr(error))
        if why:
            say(f"not {implementation}: {why}")
    flops = 4 * h * heads * visible_places(mask, B, S)
    rows = []
    timings = alternate(ready, rounds)
    for implementation in dict.fromkeys(key.rpartition(" ")[0] for key in timings):
        forward, both = (timings[f"{implementation} {way}"].seconds for way in ("forward", "both"))
        rows.append(
            {
                "implementation": implementation,
                "forward, ms": 1e3 * forward,
                "forward, TFLOP/s": flops / forward / 1e12,
                "both, ms": 1e3 * both,
                "both, TFLOP/s": 3.5 * flops / both / 1e12,
            }
        )
    return rows


def _attend(
    implementation: str,
    mask: Mask,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> jax.Array:
    return dispatch.attention(q, k, v, mask, implementation=implementation, with_lse=False)[0]


def _with_gradients(
    forward: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array
) -> tuple[jax.Array, ...]:
    out, pull = jax.vjp(forward, q, k, v)
    return out, *pull(dout)


def visible_places(mask: Mask, B: int, S: int) -> int:
    """How many places the tiles have in which something is seen, over all sequences."""
    states = np.asarray(tile_states(mask, Tiles(S, S, TILE, TILE)))
    sizes = np.minimum(TILE, S - np.arange(0, S, TILE))
    return int(
        np.sum((np.broadcast_to(states, (B, *states.shape[-2:])) != EMPTY) * np.outer(sizes, sizes))
    )


def _documents(B: int, S: int) -> Segments:
    rng = np.random.default_rng(1)
    ids = np.cumsum(rng.random((B, S)) < 1 / min(DOCUMENT, S // 4), axis=1).astype(np.int32)
    return Segments(jnp.asarray(ids), jnp.asarray(ids))
