"""The seconds of a collective from the sizes of a mesh alone: where a mesh's axes lie on a torus or
in nodes, without a list of its devices.

`jaxpar.rehearse.link_costs` finds the same from the places of all devices; the tests hold the two
beside each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, product
from typing import NamedTuple

from jaxpar.base.hardware import Hardware
from jaxpar.base.layout.mesh import MESH_AXES, MeshAxis
from jaxpar.hlo.program.tasks import CollectiveKind
from jaxpar.rehearse.link_costs import (
    Leg,
    Legs,
    Spread,
    legs_time,
    switch_legs,
    switch_messages,
    twice,
)
from jaxpar.rehearse.targets import Target

Sizes = tuple[int, ...]
"""The devices along each axis of `MESH_AXES`."""


class Line(NamedTuple):
    """The part of a physical axis that a mesh axis has: so many members, and the chips from one to
    the next.
    """

    members: int
    stride: int


def send_seconds(
    kind: CollectiveKind,
    axes: tuple[MeshAxis, ...],
    size: float,
    mesh: Sizes,
    dcn: Sizes,
    target: Target,
) -> float:
    """Return the seconds of one collective in which all groups run at once.

    Args:
      kind: the kind of collective.
      axes: the mesh axes that it goes over.
      size: the bytes of one group's whole array, or of one message.
      mesh: the mesh inside a slice or node.
      dcn: the slices or nodes that each axis spans.
      target: the hardware.
    """
    return seconds_of(slopes(kind, axes, mesh, dcn, target), size)


class Slope(NamedTuple):
    """The time of an algorithm under a protocol: so many seconds at least, and for each byte."""

    latency: float
    per_byte: float


def seconds_of(slopes: tuple[Slope, ...], size: float) -> float:
    """Return the seconds of the fastest of some algorithms; 0 where there are none."""
    return min((one.latency + size * one.per_byte for one in slopes), default=0.0)


_MANY = 2**40
"""Bytes beside which a latency is nothing."""


def slopes(
    kind: CollectiveKind, axes: tuple[MeshAxis, ...], mesh: Sizes, dcn: Sizes, target: Target
) -> tuple[Slope, ...]:
    """List the algorithms of a collective under each protocol, without those that another one
    beats at any size.
    """
    hardware = target.hardware
    together = hardware.ici.kind != "torus" or kind == "ppermute"
    found: list[Slope] = []
    for legs in _routes(kind, axes, mesh, dcn, target):
        alone = [replace(hardware, protocols=(one,)) for one in hardware.protocols]
        for figures in alone or [hardware]:
            one = legs_time(legs, together, _MANY, figures)
            found.append(Slope(one.latency, (one.seconds - one.latency) / _MANY))
    found.sort()
    return tuple(
        one
        for place, one in enumerate(found)
        if all(one.per_byte < before.per_byte for before in found[:place])
    )


def _routes(
    kind: CollectiveKind, axes: tuple[MeshAxis, ...], mesh: Sizes, dcn: Sizes, target: Target
) -> tuple[Legs, ...]:
    """List the algorithms that a collective may use."""
    if target.hardware.ici.kind == "torus":
        return (_on_torus(kind, axes, mesh, dcn, target.hardware),)
    inside, across = _in_nodes(mesh, dcn, target)
    within = math.prod(inside[MESH_AXES.index(axis)] for axis in axes)
    nodes = math.prod(across[MESH_AXES.index(axis)] for axis in axes)
    if within * nodes == 1:
        return ()
    if kind == "ppermute":
        return (switch_messages(near=within > 1, far=nodes > 1, hardware=target.hardware),)
    spread = Spread(within * nodes, nodes, within, within)
    return switch_legs(kind, spread, target.hardware)


# Switches connect the GPUs of a node.


def _in_nodes(mesh: Sizes, dcn: Sizes, target: Target) -> tuple[Sizes, Sizes]:
    """Divide each axis into its devices inside a node and the nodes that it spans: the innermost
    axes fill a node first, unless the mesh says which span nodes.
    """
    left = math.prod(target.hardware.ici.shape)
    inside = list(mesh)
    across = list(dcn)
    for place in reversed(range(len(mesh))):
        here = math.gcd(mesh[place], left)
        left //= here
        inside[place] = here
        across[place] = dcn[place] * mesh[place] // here
    return tuple(inside), tuple(across)


@lru_cache(maxsize=65536)
def spans_nodes(axes: tuple[MeshAxis, ...], mesh: Sizes, dcn: Sizes, target: Target) -> bool:
    """Return whether a collective over some axes leaves its slice, or its node of GPUs."""
    if target.hardware.ici.kind == "torus":
        return any(dcn[MESH_AXES.index(axis)] > 1 for axis in axes)
    _, across = _in_nodes(mesh, dcn, target)
    return any(across[MESH_AXES.index(axis)] > 1 for axis in axes)


# A torus has slices, and its chips may have two halves.


def _on_torus(
    kind: CollectiveKind, axes: tuple[MeshAxis, ...], mesh: Sizes, dcn: Sizes, hardware: Hardware
) -> Legs:
    places = [MESH_AXES.index(axis) for axis in axes]
    slices = math.prod(dcn[place] for place in places)
    lines = _lines_of(tuple(places), mesh, hardware)
    cores = lines[-1].members if hardware.devices_per_chip > 1 else 1
    chips = lines[: len(hardware.ici.shape)]
    within = math.prod(line.members for line in chips)
    if kind == "ppermute":
        return _message(chips, cores, slices, hardware)
    size = slices * cores * within
    exchange = kind == "all-to-all"
    legs: list[Leg] = []
    if cores > 1:
        load = (cores - 1) / (size if exchange else cores)
        legs.append(Leg(("chip",), load, hardware.ici.chip_bandwidth, 1))
    if within > 1 and exchange:
        legs.append(_all_to_all(chips, 1 / slices, hardware))
    elif within > 1:
        legs.append(_gather(chips, 1 / cores, hardware))
    if slices > 1:
        load = (slices - 1) / slices / (1 if exchange else cores * within)
        legs.append(Leg(("dcn",), load, hardware.dcn_bandwidth, slices - 1))
    if kind == "all-reduce":
        return twice(tuple(legs))
    return tuple(legs)


def _gather(lines: list[Line], part: float, hardware: Hardware) -> Leg:
    """Plan an all-gather or reduce-scatter over all the physical axes that a group has."""
    share = 0.0
    hops = 0
    for line, length, wraps in _used(lines, hardware):
        share += 1 / _ring_load(line, length, wraps)
        hops += _span(line, length, wraps)
    members = math.prod(line.members for line in lines)
    load = part * (members - 1) / members / share
    return Leg(("ici",), load, hardware.ici.link_bandwidth, hops)


def _all_to_all(lines: list[Line], part: float, hardware: Hardware) -> Leg:
    """Plan an exchange, in which each physical axis is taken one after another."""
    load = 0.0
    hops = 0
    for line, length, wraps in _used(lines, hardware):
        ring = _is_ring(line, length, wraps)
        load = max(load, part * line.stride * line.members / (8 if ring else 4))
        hops += _span(line, length, wraps)
    return Leg(("ici",), load, hardware.ici.link_bandwidth, hops)


def _message(lines: list[Line], cores: int, slices: int, hardware: Hardware) -> Legs:
    """Plan messages from each device to the next of its group."""
    legs: list[Leg] = []
    if cores > 1:
        legs.append(Leg(("chip",), 1.0, hardware.ici.chip_bandwidth, 1))
    loads: list[float] = []
    hops = 0
    for line, length, wraps in _used(lines, hardware):
        # Of a ring of two each message goes half of either way.
        halved = line.members == 2 and _is_ring(line, length, wraps)
        loads.append(line.stride * (0.5 if halved else 1.0))
        hops = max(hops, line.stride)
    if loads:
        legs.append(Leg(("ici",), max(loads), hardware.ici.link_bandwidth, hops))
    if slices > 1:
        legs.append(Leg(("dcn",), 1.0, hardware.dcn_bandwidth, 1))
    return tuple(legs)


def _used(lines: list[Line], hardware: Hardware) -> Iterator[tuple[Line, int, bool]]:
    """Yield the lines of more than one member, each with the length of its physical axis and
    whether it wraps.
    """
    axes = zip(lines, hardware.ici.shape, hardware.ici.wraps, strict=True)
    for line, length, wraps in axes:
        if line.members > 1:
            yield line, length, wraps


def _is_ring(line: Line, length: int, wraps: bool) -> bool:
    return wraps and line.members * line.stride == length


def _ring_load(line: Line, length: int, wraps: bool) -> float:
    """Return the bytes on the busiest link for each byte that goes round a line, half of them in
    each direction: rings that are woven into each other share links.
    """
    return line.stride * (0.5 if _is_ring(line, length, wraps) else 1.0)


def _span(line: Line, length: int, wraps: bool) -> int:
    span = (line.members - 1) * line.stride
    return min(span, -(-length // 2)) if wraps else span


def _lines_of(places: tuple[int, ...], mesh: Sizes, hardware: Hardware) -> list[Line]:
    """Find the line of a group along each physical axis; the halves of a chip are one more."""
    found: list[Line] = []
    for parts in _assignment(mesh, _physical(hardware)):
        members = math.prod(parts[place] for place in places)
        own = [place for place in places if parts[place] > 1]
        # On one physical axis the innermost mesh axes are neighbours.
        inner = math.prod(parts[max(own, default=len(parts)) + 1 :])
        found.append(Line(members, inner))
    return found


def _physical(hardware: Hardware) -> tuple[int, ...]:
    if hardware.devices_per_chip > 1:
        return (*hardware.ici.shape, hardware.devices_per_chip)
    return hardware.ici.shape


@lru_cache(maxsize=65536)
def _assignment(mesh: Sizes, physical: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Assign mesh axes to physical axes, as `jax.experimental.mesh_utils.create_device_mesh` does.

    Returns:
      For each physical axis, its part of each mesh axis.
    """
    parts = _whole_axes(mesh, physical) or _split_axes(mesh, physical)
    return tuple(tuple(row) for row in parts)


def _whole_axes(mesh: Sizes, physical: tuple[int, ...]) -> list[list[int]] | None:
    """Give each mesh axis whole physical axes, the innermost first and as many as can be; None
    where that does not come out.
    """
    parts = [[1] * len(mesh) for _ in physical]
    free = list(range(len(physical)))
    for place in reversed(range(len(mesh))):
        if mesh[place] == 1:
            continue
        choices = (
            chosen
            for count in range(len(free), 0, -1)
            for chosen in combinations(free, count)
            if math.prod(physical[axis] for axis in chosen) == mesh[place]
        )
        chosen = next(choices, None)
        if chosen is None:
            return None
        for axis in chosen:
            parts[axis][place] = physical[axis]
            free.remove(axis)
    return parts


def _split_axes(mesh: Sizes, physical: tuple[int, ...]) -> list[list[int]]:
    """Give each mesh axis parts of physical axes, by the preferences of `create_device_mesh`:
    whole axes, many of them, then those that are in use.
    """
    parts = [[1] * len(mesh) for _ in physical]
    for place in reversed(range(len(mesh))):
        taken = [math.prod(row) for row in parts]
        free = [length // used for length, used in zip(physical, taken, strict=True)]
        choices = [
            chosen
            for chosen in product(*(_divisors(length) for length in free))
            if math.prod(chosen) == mesh[place]
        ]
        if not choices:  # the mesh does not fit; whoever makes it says so
            continue
        best = max(choices, key=lambda chosen: _preference(chosen, physical, taken))
        for axis, size in enumerate(best):
            parts[axis][place] = size
    return parts


def _preference(
    chosen: tuple[int, ...], physical: tuple[int, ...], taken: list[int]
) -> tuple[int, int, int, tuple[int, ...]]:
    whole = [size for size, length in zip(chosen, physical, strict=True) if size == length]
    shared = [size for size, used in zip(chosen, taken, strict=True) if used > 1]
    return (
        math.prod(whole),
        sum(size > 1 for size in whole),
        math.prod(shared),
        chosen,
    )


@lru_cache(maxsize=1024)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, number + 1) if number % size == 0)
