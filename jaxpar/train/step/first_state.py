"""Makes the state before the first step, in place on the mesh."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.base.compiler import once_options
from jaxpar.models import Params
from jaxpar.parallel.host_memory import on_device
from jaxpar.parallel.pipeline import reorder_layers, stored_order
from jaxpar.train.experiment import Experiment
from jaxpar.train.optimizer import pack_moments
from jaxpar.train.state import Shape, TrainState, as_stored


def init_state(experiment: Experiment, params: Params | None = None) -> TrainState[jax.Array]:
    """Make a state at step 0 in place on the mesh.

    It is the same on every mesh, because each random number depends only on its place in the global
    array.

    Args:
      experiment: what is to be trained.
      params: the parameters (of an import); None = random ones, from `train.seed`.

    Raises:
      UserError: the optimizer cannot be run with this plan.
    """
    shapes = experiment.state
    if params is None:
        made = _random_params(experiment)
    else:
        made = _given_params(experiment, params)
    if experiment.optimizer.starts_at_zero:
        opt_state = jax.tree.map(_zeros, shapes.opt_state)
    else:
        opt_state = _first_opt_state(experiment, made)
    return TrainState(_zeros(shapes.step), made, opt_state)


def _random_params(experiment: Experiment) -> Params:
    """Make parameters from `train.seed` where their shapes say."""
    model = experiment.model
    plan = experiment.plan
    order = stored_order(plan, model.config.layers)
    key = jax.random.key(experiment.config.train.seed)
    init = jax.jit(
        lambda: as_stored(model.init(key, order), model, plan),
        out_shardings=experiment.shardings.params,
        compiler_options=once_options(plan.mesh),
    )
    return init()


def _given_params(experiment: Experiment, params: Params) -> Params:
    """Put parameters in the model's order of layers where their shapes say, in the plan's order and
    dtypes.
    """
    model = experiment.model
    plan = experiment.plan
    shardings = experiment.shardings.params
    order = stored_order(plan, model.config.layers)

    def start(params: Params) -> Params:
        if order is None:
            return as_stored(params, model, plan)
        reorder = partial(reorder_layers, before=None, after=order, layers=model.config.layers)
        blocks = jax.tree.map(reorder, params["blocks"])
        return as_stored(params | {"blocks": blocks}, model, plan)

    same = jax.tree.map(
        lambda leaf, shape: leaf.dtype == shape.dtype, params, experiment.state.params
    )
    if order is None and all(jax.tree.leaves(same)):
        return jax.device_put(params, shardings)
    # no given array is as large as the one made here, so none can be reused
    return jax.jit(start, out_shardings=shardings)(params)


def _first_opt_state(experiment: Experiment, params: Params) -> optax.OptState:
    """Make the optimizer's first state where its shapes say."""
    model = experiment.model
    plan = experiment.plan
    optimizer = experiment.optimizer
    axes = model.trained(model.axes)

    def start(trained: Params) -> optax.OptState:
        exact = jax.tree.map(
            lambda x: on_device(x).astype(jnp.float32),
            trained,
        )
        state = optimizer.make(axes).init(exact)
        return pack_moments(optimizer, state, exact, axes, plan.moments)

    init = jax.jit(
        start,
        out_shardings=experiment.shardings.opt_state,
        compiler_options=once_options(plan.mesh),
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
