"""The report of any compiled program: it is read, priced and played out."""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Iterable, Sequence

from jaxpar.base.errors import Say
from jaxpar.base.hardware import PeakFlops
from jaxpar.base.layout.placements import Placement
from jaxpar.base.layout.plan import Plan
from jaxpar.base.machine import versions
from jaxpar.base.prices import Prices
from jaxpar.hlo.origin import PackageDirs
from jaxpar.hlo.program.digest import program_digest
from jaxpar.hlo.program.parse import parse_module
from jaxpar.hlo.program.tasks import Origin, Task
from jaxpar.kernels.attention.libraries import stand_ins_in
from jaxpar.rehearse.compiled import Compiled
from jaxpar.rehearse.cost import peak_name
from jaxpar.rehearse.graph.report import task_graph_of
from jaxpar.rehearse.how_sure import interval_of
from jaxpar.rehearse.report import lint
from jaxpar.rehearse.report.alive import alive_arrays
from jaxpar.rehearse.report.collectives import collective_rows
from jaxpar.rehearse.report.report_tables import seconds_text
from jaxpar.rehearse.report.schema import (
    SCHEMA,
    KernelRow,
    Line,
    Memory,
    Rehearsal,
    TargetFacts,
    Time,
)
from jaxpar.rehearse.report.trace import timeline_of
from jaxpar.rehearse.requested_collectives import Requested
from jaxpar.rehearse.targets import Target
from jaxpar.rehearse.timeline import MOVING, TaskTime, Timeline, read_and_price, replay
from jaxpar.rehearse.topologies import cudnn_packages

_DRAWN_TRIPS = 100
_MOST_EVENTS = 60_000


def report_of(
    compiled: Compiled,
    taken: Memory,
    say: Say,
    package_dirs: PackageDirs | None = None,
    *,
    name: str,
    tokens: int,
    model_flops: float,
    requested: list[Requested] | None = None,
    dtype: str = "",
    plan: Plan | None = None,
    parameters: Sequence[Placement] = (),
    graph: bool = False,
) -> Rehearsal:
    """Read, price and play out a compiled function, and report what can be said of any program.

    Args:
      compiled: the compiled function.
      taken: a device's memory.
      package_dirs: where lines are looked for, as in `read_program`.
      say, name, tokens, model_flops: the arguments of `rehearse.step`.
      requested: the collectives that were asked for; None = not known, and none is called
        unplanned.
      dtype: the dtype of the matmuls; MFU and HFU are shares of its peak. Empty = the dtype of most
        of their FLOPs.
      plan, parameters: the plan of a config, and where its parameters lie, for the linter.
      graph: whether the report has the task graph too.

    Returns:
      The report, in which `command` is empty and what only a config knows is absent.

    Raises:
      UserError: the text of the function cannot be read, the target has no figure for a link that a
        collective uses, or a rule of the linter returns something else than findings.
    """
    say(f"compiled in {compiled.seconds:.0f} s; reading and playing the schedule")
    target = compiled.target
    mesh = compiled.mesh
    hardware = compiled.target.hardware
    priced = read_and_price(compiled.text, mesh, target, package_dirs)
    timeline = replay(priced.program, priced.costs, _DRAWN_TRIPS, _MOST_EVENTS)
    dtype = dtype or _main_dtype(timeline.tasks, hardware.peak_flops)
    peak = getattr(hardware.peak_flops, dtype) or hardware.peak_flops.bfloat16 or None
    collectives = collective_rows(timeline.tasks, requested, dict(mesh.shape))
    kernels = stand_ins(compiled.text, hardware.prices)
    linted = lint.LintedStep(
        memory=taken,
        collectives=collectives,
        kernels=kernels,
        tasks=timeline.tasks,
        seconds=timeline.seconds,
        plan=plan,
        parameters=parameters,
    )
    report: Rehearsal = {
        "schema": SCHEMA,
        "config": name,
        "command": "",
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "target": _target_facts(target, dtype, peak),
        "mesh": {str(axis): size for axis, size in mesh.shape.items() if size > 1},
        "compile_seconds": compiled.seconds,
        "program": program_digest(compiled.text),
        "compiler_options": dict(compiled.options),
        "kernels": kernels,
        "memory": taken,
        "time": _time(timeline, tokens, model_flops / mesh.size, peak),
        "interval": interval_of(timeline.seconds, target.chip, hardware.chips),
        "lines": lines_of(timeline.tasks),
        "collectives": collectives,
        "timeline": timeline_of(timeline.events),
        "findings": lint.find_all(linted),
        "notes": [*_notes(timeline, hardware.prices), *priced.program.notes, *priced.notes],
    }
    _add_alive(report, compiled.text, timeline.tasks)
    if graph:
        say("laying out the task graph")
        report["graph"] = task_graph_of(
            compiled.text, priced.program, priced.costs, timeline.seconds
        )
    return report


def _target_facts(target: Target, dtype: str, peak: float | None) -> TargetFacts:
    hardware = target.hardware
    return {
        "name": target.name,
        "chip": hardware.chip or target.chip,
        "chips": hardware.chips,
        "slices": target.slices,
        "topology": target.topology,
        "hbm_bytes": hardware.hbm_bytes,
        "peak_flops": peak,
        "dtype": dtype,
        "note": target.note,
    }


def stand_ins(text: str, prices: Prices) -> list[KernelRow]:
    """List what a compiled program runs in place of the kernels of its target (attention without
    cuDNN, where the target has it), with the kernel that its time is of, and the command that
    installs what is missing.
    """
    known = any(row.kernel == "cudnn" for row in prices.attention)
    install = f"pip install {' '.join(cudnn_packages())}"
    return [
        {
            "op": "attention",
            "priced": name,
            "runs": "cuDNN",
            "install": install,
            "time": "cuDNN" if known else name,
        }
        for name in stand_ins_in(text)
    ]


def _add_alive(report: Rehearsal, text: str, tasks: Sequence[TaskTime]) -> None:
    """Add what is in memory at each time, where the program says in what order it runs.

    A program may have a form of an instruction that nobody has seen: then the report says so, and
    is whole but for that.
    """
    module = parse_module(text)
    if module.header.get("is_scheduled") != "true":
        return
    try:
        report["alive"] = alive_arrays(module, tasks)
    except (LookupError, ValueError) as error:
        report["notes"].append(f"what is in memory when could not be followed: {error!r}")


def _main_dtype(tasks: Iterable[TaskTime], peaks: PeakFlops) -> str:
    """Find the dtype of most of a program's FLOPs, among those that the chip has a peak for;
    bfloat16 where there is none.
    """
    done: defaultdict[str, float] = defaultdict(float)
    for row in tasks:
        name = peak_name(row.task.dtype)
        done[name if getattr(peaks, name, 0.0) else "bfloat16"] += row.task.flops * row.count
    return max(done, key=done.__getitem__, default="bfloat16")


def _time(timeline: Timeline, tokens: int, model_flops: float, peak: float | None) -> Time:
    """Divide the step's seconds by what takes them, with its rates where FLOPs, tokens and the peak
    are known.
    """
    seconds = timeline.seconds
    moved = {
        kind: sum(row.seconds for row in timeline.tasks if row.task.kind == kind) for kind in MOVING
    }
    computed = [row for row in timeline.tasks if row.task.kind not in MOVING]
    whole = sum(row.seconds for row in computed)
    known = sum(row.seconds for row in computed if row.task.cycles is not None)
    done = sum(
        row.task.flops * row.count for row in timeline.tasks if row.task.kind != "host_compute"
    )
    possible = peak * seconds if peak else 0.0
    found: Time = {
        "step": seconds,
        "compute": sum(spent for kind, spent in timeline.busy.items() if kind not in MOVING),
        "exposed_communication": timeline.exposed_communication,
        "host_stall": timeline.host_stall,
        "copy_stall": sum(spent for kind, spent in timeline.stalls.items() if kind not in MOVING),
        "idle": timeline.idle,
        "mfu": model_flops / possible if possible and model_flops else None,
        "hfu": done / possible if possible else None,
        "by_category": {kind: spent for kind, spent in (timeline.busy | moved).items() if spent},
        "estimated_without_cycles": 1 - known / whole if whole else 0.0,
    }
    if tokens and seconds:
        found["tokens_per_second"] = tokens / seconds
    return found


def lines_of(tasks: Iterable[TaskTime]) -> list[Line]:
    """Add up the time by line of the model and phase, the longest first."""
    lines: dict[Origin, Line] = {}
    for row in tasks:
        origin = row.task.origin
        task = row.task
        line = lines.setdefault(origin, _empty_line(origin))
        if task.kind in MOVING:
            line["communication"] += row.seconds
        elif not task.asynchronous:
            line["compute"] += row.seconds
        line["exposed"] += row.exposed
        line["flops"] += task.flops * row.count
        line["bytes"] += task.bytes * row.count
        line["count"] += row.count
    return sorted(lines.values(), key=lambda line: -(line["compute"] + line["exposed"]))


def _empty_line(origin: Origin) -> Line:
    return {
        "scope": origin.scope,
        "source": origin.source,
        "phase": origin.phase,
        "compute": 0.0,
        "communication": 0.0,
        "exposed": 0.0,
        "flops": 0.0,
        "bytes": 0,
        "count": 0,
    }


def _notes(timeline: Timeline, prices: Prices) -> list[str]:
    """Write notes on how far the figures can be trusted."""
    notes = []
    unplaced = [
        row for row in timeline.tasks if not row.task.origin.scope and not row.task.origin.source
    ]
    lost = sum(row.exposed if row.task.asynchronous else row.seconds for row in unplaced)
    if timeline.seconds:
        notes.append(
            f"{100 * lost / timeline.seconds:.1f} % of the step could not be tied to a line of "
            "the model"
        )
    kernels = [
        row for row in timeline.tasks if row.task.kind == "kernel" and row.task.cycles is None
    ]
    measured = [row for row in kernels if _is_in_table(row.task, prices)]
    others = [row for row in kernels if not _is_in_table(row.task, prices)]
    if measured:
        notes.append(
            f"{len(measured)} kernels of attention: {_took(measured)} by what they reach on this "
            "chip, by head_dim and length"
        )
    if others:
        notes.append(
            f"{len(others)} kernels carry no cycles: {_took(others)} by their FLOPs at the peak, a "
            "lower bound"
        )
    return notes


def _is_in_table(task: Task, prices: Prices) -> bool:
    """Return whether the chip's prices have the kernel of attention that a task is priced as."""
    work = task.attention
    return work is not None and any(
        row.kernel == (work.stands_for or work.kernel) for row in prices.attention
    )


def _took(rows: Iterable[TaskTime]) -> str:
    return seconds_text(sum(row.seconds for row in rows))
