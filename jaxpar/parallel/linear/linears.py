"""Column- and row-parallel linears with their gradients: Megatron's pair, sequence parallelism and
FSDP at once.

The caller states logical axes; the layout says where they live. Each op has one layout in which its
arrays are *stored* between ops (the residual stream split over `residual_seq`) and one in which
they are *used* (the sequence gathered, heads or mlp split). The forward and the backward are
written out, with every collective where it stands: weights are gathered in the compute dtype, and
weight gradients are summed in float32. `overlap` says how a linear's gather and scatter of the
sequence run beside its matmul: see `jaxpar.parallel.linear.ring_matmul`.

Shapes: B batch, S sequence, T tokens (B x S), D embed, K kv heads, V vocab, I and O a linear's
flattened dims.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.base.arguments import require_number, require_whole
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshAxis
from jaxpar.base.layout.plan import Form
from jaxpar.base.layout.sharding import (
    Axes,
    Layout,
    LogicalAxis,
    kv_copy_axes,
    output_axis,
    require_layout,
    state_axes,
)
from jaxpar.base.layout.specs import require_axes
from jaxpar.kernels.attention.call import MASKED, cap_scores
from jaxpar.kernels.weight_forms import WeightForm
from jaxpar.parallel.collectives import (
    gather,
    manual_vjp,
    own_piece,
    platform_of,
    reduce,
    split_over,
)
from jaxpar.parallel.linear.ring_matmul import all_gather_matmul, matmul_reduce_scatter
from jaxpar.parallel.linear.weight_view import (
    Weight,
    form_of,
    pull,
    read,
    require_units,
    stored_array,
)
from jaxpar.parallel.linear.zero_blocks import Factor, find_zero_blocks

STORED: Axes = ("batch", "residual_seq", None)
GATHERED: Axes = ("batch", "seq", None)
ATTENDED: Axes = ("batch", "attention_seq", None)
Overlapping = Form | tuple[Form, Form]
"""One form for both moves, or one for gathers and one for scatters."""


def column_linear(
    x_BSD: Float[Array, "B S D"],
    weights: Any,
    axes: Any,
    layout: Layout,
    *,
    biases: Any = None,
    seq: LogicalAxis | Sequence[LogicalAxis] = "seq",
    overlap: Overlapping = "xla",
) -> Any:
    """Compute `x @ w` for one weight, or for several that share a gather of x, such as q, k and v,
    or gate and up.

    This is Megatron's column-parallel linear (Shoeybi et al. 2019, arXiv:1909.08053): x arrives
    split over the sequence and is gathered once, and the outputs stay split over their first dim.

    Where the rules split heads further than kv heads, the outputs of kv heads are copies, split as
    heads are. Their number is the least common multiple of kv heads and devices, with each kv head
    several times in a row. A device has the weights of all kv heads and multiplies those that its
    query heads need; gradients are summed over copies.

    Args:
      x_BSD: the residual stream, split over `residual_seq`.
      weights: an array [D, *out] with logical axes ("embed", *axes), or a sequence of such arrays;
        each may be a `WeightView`.
      axes: logical axes of the weight's output dims, such as ("heads", "head_dim"), or a sequence
        of such axes.
      biases: an array [*out], or for several weights a sequence with None where there is none. A
        bias has the shape of its weight's output dims, kv heads that are copied included: their
        bias is copied with them.
      seq: logical axis of the outputs' sequence, which is "attention_seq" for q, k and v; or one
        for each weight, of which those that lie alike share a gather.
      overlap: how the gather, and in the backward the scatter, run beside the matmuls: one form, or
        one for each.

    Returns:
      An array [B, S, *out] in the compute dtype, or a tuple of such arrays where weights are a
      sequence.

    Raises:
      UserError: there is no such form, the logical axes or rules do not fit together, or a bias not
        its weight; or a device has no whole units of a view.
    """
    require_layout(layout, "column_linear")
    if not isinstance(weights, list | tuple):
        require_axes(axes, "column_linear")
        return column_linear(
            x_BSD, (weights,), (axes,), layout, biases=(biases,), seq=seq, overlap=overlap
        )[0]
    if isinstance(axes, str) or len(axes) != len(weights):
        raise UserError(
            f"column_linear was given {len(weights)} weights and the axes {axes!r}: give axes "
            "for each"
        )
    for out in axes:
        require_axes(out, "column_linear")
    if not isinstance(seq, str):
        return _columns_by_sequence(x_BSD, weights, axes, layout, biases, seq, overlap)
    outs: tuple[Axes, ...] = tuple(
        ("batch", seq, *(output_axis(axis, layout) for axis in out)) for out in axes
    )
    stored: tuple[Axes, ...] = tuple(("embed", *out) for out in axes)
    layout.sharding(STORED, x_BSD.shape, "x")
    for weight, axes_of in zip(weights, stored, strict=True):
        layout.sharding(axes_of, weight.shape, "weight")
        require_units(form_of(weight), weight.shape, axes_of, layout, 1, what="weight")
        _require_width("column_linear", x_BSD.shape, weight.shape, 1)
    if biases is None or (isinstance(biases, list | tuple) and not biases):
        biases = (None,) * len(weights)
    if not isinstance(biases, list | tuple) or len(biases) != len(weights):
        if isinstance(biases, list | tuple):
            found = f"{len(biases)} biases"
        else:
            found = "one bias"
        raise UserError(
            f"column_linear was given {len(weights)} weights and {found}: give one for each, or "
            "None"
        )
    for weight, bias in zip(weights, biases, strict=True):
        _require_bias("column_linear", bias, weight.shape[1:])
    used: Axes = ("batch", seq, None)
    ys = _columns(
        x_BSD, tuple(weights), layout, stored=stored, outs=outs, used=used, overlap=overlap
    )
    return tuple(_plus(y, bias, out, layout) for y, bias, out in zip(ys, biases, axes, strict=True))


def _columns_by_sequence(
    x_BSD: Array,
    weights: Sequence[Weight],
    axes: Sequence[Axes],
    layout: Layout,
    biases: Any,
    seqs: Sequence[LogicalAxis],
    overlap: Overlapping,
) -> tuple[Array, ...]:
    """`column_linear` of weights whose outputs' sequences have an axis each: those that lie alike
    share a gather.
    """
    if len(seqs) != len(weights):
        raise UserError(
            f"column_linear was given {len(weights)} weights and {len(seqs)} axes of a sequence: "
            "give one for each, or one for all"
        )
    biases = biases or (None,) * len(weights)
    found: dict[int, Array] = {}
    for _, places in _alike([layout.mesh_axes(seq) for seq in seqs]):
        ys = column_linear(
            x_BSD,
            [weights[i] for i in places],
            [axes[i] for i in places],
            layout,
            biases=[biases[i] for i in places],
            seq=seqs[places[0]],
            overlap=overlap,
        )
        found |= dict(zip(places, ys, strict=True))
    return tuple(found[i] for i in range(len(weights)))


def _alike(keys: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    """The places of equal keys, in the order in which the keys come first."""
    places: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        places.setdefault(key, []).append(i)
    return list(places.items())


def row_linear(
    h_BSI: Any,
    weight: Any,
    axes: Any,
    layout: Layout,
    *,
    bias: Any = None,
    seq: LogicalAxis | Sequence[LogicalAxis] = "seq",
    to: LogicalAxis = "embed",
    overlap: Overlapping = "xla",
) -> Float[Array, "B S D"]:
    """Compute `h @ w` over split dims: Megatron's row-parallel linear, whose sum is scattered over
    the sequence. Or compute the sum of several such products, which is scattered as one.

    Args:
      h_BSI: an array [B, S, *in], split as `axes` say, or a sequence of such arrays.
      weight: an array [*in, D] with logical axes (*axes, to), or a `WeightView` of one; or one for
        each of several inputs.
      axes: logical axes of the input dims, such as ("mlp",), or a sequence of such axes.
      bias: an array [D] that is added once, after the sum; or one, or None, for each of several.
      seq: logical axis of the input's sequence, which is "attention_seq" for the output of
        attention; or one for each. Inputs that lie alike, and are summed over the same devices,
        share a scatter.
      to: logical axis of the output dim, which is "rank" for the first of two matrices of low rank.
      overlap: as for `column_linear`; here the forward scatters and the backward gathers.

    Returns:
      The output [B, S, D], in the compute dtype and the residual stream's layout.

    Raises:
      UserError: as for `column_linear`.
    """
    require_layout(layout, "row_linear")
    if not isinstance(h_BSI, list | tuple):
        h_BSI, weight, axes, bias = (h_BSI,), (weight,), (axes,), (bias,)
    seqs = (seq,) * len(h_BSI) if isinstance(seq, str) else tuple(seq)
    biases = bias or (None,) * len(h_BSI)
    if not len(h_BSI) == len(weight) == len(axes) == len(biases) == len(seqs):
        raise UserError(
            f"row_linear was given {len(h_BSI)} inputs, {len(weight)} weights, {len(axes)} axes, "
            f"{len(biases)} biases and {len(seqs)} axes of a sequence: give one of each"
        )
    rows = [
        _row(h, one, ins, to, seq, layout)
        for h, one, ins, seq in zip(h_BSI, weight, axes, seqs, strict=True)
    ]
    keys = [(split_over(used_axes(row.ins), layout), layout.mesh_axes(row.used[1])) for row in rows]
    parts = []
    for (partial, _), places in _alike(keys):
        inputs = tuple(h_BSI[i] for i in places)
        weights = tuple(stored_array(weight[i]) for i in places)
        run = _rows([rows[i] for i in places], partial, layout, overlap)
        parts.append(run(inputs, weights))
    y_BSD = functools.reduce(jnp.add, parts)
    for row, one in zip(rows, biases, strict=True):
        _require_bias("row_linear", one, row.width)
        y_BSD = _plus(y_BSD, one, (to,), layout)
    return y_BSD


class _Row(NamedTuple):
    """One weight of row linears: how it and its input lie."""

    ins: Axes
    """The logical axes of the input dims."""
    used: Axes
    """The layout of the sum before it is scattered."""
    stored: Axes
    """The logical axes of the weight."""
    form: WeightForm | None
    """The form in which the weight's entries are read."""
    width: tuple[int, ...]
    """The shape of the weight's output dims."""

    @property
    def split(self) -> Axes:
        """The logical axes of the input."""
        return (*self.used[:2], *self.ins)

    def use(self, weight: Array, layout: Layout, swapped: bool = False) -> Factor:
        """Inside `manual`: the weight as it is multiplied."""
        count = len(self.ins)
        whole = gather_weight(read(weight, self.form, count), self.stored, layout)
        return _factor(whole, self.form, count, layout, swapped)


def _row(
    h: Array, weight: Weight, ins: Axes, to: LogicalAxis, seq: LogicalAxis, layout: Layout
) -> _Row:
    """What `row_linear` knows of one weight, held against its input."""
    require_axes(ins, "row_linear")
    count = len(ins)
    row = _Row(
        tuple(ins), ("batch", seq, None), (*ins, to), form_of(weight), tuple(weight.shape[count:])
    )
    layout.sharding(row.split, h.shape, "input")
    layout.sharding(row.stored, weight.shape, "weight")
    require_units(row.form, weight.shape, row.stored, layout, count, what="weight")
    _require_width("row_linear", h.shape, weight.shape, count)
    return row


def _rows(
    rows: Sequence[_Row], partial: tuple[MeshAxis, ...], layout: Layout, overlap: Overlapping
) -> Callable[[tuple[Array, ...], tuple[Array, ...]], Array]:
    """Row linears whose sum is partial over the same mesh axes, and scattered as one."""
    used = rows[0].used
    gathers, scatters = _forms(overlap)

    def forward(hs: tuple[Array, ...], weights: tuple[Array, ...]) -> Array:
        products = [
            (h.astype(layout.dtype), row.use(weight, layout))
            for row, h, weight in zip(rows, hs, weights, strict=True)
        ]
        return matmul_reduce_scatter(products, partial, used, STORED, layout, scatters)

    def backward(
        hs: tuple[Array, ...], weights: tuple[Array, ...], dy: Array
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        swapped = [
            row.use(weight, layout, swapped=True) for row, weight in zip(rows, weights, strict=True)
        ]
        dy = dy.astype(layout.dtype)
        dy, dhs = all_gather_matmul(dy, swapped, STORED, used, layout.compute, layout, gathers)
        dweights = []
        for row, h, weight in zip(rows, hs, weights, strict=True):
            narrow = h.astype(layout.dtype)
            dweight = _weight_gradient(narrow, dy, weight, row.stored, used, layout, None)
            dweights.append(pull(dweight, row.form, len(row.ins)))
        dhs = (dh.astype(h.dtype) for dh, h in zip(dhs, hs, strict=True))
        return tuple(dhs), tuple(dweights)

    of_inputs = tuple(row.split for row in rows)
    of_weights = tuple(row.stored for row in rows)
    return manual_vjp(forward, backward, layout, (of_inputs, of_weights), STORED)


def rank_linear(
    u_BSr: Float[Array, "B S r"],
    weight: Array,
    axes: Axes,
    layout: Layout,
    *,
    seq: LogicalAxis = "seq",
) -> Array:
    """Compute `u @ w` from a low rank r, the second matmul of LoRA (Hu et al. 2021,
    arXiv:2106.09685).

    Args:
      u_BSr: a result of `column_linear` or `row_linear` whose last dim is "rank": every device has
        all of r.
      weight: an array [r, *out] with logical axes ("rank", *axes).
      axes: logical axes of the output dims: those of a column linear, or ("embed",).
      seq: logical axis of the sequence of u and of the output, which is "residual_seq" after a row
        linear.

    Returns:
      An array [B, S, *out] in the compute dtype, laid out like the output of the linear that it is
      added to.
    """
    require_layout(layout, "rank_linear")
    require_axes(axes, "rank_linear")
    used: Axes = ("batch", seq, None)
    outs: Axes = (
        "batch",
        seq,
        *used_axes([output_axis(axis, layout) for axis in axes]),
    )
    stored: Axes = ("rank", *axes)
    layout.sharding(stored, weight.shape, "weight")
    _require_width("rank_linear", u_BSr.shape, weight.shape, 1)
    return _columns(
        u_BSr, (weight,), layout, stored=(stored,), outs=(outs,), given=used, used=used
    )[0]


def logits(
    x_BSD: Float[Array, "B S D"],
    head_VD: Float[Array, "V D"],
    layout: Layout,
    *,
    bias_V: Float[Array, " V"] | None = None,
    vocab_size: int = 0,
    softcap: float = 0.0,
    overlap: Overlapping = "xla",
) -> Float[Array, "B S V"]:
    """Compute scores of every vocabulary entry.

    Args:
      x_BSD: final hidden states in the residual stream's layout.
      head_VD: the vocabulary matrix, with logical axes ("vocab", "embed").
      layout: mesh, rules and compute dtype.
      bias_V: what is added to the score of each entry, with the logical axis "vocab"; None =
        nothing is.
      vocab_size: the true vocabulary; scores of the rows past it are masked out. 0 = all rows.
      softcap: scores become `softcap * tanh(score / softcap)` (arXiv:2408.00118, section 2); 0 = as
        they are.
      overlap: as for `column_linear`.

    Returns:
      The float32 scores [B, S, V], with logical axes ("batch", "seq", "vocab").

    Raises:
      UserError: the arrays do not fit together, or a number is out of its range.
    """
    require_layout(layout, "logits")
    require_head("logits", x_BSD, head_VD, layout, bias_V)
    require_whole("logits", "vocab_size", vocab_size, least=0, most=head_VD.shape[0])
    require_number("logits", "softcap", softcap, least=0)
    stored: Axes = ("embed", "vocab")
    outs: Axes = ("batch", "seq", "vocab")
    (logits_BSV,) = _columns(
        x_BSD,
        (head_VD.T,),
        layout,
        stored=(stored,),
        outs=(outs,),
        used=GATHERED,
        dtype="float32",
        overlap=overlap,
    )
    logits_BSV = cap_scores(_plus(logits_BSV, bias_V, ("vocab",), layout), softcap)
    if vocab_size in (0, head_VD.shape[0]):
        return logits_BSV
    return jnp.where(jnp.arange(head_VD.shape[0]) < vocab_size, logits_BSV, MASKED)


def require_head(
    what: str, x_BSD: Array, head_VD: Array, layout: Layout, bias_V: Array | None = None
) -> None:
    """Refuse hidden states and a head that do not fit together.

    Args:
      what: the op, with which a message begins.
      x_BSD: the hidden states.
      head_VD: the vocabulary matrix.
      layout: mesh and rules.
      bias_V: what is added to the scores, or None.

    Raises:
      UserError: the mesh does not divide an array, the two differ in D, or the bias has another
        length than the matrix.
    """
    _require_bias(what, bias_V, head_VD.shape[:1])
    layout.sharding(STORED, x_BSD.shape, "x")
    layout.sharding(("vocab", "embed"), head_VD.shape, "head")
    _require_width(what, x_BSD.shape, head_VD.shape[::-1], 1)


def _require_width(
    what: str,
    given: Sequence[int],
    weight: Sequence[int],
    dims: int,
) -> None:
    """Refuse an input whose last dims are not the first ones of the weight."""
    if tuple(given[len(given) - dims :]) != tuple(weight[:dims]):
        raise UserError(
            f"{what}: an input of shape {tuple(given)} does not fit a weight whose first "
            f"{'dim is' if dims == 1 else 'dims are'} {', '.join(map(str, weight[:dims]))}"
        )


def _require_bias(what: str, bias: Any, out: Sequence[int]) -> None:
    """Refuse a bias that has not the shape of its weight's output dims: it would be added at other
    places.
    """
    shape = getattr(bias, "shape", None)
    if bias is not None and shape != tuple(out):
        if shape is not None:
            found = f"one of shape {tuple(shape)}"
        else:
            found = f"a value of type {type(bias).__name__}"
        raise UserError(
            f"{what}: a bias has the shape of the weight's output dims, {tuple(out)}, and was "
            f"given {found}: "
            f"give an array of shape {tuple(out)}"
        )


def _forms(overlap: Overlapping) -> tuple[Form, Form]:
    if isinstance(overlap, tuple):
        return overlap
    return (overlap, overlap)


def _columns(
    x: Array,
    weights: tuple[Weight, ...],
    layout: Layout,
    *,
    stored: tuple[Axes, ...],
    outs: tuple[Axes, ...],
    used: Axes,
    dtype: str = "",
    overlap: Overlapping = "xla",
    given: Axes = STORED,
) -> tuple[Array, ...]:
    """Column linears that share one gather of x from the layout `given` to `used`; `dtype` is that
    of their outputs.
    """
    dtype = dtype or layout.compute
    gathers, scatters = _forms(overlap)
    views = [form_of(weight) for weight in weights]
    arrays = tuple(stored_array(weight) for weight in weights)
    copies = [
        axes.index("kv_heads") if kv_copy_axes(layout) and "kv_heads" in axes else None
        for axes in stored
    ]

    def use_all(weights: tuple[Array, ...], swapped: bool = False) -> list[Factor]:
        used_weights = []
        for weight, form, axes, dim in zip(weights, views, stored, copies, strict=True):
            whole = gather_weight(read(weight, form, 1), axes, layout)
            own = _own_kv_heads(whole, dim, layout)
            used_weights.append(_factor(own, form, 1, layout, swapped, in_order=dim is None))
        return used_weights

    def forward(x: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        x = x.astype(layout.dtype)
        return tuple(all_gather_matmul(x, use_all(weights), given, used, dtype, layout, gathers)[1])

    def backward(
        x: Array, weights: tuple[Array, ...], dys: tuple[Array, ...]
    ) -> tuple[Array, tuple[Array, ...]]:
        dys = tuple(dy.astype(layout.dtype) for dy in dys)
        # Arrays that are partial over the same mesh axes are added up before they are sent.
        groups: dict[tuple[MeshAxis, ...], list[tuple[Array, Factor]]] = {}
        for dy, weight, axes in zip(dys, use_all(weights, swapped=True), outs, strict=True):
            groups.setdefault(split_over(axes[2:], layout), []).append((dy, weight))
        parts = (
            matmul_reduce_scatter(group, over, used, given, layout, scatters)
            for over, group in groups.items()
        )
        dx = functools.reduce(jnp.add, parts).astype(x.dtype)
        x, _ = all_gather_matmul(
            x.astype(layout.dtype), (), given, used, layout.compute, layout, gathers
        )
        dweights = (
            _weight_gradient(x, dy, weight, axes, used, layout, dim)
            for dy, weight, axes, dim in zip(dys, weights, stored, copies, strict=True)
        )
        of_stored = (pull(dweight, form, 1) for dweight, form in zip(dweights, views, strict=True))
        return dx, tuple(of_stored)

    return manual_vjp(forward, backward, layout, (given, stored), outs)(x, arrays)


def used_axes(axes: Axes) -> Axes:
    """The layout in which a weight is multiplied: it is whole over `embed`."""
    return tuple(None if axis == "embed" else axis for axis in axes)


def _own_kv_heads(weight: Array, dim: int | None, layout: Layout) -> Array:
    """Inside `manual`: pick from a weight of kv heads those that this device's query heads attend
    with.
    """
    if dim is None:
        return weight
    axes = kv_copy_axes(layout)
    devices = layout.pieces(axes)
    times = devices // math.gcd(devices, weight.shape[dim])
    return own_piece(jnp.repeat(weight, times, axis=dim), axes, dim, devices)


def _plus(y: Array, bias: Array | None, axes: Axes, layout: Layout) -> Array:
    """Add the bias [*out] to [B, S, *out], whose kv heads may be copies; it and its gradient are
    summed in float32.

    Args:
      axes: logical axes of the bias.
    """
    if bias is None:
        return y
    if "kv_heads" in axes and kv_copy_axes(layout):
        dim = axes.index("kv_heads")
        bias = jnp.repeat(
            bias,
            y.shape[2 + dim] // bias.shape[dim],
            axis=dim,
        )
    return (y.astype(jnp.float32) + bias.astype(jnp.float32)).astype(y.dtype)


def gather_weight(weight: Array, axes: Axes, layout: Layout) -> Array:
    """Inside `manual`: prepare a weight for its matmul; it is cast before it is gathered, so half
    the bytes travel.
    """
    return gather(weight.astype(layout.dtype), axes, used_axes(axes), layout)


def _factor(
    weight: Array,
    form: WeightForm | None,
    ins: int,
    layout: Layout,
    swapped: bool,
    in_order: bool = True,
) -> Factor:
    """Inside `manual`: what a device multiplies by, of a weight [*in, *out] that is ready but for
    being `swapped`; kernels are told its blocks of zeros.
    """
    if swapped:
        weight = _swap_dims(weight, ins)
        ins = weight.ndim - ins
    return find_zero_blocks(weight, form, ins, layout, swapped=swapped, whole=in_order)


def _swap_dims(weight: Array, split: int) -> Array:
    """Turn a weight [*in, *out], with so many dims in, into [*out, *in]."""
    return jnp.transpose(
        weight,
        (*range(split, weight.ndim), *range(split)),
    )


def _weight_gradient(
    x: Array, dy: Array, weight: Array, axes: Axes, used: Axes, layout: Layout, copied: int | None
) -> Array:
    """Inside `manual`: contract [B, S, *in] and [B, S, *out] over the tokens; the result is laid
    out as a gradient.

    The sum is in float32, over the devices that have other tokens and those that have copies of the
    same heads.
    """
    shape = (*x.shape[2:], *dy.shape[2:])
    tokens = split_over(used[:2], layout)
    if platform_of(layout) == "tpu" and len(x) > 1:
        over = (0, 1)  # to merge the two dims, XLA would copy heads that lie [B, H, h, S]
    else:
        over = (0,)  # XLA:CPU would transpose two dims
        x, dy = (array.reshape(array.shape[0] * array.shape[1], -1) for array in (x, dy))
    dweight = jax.lax.dot_general(
        x, dy, ((over, over), ((), ())), preferred_element_type=jnp.float32
    ).reshape(shape)
    if copied is not None:
        whole = jax.ShapeDtypeStruct(
            (*shape[:copied], weight.shape[copied], *shape[copied + 1 :]), jnp.float32
        )
        (dweight,) = jax.linear_transpose(
            lambda weight: _own_kv_heads(weight, copied, layout), whole
        )(dweight)
        tokens += kv_copy_axes(layout)
    return reduce(dweight, tokens, used_axes(axes), state_axes(axes), layout).astype(weight.dtype)
