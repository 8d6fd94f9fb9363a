"""The arrays in a device's memory in the course of a step, by part of the model, and at its peak by
array and line.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from rich.console import RenderableType

from jaxpar.base.console import bytes_text
from jaxpar.hlo.live import LiveArray, Schedule, live_arrays
from jaxpar.hlo.program.module import Module
from jaxpar.hlo.program.tasks import Origin
from jaxpar.rehearse.report.report_tables import titled_table
from jaxpar.rehearse.report.schema import Alive, AliveArray
from jaxpar.rehearse.timeline import TaskTime

_NOWHERE = Origin("", "", "other")
_POINTS = 1000
"""The most points of time of a step; of those between two of them the fullest is kept."""
_PARTS = 8
"""The number of parts that have a name of their own; the others are `REST` together."""
REST = "rest"
ARGUMENTS = "arguments"
_ARGUMENT = re.compile(r"[A-Za-z_][\w.]*")


class _Part(NamedTuple):
    """The part of the program that an array belongs to."""

    label: str
    origin: Origin


def alive_arrays(module: Module, tasks: Sequence[TaskTime]) -> Alive:
    """Find what is alive in a device's memory at each time, in a step that was played out.

    Args:
      module: the compiled program, whose instructions stand in the order in which they run.
      tasks: its tasks with their times; what stands in a loop has the time of all its trips.

    Returns:
      Bytes by part at up to 1,000 points of time, and the arrays at the peak.
    """
    schedule = live_arrays(module)
    origins = {row.task.name: row.task.origin for row in tasks}
    parts = [_part_of(module, array, origins) for array in schedule.arrays]
    by_part: dict[str, list[LiveArray]] = defaultdict(list)
    for array, part in zip(schedule.arrays, parts, strict=True):
        by_part[part.label].append(array)
    curves = {label: _bytes(schedule, arrays) for label, arrays in by_part.items()}
    total = schedule.bytes_at()
    peak = max(range(len(total)), key=total.__getitem__, default=0)
    kept = _points(total)
    times = _times(schedule, tasks)
    alive_at_peak = [
        (array, part.origin)
        for array, part in zip(schedule.arrays, parts, strict=True)
        if array.begin <= peak <= array.end and array.bytes
    ]
    return {
        "peak_bytes": total[peak] if total else 0,
        "peak_us": times[peak] if times else 0.0,
        "times_us": [times[place] for place in kept],
        "parts": {
            label: [curve[place] for place in kept] for label, curve in _largest(curves).items()
        },
        "arrays": _rows(alive_at_peak, module),
    }


def _part_of(module: Module, array: LiveArray, origins: Mapping[str, Origin]) -> _Part:
    """Find the part of the program that an array belongs to: an argument, or the scope, or else the
    line, of what makes it.
    """
    argument = _argument_of(module, array)
    if argument is not None:
        return _Part(argument, _NOWHERE)
    made = [origins[name] for name in array.makers if name in origins]
    origin = next((one for one in made if one.scope), made[0] if made else _NOWHERE)
    scope = "/".join(origin.scope.split("/")[:2])
    return _Part(scope or origin.source or REST, origin)


def _argument_of(module: Module, array: LiveArray) -> str | None:
    """Name the argument of the program that an array is a part of, such as `state.params`."""
    instruction = module.computations[module.entry].instructions.get(array.name)
    if instruction is None or instruction.opcode != "parameter":
        return None
    named = _ARGUMENT.match(instruction.op_name)
    return named[0] if named else ARGUMENTS


def _bytes(schedule: Schedule, arrays: Iterable[LiveArray]) -> list[int]:
    return Schedule(schedule.instructions, list(arrays)).bytes_at()


def _points(total: Sequence[int]) -> list[int]:
    """List the places to keep: the fullest of each run of as many as there are too many."""
    width = max(1, -(-len(total) // _POINTS))
    return [
        max(range(start, min(start + width, len(total))), key=total.__getitem__)
        for start in range(0, len(total), width)
    ]


def _times(schedule: Schedule, tasks: Sequence[TaskTime]) -> list[float]:
    """List when each place of the schedule begins, in microseconds, the waiting for it included."""
    spent: dict[str, float] = defaultdict(float)
    for row in tasks:
        spent[row.task.name] += row.exposed if row.task.asynchronous else row.seconds
    seconds = [spent.get(instruction.name, 0.0) for instruction in schedule.instructions]
    return [1e6 * end for end in accumulate(seconds, initial=0.0)][: len(seconds)]


def _largest(curves: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Keep the curves that are largest at some time, the largest first, and add the others up."""
    named = sorted((one for one in curves if one != REST), key=lambda one: -max(curves[one]))
    found = {label: curves[label] for label in named[:_PARTS] if any(curves[label])}
    others = [curves[label] for label in (*named[_PARTS:], REST) if label in curves]
    if others:
        found[REST] = [sum(sizes) for sizes in zip(*others, strict=True)]
    return found


def _rows(arrays: Sequence[tuple[LiveArray, Origin]], module: Module) -> list[AliveArray]:
    """Make a row for the arrays of each shape and line at the peak, the largest first."""
    found: dict[tuple[str, str, Origin], AliveArray] = {}
    for array, origin in arrays:
        argument = _argument_of(module, array) or ""
        row = found.setdefault(
            (argument, str(array.shape), origin),
            {
                "argument": argument,
                "shape": str(array.shape),
                "scope": origin.scope,
                "source": origin.source,
                "phase": origin.phase,
                "bytes": 0,
                "count": 0,
            },
        )
        row["bytes"] += array.bytes
        row["count"] += 1
    return sorted(found.values(), key=lambda row: -row["bytes"])


def alive_table(alive: Alive, most: int = 12) -> list[RenderableType]:
    """Make the table of the arrays in a device's memory at the peak, the largest first.

    Args:
      alive: the report's key of that name.
      most: the number of rows.
    """
    rows = [
        [
            bytes_text(row["bytes"]),
            f"{row['count']} x {row['shape']}" if row["count"] > 1 else row["shape"],
            row["source"],
            row["argument"] or row["scope"],
            row["phase"] if not row["argument"] else "",
        ]
        for row in alive["arrays"]
    ]
    title = (
        f"in a device's memory at the peak, {bytes_text(alive['peak_bytes'])} after "
        f"{alive['peak_us'] / 1e3:.4g} ms"
    )
    return titled_table(title, ["bytes", "array", "line", "scope", "phase"], rows, 1, most)
