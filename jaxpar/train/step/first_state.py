"""Makes the state before the first step, in place on the mesh."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.base.compiler import once_options
from jaxpar.base.config import Config
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import PyTree
from jaxpar.models import AnyModel, Params
from jaxpar.parallel.host_memory import on_device
from jaxpar.parallel.pipeline import reorder_layers, stored_order
from jaxpar.train.optimizer import Optimizer, pack_moments
from jaxpar.train.optimizer.given_optimizer import AnyOptimizer, as_optimizer
from jaxpar.train.step.state import Shape, TrainState, as_stored, state_shapes


def init_state(
    model: AnyModel,
    config: Config,
    plan: Plan,
    params: Params | None = None,
    optimizer: AnyOptimizer = None,
) -> TrainState[jax.Array]:
    """Make a state at step 0 in place on the mesh.

    It is the same on every mesh, because each random number depends only on its place in the global
    array.

    Args:
      model: the model.
      config: the experiment.
      plan: its plan.
      params: the parameters (of an import); None = random ones, from `train.seed`.
      optimizer: in place of the config's.

    Raises:
      UserError: see `require_runnable`.
    """
    chosen = as_optimizer(optimizer, config, plan)
    shapes = state_shapes(model, config, plan, optimizer=chosen)
    if params is None:
        made = _random_params(model, config, plan, shapes.params)
    else:
        made = _given_params(params, model, plan, shapes.params)
    if chosen.starts_at_zero:
        opt_state = jax.tree.map(_zeros, shapes.opt_state)
    else:
        opt_state = _first_opt_state(chosen, made, shapes.opt_state, model, plan)
    return TrainState(_zeros(shapes.step), made, opt_state)


def _random_params(model: AnyModel, config: Config, plan: Plan, shapes: Params) -> Params:
    """Make parameters from `train.seed` where their shapes say."""
    order = stored_order(plan, model.config.layers)
    key = jax.random.key(config.train.seed)
    init = jax.jit(
        lambda: as_stored(model.init(key, order), model, plan),
        out_shardings=_shardings(shapes),
        compiler_options=once_options(plan.mesh),
    )
    return init()


def _given_params(params: Params, model: AnyModel, plan: Plan, shapes: Params) -> Params:
    """Put parameters in the model's order of layers where their shapes say, in the plan's order and
    dtypes.
    """
    order = stored_order(plan, model.config.layers)

    def start(params: Params) -> Params:
        if order is None:
            return as_stored(params, model, plan)
        reorder = partial(reorder_layers, before=None, after=order, layers=model.config.layers)
        blocks = jax.tree.map(reorder, params["blocks"])
        return as_stored(params | {"blocks": blocks}, model, plan)

    same = jax.tree.map(lambda leaf, shape: leaf.dtype == shape.dtype, params, shapes)
    if order is None and all(jax.tree.leaves(same)):
        return jax.device_put(params, _shardings(shapes))
    # no given array is as large as the one made here, so none can be reused
    return jax.jit(start, out_shardings=_shardings(shapes))(params)


def _shardings(shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)


def _first_opt_state(
    optimizer: Optimizer, params: Params, shapes: optax.OptState, model: AnyModel, plan: Plan
) -> optax.OptState:
    """Make the optimizer's first state where its shapes say."""
    axes = model.trained(model.axes)

    def start(trained: Params) -> optax.OptState:
        exact = jax.tree.map(
            lambda x: on_device(x).astype(jnp.float32),
            trained,
        )
        state = optimizer.make(axes).init(exact)
        return pack_moments(optimizer, state, exact, axes, plan.moments)

    init = jax.jit(
        start, out_shardings=_shardings(shapes), compiler_options=once_options(plan.mesh)
    )
    return init(model.trained(params))


def _zeros(leaf: Shape) -> jax.Array:
    """Make zeros without compiling a program, one array at a time, since all at once could fill the
    host's memory.
    """
    zeros = np.zeros(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
    return jax.block_until_ready(
        jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda _: zeros)
    )
