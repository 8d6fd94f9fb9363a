"""The column-parallel linear: the sequence of its input is gathered, and its output is split over
the weight's output dims. `rank_linear` and `logits` are two more of its kind.

Shapes: B batch, S sequence, D embed, K kv heads, V vocab, r rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshAxis
from jaxpar.base.layout.sharding import (
    Axes,
    Layout,
    LogicalAxis,
    kv_copy_axes,
    output_axis,
    require_layout,
)
from jaxpar.base.layout.specs import require_axes
from jaxpar.base.number_checks import require_number, require_whole
from jaxpar.kernels.attention.call import MASKED, cap_scores
from jaxpar.parallel.collectives import manual_vjp, split_over
from jaxpar.parallel.linear.pieces import (
    GATHERED,
    STORED,
    Overlapping,
    both_forms,
    factor_of,
    gather_weight,
    own_kv_heads,
    places_of_alike,
    plus_bias,
    require_bias,
    require_head,
    require_width,
    used_axes,
    weight_gradient,
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
from jaxpar.parallel.linear.zero_blocks import Factor


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
      axes: the logical axes of the weight's output dims, such as ("heads", "head_dim"), or a
        sequence of such axes.
      layout: mesh, rules and compute dtype.
      biases: an array [*out], or for several weights a sequence with None where there is none. A
        bias has the shape of its weight's output dims before kv heads are copied: the bias of kv
        heads is copied with them.
      seq: the logical axis of the outputs' sequence, which is "attention_seq" for q, k and v; or
        one for each weight, of which those that lie alike share a gather.
      overlap: how the gather, and in the backward the scatter, run beside the matmuls (a word of
        `jaxpar.base.registry.FORMS`): one form for both, or a pair of forms.

    Returns:
      An array [B, S, *out] in the compute dtype, or a tuple of such arrays where weights are a
      sequence.

    Raises:
      UserError: there is no such form, the logical axes or rules do not fit together, a bias does
        not fit its weight, or a device has no whole number of a view's units.
    """
    require_layout(layout, "column_linear")
    if not isinstance(weights, list | tuple):
        require_axes(axes, "column_linear")
        return column_linear(
            x_BSD, (weights,), (axes,), layout, biases=(biases,), seq=seq, overlap=overlap
        )[0]
    biases = _one_of_each(weights, axes, biases)
    if not isinstance(seq, str):
        return _columns_by_sequence(x_BSD, weights, axes, layout, biases, seq, overlap)
    outs: tuple[Axes, ...] = tuple(
        ("batch", seq, *(output_axis(axis, layout) for axis in out)) for out in axes
    )
    stored: tuple[Axes, ...] = tuple(("embed", *out) for out in axes)
    layout.sharding(STORED, x_BSD.shape, "x")
    for weight, axes_of, bias in zip(weights, stored, biases, strict=True):
        layout.sharding(axes_of, weight.shape, "weight")
        require_units(form_of(weight), weight.shape, axes_of, layout, 1, what="weight")
        require_width("column_linear", x_BSD.shape, weight.shape, 1)
        require_bias("column_linear", bias, weight.shape[1:])
    used: Axes = ("batch", seq, None)
    ys = _columns(
        x_BSD, tuple(weights), layout, stored=stored, outs=outs, used=used, overlap=overlap
    )
    return tuple(
        plus_bias(y, bias, out, layout) for y, bias, out in zip(ys, biases, axes, strict=True)
    )


def _one_of_each(weights: Sequence[Any], axes: Any, biases: Any) -> Sequence[Any]:
    """Return a bias or None for each of several weights; refuse biases or axes that are not one for
    each weight.
    """
    if isinstance(axes, str) or len(axes) != len(weights):
        raise UserError(
            f"column_linear was given {len(weights)} weights and the axes {axes!r}: give axes "
            "for each"
        )
    for out in axes:
        require_axes(out, "column_linear")
    several = isinstance(biases, list | tuple)
    if biases is None or (several and not biases):
        return (None,) * len(weights)
    if not several or len(biases) != len(weights):
        found = f"{len(biases)} biases" if several else "one bias"
        raise UserError(
            f"column_linear was given {len(weights)} weights and {found}: give one for each, or "
            "None"
        )
    return biases


def _columns_by_sequence(
    x_BSD: Array,
    weights: Sequence[Weight],
    axes: Sequence[Axes],
    layout: Layout,
    biases: Sequence[Any],
    seqs: Sequence[LogicalAxis],
    overlap: Overlapping,
) -> tuple[Array, ...]:
    """Compute `column_linear` of weights of which each has its own logical axis for the outputs'
    sequence; weights whose outputs lie alike share a gather.
    """
    if len(seqs) != len(weights):
        raise UserError(
            f"column_linear was given {len(weights)} weights and {len(seqs)} axes of a sequence: "
            "give one for each, or one for all"
        )
    found: dict[int, Array] = {}
    for _, places in places_of_alike([layout.mesh_axes(seq) for seq in seqs]):
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
      axes: the logical axes of the output dims, as `column_linear` takes them, or ("embed",).
      seq: the logical axis of the sequence of u and of the output: "residual_seq" after a row
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
    require_width("rank_linear", u_BSr.shape, weight.shape, 1)
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
    """Compute the scores of every vocabulary entry.

    Args:
      x_BSD: final hidden states in the residual stream's layout.
      head_VD: the vocabulary matrix, with logical axes ("vocab", "embed").
      layout: mesh, rules and compute dtype.
      bias_V: the bias that is added to each entry's score, with the logical axis "vocab"; None =
        nothing is added.
      vocab_size: the size of the true vocabulary; scores of the rows past it are masked out. 0 =
        all rows.
      softcap: scores become `softcap * tanh(score / softcap)` (arXiv:2408.00118, section 2); 0 =
        they are taken as they are.
      overlap: how the gather, and in the backward the scatter, run beside the matmul: one form for
        both, or a pair of forms.

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
    logits_BSV = cap_scores(plus_bias(logits_BSV, bias_V, ("vocab",), layout), softcap)
    if vocab_size in (0, head_VD.shape[0]):
        return logits_BSV
    return jnp.where(jnp.arange(head_VD.shape[0]) < vocab_size, logits_BSV, MASKED)


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
    """Compute column linears that share one gather of x from the layout `given` to `used`.

    Args:
      dtype: the dtype of the outputs; empty = the compute dtype.
    """
    dtype = dtype or layout.compute
    gathers, scatters = both_forms(overlap)
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
            own = own_kv_heads(whole, dim, layout)
            used_weights.append(factor_of(own, form, 1, layout, swapped, in_order=dim is None))
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
            weight_gradient(x, dy, weight, axes, used, layout, dim)
            for dy, weight, axes, dim in zip(dys, weights, stored, copies, strict=True)
        )
        of_stored = (pull(dweight, form, 1) for dweight, form in zip(dweights, views, strict=True))
        return dx, tuple(of_stored)

    return manual_vjp(forward, backward, layout, (given, stored), outs)(x, arrays)
