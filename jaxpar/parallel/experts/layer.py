"""A mixture-of-experts MLP whose experts lie on different devices: every token is sent to the
experts that it chooses (`token_choice`), or that choose it (`expert_choice`).

For every chosen expert a device writes the token as a row into a buffer for the device that has the
expert, and an all-to-all over the mesh axes of `experts` exchanges the buffers. There the rows are
multiplied expert by expert (`expert_products`); a second all-to-all brings their sums back. Shapes
are static, so buffers have the size of the worst case, and no token is dropped.

Per layer, one device sends the following over X devices along `experts`, with T tokens of dim D on
a device and E experts: two all-to-alls forward and two backward, each of R D (X - 1) / X numbers in
the compute dtype, with R = X T min(K, E / X) rows. A block that is recomputed repeats the two of
its forward. A layer also exchanges E integers (how many rows are meant for each expert), forward
only.

Shapes: B batch, S sequence, D embed, F mlp, E experts, K chosen of a token, T tokens of a device,
R rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxpar.base.errors import UserError, short
from jaxpar.base.layout.sharding import Layout, require_layout
from jaxpar.base.number_checks import require_whole
from jaxpar.parallel.collectives import manual, split_over
from jaxpar.parallel.experts import expert_choice, token_choice
from jaxpar.parallel.experts.expert_products import DOWN, UP, column_products, row_product
from jaxpar.parallel.experts.routers import ROWS, SOURCES, RouterSums, each, swap
from jaxpar.parallel.linear import GATHERED, STORED
from jaxpar.parallel.linear.weight_view import Weight, form_of, require_units
from jaxpar.parallel.remat import named

RouterName = Literal["token_choice", "expert_choice"]


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
    arXiv:2401.04088, section 2.1). The weight of a single expert is its probability as it is
    (Switch, arXiv:2101.03961, section 2.1): scaled, it would be one, and no gradient would reach
    the router.

    Args:
      x_BSD: the normed residual stream, in its own layout.
      router_DE: the weight that scores the experts, with logical axes ("embed", None).
      gate_EDF: an array [E, D, F] with logical axes ("experts", "embed", "mlp"), or a `WeightView`
        of one; its output goes through SiLU.
      up_EDF: an array or a view like `gate_EDF`; its output is multiplied by the SiLU.
      down_EFD: an array [E, F, D] with logical axes ("experts", "mlp", "embed"), or a view of one.
      layout: mesh, rules and compute dtype.
      experts_per_token: how many experts a token is sent to; in the mean, where experts choose.
      text_BS: which tokens are text; the others, padding, have no part in the router's sums. None =
        all are text.
      router: `token_choice` = each token chooses its experts; `expert_choice` = each expert chooses
        its tokens of each sequence (`jaxpar.parallel.experts.expert_choice`).

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
    for weight, axes in ((gate_EDF, UP), (up_EDF, UP), (down_EFD, DOWN)):
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
    """The weights of the router and of the experts, as `expert_mlp` takes them."""

    router: Array
    gate: Weight
    up: Weight
    down: Weight


def _by_token_choice(
    layout: Layout, x_BSD: Array, weights: _Weights, experts_per_token: int, text_BS: Array
) -> tuple[Array, RouterSums]:
    """Compute the sum of the experts that each token chooses."""
    with jax.named_scope("router"):
        choice = token_choice.choose_experts(
            x_BSD, weights.router, text_BS, layout, experts_per_token
        )
        places = token_choice.find_places(choice.chosen_BSK, weights.router.shape[1], layout)
    rows = _answers(layout, x_BSD, weights, places.sources, places.counts)
    with jax.named_scope("combine"):
        y_BSD = each(token_choice.add_choices, layout, ((ROWS, STORED), STORED), STORED)(
            (rows, choice.weights_BSK), places.slots
        )
    return y_BSD, choice.sums


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
    """Send copies of the tokens to the devices of their experts, and return the experts' results,
    a row for each copy.
    """
    with jax.named_scope("dispatch"):
        rows = each(_copies, layout, (STORED, SOURCES), ROWS)(x_BSD.astype(layout.dtype), sources)
        rows = named(_exchange(layout, rows), "expert_input")
    with jax.named_scope("experts"):
        gate, up = column_products(layout, rows, counts, (weights.gate, weights.up))
        hidden = named(
            jax.nn.silu(named(gate, "gate")) * named(up, "up"),
            "mlp_hidden",
        )
        rows = row_product(layout, hidden, counts, weights.down)
    with jax.named_scope("combine"):
        return named(_exchange(layout, rows), "expert_out")


def _copies(x_BSD: Array, sources: Array) -> Array:
    """Return a row for each source, and zeros where the row is empty."""
    x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
    return jnp.where(
        sources[..., None] >= 0,
        x_TD[jnp.maximum(sources, 0)],
        0,
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(layout: Layout, rows: Array) -> Array:
    """Send each buffer of rows to the device that it is meant for. The same exchange brings results
    back, and carries the gradients of both.
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


def _require_experts(
    width: int,
    router_DE: Array,
    gate_EDF: Weight,
    up_EDF: Weight,
    down_EFD: Weight,
    experts_per_token: int,
    router: object,
) -> None:
    """Refuse weights that do not fit together or the input, more experts for a token than there
    are, and an unknown router.
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
    """Refuse a `text_BS` that is not one boolean for each token: numbers would weigh the tokens in
    the router's sums.
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
