"""The rehearsal of a config's training step: `jaxpar.rehearse.step`, with what the config adds to
its report.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax

from jaxpar.base.config import Config, load_config
from jaxpar.base.config.checks import check, require_settled
from jaxpar.base.console import bytes_text
from jaxpar.base.errors import Say
from jaxpar.base.jax_compat import without_fusion
from jaxpar.base.layout.mesh import MESH_AXES, describe
from jaxpar.base.layout.placements import placements
from jaxpar.base.process.runtime import start
from jaxpar.base.toml import flat_text
from jaxpar.hlo.fusions import joining_fusions, operations
from jaxpar.hlo.program.parse import parse_module
from jaxpar.rehearse.calibration import calibrate, seconds_of_run, written_seconds
from jaxpar.rehearse.compiled import Compiled, compile_for
from jaxpar.rehearse.graph.report import edges_of, fused_row
from jaxpar.rehearse.graph.runs import unrolled
from jaxpar.rehearse.how_sure import interval_of
from jaxpar.rehearse.program_report import report_of
from jaxpar.rehearse.report import memory
from jaxpar.rehearse.report.schema import Calibration, Memory, Rehearsal
from jaxpar.rehearse.report.task_graph import Fused
from jaxpar.rehearse.requested_collectives import Requested, requested_collectives
from jaxpar.rehearse.targets import HERE, Target, check_mesh, load_target, target_here
from jaxpar.rehearse.timeline import read_and_price, replay
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment, plan_notes, with_config
from jaxpar.train.state_memory import more_devices, more_microbatches, state_bytes
from jaxpar.train.step import make_train_step
from jaxpar.train.teacher_memory import teacher_bytes


class CompiledStep(NamedTuple):
    """The training step of an experiment, compiled for a target."""

    experiment: Experiment
    requested: list[Requested]
    compiled: Compiled
    notes: tuple[str, ...] = ()
    """The notes on what could not be counted exactly of the plan's collectives."""


class MeasuredStep(NamedTuple):
    """The training step of a config that was measured."""

    config: Config
    seconds: float


def measured_step(text: str, config: Config) -> MeasuredStep:
    """Read a measured step.

    Args:
      text: a run folder, or the seconds of a step of `config`: `1.453s`, `850ms`.
      config: the config that a number is of.

    Raises:
      UserError: it is neither, or the run has measured no step.
    """
    if seconds := written_seconds(text):
        return MeasuredStep(config, seconds)
    seconds = seconds_of_run(text)
    return MeasuredStep(load_config(text), seconds)


def rehearse(
    experiment: Config | Experiment,
    target: Target | str,
    name: str = "",
    command: str = "",
    say: Say = lambda line: None,
    program: jax.stages.Compiled | None = None,
    graph: bool = False,
    measured: MeasuredStep | None = None,
) -> Rehearsal:
    """Rehearse one training step on a target; `jaxpar.rehearse.report.schema` describes the report.

    Args:
      experiment: the experiment, or the config of one, settled (`jaxpar.plan.resolve`). Its mesh
        must fit the target; `mesh.distributed` and `mesh.platform` do not count.
      target: a name such as `h100x64`, or the result of `load_target`; `here` = this machine.
      name: the name of the config in the report.
      command: the command line in the report.
      say: is called with a line at the start of each stage.
      program: the compiled step if it is compiled already (`jaxpar.plan.resolve_and_compile`).
      graph: whether the report has the task graph too, under `graph`.
      measured: a step that was measured on this target, whose own rehearsal says by what the
        seconds of compute are scaled; None = they are those of the chip's prices.

    Returns:
      The report, a dict that is JSON as it stands.

    Raises:
      UserError: the mesh does not fit the target, a compiler is missing, or the compiler refuses
        the step because it does not fit the memory.
    """
    if not isinstance(target, Target):
        target = target_of(experiment, target, say)
    scale = None
    if measured is not None:
        say("the step that was measured, to scale by")
        other = compile_step(measured.config, target, say)
        target, scale = calibrate(other.compiled, measured.seconds)
    step = compile_step(experiment, target, say, program)
    return report_of_step(step, name, command, say, graph, scale)


def report_of_step(
    step: CompiledStep,
    name: str = "",
    command: str = "",
    say: Say = lambda line: None,
    graph: bool = False,
    scale: Calibration | None = None,
) -> Rehearsal:
    """Report what a compiled step says; other arguments are those of `rehearse`.

    Args:
      scale: by what a measured step has scaled the seconds of compute; None = none was given.

    Raises:
      UserError: the program cannot be read.
    """
    config = step.experiment.config
    plan = step.experiment.plan
    model = step.experiment.model
    of_a_step = step.experiment.tokens
    report = report_of(
        step.compiled,
        _memory(step),
        say,
        name=name,
        tokens=of_a_step,
        requested=step.requested,
        model_flops=model.flops_per_token(config.data.seq_len) * of_a_step,
        dtype=config.precision.compute,
        plan=plan if model.has_blocks else None,
        parameters=placements(step.experiment.state.params, model.axes, plan),
        graph=graph,
    )
    report["command"] = command
    report["settings"] = flat_text(config)
    report["interval"] = interval_of(
        report["time"]["step"],
        step.compiled.target.chip,
        step.compiled.target.hardware.chips,
        config.model.family,
        scale is not None,
    )
    if scale is not None:
        report["calibration"] = scale
    report["model"] = {"family": config.model.family, "parameters": model.parameter_count()}
    report["batch"] = {
        "sequences": config.train.batch,
        "seq_len": config.data.seq_len,
        "tokens": of_a_step,
        "accumulation": config.train.accumulation,
    }
    if config.model.dropout:
        dropout = ["dropout is on: its random bits are part of the step"]
    else:
        dropout = []
    teacher = []
    if taken := teacher_bytes(step.experiment):
        teacher = [
            f"a teacher runs beside: {bytes_text(taken)} of a device, and its own time, are no "
            "part of this step"
        ]
    report["notes"] = [*dropout, *teacher, *step.notes, *report["notes"]]
    return report


def target_of(experiment: Config | Experiment, name: str, say: Say = lambda line: None) -> Target:
    """Look up the target of a name for a config: of this machine, `here`, the devices that the
    config's mesh asks for.

    Args:
      experiment: the experiment, or the config of one.
      name: the name of the target.
      say: is called with a line before anything is measured.

    Raises:
      UserError: there is no such target, or the devices cannot be had.
    """
    if name != HERE:
        return load_target(name)
    if isinstance(experiment, Config):
        devices = start(check(experiment).mesh)
    else:
        devices = experiment.devices
    return target_here(devices, say)


def unfused(experiment: Experiment, target: Target, say: Say = lambda line: None) -> Fused:
    """Compile the training step of an experiment without XLA's fusion passes, and count it.

    Args:
      say: is called with a line as compiling begins.

    Returns:
      Its tasks, their runs and the edges between these, the bytes that they move, and the seconds
      of a step.

    Raises:
      UserError: `rehearse` would refuse the step; without fusion a step takes more memory.
    """
    experiment = on_target(experiment, target)
    config = experiment.config
    options = without_fusion(experiment.plan.mesh)
    words = tuple(f"{name}={value}" for name, value in options.items())
    compiler = replace(config.compiler, options=(*config.compiler.options, *words))
    say("once more without XLA's fusion passes")
    bare = with_config(experiment, replace(config, compiler=compiler), target.devices())
    compiled = compile_step(bare, target, say).compiled
    if left := joining_fusions(compiled.text):
        say(f"{left} fusions of several operations are left in it: XLA makes them elsewhere too")
    priced = read_and_price(compiled.text, compiled.mesh, target)
    seconds = replay(priced.program, priced.costs).seconds
    edges = edges_of(unrolled(priced.program, priced.costs))
    return fused_row(operations(priced.program), seconds, edges)


def on_target(experiment: Config | Experiment, target: Target) -> Experiment:
    """Return an experiment as it runs on a target's devices; the given one where it is there
    already.

    Args:
      experiment: the experiment, or the config of one; `mesh.distributed` does not count.

    Raises:
      UserError: the config is wrong in itself, its mesh does not fit the target, or the target's
        compiler is missing.
    """
    if isinstance(experiment, Config):
        given = experiment
    else:
        given = experiment.config
    config = replace(given, mesh=replace(given.mesh, distributed=False))
    check_mesh(check(config).mesh, target)
    if isinstance(experiment, Config):
        return make_experiment(config, target.devices())
    if config == given and experiment.devices == target.devices():
        return experiment
    return with_config(experiment, config, target.devices())


def compile_step(
    experiment: Config | Experiment,
    target: Target,
    say: Say = lambda line: None,
    program: jax.stages.Compiled | None = None,
) -> CompiledStep:
    """Compile the training step of an experiment with the target's own compiler.

    Args:
      experiment: the experiment, or the config of one, with every setting chosen.
      say: is called with a line as compiling begins.
      program: the compiled step if it is compiled already.

    Returns:
      The step, the collectives that its plan asks for, and notes on what could not be counted
      exactly.

    Raises:
      UserError: `rehearse` would refuse the step, or a setting is still to be chosen.
      DoesNotFit: the compiler refuses the step because a device has too little memory.
    """
    experiment = on_target(experiment, target)
    config = experiment.config
    plan = experiment.plan
    require_settled(config)
    across = describe({f"dcn.{axis}": getattr(config.mesh.dcn, axis) for axis in MESH_AXES})
    inside = describe({axis: getattr(config.mesh, axis) for axis in MESH_AXES})
    say(f"compiling for {target.name}: {inside}" + (f", {across}" if "dcn" in across else ""))
    compiled = compile_for(
        make_train_step(experiment),
        (experiment.state, experiment.batch),
        plan.mesh,
        target,
        program,
        advice(experiment, target.platform),
        host=(experiment.in_host, jax.tree.map(lambda _: False, experiment.batch)),
    )
    notes = plan_notes(experiment)
    asked = requested_collectives(compiled.jaxpr, plan.mesh, notes.append)
    return CompiledStep(experiment, asked, compiled, tuple(notes))


def fits(step: CompiledStep) -> bool:
    """Return whether a device has the memory that a compiled step takes."""
    return _memory(step)["fits"]


def advice(experiment: Experiment, platform: str) -> str:
    """List what to try where a step does not fit; a rehearsal says what each saves.

    Args:
      platform: the platform that the step is compiled for, `tpu` or `cuda`.

    Returns:
      Settings to try, and what parameters, optimizer and gradients take over all devices, in one
      line.
    """
    plan = experiment.plan
    held = state_bytes(experiment, platform)
    mesh = plan.mesh
    stages = plan.size("stage")
    state = bytes_text(
        mesh.size * (held.parameters.device + held.optimizer.device + held.gradients.device)
    )
    if stages == 1:
        tries = ["memory.budget=auto"]
    else:
        tries = ["pipeline.stash=stage"] * (plan.pipeline.stash != "stage")
    tries += ["memory.policy=full"] * (plan.remat != "full")
    tries += [more_devices(experiment), more_microbatches(experiment)]
    return (
        f"try {', '.join(filter(None, tries))}; parameters, optimizer and gradients are {state} "
        f"over all {mesh.size} devices"
    )


def _memory(step: CompiledStep) -> Memory:
    """Account for a device's memory by the parts that the config knows, with advice where it is too
    small.
    """
    experiment = step.experiment
    compiled = step.compiled
    target = compiled.target
    held = state_bytes(experiment, target.platform)
    arguments = {name: getattr(held, name).device for name in ("parameters", "optimizer", "batch")}
    kept = memory.saved_bytes(parse_module(compiled.text), experiment.config.model.layers)
    has = target.hardware.hbm_bytes
    gradients = held.gradients.device
    taken = memory.account(compiled.stats, target.platform, arguments, has, kept, gradients)
    if not taken["fits"]:
        taken["advice"] = [advice(experiment, target.platform)]
    return taken
