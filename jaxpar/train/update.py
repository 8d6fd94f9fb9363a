"""The optimizer's step: gradients clipped by their global norm, AdamW, and the updated parameters.

What lies in host memory passes the device a layer at a time: its parameters, gradients and moments are fetched, updated
and sent back, in a loop over the stacked layers whose buffers stay where they are. Moments in 8 bits go through the
same loop, so that only a layer's are there in float32.

Arrays stacked over layers are [layers, ...]; a pipeline's stage has its own layers, and loops over them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxpar.base.config import TrainConfig
from jaxpar.base.plan import Plan
from jaxpar.base.sharding import state_axes
from jaxpar.parallel.collectives import first_turn, gather, is_axes, manual, turn_after, waits
from jaxpar.parallel.cross_entropy import LossSums
from jaxpar.parallel.host_memory import in_host_memory, on_device, on_host
from jaxpar.train.moments import moments_of, packed, unpacked, with_moments
from jaxpar.train.optimizer import decay_mask, make_optimizer

Params = Any


class Updated(NamedTuple):
    """New parameters and optimizer state, and the global norm of the gradients before clipping (float32 scalar)."""

    params: Params
    opt_state: Any
    norm: Float[Array, ""]


def update(
    params: Params, opt_state: Any, grads: Params, sums: LossSums, axes: Any, train: TrainConfig, plan: Plan
) -> Updated:
    """One step of the optimizer, in float32; none where the loss or the gradients' norm is not finite.

    Then parameters and optimizer state stay as they were, to the bit, so a state that was finite once is so always. New
    or old is chosen number by number where both are at hand: that takes no memory, no pass and no collective.

    Args:
      params: by part of the model; `blocks` stacked over layers.
      opt_state: of `make_optimizer`, as `moments.packed` leaves it.
      grads: summed over the tokens that counted.
      sums: of the batch: how many tokens that is, and their likelihood.
      axes: the logical axes of every parameter (`Model.axes`).
      train: AdamW and clipping.
      plan: mesh, rules, and where parameters and moments lie.
    """
    # On CPU (`turn_after`): a loop over layers comes after all sums over devices, and what follows after it.
    said = (sums.nll, sums.tokens, sums.routed)
    turn = turn_after(first_turn(plan) if plan.streams else None, said, jax.tree.map(lambda _: (), said), plan)
    streamed = [name for name in params if name == "blocks" and plan.streams]
    squares = jnp.zeros(())
    for name in (*(name for name in params if name not in streamed), *streamed):
        squares = _squares(grads[name], squares, turn)
    norm = jnp.sqrt(squares) / sums.tokens
    clip = jnp.where(norm < train.clip_norm, 1.0, train.clip_norm / norm) if train.clip_norm else 1.0
    scale = _Scale(clip / sums.tokens, jnp.isfinite(norm) & jnp.isfinite(sums.nll))
    mu, nu = moments_of(opt_state)
    new, mus, nus = {}, {}, {}
    scalars = opt_state
    for name in (*streamed, *(name for name in params if name not in streamed)):
        one = _Part(params[name], mu[name], nu[name], grads[name])
        run = _streamed if name in streamed else _whole
        (new[name], mus[name], nus[name]), scalars = run(one, opt_state, waits(scale, turn), axes[name], train, plan)
        turn = turn_after(turn, jax.tree.map(on_device, new[name]), axes[name], plan)
    return Updated(new, with_moments(scalars, mus, nus), norm)


class _Scale(NamedTuple):
    """Scalars of a step: the factor of its gradients, and whether it is to be made."""

    factor: Array
    finite: Array


class _Part(NamedTuple):
    """Parameters of a part of the model, their moments as they are packed, and gradients; or those of one layer."""

    params: Params
    mu: Any
    nu: Any
    grads: Params


def _whole(
    part: _Part, opt_state: Any, scale: _Scale, axes: Any, train: TrainConfig, plan: Plan
) -> tuple[tuple[Params, Any, Any], Any]:
    """The new parameters and moments, and the optimizer's state, of which only the scalars count."""
    part, matrices = jax.tree.map(on_device, part), decay_mask(axes)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32) * scale.factor, part.grads)
    stored = _as_state(part.params, axes, plan)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), stored)
    before = with_moments(opt_state, part.mu, part.nu)
    updates, state = make_optimizer(train, axes).update(grads, unpacked(before), exact)
    new = jax.tree.map(lambda x, more, old: (x + more).astype(old.dtype), exact, updates, stored)
    # Moments of finite gradients are finite; a parameter may still overflow, and then stays.
    new = jax.tree.map(lambda x, old: jnp.where(scale.finite & jnp.isfinite(x), x, old), new, stored)
    state = packed(state, matrices, plan.moments)
    state = jax.tree.map(lambda x, old: jnp.where(scale.finite, x, old), state, before)
    mu, nu = (jax.tree.map(partial(_placed, plan), matrices, moments) for moments in moments_of(state))
    return (_as_params(new, axes, plan), mu, nu), state


def _placed(plan: Plan, matrix: bool, moment: Any) -> Any:
    """A moment where the plan has it: vectors stay on the device."""
    return jax.tree.map(on_host, moment) if matrix and plan.optimizer == "offload" else moment


def _streamed(
    part: _Part, opt_state: Any, scale: _Scale, axes: Any, train: TrainConfig, plan: Plan
) -> tuple[tuple[Params, Any, Any], Any]:
    """The same, a layer at a time; the scalars are left as they are."""
    of_layer = jax.tree.map(lambda names: names[1:], axes, is_leaf=is_axes)
    host = plan.parameters == "offload"

    def local(part: _Part, opt_state: Any, scale: _Scale) -> Any:
        def body(kept: Any, i: Array) -> tuple[Any, None]:
            one = jax.tree.map(lambda x: _taken(x, i), _Part(kept[0], kept[1], kept[2], part.grads))
            (params, *moments), _ = _whole(one, opt_state, scale, of_layer, train, plan)
            new = jax.tree.map(on_host, params) if host else params, *moments
            return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, i, 0), kept, new), None

        count = len(jax.tree.leaves(part.grads)[0])
        return jax.lax.scan(body, (part.params, part.mu, part.nu), jnp.arange(count))[0]

    scalars = with_moments(opt_state, {}, {})
    return _by_stage(local, plan, P())(part, scalars, scale), opt_state


def _squares(grads: Params, total: Array, turn: Array | None) -> Array:
    """`total` and the squares of gradients; those in host memory are fetched a layer at a time, after `turn`."""
    leaves = jax.tree.leaves(grads)
    if not any(in_host_memory(leaf) for leaf in leaves):
        return total + sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in leaves)

    def body(total: Array, i: Array) -> tuple[Array, None]:
        layer = [on_device(_taken(leaf, i)).astype(jnp.float32) for leaf in leaves]
        return total + sum(jnp.sum(jnp.square(x)) for x in layer), None

    return jax.lax.scan(body, waits(total, turn), jnp.arange(len(leaves[0])))[0]


def _by_stage(local: Callable[..., Any], plan: Plan, scalars: P) -> Callable[..., Any]:
    """`local` on the layers of each stage, of arrays [layers, ...] in its first argument and its result."""
    axes = plan.mesh_axes("layers")
    if not axes:
        return local
    return jax.shard_map(
        local, mesh=plan.mesh, in_specs=(P(axes), scalars, scalars), out_specs=P(axes), axis_names=set(axes),
        check_vma=False,
    )  # fmt: skip


def _taken(x: Array, i: Any) -> Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _as_state(params: Params, axes: Any, plan: Plan) -> Params:
    """Arrays of the parameters' form in the layout of the optimizer's state: each device takes its piece."""
    if plan.mesh_axes("state_embed") == plan.mesh_axes("embed"):
        return params
    return jax.tree.map(lambda x, names: plan.constrain(x, state_axes(names)), params, axes)


def _as_params(updated: Params, axes: Any, plan: Plan) -> Params:
    """Updated parameters from the layout of the optimizer's state, gathered to their own."""
    if plan.mesh_axes("state_embed") == plan.mesh_axes("embed"):
        return updated
    stored = jax.tree.map(state_axes, axes, is_leaf=is_axes)

    def local(updated: Params) -> Params:
        return jax.tree.map(lambda x, state, own: gather(x, state, own, plan), updated, stored, axes)

    return manual(local, plan, (stored,), axes)(updated)
