"""Read a compiled program, price its tasks with a target's figures, and play it out."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from jax.sharding import Mesh

from jaxpar.hlo.origin import PackageDirs
from jaxpar.hlo.read import read_program
from jaxpar.kernels.attention.libraries import kernel_cost
from jaxpar.rehearse.cost.cost import price
from jaxpar.rehearse.link_costs import collective_time
from jaxpar.rehearse.targets import Target, places
from jaxpar.rehearse.timeline.timeline import Timeline, replay


class StepSimulation(NamedTuple):
    """How a program runs on one device of a target."""

    timeline: Timeline
    notes: tuple[str, ...]
    """What was assumed."""


def simulate(
    text: str, mesh: Mesh, target: Target, drawn_trips: int = 2, most_events: int = 20_000,
    package_dirs: PackageDirs | None = None,
) -> StepSimulation:  # fmt: skip
    """Simulate a compiled program on a target.

    Args:
      text: the program's text, `compiled.as_text()`.
      mesh: the mesh of the target's devices, in the program's order.
      target: what `load_target` returned.
      drawn_trips, most_events: see `replay`.
      package_dirs: see `read_program`.
    """
    where = places(list(mesh.devices.flat), target)
    slice_of = [place.slice for place in where] if target.platform == "tpu" and target.slices > 1 else None
    program = read_program(text, slice_of=slice_of, kernel_cost=kernel_cost, package_dirs=package_dirs)
    on_links = partial(collective_time, places=where, target=target)
    costs = price(program, target.hardware, on_links)
    timeline = replay(program, costs, drawn_trips=drawn_trips, most_events=most_events)
    return StepSimulation(timeline, program.notes + costs.notes)
