"""The arithmetic of an optimizer's step on some parts of a model, wherever it is computed."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Int

from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import Axes, PyTree, state_axes
from jaxpar.base.layout.specs import is_axes
from jaxpar.models import Params
from jaxpar.parallel.collectives import gather, manual
from jaxpar.train.optimizer.definition import Optimizer, pack_moments


class Scale(NamedTuple):
    """The factor of a step's gradients, and whether the step is to be made."""

    factor: Array
    made: Array


class Part(NamedTuple):
    """Some parts of a model, or one of their layers, with what they are updated by.

    Attributes:
      params: the parameters, by part of the model, with `blocks` stacked over layers.
      opt_state: the optimizer's state of them, as `pack_moments` returns it.
      grads: their gradients, summed over the tokens that counted.
      axes: their logical axes.
    """

    params: Params
    opt_state: optax.OptState
    grads: Params
    axes: Params


class UpdatedPart(NamedTuple):
    """Some parts of a model, or one of their layers, after a step."""

    params: Params
    opt_state: optax.OptState
    overflows: Int[Array, ""]


class NewArrays(NamedTuple):
    """The new parameters and state of some parts, in the memory in which they were computed.

    Attributes:
      params: the new parameters, in the dtypes of the old ones.
      opt_state: the new state, as `pack_moments` returns it.
      overflows: for each array of `params` that `is_counted`, and of `opt_state` unless the
        optimizer stays finite, how many of its entries were not finite although the step is, and
        kept their old value.
    """

    params: Params
    opt_state: optax.OptState
    overflows: tuple[Int[Array, ""], ...]


def update_arrays(part: Part, scale: Scale, optimizer: Optimizer, plan: Plan) -> NewArrays:
    """Return the new parameters and state of some parts, all of which lie in one memory, the
    parameters as the state does.
    """
    params = part.params
    opt_state = part.opt_state
    axes = part.axes
    made = scale.made
    grads = jax.tree.map(lambda g: g.astype(jnp.float32) * scale.factor, part.grads)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    float32 = opt_state
    if plan.moments != "float32":
        float32 = jax.tree.map(
            lambda x: x.astype(jnp.float32) if x.dtype == plan.moments else x, opt_state
        )
    updates, state = optimizer.make(axes).update(grads, float32, exact)
    asked = jax.tree.map(
        lambda x, more, old: (x + more).astype(old.dtype),
        exact,
        updates,
        params,
    )
    new = jax.tree.map(
        lambda x, old: jnp.where(made & jnp.isfinite(x), x, old),
        asked,
        params,
    )
    overflows = _overflows(asked, made)
    state = pack_moments(optimizer, state, params, axes, plan.moments)
    if not optimizer.stays_finite:
        overflows += _overflows(state, made)
    state = jax.tree.map(
        lambda x, old: _kept(x, old, made, optimizer.stays_finite),
        state,
        opt_state,
    )
    return NewArrays(new, state, overflows)


def gather_params(updated: Params, axes: Params, plan: Plan) -> Params:
    """Gather updated parameters, on the device, from the layout of the optimizer's state to their
    own.
    """
    stored = jax.tree.map(state_axes, axes, is_leaf=is_axes)

    def gather_one(x: Array, state: Axes, own: Axes) -> Array:
        return gather(x, state, own, plan)

    def gather_all(new: Params) -> Params:
        return jax.tree.map(gather_one, new, stored, axes)

    return manual(gather_all, plan, (stored,), axes)(updated)


def is_counted(x: Array | jax.ShapeDtypeStruct) -> bool:
    """Whether entries of an array can be other than finite."""
    return jnp.issubdtype(x.dtype, jnp.floating)


def _kept(x: Array, old: Array, finite: Array, stays_finite: bool) -> Array:
    """Return the new entries of an array of the state, or the old ones where the step is not made,
    or where the new are not finite and may be so.
    """
    if not stays_finite and is_counted(x):
        finite = finite & (jnp.isfinite(x) | ~jnp.isfinite(old))
    return jnp.where(finite, x, old)


def _overflows(tree: PyTree, finite: Array) -> tuple[Int[Array, ""], ...]:
    """Count the entries of each array that are not finite in a step that is."""
    counted = filter(is_counted, jax.tree.leaves(tree))
    return tuple(jnp.sum(finite & ~jnp.isfinite(x), dtype=jnp.int32) for x in counted)
