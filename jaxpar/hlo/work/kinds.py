"""The kind of task that an instruction is, and its result in words."""

from __future__ import annotations

from jaxpar.hlo.program import opcodes
from jaxpar.hlo.program.module import Computation, Instruction, Module, Shape
from jaxpar.hlo.program.tasks import TaskKind
from jaxpar.hlo.work.flops import Multiplied
from jaxpar.hlo.work.memory_traffic import HOST

_NO_ARITHMETIC = opcodes.MOVES | opcodes.FREE
_HOST_TRANSFERS = ("infeed", "outfeed", "send", "recv")  # sends between devices are collectives


def shape_text(shape: Shape) -> str:
    """Write a shape for people to read; a long tuple is described by its largest array."""
    if len(shape.parts) <= 2:
        return str(shape)
    largest = max(shape.leaves(), key=lambda leaf: leaf.bytes)
    return f"{largest} and {len(list(shape.leaves())) - 1} more"


def kind_of(
    module: Module, computation: Computation, instruction: Instruction, work: Multiplied
) -> TaskKind:
    """Tell what kind of task an instruction is.

    Args:
      instruction: the instruction, which is no collective.
      work: the matmuls of the instruction.
    """
    if instruction.target:
        if instruction.target.startswith(opcodes.GEMM_TARGETS):
            return "matmul"
        return "kernel"
    if work.flops:
        return "matmul"
    results = list(instruction.shape.leaves())
    leaves = [
        *results,
        *(leaf for operand in computation.operands(instruction) for leaf in operand.shape.leaves()),
    ]
    slices = instruction.opcode in ("dynamic-slice", "slice")
    if all(leaf.elements <= 1 for leaf in (results if slices else leaves)):
        return "control"  # bookkeeping on scalars, such as loop counters and offsets of slices
    moves = _only_moves(module, instruction)
    if (
        moves and any(leaf.space == HOST for leaf in leaves)
    ) or instruction.opcode in _HOST_TRANSFERS:
        return "host_copy"
    return "copy" if moves else "fusion"


def _only_moves(module: Module, instruction: Instruction) -> bool:
    """Return whether an instruction only moves data: a copy, a change of layout, a slice, or a
    fusion of these and offsets.
    """
    if instruction.base not in opcodes.CALLERS:
        return instruction.base in opcodes.MOVES
    inner = module.called(instruction)
    called = [
        i
        for computation in inner
        for i in computation.instructions.values()
        if i.shape.elements > 1
    ]
    return bool(called) and all(
        i.opcode in _NO_ARITHMETIC or _only_moves(module, i) for i in called
    )
