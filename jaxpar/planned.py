"""The collectives that a program asks for, read from its jaxpr: what the plan expects of the compiler.

Every collective of this library stands in a `shard_map`, by mesh axis. Counted here with the trips of the scans around
it, computed once where the same move of the same array is written twice (a recomputed gather and the backward's own),
and not at all where nothing needs it, as the compiler will.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jax.extend import core
from jax.sharding import Mesh

from jaxpar.hlo.tasks import CollectiveKind

_KINDS: dict[str, CollectiveKind] = {
    "all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce", "psum_invariant": "all-reduce", "pmax": "all-reduce", "pmin": "all-reduce",
    "all_to_all": "all-to-all", "ppermute": "ppermute",
}  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """One collective of one device group, as written."""

    kind: CollectiveKind
    axes: frozenset[str]
    """Mesh axes of more than one device."""
    bytes: int
    """Of one group's whole array, as `hlo.tasks.Collective.bytes`."""
    count: int
    """How often it runs in one step."""
    scope: str
    """Named scopes, outermost first: `block/attention`."""


@dataclass
class _Value:
    """A node of the graph: what it needs, and the collective it is, if any."""

    needs: tuple[_Value, ...] = ()
    collective: Planned | None = None


def planned(jaxpr: core.ClosedJaxpr, mesh: Mesh) -> list[Planned]:
    """Collectives of a traced function: `planned(jax.jit(step).trace(*args).jaxpr, mesh)`.

    Bytes are those of the arrays as they are sent, so in the compute dtype where the op casts before it gathers.
    """
    reader = _Reader(mesh)
    inputs = [_Value() for _ in (*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars)]
    outputs = reader.run(jaxpr.jaxpr, inputs, "")
    counts: Counter[Planned] = Counter()
    for found in _reached(outputs):
        counts[replace(found, count=1)] += found.count
    return [replace(found, count=count) for found, count in counts.items()]


class _Reader:
    """Runs a jaxpr on values that stand for arrays; equal work on equal values is one value."""

    def __init__(self, mesh: Mesh):
        self._sizes = dict(mesh.shape)
        self._known: dict[Any, list[_Value]] = {}
        self._trips = 1  # of the loops around what is being read

    def run(self, jaxpr: core.Jaxpr, inputs: list[_Value], scope: str) -> list[_Value]:
        """The values of a jaxpr's results; `inputs` are those of its constvars and invars."""
        values: dict[core.Var, _Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

        def value(atom: Any) -> _Value:
            return (
                self._once(("literal", str(atom)), lambda: [_Value()])[0]
                if isinstance(atom, core.Literal)
                else values[atom]
            )

        for eqn in jaxpr.eqns:
            arguments = [value(atom) for atom in eqn.invars]
            results = self._results(eqn, arguments, _joined(scope, str(eqn.source_info.name_stack)))
            values.update(zip(eqn.outvars, results, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def _once(self, key: Any, make: Any) -> list[_Value]:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _results(self, eqn: Any, arguments: list[_Value], scope: str) -> list[_Value]:
        name, outs = eqn.primitive.name, len(eqn.outvars)
        ids = tuple(id(argument) for argument in arguments)
        if name == "scan":
            return self._scan(eqn, arguments, scope)
        if name in ("while", "cond"):
            return [_Value(tuple(arguments)) for _ in range(outs)]
        inner = next((_open(value) for value in eqn.params.values() if _is_jaxpr(value)), None)
        if inner is not None and len(inner.constvars) + len(inner.invars) == len(arguments):
            return self.run(inner, arguments, scope)
        key = (name, ids, str({k: v for k, v in eqn.params.items() if k != "sharding"}), _shapes(eqn.outvars))
        if name in _KINDS and (axes := self._axes(eqn.params)):
            return self._once(key, lambda: [
                _Value((argument,), Planned(_KINDS[name], axes, _bytes(name, before, after), self._trips, scope))
                for argument, before, after in zip(arguments, eqn.invars, eqn.outvars, strict=True)
            ])  # fmt: skip
        return self._once(key, lambda: [_Value(tuple(arguments)) for _ in range(outs)])

    def _scan(self, eqn: Any, arguments: list[_Value], scope: str) -> list[_Value]:
        """A loop's body is read once: constants are the values outside, carries and slices are new ones."""
        consts, body = eqn.params["num_consts"], _open(eqn.params["jaxpr"])
        fresh = [_Value((argument,)) for argument in arguments[consts:]]
        outside, self._trips = self._trips, self._trips * eqn.params["length"]
        results = self.run(body, [*arguments[:consts], *fresh], scope)
        self._trips = outside
        loop = _Value((*arguments, *results))  # a loop whose result is needed is run whole
        return [_Value((loop,)) for _ in eqn.outvars]

    def _axes(self, params: Any) -> frozenset[str]:
        names = params.get("axes") or params.get("axis_name") or ()
        names = names if isinstance(names, tuple | list) else (names,)
        return frozenset(str(axis) for axis in names if self._sizes.get(axis, 1) > 1)


def _bytes(name: str, before: Any, after: Any) -> int:
    aval = after.aval if name == "all_gather" else before.aval
    return math.prod(aval.shape) * aval.dtype.itemsize


def _reached(outputs: list[_Value]) -> Iterator[Planned]:
    """Every collective that the outputs need."""
    left, seen = list(outputs), set[int]()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        left.extend(value.needs)
        if value.collective:
            yield value.collective


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr)


def _open(jaxpr: Any) -> core.Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _shapes(outvars: Any) -> tuple[str, ...]:
    return tuple(str(var.aval) for var in outvars)


def _joined(scope: str, names: str) -> str:
    return f"{scope}/{names}" if scope and names else scope or names


def clean(scope: str) -> str:
    """A name stack without what jax's transformations add: `transpose(jvp(block/mlp))` is `block/mlp`."""
    for wrapper in ("transpose(", "jvp(", "vmap(", "rematted_computation", "checkpoint", "closed_call"):
        scope = scope.replace(wrapper, "")
    return "/".join(part for part in scope.replace(")", "").split("/") if part)
