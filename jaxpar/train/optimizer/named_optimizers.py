"""The optimizers that a config names, each made from optax with its settings, to which a program
adds its own by a decorator.

Parameters are stacked over layers. Each of the library's optimizers treats each layer's arrays by
themselves, so that a model's parts, or its layers, may be updated one after another.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import optax

from jaxpar.base.config import Config
from jaxpar.base.config.optimizer import (
    Adafactor,
    Adam,
    AdamW,
    Lion,
    Muon,
    OptimizerSettings,
    ScheduleFree,
    Sgd,
)
from jaxpar.base.errors import UserError, short
from jaxpar.base.layout.plan import is_matrix
from jaxpar.base.layout.sharding import path_name
from jaxpar.base.layout.specs import is_axes
from jaxpar.base.registry import OPTIMIZERS, registering
from jaxpar.models import Params
from jaxpar.train.optimizer.definition import Optimizer, decay_mask
from jaxpar.train.optimizer.learning_rate import learning_rate
from jaxpar.train.optimizer.per_matrix import hidden_matrices, muon_dimensions, per_matrix
from jaxpar.train.optimizer.state_layout import few_of

Make = Callable[[Any, optax.Schedule, Params], optax.GradientTransformation]
"""A function that makes an optimizer from its settings, the learning rate by step, and the
parameters' logical axes.
"""
Made = TypeVar("Made", bound=Make)


@dataclass(frozen=True)
class RegisteredOptimizer:
    """An optimizer that `optimizer.name` names, with the properties that `register_optimizer`
    explains.
    """

    make: Make
    settings: type[OptimizerSettings]
    first_moments: tuple[str, ...]
    by_layer: bool
    starts_at_zero: bool
    stays_finite: bool
    by_matrix: bool
    whole_matrices: int
    averages_steps: bool
    contrib: tuple[str, ...]
    arguments: tuple[str, ...]


def register_optimizer(
    name: str,
    settings: type[OptimizerSettings] = OptimizerSettings,
    *,
    first_moments: tuple[str, ...] = (),
    by_layer: bool = False,
    starts_at_zero: bool = False,
    stays_finite: bool = False,
    by_matrix: bool = False,
    whole_matrices: int = 0,
    averages_steps: bool = False,
    contrib: tuple[str, ...] = (),
    arguments: tuple[str, ...] = (),
) -> Callable[[Made], Made]:
    """Register a function that makes an optimizer, as a word of `optimizer.name`.

        @dataclass(frozen=True)
        class Momentum(OptimizerSettings):
            beta: Decay = 0.9

        @register_optimizer("mine", Momentum, first_moments=("trace",))
        def mine(settings, rate, axes):
            return optax.sgd(rate, settings.beta)

    A config gives the settings of an optimizer that a program registered in `[optimizer.own]`; each
    of the library's has a table of its name. The layout of its state follows from its parameters.

    Args:
      settings: the frozen dataclass of its settings, whose fields have defaults, and ranges beside
        their types.
      first_moments: the names of the fields of its state that are first moments, which
        `precision.moments` may store in bfloat16.
      by_layer: whether it treats each layer's arrays by themselves, which state and parameters in
        host memory require.
      starts_at_zero: whether its state begins with zeros only.
      stays_finite: whether finite gradients leave its state finite.
      by_matrix: whether its state has the dims of a matrix's sides taken together.
      whole_matrices: the number of arrays as large as a hidden matrix, whole on every device, that
        its step works with.
      averages_steps: whether an average of steps is evaluated, in place of a decay of the rate.
      contrib: the names that it takes from `optax.contrib`, which not every version has.
      arguments: the names of arguments of the first of these, which not every version takes.

    Returns:
      The decorator, for a function of the settings, of the learning rate by step and of the
      parameters' logical axes that returns an `optax.GradientTransformation`.

    Raises:
      UserError: the name is no word, or the settings are no dataclass of settings with defaults.
        The decorator raises it where the function cannot be called so, or the name is taken.
    """
    _require_settings(name, settings)
    entry_of = functools.partial(
        RegisteredOptimizer,
        settings=settings,
        first_moments=first_moments,
        by_layer=by_layer,
        starts_at_zero=starts_at_zero,
        stays_finite=stays_finite,
        by_matrix=by_matrix,
        whole_matrices=whole_matrices,
        averages_steps=averages_steps,
        contrib=contrib,
        arguments=arguments,
    )
    return registering(OPTIMIZERS, name, entry_of, ("settings", "rate", "axes"))


def _require_settings(name: str, schema: type[OptimizerSettings]) -> None:
    """Refuse a class that is no frozen dataclass of settings, each with a default."""
    if not (isinstance(schema, type) and issubclass(schema, OptimizerSettings)):
        raise UserError(
            f"the settings of optimizer.name {name!r} are {short(schema)}: give a frozen dataclass "
            "derived from OptimizerSettings"
        )
    required = [
        one.name
        for one in dataclasses.fields(schema)
        if one.default is one.default_factory is dataclasses.MISSING
    ]
    if required:
        raise UserError(
            f"the settings of optimizer.name {name!r} have no default for {required[0]}: give one"
        )


def config_optimizer(config: Config) -> Optimizer:
    """Make the optimizer that a config names, with the config's learning rate and its clip of
    gradients.

    Raises:
      UserError: this version of optax does not have the optimizer, or not with these settings.
    """
    name = config.optimizer.name
    named: RegisteredOptimizer = OPTIMIZERS[name]
    _require_optax(name, named)
    chosen = config.optimizer.settings
    rate = learning_rate(config.train)
    return Optimizer(
        name,
        lambda axes: named.make(chosen, rate, axes),
        by_layer=named.by_layer,
        clip_norm=config.train.clip_norm,
        learning_rate=rate,
        first_moments=named.first_moments,
        starts_at_zero=named.starts_at_zero,
        stays_finite=named.stays_finite,
        by_matrix=named.by_matrix,
        whole_matrices=named.whole_matrices,
        averages_steps=named.averages_steps,
    )


def _require_optax(name: str, named: RegisteredOptimizer) -> None:
    """Raise a UserError where this version of optax lacks a function that an optimizer is made
    from.
    """
    missing = [one for one in named.contrib if not hasattr(optax.contrib, one)]
    if named.contrib and not missing:
        known = inspect.signature(getattr(optax.contrib, named.contrib[0])).parameters
        missing = [one for one in named.arguments if one not in known]
    if missing:
        raise UserError(
            f"optimizer.name={name}: optax {optax.__version__} has no {', '.join(missing)} of "
            f"optax.contrib: pip install -U optax, or take another optimizer"
        )


@register_optimizer(
    "adamw", AdamW, first_moments=("mu",), by_layer=True, starts_at_zero=True, stays_finite=True
)
def _adamw(
    chosen: AdamW | Muon, rate: optax.Schedule, axes: Params
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


@register_optimizer(
    "adam", Adam, first_moments=("mu",), by_layer=True, starts_at_zero=True, stays_finite=True
)
def _adam(chosen: Adam, rate: optax.Schedule, axes: Params) -> optax.GradientTransformation:
    return optax.adam(rate, chosen.beta1, chosen.beta2, chosen.eps)


@register_optimizer(
    "lion", Lion, first_moments=("mu",), by_layer=True, starts_at_zero=True, stays_finite=True
)
def _lion(chosen: Lion, rate: optax.Schedule, axes: Params) -> optax.GradientTransformation:
    return optax.lion(
        rate,
        chosen.beta1,
        chosen.beta2,
        weight_decay=chosen.weight_decay,
        mask=decay_mask(axes),
    )


@register_optimizer(
    "sgd", Sgd, first_moments=("trace",), by_layer=True, starts_at_zero=True, stays_finite=True
)
def _sgd(chosen: Sgd, rate: optax.Schedule, axes: Params) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(chosen.weight_decay, decay_mask(axes)),
        optax.sgd(rate, chosen.momentum or None, chosen.nesterov),
    )


@register_optimizer(
    "adafactor",
    Adafactor,
    first_moments=("ema",),
    by_layer=True,
    starts_at_zero=True,
    by_matrix=True,
)
def _adafactor(
    chosen: Adafactor, rate: optax.Schedule, axes: Params
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


@register_optimizer(
    "muon",
    Muon,
    first_moments=("mu",),
    by_layer=True,
    stays_finite=True,
    whole_matrices=3,  # Newton-Schulz: the matrix, its product with its square, and their sum
    contrib=("muon", "MuonDimensionNumbers"),
    arguments=("consistent_rms",),
)
def _muon(chosen: Muon, rate: optax.Schedule, axes: Params) -> optax.GradientTransformation:
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


@register_optimizer(
    "schedule_free",
    ScheduleFree,
    by_layer=True,
    averages_steps=True,
    contrib=("schedule_free", "schedule_free_eval_params"),
)
def _schedule_free(
    chosen: ScheduleFree, rate: optax.Schedule, axes: Params
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
      config: the experiment's config, which names the optimizer.
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
    return (
        f"{config.optimizer.table}.weight_decay={config.optimizer.weight_decay:g} takes "
        f"{few_of(unnamed)} for matrices, whose dims have no names: one that stacks vectors "
        "needs a dim with the name `layers`, and then does not decay"
    )
