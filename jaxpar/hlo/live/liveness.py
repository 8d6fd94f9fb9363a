"""This module follows a program in its order and finds its arrays.

An array lies in memory from the instruction that makes it to its last use. Arrays that XLA keeps in
one slot of memory are joined and count once: a loop's state, what is updated in place, a result in
the slot of an operand that ends there, and an argument that was donated. A loop's body counts once,
as one trip of it. How the slots are packed, with gaps between them, is the compiler's own affair.

A program, with the place of each instruction in the schedule (parameters have none):

    %x = f32[1024] parameter(0)
    %a = f32[1024] reverse(%x)              place 0
    %b = f32[1024] negate(%a)               place 1
    %c = f32[2048] concatenate(%b, %x)      place 2
    ROOT %r = f32[1024] slice(%c)           place 3

What is found of it:

    array   makers   places   bytes   why
    x       x        0 to 3   4096    an argument, there before and after the program
    a       a, b     0 to 2   4096    negate reads %a for the last time, so %b lies in its slot
    c       c        2 to 3   8192    a concatenation does not fit into the slot of an operand
    r       r        3 to 3   4096    a slice reads other elements than it writes

It is done in three steps (`live_arrays`). `run` follows the instructions, makes an array for each
result, moves the end of each operand to here, and joins what has to lie in one slot (loops,
branches, what is asynchronous, what the program says). Then arguments and results are marked as
whole. Last of all `share_slots` joins results with operands, which needs all ends to be known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxpar.hlo.live.arrays import LiveArray, Schedule
from jaxpar.hlo.live.in_place import lies_alike, replaceable
from jaxpar.hlo.program.aliases import leaf, pairs
from jaxpar.hlo.program.module import Computation, Instruction, Module, Shape
from jaxpar.hlo.program.opcodes import words

_NAMES = words("tuple get-tuple-element bitcast optimization-barrier")
"""Opcodes that name arrays that are there, and make none."""

_NAMES_FIRST = words("add-dependency domain")
"""Opcodes that name their first operand; the other operand is a token, which only says what runs
before.
"""

_OF_THE_PROGRAM = -1
"""The memory space of constants, which are loaded with the program's code."""

_NEAR = 1
"""The memory space of a TPU's VMEM; on a GPU, of what its links read in the main memory."""


def live_arrays(module: Module) -> Schedule:
    """Find the arrays of a program and when each is in memory.

    Args:
      module: a program whose instructions stand in the order in which they run
        (`is_scheduled=true`).

    Returns:
      The order of the instructions, and the arrays. Constants are left out.
    """
    reading = _Reading(module)
    entry = module.computations[module.entry]
    arguments = [reading.new(entry.instructions[name]) for name in entry.parameters]
    results = reading.run(entry, arguments)
    end = max(len(reading.order) - 1, 0)
    for buffer in [*(one for leaves in arguments for one in leaves), *results]:
        reading.arrays[reading.root(buffer)].whole = True
    for argument in arguments:
        for buffer in argument:
            reading.extend(buffer, 0)
            reading.extend(buffer, end)
    for buffer in results:
        reading.extend(buffer, end)
    for result, number, part in pairs(module.header.get("input_output_alias", "")):
        there = leaf(entry.instructions[entry.parameters[number]].shape, part)
        here = leaf(entry.result.shape, result)
        reading.join(arguments[number][there], results[here])
    reading.share_slots()
    kept = {reading.root(number) for number in range(len(reading.arrays))}
    return Schedule(reading.order, [reading.arrays[number] for number in sorted(kept)])


class _Made(NamedTuple):
    """What an instruction makes, and the operands in whose slots its results may lie."""

    place: int
    results: list[int]
    read: list[tuple[int, Shape]]
    """Operands of which an element is read for the same element of a result alone, each with the
    shape in which it is read."""
    changed: list[int]
    """Operands of which a part is changed."""


@dataclass
class _Reading:
    """The arrays found so far, by number; those in one slot of memory are joined to one.

    A value is a list of such numbers (`buffer`), one for each leaf of its tuple. A join leaves the
    numbers as they are: `root` finds the one whose `LiveArray` stands for the slot.
    """

    module: Module
    order: list[Instruction] = field(default_factory=list)
    arrays: list[LiveArray] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
    """For each array, another array in the same slot, or itself."""
    last_use: list[int] = field(default_factory=list)
    """The last use of each array by its own name; another array in its slot may be used later."""
    made: list[_Made] = field(default_factory=list)

    def new(self, instruction: Instruction) -> list[int]:
        """Make an array for each part of what an instruction makes."""
        return [self._array(instruction, shape) for shape in instruction.shape.leaves()]

    def _array(self, instruction: Instruction, shape: Shape) -> int:
        place = max(len(self.order) - 1, 0)
        if shape.space == _NEAR and not self.module.tiled:
            shape = replace(shape, space=0)
        self.arrays.append(
            LiveArray(instruction.name, shape, place, place, makers=[instruction.name])
        )
        self.joined.append(len(self.joined))
        self.last_use.append(place)
        return len(self.joined) - 1

    def root(self, number: int) -> int:
        """Find the array that stands for all those in its slot."""
        while self.joined[number] != number:
            self.joined[number] = self.joined[self.joined[number]]
            number = self.joined[number]
        return number

    def join(self, first: int, second: int) -> None:
        """Put two arrays, given by their numbers, into one slot."""
        first = self.root(first)
        second = self.root(second)
        if first == second:
            return
        one = self.arrays[first]
        other = self.arrays[second]
        one.begin = min(one.begin, other.begin)
        one.end = max(one.end, other.end)
        one.whole |= other.whole
        one.makers += other.makers
        if other.bytes > one.bytes:
            one.shape = other.shape
        self.joined[second] = first

    def extend(self, number: int, place: int) -> None:
        """Keep an array in memory up to and including a place."""
        array = self.arrays[self.root(number)]
        array.begin = min(array.begin, place)
        array.end = max(array.end, place)

    def run(self, computation: Computation, arguments: Sequence[list[int]]) -> list[int]:
        """Follow a computation in its order, and return the numbers of the arrays of its result, a
        leaf each.

        Args:
          arguments: for each parameter of the computation the numbers of its arrays, a leaf each.
        """
        values: dict[str, list[int]] = {}
        for name, instruction in computation.instructions.items():
            if instruction.opcode == "parameter":
                values[name] = arguments[int(instruction.literal)]
                continue
            operands = [values.get(one, []) for one in instruction.operands]
            values[name] = self._made_by(computation, instruction, operands)
        return values.get(computation.root, [])

    def _made_by(
        self, computation: Computation, instruction: Instruction, operands: list[list[int]]
    ) -> list[int]:
        opcode = instruction.opcode
        used = [buffer for leaves in operands for buffer in leaves]
        if opcode == "constant":
            beside = replace(instruction.shape, space=_OF_THE_PROGRAM)
            return [self._array(instruction, beside)]
        if opcode == "get-tuple-element":
            source = computation.instructions[instruction.operands[0]].shape
            at = leaf(source, (instruction.index,))
            return used[at : at + len(list(instruction.shape.leaves()))]
        if opcode in _NAMES:
            return used
        if opcode in _NAMES_FIRST:
            return operands[0]
        self.order.append(instruction)
        place = len(self.order) - 1
        for buffer in used:
            self.extend(buffer, place)
            self.last_use[buffer] = place
        if opcode == "while":
            return self._loop(instruction, used)
        if opcode in ("call", "conditional"):
            return self._branches(instruction, operands)
        if opcode.endswith("-done") or opcode.endswith("-update"):
            return self._finished(instruction, used)
        results = self.new(instruction)
        shapes = [computation.instructions[name].shape for name in instruction.operands]
        self._started(instruction, used, results)
        self._told(instruction, shapes, operands, results)
        read, changed = replaceable(self.module, instruction)
        self.made.append(
            _Made(
                place,
                results,
                [
                    (operands[number][0], next(shapes[number].leaves()))
                    for number in read
                    if len(operands[number]) == 1
                ],
                [operands[number][0] for number in changed if len(operands[number]) == 1],
            )
        )
        return results

    def _loop(self, instruction: Instruction, state: list[int]) -> list[int]:
        """Join a loop's state, which stays where it is: what a trip hands on is in the slot of the
        last.

        Of each part of the state four arrays are one: what was there before the loop, the body's
        parameter, what the body hands on, and the loop's result.
        """
        body = self.module.body(instruction)
        inside = self.new(instruction)
        after = self.run(body, [inside])
        place = len(self.order) - 1
        results = self.new(instruction)
        for parts in zip(state, inside, after, results, strict=False):
            for part in parts[1:]:
                self.join(parts[0], part)
            self.extend(parts[0], place)
        return results

    def _branches(self, instruction: Instruction, operands: list[list[int]]) -> list[int]:
        inner = self.module.called(instruction)
        if instruction.opcode == "call":
            return self.run(inner[0], operands)
        ends = [
            self.run(branch, [operand])
            for branch, operand in zip(inner, operands[1:], strict=False)
        ]
        for other in ends[1:]:
            for one, two in zip(ends[0], other, strict=False):
                self.join(one, two)
        return ends[0] if ends else []

    def _finished(self, instruction: Instruction, started: list[int]) -> list[int]:
        """Find the arrays that an asynchronous start has made, by the shapes of its end.

        %s = (f32[8], f32[16]) all-gather-start(%x)
        %d = f32[16] all-gather-done(%s)             the second array of %s, by its bytes
        %c = (f32[8], f32[8], u32[]) copy-start(%x)
        %e = f32[8] copy-done(%c)                    the first: the second is %x, of as many bytes
        """
        if instruction.opcode == "copy-done":
            return started[:1]
        found = []
        left = list(reversed(started))
        for shape in reversed(list(instruction.shape.leaves())):
            same = [
                buffer
                for buffer in left
                if buffer not in found and self.arrays[buffer].shape.bytes == shape.bytes
            ]
            found.append(same[0] if same else self._array(instruction, shape))
        return found[::-1]

    def _started(self, instruction: Instruction, used: list[int], results: list[int]) -> None:
        """Join the operands of an asynchronous start with its results: a start hands on its
        operands in front of what it makes, and the start of a copy behind it.

        (f32[8], f32[16]) all-gather-start(%x)       its result 0 lies where %x does
        (f32[8], f32[8], u32[]) copy-start(%x)       its result 1 does
        """
        if not (instruction.opcode.endswith("-start") or instruction.opcode in ("send", "recv")):
            return
        if instruction.opcode == "copy-start":
            self.join(used[0], results[1])
            return
        if len(results) < 2:
            return
        for operand, result in zip(used, results, strict=False):
            if self.arrays[operand].shape.bytes == self.arrays[result].shape.bytes:
                self.join(operand, result)

    def _told(
        self,
        instruction: Instruction,
        shapes: list[Shape],
        operands: list[list[int]],
        results: list[int],
    ) -> None:
        """Join results with the operands in whose slots they are, where the program says so."""
        told = instruction.attributes.get("output_to_operand_aliasing", "")
        for result, number, part in pairs(told):
            if there := operands[number]:
                at = leaf(shapes[number], part)
                self.join(there[at], results[leaf(instruction.shape, result)])

    def share_slots(self) -> None:
        """Put results into the slots of operands that end there, as XLA does."""
        for made in self.made:
            for result in made.results:
                self._replace(made, result)

    def _replace(self, made: _Made, result: int) -> None:
        here = self.arrays[self.root(result)]
        if not here.bytes:
            return
        for operand in made.changed:
            there = self.arrays[self.root(operand)]
            if self.last_use[operand] == made.place and there.bytes == here.bytes:
                self.join(operand, result)
                return
        for operand, shape in made.read:
            there = self.arrays[self.root(operand)]
            ends_here = there.end == made.place > there.begin and here.begin == made.place
            alike = there.bytes == here.bytes and lies_alike(shape, self.arrays[result].shape)
            if ends_here and alike and not there.whole:
                self.join(operand, result)
                return
