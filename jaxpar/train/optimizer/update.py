"""The optimizer's step on the mesh.

Arrays in host memory pass through the device a layer at a time: a layer's parameters, gradients and
state are fetched, updated and sent back, in a loop over the stacked layers whose buffers stay in
place.

Arrays stacked over layers are [layers, ...]; a pipeline's stage has its own layers, and loops over
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import PyTree, path_name, state_axes
from jaxpar.base.layout.specs import is_axes
from jaxpar.models import Params
from jaxpar.parallel.cpu_collective_order import first_order_token, order_token_after, ready_after
from jaxpar.parallel.cross_entropy import LossSums
from jaxpar.parallel.host_memory import in_host_memory, on_device, on_host
from jaxpar.train.optimizer.definition import Optimizer, in_host_memory_of, require_runnable
from jaxpar.train.optimizer.host_update import update_on_host
from jaxpar.train.optimizer.state_layout import param_trees, with_param_trees
from jaxpar.train.optimizer.updated_part import (
    Part,
    Scale,
    UpdatedPart,
    gather_params,
    update_arrays,
)


class Updated(NamedTuple):
    """The new parameters and optimizer state, and what the step has to say of itself.

    Attributes:
      params: the parameters that are trained.
      opt_state: the optimizer's state, as `pack_moments` returns it.
      norm: the global norm of gradients before clipping.
      overflows: how many entries of the parameters, or of a state that finite gradients may leave
        not finite, kept their old value, as the new one was not finite although the loss and the
        gradients were.
    """

    params: Params
    opt_state: optax.OptState
    norm: Float[Array, ""]
    overflows: Int[Array, ""]


def update(part: Part, sums: LossSums, optimizer: Optimizer, plan: Plan) -> Updated:
    """Make one step of the optimizer in float32, unless the loss or the gradients' norm is not
    finite.

    In that case parameters and optimizer state stay the same to the bit. An entry of a parameter,
    or of the state, that would not be finite after a finite step keeps its old value, and is
    counted, so that whoever runs the step can stop. So a finite state always stays finite. The new
    or old number is chosen entry by entry where both are at hand, which takes no memory and no
    pass; the count is a sum over devices, as the norm is.

    Args:
      part: all that is trained.
      sums: the loss's sums, over the tokens that the gradients are summed over.
      optimizer: the optimizer.
      plan: how the arrays lie on the mesh.

    Raises:
      UserError: the optimizer cannot be run with this plan (`require_runnable`).
    """
    require_runnable(optimizer, plan)
    params = part.params
    opt_state = part.opt_state
    grads = part.grads
    axes = part.axes
    streamed = [name for name in params if plan.streams and is_stacked(params[name], axes[name])]
    rest = [name for name in params if name not in streamed]
    # On CPU `order_token_after` puts a loop over layers after all sums over devices, and what
    # follows after the loop.
    said = (sums.nll, sums.tokens, sums.routed, sums.hidden)
    order_token = order_token_after(
        first_order_token(plan) if plan.streams else None,
        said,
        jax.tree.map(lambda _: (), said),
        plan,
    )
    squares = jnp.zeros((), jnp.float32)
    for name in (*rest, *streamed):
        squares = _squares(grads[name], squares, order_token)
    norm = jnp.sqrt(squares) / sums.tokens
    scale = _scale(norm, sums, optimizer)
    transformation = optimizer.make(axes)
    trees = param_trees(transformation, opt_state)
    new = dict[str, Any]()
    new_trees = [dict[str, Any](tree) for tree in trees]
    scalars = opt_state
    overflows = jnp.int32(0)
    groups = [[name] for name in (*streamed, *rest)] if optimizer.by_layer else [rest]
    for names in groups:
        of_part = [_parts(tree, names) for tree in trees]
        run = _way_to_update(set(names) <= set(streamed), plan)
        group = Part(
            _parts(params, names),
            with_param_trees(transformation, opt_state, of_part),
            _parts(grads, names),
            _parts(axes, names),
        )
        done = run(group, ready_after(scale, order_token), optimizer, plan)
        new |= done.params
        updated = param_trees(transformation, done.opt_state)
        for tree, more in zip(new_trees, updated, strict=True):
            tree |= more
        scalars = done.opt_state
        overflows += done.overflows
        order_token = order_token_after(
            order_token,
            jax.tree.map(on_device, done.params),
            group.axes,
            plan,
        )
    return Updated(
        {name: new[name] for name in params},
        with_param_trees(transformation, scalars, new_trees),
        norm,
        overflows,
    )


def _scale(norm: Array, sums: LossSums, optimizer: Optimizer) -> Scale:
    """What gradients are multiplied by, so that they are means and no longer than the optimizer
    wants them, and whether there is anything to update by.
    """
    clip: Array | float = 1.0
    if optimizer.clip_norm:
        clip = jnp.where(norm < optimizer.clip_norm, 1.0, optimizer.clip_norm / norm)
    return Scale(clip / sums.tokens, jnp.isfinite(norm) & jnp.isfinite(sums.nll))


def _way_to_update(
    is_streamed: bool, plan: Plan
) -> Callable[[Part, Scale, Optimizer, Plan], UpdatedPart]:
    """The function that updates a group of parts: on the host, a layer at a time, or all at
    once.
    """
    if plan.optimizer == "host":
        return update_on_host
    return _update_by_layer if is_streamed else _update_part


def is_stacked(params: PyTree, axes: PyTree) -> bool:
    """Whether the arrays of a part are all stacked over the same layers, as those of our blocks
    are.

    A whole model of a program's own may have a list of blocks, each with arrays of its own.

    Args:
      params: the arrays of the part, or their shapes.
      axes: the logical axes of each.
    """
    names = jax.tree.leaves(axes, is_leaf=is_axes)
    sizes = {leaf.shape[:1] for leaf in jax.tree.leaves(params)}
    return len(sizes) == 1 and all(one[:1] == ("layers",) for one in names)


def _parts(tree: PyTree, names: Sequence[str]) -> PyTree:
    """These parts of a tree of a model."""
    return {name: tree[name] for name in names}


def _update_part(part: Part, scale: Scale, optimizer: Optimizer, plan: Plan) -> UpdatedPart:
    """Update some parts on the device, all of their layers at once."""
    params = part.params
    opt_state = part.opt_state
    grads = part.grads
    axes = part.axes
    host = in_host_memory_of(optimizer, opt_state, params, axes, plan)
    # ZeRO-1: where the optimizer's state is split over more devices than the parameters, each
    # device updates its piece.
    split_further = plan.mesh_axes("state_embed") != plan.mesh_axes("embed")
    stored = jax.tree.map(on_device, params)
    if split_further:
        stored = jax.tree.map(
            lambda x, names: plan.constrain(x, state_axes(names)),
            stored,
            axes,
        )
    here = Part(
        stored,
        jax.tree.map(on_device, opt_state),
        jax.tree.map(on_device, grads),
        axes,
    )
    done = update_arrays(here, scale, optimizer, plan)
    new = done.params
    if split_further:
        new = gather_params(new, axes, plan)
    state = jax.tree.map(
        lambda x, away: on_host(x) if away else x,
        done.opt_state,
        host,
    )
    return UpdatedPart(new, state, sum(done.overflows, start=jnp.int32(0)))


def _update_by_layer(part: Part, scale: Scale, optimizer: Optimizer, plan: Plan) -> UpdatedPart:
    """Update some parts on the device, a layer at a time, each stage with its own layers."""
    params = part.params
    opt_state = part.opt_state
    grads = part.grads
    axes = part.axes
    transformation = optimizer.make(axes)
    trees = param_trees(transformation, opt_state)
    no_trees: list[PyTree] = [()] * len(trees)
    # In the loop each device has whole layers, one at a time.
    of_layer = replace(
        plan,
        rules=replace(plan.rules, layers=(), stage=()),
    )
    Arrays = tuple[Params, list[PyTree]]

    def local(
        arrays: Arrays, grads: Params, scalars: optax.OptState, scale: Scale
    ) -> tuple[Arrays, optax.OptState, Array]:
        def body(carry: Any, i: Array) -> tuple[Any, None]:
            kept, _, overflows = carry
            layer, layer_trees = jax.tree.map(lambda x: _layer(x, i), kept)
            one = Part(
                layer,
                with_param_trees(transformation, scalars, layer_trees),
                jax.tree.map(lambda x: _layer(x, i), grads),
                axes,
            )
            done = _update_part(one, scale, optimizer, of_layer)
            new = done.params
            if plan.parameters == "offload":
                new = jax.tree.map(on_host, new)
            kept = jax.tree.map(
                lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, i, 0),
                kept,
                (new, param_trees(transformation, done.opt_state)),
            )
            after = with_param_trees(transformation, done.opt_state, no_trees)
            return (kept, after, overflows + done.overflows), None

        begin = (arrays, scalars, jnp.zeros(1, jnp.int32))
        layers = jnp.arange(len(jax.tree.leaves(grads)[0]))
        return jax.lax.scan(body, begin, layers)[0]

    if stages := plan.mesh_axes("layers"):
        local = jax.shard_map(
            local,
            mesh=plan.mesh,
            in_specs=(P(stages), P(stages), P(), P()),
            out_specs=(P(stages), P(), P(stages)),
            axis_names=set(stages),
            check_vma=False,
        )
    scalars = with_param_trees(transformation, opt_state, no_trees)
    (new, new_trees), scalars, overflows = local((params, trees), grads, scalars, scale)
    return UpdatedPart(
        new,
        with_param_trees(transformation, scalars, new_trees),
        jnp.sum(overflows, dtype=jnp.int32),
    )


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


def _layer(x: Array, i: Array) -> Array:
    """One of the stacked layers, still with a layers dim."""
    return jax.lax.dynamic_slice_in_dim(x, i, 1)


def _squares(grads: Params, total: Array, order_token: Array | None) -> Array:
    """Add the squares of gradients to `total`; those in host memory are fetched a layer at a time,
    after `order_token`.
    """
    leaves = jax.tree.leaves(grads)
    if not any(in_host_memory(leaf) for leaf in leaves):
        return total + _sum_of_squares(leaves)

    def body(total: Array, i: Array) -> tuple[Array, None]:
        layer = [on_device(_layer(leaf, i)) for leaf in leaves]
        return total + _sum_of_squares(layer), None

    layers = jnp.arange(len(leaves[0]))
    total, _ = jax.lax.scan(body, ready_after(total, order_token), layers)
    return total


def _sum_of_squares(arrays: Sequence[Array]) -> Array | int:
    """The squares of all entries of some arrays, added up in float32."""
    return sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in arrays)
