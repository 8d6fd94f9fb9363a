"""The program's collectives beside the plan's: over which mesh axes each runs, and whether the plan asked for it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpar.hlo.tasks import Collective
from jaxpar.hlo.timeline import TaskTime
from jaxpar.metrics import bytes_text
from jaxpar.planned import Planned, clean

SMALL = 2**20
"""Bytes below which a collective that no op wrote is let pass: scalars, norms and biases, which XLA moves by itself."""


_SLACK = 1.05  # XLA pads what does not divide, and adds what is small


@dataclass(frozen=True)
class Answer:
    """Whether the plan has a collective, and why."""

    planned: bool
    reason: str


def axes_of(collective: Collective, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the members of a group differ, in mesh order.

    Args:
      collective: names devices by their position in the mesh's row-major order.
      mesh: size of every mesh axis, in order.
    """
    sizes = tuple(mesh.values())
    differ = np.zeros(len(sizes), bool)
    for group in collective.groups:
        coordinates = np.array(np.unravel_index(group, sizes))
        differ |= (coordinates != coordinates[:, :1]).any(axis=1)
    return tuple(axis for axis, differs in zip(mesh, differ, strict=True) if differs)


def sent_bytes(planned: Planned, mesh: Mapping[str, int]) -> float:
    """Bytes one device sends for one execution, by a bandwidth-optimal algorithm."""
    group = tuple(range(math.prod(mesh[axis] for axis in planned.axes)))
    return Collective(planned.kind, (group,), planned.bytes, "").sent_bytes


class Asked:
    """The plan's collectives, to be looked up by those of a program.

    Args:
      plan: from `jaxpar.planned`.
      mesh: size of every mesh axis, in order.
      tasks: of the replayed program.
    """

    def __init__(self, plan: Sequence[Planned], mesh: Mapping[str, int], tasks: Sequence[TaskTime] = ()):
        self._mesh = mesh
        self._by_scope: defaultdict[str, list[Planned]] = defaultdict(list)
        self._anywhere: defaultdict[tuple[str, frozenset[str]], list[Planned]] = defaultdict(list)
        for planned in plan:
            self._by_scope[clean(planned.scope)].append(planned)
            self._anywhere[planned.kind, planned.axes].append(planned)
        sent: defaultdict[tuple[str, frozenset[str]], float] = defaultdict(float)
        for row in tasks:
            if row.task.collective:
                key = row.task.collective.kind, frozenset(axes_of(row.task.collective, mesh))
                sent[key] += row.task.collective.sent_bytes * row.count
        # No more of a kind over these axes than was asked for: then each is one of those, merged or moved.
        self._within = {
            key: total <= _SLACK * sum(sent_bytes(planned, mesh) * planned.count for planned in self._anywhere[key])
            for key, total in sent.items()
        }

    def answer(self, row: TaskTime) -> Answer:
        """Whether the plan has this collective of the program.

        XLA may run a collective as a ring of ppermutes, merge several into one, or move one past a scope's border; it
        may not send over other axes, or sum whole what the plan scatters.
        """
        collective = row.task.collective
        assert collective is not None
        axes = frozenset(axes_of(collective, self._mesh))
        here = [planned for planned in self._by_scope.get(row.task.place.scope, ()) if planned.axes == axes]
        same = [planned for planned in here if planned.kind == collective.kind]
        if same:
            return Answer(True, _why(same[0]))
        if collective.kind == "ppermute":
            rings = [planned for planned in here or self._over(axes) if planned.kind != "ppermute"]
            if rings:
                return Answer(True, f"a step of the ring that makes the {rings[0].kind} over {_names(rings[0].axes)}")
        elsewhere = self._anywhere.get((collective.kind, axes), [])
        if elsewhere and (
            self._within.get((collective.kind, axes)) or collective.bytes in {p.bytes for p in elsewhere}
        ):
            return Answer(True, _why(elsewhere[0]) + ", merged or moved by XLA")
        if collective.bytes < SMALL:
            return Answer(True, f"small ({bytes_text(collective.bytes)}): XLA's own, for scalars, norms and biases")
        scattered = [planned for planned in here if planned.kind == "reduce-scatter"]
        if collective.kind == "all-reduce" and scattered:
            return Answer(
                False, f"the plan has a reduce-scatter over {_names(axes)} here: summed whole, twice the bytes"
            )
        return Answer(False, f"no op of the plan has a {collective.kind} over {_names(axes)} here")

    def _over(self, axes: frozenset[str]) -> list[Planned]:
        """Those anywhere whose axes hold these: a ring over two axes steps along one of them at a time."""
        return [planned for group in self._anywhere.values() for planned in group if axes <= planned.axes]


def _why(planned: Planned) -> str:
    text = {
        "all-gather": "gathers what is stored split over {}",
        "reduce-scatter": "sums over {} and leaves each device its part",
        "all-reduce": "sums over {}",
        "all-to-all": "swaps splits over {}",
        "ppermute": "passes on over {}",
    }
    return text[planned.kind].format(_names(planned.axes))


def _names(axes: frozenset[str]) -> str:
    return " x ".join(sorted(axes))
