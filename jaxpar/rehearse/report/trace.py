"""The timeline as a Chrome trace, which Perfetto (ui.perfetto.dev), chrome://tracing and TensorBoard open.

Its form is the JSON of Google's "Trace Event Format", with complete events (`X`) and metadata (`M`) that names threads.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from jaxpar.base.errors import UserError
from jaxpar.base.runtime import write_whole
from jaxpar.rehearse.report.schema import Rehearsal


def write_trace(report: Rehearsal, path: Path | str) -> None:
    """Write a report's timeline as a Chrome trace, whole or not at all; it is compressed if the name ends in `.gz`.

    Raises:
      UserError: the report was kept without its timeline.
    """
    text = json.dumps(chrome_trace(report), allow_nan=False, separators=(",", ":"))
    write_whole(Path(path), gzip.compress(text.encode()) if Path(path).suffix == ".gz" else text)


def chrome_trace(report: Rehearsal) -> dict[str, Any]:
    """Turn a report's timeline into a Chrome trace: one process, with a thread for each lane.

    Raises:
      UserError: the report was kept without its timeline.
    """
    if "timeline" not in report:
        raise UserError("this report was kept without its timeline, so there is no trace of it: rehearse again")
    timeline, name = report["timeline"], f"{report['config'] or 'step'} on a device of {report['target']['name']}"
    events = [_metadata("process_name", 0, name=name)]
    for number, lane in enumerate(timeline["lanes"]):
        events += [
            _metadata("thread_name", number, name=lane),
            _metadata("thread_sort_index", number, sort_index=number),
        ]
    for lane, start, duration, instruction, repeats in timeline["events"]:
        at = int(instruction)
        facts = {
            "scope": timeline["scopes"][at], "line": timeline["sources"][at], "phase": timeline["phases"][at],
            "bytes": timeline["bytes"][at], "stands for so many more trips": int(repeats),
        }  # fmt: skip
        known = {key: value for key, value in facts.items() if value}
        events.append({
            "ph": "X", "pid": 0, "tid": int(lane), "ts": start, "dur": duration, "name": timeline["names"][at],
            "cat": timeline["kinds"][at], "args": known,
        })  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(what: str, thread: int, **facts: str | int) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": thread, "name": what, "args": facts}
