"""How long a collective takes on a target's links: an alpha-beta model of the topology."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpar.hlo.tasks import Collective
from jaxpar.targets import Position, Target


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """What one execution of a collective takes."""

    seconds: float
    """Latency and transfer together."""
    latency: float
    """The part that would remain for zero bytes."""
    resources: tuple[str, ...]
    """Lanes it keeps busy: some of `ici:x`, `ici:y`, `ici:z`, `nvlink`, `dcn`, `chip` (between two devices of one
    chip), `memory` (simulated devices). Two collectives that share one run one after the other."""
    links: str
    """For people: `ring of 4 along z, both directions`."""
    bytes_per_link: float
    """Bytes through the busiest link in one direction."""


def collective_time(collective: Collective, places: tuple[Position, ...], target: Target) -> CollectiveTime:
    """Predicted time of one execution, every group running at once.

    Args:
      collective: groups of positions in the program's device order.
      places: where those positions sit: `targets.places(mesh.devices.flat, target)`.
      target: whose links.
    """
    raise NotImplementedError
