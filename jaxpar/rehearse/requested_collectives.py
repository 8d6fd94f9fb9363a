"""The collectives that a program asks for, read from its jaxpr, as the plan expects them.

Every collective of this library stands in a `shard_map` and names mesh axes. Its count is
multiplied by the trips of the scans around it. Where the same move of the same array is written
twice (a recomputed gather and the backward's own), it counts once, and where nothing needs it, not
at all; the compiler does the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend import core
from jax.sharding import Mesh

from jaxpar.base.errors import Say
from jaxpar.base.jax_compat import COLLECTIVES, COND, NAME, SCAN, STILL, WHILE, ClosedJaxpr
from jaxpar.base.taken_share import taken_share
from jaxpar.hlo.program.tasks import CollectiveKind

_AnyJaxpr = core.Jaxpr | ClosedJaxpr


@dataclass(frozen=True)
class Requested:
    """One collective of one device group, as the program states it."""

    kind: CollectiveKind
    axes: frozenset[str]
    """Its mesh axes that have more than one device."""
    bytes: int
    """The size of one group's whole array, counted like `hlo.program.tasks.Collective.bytes`."""
    count: int
    """The number of times that it runs in one step."""
    scope: str
    """The name stack of jax, with the wrappers that jax adds:
    `transpose(jvp())/block/attention`.
    """
    dtype: str
    """The dtype of what is sent: `bfloat16`."""


@dataclass(eq=False)
class _Value:
    """A node of the graph: what it needs, its collective if it is one, and the name that
    `checkpoint_name` gave it, if any.
    """

    needs: tuple[_Value, ...] = ()
    collective: Requested | None = None
    name: str = ""


def requested_collectives(
    jaxpr: ClosedJaxpr,
    mesh: Mesh,
    say: Say = lambda line: None,
    given: Collection[str] = (),
) -> list[Requested]:
    """List the collectives of a traced function:
    `requested_collectives(jax.jit(step).trace(*args).jaxpr, mesh)`.

    Bytes are those of the arrays as they are sent: in the compute dtype where the op casts before
    it gathers.

    Args:
      jaxpr: the jaxpr of the whole function.
      mesh: the mesh whose axes the collectives name.
      say: is called with a line, once, for whatever could not be counted exactly: a loop whose
        trips are not known, branches, a primitive that is not known.
      given: names of arrays (`checkpoint_name`) that count as present: what only these need is not
        counted.

    Returns:
      The collectives in the order of the program; equal ones are merged into one, with the sum of
      their counts.
    """
    reader = _Reader(mesh, say)
    needed = _needed_ids(
        reader.read(jaxpr, [_Value() for _ in jaxpr.in_avals], ""),
        given=given,
    )
    counts: Counter[Requested] = Counter()
    for value in reader.made:
        if id(value) in needed and value.collective:
            counts[replace(value.collective, count=1)] += value.collective.count
    return [replace(found, count=count) for found, count in counts.items()]


class _Reader:
    """A reader that runs a jaxpr on values that stand for arrays; in one loop body, equal work on
    equal values is one value.
    """

    def __init__(self, mesh: Mesh, say: Say):
        self._sizes = dict(mesh.shape)
        self._print, self._said = say, set[str]()
        self._known: dict[Hashable, list[_Value]] = {}  # those of the body that is being read
        self.made: list[_Value] = []
        """Every collective, in the order of the program."""
        self._trips = 1  # those of all loops around what is being read

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._print(line)

    def read(
        self,
        jaxpr: _AnyJaxpr,
        inputs: Sequence[_Value],
        scope: str,
    ) -> list[_Value]:
        """Read a jaxpr that brings its own constants, or has them among its inputs, and return the
        values of its results.

        Args:
          inputs: the value of each of its inputs.
          scope: the named scopes around it, joined by slashes.
        """
        constants = [
            self._values_of(("constant", id(array)), 1)[0] for array in getattr(jaxpr, "consts", ())
        ]
        inner = _open(jaxpr)
        given = zip(
            (*inner.constvars, *inner.invars),
            (*constants, *inputs),
            strict=True,
        )
        values: dict[core.Var, _Value] = dict(given)

        def value(atom: core.Var | core.Literal) -> _Value:
            if not isinstance(atom, core.Literal):
                return values[atom]
            scalar = not getattr(atom.val, "shape", ())
            return self._values_of(("literal", str(atom) if scalar else id(atom.val)), 1)[0]

        for eqn in inner.eqns:
            at = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
            results = self._results(eqn, [value(atom) for atom in eqn.invars], at)
            values.update(zip(eqn.outvars, results, strict=True))
        return [value(atom) for atom in inner.outvars]

    def _values_of(
        self,
        key: Hashable,
        count: int,
        needs: Sequence[_Value] = (),
    ) -> list[_Value]:
        """Return the `count` results of the work that a key describes, the same ones each time."""
        if key not in self._known:
            self._known[key] = [_Value(tuple(needs)) for _ in range(count)]
        return self._known[key]

    def _results(
        self,
        eqn: core.JaxprEqn,
        arguments: list[_Value],
        scope: str,
    ) -> list[_Value]:
        name = eqn.primitive.name
        params = eqn.params
        if read := {SCAN: self._scan, WHILE: self._while, COND: self._cond}.get(name):
            return read(eqn, arguments, scope)
        inner = next(
            (value for value in params.values() if isinstance(value, core.Jaxpr | ClosedJaxpr)),
            None,
        )
        if inner is not None and _fits(inner, eqn):
            # The compiler may not merge a recomputation with the forward pass:
            # `jax.checkpoint(prevent_cse=True)`.
            barred = params.get("prevent_cse")
            apart = params.get("differentiated") and (
                any(barred) if isinstance(barred, tuple) else barred
            )
            return self.read(
                inner,
                [_Value((argument,)) for argument in arguments] if apart else arguments,
                scope,
            )
        axes = self._axes(params)
        if axes and name in COLLECTIVES:
            return self._collectives(eqn, axes, arguments, scope)
        if axes and not name.startswith(STILL):
            self._say(
                f"{scope or 'the step'}: {name} over {' x '.join(sorted(axes))} is not counted"
            )
        results = self._values_of(_key(eqn, arguments), len(eqn.outvars), arguments)
        if name == NAME:
            results[0].name = params["name"]
        return results

    def _collectives(
        self, eqn: core.JaxprEqn, axes: frozenset[str], arguments: list[_Value], scope: str
    ) -> list[_Value]:
        """Add one collective for each of the arrays that are sent."""
        name = eqn.primitive.name
        key = _key(eqn, arguments)
        if eqn.params.get("axis_index_groups"):
            self._say(
                f"{scope or 'the step'}: {name} among parts of an axis is counted as over all of it"
            )
        if key in self._known:
            return self._known[key]
        results = []
        for argument, before, after in zip(arguments, eqn.invars, eqn.outvars, strict=True):
            aval: Any = after.aval if COLLECTIVES[name] == "all-gather" else before.aval
            size = math.prod(aval.shape) * aval.dtype.itemsize
            sent = Requested(
                COLLECTIVES[name],
                axes,
                size,
                self._trips,
                scope,
                str(aval.dtype),
            )
            results.append(_Value((argument,), sent))
        self.made += results
        self._known[key] = results
        return results

    def _read_body(
        self, jaxpr: _AnyJaxpr, inputs: Sequence[_Value], scope: str, trips: int = 1
    ) -> list[_Value]:
        """Read a loop's body or a branch, across whose border the compiler merges nothing."""
        known = self._known
        outside = self._trips
        self._known = {}
        self._trips = outside * trips
        results = self.read(jaxpr, inputs, scope)
        self._known = known
        self._trips = outside
        return results

    def _scan(
        self,
        eqn: core.JaxprEqn,
        arguments: list[_Value],
        scope: str,
    ) -> list[_Value]:
        """Read a scan's body once: its constants are the values outside, its carries and slices are
        new ones.
        """
        params = eqn.params
        body = _open(eqn.params["jaxpr"])
        # Ranks tell the carries in every jax version: a stacked result has one dim more than its
        # slice.
        carries = _of_one_rank(eqn.outvars, body.outvars)
        consts = _of_one_rank(eqn.invars, body.invars) - carries
        fresh = [_Value((argument,)) for argument in arguments[consts:]]
        results = self._read_body(
            params["jaxpr"], [*arguments[:consts], *fresh], scope, params["length"]
        )
        _carry(fresh[:carries], results)
        return [_Value((result,)) for result in results]

    def _while(
        self,
        eqn: core.JaxprEqn,
        arguments: list[_Value],
        scope: str,
    ) -> list[_Value]:
        params = eqn.params
        first = params["cond_nconsts"]
        second = params["cond_nconsts"] + params["body_nconsts"]
        fresh = [_Value((argument,)) for argument in arguments[second:]]
        made = len(self.made)
        results = self._read_body(
            params["body_jaxpr"],
            [*arguments[first:second], *fresh],
            scope,
        )
        again = self._read_body(
            params["cond_jaxpr"],
            [*arguments[:first], *fresh],
            scope,
        )
        _carry(fresh, results)
        if len(self.made) > made:
            self._say(
                f"{scope or 'the step'}: a loop whose trips are not known, its collectives are "
                "counted once"
            )
        # the condition says how often it runs
        return [_Value((result, *again)) for result in results]

    def _cond(
        self,
        eqn: core.JaxprEqn,
        arguments: list[_Value],
        scope: str,
    ) -> list[_Value]:
        """Read the branches. Where no scope says how often one is taken (`base.taken_share`), the
        counted bytes are an upper bound.
        """
        made = len(self.made)
        read = []
        for branch in eqn.params["branches"]:
            before = len(self.made)
            results = self._read_body(branch, arguments[1:], scope)
            sent = [value.collective for value in self.made[before:] if value.collective]
            read.append((sum(one.bytes * one.count for one in sent), results))
        best, *others = (results for _, results in sorted(read, key=lambda branch: -branch[0]))
        share = taken_share(scope)
        if share is not None:
            for value in self.made[made:]:
                if value.collective is not None:
                    count = round(share * value.collective.count)
                    value.collective = replace(value.collective, count=count)
        elif len(self.made) > made:
            self._say(
                f"{scope or 'the step'}: of {len(read)} branches the one that sends most is counted"
            )
        # What the other branches need counts, but what they send does not.
        merged = []
        stop = {id(argument) for argument in arguments[1:]}
        for result, *alternatives in zip(best, *others, strict=True):
            needed = [_needed_ids([other], stop) for other in alternatives]
            needs = [
                argument for ids in needed for argument in arguments[1:] if id(argument) in ids
            ]
            merged.append(_Value((result, arguments[0], *needs)))
        return merged

    def _axes(self, params: Mapping[str, Any]) -> frozenset[str]:
        names = params.get("axes") or params.get("axis_name") or ()
        if not isinstance(names, tuple | list):
            names = (names,)
        return frozenset(str(axis) for axis in names if self._sizes.get(axis, 1) > 1)


def _carry(values: Sequence[_Value], results: Sequence[_Value]) -> None:
    """Make a loop's state need what the previous trip made of it."""
    for value, result in zip(values, results, strict=False):
        value.needs = (*value.needs, result)


def _key(eqn: core.JaxprEqn, arguments: Sequence[_Value]) -> Hashable:
    """Make the key that equal work shares. Values live as long as the reader, so that their ids are
    unique.
    """
    params = {name: value for name, value in eqn.params.items() if name != "sharding"}
    shapes = tuple(str(var.aval) for var in eqn.outvars)
    return eqn.primitive.name, tuple(map(id, arguments)), str(params), shapes


def _needed_ids(
    outputs: Sequence[_Value], stop: Collection[int] = (), given: Collection[str] = ()
) -> set[int]:
    """Find the ids of all values that the outputs need, except those needed only through values in
    `stop` or `given`.
    """
    left = list(outputs)
    seen = set[int]()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if id(value) not in stop and value.name not in given:
            left.extend(value.needs)
    return seen


def _of_one_rank(
    outside: Sequence[core.Var | core.Literal], inside: Sequence[core.Var | core.Literal]
) -> int:
    """Count the variables of an equation that have as many dims as those of its body."""

    def rank(atom: core.Var | core.Literal) -> int:
        return len(getattr(atom.aval, "shape", ()))

    return sum(rank(outer) == rank(inner) for outer, inner in zip(outside, inside, strict=True))


def _open(jaxpr: _AnyJaxpr) -> core.Jaxpr:
    inner: Any = getattr(jaxpr, "jaxpr", jaxpr)  # newer jax has one class for both
    return inner


def _fits(inner: _AnyJaxpr, eqn: core.JaxprEqn) -> bool:
    """Return whether a jaxpr among an equation's parameters takes its arguments and gives its
    results, as in a call.
    """
    jaxpr = _open(inner)
    closed_over = len(getattr(inner, "consts", ()))
    takes = len(jaxpr.constvars) + len(jaxpr.invars) - closed_over
    return (takes, len(jaxpr.outvars)) == (len(eqn.invars), len(eqn.outvars))
