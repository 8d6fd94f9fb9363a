"""The linter says in the model's words what is wrong with a rehearsed step; each rule maps rows to
findings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

from jaxpar.base.console import bytes_text
from jaxpar.base.errors import UserError, suggest
from jaxpar.base.plan import Plan
from jaxpar.base.sharding import LogicalAxis, Placement
from jaxpar.hlo.tasks import Place
from jaxpar.rehearse.report.schema import CollectiveRow, KernelRow, LintFinding, Memory
from jaxpar.rehearse.timeline import TaskTime

RULES = (
    "does-not-fit",
    "unplanned-collective",
    "other-kernel",
    "replicated-parameter",
    "replicated-activation",
    "large-copy",
)
_LARGE_PARAMETER = 2**20  # bytes
_COPY_SHARE = 0.005  # of the step


def parse_rules(text: str) -> list[str]:
    """Read `--fail-on`, before anything is compiled: rules of the linter, separated by commas.

    Raises:
      UserError: a name is unknown.
    """
    names = [part for part in map(str.strip, text.split(",")) if part]
    for name in names:
        if name not in RULES:
            guess = suggest(name, RULES)
            raise UserError(
                f"--fail-on {name}: unknown condition{guess}: it may be {', '.join(RULES)}"
            )
    return names


def does_not_fit(memory: Memory) -> list[LintFinding]:
    """Find that the step takes more memory than a device has, or than JAX's pool may take of a
    GPU's.
    """
    if memory["fits"]:
        return []
    has = memory["hbm_bytes"]
    usable = memory["usable_bytes"]
    if usable == has:
        what = "HBM"
    else:
        what = f"{bytes_text(has)}, which is what JAX's pool may take"
    over = memory["total"] - usable
    return [
        _finding("does-not-fit", "error", f"more than {bytes_text(usable)} of {what}", size=over)
    ]


def other_kernels(rows: Iterable[KernelRow]) -> list[LintFinding]:
    """Find kernels that were priced in place of those that the target would run."""
    return [
        _finding(
            "other-kernel",
            "warning",
            f"{row['op']} is priced as {row['priced']}, because {row['runs']} is not on this "
            "machine; the target runs "
            f"{row['runs']} where it is installed. To price that: {row['install']}",
        )
        for row in rows
    ]


def unplanned_collectives(rows: Iterable[CollectiveRow]) -> list[LintFinding]:
    """Find collectives that are not the plan's."""
    return [
        _finding(
            "unplanned-collective",
            "error",
            f"{row['kind']} of {bytes_text(row['bytes'])} over "
            f"{' x '.join(row['axes']) or 'no axis'}, "
            f"{row['count']} a step: {row.get('reason')}",
            scope=row["scope"],
            source=row["source"],
            size=row["sent_bytes"],
            seconds=row["exposed"],
        )
        for row in rows
        if not row.get("planned", True)
    ]


def replicated_parameters(placements: Iterable[Placement], plan: Plan) -> list[LintFinding]:
    """Find parameters larger than a vector that no mesh axis splits, on a mesh whose rules could
    split them.
    """
    usable = {
        *plan.mesh_axes("embed"),
        *plan.mesh_axes("mlp"),
        *plan.mesh_axes("vocab"),
    }
    found = []
    for row in placements:
        if "layers" in row.axes:
            stages = plan.size("stage")
        else:
            stages = 1
        whole = row.bytes // stages
        of_stage = " of a stage" if stages > 1 else ""
        matrix = sum(axis != "layers" for axis in row.axes) > 1
        if not usable or not matrix or row.bytes_per_device < whole or whole < _LARGE_PARAMETER:
            continue
        found.append(
            _finding(
                "replicated-parameter",
                "warning",
                f"{row.name} {list(row.shape)} ({', '.join(axis or '-' for axis in row.axes)}) "
                "is whole on every device"
                f"{of_stage}, {bytes_text(whole)}: no rule splits any of its dims over "
                f"{' or '.join(sorted(usable))}",
                scope=row.name,
                size=whole,
            )
        )
    return found


def whole_residual_stream(plan: Plan) -> list[LintFinding]:
    """Find mesh axes that split neither the batch, nor the residual stream's sequence, nor the
    layers.
    """
    # a stage has a microbatch of its own
    names: list[LogicalAxis] = ["batch", "residual_seq", "stage"]
    used = {axis for name in names for axis in plan.mesh_axes(name)}
    return [
        _finding(
            "replicated-activation",
            "warning",
            f"the residual stream is whole over {axis}={size}: add it to rules.residual_seq",
        )
        for axis, size in plan.mesh.shape.items()
        if size > 1 and axis not in used
    ]


def large_copies(tasks: Iterable[TaskTime], step_seconds: float) -> list[LintFinding]:
    """Find the lines whose synchronous copies and layout changes take more than half a percent of
    the step.
    """
    lines: defaultdict[Place, list[TaskTime]] = defaultdict(list)
    for row in tasks:
        if row.task.kind == "copy" and not row.task.asynchronous:
            lines[row.task.place].append(row)
    found = []
    for place, rows in lines.items():
        seconds = sum(row.seconds for row in rows)
        if seconds < _COPY_SHARE * step_seconds:
            continue
        largest = max(rows, key=lambda row: row.seconds)
        moved = sum(row.task.bytes * row.count for row in rows)
        found.append(
            _finding(
                "large-copy",
                "warning",
                f"copies of the {place.phase} pass take {100 * seconds / step_seconds:.1f} % of "
                "the step, most of it "
                f"{largest.task.name}, {largest.task.shape}, {largest.count} times",
                scope=place.scope,
                source=place.source,
                size=moved,
                seconds=seconds,
            )
        )
    return found


def by_weight(found: Iterable[LintFinding]) -> list[LintFinding]:
    """Sort findings: errors first, and then by what they cost."""
    return sorted(
        found,
        key=lambda row: (row["severity"], -row["seconds"], -row["bytes"]),
    )


def _finding(
    rule: str,
    severity: Literal["error", "warning"],
    message: str,
    *,
    scope: str = "",
    source: str = "",
    size: float = 0.0,
    seconds: float = 0.0,
) -> LintFinding:
    assert rule in RULES, rule
    return {
        "rule": rule,
        "severity": severity,
        "message": message,
        "scope": scope,
        "source": source,
        "bytes": float(size),
        "seconds": seconds,
    }
