"""This module settles what a config leaves open: its overlap, and a memory budget.

A budget is the search of `jaxpar.plan.engine` with all keys fixed but those of memory
(`jaxpar.plan.budget_space`). The plan that should be the fastest is compiled, and what the compiler
says corrects the closed forms for all others: three compilations at most.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax

from jaxpar.base.compiled_for import compiling_for
from jaxpar.base.config import Config
from jaxpar.base.console import bytes_text
from jaxpar.base.errors import Say, UserError
from jaxpar.base.hardware import Hardware, hardware_of, lowering_platform, usable_bytes
from jaxpar.base.jax_compat import compiler_message
from jaxpar.base.machine import memory_of
from jaxpar.parallel.host_memory import compile_absent, lower_for
from jaxpar.plan.budget_space import Question, config_of, question_of, reasons, space_of
from jaxpar.plan.choose_overlap import choose_overlap
from jaxpar.plan.engine import (
    MARGIN,
    Correction,
    Outcome,
    Priced,
    rehearse_finalists,
    winner_of,
)
from jaxpar.plan.figures import Figures
from jaxpar.rehearse.report.memory import allocated_bytes, needs_and_has
from jaxpar.rehearse.targets import Target
from jaxpar.rehearse.timeline import Timeline, simulate
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment, with_config
from jaxpar.train.state_memory import more_devices, more_microbatches
from jaxpar.train.step import make_train_step
from jaxpar.train.teacher_memory import teacher_bytes

_ROUNDS = 3  # the most compilations
_UNITS = {
    "": 1,
    "B": 1,
    **{
        f"{k}{suffix}": base ** (n + 1)
        for n, k in enumerate("KMGT")
        for suffix, base in (("iB", 1024), ("B", 1000), ("", 1024))
    },
}


_Given = TypeVar("_Given", Config, Experiment)


def resolve(
    experiment: _Given,
    target: Target | None = None,
    say: Say = lambda line: None,
) -> _Given:
    """Replace every `overlap = auto` of an experiment and its `memory.budget` by what was found
    best.

    Args:
      experiment: an experiment, or a config, of which one is made. Its mesh must fit the target.
      target: the target to settle it for, from `jaxpar.rehearse.targets.load_target`; None = the
        devices of the experiment, or all that are here.
      say: is called with a line for each form that is tried and for each compilation.

    Returns:
      The settled experiment, or the settled config where a config was given.

    Raises:
      UserError: the mesh does not fit, or the budget is below what the plan takes with the least
        kept.
    """
    if isinstance(experiment, Config):
        if not experiment.overlap.is_open and not experiment.memory.budget:
            return experiment
        made = make_experiment(experiment, None if target is None else target.devices())
        return resolve_and_compile(made, target, say)[0].config
    return resolve_and_compile(experiment, target, say)[0]


def resolve_and_compile(
    experiment: Experiment, target: Target | None = None, say: Say = lambda line: None
) -> tuple[Experiment, jax.stages.Compiled | None]:
    """Settle an experiment as `resolve` does, and also return its step if a budget had it compiled,
    or else None.

    The arguments and errors are those of `resolve`.
    """
    if target is not None and experiment.devices != target.devices():
        experiment = with_config(experiment, experiment.config, target.devices())
    experiment = choose_overlap(experiment, target, say)
    if not experiment.config.memory.budget:
        return experiment, None
    if target is not None:
        hardware = target.hardware
    else:
        hardware = hardware_of(experiment.devices[0].device_kind) or Hardware()
    best, _ = solve_budget(experiment, experiment.platform, hardware, say, target)
    return best.experiment, best.program


class CompiledPlan(NamedTuple):
    """A plan that was compiled.

    Attributes:
      plan: the plan, as the closed forms have it.
      experiment: the experiment with it.
      predicted: the bytes of a device that were predicted.
      compiled: the bytes of a device that the compiler says.
      played: the step in the rehearsal; None = not played, because the devices are at hand.
      program: the compiled step; None = the compiler refused it.
    """

    plan: Priced
    experiment: Experiment
    predicted: int
    compiled: int
    played: Timeline | None = None
    program: jax.stages.Compiled | None = None


def solve_budget(
    experiment: Experiment,
    platform: str,
    hardware: Hardware,
    say: Say = lambda line: None,
    target: Target | None = None,
) -> tuple[CompiledPlan, list[CompiledPlan]]:
    """Find the fastest settings that fit `memory.budget`.

    What `memory.may` names may change as well as the activations. If the devices belong to a
    target, its rehearsal says how long compute waits for the host, and which of the compiled
    assignments is the fastest.

    Args:
      experiment: an experiment with a budget.
      platform: the platform that its steps are compiled for.
      hardware: the figures of its devices.
      say: gets a line before and after each compilation, and one for the answer.
      target: the target that the devices belong to; None = they are at hand.

    Returns:
      The settings, and all that was compiled on the way to them.

    Raises:
      UserError: the budget is no size, or below what the plan takes with the least kept; the
        message says what would lower that.
    """
    asked = experiment.config.memory.budget
    budget = budget_bytes(asked, hardware, experiment.devices[0])
    if taken := teacher_bytes(experiment):
        say(f"a teacher runs beside: {bytes_text(taken)} of {bytes_text(budget)} are its own")
        budget -= taken
    question = question_of(experiment, platform, hardware, target, say)
    space = space_of(question, budget, MARGIN)
    tried = list[CompiledPlan]()
    last = ""

    def measure(plans: Sequence[Priced], known: Correction) -> list[Outcome]:
        nonlocal last
        (plan,) = plans
        predicted = round(known.bytes(plan))
        say(
            f"compiling {len(tried) + 1} of at most {_ROUNDS}{last}: "
            f"{reasons(plan, question)}; "
            f"predicted {bytes_text(predicted)} of {bytes_text(budget)}"
        )
        began = time.perf_counter()
        one = _compile(question, plan, predicted, platform, target)
        last = f" (the last took {time.perf_counter() - began:.0f} s)"
        tried.append(one)
        sizes = f"predicted {bytes_text(one.predicted)}, compiled {bytes_text(one.compiled)}"
        say(f"{sizes} of {bytes_text(budget)}{_rehearsal_text(one)}")
        return [Outcome(_figures(one, known, experiment.tokens, budget))]

    correction, best = rehearse_finalists(space, measure, _ROUNDS)
    winner = winner_of(best, correction)
    found = next((one for one in tried if one.plan == winner and one.compiled <= budget), None)
    if found is None:
        nearest = min(tried, key=lambda one: one.compiled)
        raise UserError(_too_small_message(budget, nearest, space.smallest[0], experiment))
    why = reasons(found.plan, question)
    say(f"memory.budget {asked}: {why}{_rehearsal_text(found)}")
    return found, tried


def _compile(
    question: Question, plan: Priced, predicted: int, platform: str, target: Target | None
) -> CompiledPlan:
    """Compile a plan, and for a target play it out."""
    assigned = with_config(question.experiment, config_of(question, plan.candidate))
    allocated, text, program = compiled_bytes(assigned, platform)
    played = None
    if target is not None and text:
        played = simulate(text, assigned.plan.mesh, target)
    return CompiledPlan(plan, assigned, predicted, allocated, played, program)


def compiled_bytes(
    experiment: Experiment, platform: str
) -> tuple[int, str, jax.stages.Compiled | None]:
    """Compile the training step, to see the bytes of a device that it allocates.

    Args:
      experiment: the experiment, which has no budget.
      platform: the platform that it is compiled for.

    Returns:
      The bytes, the text of the program and the program; where the compiler refuses it for its
      memory the bytes that it names, an empty text and None.

    Raises:
      UserError: the compiler refuses the step for another reason.
    """
    arguments = (experiment.state, experiment.batch)
    batch_in_host = jax.tree.map(lambda _: False, experiment.batch)
    host = (experiment.in_host, batch_in_host)
    step = make_train_step(experiment)
    # A plan of one device has no mesh from which a kernel could see the chip.
    with compiling_for(experiment.devices[0]):
        _, lowered = lower_for(step, arguments, host, platform)
    try:
        compiled = compile_absent(lowered)
        return (
            allocated_bytes(compiled.memory_analysis(), platform),
            compiled.as_text() or "",
            compiled,
        )
    except jax.errors.JaxRuntimeError as error:
        found = needs_and_has(str(error))
        if found is None:
            raise UserError(
                f"the compiler refuses this step: {compiler_message(str(error))}"
            ) from error
        return found[0], "", None


def _figures(one: CompiledPlan, known: Correction, tokens: int, budget: int) -> Figures:
    """Return the figures of a compiled plan; its seconds are expected where nothing was played."""
    if one.played is None:
        waits = known.waits(one.plan)
        seconds = known.busy(one.plan) + waits
    else:
        waits = one.played.host_stall
        seconds = one.played.seconds
    return Figures(
        step=seconds,
        tokens_per_second=tokens / seconds,
        exposed=0.0 if one.played is None else one.played.exposed_communication,
        host_stall=waits,
        mfu=None,
        memory=one.compiled,
        usable=budget,
        fits=one.compiled <= budget,
        compile_seconds=0.0,
    )


def budget_bytes(text: str, hardware: Hardware, device: jax.Device) -> int:
    """Read a budget such as `14GiB` in bytes of one device; `auto` is the device's memory less a
    margin, on a GPU what JAX's pool may take of it.

    Args:
      text: the `memory.budget` of a config.
      hardware: the figures of the devices.
      device: a device that is asked where the figures lack its memory.

    Raises:
      UserError: the text is not a size, or is `auto` for a device that does not say how much memory
        it has.
    """
    if text == "auto":
        known = hardware.hbm_bytes or memory_of(device)
        if known:
            return min(int(known * (1 - MARGIN)), usable_bytes(known, lowering_platform(device)))
        raise UserError(
            "memory.budget = auto: this device does not say how much memory it has: give it, as "
            "in 14GiB"
        )
    return read_size("memory.budget =", text, ", or auto")


def read_size(what: str, text: str, otherwise: str = "") -> int:
    """Read a size such as `14GiB` in bytes.

    Args:
      what: what the text is of, with which a message begins.
      otherwise: what the text may be instead.

    Raises:
      UserError: the text is no size.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    if not match or match[2] not in _UNITS:
        raise UserError(f"{what} {text!r} is no size: write 14GiB, 900MiB, 80GB{otherwise}")
    return round(float(match[1]) * _UNITS[match[2]])


def _rehearsal_text(one: CompiledPlan) -> str:
    """Write what the rehearsal says of a step."""
    if one.played is None:
        return ""
    if one.played.host_stall > 0:
        waits = f", {1e3 * one.played.host_stall:.0f} of them waiting for the host"
    else:
        waits = ""
    return f"; rehearsed {1e3 * one.played.seconds:.0f} ms a step{waits}"


def _too_small_message(
    budget: int, nearest: CompiledPlan, least: Priced, experiment: Experiment
) -> str:
    """Write the message on what a plan takes at the least, and what would lower it."""
    config = experiment.config
    parts = least.estimate.bytes._replace(host=0.0)._asdict()
    parts["working"] = nearest.compiled - sum(parts.values()) + parts["working"]
    called = {"working": "what a layer and the loss work with"}
    said = ", ".join(
        f"{called.get(name, name)} {bytes_text(size)}" for name, size in parts.items() if size > 0
    )
    return (
        f"memory.budget = {config.memory.budget} ({bytes_text(budget)}) is less than this plan "
        "takes with the least "
        f"kept on the device, {bytes_text(nearest.compiled)}: {said}. What would lower it: "
        f"{', '.join(_smaller_settings(experiment))}"
    )


def _smaller_settings(experiment: Experiment) -> list[str]:
    """List the settings with which a plan would take less."""
    config = experiment.config
    may = config.memory.may
    wanted = []
    for name in ("optimizer", "parameters"):
        if name not in may:
            wanted.append(f"memory.may=[{', '.join((*may, name))}]")
    if config.precision.moments == "float32" and config.optimizer.rounds_first_moments:
        wanted.append("precision.moments=bfloat16")
    if config.precision.params == "float32":
        wanted.append("precision.params=bfloat16")
    if "accumulation" not in may:
        wanted.append(more_microbatches(experiment))
    wanted.append(more_devices(experiment))
    return list(filter(None, wanted))
