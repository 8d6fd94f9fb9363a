"""Which devices take part in a collective, in each of the three ways the text says it."""

from __future__ import annotations

import re
from math import prod

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
        rows, _ = dims = _ints(match[1])
        flat = _iota(_ints(match[2]) if match[2] else (prod(dims),), _ints(match[3]))
        width = len(flat) // rows
        return tuple(tuple(flat[row * width : (row + 1) * width]) for row in range(rows))
    groups = tuple(_ints(group.strip("{}")) for group in split(text[1:-1])) if text.startswith("{") else ()
    return groups or (tuple(range(devices)),)


def source_target_pairs(permute: Instruction) -> Groups:
    """(source, target) positions of a collective-permute."""
    return tuple(_ints(pair.strip("{}")) for pair in split(permute.attributes.get("source_target_pairs", "{}")[1:-1]))


def _of_mesh(text: str, device_ids: str) -> Groups:
    """Groups along some axes of a mesh: one group for each position of the others."""
    axes_text, _, tail = text.removeprefix("mesh[").partition("]")
    names, sizes = zip(*(piece.rsplit("=", 1) for piece in split(axes_text)), strict=True)
    names, sizes = [name.strip("'") for name in names], [int(size) for size in sizes]
    order, _, chosen = (device_ids or tail).rpartition("{")
    devices = _device_order(order, prod(sizes))
    # Every axis is cut into its parts inside, chosen and outside; dims and which of them are chosen, in order.
    dims: list[int] = []
    taken: list[int] = []
    cuts: dict[int, list[tuple[int, int, int]]] = {}
    for place, piece in enumerate(split(chosen.strip("{} "))):
        match = _AXIS.match(piece.strip())
        if match is None or match[1] not in names:
            raise ValueError(f"mesh axis {piece!r} in replica_groups")
        axis = names.index(match[1])
        before, size = (int(match[2]), int(match[3])) if match[2] else (1, sizes[axis])
        cuts.setdefault(axis, []).append((before, size, place))
    chosen_at: dict[int, int] = {}
    for axis, whole in enumerate(sizes):
        done = 1
        for before, size, place in sorted(cuts.get(axis, ())):
            dims.append(before // done)
            chosen_at[place] = len(dims)
            dims.append(size)
            done = before * size
        dims.append(whole // done)
    taken = [chosen_at[place] for place in sorted(chosen_at)]
    outside = [dim for dim in range(len(dims)) if dim not in taken]
    flat = [devices[i] for i in _iota(tuple(dims), (*outside, *taken))]
    width = prod(dims[dim] for dim in taken)
    return tuple(tuple(flat[start : start + width]) for start in range(0, len(flat), width))


def _device_order(text: str, count: int) -> list[int]:
    """`([4,2]T(1,0))` or a plain list; the identity where nothing is said."""
    match = _IOTA.search(text)
    if match:
        return _iota(_ints(match[1]), _ints(match[3]))
    return list(_ints(text)) or list(range(count))


def _iota(dims: tuple[int, ...], permutation: tuple[int, ...]) -> list[int]:
    """0, 1, 2, ... as an array of these dims, transposed, flat again."""
    permutation = permutation or tuple(range(len(dims)))
    strides = [prod(dims[dim + 1 :]) for dim in range(len(dims))]
    flat = [0]
    for dim in permutation:
        flat = [start + step * strides[dim] for start in flat for step in range(dims[dim])]
    return flat


def _ints(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text or ""))
