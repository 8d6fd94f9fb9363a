"""`jaxpar bench attention` times every implementation that serves, in one run and in turns.

Whichever serves, it counts the FLOPs of the tiles of 128 x 128 in which the mask shows something. The forward has two
matmuls, 4 H h FLOPs a place; the backward has five, 2.5 times that (FlashAttention-2, arXiv:2307.08691, section 4.1).

Shapes: as in `jaxpar.kernels.attention.call`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.base.errors import UserError, suggest
from jaxpar.base.jax_compat import compiler_message
from jaxpar.bench.alternate import Row, alternate
from jaxpar.kernels.attention import dispatch
from jaxpar.kernels.attention.call import Call
from jaxpar.kernels.masks import EMPTY, BigBird, Causal, Full, Mask, Segments, Tiles, Window, tile_states

TILE = 128
WINDOW = 1024  # the window of the masks here, at most the whole sequence
DOCUMENT = 1024  # the tokens of a document, on average
MASKS: dict[str, Callable[[int, int], Mask]] = {
    "full": lambda B, S: Full(),
    "causal": lambda B, S: Causal(),
    "window": lambda B, S: Causal() & Window(min(WINDOW, S // 4) - 1),
    "documents": lambda B, S: Causal() & _documents(B, S),
    "bigbird": lambda B, S: BigBird(S, window=3, globals=1, random=2, block=TILE),
}
FLOPS = f"FLOPs: 4 H h a place of the {TILE} x {TILE} tiles that are not empty; with the backward 3.5 times that."
_LIBRARY = "jax, dense mask"
_KNOWN = (*get_args(dispatch.Implementation), _LIBRARY)


@dataclasses.dataclass(frozen=True)
class AttentionBenchArgs:
    """What to time: every combination of the lists."""

    seq_lens: tuple[int, ...] = (1024, 2048)
    head_dims: tuple[int, ...] = (64,)
    masks: tuple[str, ...] = tuple(MASKS)
    implementations: tuple[str, ...] = ()
    """The implementations to time; none = all that serve here, and jax's own with a dense mask."""
    tokens: int = 2048
    """The tokens of a batch, which has as many sequences as that makes, but at least one."""
    heads: int = 4
    kv_heads: int = 2
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    rounds: int = 5
    """How many turns each takes; the median counts."""
    json: str = ""
    """Where to write everything as JSON."""


def bench_attention(bench: AttentionBenchArgs, say: Callable[[str], None] = lambda line: None) -> list[Row]:
    """Give a row for each combination, in the order of the lists; `say` is told of implementations that cannot serve.

    Raises:
      UserError: a mask or an implementation is not known, heads are no multiple of kv heads.
    """
    for word, choices in [(x, MASKS) for x in bench.masks] + [(x, _KNOWN) for x in bench.implementations]:
        if word not in choices:
            raise UserError(f"bench attention knows no {word!r}{suggest(word, choices)}: try {', '.join(choices)}")
    if bench.heads % bench.kv_heads:
        raise UserError(f"{bench.heads} heads, no multiple of {bench.kv_heads} kv heads: try --heads {bench.kv_heads}")
    rows: list[Row] = []
    for h, S, name in product(bench.head_dims, bench.seq_lens, bench.masks):
        rows += _rows_of(bench, name, S, h, say)
    return rows


def _rows_of(bench: AttentionBenchArgs, name: str, S: int, h: int, say: Callable[[str], None]) -> list[Row]:
    """The rows of one case, one for each implementation that serves."""
    B = max(1, bench.tokens // S)
    mask = MASKS[name](B, S)
    rng = np.random.default_rng(0)
    shapes = ((B, S, heads, h) for heads in (bench.heads, bench.kv_heads, bench.kv_heads, bench.heads))
    q, k, v, dout = (jnp.asarray(rng.standard_normal(shape), bench.dtype) for shape in shapes)
    asked = dispatch.Asked(q, k, mask, Call(), with_lse=False)
    ready: dict[str, Callable[[], object]] = {}
    for implementation in bench.implementations or _KNOWN:
        why = "" if implementation == _LIBRARY else dispatch.refusal(implementation, asked, jax.default_backend())
        if not why:
            say(f"{name}, {S} x {h}: compiling {implementation}")
            forward = partial(_attend, implementation, mask)
            calls = {
                f"{implementation} forward": partial(jax.jit(forward), q, k, v),
                f"{implementation} both": partial(jax.jit(partial(_with_gradients, forward)), q, k, v, dout),
            }
            try:
                jax.block_until_ready([call() for call in calls.values()])
                ready |= calls
            except (jax.errors.JaxRuntimeError, NotImplementedError, UserError, ValueError) as error:
                why = compiler_message(str(error) or repr(error))
        if why:
            say(f"{name}, {S} x {h}: not {implementation}: {why}")
    flops, rows = 4 * h * bench.heads * visible_places(mask, B, S), []
    timings = alternate(ready, bench.rounds)
    for implementation in dict.fromkeys(key.rpartition(" ")[0] for key in timings):
        forward, both = (timings[f"{implementation} {way}"].seconds for way in ("forward", "both"))
        rows.append({
            "mask": name, "sequence": S, "head_dim": h, "implementation": implementation,
            "forward, ms": 1e3 * forward, "forward, TFLOP/s": flops / forward / 1e12,
            "both, ms": 1e3 * both, "both, TFLOP/s": 3.5 * flops / both / 1e12,
        })  # fmt: skip
    return rows


def _attend(implementation: str, mask: Mask, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    if implementation != _LIBRARY:
        return dispatch.attention(q, k, v, mask, implementation=implementation, with_lse=False)[0]
    i = jnp.arange(q.shape[1])
    seen = jnp.asarray(mask.visible(i[:, None], i[None]))
    return jax.nn.dot_product_attention(q, k, v, mask=seen if seen.ndim == 2 else seen[:, None])


def _with_gradients(
    forward: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array
) -> tuple[jax.Array, ...]:
    out, pull = jax.vjp(forward, q, k, v)
    return out, *pull(dout)


def visible_places(mask: Mask, B: int, S: int) -> int:
    """How many places the tiles have in which something is seen, over all sequences."""
    states = np.asarray(tile_states(mask, Tiles(S, S, TILE, TILE)))
    sizes = np.minimum(TILE, S - np.arange(0, S, TILE))
    return int(np.sum((np.broadcast_to(states, (B, *states.shape[-2:])) != EMPTY) * np.outer(sizes, sizes)))


def _documents(B: int, S: int) -> Segments:
    rng = np.random.default_rng(1)
    ids = np.cumsum(rng.random((B, S)) < 1 / min(DOCUMENT, S // 4), axis=1).astype(np.int32)
    return Segments(jnp.asarray(ids), jnp.asarray(ids))
