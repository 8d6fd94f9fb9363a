"""Which devices take part in a collective, in each of the three ways the text says it."""

from __future__ import annotations

import re
from math import prod

import numpy as np

from jaxpar.hlo.parse import Instruction, split

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"'?([^'\s,{}]+?)'?(?::\((\d+)\)(\d+))?$")


def replica_groups(collective: Instruction, devices: int) -> Groups:
    """The groups of a collective, as positions in the device assignment.

    Read are lists `{{0,1},{2,3}}`, iota tilings `[2,4]<=[4,2]T(1,0)`, and mesh axes
    `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`, where `'b':(2)2` is the part of axis b of size 2 that has 2
    outside it. Empty groups mean all devices together.

    Raises:
      ValueError: groups in a form that is none of these.
    """
    text = collective.attributes.get("replica_groups", "")
    if text.startswith("mesh"):
        return _of_mesh(text, collective.attributes.get("device_ids", ""))
    if text.startswith("["):
        match = _IOTA.match(text)
        if match is None:
            raise ValueError(f"replica_groups {text[:60]!r}")
        shape = _ints(match[1])
        return _rows(_iota(_ints(match[2] or str(prod(shape))), _ints(match[3])).reshape(shape))
    groups = tuple(_ints(group) for group in split(text[1:-1])) if text.startswith("{") else ()
    return groups or (tuple(range(devices)),)


def source_target_pairs(permute: Instruction) -> Groups:
    """(source, target) positions of a collective-permute; send and recv have them in their frontend attributes."""
    stated = permute.attributes | permute.frontend
    text = next((value for key, value in stated.items() if key.endswith("source_target_pairs")), "{}")
    return tuple(_ints(pair) for pair in split(text[1:-1]))


def _of_mesh(text: str, device_ids: str) -> Groups:
    """Groups along some axes of a mesh: one group for each position of the others."""
    axes, _, tail = text.removeprefix("mesh[").partition("]")
    sizes = {name.strip("'"): int(size) for name, _, size in (piece.rpartition("=") for piece in split(axes))}
    order, _, chosen = (device_ids or tail).rpartition("{")
    picked: list[tuple[str, int, int]] = []  # (axis, what is outside of the part, size of the part)
    for piece in split(chosen.strip("{} ")):
        match = _AXIS.match(piece)
        if match is None or match[1] not in sizes:
            raise ValueError(f"mesh axis {piece!r} in replica_groups")
        picked.append((match[1], int(match[2] or 1), int(match[3] or sizes[match[1]])))
    # Every axis becomes several dims: what is outside of each part of it that was picked, that part, and the rest.
    dims: list[int] = []
    place: dict[tuple[str, int, int], int] = {}
    for axis, size in sizes.items():
        done = 1
        for part in sorted(one for one in picked if one[0] == axis):
            place[part] = len(dims) + 1
            dims += [part[1] // done, part[2]]
            done = part[1] * part[2]
        dims.append(size // done)
    inside = [place[part] for part in picked]
    outside = [dim for dim in range(len(dims)) if dim not in inside]
    devices = _device_order(order, prod(dims)).reshape(dims).transpose(outside + inside)
    return _rows(devices.reshape(-1, prod(dims[dim] for dim in inside)))


def _device_order(text: str, count: int) -> np.ndarray:
    """`([4,2]T(1,0))` or a plain list; the identity where nothing is said."""
    match = _IOTA.search(text)
    return _iota(_ints(match[1]), _ints(match[3])) if match else np.array(_ints(text) or range(count))


def _iota(dims: tuple[int, ...], permutation: tuple[int, ...]) -> np.ndarray:
    """0, 1, 2, ... as an array of these dims, transposed, flat again."""
    return np.arange(prod(dims)).reshape(dims).transpose(permutation or None).ravel()


def _rows(groups: np.ndarray) -> Groups:
    return tuple(map(tuple, groups.tolist()))


def _ints(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text or ""))
