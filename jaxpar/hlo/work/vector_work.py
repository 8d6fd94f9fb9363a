"""The elementwise work of a program for CPUs, and on how many threads each piece of it runs.

The vector units of a CPU may take longer for a fusion than its memory does, where it has an
exponential for example. The compiler splits a large fusion over threads, and says so in its notes.

    %f = f32[12,64]{1,0} fusion(%x), calls=%c, backend_config={"outer_dimension_partitions":["2"]}
    %c: exponential, add, each f32[12,64]

is 768 simple and 768 costly operations, on two threads.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from jaxpar.hlo.program import opcodes
from jaxpar.hlo.program.module import Computation, Instruction, Module
from jaxpar.hlo.work.flops import backend_config
from jaxpar.hlo.work.memory_traffic import element_shares

COSTLY = opcodes.words(
    "atan2 cbrt cosine erf exponential exponential-minus-one log log-plus-one logistic power "
    "remainder sine tan tanh"
)
"""Opcodes that take a vector unit several operations an element."""
_REDUCE = ("reduce", "reduce-window")
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}
"""The number of the operand that an opcode puts into its first operand."""
_LIBRARY = ("__ynn_fusion", "__onednn_fusion", "__xnn_fusion")
"""The kinds of fusion that a library runs, which splits its work over threads as it likes."""
ALL_THREADS = 0


class VectorWork(NamedTuple):
    """The elementwise work of one execution of an instruction.

    Attributes:
      simple: the elements that an addition, a comparison or a move makes.
      costly: those that one of `COSTLY` makes.
      strided: those that a transpose moves, which reads memory in another order than it writes.
      threads: the number of threads that it is split over; `ALL_THREADS` = as many as there are.
      narrowest: the fewest rows, columns or terms of a sum of its largest matmul; 0 = it has none.
    """

    simple: float = 0.0
    costly: float = 0.0
    strided: float = 0.0
    threads: int = 1
    narrowest: int = 0


def vector_work(module: Module) -> dict[str, VectorWork]:
    """Count the elementwise work of every instruction of a program that may stand in its schedule.

    Returns:
      The work by the instruction's name; instructions inside of fusions are counted in these.
    """
    inside = {
        name
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "fusion" or instruction.base in _REDUCE
        for name in instruction.called
    }
    found: dict[str, VectorWork] = {}
    for computation in module.computations.values():
        if computation.name in inside:
            continue
        for instruction in computation.instructions.values():
            if not opcodes.is_free(instruction):
                found[instruction.name] = _work_of(module, computation, instruction)
    return found


def _work_of(module: Module, computation: Computation, instruction: Instruction) -> VectorWork:
    threads = _threads(instruction)
    if instruction.opcode != "fusion" or not (inner := module.called(instruction)):
        return _operations(computation, instruction)._replace(threads=threads)
    shares = element_shares(module, inner[0])
    total = VectorWork(threads=threads)
    for one in inner[0].instructions.values():
        if one.opcode == "fusion":
            more = _work_of(module, inner[0], one)
        else:
            more = _operations(inner[0], one)
        share = shares.get(one.name, 1.0)
        total = total._replace(
            simple=total.simple + share * more.simple,
            costly=total.costly + share * more.costly,
            strided=total.strided + share * more.strided,
            narrowest=max(total.narrowest, more.narrowest),
        )
    return total


_NO_WORK = opcodes.words("broadcast iota dot convolution fusion while call conditional")
"""Opcodes that make nothing element by element themselves."""


def _operations(computation: Computation, instruction: Instruction) -> VectorWork:
    """Count the elements that an instruction makes, by how much work each is."""
    opcode = instruction.opcode
    operands = computation.operands(instruction)
    elements = float(instruction.shape.elements)
    if opcode == "dot" and len(operands) == 2:
        return VectorWork(narrowest=_narrowest(operands[0], operands[1], instruction))
    if opcode in _NO_WORK or opcodes.is_free(instruction):
        return VectorWork()
    if opcode in COSTLY:
        return VectorWork(costly=elements)
    if opcode in _REDUCE and operands:
        return VectorWork(simple=max(elements, float(operands[0].shape.elements)))
    if opcode in _UPDATES and len(operands) > 1:
        return VectorWork(simple=float(operands[_UPDATES[opcode]].shape.elements))
    if opcode in ("transpose", "copy") and operands and _turns(operands[0], instruction):
        return VectorWork(strided=elements)
    return VectorWork(simple=elements)


def _narrowest(left: Instruction, right: Instruction, dot: Instruction) -> int:
    """Return the least of a matmul's rows, columns and terms of a sum, in each of its batch."""
    dims = left.shape.dims
    terms = prod(dims[dim] for dim in dot.numbers("lhs_contracting_dims"))
    batch = prod(dims[dim] for dim in dot.numbers("lhs_batch_dims"))
    rows = left.shape.elements // max(1, terms * batch)
    columns = right.shape.elements // max(1, terms * batch)
    return min(rows, columns, terms)


def _turns(operand: Instruction, moved: Instruction) -> bool:
    """Tell whether a transpose or a copy writes other elements next to each other than it reads:
    otherwise it moves rows, as where heads and positions change places.
    """
    inner = [dim for dim in moved.shape.order if moved.shape.dims[dim] > 1]
    read = [dim for dim in operand.shape.order if operand.shape.dims[dim] > 1]
    if not inner or not read:
        return False
    permutation = moved.numbers("dimensions") or range(len(moved.shape.dims))
    return permutation[inner[0]] != read[0]


def _threads(instruction: Instruction) -> int:
    """Read over how many threads an instruction is split."""
    if instruction.opcode in ("dot", "convolution", "custom-call"):
        return ALL_THREADS
    notes = backend_config(instruction)
    if notes.get("fusion_config", {}).get("kind") in _LIBRARY:
        return ALL_THREADS
    return prod(int(part) for part in notes.get("outer_dimension_partitions", ()))
