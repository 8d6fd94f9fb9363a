"""The choices by which a plan takes fewer bytes and more time: what is computed again, and what
lies in host memory.

They form a ladder for each mesh and batching. A plan stands on the highest rung that fits, so that
nothing is recomputed or offloaded where the run fits without it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

from jaxpar.base.errors import UserError
from jaxpar.base.layout.activation_names import Policy
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.engine.priced import Price, Priced, priced
from jaxpar.plan.layout_search.infeasible import Infeasible
from jaxpar.plan.layout_search.request import Request

POLICIES: tuple[Policy, ...] = get_args(Policy)
_SMALL_LOSS = 256
"""The MiB of the loss on the lowest rung."""


class Ladder(NamedTuple):
    """The choices of a request: rungs, each a group of choices of which the fastest that fits is
    taken.

    Attributes:
      rungs: the groups, from those that keep most on the device.
      least: the choice that keeps least there.
      may_offload: whether the target's host memory may be used.
    """

    rungs: tuple[tuple[dict[str, Any], ...], ...]
    least: dict[str, Any]
    may_offload: bool

    @property
    def top(self) -> dict[str, Any]:
        """The choice that keeps most on the device."""
        return self.rungs[0][0]

    @property
    def size(self) -> int:
        """The number of choices."""
        return sum(len(rung) for rung in self.rungs)


def ladder_of(request: Request, has_moments: bool, may_offload: bool) -> Ladder:
    """List the choices of a request.

    Args:
      has_moments: whether the optimizer has a state that could be offloaded.
      may_offload: whether the target's host memory may be used.

    Raises:
      UserError: what is fixed uses what is forbidden.
    """
    away = ["device", "offload"] if may_offload else ["device"]
    optimizers = request.options("memory.optimizer", away if has_moments else ["device"])
    parameters = request.options("memory.parameters", away)
    policies = request.options("memory.policy", POLICIES)
    losses = request.options("memory.loss_mib", _losses(request))
    rungs = list[tuple[dict[str, Any], ...]]()
    for parameter in parameters:
        for optimizer in optimizers:
            where = {"optimizer": optimizer, "parameters": parameter}
            for loss in losses:
                rung = [where | {"policy": policy, "loss_mib": loss} for policy in policies]
                right = [choice for choice in rung if request.allows(Candidate(**choice))]
                if right:
                    rungs.append(tuple(right))
    if not rungs:
        raise UserError(
            f"what is fixed ({', '.join(map(str, request.fixed))}) uses what is forbidden "
            f"({', '.join(sorted(request.forbidden))}): leave one of them out"
        )
    least = rungs[-1][-1] | _most_recomputed(rungs[-1])
    return Ladder(tuple(rungs), least, may_offload)


def _losses(request: Request) -> list[int]:
    """List the bytes of the loss to try, the config's first."""
    usual = request.config.memory.loss_mib
    return [usual, _SMALL_LOSS] if usual > _SMALL_LOSS else [usual]


def _most_recomputed(rung: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Return the policy of a rung that keeps least."""
    policies = [choice.get("policy", "none") for choice in rung]
    return {"policy": "full"} if "full" in policies else {"policy": policies[-1]}


def on_top(candidate: Candidate, ladder: Ladder) -> Candidate:
    """Return a plan with the choice that keeps most on the device."""
    return candidate._replace(**ladder.top)


def best_rung(
    candidate: Candidate, ladder: Ladder, price: Price, room: float
) -> tuple[Priced | Infeasible, int]:
    """Find the fastest choice that fits, from the highest rung that has one.

    Args:
      candidate: a mesh and a batching.
      price: what a step costs.
      room: the bytes of a device.

    Returns:
      The plan, or why none fits; and the number of plans that were priced.
    """
    candidate = candidate._replace(keep=())
    least = priced(candidate._replace(**ladder.least), price)
    if least.bytes > room:
        return _too_large(least, room), 1
    count = 1
    for rung in ladder.rungs:
        choices = [priced(candidate._replace(**choice), price) for choice in rung]
        count += len(choices)
        fits = [one for one in choices if one.bytes <= room]
        if fits:
            return min(fits, key=lambda one: (one.seconds, one.bytes)), count
    return least, count


def _too_large(least: Priced, room: float) -> Infeasible:
    """Say by how much a plan is too large with the least kept on the device."""
    parts = least.estimate.bytes._asdict()
    largest = max(parts, key=lambda name: parts[name])
    helps = {
        "parameters": "more devices along fsdp or tensor",
        "optimizer": "more devices along fsdp, ZeRO-1, bfloat16 moments, or offload",
        "gradients": "more devices along fsdp or tensor",
        "activations": "more accumulation, or tensor and context",
        "working": "more accumulation, or tensor and context",
    }
    return Infeasible(
        "memory",
        f"memory, most of it {largest}",
        least.bytes - room,
        "bytes",
        helps[largest],
    )
