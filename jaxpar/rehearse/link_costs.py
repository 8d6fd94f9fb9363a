"""The time of a collective on a target's links, from latency and bandwidth (alpha and beta) over
its topology.

A collective of V bytes takes `start + hops x hop + load x V / bandwidth`. Here `hops` counts the
steps taken one after another, and `load` is the share of V that passes the busiest link in one
direction. With k devices in a group:

  all-gather, reduce-scatter   a ring with load (k-1)/k, where every device receives over all the
                               links it has
  all-reduce                   a reduce-scatter and an all-gather; on GPUs also a tree where that
                               is faster
  all-to-all                   every pair's bytes take the shortest way: on a ring of k, V k/8
                               passes a link
  ppermute                     every message takes its shortest way

(Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and
experience", 2007; for tori Austin et al., "How to Scale Your Model", part 3, where V / 180 GB/s
along an axis of v5p is this for large k; for GPUs the tuning model in NCCL.) The model also
assumes:

- On a torus, data is split over the axes that a group spans, so that all of their links are busy at
  once. An axis that is not a ring gives one link where a ring gives two. Groups that share links
  (strided ones, both halves of a chip) share them evenly. A group that is no box in the torus runs
  a ring in its own order. Twisted tori are not modelled.
- Levels follow one another: first between the halves of a chip, then ICI, then the data-centre
  network, each with what is left to move there. On GPUs they overlap, since NCCL pipelines them,
  and the slowest level decides.
- Switches and the data-centre network never block; a reduction costs as much as moving its data;
  SHARP is not used.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, permutations
from typing import NamedTuple

from jaxpar.base.errors import UserError
from jaxpar.base.hardware import Hardware
from jaxpar.hlo.program.tasks import Collective, CollectiveKind, Groups
from jaxpar.rehearse.targets import Position, Target

Seats = tuple[tuple[Position, ...], ...]
"""The seats of the members of each group."""


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """The time that one execution of a collective takes."""

    seconds: float
    """The latency and the transfer together."""
    latency: float
    """The part that would remain for zero bytes."""
    resources: tuple[str, ...]
    """The lanes that the collective keeps busy: some of `ici:x+`, `ici:x-` (both directions of an
    axis), `ici:y+` and so on, `nvlink`, `dcn`, `chip` (between the devices of one chip).
    Collectives that share a lane run one after the other."""


@dataclass(frozen=True, slots=True)
class Leg:
    """A level of the network that a collective uses."""

    lanes: tuple[str, ...]
    load: float
    """The bytes through the busiest link for each byte of the collective."""
    bandwidth: float
    """The bytes/s of the busiest link in one direction."""
    hops: float


Legs = tuple[Leg, ...]
"""The legs of one algorithm: they follow one another in a torus, and run all at once elsewhere."""


def collective_time(
    collective: Collective, places: tuple[Position, ...], target: Target
) -> CollectiveTime:
    """Predict the time of one execution in which all groups run at once: 0 seconds and no lanes
    where nothing moves between devices.

    Args:
      places: where the device of each of the program's positions sits:
        `targets.places(mesh.devices.flat, target)`.

    Returns:
      The seconds of the fastest algorithm, and the lanes that it holds.

    Raises:
      UserError: the target has no figure for a link that the collective uses.
    """
    hardware = target.hardware
    kind = collective.kind
    routes = _routes(kind, collective.groups, places, hardware)
    if not routes:
        return CollectiveTime(0.0, 0.0, ())
    for leg in (leg for legs in routes for leg in legs):
        if not leg.bandwidth:
            raise UserError(
                f"target {target.name} ({hardware.chip}) has no figure for the bandwidth of "
                f"{leg.lanes[0]}, which "
                f"a {kind} needs: write it in the file of its chip, meshes/chips"
            )
    together = hardware.ici.kind != "torus" or kind == "ppermute"
    times = [legs_time(legs, together, collective.bytes, hardware) for legs in routes]
    return min(times, key=lambda time: time.seconds)


def legs_time(legs: Legs, together: bool, size: int, hardware: Hardware) -> CollectiveTime:
    """Compute the time of an algorithm with the protocol that is fastest for this size."""
    moving = [leg.load * size / leg.bandwidth for leg in legs]
    transfer = max(moving) if together else sum(moving)
    times = []
    for protocol in hardware.protocols:
        waits = [
            leg.hops * (protocol.dcn_hop if leg.lanes == ("dcn",) else protocol.hop) for leg in legs
        ]
        latency = protocol.start + sum(waits)
        times.append((latency + transfer / protocol.share, latency))
    seconds, latency = min(times, default=(transfer, 0.0))
    lanes = tuple(dict.fromkeys(lane for leg in legs for lane in leg.lanes))
    return CollectiveTime(seconds, latency, lanes)


@lru_cache(maxsize=1024)
def _routes(
    kind: CollectiveKind, groups: Groups, places: tuple[Position, ...], hardware: Hardware
) -> tuple[Legs, ...]:
    """List the algorithms that a collective may use here; there are none where nothing moves."""
    seats = tuple(
        tuple(places[position] for position in group) for group in groups if len(set(group)) > 1
    )
    if not seats:
        return ()
    if hardware.ici.kind == "torus":
        return (
            _messages(seats, hardware) if kind == "ppermute" else _on_torus(kind, seats, hardware),
        )
    return _on_switches(kind, seats, hardware)


# Switches connect the GPUs of a node.


def _on_switches(kind: CollectiveKind, groups: Seats, hardware: Hardware) -> tuple[Legs, ...]:
    if kind == "ppermute":
        far = [start.slice != end.slice for start, end in groups]
        return (switch_messages(near=not all(far), far=any(far), hardware=hardware),)
    counts = [Counter(position.slice for position in group).values() for group in groups]
    spread = Spread(
        size=max(map(len, groups)),
        nodes=max(map(len, counts)),
        few=min(min(count) for count in counts),
        many=max(max(count) for count in counts),
    )
    return switch_legs(kind, spread, hardware)


class Spread(NamedTuple):
    """How the members of a group lie in nodes.

    Attributes:
      size: the members of a group.
      nodes: the nodes that have some of them.
      few: the fewest members in a node, which has the fewest NICs.
      many: the most members in a node, which has most to exchange.
    """

    size: int
    nodes: int
    few: int
    many: int


def switch_messages(near: bool, far: bool, hardware: Hardware) -> Legs:
    """Plan messages between GPUs.

    Args:
      near: whether some stay inside a node.
      far: whether some go to another node.
    """
    found = list[Leg]()
    if near:
        inside = hardware.ici.links * hardware.ici.link_bandwidth
        found.append(Leg(("nvlink",), 1.0, inside, 1))
    if far:
        found.append(Leg(("dcn",), 1.0, hardware.dcn_bandwidth, 1))
    return tuple(found)


def switch_legs(kind: CollectiveKind, spread: Spread, hardware: Hardware) -> tuple[Legs, ...]:
    """List the algorithms of a collective of GPUs in nodes, from the spread of its groups alone."""
    inside = hardware.ici.links * hardware.ici.link_bandwidth
    size = spread.size
    nodes = spread.nodes
    few = spread.few
    many = spread.many

    def legs(in_node: float, across: float, hops: float, net_hops: float) -> Legs:
        if many > 1:
            near = (Leg(("nvlink",), in_node, inside, hops),)
        else:
            near = ()
        return near + (
            (Leg(("dcn",), across, hardware.dcn_bandwidth, net_hops),) if nodes > 1 else ()
        )

    if kind == "all-to-all":
        return (legs((many - 1) / size, (size - few) / size, many - 1, nodes - 1),)
    ring = legs(
        (size - 1) / size,
        (nodes - 1) / nodes / few,
        size - nodes,
        nodes - 1,
    )
    if kind != "all-reduce":
        return (ring,)
    # Data goes up a tree and down again: a chain inside a node, halving across nodes. 0.92 is
    # NCCL's factor for trees.
    tree = legs(
        1 / 0.92,
        1 / 0.92 / few,
        many - 1,
        math.ceil(math.log2(nodes)),
    )
    return twice(ring), twice(tree)


def twice(legs: Legs) -> Legs:
    """Double the legs: an all-reduce is a reduce-scatter and an all-gather."""
    return tuple(Leg(leg.lanes, 2 * leg.load, leg.bandwidth, 2 * leg.hops) for leg in legs)


# A torus has slices, and its chips may have two halves.


def _on_torus(kind: CollectiveKind, groups: Seats, hardware: Hardware) -> Legs:
    size = max(map(len, groups))
    slices = max(len({position.slice for position in group}) for group in groups)
    cores = max(len({position.core for position in group}) for group in groups)
    # A part is a group's members in one slice and core; the other cores do the same work at the
    # same time.
    parts = tuple(part for group in groups for part in _apart(group))
    within = max(map(len, parts))
    exchange = kind == "all-to-all"
    legs = []
    if cores > 1:
        load = (cores - 1) / (size if exchange else cores)
        legs.append(Leg(("chip",), load, hardware.ici.chip_bandwidth, 1))
    if within > 1:
        legs.append(
            _all_to_all(parts, 1 / slices, hardware)
            if exchange
            else _gather(parts, 1 / cores, hardware)
        )
    if slices > 1:
        load = (slices - 1) / slices / (1 if exchange else cores * within)
        legs.append(Leg(("dcn",), load, hardware.dcn_bandwidth, slices - 1))
    if kind == "all-reduce":
        return twice(tuple(legs))
    return tuple(legs)


def _apart(group: tuple[Position, ...]) -> list[tuple[Position, ...]]:
    """Divide a group's members by slice and core, in the group's order."""
    parts: dict[tuple[int, int], list[Position]] = defaultdict(list)
    for position in group:
        parts[position.slice, position.core].append(position)
    return [tuple(part) for part in parts.values()]


class _Load:
    """The bytes on each directed link of the slices, by axis."""

    def __init__(self, hardware: Hardware) -> None:
        self.shape = hardware.ici.shape
        self.wraps = hardware.ici.wraps
        self.axes: list[dict[tuple[int, ...], float]] = [defaultdict(float) for _ in self.shape]

    def send(self, start: Position, end: Position, amount: float) -> int:
        """Add a message along its shortest way, axis after axis, half on either of equal ways, and
        return the number of links on it.

        Args:
          amount: its share of the bytes of the collective.
        """
        here = list(start.coords)
        hops = 0
        for axis, (side, wraps) in enumerate(
            zip(
                self.shape,
                self.wraps,
                strict=True,
            )
        ):
            ahead = end.coords[axis] - here[axis]
            ways = {ahead: amount}
            if wraps and ahead:
                up = ahead % side
                down = ahead % side - side
                if up == -down:
                    ways = {up: amount / 2, down: amount / 2}
                else:
                    ways = {min(up, down, key=abs): amount}
            for way, part in ways.items():
                step = 1 if way > 0 else -1
                for hop in range(0, way, step):
                    place = (
                        *here[:axis],
                        (here[axis] + hop) % side,
                        *here[axis + 1 :],
                    )
                    self.axes[axis][(start.slice, step, *place)] += part
            hops += abs(next(iter(ways)))
            here[axis] = end.coords[axis]
        return hops

    @property
    def busiest(self) -> dict[int, float]:
        """The bytes on the busiest link of each axis that is used."""
        return {axis: max(links.values()) for axis, links in enumerate(self.axes) if links}

    @property
    def lanes(self) -> tuple[str, ...]:
        """The directions of axes that are used, each axis's `+` before its `-`."""
        ways = [sorted({step for _, step, *_ in links}, reverse=True) for links in self.axes]
        return tuple(
            f"ici:{'xyz'[axis]}{'+' if step > 0 else '-'}"
            for axis, used in enumerate(ways)
            for step in used
        )


def _sides(group: tuple[Position, ...]) -> tuple[tuple[int, ...], ...] | None:
    """Return a box's coordinates along each axis; None for a group that is not a box."""
    sides = tuple(
        tuple(sorted(set(line)))
        for line in zip(*(position.coords for position in group), strict=True)
    )
    if math.prod(map(len, sides)) == len({position.coords for position in group}):
        return sides
    return None


def _gather(groups: Seats, part: float, hardware: Hardware) -> Leg:
    """Plan an all-gather or reduce-scatter of `part` of the bytes in each group, which lies in one
    slice and core.
    """
    size = max(map(len, groups))
    load = _Load(hardware)
    bandwidth = hardware.ici.link_bandwidth
    boxes = [_sides(group) for group in groups]
    if None in boxes:
        hops = max([_ring(load, group) for group in groups]) / 2
        return Leg(
            load.lanes, part * (size - 1) / size * max(load.busiest.values()), bandwidth, hops
        )
    for line in (line for group in groups for line in _lines(group)):
        _ring(load, line)
    # Each axis takes data in proportion to what it can carry.
    share = sum(1 / busiest for busiest in load.busiest.values())
    hops = max(_reach(box, hardware) for box in boxes if box)
    return Leg(load.lanes, part * (size - 1) / size / share, bandwidth, hops)


def _reach(box: tuple[tuple[int, ...], ...], hardware: Hardware) -> int:
    """Count the hops between the two members that are farthest from one another."""
    spans = [side[-1] - side[0] for side in box]
    axes = zip(spans, hardware.ici.shape, hardware.ici.wraps, strict=True)
    return sum(min(span, -(-size // 2)) if wraps else span for span, size, wraps in axes)


def _lines(group: tuple[Position, ...]) -> list[tuple[Position, ...]]:
    """List the lines of a box along each axis with more than one member, each line in order."""
    found = []
    for axis in range(len(group[0].coords)):
        lines: dict[tuple[int, ...], list[Position]] = defaultdict(list)
        for position in sorted(group):
            lines[(*position.coords[:axis], *position.coords[axis + 1 :])].append(position)
        found += [tuple(line) for line in lines.values() if len(line) > 1]
    return found


def _ring(load: _Load, members: tuple[Position, ...]) -> int:
    """Send half of the data once round in each direction, and return the hops of one round."""
    hops = 0
    for here, there in pairwise((*members, members[0])):
        hops += load.send(here, there, 0.5)
        load.send(there, here, 0.5)
    return hops


def _all_to_all(groups: Seats, part: float, hardware: Hardware) -> Leg:
    """Spread `part` of every member's bytes evenly over its group, along shortest ways."""
    load = _Load(hardware)
    hops = 0
    for group in groups:
        box = _sides(group)
        # In a box each axis can be taken alone: a message moves along it once, whatever its other
        # coordinates are.
        for line in _lines(group) if box else [group]:
            for here, there in permutations(line, 2):
                hops = max(hops, load.send(here, there, part / len(line)))
        hops = max(hops, _reach(box, hardware) if box else 0)
    return Leg(
        load.lanes,
        max(load.busiest.values()),
        hardware.ici.link_bandwidth,
        hops,
    )


def _messages(pairs: Seats, hardware: Hardware) -> Legs:
    """Send the message of each (source, target) pair on its way, all at the same time."""
    load = _Load(hardware)
    hops = 0
    slices = False
    cores = False
    for start, end in pairs:
        if start.slice != end.slice:
            slices = True
        elif start.coords == end.coords:
            cores = True
        else:
            hops = max(hops, load.send(start, end, 1.0))
    legs = []
    if cores:
        legs.append(Leg(("chip",), 1.0, hardware.ici.chip_bandwidth, 1))
    if load.busiest:
        legs.append(
            Leg(
                load.lanes,
                max(load.busiest.values()),
                hardware.ici.link_bandwidth,
                hops,
            )
        )
    if slices:
        legs.append(Leg(("dcn",), 1.0, hardware.dcn_bandwidth, 1))
    return tuple(legs)
