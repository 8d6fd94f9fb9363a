"""Which arrays of a scheduled program are in a device's memory when.

An array lies there from the instruction that makes it to its last use. What XLA keeps in one place
counts once: a loop's state, what is updated in place, a result in the place of an operand that ends
there, and an argument that was donated. A loop's body counts once, as one trip of it. How the
arrays are packed, with gaps between them, is the compiler's own affair.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxpar.hlo.program import opcodes
from jaxpar.hlo.program.module import Computation, Instruction, Module, Shape
from jaxpar.hlo.program.opcodes import words

_ALIASES = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
"""Which part of a result lies where which part of an argument does: `{0}: (1, {})`."""
_NAMES = words("tuple get-tuple-element bitcast optimization-barrier add-dependency domain")
"""These opcodes name arrays that are there, and make none."""
_RESHAPING = words("bitcast broadcast concatenate pad reverse transpose tuple reshape")
_IN_PLACE = opcodes.ELEMENTWISE - _RESHAPING
"""With these an element of the result needs the same element of each operand, and none besides."""
_STACKS = words("dynamic-update-slice scatter")
"""These opcodes change a part of their first operand."""

_OF_THE_PROGRAM = -1
"""The memory space of constants, which are loaded with the program's code."""

_NEAR = 1
"""The memory space of a TPU's VMEM; on a GPU, of what its links read in the main memory."""


@dataclass
class LiveArray:
    """An array in a device's memory, and the schedule's places between which it is there.

    Attributes:
      name: the instruction that makes it; of an entry's argument, the parameter.
      shape: its shape.
      begin: the place of the instruction that makes it.
      end: the place of its last use.
      whole: whether it is there before and after the program: an argument or a result.
      makers: every instruction that makes an array in its place, itself first.
    """

    name: str
    shape: Shape
    begin: int
    end: int
    whole: bool = False
    makers: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """The bytes that it takes in the device's main memory, with the padding of its tiles."""
        return 0 if self.shape.space else self.shape.stored_bytes


@dataclass(frozen=True)
class Schedule:
    """The instructions of a program in the order in which they run, and its arrays.

    Attributes:
      instructions: each with those of the loops around it in their place.
      arrays: every array of the main memory.
    """

    instructions: list[Instruction]
    arrays: list[LiveArray]

    def bytes_at(self) -> list[int]:
        """The bytes that are alive at each place; none where nothing is computed."""
        if not self.instructions:
            return []
        changes = [0] * (len(self.instructions) + 1)
        for array in self.arrays:
            changes[array.begin] += array.bytes
            changes[array.end + 1] -= array.bytes
        found = []
        alive = 0
        for change in changes[:-1]:
            alive += change
            found.append(alive)
        return found

    def alive(self, place: int) -> list[LiveArray]:
        """The arrays that are alive at a place, the largest first.

        Args:
          place: a place in the order of the instructions, from 0.

        Returns:
          The arrays; those that take no bytes in the main memory are left out.
        """
        found = [one for one in self.arrays if one.begin <= place <= one.end and one.bytes]
        return sorted(found, key=lambda one: -one.bytes)


def live_arrays(module: Module) -> Schedule:
    """Find the arrays of a program and when each is in memory.

    Args:
      module: a program whose instructions stand in the order in which they run
        (`is_scheduled=true`).

    Returns:
      The order, and the arrays. Constants are left out.
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
    for result, number, part in _pairs(module.header.get("input_output_alias", "")):
        there = _leaf(entry.instructions[entry.parameters[number]].shape, part)
        here = _leaf(entry.instructions[entry.root].shape, result)
        reading.join(arguments[number][there], results[here])
    reading.share_places()
    kept = {reading.root(number) for number in range(len(reading.arrays))}
    return Schedule(reading.order, [reading.arrays[number] for number in sorted(kept)])


class _Made(NamedTuple):
    """What an instruction makes, and the operands in whose place that may lie."""

    place: int
    results: list[int]
    read: list[int]
    """Operands of which an element is read for the same element of a result alone."""
    changed: list[int]
    """Operands of which a part is changed."""


@dataclass
class _Reading:
    """The arrays found so far, by number; those in one place are joined to one."""

    module: Module
    order: list[Instruction] = field(default_factory=list)
    arrays: list[LiveArray] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
    """For each array, one that lies in the same place; itself where there is no other."""
    last_use: list[int] = field(default_factory=list)
    """The last use of each, by its own name; another in its place may be used later."""
    made: list[_Made] = field(default_factory=list)

    def new(self, instruction: Instruction) -> list[int]:
        """An array for each part of what an instruction makes."""
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
        """The array that stands for all those in its place."""
        while self.joined[number] != number:
            self.joined[number] = self.joined[self.joined[number]]
            number = self.joined[number]
        return number

    def join(self, first: int, second: int) -> None:
        """Put two arrays into one place.

        Args:
          first: the number of an array.
          second: the number of another, or of the same.
        """
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
        """An array is there at a place too."""
        array = self.arrays[self.root(number)]
        array.begin = min(array.begin, place)
        array.end = max(array.end, place)

    def run(self, computation: Computation, arguments: Sequence[list[int]]) -> list[int]:
        """Follow a computation in its order.

        Args:
          computation: the computation.
          arguments: for each of its parameters the numbers of its arrays, a leaf each.

        Returns:
          The numbers of the arrays of its result, a leaf each.
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
            at = _leaf(source, (instruction.index,))
            return used[at : at + len(list(instruction.shape.leaves()))]
        if opcode in _NAMES:
            return used
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
        self._started(instruction, used, results)
        self._told(instruction, operands, results)
        read, changed = _replaceable(self.module, instruction)
        self.made.append(
            _Made(
                place,
                results,
                [operands[number][0] for number in read if len(operands[number]) == 1],
                [operands[number][0] for number in changed if len(operands[number]) == 1],
            )
        )
        return results

    def _loop(self, instruction: Instruction, state: list[int]) -> list[int]:
        """A loop's state stays where it is: what a trip hands on is in the place of the last."""
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
        """What an asynchronous start has made, of the shapes of its end."""
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
        """A start hands on its operands in front of what it makes, and a copy's behind it."""
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
        self, instruction: Instruction, operands: list[list[int]], results: list[int]
    ) -> None:
        """Results of which the program says that they are in an operand's place."""
        told = instruction.attributes.get("output_to_operand_aliasing", "")
        for result, number, part in _pairs(told):
            there = operands[number]
            if len(there) == 1 or not part:
                at = 0
            else:
                at = part[0]
            if there:
                self.join(there[at], results[_leaf(instruction.shape, result)])

    def share_places(self) -> None:
        """Put results into the places of operands that end there, as XLA does."""
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
        for operand in made.read:
            there = self.arrays[self.root(operand)]
            ends_here = there.end == made.place > there.begin and here.begin == made.place
            if ends_here and there.bytes == here.bytes and not there.whole:
                self.join(operand, result)
                return


def _replaceable(module: Module, instruction: Instruction) -> tuple[list[int], list[int]]:
    """The numbers of the operands that are read element by element, and of those that are
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


def _users(computation: Computation, name: str) -> list[Instruction]:
    """The users of an array, also under another shape."""
    found = []
    for user in computation.users.get(name, []):
        found += _users(computation, user.name) if user.opcode == "bitcast" else [user]
    return found


def _changes(computation: Computation, user: Instruction, name: str) -> bool:
    """Whether a use of an array changes a part of it."""
    if user.opcode not in _STACKS:
        return False
    first = computation.behind(user.operands[0], ("bitcast",))
    return first is not None and first.name == name


def _is_read_in_place(computation: Computation, name: str) -> bool:
    """Whether every element is read for the same element of the results, and for nothing else."""
    elements = computation.instructions[name].shape.elements
    waiting = [name]
    seen = set()
    while waiting:
        one = waiting.pop()
        for user in computation.users.get(one, []):
            named = user.opcode in ("bitcast", "tuple")
            if not (named or (user.opcode in _IN_PLACE and user.shape.elements == elements)):
                return False
            if user.name not in seen:
                seen.add(user.name)
                waiting.append(user.name)
    return True


def _pairs(text: str) -> Iterable[tuple[tuple[int, ...], int, tuple[int, ...]]]:
    """The result's part, the argument's number and its part, of every alias in a text."""
    for result, number, part in _ALIASES.findall(text):
        yield _numbers(result), int(number), _numbers(part)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in text.split(",") if one.strip())


def _leaf(shape: Shape, path: Sequence[int]) -> int:
    """The number of the first array in a part of a tuple, among all arrays in it."""
    before = 0
    for index in path:
        before += sum(len(list(part.leaves())) for part in shape.parts[:index])
        shape = shape.parts[index]
    return before
