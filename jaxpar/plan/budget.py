"""This module settles what a config leaves open: its overlap, and a memory budget.

A budget is solved for the fastest step that fits: `jaxpar.plan.choose_remat` has the choices, what
they cost, and the best of them; `jaxpar.plan.memory_search` predicts the bytes of each. The winner
is compiled, and what the compiler says corrects the prediction for all: three compilations at most.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax

from jaxpar.base.config import Config
from jaxpar.base.console import bytes_text
from jaxpar.base.errors import UserError
from jaxpar.base.hardware import Hardware, hardware_of, lowering_platform, usable_bytes
from jaxpar.base.layout.activation_names import Action
from jaxpar.base.machine import memory_of
from jaxpar.plan.choose_overlap import choose_overlap
from jaxpar.plan.choose_remat import Solution
from jaxpar.plan.memory_search import (
    CompiledSolution,
    Outer,
    Prediction,
    Say,
    SearchSpace,
    compile_solution,
    corrected,
    first_predictions,
)
from jaxpar.rehearse.targets import Target
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment, with_config
from jaxpar.train.state_memory import more_devices, more_microbatches
from jaxpar.train.teacher_memory import teacher_bytes

MARGIN = 0.05
"""The share of a device's memory that `auto` leaves free."""
_ROUNDS = 3  # the most compilations
_WORTH = 0.99  # share of the best step's time; a smaller gain is not worth a compilation
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


class Candidate(NamedTuple):
    """An assignment that could be compiled, with its prediction."""

    prediction: Prediction
    solution: Solution

    @property
    def bytes(self) -> int:
        """The bytes of a device that the assignment is predicted to take."""
        return self.prediction.bytes(self.solution)

    @property
    def rank(self) -> float:
        """The seconds by which candidates are compared."""
        return self.prediction.rank(self.solution)

    def is_of(self, one: CompiledSolution) -> bool:
        """Return whether this is the assignment that was compiled there."""
        outer = self.prediction.space.outer
        return one.outer == outer and one.solution.actions == self.solution.actions


def solve_budget(
    experiment: Experiment,
    platform: str,
    hardware: Hardware,
    say: Say = lambda line: None,
    target: Target | None = None,
) -> tuple[CompiledSolution, list[CompiledSolution]]:
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
    config = experiment.config
    budget = budget_bytes(config.memory.budget, hardware, experiment.devices[0])
    if taken := teacher_bytes(experiment):
        say(f"a teacher runs beside: {bytes_text(taken)} of {bytes_text(budget)} are its own")
        budget -= taken
    predictions = first_predictions(experiment, platform, hardware, say)
    # of the space that is thought to need the least, from the first guess on
    smallest = min(predictions, key=lambda one: one.bytes(one.space.least)).space.outer
    tried = list[CompiledSolution]()
    best = None
    last = ""
    while len(tried) < _ROUNDS:
        by_outer = {one.space.outer: one for one in predictions}
        candidate = _next_candidate(by_outer, by_outer[smallest], budget, tried, best)
        if candidate is None:
            break
        say(
            f"compiling {len(tried) + 1} of at most {_ROUNDS}{last}: {reasons(candidate)}; "
            f"predicted {bytes_text(candidate.bytes)} of {bytes_text(budget)}"
        )
        began = time.perf_counter()
        found = compile_solution(candidate.prediction, candidate.solution, target)
        last = f" (the last took {time.perf_counter() - began:.0f} s)"
        predictions = [corrected(one, found) for one in predictions]
        tried.append(found)
        sizes = f"predicted {bytes_text(found.predicted)}, compiled {bytes_text(found.compiled)}"
        say(f"{sizes} of {bytes_text(budget)}{_rehearsal_text(found)}")
        if found.compiled <= budget and (best is None or not _is_slower(found, best)):
            best = found
    by_outer = {one.space.outer: one for one in predictions}
    if best is None:
        nearest = min(tried, key=lambda one: one.compiled)
        raise UserError(_too_small_message(budget, nearest, by_outer[smallest].space, config))
    why = reasons(Candidate(by_outer[best.outer], best.solution))
    say(f"memory.budget {config.memory.budget}: {why}{_rehearsal_text(best)}")
    return best, tried


def _next_candidate(
    predictions: Mapping[Outer, Prediction],
    smallest: Prediction,
    budget: int,
    tried: Sequence[CompiledSolution],
    best: CompiledSolution | None,
) -> Candidate | None:
    """Choose the candidate to compile next; None = nothing is left that is worth a compilation.

    Args:
      predictions: the prediction for each search space.
      smallest: the prediction for the space which is thought to need the least.
      budget: the bytes of a device that a step may take.
      tried: what has been compiled.
      best: the best of it that fits; None = nothing fits yet.
    """
    # The first guess leaves a margin: a compilation that does not fit is lost.
    if tried:
        rooms = (budget,)
    else:
        rooms = (int(budget * (1 - MARGIN)), budget)
    fastest = _fastest_candidate(list(predictions.values()), rooms, tried)
    if best is not None:
        known = Candidate(predictions[best.outer], best.solution)
        if fastest is None or fastest.rank > _WORTH * known.rank:
            return None
        return fastest
    is_last = len(tried) == _ROUNDS - 1
    if fastest is not None and not is_last:
        return fastest
    # the safest one that is left
    for solution in (smallest.space.least, smallest.space.away):
        safest = Candidate(smallest, solution)
        if not any(safest.is_of(one) for one in tried):
            return safest
    return fastest


def _fastest_candidate(
    predictions: Sequence[Prediction], rooms: Sequence[int], tried: Sequence[CompiledSolution]
) -> Candidate | None:
    """Find the fastest untried candidate that is predicted to fit into the first of some rooms that
    has any.
    """
    for room in rooms:
        found = _candidates(predictions, room)
        left = [one for one in found if not any(one.is_of(other) for other in tried)]
        if left:
            return min(left, key=lambda one: one.rank)
    return None


def _candidates(predictions: Sequence[Prediction], room: int) -> Iterator[Candidate]:
    """Yield the fastest solution of each search space that is predicted to fit, both with and
    without activations in host memory.
    """
    for prediction in predictions:
        for away in (False, True):
            solution = prediction.solve(room, away)
            if solution is not None:
                yield Candidate(prediction, solution)


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


def _is_slower(one: CompiledSolution, than: CompiledSolution) -> bool:
    """Return whether a step is slower than another by the rehearsal, if there is one."""
    return (
        one.played is not None
        and than.played is not None
        and one.played.seconds >= than.played.seconds
    )


def reasons(candidate: Candidate) -> str:
    """Explain a candidate in one line: `offload block_input (2.10 GiB, hidden behind 41 ms of
    compute), up`.
    """
    solution = candidate.solution
    space = candidate.prediction.space
    costs = candidate.prediction.costs
    outer = space.outer
    names = defaultdict[Action, list[str]](list)
    for item, action in zip(space.items, solution.actions, strict=True):
        names[action] += item.names
    step = costs.forward + costs.backward
    parts = []
    if names["offload"]:
        waits = costs.seconds(solution.host, solution.again) - step - solution.again
        if waits < 1e-4:
            hidden = f"hidden behind {1e3 * step:.0f} ms of compute"
        else:
            hidden = f"waits {1e3 * waits:.0f} ms"
        size = bytes_text(solution.host)
        parts.append(f"offload {', '.join(names['offload'])} ({size}, {hidden})")
    if names["recompute"]:
        if step:
            share = 100 * solution.again / step
        else:
            share = 0
        parts.append(f"recompute {', '.join(names['recompute'])} (+{share:.1f} % of the compute)")
    if names["save"]:
        parts.append(f"save {', '.join(names['save'])} ({bytes_text(solution.device)})")
    if outer.streamed:
        size = bytes_text(space.state.host)
        added = f"+{1e3 * space.moved:.0f} ms"
        parts.append(f"{' and '.join(outer.streamed)} in host memory ({size}, {added})")
    if outer.accumulation > 1:
        parts.append(f"train.accumulation {space.config.train.accumulation}")
    if outer.loss_mib:
        parts.append(f"memory.loss_mib {outer.loss_mib}")
    return ", ".join(parts)


def _rehearsal_text(one: CompiledSolution) -> str:
    """Write what the rehearsal says of a step."""
    if one.played is None:
        return ""
    if one.played.host_stall > 0:
        waits = f", {1e3 * one.played.host_stall:.0f} of them waiting for the host"
    else:
        waits = ""
    return f"; rehearsed {1e3 * one.played.seconds:.0f} ms a step{waits}"


def _too_small_message(
    budget: int, nearest: CompiledSolution, space: SearchSpace, config: Config
) -> str:
    """Write the message on what a plan takes at the least, and what would lower it."""
    state = space.state
    kept = space.least.device
    parts = {
        "parameters": state.parameters.device,
        "optimizer": state.optimizer.device,
        "gradients": state.gradients.device,
        "activations": kept,
        "what a layer and the loss work with": nearest.compiled - state.device - kept,
    }
    said = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items() if size > 0)
    return (
        f"memory.budget = {config.memory.budget} ({bytes_text(budget)}) is less than this plan "
        "takes with the least "
        f"kept on the device, {bytes_text(nearest.compiled)}: {said}. What would lower it: "
        f"{', '.join(_smaller_settings(space, config))}"
    )


def _smaller_settings(space: SearchSpace, config: Config) -> list[str]:
    """List the settings with which a plan would take less."""
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
        wanted.append(more_microbatches(space.experiment))
    wanted.append(more_devices(space.experiment))
    return list(filter(None, wanted))
