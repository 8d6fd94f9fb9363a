"""The bytes that an instruction really reads and writes.

A fusion that slices one layer out of stacked weights reads one layer, and one that updates a slice
in place writes one slice, whatever the sizes of its operand and result. Arrays that the compiler
put on the chip or the host do not count.
"""

from __future__ import annotations

from jaxpar.hlo.program.module import Computation, Instruction, Module, Shape
from jaxpar.hlo.program.opcodes import CALLERS, COLLECTIVES, ELEMENTWISE, SLICES

HOST = 5
"""The memory space of the host, on every platform that has one."""
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}
"""The number of the operand with which an opcode updates its first operand."""


def in_memory(module: Module, shape: Shape) -> bool:
    """Return whether an array lies in device memory (HBM), not on the chip or on the host.

    On a TPU only space 0 is device memory; elsewhere every space but the host's is (S(1) on a GPU
    is memory set aside for collectives).
    """
    if module.tiled:
        return shape.space == 0
    return shape.space != HOST


def memory_bytes(module: Module, shape: Shape) -> int:
    """Count the bytes of the arrays of a shape that lie in device memory."""
    return sum(leaf.bytes for leaf in shape.leaves() if in_memory(module, leaf))


def result_of(instruction: Instruction) -> Shape:
    """Return the shape that an instruction makes; for the start of an asynchronous pair, the shape
    that its done will return.

    The tuple of a start has the operands first, then the result, then flags; but the tuple of
    copy-start has the result first, and the tuples of send and recv have the data first.
    """
    shape = instruction.shape
    if instruction.opcode in ("send", "recv"):
        return shape.parts[0]
    if (
        not instruction.opcode.endswith("-start")
        or len(shape.parts) < 2
        or instruction.opcode == "all-reduce-start"
    ):
        return shape
    return shape.parts[0 if instruction.opcode == "copy-start" else 1]


def traffic(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Count the bytes that one execution of an instruction reads and writes in device memory. Of an
    array that is sliced or updated in place only the part counts.
    """
    shapes = [operand.shape for operand in computation.operands(instruction)]
    result = result_of(instruction)
    if instruction.base in CALLERS:
        inner = module.called(instruction)
    else:
        inner = []
    if inner:
        return _fusion_traffic(module, inner[0], result, shapes)
    written = memory_bytes(module, result)
    match instruction.base:
        case "dynamic-slice" | "slice" | "gather":
            if in_memory(module, shapes[0]):
                read = result.bytes
            else:
                read = 0
            return written + read + sum(memory_bytes(module, shape) for shape in shapes[1:])
        case "dynamic-update-slice":
            return _share(module, shapes[0], shapes[1].bytes) + memory_bytes(module, shapes[1])
        case "scatter":
            updates = shapes[len(shapes) // 2 + 1 :]
            changed = sum(2 * _share(module, shapes[0], update.bytes) for update in updates)
            return changed + sum(
                memory_bytes(module, shape) for shape in shapes[len(shapes) // 2 :]
            )
        case _:
            return written + sum(memory_bytes(module, shape) for shape in shapes)


def _share(module: Module, whole: Shape, part: int) -> int:
    if in_memory(module, next(whole.leaves(), whole)):
        return part
    return 0


def _fusion_traffic(
    module: Module, inner: Computation, result: Shape, operands: list[Shape]
) -> int:
    need = element_shares(module, inner)
    given = zip(inner.parameters, operands, strict=False)
    read = sum(need.get(name, 1.0) * memory_bytes(module, shape) for name, shape in given)
    outputs = _outputs(inner)
    leaves = list(result.leaves())
    if len(outputs) != len(leaves):
        return round(read) + memory_bytes(module, result)
    written = 0
    for output, leaf in zip(outputs, leaves, strict=True):
        if _is_passed_on(inner, output):
            continue
        update = _update_in_place(inner, output)
        if update:
            part = inner.instructions[update.operands[_UPDATES[update.opcode]]].shape
        else:
            part = leaf
        written += part.bytes if in_memory(module, leaf) else 0
    return round(read) + written


def _outputs(inner: Computation) -> list[Instruction]:
    root = inner.result
    if root.opcode == "tuple":
        return inner.operands(root)
    return [root]


def _is_passed_on(inner: Computation, output: Instruction) -> bool:
    """Return whether a fusion does not write this output: an operand handed on, or a collective
    that goes on.
    """
    return output.name != inner.root and (
        output.opcode == "parameter" or output.opcode in COLLECTIVES
    )


def _update_in_place(inner: Computation, output: Instruction) -> Instruction | None:
    """Find the instruction that makes an output by updating part of an operand of the fusion in
    place; None if none does.
    """
    update = inner.behind(output.name)
    if update is None or update.opcode not in _UPDATES:
        return None
    whole = inner.behind(update.operands[0])
    if whole is not None and whole.opcode == "parameter":
        return update
    return None


def element_shares(module: Module, inner: Computation) -> dict[str, float]:
    """Find for each instruction of a fused computation the share of its elements, from 0 to 1, that
    the results depend on.

    A fusion computes an element only when it is needed: if an array is only sliced, only the slice
    is computed or read. Several readers are assumed to need different elements, up to the whole. A
    collective inside reads what it needs itself.
    """
    share: dict[str, float] = {inner.root: 1.0}
    outputs = {output.name: output for output in _outputs(inner)}
    passed_on = {name for name, output in outputs.items() if _is_passed_on(inner, output)}
    updates = [_update_in_place(inner, output) for output in outputs.values()]
    in_place = {update.name for update in updates if update is not None}
    for name in reversed(inner.instructions):
        users = [
            user
            for user in inner.users[name]
            if not (user.name == inner.root and name in passed_on)
        ]
        source = inner.instructions[name]
        asked = (
            _source_share(
                module,
                source,
                user,
                share.get(user.name, 0.0),
                user.name in in_place,
            )
            for user in users
        )
        share.setdefault(name, min(1.0, sum(asked)))
    return share


def _source_share(
    module: Module, source: Instruction, user: Instruction, share: float, in_place: bool
) -> float:
    """Find the share of `source` that a user needs to make `share` of its own elements."""
    if share == 0.0 or user.opcode in COLLECTIVES:
        return 0.0
    whole = source.shape.elements or 1
    first = user.operands[0] == source.name
    if user.opcode in SLICES and first:
        return share * user.shape.elements / whole
    if user.opcode in _UPDATES and first:
        return 0.0 if in_place else share
    if user.opcode == "fusion" and (inner := module.called(user)):
        (nested,) = inner
        need = element_shares(module, nested)
        pairs = zip(nested.parameters, user.operands, strict=False)
        return sum(need[parameter] for parameter, name in pairs if name == source.name)
    if user.opcode in ELEMENTWISE or user.opcode in SLICES:
        return share
    return 1.0


def copied_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Count the bytes of one execution that cross the host link: the result's, or the update's
    where an array is updated in place.

    Args:
      instruction: a copy from or to the host, or a fusion that is one.
    """
    where = next(iter(module.called(instruction)), None)
    root, where = (where.result, where) if where else (instruction, computation)
    if root.base == "dynamic-update-slice":
        return where.instructions[root.operands[1]].shape.bytes
    return result_of(root).bytes
