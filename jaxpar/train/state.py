"""Defines the training state: its shapes, where each array lives, and how it is made."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from jaxpar.base.config import Config
from jaxpar.base.jax_compat import once_options
from jaxpar.base.plan import Plan, param_dtype
from jaxpar.base.sharding import Axes, is_axes, replicated_sharding, state_axes
from jaxpar.models import Model, Params
from jaxpar.parallel.host_memory import HOST
from jaxpar.parallel.pipeline import reorder_layers, stored_order
from jaxpar.train.optimizer import decay_mask, make_optimizer, map_moments, pack_moments

Leaf = TypeVar("Leaf")


class TrainState(NamedTuple, Generic[Leaf]):
    """A training run between steps: finished steps (int32 scalar), all parameters, and the state of `make_optimizer`
    for those that are trained.

    Its leaves are arrays, or what a function returns for each of them: a ShapeDtypeStruct, a sharding or a flag.
    """

    step: Leaf
    params: Params
    opt_state: optax.OptState


def param_shapes(model: Model, plan: Plan) -> Params:
    """Return the parameters as ShapeDtypeStructs, in the form in which the plan stores them."""
    shapes = model.shapes(stored_order(plan, model.config.layers))
    return jax.eval_shape(lambda params: _as_stored(params, model, plan), shapes)


def state_shapes(
    model: Model, config: Config, plan: Plan, order: Sequence[int] | None = None
) -> TrainState[jax.ShapeDtypeStruct]:
    """Return the state as ShapeDtypeStructs with shardings; its layers are in this order (None = the plan's).

    Moments are split like their parameters or further; every scalar is replicated. (A scalar made outside jit would sit
    on device 0 and clash with the mesh after a restore.)
    """
    order = stored_order(plan, config.model.layers) if order is None else order
    trained_axes = model.trained(model.axes)

    def start(params: Params) -> TrainState:
        opt_state = make_optimizer(config.train, trained_axes).init(model.trained(params))
        opt_state = pack_moments(opt_state, decay_mask(trained_axes), plan.moments)
        return TrainState(jnp.zeros((), jnp.int32), _as_stored(params, model, plan), opt_state)

    shapes, everywhere = jax.eval_shape(start, model.shapes(order)), replicated_sharding(plan)
    place = lambda moment, axes: plan.sharding(axes, moment.shape)  # noqa: E731
    opt_state = map_moments(place, shapes.opt_state, gradient_axes(model), others=lambda _: everywhere)
    opt_state = jax.tree.map(_in_memory, opt_state, in_host(shapes, model, plan).opt_state)
    shardings = TrainState(everywhere, param_shardings(shapes.params, model, plan), opt_state)
    return jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, shardings)


def state_shardings(model: Model, config: Config, plan: Plan) -> TrainState[NamedSharding]:
    """Return where the state lives (see `state_shapes`)."""
    return jax.tree.map(lambda leaf: leaf.sharding, state_shapes(model, config, plan))


def param_shardings(shapes: Params, model: Model, plan: Plan) -> Params:
    """Return where the parameters live; layers are in host memory if the plan offloads them."""
    return jax.tree.map(_in_memory, plan.sharding(model.axes, shapes), _params_in_host(shapes, plan))


def in_host(state: TrainState, model: Model, plan: Plan) -> TrainState[bool]:
    """Tell whether each array of a state is in host memory; stacked layers and moments of matrices may be."""
    matrices = decay_mask(model.trained(model.axes))
    away = plan.optimizer == "offload"
    opt_state = map_moments(lambda _, matrix: matrix and away, state.opt_state, matrices, others=lambda _: False)
    return TrainState(False, _params_in_host(state.params, plan), opt_state)


def _params_in_host(params: Params, plan: Plan) -> Params:
    host = {name: name == "blocks" and plan.parameters == "offload" for name in params}
    return jax.tree.broadcast(host, params)


def _in_memory(sharding: NamedSharding, host: bool) -> NamedSharding:
    return sharding.with_memory_kind(HOST) if host else sharding


def gradient_axes(model: Model) -> Params:
    """Return the logical axes of the gradient and moments of every parameter that is trained, in a dict like that of
    the parameters."""
    return jax.tree.map(state_axes, model.trained(model.axes), is_leaf=is_axes)


def init_state(model: Model, config: Config, plan: Plan, params: Params | None = None) -> TrainState[jax.Array]:
    """Make a state at step 0 in place on the mesh, from `params` (an import) if they are given.

    It is the same on every mesh, because each random number depends only on its place in the global array.
    """
    shapes, order = state_shapes(model, config, plan), stored_order(plan, model.config.layers)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes.params)
    if params is None:
        key = jax.random.key(config.train.seed)
        made = jax.jit(
            lambda: _as_stored(model.init(key, order), model, plan),
            out_shardings=shardings,
            compiler_options=once_options(plan.mesh),
        )()
    else:

        def start(params: Params) -> Params:
            reorder = partial(reorder_layers, before=None, after=order, layers=config.model.layers)
            return _as_stored(params | {"blocks": jax.tree.map(reorder, params["blocks"])}, model, plan)

        dtypes = jax.tree.map(lambda leaf, made: leaf.dtype == made.dtype, params, shapes.params)
        if order is None and all(jax.tree.leaves(dtypes)):
            made = jax.device_put(params, shardings)
        else:  # no given array is as large as the one made here, so none can be reused
            made = jax.jit(start, out_shardings=shardings)(params)
    step, opt_state = jax.tree.map(_zeros, (shapes.step, shapes.opt_state))
    return TrainState(step, made, opt_state)


def _as_stored(params: Params, model: Model, plan: Plan) -> Params:
    """Convert each parameter to the dtype in which the plan stores it."""
    return jax.tree.map(lambda x, axes: x.astype(param_dtype(axes, plan)), params, model.axes)


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Make zeros without compiling a program, one array at a time, since all at once could fill the host's memory."""
    zeros = np.zeros(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
    return jax.block_until_ready(jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda _: zeros))


def reorder_state(
    state: TrainState[jax.Array], before: Sequence[int] | None, after: Sequence[int] | None, config: Config
) -> TrainState[jax.Array]:
    """Put a state's stacked layers in another stored order (see `pipeline.stored_order`); None = the model's. The
    optimizer's state may be empty."""
    model = Model(config.model)

    def reorder(x: jax.Array, axes: Axes) -> jax.Array:
        return reorder_layers(x, before, after, config.model.layers) if axes[:1] == ("layers",) else x

    axes = model.trained(model.axes)  # only what is trained is saved
    params = jax.tree.map(reorder, state.params, axes)
    return TrainState(state.step, params, state.opt_state and map_moments(reorder, state.opt_state, axes))
