"""The state of a training between steps: the shapes of its arrays, where each of them lives, and in
which order its layers lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from jaxpar.base.layout.plan import Plan, param_dtype
from jaxpar.base.layout.sharding import Axes, KeyPath, replicated_sharding, state_axes
from jaxpar.models import AnyModel, Params
from jaxpar.parallel.host_memory import HOST
from jaxpar.parallel.pipeline import reorder_layers, stored_order
from jaxpar.train.optimizer import (
    Optimizer,
    in_host_memory_of,
    pack_moments,
    require_runnable,
)
from jaxpar.train.optimizer.given_optimizer import require_update
from jaxpar.train.optimizer.host_update import require_host_update
from jaxpar.train.optimizer.state_layout import StateArray

Leaf = TypeVar("Leaf")
Shape = jax.ShapeDtypeStruct


class TrainState(NamedTuple, Generic[Leaf]):
    """A training run between steps: finished steps (int32 scalar), all parameters, and the state of
    the optimizer for those that are trained.

    Its leaves are arrays, or what a function returns for each of them: a ShapeDtypeStruct, a
    sharding or a flag.
    """

    step: Leaf
    params: Params
    opt_state: optax.OptState


def state_shapes(
    model: AnyModel,
    plan: Plan,
    optimizer: Optimizer,
    order: Sequence[int] | None = None,
) -> TrainState[Shape]:
    """Return a training state as ShapeDtypeStructs with shardings; `Experiment.state` has its own.

    An array of the optimizer's state that belongs to a parameter is split as the parameter's dims
    are, or further; every other, such as a counter, is replicated. (A scalar made outside jit would
    sit on device 0 and clash with the mesh after a restore.)

    Args:
      order: the order of the layers; None = the plan's.

    Raises:
      UserError: the optimizer cannot be run with this plan.
    """
    stored = stored_order(plan, model.config.layers)
    if order is None:
        order = stored
    require_runnable(optimizer, plan)
    shapes = model.shapes(order)
    axes = model.trained(model.axes)
    # The optimizer's state is that of parameters in float32.
    trained = model.trained(shapes)
    if optimizer.learning_rate is None:  # it is no optimizer of a config
        # the order that its own step is made for
        require_update(optimizer, model.trained(model.shapes(stored)), axes)
    if plan.optimizer == "host":
        require_host_update(optimizer, trained, axes, plan)
    params = jax.eval_shape(lambda params: as_stored(params, model, plan), shapes)
    shardings = param_shardings(params, model, plan)
    return TrainState(
        Shape((), jnp.int32, sharding=replicated_sharding(plan)),
        jax.tree.map(
            lambda x, at: Shape(x.shape, x.dtype, sharding=at),
            params,
            shardings,
        ),
        _opt_state_shapes(optimizer, trained, axes, plan),
    )


def _opt_state_shapes(
    optimizer: Optimizer, trained: Params, axes: Params, plan: Plan
) -> optax.OptState:
    """Return an optimizer's state of float32 parameters as ShapeDtypeStructs with shardings."""
    arrays = optimizer.state_arrays(trained, axes)
    opt_state = jax.tree.map(lambda array: array.value, arrays, is_leaf=_is_state_array)
    opt_state = jax.eval_shape(
        lambda state: pack_moments(optimizer, state, trained, axes, plan.moments), opt_state
    )
    host = in_host_memory_of(optimizer, opt_state, trained, axes, plan)
    names = _axes_by_path(axes, trained)

    def place(array: StateArray, shape: Shape, away: bool) -> Shape:
        if array.parameter is None:
            sharding = replicated_sharding(plan)
        else:
            own = state_axes(names[array.parameter])
            dims = [None if dim is None else own[dim] for dim in array.dims]
            sharding = plan.sharding(dims, shape.shape, "optimizer state")
        return Shape(shape.shape, shape.dtype, sharding=_in_memory(sharding, away))

    return jax.tree.map(place, arrays, opt_state, host, is_leaf=_is_state_array)


def _is_state_array(x: object) -> bool:
    """Whether a node of a tree describes an array of an optimizer's state."""
    return isinstance(x, StateArray)


def _axes_by_path(axes: Params, params: Params) -> dict[KeyPath, Axes]:
    """Return the logical axes of each parameter by its path."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    names = structure.flatten_up_to(axes)
    return {path: one for (path, _), one in zip(leaves, names, strict=True)}


def param_shapes(model: AnyModel, plan: Plan) -> Params:
    """Return the parameters as ShapeDtypeStructs, in the form in which the plan stores them."""
    shapes = model.shapes(stored_order(plan, model.config.layers))
    return jax.eval_shape(lambda params: as_stored(params, model, plan), shapes)


def param_shardings(shapes: Params, model: AnyModel, plan: Plan) -> Params:
    """Return where the parameters live; layers are in host memory if the plan offloads them."""
    return jax.tree.map(
        _in_memory, plan.sharding(model.axes, shapes), _params_in_host(shapes, plan)
    )


def as_stored(params: Params, model: AnyModel, plan: Plan) -> Params:
    """Convert each parameter to the dtype in which the plan stores it."""
    return jax.tree.map(
        lambda x, axes: x.astype(param_dtype(axes, plan)),
        params,
        model.axes,
    )


def in_host(
    state: TrainState[Shape], model: AnyModel, plan: Plan, optimizer: Optimizer
) -> TrainState[bool]:
    """Tell whether each array of a state is in host memory.

    The plan says it: the shardings of an absent GPU forget in which memory an array lies.

    Args:
      state: the state, as `state_shapes` returns it.
    """
    trained = model.trained(state.params)
    axes = model.trained(model.axes)
    return TrainState(
        False,
        _params_in_host(state.params, plan),
        in_host_memory_of(optimizer, state.opt_state, trained, axes, plan),
    )


def _params_in_host(params: Params, plan: Plan) -> Params:
    return jax.tree.broadcast(
        {name: name == "blocks" and plan.parameters == "offload" for name in params}, params
    )


def _in_memory(sharding: NamedSharding, host: bool) -> NamedSharding:
    if host:
        return sharding.with_memory_kind(HOST)
    return sharding


def reorder_state(
    state: TrainState[jax.Array],
    before: Sequence[int] | None,
    after: Sequence[int] | None,
    model: AnyModel,
    optimizer: Optimizer,
) -> TrainState[jax.Array]:
    """Put a state's stacked layers in another order: a pipeline stores them in the order of its
    stages.

    Args:
      state: a state, of which the optimizer's part may be empty.
      before: the order that its layers have (`pipeline.stored_order`); None = the model's.
      after: the order that they get, likewise.
    """

    def reorder(x: jax.Array, axes: Axes) -> jax.Array:
        if axes[:1] == ("layers",):
            return reorder_layers(x, before, after, model.config.layers)
        return x

    def reorder_array(x: jax.Array, array: StateArray, axes: Axes) -> jax.Array:
        along = tuple(None if dim is None else axes[dim] for dim in array.dims)
        return reorder(x, along)

    axes = model.trained(model.axes)  # only what is trained is saved
    params = jax.tree.map(reorder, state.params, axes)
    opt_state = state.opt_state
    if jax.tree.leaves(opt_state):
        shapes = jax.tree.map(
            lambda x: Shape(x.shape, jnp.float32),
            state.params,
        )
        arrays = optimizer.state_arrays(shapes, axes)
        names = _axes_by_path(axes, state.params)
        opt_state = jax.tree.map(
            lambda array, x: (
                x if array.parameter is None else reorder_array(x, array, names[array.parameter])
            ),
            arrays,
            opt_state,
            is_leaf=_is_state_array,
        )
    return TrainState(state.step, params, opt_state)
