"""The collectives of a program: what one execution of an instruction moves, between which devices.

The text says in several ways which devices take part. A TPU module's text describes one slice, and
the host sends the traffic between slices. Partition p of slice s has a number of its own, 100000 (s
+ 1) + p, in the `_xla_megascale_target` of a send; inside a slice, collectives count partitions
from 0. Both are turned into positions in the program's device assignment.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from jaxpar.hlo.program.module import Computation, Instruction, Module
from jaxpar.hlo.program.opcodes import CALLERS, COLLECTIVES
from jaxpar.hlo.program.tasks import Collective, CollectiveKind, Groups
from jaxpar.hlo.program.text import split

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"'?([^'\s,{}]+?)'?(?::\((\d+)\)(\d+))?$")
_TRANSFERS: dict[str, CollectiveKind] = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "ppermute",
}
_SLICE = 100_000


def collective_of(
    module: Module, devices: Devices, computation: Computation, instruction: Instruction
) -> Collective | None:
    """Find the collective that an instruction is or wraps (in a fusion, call or async-start); None
    if there is none.

    A transfer to or from the host (`send` with is_host_transfer) does not count, unless it is
    traffic between slices. Groups are empty where the text has them in an unknown form.

    Args:
      devices: the positions of the module's devices in the program's assignment.
    """
    if instruction.attributes.get("is_host_transfer") == "true":
        said = instruction.frontend
        between_slices = said.get("_xla_host_transfer_handler_name") == "xla_megascale_runtime"
        if instruction.opcode not in ("send", "recv") or not between_slices:
            return None
        kind = _TRANSFERS.get(said.get("_xla_megascale_transfer_type", ""), "ppermute")
        if "_xla_megascale_target" in said:
            groups = devices.between(said["_xla_megascale_target"])
        else:
            groups = ()
        return _collective(computation, instruction, kind, groups)
    if kind := COLLECTIVES.get(instruction.base):
        pairs = kind == "ppermute"
        try:
            if pairs:
                groups = source_target_pairs(instruction)
            else:
                groups = replica_groups(instruction, module.devices)
        except ValueError:
            groups = ()
        return _collective(computation, instruction, kind, devices.everywhere(groups))
    for inner in module.called(instruction) if instruction.base in CALLERS else ():
        for called in inner.instructions.values():
            if (found := collective_of(module, devices, inner, called)) is not None:
                # An all-reduce wrapped with a slice of its result is how the TPU compiler writes a
                # reduce-scatter.
                kept = sum(
                    leaf.bytes for leaf in instruction.shape.leaves() if leaf.dtype == found.dtype
                )
                sliced = found.kind == "all-reduce" and kept < found.bytes
                if sliced:
                    return replace(found, kind="reduce-scatter")
                return found
    return None


def _collective(
    computation: Computation, instruction: Instruction, kind: CollectiveKind, groups: Groups
) -> Collective:
    operands = [operand.shape for operand in computation.operands(instruction)]
    if instruction.opcode == "recv":  # its send is not in this computation
        operands = [next(instruction.shape.leaves())]
    elif instruction.base in ("send", "ragged-all-to-all"):
        operands = operands[:1]  # the others are offsets, sizes and tokens
    by_dtype: Counter[str] = Counter()
    for leaf in (leaf for operand in operands for leaf in operand.leaves() if leaf.bytes):
        by_dtype[leaf.dtype] += leaf.bytes
    if kind == "all-gather" and groups:
        copies = len(groups[0])
    else:
        copies = 1
    return Collective(
        kind,
        groups,
        copies * by_dtype.total(),
        max(
            by_dtype,
            key=by_dtype.__getitem__,
            default="",
        ),
    )


def replica_groups(collective: Instruction, devices: int) -> Groups:
    """Read the groups of a collective, as positions in the device assignment.

    The known forms are lists `{{0,1},{2,3}}`, iota tilings `[2,4]<=[4,2]T(1,0)`, and mesh axes
    `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`, where `'b':(2)2` is the part of axis b of
    size 2 that has 2 outside it. Empty groups mean all devices together.

    Args:
      devices: the number of devices of the module.

    Raises:
      ValueError: the groups have none of these forms.
    """
    text = collective.attributes.get("replica_groups", "")
    if text.startswith("mesh"):
        return _of_mesh(text, collective.attributes.get("device_ids", ""))
    if text.startswith("["):
        if (match := _IOTA.match(text)) is None:
            raise ValueError(f"replica_groups {text[:60]!r}")
        shape = _ints(match[1])
        return _rows(_iota(_ints(match[2] or str(prod(shape))), _ints(match[3])).reshape(shape))
    if text.startswith("{"):
        groups = tuple(_ints(group) for group in split(text[1:-1]))
    else:
        groups = ()
    return groups or (tuple(range(devices)),)


def source_target_pairs(permute: Instruction) -> Groups:
    """Read a permute's (source, target) positions; empty where the text states none.

    Args:
      permute: a collective-permute, or the send or recv of one, which states them in its frontend
        attributes.
    """
    stated = permute.attributes | permute.frontend
    text = next(
        (value for key, value in stated.items() if key.endswith("source_target_pairs")), "{}"
    )
    return tuple(_ints(pair) for pair in split(text[1:-1]))


def _of_mesh(text: str, device_ids: str) -> Groups:
    """Read groups along some axes of a mesh: one group for each position on the other axes."""
    axes, _, tail = text.removeprefix("mesh[").partition("]")
    sizes = {
        name.strip("'"): int(size)
        for name, _, size in (piece.rpartition("=") for piece in split(axes))
    }
    order, _, chosen = (device_ids or tail).rpartition("{")
    # (axis, size of what is outside the part, size of the part)
    picked: list[tuple[str, int, int]] = []
    for piece in split(chosen.strip("{} ")):
        match = _AXIS.match(piece)
        if match is None or match[1] not in sizes:
            raise ValueError(f"mesh axis {piece!r} in replica_groups")
        picked.append(
            (
                match[1],
                int(match[2] or 1),
                int(match[3] or sizes[match[1]]),
            )
        )
    # Every axis becomes several dims: what is outside each part that was picked, the part itself,
    # and the rest.
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
    # `([4,2]T(1,0))` is a device order, and so is a plain list; where nothing is said it is the
    # identity.
    match = _IOTA.search(order)
    if match:
        devices = _iota(_ints(match[1]), _ints(match[3]))
    else:
        devices = np.array(_ints(order) or range(prod(dims)))
    devices = devices.reshape(dims).transpose(outside + inside)
    return _rows(devices.reshape(-1, prod(dims[dim] for dim in inside)))


def _iota(
    dims: tuple[int, ...],
    permutation: tuple[int, ...],
) -> np.ndarray:
    """Reshape 0, 1, 2, ... to the dims, transpose the array, and flatten it again."""
    return np.arange(prod(dims)).reshape(dims).transpose(permutation or None).ravel()


def _rows(groups: np.ndarray) -> Groups:
    return tuple(map(tuple, groups.tolist()))


def _ints(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text or ""))


# Programs over several slices.


@dataclass(frozen=True, slots=True)
class Devices:
    """The positions in the device assignment: `slices[s][p]` is the position of partition p of
    slice s.
    """

    slices: tuple[tuple[int, ...], ...]

    def everywhere(self, groups: Groups) -> Groups:
        """Repeat groups of partitions of one slice in every slice, as positions in the device
        assignment.

        Args:
          groups: groups of partitions, counted from 0 inside a slice.
        """
        if len(self.slices) == 1:
            return groups
        return tuple(
            tuple(here[partition] for partition in group)
            for here in self.slices
            for group in groups
        )

    def between(self, target: str) -> Groups:
        """Read groups over slices, as positions in the device assignment.

        Args:
          target: the `_xla_megascale_target` of a send: `{1,2}x{0:7}`, `{{100000,200000},...}` or
            `{{100000->200000},...}`, which gives pairs of source and target. Slices are counted
            from 1.
        """
        if "x" in target:
            chosen, partitions = (list(_parse_numbers(part)) for part in target.split("x"))
            return tuple(tuple(self.slices[s - 1][p] for s in chosen) for p in partitions)
        groups = [_ints(group) for group in re.findall(r"\{([\d,>\-]+)\}", target)]
        return tuple(
            tuple(self.slices[n // _SLICE - 1][n % _SLICE] for n in group) for group in groups
        )


def devices_of(module: Module, slice_of: Sequence[int] | None) -> Devices:
    """Find the positions of a module's devices; its text describes all of them, or one slice among
    equals.

    Args:
      slice_of: the slice of each device of the assignment; None = there is one slice.
    """
    if slice_of is None or module.devices == len(slice_of):
        return Devices((tuple(range(module.devices)),))
    order = sorted(set(slice_of))
    return Devices(tuple(tuple(p for p, s in enumerate(slice_of) if s == one) for one in order))


def paired_send(computation: Computation, instruction: Instruction) -> str:
    """Find the name of the send of which an instruction is the other half; empty if this
    computation has none.

    The two share a rendezvous if they go between slices, and source_target_pairs otherwise.

    Args:
      instruction: a recv, a recv-done or a send-done.
    """
    if instruction.opcode.endswith("-done"):
        if instruction.operands[0] not in computation.instructions:
            return ""
        instruction = computation.instructions[instruction.operands[0]]
    key = _rendezvous(instruction)
    alike = [i for i in computation.instructions.values() if key and _rendezvous(i) == key]
    here = {i.opcode: i.name for i in reversed(alike)}  # the first of each
    if {"send", "recv"} <= here.keys():
        return here["send"]
    return ""


def _rendezvous(instruction: Instruction) -> str:
    stated = instruction.frontend.items()
    return next(
        (value for key, value in stated if key.endswith(("rendezvous", "source_target_pairs"))), ""
    )


def _parse_numbers(text: str) -> Iterator[int]:
    """Yield the numbers of `{1,2}` or `{0:7}`, which includes both ends."""
    for piece in text.strip("{}").split(","):
        first, _, last = piece.partition(":")
        yield from range(int(first), int(last or first) + 1)
