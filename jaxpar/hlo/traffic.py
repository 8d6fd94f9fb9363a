"""Bytes that an instruction really reads from and writes to device memory.

A fusion that slices one layer out of stacked weights reads one layer, and one that updates a slice in place writes one
slice, whatever the sizes of its operand and result. What the compiler put on the chip, or on the host, is not counted.
"""

from __future__ import annotations

from jaxpar.hlo.collectives import KINDS
from jaxpar.hlo.parse import Computation, Instruction, Module, Shape, words

HOST = 5
"""Memory space of the host, on every platform that has one."""
MOVES = words("copy transpose reshape slice dynamic-slice dynamic-update-slice concatenate reverse")
"""Opcodes that move data and compute nothing."""
_VIEWS = words("bitcast get-tuple-element reshape copy-done")
_SLICES = ("dynamic-slice", "slice", "gather")
_ELEMENTWISE = words(
    "abs add and atan2 bitcast bitcast-convert broadcast ceil clamp compare complex convert copy cosine divide erf"
    " exponential exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum multiply negate"
    " not or pad popcnt power real reduce-precision remainder reshape reverse round-nearest-afz round-nearest-even"
    " rsqrt select shift-left shift-right-arithmetic shift-right-logical sign sine sqrt subtract tan tanh transpose"
    " tuple xor cbrt concatenate"
)


def in_memory(module: Module, shape: Shape) -> bool:
    """Whether an array lies in device memory (HBM), not on the chip or on the host.

    On a TPU only space 0 does; elsewhere every space but the host's (S(1) on a GPU is memory set aside for
    collectives).
    """
    return shape.space == 0 if module.tiled else shape.space != HOST


def memory_bytes(module: Module, shape: Shape) -> int:
    """Bytes of the arrays of a shape that lie in device memory."""
    return sum(leaf.bytes for leaf in shape.leaves() if in_memory(module, leaf))


def result_of(instruction: Instruction) -> Shape:
    """What an instruction makes: for the start of an asynchronous pair what its done will return.

    The tuple of a start has the operands first, then the result, then flags; copy-start has the result first, and so
    have send and recv the data.
    """
    shape = instruction.shape
    if instruction.opcode in ("send", "recv"):
        return shape.parts[0]
    if not instruction.opcode.endswith("-start") or len(shape.parts) < 2 or instruction.opcode == "all-reduce-start":
        return shape
    return shape.parts[0 if instruction.opcode == "copy-start" else 1]


def traffic(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Bytes read plus bytes written by one execution of an instruction."""
    operands = computation.operands(instruction)
    inner = module.computations.get(instruction.called[0]) if instruction.called else None
    result = result_of(instruction)
    if instruction.base in ("fusion", "call", "async") and inner is not None:
        return _fusion_traffic(module, inner, result, operands)
    shapes = [operand.shape for operand in operands]
    written = memory_bytes(module, result)
    match instruction.base:
        case "dynamic-slice" | "slice" | "gather":
            read = result.bytes if in_memory(module, shapes[0]) else 0
            return written + read + sum(memory_bytes(module, shape) for shape in shapes[1:])
        case "dynamic-update-slice":
            return _share(module, shapes[0], shapes[1].bytes) + memory_bytes(module, shapes[1])
        case "scatter":
            updates = shapes[len(shapes) // 2 + 1 :]
            changed = sum(2 * _share(module, shapes[0], update.bytes) for update in updates)
            return changed + sum(memory_bytes(module, shape) for shape in shapes[len(shapes) // 2 :])
        case _:
            return written + sum(memory_bytes(module, shape) for shape in shapes)


def _share(module: Module, whole: Shape, part: int) -> int:
    return part if in_memory(module, next(whole.leaves(), whole)) else 0


def _fusion_traffic(module: Module, inner: Computation, result: Shape, operands: list[Instruction]) -> int:
    need = needed(module, inner)
    read = 0.0
    for name, operand in zip(inner.parameters, operands, strict=False):
        read += need.get(name, 1.0) * memory_bytes(module, operand.shape)
    root = inner.instructions[inner.root]
    written = 0
    outputs = [inner.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    leaves = list(result.leaves())
    if len(outputs) != len(leaves):
        return round(read) + memory_bytes(module, result)
    for output, leaf in zip(outputs, leaves, strict=True):
        if _is_passed_on(root, output):
            continue
        update = _updated(inner, output)
        part = leaf.bytes if update is None else update.shape.bytes
        written += part if in_memory(module, leaf) else 0
    return round(read) + written


def _is_passed_on(root: Instruction, output: Instruction) -> bool:
    """An operand handed on as it is, or a collective that goes on during this fusion: nothing that it writes."""
    return root.opcode == "tuple" and (output.opcode == "parameter" or output.opcode in KINDS)


def _updated(inner: Computation, output: Instruction) -> Instruction | None:
    """The update, where an output is an array updated in place."""
    while output.opcode in ("bitcast", "copy") and output.operands[0] in inner.instructions:
        output = inner.instructions[output.operands[0]]
    if output.opcode == "dynamic-update-slice" and _is_parameter(inner, output.operands[0]):
        return inner.instructions[output.operands[1]]
    if output.opcode == "scatter" and _is_parameter(inner, output.operands[0]):
        return inner.instructions[output.operands[-1]]
    return None


def _is_parameter(inner: Computation, name: str) -> bool:
    instruction = inner.instructions[name]
    while instruction.opcode in ("bitcast", "copy"):
        instruction = inner.instructions[instruction.operands[0]]
    return instruction.opcode == "parameter"


def needed(module: Module, inner: Computation) -> dict[str, float]:
    """For each instruction of a fused computation, the share of its elements that the results depend on.

    A fusion computes an element when somebody asks for it: what is only sliced is only computed, or read, there.
    Several readers are taken to ask for different elements, up to the whole. What a collective inside needs, it reads
    itself.
    """
    share: dict[str, float] = {}
    root = inner.instructions[inner.root]
    for name in reversed(inner.instructions):
        instruction = inner.instructions[name]
        if name == inner.root:
            share[name] = 1.0
            continue
        users = [user for user in inner.users[name] if not (user is root and _is_passed_on(root, instruction))]
        asked = (_asked(module, inner, instruction, user, share.get(user.name, 0.0)) for user in users)
        share[name] = min(1.0, sum(asked))
    return share


def _asked(module: Module, inner: Computation, source: Instruction, user: Instruction, share: float) -> float:
    """The share of `source` that a user needs to make `share` of its own elements."""
    if share == 0.0 or user.opcode in KINDS:
        return 0.0
    whole = source.shape.elements or 1
    first = user.operands[0] == source.name
    if user.opcode in _SLICES and first:
        return share * user.shape.elements / whole
    if user.opcode in ("dynamic-update-slice", "scatter") and first:
        return 0.0 if _in_place(inner, user) else share
    if user.opcode == "fusion" and user.called[0] in module.computations:
        nested = module.computations[user.called[0]]
        need = needed(module, nested)
        pairs = zip(nested.parameters, user.operands, strict=False)
        return sum(need[parameter] for parameter, name in pairs if name == source.name)
    if user.opcode in _ELEMENTWISE or user.opcode in _SLICES:
        return share
    return 1.0


def _in_place(inner: Computation, update: Instruction) -> bool:
    """Whether an update overwrites one of the fusion's operands: from a parameter, to a result, nothing between."""
    outputs = {inner.root, *inner.instructions[inner.root].operands}
    name = update.name
    while name not in outputs:
        users = inner.users[name]
        if len(users) != 1 or users[0].opcode not in ("bitcast", "copy"):
            return False
        name = users[0].name
    root = inner.instructions[inner.root]
    direct = name == inner.root or root.opcode in ("tuple", "bitcast", "copy")
    return direct and _is_parameter(inner, update.operands[0])
