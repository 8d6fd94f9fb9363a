"""A memory budget solved: what to keep, what to offload, what to make again, for the fastest step that fits.

`jaxpar.plan.choose_remat` has the choices, what they cost, and the best of them. Bytes of activations and state are
known from shapes alone; the rest (what a block works with, the loss) is guessed. The winner is compiled, and what the
compiler says corrects the guess for all: three compilations at most.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import jax

from jaxpar.base.activation_names import Action, Keep
from jaxpar.base.config import Config
from jaxpar.base.console import bytes_text
from jaxpar.base.errors import UserError
from jaxpar.base.hardware import Hardware, hardware_of
from jaxpar.base.jax_compat import compiler_said
from jaxpar.base.plan import Plan
from jaxpar.base.runtime import memory_of
from jaxpar.models import Model
from jaxpar.parallel.host_memory import check_offload, lowered_for
from jaxpar.plan.choose_remat import (
    ActionCosts,
    Item,
    Option,
    Solution,
    costs_of,
    frontier,
    items_of,
    other_seconds,
    solve,
)
from jaxpar.plan.memory_account import memory_account, work_bytes
from jaxpar.rehearse.report.memory import CompiledBytes, allocated
from jaxpar.rehearse.report.memory_advice import needs_and_has
from jaxpar.rehearse.simulate import simulate
from jaxpar.rehearse.targets import Target
from jaxpar.rehearse.timeline.timeline import Timeline
from jaxpar.train.plans import make_plan
from jaxpar.train.state import in_host, state_shapes
from jaxpar.train.state_bytes import state_bytes
from jaxpar.train.step import make_train_step, step_shapes

MARGIN = 0.05
"""Of a device's memory, that `auto` leaves free."""
_ROUNDS = 3  # compilations at most
_WORTH = 0.99  # of the best step's time: less of a gain is not compiled for
_AWAY = 1.1  # times the predicted seconds, of what goes to host memory: rehearsals took longer (docs/benchmarks.md)
_UNITS = {"": 1, "B": 1, **{f"{k}{suffix}": base ** (n + 1) for n, k in enumerate("KMGT") for suffix, base in
                           (("iB", 1024), ("B", 1000), ("", 1024))}}  # fmt: skip

Say = Callable[[str], None]


# From a config to one that fits.


class Outer(NamedTuple):
    """What is decided besides activations."""

    optimizer: bool = False
    parameters: bool = False
    accumulation: int = 1
    loss_mib: int = 0
    """0 = the config's."""

    def applied(self, config: Config) -> Config:
        """The config with it."""
        where = {True: "offload", False: "device"}
        loss = self.loss_mib or config.memory.loss_mib
        memory = replace(
            config.memory, optimizer=where[self.optimizer], parameters=where[self.parameters], loss_mib=loss
        )
        train = replace(config.train, accumulation=config.train.accumulation * self.accumulation)
        return replace(config, memory=memory, train=train)


def assigned(config: Config, items: Sequence[Item], actions: Sequence[Action]) -> Config:
    """A config whose activations are treated so; its budget is spent."""
    keep: dict[str, Any] = {name: action for item, action in zip(items, actions, strict=True) for name in item.names}
    return replace(config, memory=replace(config.memory, policy="full", keep=Keep(**keep), budget=""))


def parse_bytes(text: str) -> int:
    """`14GiB` in bytes.

    Raises:
      UserError: it is no size.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    if not match or match[2] not in _UNITS:
        raise UserError(f"memory.budget = {text!r} is no size: write 14GiB, 900MiB, 80GB, or auto")
    return round(float(match[1]) * _UNITS[match[2]])


def budget_bytes(text: str, hardware: Hardware, device: Any) -> int:
    """A budget in bytes; `auto` is the device's memory less a margin.

    Raises:
      UserError: no size, or `auto` for a device that does not say what it has.
    """
    if text != "auto":
        return parse_bytes(text)
    known = hardware.hbm_bytes or memory_of(device)
    if not known:
        raise UserError("memory.budget = auto: this device does not say how much memory it has: give it, as in 14GiB")
    return int(known * (1 - MARGIN))


def nearest(config: Config, devices: list[jax.Device], platform: str, hardware: Hardware, room: int) -> str:
    """The flags of the fastest plan that is predicted to fit into some bytes, nothing compiled; empty = none does."""
    searched = _searches(config, devices, platform, hardware)
    found = [(one, solution) for one in searched if (solution := one.solve(room)) is not None]
    if not found:
        return ""
    search, solution = min(found, key=lambda pair: pair[0].seconds(pair[1]))
    memory = assigned(search.config, search.items, solution.actions).memory
    groups: dict[str, list[str]] = {}
    for name, choice in vars(memory.keep).items():
        if choice != "policy" and (name, choice) != ("block_input", "save"):
            groups.setdefault(choice, []).append(name)
    flags = [f"--memory.keep.{name} {action}" for action in ("save", "offload") for name in groups.get(action, [])]
    state = [f"--memory.{name} offload" for name in ("optimizer", "parameters") if getattr(memory, name) == "offload"]
    accumulated, loss = search.config.train.accumulation, memory.loss_mib
    more = [f"--train.accumulation {accumulated}"] if accumulated != config.train.accumulation else []
    more += [f"--memory.loss-mib {loss}"] if loss != config.memory.loss_mib else []
    return " ".join(["--memory.policy full", *flags, *state, *more])


def out_of_memory(message: str, config: Config, plan: Plan, hardware: Hardware, platform: str, has: int) -> str:
    """What to tell the user of a step that does not fit, in a line.

    Args:
      message: the runtime's.
      config: the experiment.
      plan: of the config.
      hardware: of a device.
      platform: of a device.
      has: bytes of a device; 0 = not known.
    """
    total = sum(part.device for part in memory_account(config, plan, platform))
    said = compiler_said(message)[:200]
    room = has or int(0.9 * total)  # not known: less than what was just too much
    found = nearest(replace(config, memory=replace(config.memory, may=())), list(plan.mesh.devices.flat), platform,
                    hardware, room)  # fmt: skip
    found = found or nearest(config, list(plan.mesh.devices.flat), platform, hardware, room)
    where = f"a device has {bytes_text(has)}" if has else "what a device has is not known"
    tried = f"try {found}" if found else (
        f"nothing this mesh can keep, offload or recompute fits: try --mesh.fsdp {2 * plan.mesh.shape['fsdp']} or "
        f"--train.accumulation {2 * config.train.accumulation}"
    )  # fmt: skip
    return f"out of memory: a step was predicted to take {bytes_text(total)}, {where}; {tried} ({said})"


def platform_of(device: Any) -> str:
    """What a program for this device is lowered for."""
    return "cuda" if device.platform == "gpu" else device.platform


class Tried(NamedTuple):
    """A compiled assignment: bytes a device as predicted and by the compiler, and the step in the rehearsal (None =
    the devices are at hand: not played)."""

    config: Config
    outer: Outer
    solution: Solution
    predicted: int
    compiled: int
    moved: float
    """Seconds of streaming state, which nothing hides."""
    played: Timeline | None = None
    program: Any = None
    """The compiled step; None = the compiler refused it."""


def fit_to_budget(config: Config, target: Target | None = None, say: Say = lambda line: None) -> tuple[Config, Any]:
    """The config with what its `memory.budget` leads to in place of it, and that compiled: see `within_budget`; without
    a budget the config as it is, and None.

    Args:
      config: an experiment whose mesh fits the target.
      target: what to fit; None = the devices at hand.
      say: as for `within_budget`.
    """
    if not config.memory.budget:
        return config, None
    devices = list(make_plan(config, None if target is None else target.devices()).mesh.devices.flat)
    found = hardware_of(devices[0].device_kind)
    hardware = target.hardware if target is not None else found or Hardware()
    platform = target.platform if target is not None else platform_of(devices[0])
    found, tried = within_budget(config, devices, platform, hardware, say, target)
    return found, next(one.program for one in tried if one.config == found)


def within_budget(
    config: Config, devices: list[jax.Device], platform: str, hardware: Hardware, say: Say = lambda line: None,
    target: Target | None = None,
) -> tuple[Config, list[Tried]]:  # fmt: skip
    """The fastest config that fits `memory.budget`, and what was compiled on the way to it.

    Args:
      config: with a budget; what `memory.may` names may be changed beside the activations.
      devices: of the mesh, at hand or not.
      platform: what is compiled for.
      hardware: whose figures count.
      say: called with a line for each step and the reason for the outcome.
      target: what the devices are; its rehearsal then says how long compute waits for the host, and which of the
        compiled assignments is the fastest.

    Raises:
      UserError: a budget below what the plan takes with the least kept: with that minimum, and what would lower it.
    """
    budget = budget_bytes(config.memory.budget, hardware, devices[0])
    searched = _searches(config, devices, platform, hardware, say)
    least = min(searched, key=lambda one: one.predicted(one.least))
    tried, best, last = list[Tried](), None, ""
    while len(tried) < _ROUNDS:
        # The first guess leaves a margin: a compilation that does not fit is lost.
        rooms = (budget,) if tried else (int(budget * (1 - MARGIN)), budget)
        found = next((some for room in rooms if (some := _candidates(searched, room, tried))), [])
        pick = min(found, key=lambda pair: pair[0].rank(pair[1]), default=None)
        if best and (pick is None or pick[0].rank(pick[1]) > _WORTH * best[0].rank(best[1])):
            break
        if best is None and (pick is None or len(tried) == _ROUNDS - 1):  # the safest that is left
            pick = next(((least, one) for one in (least.least, least.away) if not least.seen(one, tried)), pick)
        if pick is None:
            break
        search, solution = pick
        sizes = f"predicted {bytes_text(search.predicted(solution))} of {bytes_text(budget)}"
        say(f"compiling {len(tried) + 1} of at most {_ROUNDS}{last}: {reasons(search, solution)}; {sizes}")
        began = time.perf_counter()
        again = search.compile(solution, target, say)
        last = f" (the last took {time.perf_counter() - began:.0f} s)"
        for one in searched:
            one.learn(again, search)
        tried.append(again)
        sizes = f"predicted {bytes_text(again.predicted)}, compiled {bytes_text(again.compiled)}"
        say(f"{sizes} of {bytes_text(budget)}{_played(again)}")
        if again.compiled <= budget and (best is None or not _slower(again, best[2])):
            best = search, solution, again
    if best is None:
        raise UserError(_too_small(budget, min(tried, key=lambda one: one.compiled), least, config))
    say(f"memory.budget {config.memory.budget}: {reasons(*best[:2])}{_played(best[2])}")
    for note in _counted_otherwise(best[2]):
        say(note)
    return best[2].config, tried


def _counted_otherwise(one: Tried) -> list[str]:
    """Why the report of an assignment shows more than the budget that it meets."""
    counted = 0 if one.program is None else CompiledBytes.of(one.program.memory_analysis()).total
    if counted <= one.compiled:
        return []
    alive, report = bytes_text(one.compiled), bytes_text(counted)
    return [f"{alive} by the peak of what is alive; a report says {report}, more than a TPU lays out (docs/memory.md)"]


def _candidates(searched: Sequence[_Search], room: int, tried: Sequence[Tried]) -> list[tuple[_Search, Solution]]:
    """Of each search the fastest that is predicted to fit and was not compiled, with and without host memory."""
    return [
        (one, solution) for one in searched for away in (False, True)
        if (solution := one.solve(room, away)) is not None and not one.seen(solution, tried)
    ]  # fmt: skip


def _slower(one: Tried, than: Tried) -> bool:
    """By the rehearsal, where there is one."""
    return one.played is not None and than.played is not None and one.played.seconds >= than.played.seconds


def _played(one: Tried) -> str:
    """What the rehearsal says of it."""
    if one.played is None:
        return ""
    waits = one.played.host_stall
    step = f"; rehearsed {1e3 * one.played.seconds:.0f} ms a step"
    return step + (f", {1e3 * waits:.0f} of them waiting for the host" if waits > 0 else "")


def _exposed(one: Tried, costs: ActionCosts) -> float:
    """Of the transfers of activations, that compute waits for, as the rehearsal of this assignment shows it."""
    if one.played is None or not one.solution.host:
        return costs.exposed
    waits = one.played.host_stall - one.moved
    return min(max(waits / (2 * one.solution.host / costs.link), 0.0), 1.0)


class _Search:
    """The assignments under one choice of what else may be decided."""

    def __init__(self, config: Config, outer: Outer, devices: list[jax.Device], platform: str, hardware: Hardware):
        self.outer, self.devices, self.platform, self._hardware = outer, devices, platform, hardware
        self.config = outer.applied(
            replace(config, memory=replace(config.memory, policy="full", keep=Keep(), budget=""))
        )
        self.plan = make_plan(self.config, devices)
        offload = _offloads(devices[0], platform, config.memory.offload_anyway)
        self.items, self.costs = (
            items_of(self.config, self.plan, hardware, offload),
            costs_of(self.config, self.plan, hardware),
        )
        self.state = state_bytes(self.config, self.plan, platform)
        self.moved = self.state.streamed / self.costs.link
        self.work, self.compiled = work_bytes(self.config, self.plan), False
        self.here = [item._replace(options=tuple(one for one in item.options if one.action != "offload"))
                     for item in self.items]  # fmt: skip
        self.update = self.state.update
        found = frontier(self.items)
        self.least = min(found, key=lambda one: (one.device, self.seconds(one)))
        # The same with the most in host memory: a block that makes less again works with less.
        self.away = min(found, key=lambda one: (one.device, -one.host))

    @cached_property
    def besides(self) -> float:
        """Seconds that every assignment of this search takes besides, the same for all."""
        return self.moved + other_seconds(self.config, self.plan, self._hardware)

    def solve(self, budget: int, away: bool = True) -> Solution | None:
        """The fastest assignment that is predicted to fit, with activations in host memory or (not `away`) without."""
        if self.state.device + self.update > budget:
            return None
        return solve(self.items if away else self.here, self.costs, budget - self.state.device - self.work)

    def seen(self, solution: Solution, tried: Sequence[Tried]) -> bool:
        wanted = assigned(self.config, self.items, solution.actions)
        return wanted in [one.config for one in tried]

    def rank(self, solution: Solution) -> float:
        """Seconds, by which assignments are compared."""
        away = solution.host or self.outer.optimizer or self.outer.parameters
        return self.seconds(solution) * (_AWAY if away else 1)

    def learn(self, one: Tried, of: _Search) -> None:
        """From what the compiler said of an assignment of another search, while nothing of this one was compiled."""
        self.costs = self.costs._replace(exposed=_exposed(one, self.costs))
        if self is not of and not self.compiled:
            self.work = max(self.work + one.compiled - one.predicted, 0)

    def predicted(self, solution: Solution) -> int:
        """Bytes of a device: the backward's, or the update's, when no activations are left."""
        return self.state.device + max(solution.device + self.work, self.update)

    def seconds(self, solution: Solution) -> float:
        return self.costs.seconds(solution.host, solution.again, self.besides)

    def compile(self, solution: Solution, target: Target | None, say: Say) -> Tried:
        """What the compiler says of an assignment, from which the next prediction learns."""
        config, predicted = assigned(self.config, self.items, solution.actions), self.predicted(solution)
        found, text, program = compiled_bytes(config, self.devices, self.platform)
        self.compiled = True
        if solution.device + self.work >= self.update:
            self.work = found - self.state.device - solution.device
        else:
            self.update = found - self.state.device
        played = simulate(text, self.plan.mesh, target, say).timeline if target is not None and text else None
        return Tried(config, self.outer, solution, predicted, found, self.moved, played, program)


def _searches(
    config: Config, devices: list[jax.Device], platform: str, hardware: Hardware, say: Say = lambda line: None
) -> list[_Search]:
    """A search for each of what may be decided besides; parts that the batch does not split into are left out."""
    found = []
    for outer in _outers(config, devices[0], platform, say):
        try:
            found.append(_Search(config, outer, devices, platform, hardware))
        except UserError:
            if outer.accumulation == 1:
                raise
    # A loss that holds less is a choice where that is what a plan works with.
    for one in list(found):
        forms = [one, *(_Search(config, one.outer._replace(loss_mib=mib), devices, platform, hardware)
                        for mib in (256, 64) if mib < config.memory.loss_mib)]  # fmt: skip
        found += [form for before, form in itertools.pairwise(forms) if form.work < before.work]
    return found


def _offloads(device: Any, platform: str, anyway: bool, say: Say = lambda line: None) -> bool:
    """Whether host memory may be used: it is another memory than the device's, and is not known to be wrong."""
    if platform == "cpu":
        return False
    try:
        check_offload("memory.budget", device, anyway)
    except UserError as refused:
        say(f"nothing is offloaded: {refused}")
        return False
    return True


def _outers(config: Config, device: Any, platform: str, say: Say) -> list[Outer]:
    """What may be decided besides activations; what the config offloads already stays there."""
    memory, may = config.memory, config.memory.may
    host = _offloads(device, platform, memory.offload_anyway, say)
    optimizer = {memory.optimizer == "offload"} | ({True} if host and "optimizer" in may else set())
    parameters = {memory.parameters == "offload"} | ({True} if host and "parameters" in may else set())
    rows = config.train.batch // config.train.accumulation
    times = [1, *(n for n in (2, 4, 8, 16) if "accumulation" in may and rows % n == 0)]
    return [Outer(o, p, n) for n in times for o in sorted(optimizer) for p in sorted(parameters)]


def compiled_bytes(config: Config, devices: list[jax.Device], platform: str) -> tuple[int, str, Any]:
    """Bytes of a device that the training step allocates, and the program, as text too; of one that the compiler
    refuses what it says, and nothing.

    Raises:
      UserError: the compiler refuses the step for another reason.
    """
    plan, model = make_plan(config, devices), Model(config.model)
    arguments = step_shapes(model, config, plan)
    host = in_host(state_shapes(model, config, plan), model, plan), jax.tree.map(lambda _: False, arguments[1])
    _, lowered = lowered_for(make_train_step(model, config, plan), arguments, host, platform)
    try:
        compiled = lowered.compile()
        return allocated(compiled.memory_analysis(), platform), compiled.as_text() or "", compiled
    except jax.errors.JaxRuntimeError as error:
        found = needs_and_has(str(error))
        if found is None:
            raise UserError(f"the compiler refuses this step: {compiler_said(str(error))}") from error
        return found[0], "", None


def reasons(search: _Search, solution: Solution) -> str:
    """Why a solution is as it is: `offload block_input (2.10 GiB, hidden behind 41 ms of compute), ...`."""
    parts, by_action = [], dict[str, list[tuple[Item, Option]]]()
    for item, action in zip(search.items, solution.actions, strict=True):
        option = next(option for option in item.options if option.action == action)
        by_action.setdefault(action, []).append((item, option))
    costs, step = search.costs, search.costs.forward + search.costs.backward
    if found := by_action.get("offload"):
        waits = costs.seconds(solution.host, solution.again) - step - solution.again
        hidden = f"hidden behind {1e3 * step:.0f} ms of compute" if waits < 1e-4 else f"waits {1e3 * waits:.0f} ms"
        parts.append(f"offload {_names(found)} ({bytes_text(solution.host)}, {hidden})")
    if found := by_action.get("recompute"):
        share = 100 * solution.again / step if step else 0
        parts.append(f"recompute {_names(found)} (+{share:.1f} % of the compute)")
    if found := by_action.get("save"):
        parts.append(f"save {_names(found)} ({bytes_text(solution.device)})")
    outer = search.outer
    streamed = [name for name in ("optimizer", "parameters") if getattr(outer, name)]
    if streamed:
        size = bytes_text(search.state.host)
        parts.append(f"{' and '.join(streamed)} in host memory ({size}, +{1e3 * search.moved:.0f} ms)")
    if outer.accumulation > 1:
        parts.append(f"train.accumulation {search.config.train.accumulation}")
    if outer.loss_mib:
        parts.append(f"memory.loss_mib {outer.loss_mib}")
    return ", ".join(parts)


def _names(found: Sequence[tuple[Item, Option]]) -> str:
    return ", ".join(name for item, _ in found for name in item.names)


def _too_small(budget: int, tried: Tried, least: _Search, config: Config) -> str:
    """What a plan takes at the least, and what would lower it."""
    state, may = least.state, config.memory.may
    rest = tried.compiled - state.device - least.least.device
    parts = {
        "parameters": state.parameters.device, "optimizer": state.optimizer.device,
        "gradients": state.gradients.device,
        "activations": least.least.device, "what a layer and the loss work with": rest,
    }  # fmt: skip
    said = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items() if size > 0)
    wanted = [f"--memory.may {' '.join((*may, name))}" for name in ("optimizer", "parameters") if name not in may]
    if config.precision.moments == "float32":
        wanted.append("--precision.moments int8")
    if config.precision.params == "float32":
        wanted.append("--precision.params bfloat16")
    if "accumulation" not in may and config.train.batch // config.train.accumulation > least.plan.size("batch"):
        wanted.append(f"--train.accumulation {2 * config.train.accumulation}")
    wanted.append(f"--mesh.fsdp {2 * least.plan.mesh.shape['fsdp']}")
    return (
        f"memory.budget = {config.memory.budget} ({bytes_text(budget)}) is less than this plan takes with the least "
        f"kept on the device, {bytes_text(tried.compiled)}: {said}. What would lower it: {', '.join(wanted)}"
    )
