"""The linter says in the model's words what is wrong with a rehearsed step; each rule maps rows to findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal

from jaxpar.base.console import bytes_text
from jaxpar.base.plan import Plan
from jaxpar.base.sharding import LogicalAxis, Placement
from jaxpar.rehearse.report.schema import CollectiveRow, LintFinding
from jaxpar.rehearse.timeline.timeline import TaskTime

RULES = {
    "unplanned-collective": "a collective that the plan did not ask for",
    "whole-all-reduce": "a weight gradient summed whole where its parts would do",
    "replicated-parameter": "a large parameter that every device holds whole",
    "replicated-activation": "a residual stream that a mesh axis leaves whole",
    "large-copy": "a copy or a change of layout that takes a share of the step",
}
_LARGE_PARAMETER = 2**20  # bytes
_COPY_SHARE = 0.005  # of the step


def unplanned_collectives(rows: Iterable[CollectiveRow], axis_of: Mapping[str, str]) -> list[LintFinding]:
    """Find collectives that are not the plan's; an all-reduce of a whole weight gradient is a rule of its own.

    Args:
      rows: the report's collectives.
      axis_of: the logical axes that each mesh axis splits: `{"fsdp": "batch, embed"}`.
    """
    found = []
    for row in rows:
        if row.get("planned", True):
            continue
        reason = row.get("reason", "")
        whole = row["kind"] == "all-reduce" and "reduce-scatter" in reason and row["phase"] == "backward"
        found.append(_finding(
            "whole-all-reduce" if whole else "unplanned-collective", "error",
            f"{row['kind']} of {bytes_text(row['bytes'])} over {' x '.join(row['axes'])}, {row['count']} a step: "
            f"{reason}",
            axis=", ".join(dict.fromkeys(axis_of.get(axis, "") for axis in row["axes"])),
            scope=row["scope"], source=row["source"], size=row["sent_bytes"], seconds=row["exposed"],
        ))  # fmt: skip
    return found


def replicated_parameters(placements: Iterable[Placement], plan: Plan) -> list[LintFinding]:
    """Find parameters larger than a vector that no mesh axis splits, on a mesh whose rules could split them."""
    usable = set(plan.mesh_axes("embed")) | set(plan.mesh_axes("mlp")) | set(plan.mesh_axes("vocab"))
    found = []
    for row in placements:
        stages = plan.size("stage") if "layers" in row.axes else 1
        whole, of_stage = row.bytes // stages, " of a stage" if stages > 1 else ""
        matrix = sum(axis != "layers" for axis in row.axes) > 1
        if not usable or not matrix or row.bytes_per_device < whole or whole < _LARGE_PARAMETER:
            continue
        found.append(_finding(
            "replicated-parameter", "warning",
            f"{row.name} {list(row.shape)} ({', '.join(axis or '-' for axis in row.axes)}) is whole on every device"
            f"{of_stage}, {bytes_text(whole)}: no rule splits any of its dims over {' or '.join(sorted(usable))}",
            axis=next((axis for axis in row.axes if axis not in (None, "layers")), ""), scope=row.name, size=whole,
        ))  # fmt: skip
    return found


def whole_residual_stream(plan: Plan) -> list[LintFinding]:
    """Find mesh axes that split neither the batch, nor the residual stream's sequence, nor the layers."""
    names: list[LogicalAxis] = ["batch", "residual_seq", "stage"]  # a stage has a microbatch of its own
    used = {axis for name in names for axis in plan.mesh_axes(name)}
    return [
        _finding(
            "replicated-activation", "warning",
            f"the residual stream is whole over {axis}={size}: add it to rules.residual_seq", axis="residual_seq",
        )
        for axis, size in plan.mesh.shape.items() if size > 1 and axis not in used
    ]  # fmt: skip


def large_copies(tasks: Iterable[TaskTime], step_seconds: float) -> list[LintFinding]:
    """Find the lines whose synchronous copies and layout changes take more than half a percent of the step."""
    lines: defaultdict[tuple[str, str, str], list[TaskTime]] = defaultdict(list)
    for row in tasks:
        if row.task.kind == "copy" and not row.task.asynchronous:
            place = row.task.place
            lines[place.scope, place.source, place.phase].append(row)
    found = []
    for (scope, source, phase), rows in lines.items():
        seconds = sum(row.seconds for row in rows)
        if seconds < _COPY_SHARE * step_seconds:
            continue
        largest = max(rows, key=lambda row: row.seconds)
        found.append(_finding(
            "large-copy", "warning",
            f"copies of the {phase} pass take {100 * seconds / step_seconds:.1f} % of the step, most of it "
            f"{largest.task.name}, {largest.task.shape}, {largest.count} times",
            scope=scope, source=source, size=sum(row.task.bytes * row.count for row in rows), seconds=seconds,
        ))  # fmt: skip
    return found


def logical_axes(plan: Plan) -> dict[str, str]:
    """The logical axes that each mesh axis splits."""
    names: list[LogicalAxis] = [name for name, split in vars(plan.rules).items() if split]  # pyright: ignore[reportAssignmentType]
    return {axis: ", ".join(n for n in names if axis in plan.mesh_axes(n)) for axis in plan.mesh.axis_names}


def _finding(
    rule: str, severity: Literal["error", "warning", "note"], message: str, *, axis: str | None = "", scope: str = "",
    source: str = "", size: float = 0.0, seconds: float = 0.0,
) -> LintFinding:  # fmt: skip
    assert rule in RULES, rule
    return {
        "rule": rule, "severity": severity, "message": message, "axis": axis or "", "scope": scope, "source": source,
        "bytes": float(size), "seconds": seconds,
    }  # fmt: skip
