"""What cannot run is data, and no text of an exception: what is wrong, by how much, and what would
help.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from jaxpar.base.console import bytes_text


class Infeasible(NamedTuple):
    """A reason for which a plan cannot run.

    Attributes:
      kind: the condition that it breaks: `memory`, `batch`, `layers`, or the logical axis of a dim.
      what: what is wrong, in a few words.
      by_how_much: how far it is from what could run, in `unit`.
      unit: what `by_how_much` counts: `bytes`, `sequences`, `layers` or `devices`.
      what_would_help: what to try.
    """

    kind: str
    what: str
    by_how_much: float
    unit: str
    what_would_help: str

    def __str__(self) -> str:
        """Write the reason in one line."""
        return f"{self.what}, by {self.amount}: {self.what_would_help}"

    @property
    def amount(self) -> str:
        """How far it is from what could run, with its unit."""
        if self.unit == "bytes":
            return bytes_text(self.by_how_much)
        return f"{self.by_how_much:,.0f} {self.unit}"


class Refusals(NamedTuple):
    """Plans that cannot run for one kind of reason.

    Attributes:
      plans: how many plans there are.
      nearest: the reason of the one that is nearest to what could run.
    """

    plans: int
    nearest: Infeasible

    def __str__(self) -> str:
        """Write the refusals in one line."""
        return f"{self.plans:,} plans: {self.nearest}"


def by_kind(found: Iterable[tuple[Infeasible, int]]) -> dict[str, Refusals]:
    """Group reasons by their kind.

    Args:
      found: reasons, each with the number of plans that it stops.

    Returns:
      The groups, those of the most plans first.
    """
    groups = dict[str, Refusals]()
    for reason, count in found:
        known = groups.get(reason.kind)
        if known is None:
            groups[reason.kind] = Refusals(count, reason)
            continue
        nearest = min(known.nearest, reason, key=lambda one: one.by_how_much)
        groups[reason.kind] = Refusals(known.plans + count, nearest)
    return dict(sorted(groups.items(), key=lambda item: -item[1].plans))
