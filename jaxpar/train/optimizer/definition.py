"""What a training asks of its optimizer: how its state is laid out, stored and evaluated.

The optimizer is the one that a config names, made from optax (`named_optimizers`), or one that is
given (`given_optimizer`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float, Int

from jaxpar.base.errors import UserError
from jaxpar.base.layout.plan import Plan, is_matrix
from jaxpar.base.layout.sharding import PyTree
from jaxpar.base.layout.specs import is_axes
from jaxpar.models import Params
from jaxpar.train.optimizer.per_matrix import matrix_dims
from jaxpar.train.optimizer.state_layout import map_state, state_arrays


@dataclass(frozen=True, eq=False)
class Optimizer:
    """An optimizer as the training step, the state, checkpoints and the memory account take it.

    Attributes:
      name: what messages call it.
      make: makes the transformation for parameters with these logical axes: all that are trained,
        or some parts of a model.
      by_layer: whether it treats each layer's arrays by themselves. Only then can the update go
        from layer to layer, as state or parameters in host memory ask for.
      clip_norm: the largest global norm of the gradients that it is given; 0 = no clipping.
      learning_rate: the rate by step, to be reported; None = not known.
      first_moments: the names of the fields of its state that are first moments, which may be
        stored in bfloat16.
      starts_at_zero: whether its state begins with zeros only.
      stays_finite: whether finite gradients leave its state finite.
      by_matrix: whether its state has the dims of a matrix's sides taken together.
      whole_matrices: how many arrays as large as a hidden matrix, whole on every device, its step
        works with.
      averages_steps: whether what is evaluated is an average of steps.
      origin: who chose it, once `as_optimizer` has added what a config asks of a step beside it;
        empty until then.
    """

    name: str
    make: Callable[[Params], optax.GradientTransformation]
    by_layer: bool
    clip_norm: float
    learning_rate: optax.Schedule | None = None
    first_moments: tuple[str, ...] = ()
    starts_at_zero: bool = False
    stays_finite: bool = False
    by_matrix: bool = False
    whole_matrices: int = 0
    averages_steps: bool = False
    origin: Literal["", "config", "program"] = ""

    def state_arrays(self, params: Params, axes: Params) -> PyTree:
        """Return the state as `StateArray`s, given the trained parameters as ShapeDtypeStructs and
        their logical axes.
        """
        if not self.by_matrix:
            return state_arrays(self.make(axes), params)
        leaves, structure = jax.tree_util.tree_flatten_with_path(params)
        names = structure.flatten_up_to(axes)
        dims = {path: matrix_dims(one) for (path, _), one in zip(leaves, names, strict=True)}
        return state_arrays(
            self.make(axes), params, lambda path, shape: dims[path].view(tuple(shape))
        )

    def averages(self, state: optax.OptState) -> bool:
        """Whether a state holds what evaluation needs besides the parameters."""
        return _averaging_state(state) is not None

    def evaluation_params(self, state: optax.OptState, params: Params) -> Params:
        """Return the parameters for evaluation, generation and export: the average of Schedule-Free
        (arXiv:2405.15682), and of any other optimizer the parameters themselves.

        Args:
          state: the optimizer's state.
          params: the trained parameters that belong to it.
        """
        averaging = _averaging_state(state)
        if averaging is None:
            return params
        averaged = optax.contrib.schedule_free_eval_params(averaging, params)
        return jax.tree.map(
            lambda new, old: new.astype(old.dtype),
            averaged,
            params,
        )


def in_32_bits(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return a transformation that computes as it does where `jax_enable_x64` is off.

    optax makes its schedules, and what it corrects moments by, in JAX's default dtype: the state of
    a step would become float64.
    """

    def init(params: optax.Params) -> optax.OptState:
        with jax.enable_x64(False):
            return transformation.init(params)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        with jax.enable_x64(False):
            return transformation.update(updates, state, params)

    return optax.GradientTransformation(init, update)


def _averaging_state(state: optax.OptState) -> optax.contrib.ScheduleFreeState | None:
    """Find the state of Schedule-Free in an optimizer's state, if there is one."""

    def is_it(x: object) -> bool:
        return isinstance(x, optax.contrib.ScheduleFreeState)

    nodes = jax.tree.leaves(state, is_leaf=is_it)
    return next((node for node in nodes if is_it(node)), None)


def require_runnable(optimizer: Optimizer, plan: Plan) -> None:
    """Refuse a plan that an optimizer of the caller's cannot be run with.

    Raises:
      UserError: it asks for bfloat16 moments, or for state or parameters in host memory.
    """
    if plan.moments != "float32" and not optimizer.first_moments:
        raise UserError(
            f"precision.moments={plan.moments} rounds the first moments of an optimizer that the "
            "config names, and this one was given: try precision.moments=float32, and its own "
            "mu_dtype"
        )
    if plan.streams and not optimizer.by_layer:
        if plan.optimizer == "offload":
            what = "optimizer"
        else:
            what = "parameters"
        raise UserError(
            f"memory.{what}=offload updates one layer after another, and an optimizer that was "
            "given may add something up over all of them (as clip_by_global_norm does): try "
            f"memory.{what}=device, or one that optimizer.name names"
        )


def decay_mask(axes: Params) -> Params:
    """Tell from `Model.axes` which parameters decay: matrices from or to the embed dim, but not
    norms or biases.
    """
    return jax.tree.map(is_matrix, axes, is_leaf=is_axes)


def reported_rate(
    optimizer: Optimizer, step: Int[Array, ""], state: optax.OptState
) -> Float[Array, ""] | None:
    """Return the learning rate of a step: of the schedule, or what `optax.inject_hyperparams` has
    of that name in the state; None where neither says it.
    """
    if optimizer.learning_rate is not None:
        with jax.enable_x64(False):
            return jnp.asarray(optimizer.learning_rate(step))
    found = [value for _, value in optax.tree.get_all_with_path(state, "learning_rate")]
    if not found:
        return None
    return jnp.asarray(found[0], jnp.float32)


def first_moments_of_matrices(
    optimizer: Optimizer, state: optax.OptState, params: Params, axes: Params
) -> PyTree:
    """Tell of each array of a state whether it is the first moment of a matrix.

    Args:
      optimizer: the optimizer, which names its first moments.
      state: its state, of all trained parameters or of some parts, with any leaves.
      params: the parameters that it is of, with any leaves.
    """
    transformation = optimizer.make(axes)

    def is_first(path: tuple[object, ...], _: object) -> bool:
        return any(getattr(key, "name", None) in optimizer.first_moments for key in path)

    return map_state(
        transformation,
        lambda first, matrix: first and matrix,
        jax.tree_util.tree_map_with_path(is_first, state),
        params,
        decay_mask(axes),
        others=lambda _: False,
    )


def pack_moments(
    optimizer: Optimizer,
    state: optax.OptState,
    params: Params,
    axes: Params,
    precision: Literal["float32", "bfloat16"],
) -> optax.OptState:
    """Convert the first moments of matrices in a state from float32 to this precision.

    The first moments of vectors stay float32, and so do all second moments. With `beta2` = 0.999 a
    second moment changes by a thousandth a step at most where it falls, which is less than half of
    a bfloat16's last bit (at least 0.2 %): rounded to nearest, it would never fall again.

    Args:
      optimizer: the optimizer, which names its first moments.
      state: its state, of all trained parameters or of some parts.
      params: the parameters that it is of.
    """
    if precision == "float32":
        return state
    first = first_moments_of_matrices(optimizer, state, params, axes)
    return jax.tree.map(
        lambda x, rounded: x.astype(precision) if rounded else x,
        state,
        first,
    )


def in_host_memory_of(
    optimizer: Optimizer, state: optax.OptState, params: Params, axes: Params, plan: Plan
) -> PyTree:
    """Tell of each array of a state whether a plan keeps it in host memory: all that are as large
    as a matrix may be there.

    Args:
      optimizer: the optimizer, whose transformation says which array belongs to which parameter.
      state: its state, of all trained parameters or of some parts: arrays or ShapeDtypeStructs.
      params: the parameters that it is of, likewise.
      plan: the plan, whose `optimizer` says whether anything is kept there.
    """
    away = plan.optimizer != "device"
    return map_state(
        optimizer.make(axes),
        lambda leaf, param, matrix: away and matrix and leaf.size == param.size,
        state,
        params,
        params,
        decay_mask(axes),
        others=lambda _: False,
    )
