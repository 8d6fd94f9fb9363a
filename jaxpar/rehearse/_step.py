"""Any jitted function, compiled for hardware that is not here, read and played out.

What only a config knows (which parameters, which tokens, which collectives were asked for) is not in the report of a
stranger's function; `jaxpar.rehearse.of_config` adds it for ours.
"""

from __future__ import annotations

import datetime
import inspect
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from jaxpar.base.errors import UserError
from jaxpar.base.jax_compat import compiler_said
from jaxpar.base.runtime import versions
from jaxpar.hlo.origin import own_dirs
from jaxpar.hlo.tasks import walk
from jaxpar.parallel.host_memory import lowered_for
from jaxpar.rehearse.cost.cost import seconds_by_basis
from jaxpar.rehearse.report import lint, memory
from jaxpar.rehearse.report.collectives import collective_rows, queueing_notes
from jaxpar.rehearse.report.drawing import timeline_of
from jaxpar.rehearse.report.schema import SCHEMA, Line, Memory, Rehearsal, Time
from jaxpar.rehearse.report.tables import seconds_text
from jaxpar.rehearse.requested_collectives import Requested
from jaxpar.rehearse.simulate import StepSimulation, simulate
from jaxpar.rehearse.targets import Target, load_target
from jaxpar.rehearse.timeline.timeline import TaskTime, Timeline

DRAWN_TRIPS, MOST_EVENTS = 100, 60_000
_KINDS = {"cuda": "gpu"}  # what a device says of itself, by what it is compiled for


class Compiled(NamedTuple):
    """A jitted function compiled for a target.

    Attributes:
      target: what for.
      mesh: of its arguments.
      jaxpr: of the traced function.
      text: the scheduled HLO.
      stats: `compiled.memory_analysis()`.
      seconds: of the compilation.
    """

    target: Target
    mesh: Mesh
    jaxpr: Any
    text: str
    stats: Any
    seconds: float


def step(
    jitted: Any,
    *arguments: Any,
    target: Target | str,
    name: str = "",
    tokens: int = 0,
    model_flops: float = 0.0,
    say: Callable[[str], None] = lambda line: None,
) -> Rehearsal:
    """What one call of a jitted function costs on a target: does it fit, how long, what waits, on which line.

    Args:
      jitted: `jax.jit(function)`, of any function.
      arguments: what it is called with, as ShapeDtypeStructs (or pytrees of such) with NamedShardings on a mesh of the
        target's devices: `jaxpar.make_mesh(data=8, devices=jaxpar.load_target("v5e-8").devices())`.
      target: a name such as `v5p-64` or `h100x8` (docs/targets.md), or what `load_target` gives.
      name: for the report.
      tokens: of one call, all devices together; 0 = unknown, and the report has no tokens a second.
      model_flops: FLOPs of one call without recomputation, all devices together; 0 = unknown, and it has no MFU.
      say: called with a line at the start of each stage.

    Returns:
      A report as `jaxpar.rehearse.report.schema` says, a dict that is JSON as it stands. `rehearse.show` prints it.

    Raises:
      UserError: arguments that do not lie on the target's devices, a missing compiler, or a function that the compiler
        refuses.
    """
    target = load_target(target) if isinstance(target, str) else target
    mesh = mesh_of(arguments, target)
    say(f"compiling for {target.name}")
    try:
        compiled = compile_for(jitted, arguments, mesh, target)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"the compiler for {target.name} refuses this function: {compiler_said(str(error))}") from error
    say(f"compiled in {compiled.seconds:.0f} s; reading and playing the schedule")
    played = simulate(compiled.text, mesh, target, say, DRAWN_TRIPS, MOST_EVENTS, own_dirs())
    given = dict(zip(_names(jitted, len(arguments)), arguments, strict=True))
    taken = memory.of_arguments(compiled.stats, given, played.hardware.hbm_bytes)
    report = report_of(compiled, played, taken, None)
    report["config"] = name
    add_rates(report, compiled, played, model_flops, tokens)
    return report


def mesh_of(arguments: Any, target: Target) -> Mesh:
    """The one mesh of some arguments, which has the target's devices.

    Raises:
      UserError: no mesh, several, or one of other devices.
    """
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments)]
    named = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    meshes = {mesh for mesh in named if isinstance(mesh, Mesh)}
    how = f'make the mesh with devices=jaxpar.load_target("{target.name}").devices()'
    if len(meshes) != 1:
        found = "none has a NamedSharding" if not meshes else f"{len(meshes)} meshes were found"
        raise UserError(f"rehearse.step needs arguments on one mesh, and {found}: {how}")
    (mesh,) = meshes
    devices = list(mesh.devices.flat)
    platforms = {devices[0].platform} if target.name == "here" else {target.platform, _KINDS.get(target.platform)}
    wanted = len(devices) if target.name == "here" else target.device_count
    if devices[0].platform not in platforms or len(devices) != wanted:
        raise UserError(
            f"the arguments lie on {len(devices)} devices ({devices[0].device_kind}) and {target.name} has {wanted} "
            f"({target.platform}): {how}"
        )
    return mesh


def compile_for(
    jitted: Any, arguments: Any, mesh: Mesh, target: Target, host: Any = None, program: Any = None
) -> Compiled:
    """A jitted function, compiled by the target's own compiler.

    Args:
      jitted, arguments: as for `step`.
      mesh: of the arguments.
      target: what for.
      host: of each argument whether it lies in host memory, in a tree of their form; None = as their shardings say.
      program: the compiled function, where it is compiled already.
    """
    began = time.perf_counter()
    host = jax.tree.map(lambda _: False, arguments) if host is None else host
    traced, lowered = lowered_for(jitted, arguments, host, target.platform)
    compiled = program or lowered.compile()
    seconds = time.perf_counter() - began
    return Compiled(target, mesh, traced.jaxpr, compiled.as_text(), compiled.memory_analysis(), seconds)


def report_of(
    compiled: Compiled, played: StepSimulation, taken: Memory, requested: list[Requested] | None
) -> Rehearsal:
    """What can be said of any program, and of its memory what the caller knows of the arguments.

    Args:
      compiled, played: the program, and how it runs.
      taken: of the device's memory.
      requested: the collectives that were asked for; None = not known, and none is called unplanned.
    """
    program, timeline, hardware, target = played.program, played.timeline, played.hardware, compiled.target
    collectives = collective_rows(
        timeline.tasks, requested, dict(compiled.mesh.shape), lambda collective: played.on_links(collective).links
    )
    basis = seconds_by_basis(program, played.costs)
    computed = sum(seconds for kind, seconds in basis.items() if kind not in ("link", "host link"))
    report: Rehearsal = {
        "schema": SCHEMA, "config": "", "overrides": {}, "command": "",
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "target": {
            "name": target.name, "chip": hardware.chip or target.chip,
            "chips": compiled.mesh.size // hardware.devices_per_chip,  # here, a mesh may take some of the devices
            "slices": target.slices, "topology": target.topology, "hbm_bytes": hardware.hbm_bytes,
            "peak_flops": hardware.peak_flops.bfloat16 or None, "dtype": "bfloat16", "note": target.note,
        },
        "mesh": {str(axis): size for axis, size in compiled.mesh.shape.items() if size > 1},
        "compile_seconds": compiled.seconds,
        "memory": taken,
        "time": _time(timeline),
        "lines": _lines(timeline.tasks),
        "collectives": collectives,
        "critical_path": [
            {"name": task.name, "kind": task.kind, "seconds": seconds, "count": count, "scope": task.place.scope,
             "source": task.place.source}
            for task, count, seconds in timeline.critical_path[:50]
        ],
        "timeline": timeline_of(program, timeline.events),
        "findings": lint.large_copies(timeline.tasks, timeline.seconds),
        "unknown": dict(program.unknown),
        "notes": [*_notes(timeline), *queueing_notes(collectives), *program.notes, *played.costs.notes],
    }  # fmt: skip
    report["time"]["estimated_without_cycles"] = 1 - basis.get("cycles", 0.0) / computed if computed else 0.0
    return report


def add_rates(report: Rehearsal, compiled: Compiled, played: StepSimulation, model_flops: float, tokens: int) -> None:
    """MFU and HFU, and tokens a second, where the FLOPs and the tokens of one call are known (not 0)."""
    seconds, peak, size = played.timeline.seconds, report["target"]["peak_flops"], compiled.mesh.size
    done = sum(task.flops * count for task, count in walk(played.program.nodes))
    if peak and seconds:
        report["time"]["hfu"] = done / (peak * seconds)
        report["time"]["mfu"] = model_flops / size / (peak * seconds) if model_flops else None
    if tokens and seconds:
        report["time"]["tokens_per_second"] = tokens / seconds


def _names(jitted: Any, count: int) -> list[str]:
    """What the function calls its arguments."""
    try:
        names = list(inspect.signature(jitted).parameters)[:count]
    except (TypeError, ValueError):
        names = []
    return names if len(names) == count else [f"argument {place}" for place in range(count)]


def _time(timeline: Timeline) -> Time:
    moving = ("collective", "host_copy")
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
        "mfu": None,
        "hfu": None,
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


def _notes(timeline: Timeline) -> list[str]:
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
    return notes
