"""The search that solves a memory budget: over assignments of activations, under each choice of
what else may change.

Bytes of activations and state are known from shapes alone; the rest (what a block works with, the
loss) is guessed, and corrected by what the compiler says of an assignment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import jax

from jaxpar.base.compiled_for import compiling_for
from jaxpar.base.config import Config
from jaxpar.base.errors import Say, UserError
from jaxpar.base.hardware import Hardware
from jaxpar.base.jax_compat import compiler_message
from jaxpar.base.layout.activation_names import Action, Keep
from jaxpar.parallel.host_memory import check_offload, compile_absent, lower_for
from jaxpar.plan.choose_remat import (
    ActionCosts,
    Item,
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
from jaxpar.train.experiments import with_config
from jaxpar.train.state_memory import StateBytes, state_bytes
from jaxpar.train.step import make_train_step

# factor on the predicted seconds with host memory: rehearsals took longer (docs/benchmarks.md)
_AWAY = 1.1


class Outer(NamedTuple):
    """The choices other than those of activations."""

    optimizer: bool = False
    parameters: bool = False
    accumulation: int = 1
    loss_mib: int = 0
    """The value of `memory.loss_mib`; 0 = the config's."""

    @property
    def streamed(self) -> list[str]:
        """The parts of the state that lie in host memory: `optimizer`, `parameters`."""
        names = []
        if self.optimizer:
            names.append("optimizer")
        if self.parameters:
            names.append("parameters")
        return names

    def apply(self, config: Config) -> Config:
        """Return the config with these choices."""
        optimizer = config.memory.optimizer  # "host" stays what it is
        if self.optimizer and optimizer == "device":
            optimizer = "offload"
        memory = replace(
            config.memory,
            optimizer=optimizer,
            parameters="offload" if self.parameters else "device",
            loss_mib=self.loss_mib or config.memory.loss_mib,
        )
        train = replace(config.train, accumulation=config.train.accumulation * self.accumulation)
        return replace(config, memory=memory, train=train)


@dataclass(frozen=True, eq=False)
class SearchSpace:
    """The assignments of activations under one choice of everything else, and what is known of them
    from shapes alone.

    Attributes:
      outer: the choice of everything else.
      experiment: the experiment under it, which recomputes everything.
      platform: the platform that it is compiled for.
      items: the activations, each with the ways to treat it.
      costs: what the seconds of an assignment consist of.
      state: the bytes of the training state.
      work: a guess of the bytes that a block or the loss works with.
      least: the assignment of the fewest bytes on the device, of several the fastest.
      away: an assignment of as few bytes, with the most in host memory: a block that makes less
        again works with less.
    """

    outer: Outer
    experiment: Experiment
    platform: str
    hardware: Hardware
    items: list[Item]
    costs: ActionCosts
    state: StateBytes
    work: int
    least: Solution
    away: Solution

    @property
    def config(self) -> Config:
        """The config with the outer choices, which recomputes everything."""
        return self.experiment.config

    @property
    def moved(self) -> float:
        """The seconds of streaming state, which nothing hides."""
        return self.state.streamed / self.costs.link

    @cached_property
    def fixed_seconds(self) -> float:
        """The seconds that every assignment takes in addition."""
        return self.moved + other_seconds(self.experiment, self.hardware)

    def assign(self, solution: Solution) -> Config:
        """Return the config whose `memory.keep` has the actions of a solution of this space."""
        pairs = zip(self.items, solution.actions, strict=True)
        keep: dict[str, Action] = {name: action for item, action in pairs for name in item.names}
        return replace(
            self.config,
            memory=replace(self.config.memory, keep=Keep(**keep)),
        )


def search_space(
    experiment: Experiment, outer: Outer, platform: str, hardware: Hardware
) -> SearchSpace:
    """Make the search space of one choice of everything but activations.

    Args:
      outer: the choice of everything else.
      platform: the platform that it is compiled for.

    Raises:
      UserError: the experiment cannot be made with that choice.
    """
    asked = experiment.config.memory
    recomputing = replace(asked, policy="full", keep=Keep(), budget="")
    config = outer.apply(replace(experiment.config, memory=recomputing))
    changed = with_config(experiment, config)
    offload = _may_offload(experiment.devices[0], platform, asked.offload_anyway)
    items = items_of(changed, hardware, offload)
    costs = costs_of(changed, hardware)
    assignments = frontier(items)
    return SearchSpace(
        outer,
        changed,
        platform,
        hardware,
        items,
        costs,
        state_bytes(changed, platform),
        work_bytes(changed),
        least=min(assignments, key=lambda one: (one.device, costs.seconds(one.host, one.again))),
        away=min(assignments, key=lambda one: (one.device, -one.host)),
    )


@dataclass(frozen=True, eq=False)
class Prediction:
    """The prediction for the assignments of a search space, as far as compilations have corrected
    it (`corrected`).

    Attributes:
      costs: its costs, with the exposed share of transfers that was last seen.
      work: the bytes that a block or the loss works with.
      update: the bytes that the update works with.
      compiled: whether an assignment of this space has been compiled.
    """

    space: SearchSpace
    costs: ActionCosts
    work: int
    update: int
    compiled: bool = False

    def solve(self, budget: int, away: bool = True) -> Solution | None:
        """Find the fastest assignment that is predicted to fit; None = there is none.

        Args:
          budget: the bytes that one device may take.
          away: whether activations may lie in host memory.
        """
        state = self.space.state.device
        if state + self.update > budget:
            return None
        items = self.space.items
        if not away:
            items = [item.without_offload() for item in items]
        return solve(items, self.costs, budget - state - self.work)

    def bytes(self, solution: Solution) -> int:
        """Predict the bytes of a device in the backward, or in the update, when no activations are
        left, whichever is more.
        """
        return self.space.state.device + max(solution.device + self.work, self.update)

    def seconds(self, solution: Solution) -> float:
        """Predict the seconds of a step, with those that all assignments take."""
        return self.costs.seconds(solution.host, solution.again, self.space.fixed_seconds)

    def rank(self, solution: Solution) -> float:
        """Return the seconds by which assignments are compared, which are raised where host memory
        is used.
        """
        if solution.host or self.space.outer.streamed:
            return self.seconds(solution) * _AWAY
        return self.seconds(solution)


class CompiledSolution(NamedTuple):
    """A compiled assignment.

    Attributes:
      experiment: the experiment with the assignment.
      outer: the choice of everything else.
      predicted: the bytes of a device that were predicted.
      compiled: the bytes of a device that the compiler says.
      moved: the seconds of streaming state, which nothing hides.
      played: the step in the rehearsal; None = not played, because the devices are at hand.
      program: the compiled step; None = the compiler refused it.
    """

    experiment: Experiment
    outer: Outer
    solution: Solution
    predicted: int
    compiled: int
    moved: float
    played: Timeline | None = None
    program: jax.stages.Compiled | None = None


def first_predictions(
    experiment: Experiment,
    platform: str,
    hardware: Hardware,
    say: Say = lambda line: None,
) -> list[Prediction]:
    """Predict from shapes alone, for each choice besides activations into which the batch splits.

    Args:
      platform: the platform that the experiment is compiled for.
      say: gets a line where nothing may be offloaded.

    Raises:
      UserError: the experiment cannot be made where it keeps nothing (`with_config`).
    """
    config = experiment.config
    spaces = []
    for outer in _outers(experiment, platform, say):
        try:
            spaces.append(search_space(experiment, outer, platform, hardware))
        except UserError:
            if outer.accumulation == 1:
                raise
    # A loss that holds less is a choice where the loss is what decides how much a plan works with.
    for space in list(spaces):
        before = space.work
        for mib in (256, 64):
            if mib < config.memory.loss_mib:
                smaller = space.outer._replace(loss_mib=mib)
                form = search_space(experiment, smaller, platform, hardware)
                if form.work < before:
                    spaces.append(form)
                before = form.work
    return [Prediction(space, space.costs, space.work, space.state.update) for space in spaces]


def compile_solution(
    prediction: Prediction, solution: Solution, target: Target | None
) -> CompiledSolution:
    """Compile an assignment, and for a target play it out.

    Args:
      target: the target to play it out for; None = the devices are at hand.

    Raises:
      UserError: the compiler refuses the step for another reason than its memory.
    """
    space = prediction.space
    assigned = with_config(space.experiment, space.assign(solution))
    allocated, text, program = compiled_bytes(assigned, space.platform)
    if target is not None and text:
        played = simulate(text, assigned.plan.mesh, target)
    else:
        played = None
    return CompiledSolution(
        assigned,
        space.outer,
        solution,
        prediction.bytes(solution),
        allocated,
        space.moved,
        played,
        program,
    )


def corrected(prediction: Prediction, one: CompiledSolution) -> Prediction:
    """Return a prediction as a compiled assignment, of its own or another space, corrects it.

    The exposed share of transfers is what the assignment's rehearsal shows. Its own space has the
    bytes that the compiler says; others are taken to be as far off as it was, until they have been
    compiled.
    """
    costs = prediction.costs._replace(exposed=_exposed_share(one, prediction.costs))
    if one.outer == prediction.space.outer:
        rest = one.compiled - prediction.space.state.device
        if one.solution.device + prediction.work >= prediction.update:
            work = rest - one.solution.device
            return replace(prediction, costs=costs, compiled=True, work=work)
        return replace(prediction, costs=costs, compiled=True, update=rest)
    if prediction.compiled:
        return replace(prediction, costs=costs)
    off = one.compiled - one.predicted
    return replace(prediction, costs=costs, work=max(prediction.work + off, 0))


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


def _exposed_share(one: CompiledSolution, costs: ActionCosts) -> float:
    """Return the share of the activations' transfers that compute waits for, as the assignment's
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
    """Return whether host memory may be used: it must not be the device's own memory, nor known to
    give wrong results.
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
    """List the choices besides activations; what the config already offloads stays in host
    memory.
    """
    config = experiment.config
    memory = config.memory
    # An optimizer that is not updated layer by layer keeps all on the device.
    host = experiment.optimizer.by_layer and _may_offload(
        experiment.devices[0], platform, memory.offload_anyway, say
    )
    optimizer = {memory.optimizer != "device"}
    if host and "optimizer" in memory.may and config.optimizer.settings.has_moments:
        optimizer.add(True)
    parameters = {memory.parameters == "offload"}
    if host and "parameters" in memory.may:
        parameters.add(True)
    times = [1]
    if "accumulation" in memory.may:
        rows = config.train.microbatch
        times += [n for n in (2, 4, 8, 16) if rows % n == 0]
    return [Outer(o, p, n) for n in times for o in sorted(optimizer) for p in sorted(parameters)]
