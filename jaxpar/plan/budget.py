"""What a config leaves open is settled here: its overlap, and a memory budget.

A budget is solved for the fastest step that fits: `jaxpar.plan.choose_remat` has the choices, what
they cost, and the best of them; `jaxpar.plan.memory_search` predicts the bytes of each. The winner
is compiled, and what the compiler says corrects the prediction for all: three compilations at most.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

import jax

from jaxpar.base.config import Config
from jaxpar.base.console import bytes_text
from jaxpar.base.errors import UserError
from jaxpar.base.hardware import Hardware, hardware_of, lowering_platform, usable_bytes
from jaxpar.base.runtime import memory_of
from jaxpar.plan.choose_overlap import choose_overlap
from jaxpar.plan.choose_remat import Solution
from jaxpar.plan.memory_search import CompiledSolution, MemorySearch, Say, searches
from jaxpar.rehearse.targets import Target
from jaxpar.train.experiment import Experiment
from jaxpar.train.plans import make_experiment, with_config

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
    """Do as `resolve` does, and also return the step if a budget had it compiled, or else None."""
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


def solve_budget(
    experiment: Experiment,
    platform: str,
    hardware: Hardware,
    say: Say = lambda line: None,
    target: Target | None = None,
) -> tuple[CompiledSolution, list[CompiledSolution]]:
    """Find the fastest settings that fit `memory.budget`, and return them with all that was
    compiled on the way to them.

    What `memory.may` names may change as well as the activations. If the devices are those of a
    target, its rehearsal says how long compute waits for the host, and which of the compiled
    assignments is the fastest.

    Raises:
      UserError: the budget is below what the plan takes with the least kept; the message says what
        would lower that.
    """
    config = experiment.config
    budget = budget_bytes(config.memory.budget, hardware, experiment.devices[0])
    searched = searches(experiment, platform, hardware, say)
    least = min(searched, key=lambda one: one.predicted_bytes(one.least))
    tried = list[CompiledSolution]()
    best = None
    last = ""
    while len(tried) < _ROUNDS:
        # The first guess leaves a margin: a compilation that does not fit is lost.
        if tried:
            rooms = (budget,)
        else:
            rooms = (int(budget * (1 - MARGIN)), budget)
        found = next(
            (some for room in rooms if (some := _candidates(searched, room, tried))),
            [],
        )
        pick = min(
            found,
            key=lambda pair: pair[0].rank(pair[1]),
            default=None,
        )
        if best and (pick is None or pick[0].rank(pick[1]) > _WORTH * best[0].rank(best[1])):
            break
        # the safest one that is left
        if best is None and (pick is None or len(tried) == _ROUNDS - 1):
            pick = next(
                (
                    (least, one)
                    for one in (least.least, least.away)
                    if not least.was_tried(one, tried)
                ),
                pick,
            )
        if pick is None:
            break
        search, solution = pick
        sizes = f"predicted {bytes_text(search.predicted_bytes(solution))} of {bytes_text(budget)}"
        say(
            f"compiling {len(tried) + 1} of at most {_ROUNDS}{last}: "
            f"{reasons(search, solution)}; {sizes}"
        )
        began = time.perf_counter()
        again = search.compile(solution, target)
        last = f" (the last took {time.perf_counter() - began:.0f} s)"
        for one in searched:
            one.learn(again, search)
        tried.append(again)
        sizes = f"predicted {bytes_text(again.predicted)}, compiled {bytes_text(again.compiled)}"
        say(f"{sizes} of {bytes_text(budget)}{_rehearsal_text(again)}")
        if again.compiled <= budget and (best is None or not _is_slower(again, best[2])):
            best = search, solution, again
    if best is None:
        raise UserError(
            _too_small_message(budget, min(tried, key=lambda one: one.compiled), least, config)
        )
    search, solution, found = best
    say(
        f"memory.budget {config.memory.budget}: {reasons(search, solution)}{_rehearsal_text(found)}"
    )
    return found, tried


def budget_bytes(text: str, hardware: Hardware, device: jax.Device) -> int:
    """Read a budget such as `14GiB` in bytes; `auto` is the device's memory less a margin, on a GPU
    what JAX's pool may take of it.

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
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    if not match or match[2] not in _UNITS:
        raise UserError(f"memory.budget = {text!r} is no size: write 14GiB, 900MiB, 80GB, or auto")
    return round(float(match[1]) * _UNITS[match[2]])


def _candidates(
    searched: Sequence[MemorySearch], room: int, tried: Sequence[CompiledSolution]
) -> list[tuple[MemorySearch, Solution]]:
    """The fastest untried solution of each search that is predicted to fit, both with and without
    host memory.
    """
    return [
        (one, solution)
        for one in searched
        for away in (False, True)
        if (solution := one.solve(room, away)) is not None and not one.was_tried(solution, tried)
    ]


def _is_slower(one: CompiledSolution, than: CompiledSolution) -> bool:
    """Whether a step is slower than another by the rehearsal, if there is one."""
    return (
        one.played is not None
        and than.played is not None
        and one.played.seconds >= than.played.seconds
    )


def reasons(search: MemorySearch, solution: Solution) -> str:
    """Explain a solution: `offload block_input (2.10 GiB, hidden behind 41 ms of compute), ...`."""
    parts = []
    names = defaultdict[str, list[str]](list)
    for item, action in zip(search.items, solution.actions, strict=True):
        names[action] += item.names
    offloaded, recomputed, saved = (
        ", ".join(names[action]) for action in ("offload", "recompute", "save")
    )
    costs = search.costs
    outer = search.outer
    step = search.costs.forward + search.costs.backward
    if offloaded:
        waits = costs.seconds(solution.host, solution.again) - step - solution.again
        if waits < 1e-4:
            hidden = f"hidden behind {1e3 * step:.0f} ms of compute"
        else:
            hidden = f"waits {1e3 * waits:.0f} ms"
        parts.append(f"offload {offloaded} ({bytes_text(solution.host)}, {hidden})")
    if recomputed:
        if step:
            share = 100 * solution.again / step
        else:
            share = 0
        parts.append(f"recompute {recomputed} (+{share:.1f} % of the compute)")
    if saved:
        parts.append(f"save {saved} ({bytes_text(solution.device)})")
    if streamed := [name for name in ("optimizer", "parameters") if getattr(outer, name)]:
        size = bytes_text(search.state.host)
        parts.append(
            f"{' and '.join(streamed)} in host memory ({size}, +{1e3 * search.moved:.0f} ms)"
        )
    if outer.accumulation > 1:
        parts.append(f"train.accumulation {search.config.train.accumulation}")
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
    budget: int, tried: CompiledSolution, least: MemorySearch, config: Config
) -> str:
    """The message that says what a plan takes at the least, and what would lower it."""
    state = least.state
    may = config.memory.may
    rest = tried.compiled - state.device - least.least.device
    parts = {name: getattr(state, name).device for name in ("parameters", "optimizer", "gradients")}
    parts |= {"activations": least.least.device, "what a layer and the loss work with": rest}
    said = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items() if size > 0)
    wanted = [
        f"memory.may=[{', '.join((*may, name))}]"
        for name in ("optimizer", "parameters")
        if name not in may
    ]
    narrow = ("params",)
    if config.optimizer.rounds_first_moments:
        narrow = ("moments", *narrow)
    wide = [name for name in narrow if getattr(config.precision, name) == "float32"]
    wanted += [f"precision.{name}=bfloat16" for name in wide]
    if (
        "accumulation" not in may
        and config.train.batch // config.train.accumulation > least.experiment.plan.size("batch")
    ):
        wanted.append(f"train.accumulation={2 * config.train.accumulation}")
    wanted.append(f"mesh.fsdp={2 * least.experiment.plan.mesh.shape['fsdp']}")
    return (
        f"memory.budget = {config.memory.budget} ({bytes_text(budget)}) is less than this plan "
        "takes with the least "
        f"kept on the device, {bytes_text(tried.compiled)}: {said}. What would lower it: "
        f"{', '.join(wanted)}"
    )
