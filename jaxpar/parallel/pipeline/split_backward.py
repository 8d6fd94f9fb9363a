"""A layer's backward taken apart: what it needs from the forward, and which part of it can wait.

A pipeline's forward tick and backward tick are apart in time, so what the backward needs goes into buffers.
`choose_residuals` finds out which of the arrays that `jax.vjp` saves depend on the layer's input, and so belong in a
stash; the others are computed again from weights and places. `split` cuts the backward itself in two for the ZB-H1
schedule (Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2): first comes the gradient of
the input, which the stage before waits for, and later come the gradients of the weights.

Both work on the traced function, operation by operation. The compiler drops results that nobody uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from jaxpar.base.jax_compat import CHECKPOINT

PyTree = Any
Atom = core.Var | core.Literal
Shape = Any
"""A ShapeDtypeStruct. For an array in host memory it is an abstract value, which alone says where it lies."""


class Kept(NamedTuple):
    """Which results of a function depend on its last argument, and how to get all results again from these.

    Attributes:
      places: the places of the results that depend on it, each array once.
      shapes: the shapes of these results.
      restore: `(arrays, *other arguments) -> results`; it computes again what does not depend on the last argument.
    """

    places: tuple[int, ...]
    shapes: tuple[Shape, ...]
    restore: Callable[..., list[jax.Array]]


def choose_residuals(function: Callable[..., list[jax.Array]], *shapes: PyTree) -> Kept:
    """Choose what to keep of a function's results so that they can all be had again without its last argument.

    Args:
      function: a function that returns a list of arrays.
      shapes: its arguments, as trees of ShapeDtypeStructs.
    """
    closed, (*_, last) = jax.make_jaxpr(function)(*shapes), shapes
    jaxpr, count = closed.jaxpr, len(jax.tree.leaves(last))
    others = jaxpr.invars[: len(jaxpr.invars) - count]
    depending = set(jaxpr.invars[len(others) :])
    for eqn in jaxpr.eqns:
        if depending.intersection(_vars(eqn.invars)):
            depending.update(eqn.outvars)
    depends = [isinstance(out, core.Var) and out in depending for out in jaxpr.outvars]
    first = {out: place for place, out in reversed([*enumerate(jaxpr.outvars)]) if depends[place]}
    places = tuple(sorted(first.values()))
    again = [out for out, flag in zip(jaxpr.outvars, depends, strict=True) if not flag]
    compute = _function(closed, _reaching(jaxpr.eqns, again, set())[0], others, again)

    def restore(arrays: Sequence[jax.Array], *given: PyTree) -> list[jax.Array]:
        stashed = dict(zip(places, arrays, strict=True))
        computed = iter(compute(*jax.tree.leaves(given)))
        outs = zip(jaxpr.outvars, depends, strict=True)
        return [stashed[first[out]] if flag else next(computed) for out, flag in outs]

    return Kept(places, tuple(_shape(jaxpr.outvars[place]) for place in places), restore)


class Parts(NamedTuple):
    """A function cut into two parts that run one after the other.

    Attributes:
      first: `(*arguments) -> (results, needed)`: the results that are `now`, with None for the others, and the arrays
        that the second part starts from.
      second: `(needed, *arguments given again) -> results`, which returns the other results.
      needed: the shapes of those arrays.
    """

    first: Callable[..., tuple[PyTree, list[jax.Array]]]
    second: Callable[..., PyTree]
    needed: tuple[Shape, ...]


def split(function: Callable[..., PyTree], shapes: Sequence[PyTree], now: PyTree, again: Sequence[int]) -> Parts:
    """Cut a function in two: what some results need, and what is left to do for the others.

    An operation that contributes to both (a linear's backward makes the gradients of its input and of its weight)
    stands in both.

    Args:
      shapes: its arguments, as trees of ShapeDtypeStructs.
      now: for each result whether the first part returns it, in a tree of the results' form.
      again: which of the arguments are given again to the second part.
    """
    closed, out_shapes = jax.make_jaxpr(function, return_shape=True)(*shapes)
    closed = _without_checkpoints(closed)
    jaxpr, flags = closed.jaxpr, jax.tree.leaves(now)
    tree, invars = jax.tree.structure(out_shapes), iter(jaxpr.invars)
    assert tree == jax.tree.structure(now), "a flag for each result"
    arguments = [[next(invars) for _ in jax.tree.leaves(part)] for part in shapes]
    given_again = [var for n in again for var in arguments[n]]
    early = [out for out, flag in zip(jaxpr.outvars, flags, strict=True) if flag]
    late = [out for out, flag in zip(jaxpr.outvars, flags, strict=True) if not flag]

    first, made = _reaching(jaxpr.eqns, early, set())
    second, more = _reaching(jaxpr.eqns, late, made | {*jaxpr.invars, *jaxpr.constvars})
    wanted = _vars([*(var for eqn in second for var in eqn.invars), *late])
    known = {*given_again, *jaxpr.constvars, *more}
    needed = list(dict.fromkeys(var for var in wanted if var not in known))
    run_early = _function(closed, first, jaxpr.invars, [*early, *needed])
    run_late = _function(closed, second, [*needed, *given_again], late)

    def results(arrays: Iterable[jax.Array], part: bool) -> PyTree:
        left = iter(arrays)
        return jax.tree.unflatten(tree, [next(left) if flag is part else None for flag in flags])

    def run_first(*given: PyTree) -> tuple[PyTree, list[jax.Array]]:
        found = run_early(*jax.tree.leaves(given))
        return results(found, True), found[len(early) :]

    def run_second(arrays: Sequence[jax.Array], *given: PyTree) -> PyTree:
        return results(run_late(*arrays, *jax.tree.leaves(given)), False)

    return Parts(run_first, run_second, tuple(map(_shape, needed)))


def _without_checkpoints(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Put the operations of each `jax.checkpoint` in its place, so that they can be told apart."""

    def run(jaxpr: core.Jaxpr, consts: Sequence[jax.Array], arrays: Sequence[jax.Array]) -> list[jax.Array]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arrays], strict=True))

        def value(atom: Atom) -> jax.Array:
            return values[atom] if isinstance(atom, core.Var) else atom.val

        for eqn in jaxpr.eqns:
            if eqn.primitive.name in CHECKPOINT:
                made, found = eqn.outvars, run(eqn.params["jaxpr"], (), [value(atom) for atom in eqn.invars])
            else:
                given, made = _vars(eqn.invars), [var for var in eqn.outvars if not isinstance(var, core.DropVar)]
                alone = jaxpr.replace(constvars=[], invars=given, outvars=made, eqns=[eqn], effects=eqn.effects)
                found = core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))(*map(value, given))
            values |= dict(zip(made, found, strict=True))
        return [value(out) for out in jaxpr.outvars]

    if not any(eqn.primitive.name in CHECKPOINT for eqn in closed.jaxpr.eqns):
        return closed
    return jax.make_jaxpr(lambda *arrays: run(closed.jaxpr, closed.consts, arrays))(*map(_shape, closed.jaxpr.invars))


def _reaching(
    eqns: Sequence[core.JaxprEqn], outs: Sequence[Atom], there: set[core.Var]
) -> tuple[list[core.JaxprEqn], set[core.Var]]:
    """Find the operations that these results need, in order, given what is `there`, and their outputs that are used."""
    wanted, found, made = set(_vars(outs)) - there, [], set()
    for eqn in reversed(eqns):
        if taken := wanted.intersection(eqn.outvars):
            found.append(eqn)
            made |= taken
            wanted.update(var for var in _vars(eqn.invars) if var not in there)
    return found[::-1], made


def _function(
    closed: core.ClosedJaxpr, eqns: Sequence[core.JaxprEqn], given: Sequence[core.Var], outs: Sequence[Atom]
) -> Callable[..., list[jax.Array]]:
    """Return the function that some operations of a jaxpr compute, from arrays for `given` to `outs`."""
    part = closed.jaxpr.replace(invars=list(given), outvars=list(outs), eqns=list(eqns))
    return core.jaxpr_as_fun(core.ClosedJaxpr(part, closed.consts))


def _vars(atoms: Iterable[Atom]) -> list[core.Var]:
    return [atom for atom in atoms if isinstance(atom, core.Var)]


def _shape(var: core.Var) -> Shape:
    aval: Any = var.aval
    return aval if aval.memory_space == jax.memory.Space.Host else jax.ShapeDtypeStruct(aval.shape, aval.dtype)
