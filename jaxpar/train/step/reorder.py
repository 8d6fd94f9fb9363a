"""Puts the layers of a state in another order: those of a pipeline are stored in the order of its
stages.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpar.base.layout.sharding import Axes
from jaxpar.models import AnyModel
from jaxpar.parallel.pipeline import reorder_layers
from jaxpar.train.optimizer import Optimizer
from jaxpar.train.optimizer.state_layout import StateArray
from jaxpar.train.state import Shape, TrainState, axes_by_path, is_state_array


def reorder_state(
    state: TrainState[jax.Array],
    before: Sequence[int] | None,
    after: Sequence[int] | None,
    model: AnyModel,
    optimizer: Optimizer,
) -> TrainState[jax.Array]:
    """Put a state's stacked layers in another stored order (see `pipeline.stored_order`); None =
    the model's. The optimizer's state may be empty."""

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
        names = axes_by_path(axes, state.params)
        opt_state = jax.tree.map(
            lambda array, x: (
                x if array.parameter is None else reorder_array(x, array, names[array.parameter])
            ),
            arrays,
            opt_state,
            is_leaf=is_state_array,
        )
    return TrainState(state.step, params, opt_state)
