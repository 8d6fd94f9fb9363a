"""Checks of an optimizer that a program gives in place of the config's: is it one, can it be run,
and is it the one that a run was trained with?
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import jax
import numpy as np
import optax
from jax.extend import core

from jaxpar.base.config import Config
from jaxpar.base.errors import UserError, short
from jaxpar.base.jax_compat import ClosedJaxpr
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import PyTree, path_name
from jaxpar.models import Params
from jaxpar.train.optimizer.definition import Optimizer, in_32_bits
from jaxpar.train.optimizer.named_optimizers import config_optimizer
from jaxpar.train.optimizer.pruning import with_pruning
from jaxpar.train.optimizer.sparse_decay import with_sparse_decay

GIVEN = "given"
"""The name in a checkpoint of an optimizer that a program gave."""
PROGRAM = "program"
VERSIONS = "versions"
AnyOptimizer = Optimizer | optax.GradientTransformation | None
"""An optimizer of the caller's own; None = the config's."""


def as_optimizer(given: AnyOptimizer, config: Config, plan: Plan | None = None) -> Optimizer:
    """Return the optimizer that is given, or else the config's.

    A transformation takes the place of all that `[optimizer]` says, and of the learning rate.
    `train.clip_norm` applies before it, as before any other: 0 leaves the gradients as they are.
    An `Optimizer` brings its own.

    Args:
      given: the optimizer; None = the config's.
      config: the config, whose optimizer is taken where none is given.
      plan: the plan, which says in which order layers are stored; None = the model's own order.

    Raises:
      UserError: the value is no optimizer; or the config asks to round its moments, or to keep it
        or the parameters in host memory, which takes an optimizer of the config's.
    """
    if given is None:
        own = replace(config_optimizer(config), origin="config")
    elif isinstance(given, Optimizer):
        if given.origin:
            return given
        own = replace(given, origin="program")
    elif callable(getattr(given, "init", None)) and callable(getattr(given, "update", None)):
        transformation = cast(optax.GradientTransformation, given)
        clip_norm = config.train.clip_norm
        own = Optimizer(GIVEN, lambda _: transformation, False, clip_norm, origin="program")
    else:
        raise UserError(
            f"an optimizer is an optax.GradientTransformation, found {short(given)}: write "
            "optax.lion(1e-4), for example"
        )
    sparse = with_pruning(with_sparse_decay(own, config.model), config, plan)
    return replace(sparse, make=lambda axes: in_32_bits(sparse.make(axes)))


def saved_name(optimizer: Optimizer) -> str:
    """Return the name of an optimizer in a checkpoint: the name of `optimizer.name`, or `GIVEN`."""
    if optimizer.origin == "program":
        return GIVEN
    return optimizer.name


def fingerprint_of(optimizer: Optimizer, params: Params, axes: Params) -> dict[str, str]:
    """Compute what tells two optimizers apart whose states have the same form, as those of
    `optax.lion(1e-4)` and `optax.lion(1e-3)` have.

    The fingerprint is of the programs that make the first state and a step, with all numbers in
    them. Another version of JAX or of optax may write the same optimizer as another program.

    Args:
      params: the trained parameters as ShapeDtypeStructs in float32, in the model's order.
      axes: the logical axes of the parameters.

    Returns:
      The hash of the programs, and the versions that made them.
    """
    transformation = optimizer.make(axes)
    state = jax.eval_shape(transformation.init, params)
    programs = (
        jax.make_jaxpr(transformation.init)(params),
        jax.make_jaxpr(transformation.update)(params, state, params),
    )
    found = hashlib.sha256()
    for program in programs:
        # a function of Python is written with its address
        found.update(re.sub(r"0x[0-9a-f]+", "", str(program)).encode())
        for constant in _constants(program):
            found.update(np.asarray(constant).tobytes())
    return {
        PROGRAM: found.hexdigest(),
        VERSIONS: f"jax {jax.__version__}, optax {optax.__version__}",
    }


def _constants(program: core.Jaxpr | ClosedJaxpr) -> Iterator[Any]:
    """Yield the arrays that a program closes over, and the arrays of the programs that it calls."""
    yield from getattr(program, "consts", ())
    jaxpr: Any = getattr(program, "jaxpr", program)  # newer JAX has one class for both
    for eqn in jaxpr.eqns:
        for value in jax.tree.leaves(list(eqn.params.values())):  # a branch stands in a tuple
            if isinstance(value, core.Jaxpr | ClosedJaxpr):
                yield from _constants(value)


def other_optimizer_note(
    saved: dict[str, str] | None,
    here: dict[str, str] | None,
    step: int,
) -> str:
    """Say that a run is resumed with another optimizer than it was trained with; empty = as far as
    is known it is the same.

    Args:
      saved: the fingerprint of the optimizer that it was trained with, if a program gave that.
      here: the fingerprint of the optimizer that is given now.
      step: the step after which the run is resumed.
    """
    if saved is None or here is None or saved.get(VERSIONS) != here[VERSIONS]:
        return ""
    if saved.get(PROGRAM) == here[PROGRAM]:
        return ""
    return (
        "warning: the optimizer that is given is not the one that this run was trained with until "
        f"step {step}: its state has the same form, and its program, or a number in it such as the "
        "learning rate, is another. The run goes on with it, from the other's state: if you do not "
        "mean this, stop, and give the one that it was trained with"
    )


def require_update(optimizer: Optimizer, params: Params, axes: Params) -> None:
    """Refuse an optimizer whose step asks for more than a training step has, or leaves a state of
    another form.

    Args:
      params: the trained parameters as ShapeDtypeStructs in float32.
      axes: the logical axes of the parameters.

    Raises:
      UserError: the optimizer's update fails with gradients, a state and parameters alone, as where
        it needs the loss; or what it returns does not have their form.
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
