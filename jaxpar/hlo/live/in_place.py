"""Which operands an instruction may overwrite with its result.

Two lists of operands, by their numbers, say so (`replaceable`):

    add(%a, %b)                         reads [0, 1], changes []: an element for the same element
    dynamic-update-slice(%a, %b, %i)    reads [], changes [0]: a part of %a is written anew
    transpose(%a)                       reads [], changes []: an element is read for another one
    fusion(%a, %b)                      as the users of each parameter inside of the fusion say

`follow` decides by these whether the result does lie there: the operand must end there too, and the
elements of both must lie in the same order (`lies_alike`).
"""

from __future__ import annotations

from jaxpar.hlo.program import opcodes
from jaxpar.hlo.program.module import Computation, Instruction, Module, Shape
from jaxpar.hlo.program.opcodes import words

_RESHAPING = words("bitcast broadcast concatenate pad reverse transpose tuple reshape")
_IN_PLACE = opcodes.ELEMENTWISE - _RESHAPING
"""Opcodes for which an element of the result needs the same element of each operand, and no other.
"""
_STACKS = words("dynamic-update-slice scatter")
"""Opcodes that change a part of their first operand."""


def replaceable(module: Module, instruction: Instruction) -> tuple[list[int], list[int]]:
    """Find the numbers of the operands that are read element by element, and of those that are
    changed.
    """
    every = list(range(len(instruction.operands)))
    if instruction.opcode in _STACKS:
        return [], [0]
    if instruction.opcode in _IN_PLACE or instruction.opcode == "all-reduce":
        return every, []
    inner = module.called(instruction)
    if instruction.opcode != "fusion" or not inner:
        return [], []
    read = []
    changed = []
    for number, name in enumerate(inner[0].parameters):
        if any(_changes(inner[0], user, name) for user in _users(inner[0], name)):
            changed.append(number)
        elif _is_read_in_place(inner[0], name):
            read.append(number)
    return read, changed


def lies_alike(operand: Shape, result: Shape) -> bool:
    """Return whether an operand's elements lie in memory in the order of the result's. Where the
    dims differ, a bitcast inside of a fusion changed them, which moves no element.

    f32[8,4]{1,0} and f32[8,4]{0,1}      no: a copy between them reads all before it writes the last
    f32[8,4]{1,0} and f32[32]{0}         yes
    """
    return operand.dims != result.dims or operand.order == result.order


def _users(computation: Computation, name: str) -> list[Instruction]:
    """List the users of an array, also under another shape."""
    found = []
    for user in computation.users.get(name, []):
        found += _users(computation, user.name) if user.opcode == "bitcast" else [user]
    return found


def _changes(computation: Computation, user: Instruction, name: str) -> bool:
    """Return whether a use of an array changes a part of it."""
    if user.opcode not in _STACKS:
        return False
    first = computation.behind(user.operands[0], ("bitcast",))
    return first is not None and first.name == name


def _is_read_in_place(computation: Computation, name: str) -> bool:
    """Return whether every element is read for the same element of the results, and for nothing
    else.

    %p = f32[8] parameter(0)
    %e = f32[8] exponential(%p)
    ROOT %n = f32[8] negate(%e)             yes: every use from %p to the end is elementwise
    ROOT %n = f32[8] reverse(%e)            no: element 0 is read for element 7
    ROOT %n = f32[8,4]{0,1} copy(%e)        no: where %e is f32[8,4]{1,0}, elements change places
    """
    elements = computation.instructions[name].shape.elements
    waiting = [name]
    seen = set()
    while waiting:
        one = waiting.pop()
        shape = computation.instructions[one].shape
        for user in computation.users.get(one, []):
            named = user.opcode in ("bitcast", "tuple")
            alike = user.shape.elements == elements and lies_alike(shape, user.shape)
            if not (named or (user.opcode in _IN_PLACE and alike)):
                return False
            if user.name not in seen:
                seen.add(user.name)
                waiting.append(user.name)
    return True
