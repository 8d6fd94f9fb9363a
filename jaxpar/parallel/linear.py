"""Column- and row-parallel linears with their gradients: Megatron's pair, sequence parallelism and FSDP at once.

The caller states logical axes; the layout says where they live. Each op has the layout its arrays are *stored* in
between ops (the residual stream split over `residual_seq`) and the one they are *used* in (the sequence gathered,
heads or mlp split). Its forward and its backward are written out, with every collective where it stands: weights are
gathered in the compute dtype, weight gradients are summed in float32. How a linear's gather and scatter of the
sequence run beside its matmul is `overlap`: see `jaxpar.parallel.ring_matmul`.

Shapes: B batch, S sequence, T tokens (B x S), D embed, K kv heads, V vocab, I and O the flattened input and output dims
of a linear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.base.heads import beside, copying
from jaxpar.base.mesh import MeshAxis
from jaxpar.base.plan import Form
from jaxpar.base.sharding import Layout, LogicalAxis, state_axes
from jaxpar.kernels.attention.call import MASKED, capped
from jaxpar.parallel.collectives import gather, manual_vjp, own_piece, platform_of, reduce, split_over
from jaxpar.parallel.ring_matmul import all_gather_matmul, matmul_reduce_scatter

_Axes = tuple[LogicalAxis | None, ...]
STORED: _Axes = ("batch", "residual_seq", None)
GATHERED: _Axes = ("batch", "seq", None)
ATTENDED: _Axes = ("batch", "attention_seq", None)
Overlapping = Form | tuple[Form, Form]
"""One form for both moves, or one for gathers and one for scatters."""


class _Site(NamedTuple):
    """Layouts of one linear as its arrays lie between ops (input, weights and outputs), and the forms of its moves."""

    x: _Axes
    weights: tuple[_Axes, ...]
    ys: tuple[_Axes, ...]
    used: _Axes
    """Of the residual stream where it is multiplied."""
    out_dtype: str
    sums: bool
    """A row linear: its one output is summed over the devices that split its input, and scattered. Else a column
    linear: its input is gathered."""
    gathers: Form
    """Of the sequence: a column linear's forward, a row linear's backward."""
    scatters: Form
    """Of sums over the sequence: a row linear's forward, a column linear's backward."""


@overload
def column_linear(
    x_BSD: Float[Array, "B S D"], weights: Array, axes: Sequence[LogicalAxis | None], layout: Layout, *,
    biases: Array | None = None, seq: LogicalAxis = "seq", overlap: Overlapping = "xla",
) -> Array: ...  # fmt: skip


@overload
def column_linear(
    x_BSD: Float[Array, "B S D"], weights: Sequence[Array], axes: Sequence[Sequence[LogicalAxis | None]],
    layout: Layout, *, biases: Sequence[Array | None] | None = None, seq: LogicalAxis = "seq",
    overlap: Overlapping = "xla",
) -> tuple[Array, ...]: ...  # fmt: skip


def column_linear(
    x_BSD: Float[Array, "B S D"], weights: Any, axes: Any, layout: Layout, *, biases: Any = None,
    seq: LogicalAxis = "seq", overlap: Overlapping = "xla",
) -> Any:  # fmt: skip
    """`x @ w` for a weight, or for several that share one gather of x: q, k, v together; gate and up together.

    Megatron's column-parallel linear (Shoeybi et al. 2019, arXiv:1909.08053): x arrives split over the sequence, is
    gathered once, and the outputs stay split over their first dim.

    Where rules split heads further than kv heads, the outputs of kv heads are copies, split as heads are: the least
    common multiple of kv heads and devices, each kv head several times in a row. A device has the weights of all kv
    heads, multiplies those that its query heads need, and the weight gradients are summed over the copies.

    Args:
      x_BSD: the residual stream, split over `residual_seq`.
      weights: an array [D, *out] with logical axes ("embed", *axes), or a sequence of such.
      axes: logical axes of the weight's output dims, such as ("heads", "head_dim"), or a sequence of such.
      layout: mesh, rules and compute dtype.
      biases: an array [*out], or a sequence with None where there is none.
      seq: logical axis of the outputs' sequence: "attention_seq" for q, k and v.
      overlap: how the gather, and in the backward the scatter, run beside the matmuls: one form, or one of each.

    Returns:
      An array [B, S, *out] in the compute dtype; a tuple of them where weights are a sequence.

    Raises:
      UserError: a form that there is not; logical axes or rules that do not go together.
    """
    if not isinstance(weights, list | tuple):
        return column_linear(x_BSD, (weights,), (axes,), layout, biases=(biases,), seq=seq, overlap=overlap)[0]
    outs: tuple[_Axes, ...] = tuple(("batch", seq, *(beside(axis, layout) for axis in out)) for out in axes)
    stored: tuple[_Axes, ...] = tuple(("embed", *out) for out in axes)
    layout.sharding(STORED, x_BSD.shape, "x")
    for weight, axes_of in zip(weights, stored, strict=True):
        layout.sharding(axes_of, weight.shape, "weight")
    site = _Site(STORED, stored, outs, ("batch", seq, None), layout.compute, False, *_forms(overlap))
    ys = _linear(layout, site, x_BSD, tuple(weights))
    return tuple(_plus(y, bias) for y, bias in zip(ys, biases or (None,) * len(ys), strict=True))


def row_linear(
    h_BSI: Float[Array, "B S ..."], weight: Float[Array, "... D"], axes: Sequence[LogicalAxis | None], layout: Layout,
    *, bias: Float[Array, " D"] | None = None, seq: LogicalAxis = "seq", overlap: Overlapping = "xla",
) -> Float[Array, "B S D"]:  # fmt: skip
    """`h @ w` where the contracted dims are split: Megatron's row-parallel linear, its sum scattered over the sequence.

    Args:
      h_BSI: array [B, S, *in], split as `axes` say.
      weight: array [*in, D], logical axes (*axes, "embed").
      axes: logical axes of the input dims, such as ("mlp",).
      layout: mesh, rules and compute dtype.
      bias: array [D], added once, after the sum.
      seq: logical axis of the input's sequence: "attention_seq" for the output of attention.
      overlap: as for `column_linear`; here the forward scatters and the backward gathers.

    Returns:
      The residual stream's layout [B, S, D], in the compute dtype.

    Raises:
      UserError: as `column_linear`.
    """
    used: _Axes = ("batch", seq, None)
    layout.sharding(("batch", seq, *axes), h_BSI.shape, "input")
    layout.sharding((*axes, "embed"), weight.shape, "weight")
    site = _Site(("batch", seq, *axes), ((*axes, "embed"),), (STORED,), used, layout.compute, True, *_forms(overlap))
    return _plus(_linear(layout, site, h_BSI, (weight,))[0], bias)


def logits(
    x_BSD: Float[Array, "B S D"], head_VD: Float[Array, "V D"], layout: Layout, *, vocab_size: int = 0,
    softcap: float = 0.0, overlap: Overlapping = "xla",
) -> Float[Array, "B S V"]:  # fmt: skip
    """Float32 scores of every vocabulary entry, split over `vocab`.

    Args:
      x_BSD: final hidden states in the residual stream's layout.
      head_VD: vocabulary matrix, logical axes ("vocab", "embed").
      layout: mesh, rules and compute dtype.
      vocab_size: the true vocabulary; scores of the rows past it are masked out. 0 = all rows.
      softcap: scores become `softcap * tanh(score / softcap)` (arXiv:2408.00118, section 2); 0 = as they are.
      overlap: as for `column_linear`.
    """
    outs: tuple[_Axes, ...] = (("batch", "seq", "vocab"),)
    site = _Site(STORED, (("embed", "vocab"),), outs, GATHERED, "float32", False, *_forms(overlap))
    logits_BSV = capped(_linear(layout, site, x_BSD, (head_VD.T,))[0], softcap)
    if vocab_size in (0, head_VD.shape[0]):
        return logits_BSV
    return jnp.where(jnp.arange(head_VD.shape[0]) < vocab_size, logits_BSV, MASKED)


def _forms(overlap: Overlapping) -> tuple[Form, Form]:
    return overlap if isinstance(overlap, tuple) else (overlap, overlap)


def _linear(layout: Layout, site: _Site, x: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
    def forward(x: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        x, used = x.astype(layout.dtype), _used(weights, site, layout)
        if site.sums:
            products, over = [(x, used[0])], split_over(used_axes(site.weights[0])[:-1], layout)
            return (matmul_reduce_scatter(products, over, site.used, STORED, site.out_dtype, layout, site.scatters),)
        return tuple(all_gather_matmul(x, used, STORED, site.used, site.out_dtype, layout, site.gathers)[1])

    def backward(x: Array, weights: tuple[Array, ...], dys: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        dx_dtype, x, used = x.dtype, x.astype(layout.dtype), _used(weights, site, layout)
        dys = tuple(dy.astype(layout.dtype) for dy in dys)
        split = x.ndim - 2  # the weight's leading dims are x's trailing ones
        swapped = [jnp.transpose(weight, (*range(split, weight.ndim), *range(split))) for weight in used]
        if site.sums:
            dy, (dx,) = all_gather_matmul(dys[0], swapped, STORED, site.used, layout.compute, layout, site.gathers)
            dys = (dy,)
        else:
            # What is partial over the same mesh axes is added up before it is sent.
            groups: dict[tuple[MeshAxis, ...], list[tuple[Array, Array]]] = {}
            for dy, weight, axes in zip(dys, swapped, site.ys, strict=True):
                groups.setdefault(split_over(axes[2:], layout), []).append((dy, weight))
            dx = sum(
                matmul_reduce_scatter(products, over, site.used, STORED, layout.compute, layout, site.scatters)
                for over, products in groups.items()
            )
            x, _ = all_gather_matmul(x, (), STORED, site.used, layout.compute, layout, site.gathers)
        tokens, dims = split_over(site.used[:2], layout), _copied_dims(site, layout)
        dweights = tuple(
            _summed(_matmul_transposed(x, dy, use.shape, layout), weight, axes, dim, tokens, layout)
            for dy, use, weight, axes, dim in zip(dys, used, weights, site.weights, dims, strict=True)
        )
        return jnp.asarray(dx, dx_dtype), dweights

    return manual_vjp(forward, backward, layout, (site.x, site.weights), site.ys)(x, weights)


def used_axes(axes: _Axes) -> _Axes:
    """The layout of a weight as it is multiplied: whole over `embed`."""
    return tuple(None if axis == "embed" else axis for axis in axes)


def _used(weights: Sequence[Array], site: _Site, layout: Layout) -> list[Array]:
    used = (use(weight, axes, layout) for weight, axes in zip(weights, site.weights, strict=True))
    return [_copied(weight, dim, layout) for weight, dim in zip(used, _copied_dims(site, layout), strict=True)]


def _copied_dims(site: _Site, layout: Layout) -> list[int | None]:
    """Of each weight the dim of which devices take copies of kv heads; None = none."""
    copies = bool(copying(layout)) and not site.sums
    return [axes.index("kv_heads") if copies and "kv_heads" in axes else None for axes in site.weights]


def _copied(weight: Array, dim: int | None, layout: Layout) -> Array:
    """Inside `manual`, of a weight of kv heads those that this device's query heads attend with."""
    if dim is None:
        return weight
    axes = copying(layout)
    devices = layout.pieces(axes)
    times = devices // math.gcd(devices, weight.shape[dim])
    return own_piece(jnp.repeat(weight, times, axis=dim), axes, dim, devices)


def _summed(
    dweight: Array, weight: Array, axes: _Axes, dim: int | None, tokens: tuple[MeshAxis, ...], layout: Layout
) -> Array:
    """Inside `manual`, a device's weight gradient summed over tokens and copies, as gradients are stored."""
    if dim is not None:
        whole = jax.ShapeDtypeStruct((*dweight.shape[:dim], weight.shape[dim], *dweight.shape[dim + 1 :]), jnp.float32)
        (dweight,) = jax.linear_transpose(lambda w: _copied(w, dim, layout), whole)(dweight)
        tokens += copying(layout)
    return reduce(dweight, tokens, used_axes(axes), state_axes(axes), layout).astype(weight.dtype)


def _plus(y: Array, bias: Array | None) -> Array:
    """An output [B, S, *out], whose kv heads may be copies, plus its bias [*out]: added, and so summed, in float32."""
    if bias is None:
        return y
    for dim, (size, wanted) in enumerate(zip(bias.shape, y.shape[2:], strict=True)):
        bias = bias if size == wanted else jnp.repeat(bias, wanted // size, axis=dim)
    return (y.astype(jnp.float32) + bias.astype(jnp.float32)).astype(y.dtype)


def use(weight: Array, axes: _Axes, layout: Layout) -> Array:
    """Inside `manual`, a weight as it is multiplied: cast first and gathered after, so half the bytes travel."""
    return gather(weight.astype(layout.dtype), axes, used_axes(axes), layout)


def _matmul_transposed(x: Array, dy: Array, shape: tuple[int, ...], layout: Layout) -> Array:
    """The weight gradient: [B, S, *in] and [B, S, *out] contracted over the tokens, summed in float32."""
    if platform_of(layout) == "tpu" and len(x) > 1:
        over = (0, 1)  # of heads that lie [B, H, h, S] XLA would make copies, to have one dim of the two
    else:
        over = (0,)  # two dims XLA:CPU would transpose
        x, dy = (array.reshape(array.shape[0] * array.shape[1], -1) for array in (x, dy))
    return jax.lax.dot_general(x, dy, ((over, over), ((), ())), preferred_element_type=jnp.float32).reshape(shape)
