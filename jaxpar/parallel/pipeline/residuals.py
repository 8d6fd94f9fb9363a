"""The choice of residuals: which results of a function are kept so that all of them can be restored
later.

The forward and the backward of a microbatch are in different ticks: the one leaves arrays in a
buffer for the other, and no tracer of autodiff. Of the arrays that a layer's `jax.vjp` would keep,
those that depend on the layer's input are stashed; the others are computed again from the arrays
that the stage has anyway: its weights, the places of the tokens, the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from jaxpar.base.jax_compat import ClosedJaxpr
from jaxpar.base.layout.sharding import PyTree

_Atom = core.Var | core.Literal
# a ShapeDtypeStruct; of an array in host memory an abstract value, which alone says where it lies
Shape = Any


class Kept(NamedTuple):
    """The results of a function that depend on its last argument, each array once, by their places
    and shapes; and a function that restores all results: `restore(arrays, *other arguments)`."""

    places: tuple[int, ...]
    shapes: tuple[Shape, ...]
    restore: Callable[..., PyTree]


def choose_residuals(function: Callable[..., PyTree], *shapes: PyTree) -> Kept:
    """Choose which results of a function to keep, so that all can be restored without its last
    argument.

    Args:
      function: a function that returns a tree of arrays.
      *shapes: its arguments as trees of ShapeDtypeStructs, of which there is at least one.

    Returns:
      The results to keep, and how all results are restored from them.
    """
    (closed, out) = jax.make_jaxpr(function, return_shape=True)(*shapes)
    (*_, last) = shapes
    jaxpr = closed.jaxpr
    tree = jax.tree.structure(out)
    count = len(jax.tree.leaves(last))
    others = jaxpr.invars[: len(jaxpr.invars) - count]
    depending = set(jaxpr.invars[len(others) :])
    for eqn in jaxpr.eqns:
        if depending.intersection(_vars(eqn.invars)):
            depending.update(eqn.outvars)
    depends = [isinstance(out, core.Var) and out in depending for out in jaxpr.outvars]
    first = {out: place for place, out in reversed([*enumerate(jaxpr.outvars)]) if depends[place]}
    places = tuple(sorted(first.values()))
    again = [out for out, flag in zip(jaxpr.outvars, depends, strict=True) if not flag]
    part = jaxpr.replace(
        invars=list(others),
        outvars=again,
        eqns=_reaching(jaxpr.eqns, again),
    )
    compute = core.jaxpr_as_fun(ClosedJaxpr(part, closed.consts))

    def restore(arrays: Sequence[jax.Array], *given: PyTree) -> PyTree:
        stashed = dict(zip(places, arrays, strict=True))
        computed = iter(compute(*jax.tree.leaves(given)))
        outs = zip(jaxpr.outvars, depends, strict=True)
        return jax.tree.unflatten(
            tree, [stashed[first[out]] if flag else next(computed) for out, flag in outs]
        )

    return Kept(places, tuple(_shape(jaxpr.outvars[place]) for place in places), restore)


def _reaching(
    eqns: Sequence[core.JaxprEqn],
    outs: Sequence[_Atom],
) -> list[core.JaxprEqn]:
    """Find the operations that these results need, in order."""
    wanted = set(_vars(outs))
    found = []
    for eqn in reversed(eqns):
        if wanted.intersection(eqn.outvars):
            found.append(eqn)
            wanted.update(_vars(eqn.invars))
    return found[::-1]


def _vars(atoms: Iterable[_Atom]) -> list[core.Var]:
    return [atom for atom in atoms if isinstance(atom, core.Var)]


def _shape(var: _Atom) -> Shape:
    aval: Any = var.aval
    if aval.memory_space == jax.memory.Space.Host:
        return aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
