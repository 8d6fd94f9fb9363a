"""A mixture-of-experts MLP whose experts lie on different devices: every token is sent to the
experts it chooses, or that choose it (`jaxpar.parallel.experts.expert_choice`).

Where tokens choose, the router is Mixtral's (Jiang et al. 2024, arXiv:2401.04088, section 2.1): it
takes a float32 softmax over all experts, keeps its k largest weights and scales them to add up to
one. A device routes its own tokens of the residual stream; nothing is gathered first. For every
chosen expert it writes the token as a row into a buffer for the device that has the expert, and an
all-to-all over the mesh axes of `experts` exchanges the buffers. There the rows are gathered over
the axes that split `mlp` and multiplied expert by expert; a second all-to-all brings their
scattered sums back.

No token is dropped. Shapes are static, so buffers have the size of the worst case: all tokens of a
device may choose experts of the same device, but each of them at most min(k, experts there), so no
buffer overflows.

Per layer, one device sends the following over X devices along `experts`, with T tokens of dim D on
a device and E experts: two all-to-alls forward and two backward, each of R D (X - 1) / X numbers in
the compute dtype, with R = X T min(k, E / X) rows. A block that is recomputed repeats the two of
its forward. A layer also exchanges E integers (how many rows are meant for each expert), forward
only.

Shapes: B batch, S sequence, D embed, F mlp, E experts, K chosen of a token, X devices along
`experts`, T tokens of one, N = T K, R rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxpar.base.arguments import require_whole
from jaxpar.base.errors import UserError, short
from jaxpar.base.layout.fit_heads import drop_axes
from jaxpar.base.layout.sharding import Axes, Layout, PyTree, require_layout, state_axes
from jaxpar.kernels.grouped_matmul import (
    expert_order,
    grouped_matmul,
    grouped_weight_gradient,
    inverse,
)
from jaxpar.parallel.collectives import gather, manual, manual_vjp, reduce, split_over
from jaxpar.parallel.experts import expert_choice
from jaxpar.parallel.experts.routers import (
    ROUTER,
    ROWS,
    SCALAR,
    SOURCES,
    RouterSums,
    each,
    router_logits,
    swap,
    whole_router,
)
from jaxpar.parallel.linear import GATHERED, STORED, gather_weight, used_axes
from jaxpar.parallel.linear.weight_view import (
    Weight,
    form_of,
    pull,
    read,
    require_units,
    stored_array,
)
from jaxpar.parallel.remat import named

_USED: Axes = ("batch", "seq", None, None)
_HIDDEN: Axes = ("batch", "seq", None, "mlp")
_UP: Axes = ("experts", "embed", "mlp")
_DOWN: Axes = ("experts", "mlp", "embed")


RouterName = Literal["token_choice", "expert_choice"]


class _Places(NamedTuple):
    """Which row belongs to which token of one device."""

    sources: Array
    """The token that each row of the sent buffers copies, [1, 1, R]; -1 = the row is empty."""
    slots: Array
    """The row in which a token's choice is sent and its answer comes back, [B, S, K]."""
    counts: Array
    """How many rows come from each device for each expert that is here, [1, 1, X, E / X]."""


def expert_mlp(
    x_BSD: Float[Array, "B S D"],
    router_DE: Float[Array, "D E"],
    gate_EDF: Weight,
    up_EDF: Weight,
    down_EFD: Weight,
    layout: Layout,
    *,
    experts_per_token: int,
    text_BS: Bool[Array, "B S"] | None = None,
    router: RouterName = "token_choice",
) -> tuple[Float[Array, "B S D"], RouterSums]:
    """Compute the weighted sum of the SwiGLUs of the experts that each token chooses.

    The weights of several experts are their probabilities, scaled to add up to one (Mixtral,
    arXiv:2401.04088, section 2.1). That of a single one is its probability as it is (Switch,
    arXiv:2101.03961, section 2.1): scaled, it would be one, and no gradient would reach the router.

    Args:
      x_BSD: the normed residual stream, in its own layout.
      router_DE: logical axes ("embed", None).
      gate_EDF: an array [E, D, F] with logical axes ("experts", "embed", "mlp"), or a `WeightView`
        of one.
      up_EDF: the same.
      down_EFD: an array [E, F, D] with logical axes ("experts", "mlp", "embed"), or a view of one.
      experts_per_token: how many experts a token is sent to; in the mean, where experts choose.
      text_BS: which tokens are text; the others, padding, have no part in the router's sums. None =
        all are.
      router: who chooses: each token its experts, or each expert its tokens of each sequence (see
        `jaxpar.parallel.experts.expert_choice`).

    Returns:
      The output [B, S, D] in the compute dtype and the residual stream's layout, and the router's
      sums.

    Raises:
      UserError: the rules split experts over a mesh axis that splits no tokens, or an argument does
        not fit the others.
    """
    require_layout(layout, "expert_mlp")
    layout.sharding(STORED, x_BSD.shape, "x")
    _require_experts(
        x_BSD.shape[2], router_DE, gate_EDF, up_EDF, down_EFD, experts_per_token, router
    )
    _require_text(text_BS, x_BSD.shape[:2])
    for weight, axes in ((gate_EDF, _UP), (up_EDF, _UP), (down_EFD, _DOWN)):
        require_units(form_of(weight), weight.shape, axes, layout, 1, outer=1, what="experts")
    tokens = split_over(GATHERED[:2], layout)
    for axis in layout.mesh_axes("experts"):
        if axis not in tokens:
            raise UserError(
                f"rules.experts splits the experts over {axis}={layout.mesh.shape[axis]}, which "
                "splits no tokens, so "
                f"its devices would all send the same: add {axis} to rules.batch, or take it "
                "out of rules.experts"
            )
    if text_BS is None:
        text_BS = jnp.ones(x_BSD.shape[:2], bool)
    weights = _Weights(router_DE, gate_EDF, up_EDF, down_EFD)
    if router == "expert_choice":
        return _by_expert_choice(layout, x_BSD, weights, experts_per_token, text_BS)
    return _by_token_choice(layout, x_BSD, weights, experts_per_token, text_BS)


class _Weights(NamedTuple):
    """The router and the experts, as of `expert_mlp`."""

    router: Array
    gate: Weight
    up: Weight
    down: Weight


def _by_token_choice(
    layout: Layout, x_BSD: Array, weights: _Weights, experts_per_token: int, text_BS: Array
) -> tuple[Array, RouterSums]:
    """Compute the sum of the experts that each token chooses."""
    with jax.named_scope("router"):
        routed = cast(
            tuple[Array, ...], _route(layout, experts_per_token, x_BSD, weights.router, text_BS)
        )
        weights_BSK, chosen_BSK, balance, z = routed
        places = _find_places(chosen_BSK, weights.router.shape[1], layout)
    rows = _answers(layout, x_BSD, weights, places.sources, places.counts)
    with jax.named_scope("combine"):
        y_BSD = each(_combine, layout, ((ROWS, STORED), STORED), STORED)(
            (rows, weights_BSK), places.slots
        )
    return y_BSD, RouterSums(balance, z)


def _by_expert_choice(
    layout: Layout, x_BSD: Array, weights: _Weights, experts_per_token: int, text_BS: Array
) -> tuple[Array, RouterSums]:
    """Compute the sum of the experts that chose each token."""
    experts = weights.router.shape[1]
    with jax.named_scope("router"):
        choice = expert_choice.choose_tokens(
            x_BSD, weights.router, text_BS, layout, experts_per_token
        )
        taken = expert_choice.capacity(x_BSD.shape[1], experts, experts_per_token)
        rows = expert_choice.find_rows(choice.chosen_BSE, layout, taken)
        sources = jnp.where(rows.choices < 0, -1, rows.choices // experts)
    answers = _answers(layout, x_BSD, weights, sources, rows.counts)
    with jax.named_scope("combine"):
        y_BSD = each(expert_choice.add_answers, layout, ((ROWS, STORED), SOURCES), STORED)(
            (answers, choice.weights_BSE), rows.choices
        )
    return y_BSD, choice.sums


def _answers(
    layout: Layout, x_BSD: Array, weights: _Weights, sources: Array, counts: Array
) -> Array:
    """Send copies of the tokens to the devices of their experts, and return the experts' answers,
    a row for each copy.
    """
    with jax.named_scope("dispatch"):
        rows = each(_copies, layout, (STORED, SOURCES), ROWS)(x_BSD.astype(layout.dtype), sources)
        rows = named(_exchange(layout, rows), "expert_input")
    with jax.named_scope("experts"):
        columns = weights.gate, weights.up
        gate, up = _grouped_product(layout, rows, counts, columns, sums=False)
        hidden = named(
            jax.nn.silu(named(gate, "gate")) * named(up, "up"),
            "mlp_hidden",
        )
        (rows,) = _grouped_product(layout, hidden, counts, (weights.down,), sums=True)
    with jax.named_scope("combine"):
        return named(_exchange(layout, rows), "expert_out")


def _require_experts(
    width: int,
    router_DE: Array,
    gate_EDF: Weight,
    up_EDF: Weight,
    down_EFD: Weight,
    experts_per_token: int,
    router: object,
) -> None:
    """Refuse weights that do not fit together or the input, more experts of a token than there
    are, and a router that there is not.
    """
    experts = router_DE.shape[-1]
    hidden = gate_EDF.shape[-1]
    wanted = {
        "router": (router_DE, (width, experts)),
        "gate": (gate_EDF, (experts, width, hidden)),
        "up": (up_EDF, (experts, width, hidden)),
        "down": (down_EFD, (experts, hidden, width)),
    }
    for name, (weight, shape) in wanted.items():
        if weight.shape != shape:
            raise UserError(
                f"expert_mlp: {name} has shape {weight.shape}, and the others and x ask for {shape}"
            )
    require_whole("expert_mlp", "experts_per_token", experts_per_token, least=1, most=experts)
    known = get_args(RouterName)
    if router not in known:
        raise UserError(f"expert_mlp has no router {short(router)}: try one of {', '.join(known)}")


def _require_text(text_BS: Any, shape: tuple[int, ...]) -> None:
    """Refuse what is no boolean for each token: numbers would weigh the tokens in the router's
    sums.
    """
    if text_BS is None:
        return
    found = getattr(text_BS, "shape", None)
    dtype = getattr(text_BS, "dtype", object)
    if found != shape or not jnp.issubdtype(dtype, jnp.bool_):
        if found is None:
            given = short(text_BS)
        else:
            given = f"{dtype} of shape {tuple(found)}"
        raise UserError(
            f"expert_mlp takes text_BS as a boolean for each token {shape}, and was given {given}: "
            "write tokens != padding, for one"
        )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _route(
    layout: Layout, k: int, x_BSD: Array, router_DE: Array, text_BS: Array
) -> tuple[Array, ...]:
    """Return float32 weights [B, S, K], the chosen experts [B, S, K], and the sums of balance
    and z.
    """
    return _route_forward(layout, k, x_BSD, router_DE, text_BS)[0]


def _route_forward(layout, k, x_BSD, router_DE, text_BS):
    def local(
        x_BSD: Array,
        router_DE: Array,
        text_BS: Array,
    ) -> tuple[tuple[Array, ...], Array]:
        logits_BSE = router_logits(x_BSD, whole_router(router_DE, layout))
        chosen_BSK = jax.lax.top_k(logits_BSE, k)[1]
        choices_BSE = jnp.sum(
            jax.nn.one_hot(chosen_BSK, logits_BSE.shape[-1]),
            axis=2,
        )
        choices_BE = jnp.sum(choices_BSE * text_BS[..., None], axis=1)
        along = layout.mesh_axes("residual_seq")
        tokens = split_over(STORED[:2], layout)
        if along:
            choices_BE = jax.lax.psum(choices_BE, along)
        # Each token of text makes k choices; a row of padding alone makes none.
        share_BE = choices_BE / jnp.maximum(
            jnp.sum(choices_BE, axis=1, keepdims=True),
            1,
        )
        weights_BSK, *sums = _weigh(logits_BSE, chosen_BSK, share_BE, text_BS)
        balance, z = jax.lax.psum(jnp.stack(sums), tokens) if tokens else sums
        return (weights_BSK, chosen_BSK, balance, z), share_BE

    outs = ((STORED, STORED, SCALAR, SCALAR), ("batch", None))
    found, share_BE = manual(local, layout, (STORED, ROUTER, STORED[:2]), outs)(
        x_BSD, router_DE, text_BS
    )
    return found, (x_BSD, router_DE, found[1], share_BE, text_BS)


def _route_backward(layout, k, residuals, cotangents):
    def local(
        x_BSD: Array,
        router_DE: Array,
        chosen_BSK: Array,
        share_BE: Array,
        text_BS: Array,
        given: PyTree,
    ) -> tuple[Array, Array]:
        def weigh(x_BSD: Array, whole_DE: Array) -> tuple[Array, Array, Array]:
            return _weigh(router_logits(x_BSD, whole_DE), chosen_BSK, share_BE, text_BS)

        _, pull = jax.vjp(weigh, x_BSD, whole_router(router_DE, layout))
        dx_BSD, drouter_DE = pull(given)
        return dx_BSD, reduce(
            drouter_DE, split_over(STORED[:2], layout), (None, None), state_axes(ROUTER), layout
        )

    dweights, _, dbalance, dz = cotangents
    layouts = (
        STORED,
        ROUTER,
        STORED,
        ("batch", None),
        STORED[:2],
        (STORED, SCALAR, SCALAR),
    )
    run = manual(local, layout, layouts, (STORED, state_axes(ROUTER)))
    return *run(*residuals, (dweights, dbalance, dz)), None


_route.defvjp(_route_forward, _route_backward)


def _weigh(
    logits_BSE: Array, chosen_BSK: Array, share_BE: Array, text_BS: Array
) -> tuple[Array, Array, Array]:
    """The weights of the chosen experts, and the sums of balance and z over a device's text for
    constant shares.
    """
    probabilities_BSE = jax.nn.softmax(logits_BSE, axis=-1)
    weights_BSK = jnp.take_along_axis(probabilities_BSE, chosen_BSK, axis=-1)
    if weights_BSK.shape[-1] > 1:
        weights_BSK /= jnp.sum(weights_BSK, axis=-1, keepdims=True)
    balance_BS = logits_BSE.shape[-1] * jnp.sum(
        probabilities_BSE * share_BE[:, None],
        axis=-1,
    )
    z_BS = jnp.square(jax.nn.logsumexp(logits_BSE, axis=-1))
    return weights_BSK, jnp.sum(balance_BS * text_BS), jnp.sum(z_BS * text_BS)


def _find_places(chosen_BSK: Array, experts: int, layout: Layout) -> _Places:
    """Give every choice a row; the rows of a buffer are in the order of its experts, and then of
    the tokens.
    """
    X = layout.size("experts")

    def local(chosen_BSK: Array) -> _Places:
        T = chosen_BSK.shape[0] * chosen_BSK.shape[1]
        K = chosen_BSK.shape[2]
        expert_N = chosen_BSK.reshape(-1)
        rows = T * min(K, experts // X)  # of the buffer for one device
        device_N = expert_N // (experts // X)
        rank_N = inverse(jnp.argsort(expert_N, stable=True))
        counts_XE = jnp.sum(jax.nn.one_hot(expert_N, experts, dtype=jnp.int32), axis=0).reshape(
            X, -1
        )
        filled_X = jnp.sum(counts_XE, axis=1)
        slot_N = device_N * rows + rank_N - (jnp.cumsum(filled_X) - filled_X)[device_N]
        sources_R = jnp.full(X * rows, -1).at[slot_N].set(jnp.arange(T * K) // K)
        return _Places(
            sources_R[None, None],
            slot_N.reshape(chosen_BSK.shape),
            swap(counts_XE, layout)[None, None],
        )

    outs = _Places(SOURCES, STORED, ROWS)  # pyright: ignore[reportArgumentType]
    return manual(local, layout, (STORED,), outs)(chosen_BSK)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(layout: Layout, rows: Array) -> Array:
    """Send each buffer of rows to the device it is meant for. The way back is the same, and so is
    the gradient's.
    """

    def local(rows: Array) -> Array:
        return swap(rows[0, 0], layout)[None, None]

    if layout.mesh_axes("experts"):
        return manual(local, layout, (ROWS,), ROWS)(rows)
    return rows


_exchange.defvjp(
    lambda layout, rows: (_exchange(layout, rows), None),
    lambda layout, _, drows: (_exchange(layout, drows),),
)


def _copies(x_BSD: Array, sources: Array) -> Array:
    """Return a row for each source, and zeros where the row is empty."""
    x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
    return jnp.where(
        sources[..., None] >= 0,
        x_TD[jnp.maximum(sources, 0)],
        0,
    )


def _combine(rows_and_weights: tuple[Array, Array], slots_BSK: Array) -> Array:
    """Weigh the answers to each token's choices and sum them, in float32."""
    rows, weights_BSK = rows_and_weights
    answers_BSKD = rows[0, 0][slots_BSK].astype(jnp.float32)
    return jnp.sum(weights_BSK[..., None] * answers_BSKD, axis=2).astype(rows.dtype)


def _grouped_product(
    layout: Layout, x: Array, counts: Array, weights: tuple[Weight, ...], *, sums: bool
) -> tuple[Array, ...]:
    """Multiply rows by the weights of their experts, as `jaxpar.parallel.linear` does for the rows
    of one weight.

    The weights are column linears [E, D, F] that share a gather of the rows. With `sums` there is
    one row linear [E, F, D], which takes hidden rows in the order of the experts and scatters their
    sums. No result of an empty row is read.
    """
    axes, x_axes, y_axes = (_DOWN, _HIDDEN, ROWS) if sums else (_UP, ROWS, _HIDDEN)
    views = [form_of(weight) for weight in weights]
    arrays = tuple(stored_array(weight) for weight in weights)

    def use(weights: tuple[Array, ...]) -> list[Array]:
        return [
            gather_weight(read(weight, form, 1, outer=1), axes, layout)
            for weight, form in zip(weights, views, strict=True)
        ]

    def forward(
        x: Array,
        counts: Array,
        weights: tuple[Array, ...],
    ) -> tuple[Array, ...]:
        counts_ME = _counts_used(counts, layout)
        used = use(weights)
        if sums:
            return (_rows_from(counts_ME, grouped_matmul(x[0, 0], used[0], counts_ME), layout),)
        x_RD = _rows_to(counts_ME, x.astype(layout.dtype), layout)
        return tuple(grouped_matmul(x_RD, weight, counts_ME)[None, None] for weight in used)

    def backward(
        x: Array, counts: Array, weights: tuple[Array, ...], dys: tuple[Array, ...]
    ) -> PyTree:
        counts_ME = _counts_used(counts, layout)
        swapped = [jnp.swapaxes(weight, 1, 2) for weight in use(weights)]
        if sums:
            x_RI = x[0, 0]
            dys_RO = [_rows_to(counts_ME, dys[0], layout)]
            dx = grouped_matmul(dys_RO[0], swapped[0], counts_ME)[None, None]
        else:
            x_RI = _rows_to(counts_ME, x, layout)
            dys_RO = [dy[0, 0] for dy in dys]
            products = [
                grouped_matmul(dy, weight, counts_ME)
                for dy, weight in zip(dys_RO, swapped, strict=True)
            ]
            dx = _rows_from(counts_ME, sum(products[1:], products[0]), layout)
        # All tokens of an expert are on its device, except those along axes that do not split
        # experts.
        others = drop_axes(split_over(GATHERED[:2], layout), layout.mesh_axes("experts"))
        sums_EIO = (grouped_weight_gradient(x_RI, dy, counts_ME) for dy in dys_RO)
        stored = (
            pull(reduce(dweight, others, used_axes(axes), state_axes(axes), layout), form, 1, 1)
            for dweight, form in zip(sums_EIO, views, strict=True)
        )
        return (
            dx,
            None,
            tuple(x.astype(weight.dtype) for x, weight in zip(stored, weights, strict=True)),
        )

    in_axes = x_axes, ROWS, (axes,) * len(weights)
    return manual_vjp(forward, backward, layout, in_axes, (y_axes,) * len(weights))(
        x, counts, arrays
    )


def _counts_used(counts: Array, layout: Layout) -> Array:
    """Inside `manual`: return the counts [buffers, E] of the rows as used, where the sequence is
    gathered.
    """
    return gather(counts, ROWS, _USED, layout).reshape(
        -1,
        counts.shape[-1],
    )


def _rows_to(counts_ME: Array, x: Array, layout: Layout) -> Array:
    """Inside `manual`: gather a device's rows [1, 1, R, D] and put them in the order of the
    experts.
    """
    x_RD = gather(x, ROWS, _USED, layout).reshape(
        -1,
        x.shape[-1],
    )
    order = expert_order(counts_ME, len(x_RD))
    return x_RD if order is None else x_RD[order]


def _rows_from(counts_ME: Array, y_RD: Array, layout: Layout) -> Array:
    """Inside `manual`: the inverse of `_rows_to` for partial sums over `mlp`, which are summed on
    the way.
    """
    if (order := expert_order(counts_ME, len(y_RD))) is not None:
        y_RD = y_RD[inverse(order)]
    parts = layout.size("residual_seq") // layout.size("seq")
    return reduce(
        y_RD.reshape(1, parts, -1, y_RD.shape[-1]), layout.mesh_axes("mlp"), _USED, ROWS, layout
    )
