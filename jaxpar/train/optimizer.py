"""The optimizer of a training: the one that a config names, made from optax, or one that is given.

Parameters are stacked over layers. What a config names treats each layer's arrays by themselves, so
that a model's parts, or its layers, may be updated one after another. What is given sees all
trained parameters at once, since it may add something up over them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Float, Int

from jaxpar.base import optimizer_config as settings
from jaxpar.base.config import Config, TrainConfig
from jaxpar.base.errors import UserError, short
from jaxpar.base.plan import Plan, is_matrix
from jaxpar.base.sharding import PyTree, is_axes, path_name
from jaxpar.models import Params
from jaxpar.train.per_matrix import (
    hidden_matrices,
    matrix_dims,
    muon_dimensions,
    per_matrix,
)
from jaxpar.train.state_layout import few_of, map_state, state_arrays


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


GIVEN = "given"
"""The name of an optimizer that a program gave."""
AnyOptimizer = Optimizer | optax.GradientTransformation | None
"""An optimizer of the caller's; None = the config's."""


def _averaging_state(state: optax.OptState) -> optax.contrib.ScheduleFreeState | None:
    """The state of Schedule-Free in an optimizer's state, if there is one."""

    def is_it(x: object) -> bool:
        return isinstance(x, optax.contrib.ScheduleFreeState)

    nodes = jax.tree.leaves(state, is_leaf=is_it)
    return next((node for node in nodes if is_it(node)), None)


def as_optimizer(given: AnyOptimizer, config: Config) -> Optimizer:
    """Return the optimizer that is given, or else the config's.

    A transformation takes the place of all that `[optimizer]` says, and of the learning rate.
    `train.clip_norm` applies before it, as before any other: 0 leaves the gradients as they are.

    Raises:
      UserError: it is no optimizer; or the config asks to round its moments, or to keep it or the
        parameters in host memory, which takes one of the config's.
    """
    if given is None:
        return config_optimizer(config)
    if isinstance(given, Optimizer):
        return given
    if not (callable(getattr(given, "init", None)) and callable(getattr(given, "update", None))):
        raise UserError(
            f"an optimizer is an optax.GradientTransformation, found {short(given)}: write "
            "optax.lion(1e-4), for example"
        )
    transformation = cast(optax.GradientTransformation, given)
    return Optimizer(GIVEN, lambda _: transformation, False, config.train.clip_norm)


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


def require_update(optimizer: Optimizer, params: Params, axes: Params) -> None:
    """Refuse an optimizer whose step asks for more than a training step has, or leaves a state of
    another form.

    Args:
      optimizer: the optimizer.
      params: the trained parameters as ShapeDtypeStructs in float32.
      axes: their logical axes.

    Raises:
      UserError: its update fails with gradients, a state and parameters alone, as one fails that
        needs the loss; or what it returns does not have their form.
    """
    transformation = optimizer.make(axes)
    state = jax.eval_shape(transformation.init, params)
    try:
        updates, after = jax.eval_shape(transformation.update, params, state, params)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            "the optimizer that was given cannot make a step, which calls update(gradients, state, "
            f"params) with nothing more ({type(error).__name__}: {reason}): try one that needs "
            "neither the loss nor parameters of another form"
        ) from error
    for what, found, wanted in (("updates", updates, params), ("state", after, state)):
        if changed := _changed_form(found, wanted):
            raise UserError(
                f"the optimizer that was given returns {what} of another form than it was given "
                f"({changed}): a step keeps the structure, shapes and dtypes of both"
            )


def _changed_form(found: PyTree, wanted: PyTree) -> str:
    """Say where two trees differ in structure, shapes or dtypes; empty = nowhere."""
    if jax.tree.structure(found) != jax.tree.structure(wanted):
        return "its tree has other branches"
    rows = jax.tree_util.tree_leaves_with_path(wanted)
    for (path, before), after in zip(
        rows,
        jax.tree.leaves(found),
        strict=True,
    ):
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            name = path_name(path) or "the array"
            return f"{name}: {before.dtype}{[*before.shape]} -> {after.dtype}{[*after.shape]}"
    return ""


def config_optimizer(config: Config) -> Optimizer:
    """Make the optimizer that a config names.

    Raises:
      UserError: this version of optax has it not, or not with these settings.
    """
    chosen = config.optimizer.settings
    rate = learning_rate(config.train)
    name = config.optimizer.name
    clip_norm = config.train.clip_norm

    def of(
        make: Callable[[Params], optax.GradientTransformation],
        first_moments: tuple[str, ...] = (),
        starts_at_zero: bool = True,
        stays_finite: bool = True,
        by_matrix: bool = False,
    ) -> Optimizer:
        return Optimizer(
            name,
            make,
            True,
            clip_norm,
            rate,
            first_moments,
            starts_at_zero,
            stays_finite,
            by_matrix,
        )

    if isinstance(chosen, settings.AdamW):
        return of(lambda axes: _adamw(chosen, rate, axes), ("mu",))
    if isinstance(chosen, settings.Adam):
        return of(
            lambda _: optax.adam(rate, chosen.beta1, chosen.beta2, chosen.eps),
            ("mu",),
        )
    if isinstance(chosen, settings.Lion):
        return of(lambda axes: _lion(chosen, rate, axes), ("mu",))
    if isinstance(chosen, settings.Sgd):
        return of(lambda axes: _sgd(chosen, rate, axes), ("trace",))
    if isinstance(chosen, settings.Adafactor):
        return of(
            lambda axes: _adafactor(chosen, rate, axes),
            ("ema",),
            stays_finite=False,
            by_matrix=True,
        )
    if isinstance(chosen, settings.Muon):
        _require_optax("muon", ("muon", "MuonDimensionNumbers"), ("consistent_rms",))
        return of(lambda axes: _muon(chosen, rate, axes), ("mu",), starts_at_zero=False)
    _require_optax("schedule_free", ("schedule_free", "schedule_free_eval_params"))
    return of(
        lambda axes: _schedule_free(chosen, rate, axes),
        starts_at_zero=False,
        stays_finite=False,
    )


def _require_optax(
    name: str,
    needed: tuple[str, ...],
    arguments: tuple[str, ...] = (),
) -> None:
    """Raise a UserError where this version of optax has not what an optimizer is made from."""
    missing = [one for one in needed if not hasattr(optax.contrib, one)]
    if not missing:
        known = inspect.signature(getattr(optax.contrib, needed[0])).parameters
        missing = [one for one in arguments if one not in known]
    if missing:
        raise UserError(
            f"optimizer.name={name}: optax {optax.__version__} has no {', '.join(missing)} of "
            f"optax.contrib: pip install -U optax, or take another optimizer"
        )


def _adamw(
    chosen: settings.AdamW | settings.Muon, rate: optax.Schedule, axes: Params
) -> optax.GradientTransformation:
    """Make AdamW with decay on matrices only."""
    return optax.adamw(
        rate,
        chosen.beta1,
        chosen.beta2,
        chosen.eps,
        weight_decay=chosen.weight_decay,
        mask=decay_mask(axes),
    )


def _lion(
    chosen: settings.Lion, rate: optax.Schedule, axes: Params
) -> optax.GradientTransformation:
    return optax.lion(
        rate,
        chosen.beta1,
        chosen.beta2,
        weight_decay=chosen.weight_decay,
        mask=decay_mask(axes),
    )


def _sgd(chosen: settings.Sgd, rate: optax.Schedule, axes: Params) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(chosen.weight_decay, decay_mask(axes)),
        optax.sgd(rate, chosen.momentum or None, chosen.nesterov),
    )


def _adafactor(
    chosen: settings.Adafactor, rate: optax.Schedule, axes: Params
) -> optax.GradientTransformation:
    """Make Adafactor for each layer's matrices, with decoupled decay at the learning rate."""
    each = optax.adafactor(
        rate,
        chosen.least_size_to_factor,
        chosen.decay_rate,
        multiply_by_parameter_scale=chosen.relative,
        clipping_threshold=chosen.clip_rms or None,
        momentum=chosen.momentum or None,
        eps=chosen.eps,
    )
    if not chosen.weight_decay:
        return per_matrix(each, axes)
    decay = optax.add_decayed_weights(
        lambda count: -chosen.weight_decay * rate(count), decay_mask(axes)
    )
    return optax.chain(per_matrix(each, axes), decay)


def _muon(
    chosen: settings.Muon, rate: optax.Schedule, axes: Params
) -> optax.GradientTransformation:
    """Make Muon for the matrices of the blocks, and AdamW for everything else."""
    labels = jax.tree.map(
        lambda dims: "adamw" if dims is None else "muon",
        hidden_matrices(axes),
        is_leaf=lambda x: x is None or isinstance(x, optax.contrib.MuonDimensionNumbers),
    )

    hidden = optax.contrib.muon(
        rate,
        ns_steps=chosen.iterations,
        beta=chosen.momentum,
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
        nesterov=chosen.nesterov,
        muon_weight_dimension_numbers=muon_dimensions(axes),  # pyright: ignore[reportArgumentType]
        consistent_rms=chosen.rms or None,
    )
    return optax.partition({"muon": hidden, "adamw": _adamw(chosen, rate, axes)}, labels)


def _schedule_free(
    chosen: settings.ScheduleFree, rate: optax.Schedule, axes: Params
) -> optax.GradientTransformation:
    """Make Schedule-Free AdamW with decay on matrices only."""
    steps = optax.chain(
        optax.scale_by_rms(chosen.beta2, chosen.eps, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(chosen.weight_decay, decay_mask(axes)),
        optax.scale_by_learning_rate(rate),
    )
    return optax.contrib.schedule_free(steps, rate, chosen.beta1, chosen.rate_power)


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


def decay_note(config: Config, axes: Params) -> str:
    """Say which parameters of two dims without names weight decay takes for matrices; empty = none.

    Each may be a vector that is stacked, of which nothing tells that it is.

    Args:
      config: the experiment, whose optimizer it is.
      axes: the logical axes of the trained parameters.
    """
    decayed = config.optimizer.weight_decay > 0
    unnamed = [
        path_name(path)
        for path, names in jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes)
        if names == (None, None) and is_matrix(names)
    ]
    if not decayed or not unnamed:
        return ""
    name = config.optimizer.name
    return (
        f"optimizer.{name}.weight_decay={config.optimizer.weight_decay:g} takes "
        f"{few_of(unnamed)} for matrices, whose dims have no names: one that stacks vectors "
        "needs a dim with the name `layers`, and then does not decay"
    )


def reported_rate(
    optimizer: Optimizer, step: Int[Array, ""], state: optax.OptState
) -> Float[Array, ""] | None:
    """Return the learning rate of a step: of the schedule, or what `optax.inject_hyperparams` has
    of that name in the state; None where neither says it.
    """
    if optimizer.learning_rate is not None:
        return jnp.asarray(optimizer.learning_rate(step), jnp.float32)
    found = [value for _, value in optax.tree.get_all_with_path(state, "learning_rate")]
    if not found:
        return None
    return jnp.asarray(found[0], jnp.float32)


def first_moments_of_matrices(
    optimizer: Optimizer, state: optax.OptState, params: Params, axes: Params
) -> PyTree:
    """Tell of each array of a state whether it is the first moment of a matrix.

    Args:
      optimizer: the optimizer.
      state: its state, of all trained parameters or of some parts, with any leaves.
      params: the parameters that it is of, with any leaves.
      axes: their logical axes.
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
      optimizer: the optimizer.
      state: its state, of all trained parameters or of some parts.
      params: the parameters that it is of.
      axes: their logical axes.
      precision: the dtype.
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
      optimizer: the optimizer.
      state: its state, of all trained parameters or of some parts: arrays or ShapeDtypeStructs.
      params: the parameters that it is of, likewise.
      axes: their logical axes.
      plan: the plan.
    """
    away = plan.optimizer == "offload"
    return map_state(
        optimizer.make(axes),
        lambda leaf, param, matrix: away and matrix and leaf.size == param.size,
        state,
        params,
        params,
        decay_mask(axes),
        others=lambda _: False,
    )
