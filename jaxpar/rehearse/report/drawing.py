"""A replayed timeline as the report keeps it: columns of instructions, and events by number."""

from __future__ import annotations

from collections.abc import Sequence

from jaxpar.hlo.tasks import Loop, Node
from jaxpar.rehearse.cost.cost import COMPUTE, DMA, HOST, SIDE
from jaxpar.rehearse.report.schema import TimelineColumns
from jaxpar.rehearse.timeline.player import Event


def timeline_of(events: Sequence[Event]) -> TimelineColumns:
    """Make the report's timeline of a replay's events, which are in seconds.

    It has the lanes that are in use (compute, links, then local copies and the host), columns with an entry for each
    instruction that ran, and events in microseconds to the nearest nanosecond.
    """
    lanes = sorted({event.lane for event in events}, key=_lane_order)
    number: dict[int, int] = {}  # by identity: two instructions may be equal
    timeline: TimelineColumns = {
        "lanes": lanes, "names": [], "kinds": [], "scopes": [], "sources": [], "phases": [], "bytes": [],
        "events": [],
    }  # fmt: skip
    for event in events:
        if id(event.node) not in number:
            number[id(event.node)] = len(number)
            _add_column(timeline, event.node)
        start, end = round(1e6 * event.start, 3), round(1e6 * (event.start + event.duration), 3)
        row = [lanes.index(event.lane), start, round(end - start, 3), number[id(event.node)], event.repeats]
        timeline["events"].append(row)
    return timeline


def _lane_order(lane: str) -> tuple[int, str]:
    """A sort key of lanes: compute comes first, then the links by name, then local lanes, then the host."""
    return {COMPUTE: 0, DMA: 2, SIDE: 3, HOST: 4}.get(lane, 1), lane


def _add_column(timeline: TimelineColumns, node: Node) -> None:
    """Add an instruction's entries to the columns; a bar that stands for trips of a loop has the loop's."""
    place = getattr(node, "place", None)
    collective = getattr(node, "collective", None)
    timeline["names"].append(node.name)
    kind = "loop" if isinstance(node, Loop) else collective.kind if collective else getattr(node, "kind", "control")
    timeline["kinds"].append(kind)
    timeline["scopes"].append(place.scope if place else "")
    timeline["sources"].append(place.source if place else "")
    timeline["phases"].append(place.phase if place else "other")
    timeline["bytes"].append(int(collective.bytes if collective else getattr(node, "bytes", 0)))
