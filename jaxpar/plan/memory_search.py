"""A memory budget is solved by a search over assignments of activations, under each choice of what
else may change.

Bytes of activations and state are known from shapes alone; the rest (what a block works with, the
loss) is guessed, and corrected by what the compiler says of an assignment.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import jax

from jaxpar.base.activation_names import Action, Keep
from jaxpar.base.config import Config
from jaxpar.base.errors import UserError
from jaxpar.base.hardware import Hardware
from jaxpar.base.jax_compat import compiler_message
from jaxpar.parallel.host_memory import check_offload, compile_absent, lower_for
from jaxpar.plan.choose_remat import (
    ActionCosts,
    Solution,
    costs_of,
    frontier,
    items_of,
    other_seconds,
    solve,
)
from jaxpar.plan.memory_account import work_bytes
from jaxpar.rehearse.report.memory import allocated_bytes, needs_and_has
from jaxpar.rehearse.targets import Target
from jaxpar.rehearse.timeline import Timeline, simulate
from jaxpar.train.experiment import Experiment
from jaxpar.train.plans import with_config
from jaxpar.train.state_memory import state_bytes
from jaxpar.train.step import in_host, make_train_step

# factor on the predicted seconds with host memory: rehearsals took longer (docs/benchmarks.md)
_AWAY = 1.1

Say = Callable[[str], None]


class Outer(NamedTuple):
    """The choices other than those of activations."""

    optimizer: bool = False
    parameters: bool = False
    accumulation: int = 1
    loss_mib: int = 0
    """The `memory.loss_mib`; 0 = the config's."""

    def apply(self, config: Config) -> Config:
        """The config with these choices."""
        optimizer, parameters = (
            "offload" if away else "device" for away in (self.optimizer, self.parameters)
        )
        loss = self.loss_mib or config.memory.loss_mib
        memory = replace(config.memory, optimizer=optimizer, parameters=parameters, loss_mib=loss)
        train = replace(config.train, accumulation=config.train.accumulation * self.accumulation)
        return replace(config, memory=memory, train=train)


class CompiledSolution(NamedTuple):
    """A compiled assignment, with its bytes a device as predicted and by the compiler, and the step
    in the rehearsal (None = not played, because the devices are at hand)."""

    experiment: Experiment
    solution: Solution
    predicted: int
    compiled: int
    moved: float
    """The seconds of streaming state, which nothing hides."""
    played: Timeline | None = None
    program: jax.stages.Compiled | None = None
    """The compiled step; None = the compiler refused it."""


class MemorySearch:
    """The assignments of activations under one choice of everything else."""

    def __init__(
        self,
        experiment: Experiment,
        outer: Outer,
        platform: str,
        hardware: Hardware,
    ):
        self.outer = outer
        self.platform = platform
        self._hardware = hardware
        asked = experiment.config.memory
        least = replace(asked, policy="full", keep=Keep(), budget="")
        config = outer.apply(replace(experiment.config, memory=least))
        self.experiment = with_config(experiment, config)
        offload = _may_offload(experiment.devices[0], platform, asked.offload_anyway)
        self.items = items_of(self.experiment, hardware, offload)
        self.costs = costs_of(self.experiment, hardware)
        self.state = state_bytes(self.experiment, platform)
        self.moved = self.state.streamed / self.costs.link
        self.work = work_bytes(self.experiment)
        self.compiled = False
        self.update = self.state.update
        found = frontier(self.items)
        self.least = min(
            found,
            key=lambda one: (
                one.device,
                self.costs.seconds(one.host, one.again),
            ),
        )
        # Of equal device bytes this has the most in host memory: a block that makes less again
        # works with less.
        self.away = min(found, key=lambda one: (one.device, -one.host))

    @cached_property
    def fixed_seconds(self) -> float:
        """The seconds that every assignment of this search takes in addition, the same for all."""
        return self.moved + other_seconds(self.experiment, self._hardware)

    def solve(self, budget: int, away: bool = True) -> Solution | None:
        """The fastest assignment that is predicted to fit; without `away` it keeps no activations
        in host memory.
        """
        if self.state.device + self.update > budget:
            return None
        items = [
            item._replace(
                options=tuple(one for one in item.options if away or one.action != "offload")
            )
            for item in self.items
        ]
        return solve(items, self.costs, budget - self.state.device - self.work)

    @property
    def config(self) -> Config:
        """The config with the outer choices, which recomputes everything."""
        return self.experiment.config

    def assign(self, solution: Solution) -> Config:
        """Return the config with the actions of a solution for its activations."""
        pairs = zip(self.items, solution.actions, strict=True)
        keep: dict[str, Action] = {name: action for item, action in pairs for name in item.names}
        return replace(
            self.config,
            memory=replace(self.config.memory, keep=Keep(**keep)),
        )

    def was_tried(self, solution: Solution, tried: Sequence[CompiledSolution]) -> bool:
        return self.assign(solution) in [one.experiment.config for one in tried]

    def rank(self, solution: Solution) -> float:
        """The seconds by which assignments are compared."""
        away = solution.host or self.outer.optimizer or self.outer.parameters
        return self.seconds(solution) * (_AWAY if away else 1)

    def learn(self, one: CompiledSolution, of: MemorySearch) -> None:
        """Learn the exposed share from a compiled assignment, and the work too until this search
        has compiled one.
        """
        self.costs = self.costs._replace(exposed=_exposed_share(one, self.costs))
        if self is not of and not self.compiled:
            self.work = max(self.work + one.compiled - one.predicted, 0)

    def predicted_bytes(self, solution: Solution) -> int:
        """The bytes of a device in the backward, or in the update, when no activations are left,
        whichever is more.
        """
        return self.state.device + max(solution.device + self.work, self.update)

    def seconds(self, solution: Solution) -> float:
        return self.costs.seconds(solution.host, solution.again, self.fixed_seconds)

    def compile(self, solution: Solution, target: Target | None) -> CompiledSolution:
        """Compile an assignment; the next prediction learns from what the compiler says."""
        assigned = with_config(self.experiment, self.assign(solution))
        predicted = self.predicted_bytes(solution)
        found, text, program = compiled_bytes(assigned, self.platform)
        self.compiled = True
        if solution.device + self.work >= self.update:
            self.work = found - self.state.device - solution.device
        else:
            self.update = found - self.state.device
        if target is not None and text:
            played = simulate(text, self.experiment.plan.mesh, target)
        else:
            played = None
        return CompiledSolution(assigned, solution, predicted, found, self.moved, played, program)


def searches(
    experiment: Experiment,
    platform: str,
    hardware: Hardware,
    say: Say = lambda line: None,
) -> list[MemorySearch]:
    """Make a search for each choice besides activations, leaving out parts into which the batch
    does not split.
    """
    config = experiment.config
    found = []
    for outer in _outers(experiment, platform, say):
        try:
            found.append(MemorySearch(experiment, outer, platform, hardware))
        except UserError:
            if outer.accumulation == 1:
                raise
    # A loss that holds less is a choice where the loss is what decides how much a plan works with.
    for one in list(found):
        forms = [
            one,
            *(
                MemorySearch(experiment, one.outer._replace(loss_mib=mib), platform, hardware)
                for mib in (256, 64)
                if mib < config.memory.loss_mib
            ),
        ]
        found += [form for before, form in itertools.pairwise(forms) if form.work < before.work]
    return found


def compiled_bytes(
    experiment: Experiment, platform: str
) -> tuple[int, str, jax.stages.Compiled | None]:
    """Compile the training step; return the bytes of a device that it allocates, its text, and the
    program. If the compiler refuses it for its memory, return the bytes that it names, an empty
    text and None.

    Raises:
      UserError: the compiler refuses the step for another reason.
    """
    model = experiment.model
    plan = experiment.plan
    arguments = (experiment.state, experiment.batch)
    batch_in_host = jax.tree.map(lambda _: False, experiment.batch)
    host = (in_host(experiment.state), batch_in_host)
    step = make_train_step(model, experiment.config, plan, experiment.optimizer)
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


def _exposed_share(one: CompiledSolution, costs: ActionCosts) -> float:
    """The share of the activations' transfers that compute waits for, as this assignment's
    rehearsal shows.
    """
    if one.played is None or not one.solution.host:
        return costs.exposed
    waits = one.played.host_stall - one.moved
    return min(
        max(waits / (2 * one.solution.host / costs.link), 0.0),
        1.0,
    )


def _may_offload(
    device: jax.Device, platform: str, anyway: bool, say: Say = lambda line: None
) -> bool:
    """Whether host memory may be used: it must not be the device's own memory, nor known to give
    wrong results.
    """
    if platform == "cpu":
        return False
    try:
        check_offload("memory.budget", device, anyway)
    except UserError as refused:
        say(f"nothing is offloaded: {refused}")
        return False
    return True


def _outers(experiment: Experiment, platform: str, say: Say) -> list[Outer]:
    """The choices besides activations; what the config already offloads stays in host memory."""
    config = experiment.config
    memory = config.memory
    may = config.memory.may
    # An optimizer that is not updated layer by layer keeps all on the device.
    host = experiment.optimizer.by_layer and _may_offload(
        experiment.devices[0], platform, memory.offload_anyway, say
    )
    may_leave = host and "optimizer" in may and config.optimizer.settings.has_moments
    optimizer = {memory.optimizer == "offload"} | ({True} if may_leave else set())
    parameters = {memory.parameters == "offload"} | (
        {True} if host and "parameters" in may else set()
    )
    rows = config.train.batch // config.train.accumulation
    times = [
        1,
        *(n for n in (2, 4, 8, 16) if "accumulation" in may and rows % n == 0),
    ]
    return [Outer(o, p, n) for n in times for o in sorted(optimizer) for p in sorted(parameters)]
