"""Any jitted function is compiled here for hardware that is absent, and its program is read and
played out.

What only a config knows (which parameters, which tokens, which collectives were asked for) is not
in the report of another function; `jaxpar.rehearse.of_config` adds it for a config's step.
"""

from __future__ import annotations

import datetime
import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxpar.base.arguments import require_number, require_whole
from jaxpar.base.compiled_for import compiling_for
from jaxpar.base.compiler import step_options
from jaxpar.base.errors import UserError, short
from jaxpar.base.hardware import PeakFlops
from jaxpar.base.jax_compat import ClosedJaxpr, Option, Options, options_of
from jaxpar.base.layout.placements import Placement
from jaxpar.base.layout.plan import Plan
from jaxpar.base.machine import versions
from jaxpar.hlo.origin import OWN, PackageDirs, default_dirs
from jaxpar.hlo.parse import parse_module
from jaxpar.hlo.tasks import Origin
from jaxpar.parallel.host_memory import compile_absent, lower_for
from jaxpar.rehearse.arguments import argument_bytes, place_arguments
from jaxpar.rehearse.cost import peak_name
from jaxpar.rehearse.graph.report import task_graph_of
from jaxpar.rehearse.report import lint, memory
from jaxpar.rehearse.report.alive import alive_arrays
from jaxpar.rehearse.report.collectives import collective_rows
from jaxpar.rehearse.report.kernels import stand_ins
from jaxpar.rehearse.report.schema import SCHEMA, Line, Memory, Rehearsal, TargetFacts, Time
from jaxpar.rehearse.report.tables import seconds_text
from jaxpar.rehearse.report.trace import timeline_of
from jaxpar.rehearse.requested_collectives import Requested
from jaxpar.rehearse.targets import Target, load_target
from jaxpar.rehearse.timeline import MOVING, TaskTime, Timeline, read_and_price, replay

PyTree = Any
_DRAWN_TRIPS = 100
_MOST_EVENTS = 60_000


class Compiled(NamedTuple):
    """A jitted function compiled for a target, with the mesh of its arguments and the jaxpr of its
    trace.
    """

    target: Target
    mesh: Mesh
    jaxpr: ClosedJaxpr
    program: jax.stages.Compiled
    text: str
    """The scheduled HLO."""
    stats: Any
    """The result of `program.memory_analysis()`."""
    seconds: float
    """How long the compiler took."""
    options: Options
    """The options that the compiler was given."""


def step(
    jitted: jax.stages.Wrapped,
    *arguments: PyTree,
    target: Target | str,
    name: str = "",
    tokens: int = 0,
    model_flops: float = 0.0,
    say: Callable[[str], None] = lambda line: None,
    compiler_options: Mapping[str, Option] | None = None,
    keywords: Mapping[str, PyTree] | None = None,
    graph: bool = False,
) -> Rehearsal:
    """Say what a call of a jitted function costs on a target: whether it fits, how long it takes,
    what waits and where.

    Args:
      jitted: the result of `jax.jit(function)` for any function.
      arguments: its arguments as ShapeDtypeStructs or arrays (or pytrees of them), with
        NamedShardings on a mesh of the target's devices: `jaxpar.make_mesh(data=8,
        devices=jaxpar.load_target("v5e-8").devices())`. Without any sharding, theirs or the
        function's, all is on one device of the target; beside others, an array without one lies on
        their mesh as the compiler chooses. The report's notes say either.
      target: a name such as `v5p-64` or `h100x8` (docs/targets.md), or the result of `load_target`.
      name: the name that the report shows.
      tokens: the tokens of one call, all devices together; 0 = not known, and the report has no
        tokens a second.
      model_flops: the FLOPs of one call without recomputation, all devices together; 0 = not known,
        and no MFU.
      say: is called with a line at the start of each stage.
      compiler_options: options of XLA beside those of `jax.jit(..., compiler_options=...)`, which
        win; None = those that `train` takes on this chip, which `rehearse.compiler_options(mesh)`
        gives to any program.
      keywords: arguments that the function takes by name, of the form of the others.
      graph: whether the report has the task graph too, under `graph`.

    Returns:
      A report of the form in `jaxpar.rehearse.report.schema`, a dict that is JSON as it stands.
      `rehearse.show` prints it, and `rehearse.write_trace` writes its timeline.

    Raises:
      UserError: an argument is of another kind, the arguments lie on other devices than the
        target's, a compiler is missing, or the compiler refuses the function.
    """
    if not isinstance(jitted, jax.stages.Wrapped):
        raise UserError(
            f"rehearse.step takes a jitted function, and was given {short(jitted)}: write "
            "jax.jit(step)"
        )
    if not isinstance(compiler_options, Mapping | None):
        given_options = f"and was given {short(compiler_options)}"
        raise UserError(
            f"rehearse.step takes compiler_options by name, {given_options}: "
            'write {"xla_...": True}'
        )
    require_whole("rehearse.step", "tokens", tokens, least=0)
    require_number("rehearse.step", "model_flops", model_flops, least=0)
    if not isinstance(target, Target):
        target = load_target(target)
    names = _names(jitted, len(arguments))
    placed = place_arguments(jitted, names, arguments, keywords or {}, target)
    if compiler_options is None:
        options = step_options(placed.mesh)
    else:
        options = compiler_options
    say(f"compiling for {target.name}")
    if placed.note:
        say(placed.note)
    compiled = compile_for(
        jitted,
        placed.arguments,
        placed.mesh,
        target,
        options=options,
        keywords=placed.keywords,
    )
    given = dict(zip(names, placed.arguments, strict=True)) | placed.keywords
    known = argument_bytes(given, compiled.program)
    taken = memory.account(compiled.stats, target.platform, known, target.hardware.hbm_bytes)
    dirs = (OWN, *default_dirs())
    report = report_of(
        compiled,
        taken,
        say,
        dirs,
        name=name,
        tokens=tokens,
        model_flops=model_flops,
        graph=graph,
    )
    if placed.note:
        report["notes"].insert(0, placed.note)
    return report


def compile_for(
    jitted: jax.stages.Wrapped,
    arguments: tuple[PyTree, ...],
    mesh: Mesh,
    target: Target,
    program: jax.stages.Compiled | None = None,
    advice: str = "",
    host: PyTree = None,
    options: Mapping[str, Option] | None = None,
    keywords: Mapping[str, PyTree] | None = None,
) -> Compiled:
    """Compile a jitted function with the target's own compiler.

    Args:
      jitted, arguments, target: as for `step`.
      mesh: the mesh of the arguments.
      program: the compiled function if it is compiled already.
      advice: what would help a step that does not fit.
      host: whether each argument lies in host memory, in a tree of their form; None = as their
        shardings say.
      options: options of the compiler beside those of the jitted function, which win.
      keywords: as for `step`; none of them lies in host memory.

    Returns:
      The compiled function with its jaxpr, text and memory, the seconds that compiling took, and
      the options that were asked for.

    Raises:
      UserError: the compiler refuses the function, or an option.
      DoesNotFit: it refuses the function because a device has too little memory.
    """
    began = time.perf_counter()
    if host is None:
        host = jax.tree.map(lambda _: False, arguments)
    try:
        with compiling_for(mesh.devices.flat[0]):
            traced, lowered = lower_for(jitted, arguments, host, target.platform, keywords)
        own = options_of(lowered)
        beside = {name: value for name, value in (options or {}).items() if name not in own}
        compiled = program or compile_absent(lowered, beside)
    except jax.errors.JaxRuntimeError as error:
        if memory.needs_and_has(str(error)):
            refused = memory.DoesNotFit
        else:
            refused = UserError
        raise refused(memory.refusal(str(error), target.name, advice)) from error
    seconds = time.perf_counter() - began
    text = compiled.as_text() or ""
    return Compiled(
        target,
        mesh,
        traced.jaxpr,
        compiled,
        text,
        compiled.memory_analysis(),
        seconds,
        beside | own,
    )


def report_of(
    compiled: Compiled,
    taken: Memory,
    say: Callable[[str], None],
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
      compiled: the function.
      taken: a device's memory.
      package_dirs: where lines are looked for: see `read_program`.
      say, name, tokens, model_flops: see `step`.
      requested: the collectives that were asked for; None = not known, and none is called
        unplanned.
      dtype: the dtype of the matmuls; MFU and HFU are shares of its peak. Empty = that of most of
        their FLOPs.
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
    kernels = stand_ins(compiled.text)
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
        "compiler_options": dict(compiled.options),
        "kernels": kernels,
        "memory": taken,
        "time": _time(timeline, tokens, model_flops / mesh.size, peak),
        "lines": _lines(timeline.tasks),
        "collectives": collectives,
        "timeline": timeline_of(timeline.events),
        "findings": lint.find_all(linted),
        "notes": [*_notes(timeline), *priced.program.notes, *priced.notes],
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


def _add_alive(report: Rehearsal, text: str, tasks: Sequence[TaskTime]) -> None:
    """Add what is in memory when, where the program says in what order it runs.

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
    """The dtype of most of a program's FLOPs, of those that the chip has a peak for: bfloat16 where
    there is none.
    """
    done: defaultdict[str, float] = defaultdict(float)
    for row in tasks:
        name = peak_name(row.task.dtype)
        done[name if getattr(peaks, name, 0.0) else "bfloat16"] += row.task.flops * row.count
    return max(done, key=done.__getitem__, default="bfloat16")


def _names(jitted: jax.stages.Wrapped, count: int) -> list[str]:
    """The names that the function gives its arguments."""
    try:
        names = list(inspect.signature(jitted).parameters)[:count]
    except (TypeError, ValueError):
        names = []
    if len(names) == count:
        return names
    return [f"argument {index}" for index in range(count)]


def _time(timeline: Timeline, tokens: int, model_flops: float, peak: float | None) -> Time:
    """The step's seconds by what takes them, and its rates where FLOPs, tokens and the peak are
    known.
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


def _lines(tasks: Iterable[TaskTime]) -> list[Line]:
    """The time by line of the model and phase, the longest first."""
    lines: dict[Origin, Line] = {}
    for row in tasks:
        origin = row.task.origin
        task = row.task
        line = lines.setdefault(
            origin,
            {
                "scope": origin.scope,
                "source": origin.source,
                "phase": origin.phase,
                "compute": 0.0,
                "communication": 0.0,
                "exposed": 0.0,
                "flops": 0.0,
                "bytes": 0,
                "count": 0,
            },
        )
        if task.kind in MOVING:
            line["communication"] += row.seconds
        elif not task.asynchronous:
            line["compute"] += row.seconds
        line["exposed"] += row.exposed
        line["flops"] += task.flops * row.count
        line["bytes"] += task.bytes * row.count
        line["count"] += row.count
    return sorted(
        lines.values(),
        key=lambda line: -(line["compute"] + line["exposed"]),
    )


def _notes(timeline: Timeline) -> list[str]:
    """Notes on how far the figures can be trusted."""
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
    if kernels:
        took = seconds_text(sum(row.seconds for row in kernels))
        notes.append(
            f"{len(kernels)} kernels carry no cycles: {took} by their FLOPs at the peak, a "
            "lower bound"
        )
    return notes
