"""The result of this package: an array's place in time, and a schedule with all its arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxpar.hlo.program.module import Instruction, Shape


@dataclass
class LiveArray:
    """An array in a device's memory, and the schedule's places between which it is there.

    Attributes:
      name: the instruction that makes it; of an entry's argument, the parameter.
      begin: the place of the instruction that makes it.
      end: the place of its last use.
      whole: whether it is there before and after the program: an argument or a result.
      makers: every instruction that makes an array in its slot of memory, itself first.
    """

    name: str
    shape: Shape
    begin: int
    end: int
    whole: bool = False
    makers: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """The bytes that the array takes in the device's main memory, with the padding of its
        tiles.
        """
        return 0 if self.shape.space else self.shape.stored_bytes


@dataclass(frozen=True)
class Schedule:
    """The instructions of a program in the order in which they run, and its arrays.

    Attributes:
      instructions: each with the instructions of the loops around it in their place.
      arrays: every array of the main memory.
    """

    instructions: list[Instruction]
    arrays: list[LiveArray]

    def bytes_at(self) -> list[int]:
        """Count the bytes that are alive at each place; the list is empty where nothing is
        computed.
        """
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
        """List the arrays that are alive at a place, the largest first, without those that take no
        bytes in the main memory.

        Args:
          place: a place in the order of the instructions, from 0.
        """
        found = [one for one in self.arrays if one.begin <= place <= one.end and one.bytes]
        return sorted(found, key=lambda one: -one.bytes)
