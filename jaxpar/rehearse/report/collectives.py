"""A comparison of the program's collectives with the plan's: each has its mesh axes, and whether
the plan asked for it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from jaxpar.hlo.origin import decode
from jaxpar.hlo.program import tasks as hlo_tasks
from jaxpar.hlo.program.tasks import Collective
from jaxpar.rehearse.report.schema import CollectiveRow
from jaxpar.rehearse.requested_collectives import Requested
from jaxpar.rehearse.timeline import TaskTime

SMALL = 2**20
"""The bytes below which a collective that no op wrote passes: XLA moves scalars, norms and biases
by itself.
"""
_SLACK = 1.05  # XLA pads arrays that do not divide evenly, and adds small ones


def axes_of(collective: Collective, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Find the axes of a mesh, in its order, along which the members of a group differ; none where
    each group is one device or no groups are known.

    Args:
      collective: the collective, whose groups number the devices row by row.
      mesh: the size of every mesh axis, in order.
    """
    sizes = tuple(mesh.values())
    differ = np.zeros(len(sizes), bool)
    for group in collective.groups:
        coordinates = np.array(np.unravel_index(group, sizes))
        differ |= (coordinates != coordinates[:, :1]).any(axis=1)
    return tuple(axis for axis, differs in zip(mesh, differ, strict=True) if differs)


def sent_bytes(planned: Requested, mesh: Mapping[str, int]) -> float:
    """Count the bytes that one device sends in one execution, by a bandwidth-optimal algorithm.

    Args:
      planned: a collective that a plan asks for.
      mesh: the size of every mesh axis.
    """
    return hlo_tasks.sent_bytes(
        planned.kind, planned.bytes, math.prod(mesh[axis] for axis in planned.axes)
    )


class RequestedRows:
    """The collectives that a plan asks for, to which the tasks of a replayed program are
    compared.
    """

    def __init__(
        self, plan: Sequence[Requested], mesh: Mapping[str, int], tasks: Sequence[TaskTime] = ()
    ):
        self._mesh = mesh
        self._plan = [(scope_of(planned), planned) for planned in plan]
        # by scope, kind and axes
        self._sent: defaultdict[tuple[str, str, frozenset[str]], float] = defaultdict(float)
        for row in tasks:
            if collective := row.task.collective:
                key = row.task.origin.scope, collective.kind, frozenset(axes_of(collective, mesh))
                self._sent[key] += collective.sent_bytes * row.count

    def objection(self, row: TaskTime) -> str:
        """Explain why this collective of the program is not the plan's; empty if it is.

        XLA may run a collective as a ring of ppermutes, merge several into one, or move one past a
        scope's border. It may not send more, send over other axes, or all-reduce an array whose sum
        the plan scatters.

        Args:
          row: a task of the replayed program that is a collective.
        """
        collective = row.task.collective
        scope = row.task.origin.scope
        assert collective is not None
        kind = collective.kind
        axes = frozenset(axes_of(collective, self._mesh))
        alike = [
            (at, planned)
            for at, planned in self._plan
            if (planned.kind, planned.axes) == (kind, axes)
        ]
        anywhere = [planned for _, planned in alike]
        here = [planned for at, planned in alike if at == scope]
        whole = [
            planned
            for _, planned in self._plan
            if planned.kind != "ppermute" and axes <= planned.axes
        ]
        if (
            collective.bytes < SMALL
            or any(planned.bytes == collective.bytes for planned in anywhere)
            or self._no_more(kind, axes, here, scope)
            or self._no_more(kind, axes, anywhere)
            # a ring steps along one of its axes at a time
            or (kind == "ppermute" and self._no_more(kind, axes, whole))
        ):
            return ""
        for at, planned in self._plan:
            if (
                kind == "all-reduce"
                and at == scope
                and planned.kind == "reduce-scatter"
                and planned.axes <= axes
            ):
                over = _names(planned.axes)
                return (
                    f"the plan has a reduce-scatter over {over} here: summed whole, twice the bytes"
                )
        if here:
            return f"the plan has a smaller {kind} over {_names(axes)} here, not this one"
        return f"the plan has no {kind} over {_names(axes)} here"

    def _no_more(
        self, kind: str, axes: frozenset[str], asked: Sequence[Requested], scope: str | None = None
    ) -> bool:
        """Return whether the program, or one scope of it, sends no more of a kind than was asked
        for. If so, each of its collectives was asked for, whole or merged."""
        sent = sum(
            size
            for (at, *what), size in self._sent.items()
            if what == [kind, axes] and scope in (None, at)
        )
        whole = sum(sent_bytes(planned, self._mesh) * planned.count for planned in asked)
        return bool(asked) and sent <= _SLACK * whole


def collective_rows(
    tasks: Sequence[TaskTime], plan: Sequence[Requested] | None, mesh: Mapping[str, int]
) -> list[CollectiveRow]:
    """Group the program's collectives for the report by kind, size and line, the most exposed
    first.

    Args:
      tasks: the tasks of the replayed program.
      plan: the collectives that were asked for; None = not known.
      mesh: the size of every mesh axis, in order.

    Returns:
      The rows. Seconds and sent bytes count all executions in one step.
    """
    if plan is None:
        asked = None
    else:
        asked = RequestedRows(plan, mesh, tasks)
    rows: dict[Hashable, CollectiveRow] = {}
    for found in tasks:
        collective = found.task.collective
        origin = found.task.origin
        if collective is None:
            continue
        axes = axes_of(collective, mesh)
        if asked:
            objection = asked.objection(found)
        else:
            objection = None
        key = (collective.kind, axes, collective.bytes, found.task.asynchronous, origin, objection)
        row = rows.setdefault(
            key,
            {
                "kind": collective.kind,
                "axes": list(axes),
                "bytes": collective.bytes,
                "sent_bytes": 0.0,
                "count": 0,
                "asynchronous": found.task.asynchronous,
                "seconds": 0.0,
                "exposed": 0.0,
                "scope": origin.scope,
                "source": origin.source,
                "phase": origin.phase,
            },
        )
        if objection is not None:
            row["planned"] = not objection
        if objection:
            row["reason"] = objection
        row["sent_bytes"] += collective.sent_bytes * found.count
        row["count"] += found.count
        row["seconds"] += found.seconds
        row["exposed"] += found.exposed
    return sorted(
        rows.values(),
        key=lambda row: (-row["exposed"], -row["seconds"]),
    )


def scope_of(planned: Requested) -> str:
    """Find the model's scope of a planned collective, written as in `hlo.program.tasks.Origin`:
    `block/attention`.
    """
    return decode(f"{planned.scope}/{planned.kind}")[0]


def _names(axes: frozenset[str]) -> str:
    return " x ".join(sorted(axes))
