"""What a layer's backward needs from its forward, found on the traced function.

A pipeline's forward tick and backward tick are apart in time, so what the backward needs goes into buffers. Of the
arrays that `jax.vjp` saves, those that depend on the layer's input belong in a stash; the others are computed again
from weights and places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

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
    restore: Callable[..., PyTree]


def choose_residuals(function: Callable[..., PyTree], *shapes: PyTree) -> Kept:
    """Choose what to keep of a function's results so that they can all be had again without its last argument.

    Args:
      function: a function that returns a tree of arrays, which are its results.
      shapes: its arguments, as trees of ShapeDtypeStructs.
    """
    (closed, out), (*_, last) = jax.make_jaxpr(function, return_shape=True)(*shapes), shapes
    jaxpr, tree, count = closed.jaxpr, jax.tree.structure(out), len(jax.tree.leaves(last))
    others = jaxpr.invars[: len(jaxpr.invars) - count]
    depending = set(jaxpr.invars[len(others) :])
    for eqn in jaxpr.eqns:
        if depending.intersection(_vars(eqn.invars)):
            depending.update(eqn.outvars)
    depends = [isinstance(out, core.Var) and out in depending for out in jaxpr.outvars]
    first = {out: place for place, out in reversed([*enumerate(jaxpr.outvars)]) if depends[place]}
    places = tuple(sorted(first.values()))
    again = [out for out, flag in zip(jaxpr.outvars, depends, strict=True) if not flag]
    part = jaxpr.replace(invars=list(others), outvars=again, eqns=_reaching(jaxpr.eqns, again))
    compute = core.jaxpr_as_fun(core.ClosedJaxpr(part, closed.consts))

    def restore(arrays: Sequence[jax.Array], *given: PyTree) -> PyTree:
        stashed = dict(zip(places, arrays, strict=True))
        computed = iter(compute(*jax.tree.leaves(given)))
        outs = zip(jaxpr.outvars, depends, strict=True)
        return jax.tree.unflatten(tree, [stashed[first[out]] if flag else next(computed) for out, flag in outs])

    return Kept(places, tuple(_shape(jaxpr.outvars[place]) for place in places), restore)


def _reaching(eqns: Sequence[core.JaxprEqn], outs: Sequence[Atom]) -> list[core.JaxprEqn]:
    """Find the operations that these results need, in order."""
    wanted, found = set(_vars(outs)), []
    for eqn in reversed(eqns):
        if wanted.intersection(eqn.outvars):
            found.append(eqn)
            wanted.update(_vars(eqn.invars))
    return found[::-1]


def _vars(atoms: Iterable[Atom]) -> list[core.Var]:
    return [atom for atom in atoms if isinstance(atom, core.Var)]


def _shape(var: core.Var) -> Shape:
    aval: Any = var.aval
    return aval if aval.memory_space == jax.memory.Space.Host else jax.ShapeDtypeStruct(aval.shape, aval.dtype)
