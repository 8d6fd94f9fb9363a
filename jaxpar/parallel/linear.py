"""The parallel ops a model calls: lookup, column and row linear, attention, dropout, loss.

A model states logical axes; the plan says where they live. Each op has the layout its arrays are *stored* in between
ops (the residual stream split over `residual_seq`) and the one they are *used* in (the sequence gathered, heads or mlp
split). Its forward and its backward are written out, with every collective where it stands: weights are gathered in
the compute dtype, weight gradients are summed in float32. How a linear's gather and scatter of the sequence run
beside its matmul is the plan's `overlap`: see `jaxpar.parallel.ring_matmul`.

Shapes: B batch, S sequence, T tokens (B x S), D embed, H heads, K kv heads, h head_dim, V vocab, I and O the flattened
input and output dims of a linear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.base.mesh import MeshAxis
from jaxpar.base.sharding import Form, LogicalAxis, Move, Plan, beside, copying, state_axes
from jaxpar.kernels.attention import dispatch
from jaxpar.kernels.attention.call import MASKED, Call, capped
from jaxpar.kernels.masks import Causal, Mask, Segments, Window
from jaxpar.parallel.collectives import further_split, gather, manual, own_piece, reduce, split_over
from jaxpar.parallel.context import check_split, kernel_for, split_attention
from jaxpar.parallel.remat import named
from jaxpar.parallel.ring_matmul import all_gather_matmul, matmul_reduce_scatter

__all__ = ["attention", "column_linear", "dropout", "logits", "lookup", "row_linear"]

_Axes = tuple[LogicalAxis | None, ...]
STORED: _Axes = ("batch", "residual_seq", None)
GATHERED: _Axes = ("batch", "seq", None)
ATTENDED: _Axes = ("batch", "attention_seq", None)


class _Site(NamedTuple):
    """Layouts of one linear as its arrays lie between ops: input, weights and outputs."""

    x: _Axes
    weights: tuple[_Axes, ...]
    ys: tuple[_Axes, ...]
    used: _Axes
    """Of the residual stream where it is multiplied."""
    out_dtype: str
    sums: bool
    """A row linear: its one output is summed over the devices that split its input, and scattered. Else a column
    linear: its input is gathered."""

    def form(self, move: Move, plan: Plan) -> Form:
        """How the plan makes a move here: by the hidden dim, which is a row linear's input and a column's output."""
        hidden = self.x if self.sums else self.ys[0]
        return plan.overlap.form(move, hidden[2])


def column_linear(
    x_BSD: Float[Array, "B S D"],
    weights: Sequence[Float[Array, "D ..."]],
    axes: Sequence[Sequence[LogicalAxis | None]],
    plan: Plan,
    biases: Sequence[Float[Array, ...] | None] | None = None,
    seq: LogicalAxis = "seq",
) -> tuple[Array, ...]:
    """`x @ w` for several weights that share one gather of x: q, k, v together; gate and up together.

    Megatron's column-parallel linear (Shoeybi et al. 2019, arXiv:1909.08053): x arrives split over the sequence, is
    gathered once, and the outputs stay split over their first dim.

    Where rules split heads further than kv heads, the outputs of kv heads are copies, split as heads are: the least
    common multiple of kv heads and devices, each kv head several times in a row. A device has the weights of all kv
    heads, multiplies those that its query heads need, and the weight gradients are summed over the copies.

    Args:
      x_BSD: the residual stream, split over `residual_seq`.
      weights: arrays [D, *out], logical axes ("embed", *axes[i]).
      axes: logical axes of each weight's output dims, such as ("heads", "head_dim").
      plan: mesh, rules and compute dtype.
      biases: arrays [*out], or None where there is none.
      seq: logical axis of the outputs' sequence: "attention_seq" for q, k and v.

    Returns:
      One array [B, S, *out] per weight, in the compute dtype.
    """
    outs: tuple[_Axes, ...] = tuple(("batch", seq, *(beside(axis, plan) for axis in out)) for out in axes)
    used: _Axes = ("batch", seq, None)
    site = _Site(STORED, tuple(("embed", *out) for out in axes), outs, used, plan.compute, sums=False)
    ys: Any = _linear(plan, site, x_BSD, tuple(weights), tuple(biases or (None,) * len(weights)))
    return ys


def row_linear(
    h_BSI: Float[Array, "B S ..."],
    weight: Float[Array, "... D"],
    axes: Sequence[LogicalAxis | None],
    plan: Plan,
    bias: Float[Array, " D"] | None = None,
    seq: LogicalAxis = "seq",
) -> Float[Array, "B S D"]:
    """`h @ w` where the contracted dims are split: Megatron's row-parallel linear, its sum scattered over the sequence.

    Args:
      h_BSI: array [B, S, *in], split as `axes` say.
      weight: array [*in, D], logical axes (*axes, "embed").
      axes: logical axes of the input dims, such as ("mlp",).
      plan: mesh, rules and compute dtype.
      bias: array [D], added once, after the sum.
      seq: logical axis of the input's sequence: "attention_seq" for the output of attention.

    Returns:
      The residual stream's layout [B, S, D], in the compute dtype.
    """
    site = _Site(("batch", seq, *axes), ((*axes, "embed"),), (STORED,), ("batch", seq, None), plan.compute, sums=True)
    ys: Any = _linear(plan, site, h_BSI, (weight,), (bias,))
    return ys[0]


def overlap_notes(plan: Plan, seq_len: int) -> list[str]:
    """Where a ring that the plan asks for gives way to a collective, or to one way: for the log.

    Args:
      plan: mesh, rules and forms of overlap.
      seq_len: of the training sequences.
    """
    asked = {name: form for name, form in vars(plan.overlap).items() if form in ("ring", "bidirectional")}
    if not asked:
        return []
    flags, moves = " and ".join(f"overlap.{name}" for name in asked), further_split(STORED, GATHERED, plan)
    if not moves:
        return [
            f"{flags}: no ring, since rules.residual_seq splits the sequence no further than rules.seq on this mesh"
        ]
    attention, notes = further_split(STORED, ATTENDED, plan), []
    if attention != moves:
        ring = f"the ring is {' x '.join(attention[0][1])}" if attention else "no ring"
        over = " x ".join(plan.mesh_axes("attention_seq"))
        notes.append(f"{flags}: {ring} at attention, whose sequence is split over {over} (rules.attention_seq)")
    sums = {beside("kv_heads", plan): attention, "heads": attention, "mlp": moves}
    for axis, moved in sums.items() if any("scatter" in name for name in asked) else ():
        split, rings = plan.mesh_axes(axis), [ring for _, ring in moved]
        if split and rings and set(split) != set(rings[0]):
            over, around = " x ".join(split), " x ".join(rings[0])
            notes.append(f"overlap.scatter: sums over {over} (rules.{axis}) take a collective, the ring is {around}")
    if "bidirectional" in asked.values() and seq_len // plan.size("residual_seq") < 2:
        notes.append(f"{flags}: a device has a single row of the sequence, which goes one way")
    return notes


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linear(
    plan: Plan, site: _Site, x: Array, weights: tuple[Array, ...], biases: tuple[Array | None, ...]
) -> tuple[Array, ...]:
    def local(x: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        x, used = x.astype(plan.dtype), _used(weights, site, plan)
        if site.sums:
            products, over = [(x, used[0])], split_over(used_axes(site.weights[0])[:-1], plan)
            form = site.form("scatter", plan)
            return (matmul_reduce_scatter(products, over, site.used, STORED, site.out_dtype, plan, form),)
        form = site.form("gather", plan)
        return tuple(all_gather_matmul(x, used, STORED, site.used, site.out_dtype, plan, form)[1])

    ys = manual(local, plan, (site.x, site.weights), site.ys)(x, weights)
    return tuple(
        y if bias is None else y + _repeated(bias, y).astype(y.dtype) for y, bias in zip(ys, biases, strict=True)
    )


def _linear_forward(plan, site, x, weights, biases):
    return _linear(plan, site, x, weights, biases), (x, weights, biases)


def _linear_backward(plan, site, residuals, dys):
    def local(x: Array, weights: tuple[Array, ...], dys: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        dx_dtype, x, used = x.dtype, x.astype(plan.dtype), _used(weights, site, plan)
        dys = tuple(dy.astype(plan.dtype) for dy in dys)
        split = x.ndim - 2  # the weight's leading dims are x's trailing ones
        swapped = [jnp.transpose(weight, (*range(split, weight.ndim), *range(split))) for weight in used]
        gathers, scatters = site.form("gather", plan), site.form("scatter", plan)
        if site.sums:
            dy, (dx,) = all_gather_matmul(dys[0], swapped, STORED, site.used, plan.compute, plan, gathers)
            dys = (dy,)
        else:
            # What is partial over the same mesh axes is added up before it is sent.
            groups: dict[tuple[MeshAxis, ...], list[tuple[Array, Array]]] = {}
            for dy, weight, axes in zip(dys, swapped, site.ys, strict=True):
                groups.setdefault(split_over(axes[2:], plan), []).append((dy, weight))
            dx = sum(
                matmul_reduce_scatter(products, over, site.used, STORED, plan.compute, plan, scatters)
                for over, products in groups.items()
            )
            x, _ = all_gather_matmul(x, (), STORED, site.used, plan.compute, plan, gathers)
        dweights = tuple(
            _summed(_matmul_transposed(x, dy, w.shape, plan), weight, axes, dim, split_over(site.used[:2], plan), plan)
            for dy, w, weight, axes, dim in zip(dys, used, weights, site.weights, _copied_dims(site, plan), strict=True)
        )
        return jnp.asarray(dx, dx_dtype), tuple(d.astype(w.dtype) for d, w in zip(dweights, weights, strict=True))

    x, weights, biases = residuals
    dlayouts = (site.x, tuple(state_axes(axes) for axes in site.weights))
    dx, dweights = manual(local, plan, (site.x, site.weights, site.ys), dlayouts)(x, weights, tuple(dys))
    dbiases = tuple(None if bias is None else _bias_gradient(dy, bias) for bias, dy in zip(biases, dys, strict=True))
    return dx, dweights, dbiases


_linear.defvjp(_linear_forward, _linear_backward)


def used_axes(axes: _Axes) -> _Axes:
    """The layout of a weight as it is multiplied: whole over `embed`."""
    return tuple(None if axis == "embed" else axis for axis in axes)


def _used(weights: Sequence[Array], site: _Site, plan: Plan) -> list[Array]:
    used = (use(weight, axes, plan) for weight, axes in zip(weights, site.weights, strict=True))
    return [_copied(weight, dim, plan) for weight, dim in zip(used, _copied_dims(site, plan), strict=True)]


def _copied_dims(site: _Site, plan: Plan) -> list[int | None]:
    """Of each weight the dim of which devices take copies of kv heads; None = none."""
    copies = bool(copying(plan)) and not site.sums
    return [axes.index("kv_heads") if copies and "kv_heads" in axes else None for axes in site.weights]


def _copied(weight: Array, dim: int | None, plan: Plan) -> Array:
    """Inside `manual`, of a weight of kv heads those that this device's query heads attend with."""
    if dim is None:
        return weight
    axes = copying(plan)
    devices = plan.pieces(axes)
    times = devices // math.gcd(devices, weight.shape[dim])
    return own_piece(jnp.repeat(weight, times, axis=dim), axes, dim, devices)


def _summed(dweight: Array, weight: Array, axes: _Axes, dim: int | None, tokens: tuple[MeshAxis, ...], plan: Plan):
    """Inside `manual`, a device's weight gradient summed over tokens and copies, as gradients are stored."""
    if dim is not None:
        whole = jax.ShapeDtypeStruct((*dweight.shape[:dim], weight.shape[dim], *dweight.shape[dim + 1 :]), jnp.float32)
        (dweight,) = jax.linear_transpose(lambda w: _copied(w, dim, plan), whole)(dweight)
        tokens += copying(plan)
    return reduce(dweight, tokens, used_axes(axes), state_axes(axes), plan)


def _repeated(bias: Array, y: Array) -> Array:
    """A bias [*out] for an output [B, S, *out] in which kv heads are copied."""
    for dim, (size, wanted) in enumerate(zip(bias.shape, y.shape[2:], strict=True)):
        bias = bias if size == wanted else jnp.repeat(bias, wanted // size, axis=dim)
    return bias


def _bias_gradient(dy: Array, bias: Array) -> Array:
    """The gradient of a bias [*out], summed over tokens and copies in float32."""
    dbias = jnp.sum(dy, axis=(0, 1), dtype=jnp.float32)
    (dbias,) = jax.linear_transpose(lambda b: _repeated(b, dy), jax.ShapeDtypeStruct(bias.shape, jnp.float32))(dbias)
    return dbias.astype(bias.dtype)


def use(weight: Array, axes: _Axes, plan: Plan) -> Array:
    """Inside `manual`, a weight as it is multiplied: cast first and gathered after, so half the bytes travel."""
    return gather(weight.astype(plan.dtype), axes, used_axes(axes), plan)


def _matmul_transposed(x: Array, dy: Array, shape: tuple[int, ...], plan: Plan) -> Array:
    """The weight gradient: [B, S, *in] and [B, S, *out] contracted over the tokens, summed in float32."""
    if _platform(plan) == "tpu" and len(x) > 1:
        over = (0, 1)  # of heads that lie [B, H, h, S] XLA would make copies, to have one dim of the two
    else:
        over = (0,)  # two dims XLA:CPU would transpose
        x, dy = (array.reshape(array.shape[0] * array.shape[1], -1) for array in (x, dy))
    return jax.lax.dot_general(x, dy, ((over, over), ((), ())), preferred_element_type=jnp.float32).reshape(shape)


def lookup(
    table_VD: Float[Array, "V D"], ids_BS: Int[Array, "B S"], axis: LogicalAxis | None, plan: Plan
) -> Float[Array, "B S D"]:
    """Rows of an embedding table, in the compute dtype and the residual stream's layout.

    Args:
      table_VD: the table, logical axes (axis, "embed").
      ids_BS: row numbers.
      axis: logical axis of the table's rows: "vocab", or None for a table that is never split by rows.
      plan: mesh, rules and compute dtype.

    Raises:
      UserError: rules that split tokens and rows over the same mesh axis.
    """
    plan.sharding((*GATHERED[:2], axis), name="lookup")
    rows: Any = _lookup(table_VD, ids_BS, axis, plan)
    return rows


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(table_VD: Array, ids_BS: Array, axis: LogicalAxis | None, plan: Plan) -> Array:
    # Left to itself XLA gathers the whole table. Each device looks up the rows it has, and the rest are zeros.
    def local(table_VD: Array, ids_BS: Array) -> Array:
        table_VD = use(table_VD, (axis, "embed"), plan)
        ids_BS, here_BS = _local_ids(ids_BS, table_VD.shape[0], axis, plan)
        rows_BSD = jnp.where(here_BS[..., None], table_VD[ids_BS], 0)
        return reduce(rows_BSD, plan.mesh_axes(axis), GATHERED, STORED, plan)

    return manual(local, plan, ((axis, "embed"), GATHERED[:2]), STORED)(table_VD, ids_BS)


def _local_ids(ids_BS: Array, rows: int, axis: LogicalAxis | None, plan: Plan) -> tuple[Array, Array]:
    """Inside `manual`: ids counted from this device's first row, and which of them it has."""
    shard = jax.lax.axis_index(plan.mesh_axes(axis)) if plan.mesh_axes(axis) else 0
    ids_BS = ids_BS - shard * rows
    here_BS = (ids_BS >= 0) & (ids_BS < rows)
    return jnp.where(here_BS, ids_BS, 0), here_BS


def _lookup_forward(table_VD, ids_BS, axis, plan):
    return _lookup(table_VD, ids_BS, axis, plan), (table_VD, ids_BS)


def _lookup_backward(axis, plan, residuals, dx_BSD):
    def local(table_VD: Array, ids_BS: Array, dx_BSD: Array) -> Array:
        dx_BSD = gather(dx_BSD, STORED, GATHERED, plan)
        rows = table_VD.shape[0]
        ids_BS, here_BS = _local_ids(ids_BS, rows, axis, plan)
        dx_BSD = jnp.where(here_BS[..., None], dx_BSD.astype(jnp.float32), 0)
        dtable_VD = jnp.zeros((rows, dx_BSD.shape[-1]), jnp.float32).at[ids_BS].add(dx_BSD)
        dtable_VD = reduce(dtable_VD, split_over(GATHERED[:2], plan), (axis, None), state_axes(stored), plan)
        return dtable_VD.astype(table_VD.dtype)

    table_VD, ids_BS = residuals
    stored: _Axes = (axis, "embed")
    return manual(local, plan, (stored, GATHERED[:2], STORED), state_axes(stored))(table_VD, ids_BS, dx_BSD), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def attention(
    q_BSHh: Float[Array, "B S H h"],
    k_BSKh: Float[Array, "B S K h"],
    v_BSKh: Float[Array, "B S K h"],
    plan: Plan,
    segments_BS: Int[Array, "B S"] | None = None,
    dropout_rate: float = 0.0,
    key: jax.Array | None = None,
    window: int = 0,
) -> Float[Array, "B S H h"]:
    """Causal softmax attention by the fastest implementation that serves: see `jaxpar.kernels`.

    Args:
      q_BSHh, k_BSKh, v_BSKh: projections of one sequence as `column_linear` gives them, H a multiple of K; tokens
        `in_order`.
      plan: mesh, rules and compute dtype.
      segments_BS: document of each token; a token sees its own document only. None = one document.
      dropout_rate, key: dropout of the attention weights; none when key is None.
      window: a token sees so many tokens up to itself (arXiv:2310.06825, section 2); 0 = all before it.

    Raises:
      UserError: what `context.check_split` refuses.
    """
    mask, dropping = _mask(window), key is not None and dropout_rate > 0
    B, S, H, h = q_BSHh.shape
    batch = max(B // plan.size("batch"), 1)
    name, _ = attention_choice(plan, S, h, dropping, window, segments_BS is not None, batch=batch)
    if plan.size("attention_seq") > 1:
        check_split(plan, S, H, k_BSKh.shape[2], dropout_rate if dropping else 0.0)

    def local(q_BSHh: Array, k_BSKh: Array, v_BSKh: Array, segments_BS: Array | None) -> Array:
        seen = mask if segments_BS is None else mask & Segments(segments_BS, segments_BS)
        drop = dropout_rate if dropping else 0.0
        return dispatch.attention(
            q_BSHh, k_BSKh, v_BSKh, seen, implementation=name, platform=_platform(plan), dropout_rate=drop, key=key,
            with_lse=False,
        )[0]  # fmt: skip

    heads: _Axes = (*ATTENDED[:2], "heads", "head_dim")
    with jax.named_scope("core"):
        if plan.size("attention_seq") == 1 and (_cut_heads(plan) or dropping):
            # What is dropped depends on the place in the whole array.
            return named(plan.constrain(local(q_BSHh, k_BSKh, v_BSKh, segments_BS), heads), "attention_out")
        if name in dispatch.PAIRS or plan.size("attention_seq") > 1:
            return split_attention(plan, mask, q_BSHh, k_BSKh, v_BSKh, segments_BS)
        kv_heads: _Axes = (*ATTENDED[:2], beside("kv_heads", plan), "head_dim")
        segment_axes: Any = None if segments_BS is None else ATTENDED[:2]
        layouts = heads, kv_heads, kv_heads, segment_axes
        return manual(local, plan, layouts, heads)(q_BSHh, k_BSKh, v_BSKh, segments_BS)


def attention_choice(
    plan: Plan,
    seq_len: int,
    head_dim: int,
    dropping: bool,
    window: int = 0,
    packed: bool = False,
    platform: str = "",
    batch: int = 1,
) -> tuple[str, str]:
    """Which implementation `attention` takes under this plan, and why not one before it.

    Args:
      plan: mesh and rules.
      seq_len, head_dim: of the arrays.
      dropping: weights are dropped out.
      window: as for `attention`.
      packed: with documents.
      platform: what it is compiled for; empty = that of the plan's devices.
      batch: sequences of a device.

    Raises:
      UserError: the plan asks for one that cannot serve.
    """
    name, why = _kernel_choice(plan, seq_len, head_dim, dropping, window, packed, platform, batch)
    if plan.size("attention_seq") > 1:
        return plan.context.strategy, "the sequence is split over devices"
    if plan.attention != "auto":
        dispatch.say_once(f"attention by {name}, which kernels.attention asks for")
    return name, why


def attention_notes(
    plan: Plan, seq_len: int, head_dim: int, dropping: bool, window: int = 0, packed: bool = False, batch: int = 1
) -> list[str]:
    """Why no kernel serves where there are some, for the log; arguments as for `attention_choice`."""
    if plan.attention != "auto":
        return []
    name, why = _kernel_choice(plan, seq_len, head_dim, dropping, window, packed, "", batch)
    return [f"attention by plain XLA, in tiles, and no kernel ({why})"] if name == "chunked" and why else []


def _kernel_choice(
    plan: Plan, seq_len: int, head_dim: int, dropping: bool, window: int, packed: bool, platform: str, batch: int
) -> tuple[str, str]:
    """As `attention_choice`; of a sequence that is split, what computes its parts."""
    one = jax.ShapeDtypeStruct((batch, seq_len // plan.size("attention_seq"), 1, head_dim), plan.dtype)
    ids = jax.ShapeDtypeStruct((batch, seq_len), jnp.int32)
    mask = _mask(window) & Segments(ids, ids) if packed else _mask(window)  # pyright: ignore[reportArgumentType]
    platform = platform or _platform(plan)
    if plan.size("attention_seq") > 1:
        return kernel_for(plan, mask, one, one, platform)
    asked = dispatch.Asked(one, one, mask, Call(), with_lse=False, dropping=dropping, cut=_cut_heads(plan))
    return dispatch.choose(asked, platform, plan.attention)


def _mask(window: int) -> Mask:
    return Causal() & Window(window - 1) if window else Causal()


def _cut_heads(plan: Plan) -> str:
    """Why a device's heads are not whole ones with their kv heads; empty = they are."""
    if plan.size("head_dim") > 1:
        return "heads are split inside"
    if plan.mesh_axes("heads") != plan.mesh_axes("kv_heads") and not copying(plan):
        return "kv heads are split otherwise than heads"
    return ""


def _platform(plan: Plan) -> str:
    return plan.mesh.devices.flat[0].platform


def dropout(x: Array, rate: float, key: jax.Array | None) -> Array:
    """`x` with a share `rate` of its entries zeroed and the rest scaled up; `x` itself when key is None.

    The bits depend on the key and the position in the global array only, so they are the same on every mesh.
    """
    if key is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0).astype(x.dtype)


def logits(
    x_BSD: Float[Array, "B S D"], head_VD: Float[Array, "V D"], vocab_size: int, plan: Plan, softcap: float = 0.0
) -> Float[Array, "B S V"]:
    """Float32 scores of every vocabulary entry, split over `vocab`; those past `vocab_size` are masked out."""
    outs: tuple[_Axes, ...] = (("batch", "seq", "vocab"),)
    site = _Site(STORED, (("embed", "vocab"),), outs, GATHERED, "float32", sums=False)
    ys: Any = _linear(plan, site, x_BSD, (head_VD.T,), (None,))
    logits_BSV = capped(ys[0], softcap)
    if vocab_size == head_VD.shape[0]:
        return logits_BSV
    return jnp.where(jnp.arange(head_VD.shape[0]) < vocab_size, logits_BSV, MASKED)
