"""`jaxpar rehearse`: the real training step, compiled for hardware that is not here, read and played out."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from jaxpar.base.config import Config, check, require_settled
from jaxpar.base.errors import UserError
from jaxpar.base.mesh import MESH_AXES, MeshSpec, describe
from jaxpar.base.runtime import start, versions
from jaxpar.base.sharding import Plan, placements
from jaxpar.hlo.parse import Module, parse
from jaxpar.hlo.tasks import Program, walk
from jaxpar.models import Model
from jaxpar.parallel.host_memory import lowered_for
from jaxpar.rehearse.cost.cost import seconds_by_basis
from jaxpar.rehearse.report import lint, memory
from jaxpar.rehearse.report import memory_advice as fit
from jaxpar.rehearse.report.collectives import collective_rows, in_float32, queueing_notes
from jaxpar.rehearse.report.drawing import timeline_of
from jaxpar.rehearse.report.schema import SCHEMA, CollectiveRow, Finding, Line, Rehearsal, Time
from jaxpar.rehearse.report.tables import seconds_text
from jaxpar.rehearse.requested_collectives import Planned, planned
from jaxpar.rehearse.simulate import Played, play
from jaxpar.rehearse.targets import Target, check_mesh, target_devices
from jaxpar.rehearse.timeline.timeline import TaskTime, Timeline
from jaxpar.train.state_bytes import by_memory, state_of
from jaxpar.train.step import in_host, make_plan, make_train_step, param_shapes, plan_notes, state_shapes, step_shapes

_DRAWN_TRIPS, _MOST_EVENTS = 100, 60_000


class Compiled(NamedTuple):
    """A training step compiled for a target."""

    config: Config
    target: Target
    plan: Plan
    model: Model
    planned: list[Planned]
    text: str
    stats: Any
    """`compiled.memory_analysis()`."""
    state: Any
    batch: Any
    """ShapeDtypeStructs with shardings."""
    host: Any
    """Of each array of the state, whether the plan has it in host memory."""
    seconds: float
    """Of the compilation."""
    notes: tuple[str, ...] = ()
    """What could not be counted exactly of the plan's collectives."""


def rehearse(
    config: Config, target: Target, name: str = "", command: str = "", tokens: float = 1e12,
    say: Callable[[str], None] = lambda line: None, program: Any = None,
) -> Rehearsal:  # fmt: skip
    """The report of one training step on a target; `jaxpar.rehearse.report.schema` says what is in it.

    Args:
      config: the experiment, settled (`jaxpar.plan.resolve`). Its mesh must fit the target; `mesh.distributed` and
        `mesh.platform` do not count.
      target: from `load_target`.
      name: of the config, for the report.
      command: what was typed, for the report.
      tokens: length of the training that `time.days` speaks of.
      say: called with a line at the start of each stage.
      program: the step where it is compiled already (`jaxpar.plan.resolve_and_compile`).

    Raises:
      UserError: a mesh that does not fit the target, a missing compiler, or a step that the compiler refuses because
        it does not fit the memory.
    """
    compiled = compile_step(config, target, say, program)
    say(f"compiled in {compiled.seconds:.0f} s; reading and playing the schedule")
    module = parse(compiled.text)
    played = play(compiled.text, compiled.plan, target, say, _DRAWN_TRIPS, _MOST_EVENTS)
    program, costs = played.program, played.costs
    report = _report(compiled, played, module)
    basis = seconds_by_basis(program, costs)
    computed = sum(seconds for kind, seconds in basis.items() if kind not in ("link", "host link"))
    report["time"]["estimated_without_cycles"] = 1 - basis.get("cycles", 0.0) / computed if computed else 0.0
    report["time"]["days"] = {f"{tokens:.3g}": tokens / report["time"]["tokens_per_second"] / 86400}
    report["notes"] += [*compiled.notes, *program.notes, *costs.notes]
    report["config"], report["command"] = name, command
    return report


def on_target(config: Config, target: Target) -> tuple[Config, list[jax.Device]]:
    """A config as it runs on a target, and the target's devices.

    Raises:
      UserError: a config that is wrong in itself, or a mesh that does not fit the target.
    """
    config = check(dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, distributed=False)))
    if target.name == "here":
        return config, start(mesh_here(config.mesh), "off")
    check_mesh(config.mesh, target)
    return config, target_devices(target)


def compile_step(
    config: Config, target: Target, say: Callable[[str], None] = lambda line: None, program: Any = None
) -> Compiled:
    """The training step of a config, compiled by the target's own compiler: see `rehearse`."""
    config, devices = on_target(config, target)
    require_settled(config)
    plan, model = make_plan(config, devices), Model(config.model)
    across = describe({f"dcn.{axis}": getattr(config.mesh.dcn, axis) for axis in MESH_AXES})
    inside = describe({axis: getattr(config.mesh, axis) for axis in MESH_AXES})
    say(f"compiling for {target.name}: {inside}" + (f", {across}" if "dcn" in across else ""))
    arguments = step_shapes(model, config, plan)
    began = time.perf_counter()
    host = in_host(state_shapes(model, config, plan), model, plan)
    step = make_train_step(model, config, plan)
    flags = host, jax.tree.map(lambda _: False, arguments[1])
    try:
        traced, lowered = lowered_for(step, arguments, flags, target.platform)
        compiled = program or lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        state, _ = arguments
        there, _ = by_memory(state, host if target.platform != "cpu" else None)
        raise UserError(fit.refusal(str(error), target.name, config, plan, there.params, there.opt_state)) from error
    seconds = time.perf_counter() - began
    notes = plan_notes(config, plan)
    asked = planned(traced.jaxpr, plan.mesh, notes.append)
    stats = compiled.memory_analysis()
    asked = in_float32(asked) if target.platform == "cpu" else asked
    return Compiled(
        config, target, plan, model, asked, compiled.as_text(), stats, *arguments, host, seconds, tuple(notes)
    )


def mesh_here(mesh: MeshSpec) -> MeshSpec:
    """The mesh on this machine's devices, simulated ones if it asks for those."""
    return dataclasses.replace(mesh, distributed=False, platform="cpu" if mesh.platform == "cpu" else "auto")


def _report(compiled: Compiled, played: Played, module: Module) -> Rehearsal:
    """Everything but what `rehearse` adds."""
    program, timeline, hardware = played.program, played.timeline, played.hardware
    config, target, plan, model = compiled.config, compiled.target, compiled.plan, compiled.model
    peak = getattr(hardware.peak_flops, config.precision.compute) or hardware.peak_flops.bfloat16 or None
    chips = plan.mesh.size // hardware.devices_per_chip  # here, a mesh may take some of the devices
    rows = placements(param_shapes(model, plan), model.axes, plan)
    tokens = config.train.batch * config.data.seq_len
    model_flops = model.flops_per_token(config.data.seq_len) * tokens
    collectives = collective_rows(
        timeline.tasks, compiled.planned, dict(plan.mesh.shape), lambda collective: played.on_links(collective).links
    )
    device_memory = memory.account(
        compiled.stats, compiled.state, compiled.batch, module, config.model.layers, hardware.hbm_bytes,
        compiled.host if target.platform != "cpu" else None, state_of(config, plan, target.platform).gradients,
    )  # fmt: skip
    if not device_memory["fits"]:
        device_memory["advice"] = fit.advice(
            device_memory["categories"], device_memory["total"], hardware.hbm_bytes, config, plan
        )
    report: Rehearsal = {
        "schema": SCHEMA, "config": "", "overrides": {}, "command": "",
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "target": {
            "name": target.name, "chip": hardware.chip or target.chip, "chips": chips, "slices": target.slices,
            "topology": target.topology, "hbm_bytes": hardware.hbm_bytes, "peak_flops": peak,
            "dtype": config.precision.compute, "note": target.note,
        },
        "mesh": {axis: size for axis, size in plan.mesh.shape.items() if size > 1},
        "model": {"family": config.model.family, "parameters": model.parameter_count()},
        "batch": {
            "sequences": config.train.batch, "seq_len": config.data.seq_len, "tokens": tokens,
            "accumulation": config.train.accumulation,
        },
        "compile_seconds": compiled.seconds,
        "memory": device_memory,
        "time": _time(timeline, program, model_flops / plan.mesh.size, tokens, peak),
        "lines": _lines(timeline.tasks),
        "collectives": collectives,
        "critical_path": [
            {"name": task.name, "kind": task.kind, "seconds": seconds, "count": count, "scope": task.place.scope,
             "source": task.place.source}
            for task, count, seconds in timeline.critical_path[:50]
        ],
        "timeline": timeline_of(program, timeline.events),
        "findings": _findings(compiled, timeline, collectives, rows),
        "shardings": [
            {"name": row.name, "shape": list(row.shape), "axes": list(row.axes), "spec": str(row.spec),
             "bytes_per_device": row.bytes_per_device}
            for row in rows
        ],
        "unknown": dict(program.unknown),
        "notes": [*_notes(config, timeline), *queueing_notes(collectives)],
    }  # fmt: skip
    return report


def _time(timeline: Timeline, program: Program, model_flops: float, tokens: int, peak: float | None) -> Time:
    """The report's times; `model_flops` are one device's share."""
    moving = ("collective", "host_copy")
    done = sum(task.flops * count for task, count in walk(program.nodes))
    by_category: dict[str, float] = dict(timeline.busy)
    for kind in moving:
        by_category[kind] = sum(row.seconds for row in timeline.tasks if row.task.kind == kind)
    return {
        "step": timeline.seconds,
        "compute": sum(seconds for kind, seconds in timeline.busy.items() if kind not in moving),
        "exposed_communication": timeline.exposed_communication,
        "host_stall": timeline.host_stall,
        "copy_stall": sum(seconds for kind, seconds in timeline.stalls.items() if kind not in moving),
        "idle": timeline.idle,
        "lower_bound": timeline.lower_bound,
        "list_schedule": timeline.list_schedule,
        "mfu": model_flops / (peak * timeline.seconds) if peak and timeline.seconds else None,
        "hfu": done / (peak * timeline.seconds) if peak and timeline.seconds else None,
        "tokens_per_second": tokens / timeline.seconds if timeline.seconds else 0.0,
        "days": {},
        "by_category": {kind: seconds for kind, seconds in by_category.items() if seconds},
        "estimated_without_cycles": 0.0,
    }


def _lines(tasks: Iterable[TaskTime]) -> list[Line]:
    """Time by line of the model and phase, the longest first."""
    lines: dict[tuple[str, str, str], Line] = {}
    for row in tasks:
        place, task = row.task.place, row.task
        line = lines.setdefault((place.scope, place.source, place.phase), {
            "scope": place.scope, "source": place.source, "phase": place.phase, "compute": 0.0, "communication": 0.0,
            "exposed": 0.0, "flops": 0.0, "bytes": 0, "count": 0,
        })  # fmt: skip
        moves = task.kind in ("collective", "host_copy")
        if moves:
            line["communication"] += row.seconds
        elif not task.asynchronous:
            line["compute"] += row.seconds
        line["exposed"] += row.exposed
        line["flops"] += task.flops * row.count
        line["bytes"] += task.bytes * row.count
        line["count"] += row.count
    return sorted(lines.values(), key=lambda line: -(line["compute"] + line["exposed"]))


def _findings(compiled: Compiled, timeline: Timeline, collectives: list[CollectiveRow], rows: Any) -> list[Finding]:
    config, plan = compiled.config, compiled.plan
    found = [
        *lint.unplanned_collectives(collectives, lint.logical_axes(plan)),
        *lint.replicated_parameters(rows, plan),
        *lint.replicated_activations(timeline.tasks, config, plan),
        *lint.large_copies(timeline.tasks, timeline.seconds, lint.local_sizes(config, plan)),
    ]
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda finding: (order[finding["severity"]], -finding["seconds"], -finding["bytes"]))


def _notes(config: Config, timeline: Timeline) -> list[str]:
    """What qualifies the figures."""
    notes = []
    unplaced = [row for row in timeline.tasks if not row.task.place.scope and not row.task.place.source]
    lost = sum(row.exposed if row.task.asynchronous else row.seconds for row in unplaced)
    if timeline.seconds:
        notes.append(f"{100 * lost / timeline.seconds:.1f} % of the step could not be tied to a line of the model")
    kernels = [row for row in timeline.tasks if row.task.kind == "kernel" and row.task.cycles is None]
    if kernels:
        seconds = sum(row.seconds for row in kernels)
        notes.append(
            f"{len(kernels)} kernels carry no cycles: {seconds_text(seconds)} by their FLOPs at the peak, a lower bound"
        )
    if config.model.dropout:
        notes.append("dropout is on: its random bits are part of the step")
    return notes
