"""AdamW from the config: its schedule, what decays, how its moments are stored, and its step on the
mesh.

Arrays in host memory pass through the device a layer at a time: a layer's parameters, gradients and
moments are fetched, updated and sent back, in a loop over the stacked layers whose buffers stay in
place.

Arrays stacked over layers are [layers, ...]; a pipeline's stage has its own layers, and loops over
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from jaxpar.base.config import TrainConfig
from jaxpar.base.plan import Plan, is_matrix
from jaxpar.base.sharding import is_axes, path_name, state_axes
from jaxpar.models import Params
from jaxpar.parallel.collectives import first_turn, gather, manual, turn_after, waits
from jaxpar.parallel.cross_entropy import LossSums
from jaxpar.parallel.host_memory import in_host_memory, on_device, on_host


def learning_rate(train: TrainConfig) -> optax.Schedule:
    """Return the learning rate by step (0-based): a linear warm-up, then cosine,
    warm-up-stable-decay, or constant.

    cosine: half a cosine down to the floor over the remaining steps, or over `decay_steps`
    (arXiv:1608.03983). wsd: constant (stable), then linear down to the floor over the last
    `decay_steps` (arXiv:2404.06395). The floor is `min_learning_rate_ratio` of `learning_rate`.
    """
    peak = train.learning_rate
    ratio = train.min_learning_rate_ratio
    warmup = train.warmup_steps
    steps = train.steps
    # Step 0 is the first of warmup + 1 equal rises, so no step is spent at rate zero.
    ramp = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    if train.schedule == "constant":
        after: optax.Schedule = optax.constant_schedule(peak)
    elif train.schedule == "cosine":
        decay = max(train.decay_steps or steps - warmup, 1)
        after = optax.cosine_decay_schedule(peak, decay, ratio)
    else:
        left = max(steps - warmup, 1)
        decay = train.decay_steps or max(min(steps // 5, left), 1)
        hold = max(left - decay, 0)
        fall = optax.linear_schedule(peak, ratio * peak, decay)
        after = optax.join_schedules([optax.constant_schedule(peak), fall], [hold])
    return optax.join_schedules([ramp, after], [warmup])


def schedule_note(before: TrainConfig, now: TrainConfig, step: int) -> str:
    """Say what a new number of steps does to the learning rate of a run that goes on after `step`;
    empty = nothing.
    """
    if before.steps == now.steps:
        return ""
    note = f"train.steps {before.steps} -> {now.steps}: the {now.schedule} schedule now ends there"
    old, new = (float(np.asarray(learning_rate(train)(step))) for train in (before, now))
    if step == 0 or abs(old - new) < 1e-3 * new:
        return note
    return f"{note}, and the learning rate goes on at {new:.2e} where it would have been {old:.2e}"


def decay_mask(axes: Params) -> Params:
    """Tell from `Model.axes` which parameters decay: matrices from or to the embed dim, but not
    norms or biases.
    """
    return jax.tree.map(is_matrix, axes, is_leaf=is_axes)


def make_optimizer(train: TrainConfig, axes: Params) -> optax.GradientTransformation:
    """Make AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with decay on matrices only; `update`
    does clipping.
    """
    return optax.adamw(
        learning_rate(train),
        train.beta1,
        train.beta2,
        train.eps,
        weight_decay=train.weight_decay,
        mask=decay_mask(axes),
    )


def pack_moments(
    state: optax.OptState, matrices: Params, precision: Literal["float32", "bfloat16"]
) -> optax.OptState:
    """Convert the first moments of matrices in a state of `optax.adamw` from float32 to this
    precision.

    `matrices` says whether each parameter is a matrix; the first moments of vectors stay float32,
    and so do all second moments. With `beta2` = 0.999 a second moment changes by a thousandth a
    step at most where it falls, which is less than half of a bfloat16's last bit (at least 0.2 %):
    rounded to nearest, it would never fall again.
    """
    first, second = moments_of(state)
    packed = jax.tree.map(
        lambda x, matrix: x.astype(precision) if matrix else x,
        first,
        matrices,
    )
    return optax.tree.set(state, mu=packed, nu=second)


def moments_of(state: optax.OptState) -> tuple[Params, Params]:
    """Return the first and second moments in an optimizer's state, each as a tree like the
    parameters'.
    """
    return optax.tree.get(state, "mu"), optax.tree.get(state, "nu")


def map_moments(
    change: Callable[..., Any],
    state: optax.OptState,
    *trees: Params,
    others: Callable[[Any], Any] = lambda x: x,
) -> optax.OptState:
    """Return an optimizer's state with `change(moment, *leaves)` for each moment, and `others(x)`
    for every other leaf.

    The leaves are at the moment's place in each of `trees`, which have the structure of the
    parameters.
    """
    moments = (jax.tree.map(change, moment, *trees) for moment in moments_of(state))
    scalars = jax.tree.map(
        others,
        optax.tree.set(state, mu={}, nu={}),
    )
    return optax.tree.set(scalars, mu=next(moments), nu=next(moments))


class Updated(NamedTuple):
    """The new parameters and optimizer state, and what the step has to say of itself.

    Attributes:
      params: the parameters that are trained.
      opt_state: the optimizer's state, as `pack_moments` returns it.
      norm: the global norm of gradients before clipping.
      overflows: how many entries of the parameters kept their old value, as the new one was not
        finite although the loss and the gradients were.
    """

    params: Params
    opt_state: optax.OptState
    norm: Float[Array, ""]
    overflows: Int[Array, ""]


_Scale = tuple[Array, Array]
"""The factor of a step's gradients, and whether the step is to be made."""


class _Part(NamedTuple):
    """The parameters of a part of the model, or of one of its layers, and their packed moments."""

    params: Params
    mu: Params
    nu: Params


class _UpdatedPart(NamedTuple):
    """A part after a step, the optimizer's state, of which only the scalars are used, and the
    part's overflows.
    """

    part: _Part
    scalars: optax.OptState
    overflows: Int[Array, ""]


def update(
    params: Params,
    opt_state: optax.OptState,
    grads: Params,
    sums: LossSums,
    axes: Params,
    train: TrainConfig,
    plan: Plan,
) -> Updated:
    """Make one step of the optimizer in float32, unless the loss or the gradients' norm is not
    finite.

    In that case parameters and optimizer state stay the same to the bit. A parameter's entry that
    would not be finite after a finite step keeps its old value, and is counted, so that whoever
    runs the step can stop. So a finite state always stays finite. The new or old number is chosen
    entry by entry where both are at hand, which takes no memory and no pass; the count is a sum
    over devices, as the norm is.

    `params`, those that are trained, are by part of the model, with `blocks` stacked over layers;
    `axes` are theirs; `opt_state` is as `pack_moments` returns it; `grads` and `sums` are summed
    over the tokens that counted.
    """
    streamed = [name for name in params if name == "blocks" and plan.streams]
    whole = [name for name in params if name not in streamed]
    # On CPU `turn_after` puts a loop over layers after all sums over devices, and what follows
    # after the loop.
    said = (sums.nll, sums.tokens, sums.routed)
    turn = turn_after(
        first_turn(plan) if plan.streams else None, said, jax.tree.map(lambda _: (), said), plan
    )
    squares = jnp.zeros(())
    for name in (*whole, *streamed):
        squares = _squares(grads[name], squares, turn)
    norm = jnp.sqrt(squares) / sums.tokens
    if train.clip_norm:
        clip = jnp.where(norm < train.clip_norm, 1.0, train.clip_norm / norm)
    else:
        clip = 1.0
    scale = clip / sums.tokens, jnp.isfinite(norm) & jnp.isfinite(sums.nll)
    mu, nu = moments_of(opt_state)
    new = dict[str, _Part]()
    scalars = opt_state
    overflows = jnp.int32(0)
    for name in (*streamed, *whole):
        if name in streamed:
            run = _update_by_layer
        else:
            run = _update_part
        part = _Part(params[name], mu[name], nu[name])
        done = run(
            part,
            grads[name],
            opt_state,
            waits(scale, turn),
            axes[name],
            train,
            plan,
        )
        new[name] = done.part
        scalars = done.scalars
        overflows += done.overflows
        turn = turn_after(
            turn,
            jax.tree.map(on_device, new[name].params),
            axes[name],
            plan,
        )
    params, mu, nu = ({name: part[i] for name, part in new.items()} for i in range(3))
    return Updated(
        params,
        optax.tree.set(scalars, mu=mu, nu=nu),
        norm,
        overflows,
    )


def _update_part(
    part: _Part,
    grads: Params,
    opt_state: optax.OptState,
    scale: _Scale,
    axes: Params,
    train: TrainConfig,
    plan: Plan,
) -> _UpdatedPart:
    """Return the new parameters and moments of a part."""
    part, grads = jax.tree.map(on_device, (part, grads))
    matrices = decay_mask(axes)
    factor, finite = scale
    grads = jax.tree.map(lambda g: g.astype(jnp.float32) * factor, grads)
    # ZeRO-1: where the optimizer's state is split over more devices than the parameters, each
    # device updates its piece.
    split_further = plan.mesh_axes("state_embed") != plan.mesh_axes("embed")
    stored = part.params
    if split_further:
        stored = jax.tree.map(
            lambda x, names: plan.constrain(x, state_axes(names)),
            stored,
            axes,
        )
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), stored)
    before = optax.tree.set(opt_state, mu=part.mu, nu=part.nu)
    float32 = map_moments(lambda x: x.astype(jnp.float32), before)
    updates, state = make_optimizer(train, axes).update(grads, float32, exact)
    asked = jax.tree.map(
        lambda x, more, old: (x + more).astype(old.dtype),
        exact,
        updates,
        stored,
    )
    # Moments of finite gradients are finite. A parameter may still overflow, and then it keeps its
    # old value.
    new = jax.tree.map(
        lambda x, old: jnp.where(finite & jnp.isfinite(x), x, old),
        asked,
        stored,
    )
    overflows = sum(
        jnp.sum(finite & ~jnp.isfinite(x), dtype=jnp.int32) for x in jax.tree.leaves(asked)
    )
    state = pack_moments(state, matrices, plan.moments)
    state = jax.tree.map(
        lambda x, old: jnp.where(finite, x, old),
        state,
        before,
    )

    if split_further:
        new = _gather_params(new, axes, plan)
    mu, nu = moments_of(state)
    if plan.optimizer == "offload":
        mu, nu = (
            jax.tree.map(lambda x, matrix: on_host(x) if matrix else x, of, matrices)
            for of in (mu, nu)
        )
    return _UpdatedPart(_Part(new, mu, nu), state, jnp.asarray(overflows))


def _update_by_layer(
    part: _Part,
    grads: Params,
    opt_state: optax.OptState,
    scale: _Scale,
    axes: Params,
    train: TrainConfig,
    plan: Plan,
) -> _UpdatedPart:
    """Do the same a layer at a time, each stage with its own layers; the scalars stay as they
    are.
    """
    of_layer = jax.tree.map(lambda names: names[1:], axes, is_leaf=is_axes)
    scalars = optax.tree.set(opt_state, mu={}, nu={})
    Carry = tuple[_Part, Array]

    def local(
        arrays: tuple[_Part, Params],
        scalars: optax.OptState,
        scale: _Scale,
    ) -> Carry:
        part, grads = arrays

        def body(carry: Carry, i: Array) -> tuple[Carry, None]:
            kept, overflows = carry
            layer, layer_grads = jax.tree.map(
                lambda x: _take(x, i),
                (kept, grads),
            )
            done = _update_part(layer, layer_grads, scalars, scale, of_layer, train, plan)
            new = done.part
            if plan.parameters == "offload":
                new = new._replace(params=jax.tree.map(on_host, new.params))
            kept = jax.tree.map(
                lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, i, 0), kept, new
            )
            return (kept, overflows + done.overflows), None

        none = jnp.zeros(1, jnp.int32)
        return jax.lax.scan(body, (part, none), jnp.arange(len(jax.tree.leaves(grads)[0])))[0]

    if stages := plan.mesh_axes("layers"):
        local = jax.shard_map(
            local,
            mesh=plan.mesh,
            in_specs=(P(stages), P(), P()),
            out_specs=P(stages),
            axis_names=set(stages),
            check_vma=False,
        )
    updated, overflows = local((part, grads), scalars, scale)
    return _UpdatedPart(updated, opt_state, jnp.sum(overflows))


def largest_parameter(params: Params) -> tuple[str, float]:
    """Return the name of the parameter with the largest entry, and that entry's size. All processes
    must call this.
    """
    largest = jax.jit(jax.tree.map, static_argnums=0)(
        lambda x: jnp.max(jnp.abs(on_device(x))), params
    )
    sizes = [
        (float(size), path_name(path))
        for path, size in jax.tree_util.tree_leaves_with_path(largest)
    ]
    size, name = max(sizes)
    return name, size


def _squares(grads: Params, total: Array, turn: Array | None) -> Array:
    """Add the squares of gradients to `total`; those in host memory are fetched a layer at a time,
    after `turn`.
    """
    leaves = jax.tree.leaves(grads)
    if not any(in_host_memory(leaf) for leaf in leaves):
        return total + sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in leaves)

    def body(total: Array, i: Array) -> tuple[Array, None]:
        layer = [on_device(_take(leaf, i)).astype(jnp.float32) for leaf in leaves]
        return total + sum(jnp.sum(jnp.square(x)) for x in layer), None

    return jax.lax.scan(body, waits(total, turn), jnp.arange(len(leaves[0])))[0]


def _take(x: Array, i: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _gather_params(updated: Params, axes: Params, plan: Plan) -> Params:
    """Gather updated parameters from the layout of the optimizer's state to their own layout."""
    stored = jax.tree.map(state_axes, axes, is_leaf=is_axes)
    one = lambda x, state, own: gather(x, state, own, plan)  # noqa: E731
    return manual(lambda new: jax.tree.map(one, new, stored, axes), plan, (stored,), axes)(updated)
