"""A config's training step on a target: `jaxpar.rehearse.step`, and what the config tells of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxpar.base.config import Config, check, require_settled
from jaxpar.base.errors import UserError
from jaxpar.base.mesh import MESH_AXES, MeshSpec, describe
from jaxpar.base.plan import Plan
from jaxpar.base.runtime import start
from jaxpar.base.sharding import Placement, placements
from jaxpar.hlo.parse import Module, parse
from jaxpar.models import Model
from jaxpar.rehearse._step import DRAWN_TRIPS, MOST_EVENTS, Compiled, add_rates, compile_for, report_of
from jaxpar.rehearse.report import lint, memory, memory_advice
from jaxpar.rehearse.report.collectives import in_float32
from jaxpar.rehearse.report.schema import CollectiveRow, LintFinding, Memory, Rehearsal
from jaxpar.rehearse.requested_collectives import Requested, requested_collectives
from jaxpar.rehearse.simulate import StepSimulation, simulate
from jaxpar.rehearse.targets import Target, check_mesh, load_target
from jaxpar.rehearse.timeline.timeline import Timeline
from jaxpar.train.plans import make_plan, plan_notes
from jaxpar.train.state import in_host, param_shapes, state_shapes
from jaxpar.train.state_bytes import by_memory, state_of
from jaxpar.train.step import make_train_step, step_shapes


class CompiledStep(NamedTuple):
    """The training step of a config, compiled for a target."""

    config: Config
    plan: Plan
    model: Model
    requested: list[Requested]
    compiled: Compiled
    state: Any
    batch: Any
    """ShapeDtypeStructs with shardings."""
    host: Any
    """Of each array of the state, whether the plan has it in host memory."""
    notes: tuple[str, ...] = ()
    """What could not be counted exactly of the plan's collectives."""


def rehearse(
    config: Config, target: Target | str, name: str = "", command: str = "", tokens: float = 1e12,
    say: Callable[[str], None] = lambda line: None, program: Any = None,
) -> Rehearsal:  # fmt: skip
    """The report of one training step on a target; `jaxpar.rehearse.report.schema` says what is in it.

    Args:
      config: the experiment, settled (`jaxpar.plan.resolve`). Its mesh must fit the target; `mesh.distributed` and
        `mesh.platform` do not count.
      target: a name such as `h100x64`, or what `load_target` gives.
      name: of the config, for the report.
      command: what was typed, for the report.
      tokens: length of the training that `time.days` speaks of.
      say: called with a line at the start of each stage.
      program: the step where it is compiled already (`jaxpar.plan.resolve_and_compile`).

    Raises:
      UserError: a mesh that does not fit the target, a missing compiler, or a step that the compiler refuses because
        it does not fit the memory.
    """
    target = load_target(target) if isinstance(target, str) else target
    step = compile_step(config, target, say, program)
    say(f"compiled in {step.compiled.seconds:.0f} s; reading and playing the schedule")
    mesh = step.plan.mesh
    played = simulate(step.compiled.text, mesh, target, say, DRAWN_TRIPS, MOST_EVENTS)
    report = report_of(step.compiled, played, _memory(step, played, parse(step.compiled.text)), step.requested)
    _add_config(report, step, played)
    if rate := report["time"].get("tokens_per_second"):
        report["time"]["days"] = {f"{tokens:.3g}": tokens / rate / 86400}
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
    return config, target.devices()


def compile_step(
    config: Config, target: Target, say: Callable[[str], None] = lambda line: None, program: Any = None
) -> CompiledStep:
    """The training step of a config, compiled by the target's own compiler: see `rehearse`."""
    config, devices = on_target(config, target)
    require_settled(config)
    plan, model = make_plan(config, devices), Model(config.model)
    across = describe({f"dcn.{axis}": getattr(config.mesh.dcn, axis) for axis in MESH_AXES})
    inside = describe({axis: getattr(config.mesh, axis) for axis in MESH_AXES})
    say(f"compiling for {target.name}: {inside}" + (f", {across}" if "dcn" in across else ""))
    state, batch = step_shapes(model, config, plan)
    host = in_host(state_shapes(model, config, plan), model, plan)
    flags = host, jax.tree.map(lambda _: False, batch)
    try:
        compiled = compile_for(make_train_step(model, config, plan), (state, batch), plan.mesh, target, flags, program)
    except jax.errors.JaxRuntimeError as error:
        there, _ = by_memory(state, host if target.platform != "cpu" else None)
        said = memory_advice.refusal(str(error), target.name, config, plan, there.params, there.opt_state)
        raise UserError(said) from error
    notes = plan_notes(config, plan)
    asked = requested_collectives(compiled.jaxpr, plan.mesh, notes.append)
    asked = in_float32(asked) if target.platform == "cpu" else asked
    return CompiledStep(config, plan, model, asked, compiled, state, batch, host, tuple(notes))


def mesh_here(mesh: MeshSpec) -> MeshSpec:
    """The mesh on this machine's devices, simulated ones if it asks for those."""
    return dataclasses.replace(mesh, distributed=False, platform="cpu" if mesh.platform == "cpu" else "auto")


def _memory(step: CompiledStep, played: StepSimulation, module: Module) -> Memory:
    """A device's memory by what the config knows, with what to try where it is too little."""
    config, plan, platform, has = step.config, step.plan, step.compiled.target.platform, played.hardware.hbm_bytes
    taken = memory.account(
        step.compiled.stats, step.state, step.batch, module, config.model.layers, has,
        step.host if platform != "cpu" else None, state_of(config, plan, platform).gradients,
    )  # fmt: skip
    if not taken["fits"]:
        taken["advice"] = memory_advice.advice(taken["categories"], taken["total"], has, config, plan)
    return taken


def _add_config(report: Rehearsal, step: CompiledStep, played: StepSimulation) -> None:
    """To the report of a program what its config tells of it."""
    config, plan, model, hardware = step.config, step.plan, step.model, played.hardware
    tokens = config.train.batch * config.data.seq_len
    peak = getattr(hardware.peak_flops, config.precision.compute) or hardware.peak_flops.bfloat16 or None
    report["target"]["peak_flops"], report["target"]["dtype"] = peak, config.precision.compute
    report["model"] = {"family": config.model.family, "parameters": model.parameter_count()}
    report["batch"] = {
        "sequences": config.train.batch, "seq_len": config.data.seq_len, "tokens": tokens,
        "accumulation": config.train.accumulation,
    }  # fmt: skip
    add_rates(report, step.compiled, played, model.flops_per_token(config.data.seq_len) * tokens, tokens)
    rows = placements(param_shapes(model, plan), model.axes, plan)
    report["findings"] = _findings(step, played.timeline, report["collectives"], rows)
    report["shardings"] = [
        {"name": row.name, "shape": list(row.shape), "axes": list(row.axes), "spec": str(row.spec),
         "bytes_per_device": row.bytes_per_device}
        for row in rows
    ]  # fmt: skip
    dropout = ["dropout is on: its random bits are part of the step"] if config.model.dropout else []
    report["notes"] = [*dropout, *step.notes, *report["notes"]]


def _findings(
    step: CompiledStep, timeline: Timeline, collectives: list[CollectiveRow], rows: list[Placement]
) -> list[LintFinding]:
    config, plan = step.config, step.plan
    found = [
        *lint.unplanned_collectives(collectives, lint.logical_axes(plan)),
        *lint.replicated_parameters(rows, plan),
        *lint.replicated_activations(timeline.tasks, config, plan),
        *lint.large_copies(timeline.tasks, timeline.seconds, lint.local_sizes(config, plan)),
    ]
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda finding: (order[finding["severity"]], -finding["seconds"], -finding["bytes"]))
