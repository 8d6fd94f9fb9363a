"""How many entries of each named activation are not finite, while a function runs as it is.

A model names its activations once, for what memory keeps (`jaxpar.parallel.remat.named`). Here the
function is traced, and its trace is run with a count beside each name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxpar.base.jax_compat import NAME, ClosedJaxpr, called_function, run_equation
from jaxpar.base.layout.activation_names import NAMES

T = TypeVar("T")
Counts = dict[str, jax.Array]
"""The number of entries that are not finite, a scalar a name."""

_MAY_BE_INFINITE = "attention_lse"
"""The log-sum-exp of a token that sees no other is minus infinity, and right."""


def count_nonfinite(x: jax.Array) -> jax.Array:
    """Count the entries of an array that are NaN or infinite, a scalar (see `count_true`)."""
    return count_true(~jnp.isfinite(x))


def count_true(x: jax.Array, dims: Sequence[int] | None = None) -> jax.Array:
    """Count what is true.

    Args:
      x: an array of bool.
      dims: those that are counted over; None = all.

    Returns:
      The counts in int32. Where it may not hold them, in float32, rounded: of 2**32 entries that
      are all true int32 has 0.
    """
    over = range(x.ndim) if dims is None else dims
    most = math.prod(x.shape[dim] for dim in over)
    dtype = jnp.int32 if most < 2**31 else jnp.float32
    return jnp.sum(x, tuple(over), dtype=dtype)


def with_counts(function: Callable[..., T], *args: Any) -> tuple[T, Counts]:
    """Call a function, and count what is not finite in each activation that it names.

    What is named inside a loop, a branch or a `shard_map` is not counted.

    Args:
      function: a function of pytrees of arrays, which JAX can trace.
      *args: its arguments.

    Returns:
      Its result, and the counts of the names that were come by; two of one name are added up.
    """
    traced, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    counts: Counts = {}
    results = _run(traced, jax.tree.leaves(args), counts)
    return jax.tree.unflatten(jax.tree.structure(shape), results), counts


def _run(traced: ClosedJaxpr, args: Sequence[Any], counts: Counts) -> list[Any]:
    """Run a traced function, and add to `counts` what it names."""
    jaxpr = traced.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, traced.consts, strict=True))
    values |= dict(zip(jaxpr.invars, args, strict=True))

    def value(atom: Any) -> Any:
        if isinstance(atom, core.Literal):
            return atom.val
        return values[atom]

    for equation in jaxpr.eqns:
        given = [value(atom) for atom in equation.invars]
        called = called_function(equation)
        if called is not None and _has_names(called.jaxpr):
            made = _run(called, given, counts)
        else:
            made = run_equation(equation, given)
        values |= dict(zip(equation.outvars, made, strict=True))
        name = _name(equation)
        if name in NAMES and name != _MAY_BE_INFINITE:
            counts[name] = counts.get(name, 0) + count_nonfinite(made[0])
    return [value(atom) for atom in jaxpr.outvars]


def _name(equation: core.JaxprEqn) -> str:
    """The name that an equation gives to an array; empty where it gives none."""
    if equation.primitive.name == NAME:
        return equation.params["name"]
    return ""


def _has_names(jaxpr: core.Jaxpr) -> bool:
    for equation in jaxpr.eqns:
        if _name(equation):
            return True
        called = called_function(equation)
        if called is not None and _has_names(called.jaxpr):
            return True
    return False
