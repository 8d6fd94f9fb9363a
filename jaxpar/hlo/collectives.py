"""Collectives: what moves, between which devices, in one execution of an instruction."""

from __future__ import annotations

import re

from jaxpar.hlo.groups import Groups, replica_groups, source_target_pairs
from jaxpar.hlo.parse import Computation, Instruction, Module, Shape
from jaxpar.hlo.tasks import Collective, CollectiveKind

KINDS: dict[str, CollectiveKind] = {
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "ppermute",
    "collective-broadcast": "ppermute",
    "send": "ppermute",
    "recv": "ppermute",
}
_ASYNC = ("async-start", "async-update", "async-done")


def base_opcode(opcode: str) -> str:
    """`all-gather` for all-gather-start."""
    return opcode.removesuffix("-start") if opcode not in _ASYNC else opcode


def collective_of(module: Module, computation: Computation, instruction: Instruction) -> Collective | None:
    """The collective that an instruction is or wraps (in a fusion, a call, an async-start); None when there is none."""
    kind = KINDS.get(base_opcode(instruction.opcode))
    if kind is not None:
        return _collective(module, computation, instruction, kind)
    if instruction.opcode not in ("fusion", "call", "async-start"):
        return None
    for name in instruction.called:
        inner = module.computations.get(name)
        for called in inner.instructions.values() if inner else ():
            found = collective_of(module, inner, called) if inner else None
            if found is not None and inner is not None:
                return _scattered(inner, called, found)
    return None


def _scattered(inner: Computation, called: Instruction, found: Collective) -> Collective:
    """An all-reduce fused with the slice of its own part: how the TPU compiler writes a reduce-scatter."""
    users = inner.users[called.name]
    while len(users) == 1 and users[0].opcode == "bitcast":
        users = inner.users[users[0].name]
    if found.kind == "all-reduce" and [user.opcode for user in users] == ["dynamic-slice"]:
        return Collective("reduce-scatter", found.groups, found.bytes, found.dtype)
    return found


def _collective(module: Module, computation: Computation, instruction: Instruction, kind: CollectiveKind):
    operands = [computation.instructions[name].shape for name in instruction.operands]
    if instruction.opcode == "recv":
        operands = [next(instruction.shape.leaves())]
    elif instruction.opcode in ("send", "ragged-all-to-all") or "slice_sizes" in instruction.attributes:
        operands = operands[:1]
    leaves = [leaf for operand in operands for leaf in operand.leaves() if leaf.elements]
    bytes_ = sum(leaf.bytes for leaf in leaves)
    if "slice_sizes" in instruction.attributes:  # parts of larger buffers, in place
        bytes_ = min(bytes_, _sliced_bytes(instruction, leaves[0]))
    groups = _groups(module, instruction, kind)
    if kind == "all-gather":
        bytes_ *= len(groups[0])
    return Collective(kind, groups, bytes_, leaves[0].dtype if leaves else "")


def _sliced_bytes(instruction: Instruction, whole: Shape) -> int:
    sizes = re.findall(r"\{([\d,]+)\}", instruction.attributes["slice_sizes"])
    total = 0
    for size in sizes:
        elements = 1
        for dim in size.split(","):
            elements *= int(dim)
        total += elements * whole.bytes // max(whole.elements, 1)
    return total


def _groups(module: Module, instruction: Instruction, kind: CollectiveKind) -> Groups:
    if kind != "ppermute":
        return replica_groups(instruction, module.devices)
    if "source_target_pairs" in instruction.attributes:
        return source_target_pairs(instruction)
    if instruction.opcode == "collective-broadcast":
        groups = replica_groups(instruction, module.devices)
        return tuple((group[0], other) for group in groups for other in group[1:])
    # send and recv carry their pairs, if at all, in the frontend attributes.
    frontend = instruction.attributes.get("frontend_attributes", "")
    pairs = re.search(r'source_target_pairs="?([^"]*)', frontend)
    numbers = [int(number) for number in re.findall(r"\d+", pairs[1])] if pairs else []
    return tuple(zip(numbers[::2], numbers[1::2], strict=False))
