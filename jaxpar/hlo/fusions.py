"""What a program would be without its fusions: each operation inside one is counted by itself.

This opens the fusions that a compiler made, and compiles nothing. A compiler whose fusion passes
are off may choose other layouts and other operations too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from jaxpar.hlo.program import opcodes
from jaxpar.hlo.program.module import Computation, Instruction, Module
from jaxpar.hlo.program.parse import parse_module
from jaxpar.hlo.program.tasks import Program, walk
from jaxpar.hlo.work.memory_traffic import traffic


class Operations(NamedTuple):
    """The work of a program whose tasks run one after another."""

    tasks: int
    """The instructions that take time."""
    runs: int
    """How often they run in a step."""
    bytes: int
    """The bytes that a step moves to and from device memory."""


def operations(program: Program) -> Operations:
    """Count the tasks of a program as it is, their runs, and the bytes that they move."""
    counted = list(walk(program.nodes))
    return Operations(
        len(counted),
        sum(count for _, count in counted),
        sum(task.bytes * count for task, count in counted),
    )


_OF_ANY_ONE = opcodes.FREE | opcodes.words("broadcast iota copy dynamic-update-slice")
"""Opcodes that stand beside the one operation of a fusion that joins nothing: they bring its
operands to it, and put its result in its place."""


def joining_fusions(text: str) -> int:
    """Count the fusions of a program that join several operations. Compilers also wrap a single one
    into a fusion of its own, to make a kernel of it.

    Returns:
      How many there are; those inside of loops count once.
    """
    module = parse_module(text)
    found = 0
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode != "fusion":
                continue
            inside = module.computations[instruction.called[0]].instructions.values()
            found += sum(one.opcode not in _OF_ANY_ONE for one in inside) > 1
    return found


def operations_opened(text: str, program: Program) -> Operations:
    """Count the tasks of a program as if each operation in a fusion were a task of its own, which
    reads its operands from device memory and writes its result there.

    Args:
      text: the text of the scheduled module.
      program: what `read_program` made of it.
    """
    module = parse_module(text)
    standing = {
        name: (computation, instruction)
        for computation in module.computations.values()
        for name, instruction in computation.instructions.items()
    }
    tasks = 0
    runs = 0
    moved = 0
    for task, count in walk(program.nodes):
        found = standing.get(task.name)
        inner = list(_inside(module, found[1])) if found else []
        if inner:
            tasks += len(inner)
            runs += count * len(inner)
            moved += count * sum(traffic(module, *one) for one in inner)
        else:
            tasks += 1
            runs += count
            moved += count * task.bytes
    return Operations(tasks, runs, moved)


def _inside(module: Module, fusion: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    """Yield the operations in a fusion that take time, also in fusions inside it."""
    if fusion.opcode != "fusion":
        return
    for computation in module.called(fusion):
        for instruction in computation.instructions.values():
            if instruction.opcode == "fusion":
                yield from _inside(module, instruction)
            elif not opcodes.is_free(instruction):
                yield computation, instruction
