"""Devices of several slices: a TPU module's text is that of one slice, and traffic between slices is sent by the host.

Partition p of slice s has a number of its own, 100000 (s + 1) + p, in the `_xla_megascale_target` of a send; inside a
slice collectives count partitions from 0. Both are turned into positions in the program's device assignment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxpar.hlo.groups import Groups
from jaxpar.hlo.parse import Computation, Instruction, Module
from jaxpar.hlo.tasks import CollectiveKind

HANDLER = "xla_megascale_runtime"
TRANSFERS: dict[str, CollectiveKind] = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "ppermute",
}
_SLICE = 100_000


@dataclass(frozen=True, slots=True)
class Devices:
    """Positions in the device assignment: `slices[s][p]` is partition p of slice s."""

    slices: tuple[tuple[int, ...], ...]

    def everywhere(self, groups: Groups) -> Groups:
        """Groups of partitions of one slice, in every slice."""
        if len(self.slices) == 1:
            return groups
        return tuple(tuple(here[partition] for partition in group) for here in self.slices for group in groups)

    def between(self, target: str) -> Groups:
        """Groups over slices, from `{1,2}x{0:7}`, `{{100000,200000},...}` or `{{100000->200000},...}`."""
        if "x" in target:
            chosen, partitions = (list(_listed(part)) for part in target.split("x"))
            return tuple(tuple(self.slices[s - 1][p] for s in chosen) for p in partitions)
        groups = re.findall(r"\{([\d,>\-]+)\}", target)
        return tuple(tuple(self._position(int(number)) for number in re.findall(r"\d+", group)) for group in groups)

    def _position(self, number: int) -> int:
        return self.slices[number // _SLICE - 1][number % _SLICE]


def devices_of(module: Module, slice_of: Sequence[int] | None) -> tuple[Devices, str]:
    """The devices of a module, and a note on what was assumed (empty when nothing was).

    Args:
      module: the text of the only slice, or of one among equals.
      slice_of: the slice of each device of the assignment; None = slice after slice, as many as the text mentions.
    """
    here = module.devices
    if slice_of is not None and here * len(set(slice_of)) == len(slice_of):
        order = sorted(set(slice_of))
        return Devices(tuple(tuple(p for p, s in enumerate(slice_of) if s == one) for one in order)), ""
    count = max(
        (_slices_mentioned(i) for c in module.computations.values() for i in c.instructions.values()), default=1
    )
    slices = tuple(tuple(range(s * here, (s + 1) * here)) for s in range(count))
    note = f"the text is of one slice among {count}: devices are numbered slice after slice" if count > 1 else ""
    return Devices(slices), note


def _slices_mentioned(instruction: Instruction) -> int:
    target = megascale(instruction).get("_xla_megascale_target", "")
    if "x" in target:
        return max(_listed(target.split("x")[0]), default=1)
    return max((int(number) // _SLICE for number in re.findall(r"\d+", target)), default=1)


def megascale(instruction: Instruction) -> dict[str, str]:
    """What a send or recv between slices says about itself; empty for any other instruction."""
    if instruction.opcode not in ("send", "recv"):
        return {}
    said = instruction.frontend
    return said if said.get("_xla_host_transfer_handler_name") == HANDLER else {}


def paired_send(computation: Computation, instruction: Instruction) -> str:
    """The send, in the same computation, of which a recv, recv-done or send-done is the other half; empty if none.

    The two share a rendezvous between slices, source_target_pairs elsewhere.
    """
    if instruction.opcode.endswith("-done"):
        start = computation.instructions.get(instruction.operands[0])
        if start is None:
            return ""
        instruction = start
    key = _rendezvous(instruction)
    here = computation.instructions.values()
    sends = [i.name for i in here if i.opcode == "send" and key and _rendezvous(i) == key]
    receives = any(i.opcode == "recv" and _rendezvous(i) == key for i in here)
    return sends[0] if sends and receives else ""


def _rendezvous(instruction: Instruction) -> str:
    for key, value in instruction.frontend.items():
        if key.endswith(("rendezvous", "source_target_pairs")):
            return value
    return ""


def _listed(text: str) -> Iterator[int]:
    """`{1,2}` and `{0:7}`, both ends included."""
    for piece in text.strip("{}").split(","):
        first, _, last = piece.partition(":")
        yield from range(int(first), int(last or first) + 1)
