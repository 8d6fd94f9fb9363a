"""What is wrong with a rehearsed step, in the model's words: each rule is a function from rows to findings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from jaxpar.base.config import Config
from jaxpar.base.console import bytes_text
from jaxpar.base.plan import Plan
from jaxpar.base.sharding import Axes, LogicalAxis, Placement
from jaxpar.parallel.pipeline.layers import layers_in
from jaxpar.rehearse.report.schema import CollectiveRow, LintFinding
from jaxpar.rehearse.timeline.timeline import TaskTime

RULES = {
    "unplanned-collective": "a collective that the plan did not ask for",
    "whole-all-reduce": "a weight gradient summed whole where its parts would do",
    "replicated-parameter": "a large parameter that every device holds whole",
    "replicated-activation": "an activation that is not split as the batch and the residual stream are",
    "large-copy": "a copy or a change of layout that takes a share of the step",
}
_LARGE_PARAMETER = 2**20  # bytes
_COPY_SHARE = 0.005  # of the step


def unplanned_collectives(rows: Iterable[CollectiveRow], axis_of: dict[str, str]) -> list[LintFinding]:
    """Collectives of the report that are not the plan's; a whole all-reduce of a weight gradient is a rule of its own.

    Args:
      rows: the report's collectives.
      axis_of: for each mesh axis the logical axes that it splits: `{"fsdp": "batch, embed"}`.
    """
    found = []
    for row in rows:
        if row.get("planned", True):
            continue
        whole = row["kind"] == "all-reduce" and "reduce-scatter" in row.get("reason", "")
        rule = "whole-all-reduce" if whole and row["phase"] == "backward" else "unplanned-collective"
        axes = ", ".join(dict.fromkeys(axis_of.get(axis, "") for axis in row["axes"]))
        message = (
            f"{row['kind']} of {bytes_text(row['bytes'])} over {' x '.join(row['axes'])}, {row['count']} a step: "
            f"{row.get('reason', '')}"
        )
        found.append(
            _finding(rule, "error", message, axes, row["scope"], row["source"], row["sent_bytes"], row["exposed"])
        )
    return found


def replicated_parameters(placements: Iterable[Placement], plan: Plan) -> list[LintFinding]:
    """Parameters of more than a vector that no mesh axis splits, on a mesh whose rules could split them."""
    usable = set(plan.mesh_axes("embed")) | set(plan.mesh_axes("mlp")) | set(plan.mesh_axes("vocab"))
    found = []
    for row in placements:
        stages = plan.size("stage") if "layers" in row.axes else 1
        whole, of_stage = row.bytes // stages, " of a stage" if stages > 1 else ""
        matrix = sum(axis != "layers" for axis in row.axes) > 1
        if not usable or not matrix or row.bytes_per_device < whole or whole < _LARGE_PARAMETER:
            continue
        axes = ", ".join(axis or "-" for axis in row.axes)
        message = (
            f"{row.name} {list(row.shape)} ({axes}) is whole on every device{of_stage}, {bytes_text(whole)}: "
            f"no rule splits any of its dims over {' or '.join(sorted(usable))}"
        )
        named = next((axis for axis in row.axes if axis not in (None, "layers")), "") or ""
        found.append(_finding("replicated-parameter", "warning", message, named, row.name, "", whole, 0.0))
    return found


def replicated_activations(tasks: Iterable[TaskTime], config: Config, plan: Plan) -> list[LintFinding]:
    """Arrays of the program that hold all sequences of a microbatch though the plan splits the batch; and a residual
    stream that a mesh axis leaves whole.

    Only of what the compiler was free to split: inside a `shard_map` an array is as it was written, and one that is as
    large is something else (a matmul cut along its contraction, a gradient in pieces).

    Args:
      tasks: of the replayed program: local shapes.
      config: the experiment.
      plan: mesh and rules.
    """
    found: dict[tuple[str, str], LintFinding] = {}
    stored: Axes = ("batch", "residual_seq", None)
    used = {axis for name in (*stored, "stage") for axis in plan.mesh_axes(name)}  # a stage has its own microbatch
    idle = [axis for axis, size in plan.mesh.shape.items() if size > 1 and axis not in used]
    for axis in idle:
        message = f"the residual stream is whole over {axis}={plan.mesh.shape[axis]}: add it to --rules.residual-seq"
        found["residual_seq", axis] = _finding(
            "replicated-activation", "warning", message, "residual_seq", "", "", 0, 0
        )
    if plan.size("batch") == 1:
        return list(found.values())
    microbatch, seq_len = _microbatch(config, plan), config.data.seq_len
    names = _local_sizes(config, plan)
    lengths = {n for n in (seq_len, seq_len // plan.size("residual_seq")) if names[n] == {"seq"}}
    # [B, S, ...], or all tokens in one dim: where no other dim is as long. Experts' rows may be as many as anything.
    forms = [rf"(?:\d+,)?{microbatch},(\d+)" if names[microbatch] == {"batch"} else r"(?!)(\d+)"]
    forms += [] if microbatch * seq_len in names or config.model.experts else [str(microbatch * seq_len)]
    whole = re.compile(rf"\[(?:{'|'.join(forms)}),[\d,]+\]")
    for row in tasks:
        match, place, task = whole.search(row.task.shape), row.task.place, row.task
        if not match or (match[1] and int(match[1]) not in lengths):
            continue
        if task.split_by != "compiler" or place.phase == "update" or place.scope == "accumulate":
            continue
        key = place.scope, place.source
        before = found.get(key)
        seconds = row.seconds + (before["seconds"] if before else 0.0)
        if before and before["bytes"] >= task.bytes:
            before["seconds"] = seconds
            continue
        message = f"{task.shape} holds all {microbatch} sequences, which the plan splits over {plan.size('batch')}"
        found[key] = _finding(
            "replicated-activation", "error", message, "batch", place.scope, place.source, task.bytes, seconds
        )
    return list(found.values())


def _microbatch(config: Config, plan: Plan) -> int:
    """Sequences that are computed together."""
    piped = plan.pipeline.microbatches if plan.size("stage") > 1 else 1
    return config.train.batch // config.train.accumulation // piped


def local_sizes(config: Config, plan: Plan) -> dict[int, str]:
    """Which logical axis a dim of a device's array is, by its size, where only one has it: `{128: "head_dim"}`."""
    return {size: min(names) for size, names in _local_sizes(config, plan).items() if len(names) == 1 and size > 1}


def _local_sizes(config: Config, plan: Plan) -> dict[int, set[str]]:
    model, pipeline = config.model, layers_in(plan, config.model.layers)
    sizes: dict[LogicalAxis, int] = {
        "batch": _microbatch(config, plan), "seq": config.data.seq_len, "embed": model.embed,
        "heads": model.heads, "kv_heads": model.kv_heads or model.heads,
        "head_dim": model.head_dim or model.embed // model.heads, "mlp": model.mlp,
        "layers": len(pipeline.order) if pipeline else model.layers,
        "vocab": -(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple,
    }  # fmt: skip
    named: dict[int, set[str]] = {}
    for axis, size in sizes.items():
        pieces = (1, plan.size(axis), plan.size("residual_seq") if axis == "seq" else 1)
        for local in {size // n for n in pieces}:
            named.setdefault(local, set()).add(axis)
    return named


def large_copies(
    tasks: Iterable[TaskTime], step_seconds: float, axis_of_size: Mapping[int, str] = MappingProxyType({})
) -> list[LintFinding]:
    """Synchronous copies and layout changes by line, where they take more than half a percent of the step.

    Args:
      tasks: of the replayed program.
      step_seconds: of the whole step.
      axis_of_size: from `local_sizes`, to name the dims of what is copied.
    """
    lines: dict[tuple[str, str, str], list[TaskTime]] = {}
    for row in tasks:
        if row.task.kind == "copy" and not row.task.asynchronous:
            place = row.task.place
            lines.setdefault((place.scope, place.source, place.phase), []).append(row)
    found = []
    for (scope, source, phase), rows in lines.items():
        seconds = sum(row.seconds for row in rows)
        if seconds < _COPY_SHARE * step_seconds:
            continue
        largest = max(rows, key=lambda row: row.seconds)
        moved = sum(row.task.bytes * row.count for row in rows)
        message = (
            f"copies of the {phase} pass take {100 * seconds / step_seconds:.1f} % of the step, most of it "
            f"{largest.task.name}, {largest.task.shape}, {largest.count} times"
        )
        dims = re.findall(r"\d+", largest.task.shape.partition("[")[2].partition("]")[0])
        axes = ", ".join(axis_of_size[int(size)] for size in dims if int(size) in axis_of_size)
        found.append(_finding("large-copy", "warning", message, axes, scope, source, moved, seconds))
    return found


def logical_axes(plan: Plan) -> dict[str, str]:
    """For each mesh axis the logical axes that it splits."""
    names: list[Any] = [name for name, split in vars(plan.rules).items() if split]
    return {axis: ", ".join(n for n in names if axis in plan.mesh_axes(n)) for axis in plan.mesh.axis_names}


def _finding(
    rule: str, severity: Literal["error", "warning", "note"], message: str, axis: str, scope: str, source: str,
    size: float, seconds: float,
) -> LintFinding:  # fmt: skip
    assert rule in RULES, rule
    return {
        "rule": rule, "severity": severity, "message": message, "axis": axis, "scope": scope, "source": source,
        "bytes": float(size), "seconds": seconds,
    }  # fmt: skip
