"""The plans among which a memory budget decides: what becomes of each activation, and of what
`memory.may` names. All other keys are those of the experiment.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from jaxpar.base.config import Config
from jaxpar.base.console import bytes_text
from jaxpar.base.errors import Say, UserError
from jaxpar.base.hardware import Hardware, Interconnect, PeakFlops
from jaxpar.base.layout.activation_names import Action, Keep, actions
from jaxpar.base.layout.mesh import MESH_AXES
from jaxpar.parallel.host_memory import check_offload
from jaxpar.plan.candidate import Candidate, candidate_of
from jaxpar.plan.choose_remat import fastest_actions
from jaxpar.plan.closed_form import Estimate, estimate, step_shapes
from jaxpar.plan.engine import Price, Priced, Space, priced
from jaxpar.rehearse.targets import Platform, Target
from jaxpar.train.activations import activations
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import with_config

_ACCUMULATIONS = (2, 4, 8, 16)
_LOSSES = (256, 64)
"""The MiB of a loss that holds less, where that is what decides how much a plan works with."""
_GUESS = Hardware(
    peak_flops=PeakFlops(1e12, 1e12),
    hbm_bandwidth=1e11,
    host_link_bandwidth=1e10,
    dcn_bandwidth=1e10,
    ici=Interconnect("switch", links=1, link_bandwidth=1e10, chip_bandwidth=1e10),
)
"""The figures of a device that has none, such as a CPU. They are no particular device's; a matmul
outweighs a copy.
"""


class Question(NamedTuple):
    """An experiment with a budget, and what its plans cost.

    Attributes:
      experiment: the experiment that is to fit, with its settled overlap.
      names: the activations that its blocks have.
      base: the candidate that it is, recomputing everything.
      price: what a step costs under a candidate.
      offload: whether host memory may be used.
    """

    experiment: Experiment
    names: Sequence[str]
    base: Candidate
    price: Price
    offload: bool


def question_of(
    experiment: Experiment,
    platform: str,
    hardware: Hardware,
    target: Target | None = None,
    say: Say = lambda line: None,
) -> Question:
    """Find what the plans of an experiment cost.

    Args:
      platform: the platform that its steps are compiled for.
      hardware: the figures of its devices.
      target: the target that the devices belong to; None = they are at hand.
      say: gets a line where nothing may be offloaded.
    """
    shapes = step_shapes(experiment)
    if target is None:
        on = _at_hand(experiment, platform, hardware)
    else:
        on = replace(target, hardware=hardware)

    def price(candidate: Candidate) -> Estimate:
        return estimate(shapes, candidate, on)

    return Question(
        experiment,
        [one.name for one in activations(experiment)],
        _candidate(experiment),
        price,
        may_offload(experiment, platform, say),
    )


def space_of(asked: Question, budget: int, margin: float) -> Space:
    """Return the plans among which a budget decides.

    Args:
      budget: the bytes of a device that a step may take.
      margin: the share of it that is left free until something was compiled.
    """
    names = asked.names
    price = asked.price
    offload = asked.offload
    branches = [priced(one, price) for one in _branches(asked)]

    def within(branch: Priced, room: float) -> list[Priced]:
        ways = (False, True) if offload else (False,)
        found = [fastest_actions(branch.candidate, names, price, room, way) for way in ways]
        return [one for one in found if one is not None]

    least = min(branches, key=lambda one: one.bytes)
    smallest = [least]
    if offload and names:
        # A block that makes less again works with less.
        for away in (["block_input"], names):
            keep = tuple(sorted((name, "offload") for name in away))
            smallest.append(priced(least.candidate._replace(keep=keep), price))
    smallest.sort(key=lambda one: one.bytes)
    return Space(budget, branches, within, smallest, margin)


def _branches(asked: Question) -> list[Candidate]:
    """List the choices besides activations; what the config already offloads stays in host
    memory. A loss that holds less is one where that makes a plan smaller.
    """
    experiment = asked.experiment
    config = experiment.config
    may = config.memory.may
    base = asked.base
    # An optimizer that is not updated layer by layer keeps all on the device.
    host = asked.offload and experiment.optimizer.by_layer
    optimizers = {base.optimizer}
    if host and "optimizer" in may and config.optimizer.settings.has_moments:
        optimizers |= {"offload"} if base.optimizer == "device" else set()
    parameters = {base.parameters}
    if host and "parameters" in may:
        parameters.add("offload")
    times = [1]
    if "accumulation" in may:
        times += [count for count in _ACCUMULATIONS if _accumulates(experiment, count)]
    found = list[Candidate]()
    for many, optimizer, where in itertools.product(times, sorted(optimizers), sorted(parameters)):
        one = base._replace(
            accumulation=many * base.accumulation, optimizer=optimizer, parameters=where
        )
        found.append(one)
        for mib in _LOSSES:
            less = one._replace(loss_mib=mib)
            if mib < base.loss_mib and _bytes(less, asked) < _bytes(found[-1], asked):
                found.append(less)
    return found


def _bytes(candidate: Candidate, asked: Question) -> float:
    return asked.price(candidate).bytes.total


def _candidate(experiment: Experiment) -> Candidate:
    """Return the candidate that an experiment is, recomputing everything."""
    config = experiment.config
    sizes = experiment.plan.mesh.shape
    across = tuple(getattr(config.mesh.dcn, axis) for axis in MESH_AXES)
    mesh = tuple(sizes.get(axis, 1) // way for axis, way in zip(MESH_AXES, across, strict=True))
    return candidate_of(config)._replace(
        mesh=mesh,
        dcn=across,
        microbatches=experiment.pipeline_microbatches,
        policy="full",
        keep=(),
    )


def _accumulates(experiment: Experiment, times: int) -> bool:
    """Return whether a step may have so many times as many microbatches."""
    train = experiment.config.train
    if train.microbatch % times:
        return False
    more = replace(train, accumulation=times * train.accumulation)
    memory = replace(experiment.config.memory, policy="full", keep=Keep(), budget="")
    try:
        with_config(experiment, replace(experiment.config, train=more, memory=memory))
    except UserError:
        return False
    return True


def may_offload(experiment: Experiment, platform: str, say: Say = lambda line: None) -> bool:
    """Return whether host memory may be used: it must not be the device's own memory, nor known to
    give wrong results.
    """
    if platform == "cpu":
        return False
    anyway = experiment.config.memory.offload_anyway
    try:
        check_offload("memory.budget", experiment.devices[0], anyway)
    except UserError as refused:
        say(f"nothing is offloaded: {refused}")
        return False
    return True


def _at_hand(experiment: Experiment, platform: str, hardware: Hardware) -> Target:
    """Return the devices of an experiment as a target, where nothing is known with guesses."""
    count = len(experiment.devices)
    chips = count // hardware.devices_per_chip
    known = {name: value for name, value in vars(hardware).items() if value}
    ici = hardware.ici if hardware.ici.link_bandwidth else _GUESS.ici
    peaks = hardware.peak_flops if any(vars(hardware.peak_flops).values()) else _GUESS.peak_flops
    known |= {"chips": chips, "peak_flops": peaks}
    known["ici"] = replace(ici, shape=(chips,), wraps=(True,))
    return Target("here", "", cast(Platform, platform), replace(_GUESS, **known), 1, str(chips))


def config_of(asked: Question, candidate: Candidate) -> Config:
    """Return the config whose memory is as a candidate says, with a decision for each name."""
    config = asked.experiment.config
    found = _actions(candidate)
    decided: dict[str, Any] = {name: found[name] for name in asked.names}
    memory = replace(
        config.memory,
        policy=candidate.policy,
        keep=Keep(**decided),
        budget="",
        optimizer=candidate.optimizer,
        parameters=candidate.parameters,
        loss_mib=candidate.loss_mib,
    )
    train = replace(config.train, accumulation=candidate.accumulation)
    return replace(config, memory=memory, train=train)


def _actions(candidate: Candidate) -> dict[str, Action]:
    return actions(candidate.policy, Keep(**dict(candidate.keep)))  # pyright: ignore[reportArgumentType]


def reasons(plan: Priced, asked: Question) -> str:
    """Explain a plan in one line: `offload block_input (2.10 GiB, waits 12 ms), recompute up
    (+3.1 % of the compute)`.
    """
    candidate = plan.candidate
    cost = plan.estimate
    found = _actions(candidate)
    by_action = defaultdict[Action, list[str]](list)
    for name in asked.names:
        by_action[found[name]].append(name)
    keeps_all = candidate._replace(keep=tuple(sorted((name, "save") for name in asked.names)))
    compute = asked.price(keeps_all).compute
    state = asked.price(candidate._replace(keep=())).host
    parts = []
    if away := by_action["offload"]:
        waits = cost.host - state
        size = bytes_text(cost.offloaded)
        parts.append(f"offload {', '.join(away)} ({size}, waits {1e3 * waits:.0f} ms)")
    if again := by_action["recompute"]:
        share = 100 * (cost.compute / compute - 1) if compute else 0.0
        parts.append(f"recompute {', '.join(again)} ({share:+.1f} % of the compute)")
    if saved := by_action["save"]:
        parts.append(f"save {', '.join(saved)} ({bytes_text(cost.bytes.activations)})")
    streamed = [
        name for name in ("optimizer", "parameters") if getattr(candidate, name) != "device"
    ]
    if streamed:
        parts.append(f"{' and '.join(streamed)} in host memory (+{1e3 * state:.0f} ms)")
    if candidate.accumulation != asked.base.accumulation:
        parts.append(f"train.accumulation {candidate.accumulation}")
    if candidate.loss_mib != asked.base.loss_mib:
        parts.append(f"memory.loss_mib {candidate.loss_mib}")
    return ", ".join(parts)
