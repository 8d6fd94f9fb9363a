"""`jaxpar bench attention`: every implementation that serves, in one run and in turns.

What is counted, whoever serves: the FLOPs of the tiles of 128 x 128 in which the mask shows something. Forward two
matmuls, 4 H h of them a place; backward five, 2.5 times as many (FlashAttention-2, arXiv:2307.08691, section 4.1).

Shapes: as in `jaxpar.kernels.attention.call`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.base.errors import UserError, nearest
from jaxpar.base.jax_compat import compiler_said
from jaxpar.bench.alternate import mean_seconds
from jaxpar.kernels.attention import dispatch
from jaxpar.kernels.attention.call import Call
from jaxpar.kernels.masks import EMPTY, BigBird, Causal, Full, Mask, Segments, Tiles, Window, tile_states

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # a picture's, and not needed to measure

TILE = 128
LEAST_SECONDS = 0.02  # of calls that are timed together: the start of one takes a GPU's host longer than a small kernel
WINDOW = 1024  # of the masks here, as far as the sequence goes
DOCUMENT = 1024  # tokens, on average
MASKS: dict[str, Callable[[int, int], Mask]] = {
    "full": lambda B, S: Full(),
    "causal": lambda B, S: Causal(),
    "window": lambda B, S: Causal() & Window(min(WINDOW, S // 4) - 1),
    "documents": lambda B, S: Causal() & _documents(B, S),
    "bigbird": lambda B, S: BigBird(S, window=3, globals=1, random=2, block=TILE),
}
_LIBRARY = "jax, dense mask"
Direction = Literal["forward", "both"]


@dataclasses.dataclass(frozen=True)
class AttentionBenchArgs:
    """What is timed: every combination of the lists."""

    seq_lens: tuple[int, ...] = (1024, 2048)
    head_dims: tuple[int, ...] = (64,)
    masks: tuple[str, ...] = tuple(MASKS)
    implementations: tuple[str, ...] = ()
    """Those to time; none = all that serve here, and jax's own with a dense mask."""
    tokens: int = 2048
    """Of a batch: as many sequences as that makes, one at least."""
    heads: int = 4
    kv_heads: int = 2
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    rounds: int = 5
    """Turns; the median counts."""
    tune: bool = False
    """First try tiles for `pallas_gpu`, of the longest sequences here, and keep the fastest: several minutes."""
    json: str = ""
    """Where to write everything as JSON."""
    picture: str = ""
    """Where to draw TFLOP/s by sequence length (PNG)."""


class AttentionRow(NamedTuple):
    """One implementation on one mask; seconds are medians, of the forward alone and of forward and backward."""

    mask: str
    seq_len: int
    head_dim: int
    implementation: str
    forward: float
    both: float
    flops: float

    @property
    def rates(self) -> tuple[float, float]:
        """TFLOP/s of the forward, and of forward and backward."""
        return self.flops / self.forward / 1e12, 3.5 * self.flops / self.both / 1e12


def tune_first(bench: AttentionBenchArgs, say: Callable[[str], None] = lambda line: None) -> None:
    """Find the fastest tiles of the Triton kernels for each head_dim, which this machine then always takes.

    Raises:
      UserError: no GPU is here.
    """
    from jaxpar.kernels.attention.tuning import tune  # imports Triton's lowering, which is for GPUs only

    S = max(bench.seq_lens)
    for h in bench.head_dims:
        say(f"tuning pallas_gpu, head_dim {h}, {bench.dtype}")
        sizes = tune(h, jnp.dtype(bench.dtype), (max(bench.tokens // S, 1), S, bench.heads, bench.kv_heads), say=say)
        say("kept: " + "; ".join(f"{kernel} {'x'.join(map(str, tile))}" for kernel, tile in sizes._asdict().items()))


def bench_attention(bench: AttentionBenchArgs, say: Callable[[str], None] = lambda line: None) -> list[AttentionRow]:
    """The rows, in the order of the lists; what does not serve is said and left out.

    Raises:
      UserError: a mask or an implementation that is not known, heads that are no multiple of kv heads.
    """
    known = (*get_args(dispatch.Implementation), _LIBRARY)
    for word, choices in [(x, MASKS) for x in bench.masks] + [(x, known) for x in bench.implementations]:
        if word not in choices:
            raise UserError(f"bench attention knows no {word!r}{nearest(word, choices)}: try {', '.join(choices)}")
    if bench.heads % bench.kv_heads:
        raise UserError(f"{bench.heads} heads, no multiple of {bench.kv_heads} kv heads: try --heads {bench.kv_heads}")
    rows: list[AttentionRow] = []
    for h in bench.head_dims:
        for S in bench.seq_lens:
            for name in bench.masks:
                rows += _of_case(bench, name, S, h, say)
    return rows


def _of_case(bench: AttentionBenchArgs, name: str, S: int, h: int, say: Callable[[str], None]) -> list[AttentionRow]:
    B = max(1, bench.tokens // S)
    mask = MASKS[name](B, S)
    rng = np.random.default_rng(0)
    shapes = ((B, S, heads, h) for heads in (bench.heads, bench.kv_heads, bench.kv_heads, bench.heads))
    q, k, v, dout = (jnp.asarray(rng.standard_normal(shape), bench.dtype) for shape in shapes)
    platform = jax.default_backend()
    ready: dict[str, dict[Direction, Callable[[], Any]]] = {}
    for implementation in bench.implementations or (*get_args(dispatch.Implementation), _LIBRARY):
        asked = dispatch.Asked(q, k, mask, Call(), with_lse=False)
        why = "" if implementation == _LIBRARY else dispatch.refusal(implementation, asked, platform)
        if why:
            say(f"{name}, {S} x {h}: not {implementation}: {why}")
            continue
        say(f"{name}, {S} x {h}: compiling {implementation}")
        try:
            ready[implementation] = _compiled(implementation, mask, (q, k, v, dout))
        except (jax.errors.JaxRuntimeError, NotImplementedError, UserError, ValueError) as error:
            say(f"{name}, {S} x {h}: not {implementation}: {compiler_said(str(error) or repr(error))}")
    times: dict[tuple[str, Direction], list[float]] = {}
    calls: dict[tuple[str, Direction], int] = {
        (implementation, direction): int(np.clip(LEAST_SECONDS / mean_seconds(function, 1), 1, 100))
        for implementation, functions in ready.items()
        for direction, function in functions.items()
    }
    for _ in range(bench.rounds):
        for implementation, direction in calls:
            seconds = mean_seconds(ready[implementation][direction], calls[implementation, direction])
            times.setdefault((implementation, direction), []).append(seconds)
    flops = 4 * h * bench.heads * visible_places(mask, B, S)
    return [
        AttentionRow(
            name, S, h, one, float(np.median(times[one, "forward"])), float(np.median(times[one, "both"])), flops
        )
        for one in ready
    ]


def _compiled(implementation: str, mask: Mask, arrays: tuple[jax.Array, ...]) -> dict[Direction, Callable[[], Any]]:
    """Forward, and forward and backward, each called once already."""
    q, k, v, dout = arrays

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if implementation == _LIBRARY:
            i = jnp.arange(q.shape[1])
            seen: Any = mask.visible(i[:, None], i[None])
            return jax.nn.dot_product_attention(q, k, v, mask=seen if seen.ndim == 2 else seen[:, None])
        return dispatch.attention(q, k, v, mask, implementation=implementation, with_lse=False)[0]

    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        out, pull = jax.vjp(forward, q, k, v)
        return out, pull(dout)

    functions: dict[Direction, Any] = {"forward": jax.jit(forward), "both": jax.jit(both)}
    jax.block_until_ready([f(q, k, v) for f in functions.values()])
    return {name: (lambda f=f: f(q, k, v)) for name, f in functions.items()}


def visible_places(mask: Mask, B: int, S: int) -> int:
    """Places of the tiles in which something is seen, of all sequences."""
    states = np.asarray(tile_states(mask, Tiles(S, S, TILE, TILE)))
    sizes = np.minimum(TILE, S - np.arange(0, S, TILE))
    return int(np.sum((np.broadcast_to(states, (B, *states.shape[-2:])) != EMPTY) * np.outer(sizes, sizes)))


def _documents(B: int, S: int) -> Segments:
    rng = np.random.default_rng(1)
    ids = np.cumsum(rng.random((B, S)) < 1 / min(DOCUMENT, S // 4), axis=1).astype(np.int32)
    return Segments(jnp.asarray(ids), jnp.asarray(ids))


def attention_table(rows: Sequence[AttentionRow]) -> str:
    """A Markdown table, the fastest forward and backward of each case marked, and the formula."""
    head = "| mask | sequence | head_dim | implementation | forward, ms | TFLOP/s | forward + backward, ms | TFLOP/s |"
    lines = [head, "|---" * 8 + "|"]
    for row in rows:
        same = [other.both for other in rows if other[:3] == row[:3]]
        name = f"**{row.implementation}**" if row.both == min(same) else row.implementation
        (forward, both), times = row.rates, (1e3 * row.forward, 1e3 * row.both)
        measured = f"{times[0]:.3f}", f"{forward:.2f}", f"{times[1]:.3f}", f"{both:.2f}"
        lines.append("| " + " | ".join(map(str, (*row[:3], name, *measured))) + " |")
    formula = f"FLOPs: 4 H h a place of the {TILE} x {TILE} tiles that are not empty; with the backward 3.5 times that."
    return "\n".join([*lines, "", formula])


def attention_json(bench: AttentionBenchArgs, rows: Sequence[AttentionRow]) -> dict[str, Any]:
    """Everything, with what it ran on."""
    device = jax.devices()[0]
    where = {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}
    return {**where, "bench": dataclasses.asdict(bench), "rows": [row._asdict() for row in rows]}


def attention_figure(rows: Sequence[AttentionRow], title: str) -> Figure:
    """TFLOP/s of forward and backward by sequence length: a panel a mask and head_dim, a line an implementation."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row.mask, row.head_dim) for row in rows))
    names = list(dict.fromkeys(row.implementation for row in rows))
    figure = Figure(figsize=(3.1 * len(panels) + 0.6, 3.6), dpi=120, layout="constrained")
    for axes, (mask, head_dim) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for i, name in enumerate(names):
            mine = [row for row in rows if (row.mask, row.head_dim, row.implementation) == (mask, head_dim, name)]
            points = [(row.seq_len, row.rates[1]) for row in mine]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=f"C{i}", label=name)
        lengths = sorted({row.seq_len for row in rows})
        axes.set(xscale="log", title=f"{mask}, head_dim {head_dim}", xlabel="sequence", ylim=(0, None))
        axes.set_xticks(lengths, [str(x) for x in lengths], minor=False)
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.axes[0].set_ylabel("TFLOP/s, forward and backward")
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure
