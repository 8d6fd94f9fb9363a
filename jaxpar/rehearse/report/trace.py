"""A replayed timeline in the report's form, as columns of instructions and events by number, and as
a Chrome trace.

Perfetto (ui.perfetto.dev), chrome://tracing and TensorBoard open the trace. Its form is the JSON of
Google's "Trace Event Format", with complete events (`X`) and metadata (`M`) that names threads.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.errors import UserError
from jaxpar.hlo.program.tasks import Loop, Task
from jaxpar.rehearse.cost import COMPUTE, DMA, HOST, HOST_COMPUTE, SIDE
from jaxpar.rehearse.report.schema import Rehearsal, TimelineColumns
from jaxpar.rehearse.timeline import Event

_ORDER = {COMPUTE: 0, DMA: 2, SIDE: 3, HOST: 4, HOST_COMPUTE: 5}
"""The order of the lanes: compute comes first, then the links by name (1), then local lanes, then
the host.
"""


def timeline_of(events: Sequence[Event]) -> TimelineColumns:
    """Make the report's timeline of a replay's events.

    Args:
      events: the bars of a replay, in seconds.

    Returns:
      The lanes that are in use; columns with an entry for each instruction that ran (a bar that
      stands for trips of a loop has the loop's); and the events in microseconds to the nearest
      nanosecond.
    """
    lanes = sorted(
        {event.lane for event in events},
        key=lambda lane: (_ORDER.get(lane, 1), lane),
    )
    # by identity: two instructions may be equal
    nodes = {id(event.node): event.node for event in events}
    number = {key: at for at, key in enumerate(nodes)}
    rows: list[list[float]] = []
    for event in events:
        start = round(1e6 * event.start, 3)
        end = round(1e6 * (event.start + event.duration), 3)
        rows.append(
            [
                lanes.index(event.lane),
                start,
                round(end - start, 3),
                number[id(event.node)],
                event.repeats,
            ]
        )
    kinds = [_kind_and_bytes(node) for node in nodes.values()]
    origins = [node.origin for node in nodes.values()]
    return {
        "lanes": lanes,
        "names": [node.name for node in nodes.values()],
        "kinds": [kind for kind, _ in kinds],
        "scopes": [origin.scope for origin in origins],
        "sources": [origin.source for origin in origins],
        "phases": [origin.phase for origin in origins],
        "bytes": [size for _, size in kinds],
        "events": rows,
    }


def _kind_and_bytes(node: Task | Loop) -> tuple[str, int]:
    if isinstance(node, Loop):
        return "loop", 0
    if node.collective:
        return (node.collective.kind, node.collective.bytes)
    return (node.kind, int(node.bytes))


def write_trace(report: Rehearsal, path: Path | str) -> None:
    """Write a report's timeline as a Chrome trace, whole or not at all, compressed if the name ends
    in `.gz`.

    Args:
      report: the result of `rehearse.step` or `rehearse.config`.
      path: the file; its folder is made.

    Raises:
      UserError: the report was kept without its timeline, or the file cannot be written.
    """
    text = json.dumps(chrome_trace(report), allow_nan=False, separators=(",", ":"))
    write_whole(
        Path(path),
        gzip.compress(text.encode()) if Path(path).suffix == ".gz" else text,
    )


def chrome_trace(report: Rehearsal) -> dict[str, Any]:
    """Convert a report's timeline to a Chrome trace in microseconds, an object of JSON: one
    process, with a thread for each lane.

    Raises:
      UserError: the report was kept without its timeline.
    """
    if "timeline" not in report:
        raise UserError(
            "this report was kept without its timeline, so there is no trace of it: rehearse again"
        )
    timeline = report["timeline"]
    name = f"{report['config'] or 'step'} on a device of {report['target']['name']}"

    def metadata(
        what: str,
        thread: int,
        **facts: str | int,
    ) -> dict[str, Any]:
        return {"ph": "M", "pid": 0, "tid": thread, "name": what, "args": facts}

    events = [metadata("process_name", 0, name=name)]
    for at, lane in enumerate(timeline["lanes"]):
        events += [
            metadata("thread_name", at, name=lane),
            metadata("thread_sort_index", at, sort_index=at),
        ]
    for lane, start, duration, instruction, repeats in timeline["events"]:
        at = int(instruction)
        facts = {
            "scope": timeline["scopes"][at],
            "line": timeline["sources"][at],
            "phase": timeline["phases"][at],
            "bytes": timeline["bytes"][at],
            "stands for so many more trips": int(repeats),
        }
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": int(lane),
                "ts": start,
                "dur": duration,
                "name": timeline["names"][at],
                "cat": timeline["kinds"][at],
                "args": {key: value for key, value in facts.items() if value},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
