"""The optimizers that a config names, each made from optax with its settings.

Parameters are stacked over layers. Each of these treats each layer's arrays by themselves, so that
a model's parts, or its layers, may be updated one after another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax

from jaxpar.base.config import Config
from jaxpar.base.config import optimizer as settings
from jaxpar.base.config.optimizer import OptimizerName
from jaxpar.base.errors import UserError
from jaxpar.base.layout.plan import is_matrix
from jaxpar.base.layout.sharding import path_name
from jaxpar.base.layout.specs import is_axes
from jaxpar.models import Params
from jaxpar.train.optimizer.definition import Optimizer, decay_mask
from jaxpar.train.optimizer.learning_rate import learning_rate
from jaxpar.train.optimizer.per_matrix import hidden_matrices, muon_dimensions, per_matrix
from jaxpar.train.optimizer.state_layout import few_of

_Maker = Callable[[Any, optax.Schedule, Params], optax.GradientTransformation]


@dataclass(frozen=True)
class _Named:
    """How optax makes an optimizer, and what is known of its state.

    Attributes:
      make: makes it from its settings, the learning rate by step, and the parameters' logical axes.
      first_moments, starts_at_zero, stays_finite, by_matrix, whole_matrices: see `Optimizer`.
      contrib: what it takes from `optax.contrib`, which not every version has.
      arguments: arguments of the first of these, likewise.
    """

    make: _Maker
    first_moments: tuple[str, ...] = ()
    starts_at_zero: bool = True
    stays_finite: bool = True
    by_matrix: bool = False
    whole_matrices: int = 0
    contrib: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


_OPTIMIZERS: dict[str, _Named] = {}


def _optimizer(name: OptimizerName, **known: Any) -> Callable[[_Maker], _Maker]:
    """Return the decorator of a function that makes the optimizer of this name."""

    def register(make: _Maker) -> _Maker:
        _OPTIMIZERS[name] = _Named(make, **known)
        return make

    return register


def config_optimizer(config: Config) -> Optimizer:
    """Make the optimizer that a config names.

    Args:
      config: the experiment.

    Returns:
      The optimizer, with the config's learning rate and its clip of gradients.

    Raises:
      UserError: this version of optax has it not, or not with these settings.
    """
    name = config.optimizer.name
    named = _OPTIMIZERS[name]
    _require_optax(name, named)
    chosen = config.optimizer.settings
    rate = learning_rate(config.train)
    return Optimizer(
        name,
        lambda axes: named.make(chosen, rate, axes),
        by_layer=True,
        clip_norm=config.train.clip_norm,
        learning_rate=rate,
        first_moments=named.first_moments,
        starts_at_zero=named.starts_at_zero,
        stays_finite=named.stays_finite,
        by_matrix=named.by_matrix,
        whole_matrices=named.whole_matrices,
    )


def _require_optax(name: str, named: _Named) -> None:
    """Raise a UserError where this version of optax has not what an optimizer is made from."""
    missing = [one for one in named.contrib if not hasattr(optax.contrib, one)]
    if named.contrib and not missing:
        known = inspect.signature(getattr(optax.contrib, named.contrib[0])).parameters
        missing = [one for one in named.arguments if one not in known]
    if missing:
        raise UserError(
            f"optimizer.name={name}: optax {optax.__version__} has no {', '.join(missing)} of "
            f"optax.contrib: pip install -U optax, or take another optimizer"
        )


@_optimizer("adamw", first_moments=("mu",))
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


@_optimizer("adam", first_moments=("mu",))
def _adam(
    chosen: settings.Adam, rate: optax.Schedule, axes: Params
) -> optax.GradientTransformation:
    return optax.adam(rate, chosen.beta1, chosen.beta2, chosen.eps)


@_optimizer("lion", first_moments=("mu",))
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


@_optimizer("sgd", first_moments=("trace",))
def _sgd(chosen: settings.Sgd, rate: optax.Schedule, axes: Params) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(chosen.weight_decay, decay_mask(axes)),
        optax.sgd(rate, chosen.momentum or None, chosen.nesterov),
    )


@_optimizer("adafactor", first_moments=("ema",), stays_finite=False, by_matrix=True)
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


@_optimizer(
    "muon",
    first_moments=("mu",),
    starts_at_zero=False,
    whole_matrices=3,  # Newton-Schulz: the matrix, its product with its square, and their sum
    contrib=("muon", "MuonDimensionNumbers"),
    arguments=("consistent_rms",),
)
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


@_optimizer(
    "schedule_free",
    starts_at_zero=False,
    stays_finite=False,
    contrib=("schedule_free", "schedule_free_eval_params"),
)
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
