"""A backward in two: what the gradient of the input needs, and later the rest, which is what weights' gradients need.

The backward is traced once and its operations are dealt out: those that the first results need are the first part; the
second starts from what the first one computed, and from what both are given. Where one operation gives both (a linear's
two gradients) it stands in both parts, and the compiler drops from each what nobody takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core


class Parts(NamedTuple):
    """A function's two parts.

    Attributes:
      first: `(*arguments) -> (results, needed)`: those results that are `now`, None for the others, and the arrays
        that the second part starts from.
      second: `(needed, *arguments given again) -> results`: the others.
      needed: shapes of those arrays.
    """

    first: Callable[..., tuple[Any, list[Any]]]
    second: Callable[..., Any]
    needed: tuple[jax.ShapeDtypeStruct, ...]


def split(function: Callable[..., Any], shapes: tuple[Any, ...], now: Any, again: Sequence[int]) -> Parts:
    """Both parts of a function of arrays.

    Args:
      function: what is split.
      shapes: of its arguments.
      now: of each result whether the first part gives it, in a tree of the results' form.
      again: which of the arguments the second part is given again.
    """
    closed, out_shapes = jax.make_jaxpr(function, return_shape=True)(*shapes)
    jaxpr, consts = closed.jaxpr, closed.consts
    flags, tree = jax.tree.flatten(now)
    assert tree == jax.tree.structure(out_shapes), "a flag for each result"
    outs_now = [out for out, flag in zip(jaxpr.outvars, flags, strict=True) if flag]
    outs_later = [out for out, flag in zip(jaxpr.outvars, flags, strict=True) if not flag]
    invars = iter(jaxpr.invars)
    arguments = [[next(invars) for _ in jax.tree.leaves(part)] for part in shapes]
    given_again = [var for n in again for var in arguments[n]]
    known = {*given_again, *jaxpr.constvars}

    first = _reaching(jaxpr.eqns, outs_now, set())
    made = {var for eqn in first for var in eqn.outvars} | set(jaxpr.invars)
    second = _reaching(jaxpr.eqns, outs_later, made | set(jaxpr.constvars))
    produced = {var for eqn in second for var in eqn.outvars if var not in made}
    wanted = [var for eqn in second for var in eqn.invars] + outs_later
    needed = list(
        dict.fromkeys(
            var for var in wanted if not isinstance(var, core.Literal) and var not in produced and var not in known
        )
    )

    def run_first(*arrays: Any) -> tuple[Any, list[Any]]:
        values = dict(zip(jaxpr.invars, jax.tree.leaves(arrays), strict=True))
        values |= dict(zip(jaxpr.constvars, consts, strict=True))
        _evaluate(jaxpr, first, values)
        return _results(values, True), [values[var] for var in needed]

    def run_second(arrays: Sequence[Any], *given: Any) -> Any:
        values = dict(zip(given_again, jax.tree.leaves(given), strict=True))
        values |= dict(zip(jaxpr.constvars, consts, strict=True))
        values |= dict(zip(needed, arrays, strict=True))
        _evaluate(jaxpr, second, values)
        return _results(values, False)

    def _results(values: dict[Any, Any], now: bool) -> Any:
        found = [_value(out, values) if flag is now else None for out, flag in zip(jaxpr.outvars, flags, strict=True)]
        return jax.tree.unflatten(tree, found)

    return Parts(run_first, run_second, tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in needed))


def _reaching(eqns: Sequence[Any], outs: Sequence[Any], there: set[Any]) -> list[Any]:
    """The operations that these results need, in order, given what is `there`."""
    wanted, found = set(filter(_is_var, outs)) - there, []
    for eqn in reversed(eqns):
        if wanted.intersection(eqn.outvars):
            found.append(eqn)
            wanted.difference_update(eqn.outvars)
            wanted.update(var for var in eqn.invars if _is_var(var) and var not in there)
    return found[::-1]


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, core.Literal)


def _value(atom: Any, values: dict[Any, Any]) -> Any:
    return values[atom] if _is_var(atom) else atom.val


def _evaluate(jaxpr: core.Jaxpr, eqns: Sequence[Any], values: dict[Any, Any]) -> None:
    """Run operations of a jaxpr; what is there already stays as it is."""
    for eqn in eqns:
        given = list(dict.fromkeys(filter(_is_var, eqn.invars)))
        made = [var for var in eqn.outvars if not isinstance(var, core.DropVar)]
        alone = jaxpr.replace(constvars=[], invars=given, outvars=made, eqns=[eqn], effects=eqn.effects)
        found = core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))(*(values[var] for var in given))
        for var, x in zip(made, found, strict=True):
            values.setdefault(var, x)
