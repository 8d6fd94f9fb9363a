"""Functions taken apart by what their results need: what a backward must be given, and what of it can wait.

Both work on the traced function, operation by operation. What an operation gives that nobody takes the compiler drops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from jaxpar.base.jax_compat import CHECKPOINT


class Kept(NamedTuple):
    """Which results of a function depend on its last argument, and all of them from these.

    Attributes:
      places: of results that depend on it, each array once.
      shapes: theirs, and of what lies in host memory the abstract arrays.
      restore: `(arrays, *other arguments) -> results`: the others are computed again.
    """

    places: tuple[int, ...]
    shapes: tuple[Any, ...]
    restore: Callable[..., list[Any]]


def kept(function: Callable[..., list[Any]], *shapes: Any) -> Kept:
    """What to keep of a function's results to have them all again without its last argument."""
    closed, (*_, last) = jax.make_jaxpr(function)(*shapes), shapes
    jaxpr, count = closed.jaxpr, len(jax.tree.leaves(last))
    others = jaxpr.invars[: len(jaxpr.invars) - count]
    depending = set(jaxpr.invars[len(others) :])
    for eqn in jaxpr.eqns:
        if depending.intersection(filter(_is_var, eqn.invars)):
            depending.update(eqn.outvars)
    first = {out: place for place, out in reversed([*enumerate(jaxpr.outvars)]) if _is_var(out) and out in depending}
    places = tuple(sorted(first.values()))
    again = [out for out in jaxpr.outvars if not (_is_var(out) and out in depending)]
    eqns, _ = _reaching(jaxpr.eqns, again, set())

    def restore(arrays: Sequence[Any], *given: Any) -> list[Any]:
        values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        values |= dict(zip(others, jax.tree.leaves(given), strict=True))
        _evaluate(jaxpr, eqns, values)
        values |= dict(zip((jaxpr.outvars[place] for place in places), arrays, strict=True))
        return [_value(out, values) for out in jaxpr.outvars]

    return Kept(places, tuple(_shape(jaxpr.outvars[place]) for place in places), restore)


class Parts(NamedTuple):
    """A function in two parts, one after the other.

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
    """A function in two: what some results need, and what is left to do for the others.

    An operation that gives something to both (a linear's backward: the gradients of its input and of its weight)
    stands in both.

    Args:
      function: what is split.
      shapes: of its arguments.
      now: of each result whether the first part gives it, in a tree of the results' form.
      again: which of the arguments the second part is given again.
    """
    closed, out_shapes = jax.make_jaxpr(function, return_shape=True)(*shapes)
    closed = _opened(closed)
    jaxpr, flags = closed.jaxpr, jax.tree.leaves(now)
    tree, invars = jax.tree.structure(out_shapes), iter(jaxpr.invars)
    assert tree == jax.tree.structure(now), "a flag for each result"
    arguments = [[next(invars) for _ in jax.tree.leaves(part)] for part in shapes]
    given_again = [var for n in again for var in arguments[n]]

    def outs(now: bool) -> list[Any]:
        return [out for out, flag in zip(jaxpr.outvars, flags, strict=True) if flag is now]

    first, made = _reaching(jaxpr.eqns, outs(True), set())
    there = made | {*jaxpr.invars, *jaxpr.constvars}
    second, more = _reaching(jaxpr.eqns, outs(False), there)
    wanted = [var for eqn in second for var in eqn.invars] + outs(False)
    known = {*given_again, *jaxpr.constvars, *more}
    needed = list(dict.fromkeys(var for var in wanted if _is_var(var) and var not in known))

    def results(values: dict[Any, Any], now: bool) -> Any:
        found = [_value(out, values) if flag is now else None for out, flag in zip(jaxpr.outvars, flags, strict=True)]
        return jax.tree.unflatten(tree, found)

    def run_first(*arrays: Any) -> tuple[Any, list[Any]]:
        values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        values |= dict(zip(jaxpr.invars, jax.tree.leaves(arrays), strict=True))
        _evaluate(jaxpr, first, values)
        return results(values, True), [values[var] for var in needed]

    def run_second(arrays: Sequence[Any], *given: Any) -> Any:
        values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        values |= dict(zip(given_again, jax.tree.leaves(given), strict=True))
        values |= dict(zip(needed, arrays, strict=True))
        _evaluate(jaxpr, second, values)
        return results(values, False)

    return Parts(run_first, run_second, tuple(map(_shape, needed)))


def _opened(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same with the operations of `jax.checkpoint` in its place, that they may be told apart."""
    jaxpr = closed.jaxpr

    def run(jaxpr: Any, consts: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        values = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, arrays, strict=True))
        for eqn in jaxpr.eqns:
            if eqn.primitive.name not in CHECKPOINT:
                _evaluate(jaxpr, [eqn], values)
                continue
            inner = eqn.params["jaxpr"]
            found = run(
                getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), [_value(x, values) for x in eqn.invars]
            )
            values |= dict(zip(eqn.outvars, found, strict=True))
        return [_value(out, values) for out in jaxpr.outvars]

    if not any(eqn.primitive.name in CHECKPOINT for eqn in jaxpr.eqns):
        return closed
    return jax.make_jaxpr(lambda *arrays: run(jaxpr, closed.consts, arrays))(*map(_shape, jaxpr.invars))


def _reaching(eqns: Sequence[Any], outs: Sequence[Any], there: set[Any]) -> tuple[list[Any], set[Any]]:
    """The operations that these results need, in order, given what is `there`; and what of theirs is needed."""
    wanted, found, made = set(filter(_is_var, outs)) - there, [], set()
    for eqn in reversed(eqns):
        if taken := wanted.intersection(eqn.outvars):
            found.append(eqn)
            made |= taken
            wanted.update(var for var in eqn.invars if _is_var(var) and var not in there)
    return found[::-1], made


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, core.Literal)


def _shape(var: Any) -> Any:
    if var.aval.memory_space == jax.memory.Space.Host:  # which a ShapeDtypeStruct does not say
        return var.aval
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


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
