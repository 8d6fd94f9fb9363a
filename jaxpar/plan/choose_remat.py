"""This module finds the fastest way to treat the activations of a plan within some bytes: each is
kept on the device, sent to host memory, or made again in the backward.

The choices are few and their costs are independent: every named activation is needed by some
backward, so making one again costs what its forward did, whatever becomes of the others. All
combinations are kept that no other beats in device bytes, host bytes and seconds together; the
fastest of them that fits is then exact under the prices of single choices, and is priced once more
as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from jaxpar.base.layout.activation_names import Action
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.closed_form import HOST_EXPOSED, Estimate, waits_for_host
from jaxpar.plan.engine import Price, Priced, priced


class Option(NamedTuple):
    """A way to treat an activation: on one device in one step, the bytes that are on the device at
    a time, the bytes that go to host memory and come back, and the seconds of making it again."""

    action: Action
    device: int
    host: int
    seconds: float


class Item(NamedTuple):
    """Activations that are decided together, with their choices."""

    names: tuple[str, ...]
    options: tuple[Option, ...]


class ActionCosts(NamedTuple):
    """The costs that a solution's time consists of: the seconds of one device in one step."""

    forward: float
    backward: float
    link: float
    """The rate to host memory in bytes/s."""
    exposed: float = HOST_EXPOSED
    """The share of the activations' transfers that compute waits for at the least."""

    def seconds(self, host: int, again: float) -> float:
        """Compute the seconds of a step.

        Args:
          host: the bytes of activations that go to host memory and back.
          again: the seconds of making other activations again.
        """
        each = host / self.link if host else 0.0
        backward = self.backward + again
        return self.forward + backward + waits_for_host(each, self.forward, backward, self.exposed)


class Solution(NamedTuple):
    """An assignment of all items: its bytes on the device and to the host, and its seconds of
    making things again.
    """

    device: int
    host: int
    again: float
    actions: tuple[Action, ...]

    def with_option(self, option: Option) -> Solution:
        """Return this assignment with an option for the next item."""
        return Solution(
            self.device + option.device,
            self.host + option.host,
            self.again + option.seconds,
            (*self.actions, option.action),
        )

    def sends_and_makes_no_more_than(self, other: Solution) -> bool:
        """Return whether this assignment is as good as another of the same items, or better, in
        host bytes and in seconds.
        """
        return self.host <= other.host and self.again <= other.again


def frontier(items: Sequence[Item]) -> list[Solution]:
    """List every assignment that no other beats in device bytes, host bytes and seconds together,
    in order of device bytes.

    Args:
      items: the activations with their choices; an assignment has an action for each, in order.
    """
    unbeaten = [Solution(0, 0, 0.0, ())]
    for item in items:
        grown = [one.with_option(option) for one in unbeaten for option in item.options]
        unbeaten = _unbeaten(grown)
    return unbeaten


def _unbeaten(solutions: list[Solution]) -> list[Solution]:
    """Keep the solutions that no other beats, in order of device bytes."""
    unbeaten = []
    # In this order only earlier ones can beat the next, and of those it is enough to look at the
    # ones that lead in host bytes and seconds.
    leaders = list[Solution]()
    for one in sorted(solutions):
        if any(leader.sends_and_makes_no_more_than(one) for leader in leaders):
            continue
        leaders = [leader for leader in leaders if not one.sends_and_makes_no_more_than(leader)]
        leaders.append(one)
        unbeaten.append(one)
    return unbeaten


def solve(unbeaten: Sequence[Solution], costs: ActionCosts, room: int | float) -> Solution | None:
    """Find the fastest assignment that takes at most `room` bytes of the device, or None; of
    several as fast, the one that sends the fewest bytes to the host.

    Args:
      unbeaten: the assignments that no other beats.
      costs: what the seconds of an assignment consist of.
    """
    fits = [one for one in unbeaten if one.device <= room]
    return min(
        fits,
        key=lambda one: (
            costs.seconds(one.host, one.again),
            one.host,
            one.device,
        ),
        default=None,
    )


def fastest_actions(
    start: Candidate, names: Sequence[str], price: Price, room: float, offload: bool
) -> Priced | None:
    """Find the fastest step of a plan within some bytes, by what becomes of single activations.

    Args:
      start: the plan. Its own policy and `keep` do not count.
      names: the activations that its blocks have.
      price: what a step costs.
      room: the bytes of a device.
      offload: whether host memory may be used.

    Returns:
      The plan, which makes again all that its `keep` does not name; None = nothing fits.
    """
    base = start._replace(policy="full", keep=())
    (items, costs, unbeaten) = _choices(base, tuple(names), price, offload)
    best: Priced | None = None
    found = priced(base, price)
    others = set[float]()
    for _ in range(_ROUNDS):
        # A block that makes less again works with less.
        other = found.bytes - found.estimate.bytes.activations
        solution = solve(unbeaten, costs, room - other)
        if solution is None or other in others:
            break
        others.add(other)
        keep = sorted(_kept(items, solution))
        found = priced(base._replace(keep=tuple(keep)), price)
        if found.bytes <= room and (best is None or found.seconds < best.seconds):
            best = found
    return best


@lru_cache(maxsize=256)
def _choices(
    base: Candidate, names: tuple[str, ...], price: Price, offload: bool
) -> tuple[list[Item], ActionCosts, list[Solution]]:
    """Find what a plan may choose, what it costs, and the assignments that no other beats."""
    items = list(items_of(base, names, price, offload))
    return items, costs_of(base, items, price), frontier(items)


_ROUNDS = 4
_WITH = {"attention_out": ("attention_out", "attention_lse")}
"""Activations of which one is of no use without the other."""


def items_of(base: Candidate, names: Sequence[str], price: Price, offload: bool) -> Iterator[Item]:
    """Yield the activations of a plan with the cost of each choice. One that costs nothing to make
    again has no choice.

    Args:
      base: the plan, which makes all of them again.
      names: the activations that its blocks have.
      price: what a step costs.
      offload: whether host memory may be used.
    """
    least = price(base)
    for name in names:
        if name == "attention_lse" and "attention_out" in names:
            continue
        together = tuple(one for one in _WITH.get(name, (name,)) if one in names)
        saved = price(base._replace(keep=_all(together, "save")))
        away = price(base._replace(keep=_all(together, "offload")))
        # Compute counts even where collectives that take longer seem to hide it.
        again = max(_busy(least) - _busy(saved), least.compute - saved.compute)
        device = round(saved.bytes.activations - away.bytes.activations)
        options = [Option("save", device, 0, 0.0)]
        if offload:
            options.append(Option("offload", 0, round(away.offloaded), 0.0))
        if name != "block_input":
            options.append(Option("recompute", 0, 0, again))
        if again > 0 or name == "block_input":
            yield Item(together, tuple(options))


def costs_of(base: Candidate, items: Sequence[Item], price: Price) -> ActionCosts:
    """Return the costs that a step consists of where nothing is made again; 2 of its 3 parts are
    backward.

    Args:
      base: the plan.
      items: its activations, with their choices.
      price: what a step costs.
    """
    names = [name for item in items for name in item.names]
    busy = _busy(price(base._replace(keep=_all(names, "save"))))
    away = price(base._replace(keep=_all(("block_input",), "offload")))
    waits = away.host - price(base).host
    link = 2 * HOST_EXPOSED * away.offloaded / waits if waits > 0 else math.inf
    return ActionCosts(busy / 3, 2 * busy / 3, link)


def _busy(estimate: Estimate) -> float:
    """Return the seconds of a step without transfers to host memory."""
    return estimate.seconds - estimate.host


def _all(names: Iterable[str], action: Action) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, action) for name in names))


def _kept(items: Sequence[Item], solution: Solution) -> Iterator[tuple[str, str]]:
    """Yield what an assignment keeps beside the inputs of blocks, which are kept in any case."""
    for item, action in zip(items, solution.actions, strict=True):
        for name in item.names:
            if action != "recompute" and (name, action) != ("block_input", "save"):
                yield name, action
