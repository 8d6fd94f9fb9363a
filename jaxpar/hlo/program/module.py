"""A compiled module as typed data: computations, instructions, shapes and stack frames.

Attributes are kept as text under their names, and only the code that knows one reads it, so an
attribute or opcode that nobody here has ever seen is not an error.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from jaxpar.base.errors import short
from jaxpar.hlo.program.text import fields, words_of

_TILE = re.compile(r"T\(([\d,]+)\)")
_WIDTH = re.compile(r"(?:bf|[fsuc])(\d+)")
_CALLS = (
    "calls",
    "to_apply",
    "condition",
    "body",
    "branch_computations",
    "true_computation",
    "false_computation",
    "called_computations",
    "async_wrapped_computation",
)


@dataclass(frozen=True)
class Shape:
    """The shape of an array, or a tuple of shapes."""

    dtype: str
    """The dtype, such as `bf16`; `tuple` for a tuple; `token` and the like carry no data."""
    dims: tuple[int, ...] = ()
    """The sizes; empty for a scalar or a tuple."""
    tiled: bool = False
    """Whether the layout has tiles, which only the TPU compiler writes."""
    space: int = 0
    """The memory space, the n of `S(n)`; 0 = the device's main memory."""
    parts: tuple[Shape, ...] = ()
    layout: str = field(default="", compare=False)
    """The dims from the innermost out, and tiles: `1,0:T(8,128)(2,1)`."""

    @cached_property
    def elements(self) -> int:
        """The number of elements of an array, or of all arrays of a tuple."""
        if self.dtype == "tuple":
            return sum(part.elements for part in self.parts)
        return prod(self.dims)

    @cached_property
    def bytes(self) -> int:
        """The bytes of data, without the padding of tiles."""
        if self.dtype == "tuple":
            return sum(part.bytes for part in self.parts)
        width = _WIDTH.match("u8" if self.dtype == "pred" else self.dtype)
        bits = int(width[1]) if width else 0  # a type without data has no width
        return -(-self.elements * bits // 8)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The dims from the innermost out; row by row where no layout is given."""
        given = self.layout.partition(":")[0]
        if given:
            return tuple(int(dim) for dim in given.split(","))
        return tuple(reversed(range(len(self.dims))))

    @cached_property
    def stored_bytes(self) -> int:
        """The bytes in memory: the data, and what fills the dims up to whole tiles."""
        if self.dtype == "tuple":
            return sum(part.stored_bytes for part in self.parts)
        tile = _TILE.search(self.layout)
        if tile is None or not (self.dims and self.elements):
            return self.bytes
        sizes = [int(size) for size in tile[1].split(",")]
        inner = [self.dims[dim] for dim in self.order]
        for place, size in enumerate(reversed(sizes[-len(inner) :])):
            inner[place] = -(-inner[place] // size) * size
        return self.bytes * prod(inner) // self.elements

    def leaves(self) -> Iterator[Shape]:
        """Yield the shapes of the arrays in this shape, in order."""
        if self.dtype == "tuple":
            for part in self.parts:
                yield from part.leaves()
        else:
            yield self

    def __str__(self) -> str:
        if self.dtype == "tuple":
            return f"({', '.join(map(str, self.parts))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation; `operands` name instructions of the same computation."""

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    literal: str
    """The value or number in the brackets of a constant, a parameter or an iota."""
    tail: str
    """The attributes as text."""

    @cached_property
    def attributes(self) -> dict[str, str]:
        """The attributes by name; values are as they stand in the text, without quotes."""
        return fields(self.tail)

    @cached_property
    def metadata(self) -> dict[str, str]:
        """The metadata: `op_name`, `stack_frame_id`, `source_file` and so on."""
        return words_of(self.attributes.get("metadata", ""))

    @cached_property
    def frontend(self) -> dict[str, str]:
        """The frontend attributes by name."""
        return fields(self.attributes.get("frontend_attributes", "")[1:-1])

    @property
    def base(self) -> str:
        """The opcode without the suffix of an asynchronous start: `copy` for copy-start."""
        return self.opcode.removesuffix("-start")

    @property
    def target(self) -> str:
        """The target of a custom call; empty for any other opcode."""
        if self.opcode == "custom-call":
            return self.attributes.get("custom_call_target", "")
        return ""

    @property
    def index(self) -> int:
        """The index of the part that a get-tuple-element takes; a ValueError where the text has
        none.
        """
        return int(self.attribute("index"))

    def attribute(self, key: str) -> str:
        """Return an attribute that an opcode always has; a ValueError where the text lacks it."""
        if key not in self.attributes:
            raise ValueError(f"{short(self.name)} has no {key}")
        return self.attributes[key]

    @property
    def op_name(self) -> str:
        """The path that jax writes, `jit(step)/jvp(loss)/dot_general`; empty where the compiler
        made the operation.
        """
        return self.metadata.get("op_name", "")

    @cached_property
    def called(self) -> tuple[str, ...]:
        """The names of the computations that it calls, in the order of `_CALLS`."""
        values = [self.attributes.get(key, "") for key in _CALLS]
        return tuple(
            name.strip().lstrip("%")
            for value in values
            for name in value.strip("{}").split(",")
            if name
        )

    def numbers(self, key: str) -> tuple[int, ...]:
        """Read a list attribute such as `dimensions={0,1}`, in the order of the text; it is empty
        when absent.
        """
        return tuple(int(n) for n in re.findall(r"-?\d+", self.attributes.get(key, "")))


@dataclass(frozen=True)
class Computation:
    """A computation: its instructions by name, in the order of the text, which is the schedule's if
    the module is scheduled.
    """

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    @property
    def result(self) -> Instruction:
        """The instruction that makes what the computation returns; a ValueError where the text has
        none.
        """
        if self.root not in self.instructions:
            raise ValueError(f"{short(self.name)} has no instruction")
        return self.instructions[self.root]

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of their numbers."""
        found = {
            int(i.literal): i.name for i in self.instructions.values() if i.opcode == "parameter"
        }
        return tuple(found[number] for number in sorted(found))

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """List the instructions that an instruction uses, in the order in which it names them,
        except those missing from a text that was cut short.
        """
        return [
            self.instructions[name] for name in instruction.operands if name in self.instructions
        ]

    def behind(
        self, name: str, through: Container[str] = ("copy", "bitcast")
    ) -> Instruction | None:
        """Find the instruction that made a value, past those that hand it on.

        Args:
          through: the opcodes that hand their first operand on.

        Returns:
          The instruction; None if the text was cut short.
        """
        found = self.instructions.get(name)
        while found is not None and found.opcode in through:
            found = self.instructions.get(found.operands[0])
        return found

    @cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        """The users of each instruction within the computation."""
        found: defaultdict[str, list[Instruction]] = defaultdict(list)
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                found[operand].append(instruction)
        return found


@dataclass(frozen=True)
class Frame:
    """A frame of a Python stack, and the number of the frame that called it (0 = none)."""

    file: str
    line: int
    parent: int


@dataclass(frozen=True)
class Module:
    """A compiled module, such as `jit_step`."""

    name: str
    header: dict[str, str]
    """The attributes of the text's first line."""
    computations: dict[str, Computation]
    entry: str
    """The name of the computation that is run."""
    frames: dict[int, Frame]
    """The stack frames by number, from the tables at the module's top."""

    @cached_property
    def tiled(self) -> bool:
        """Whether the module is compiled for a TPU: only there do layouts have tiles, and S(1) is
        memory on the chip.
        """
        entry = self.computations[self.entry]
        return any(leaf.tiled for i in entry.instructions.values() for leaf in i.shape.leaves())

    @cached_property
    def devices(self) -> int:
        """The number of devices: replicas times partitions."""
        return prod(int(self.header.get(key, 1)) for key in ("replica_count", "num_partitions"))

    def called(self, instruction: Instruction) -> list[Computation]:
        """List the computations that an instruction calls, for a `while` the condition and then the
        body; those missing from a text that was cut short are left out.
        """
        return [self.computations[name] for name in instruction.called if name in self.computations]

    def body(self, loop: Instruction) -> Computation:
        """Return the body of a `while`; a ValueError where the text lacks it."""
        return self.computation(loop.attribute("body").lstrip("%"))

    def computation(self, name: str) -> Computation:
        """Return a computation that something calls; a ValueError where the text lacks it."""
        if name not in self.computations:
            raise ValueError(f"{short(name)} is called and does not stand there")
        return self.computations[name]

    def handed_on(
        self, loop: Instruction, through: Container[str] = ("copy", "bitcast")
    ) -> set[int]:
        """Return the numbers, from 0, of the state's parts that a `while` body hands on unchanged;
        empty where the body does not end in a tuple.

        Args:
          loop: a `while`.
          through: the opcodes that hand their first operand on inside the body.
        """
        body = self.body(loop)
        root = body.result
        if root.opcode == "tuple":
            parts = [body.behind(name, through) for name in root.operands]
        else:
            parts = []
        return {
            n
            for n, part in enumerate(parts)
            if part is not None
            and part.opcode == "get-tuple-element"
            and part.index == n
            and part.operands[0] in body.parameters
        }

    def stack(self, instruction: Instruction) -> list[Frame]:
        """List an instruction's frames, innermost first; empty where the compiler kept none."""
        frames = []
        number = int(instruction.metadata.get("stack_frame_id", 0))
        while number in self.frames and len(frames) < 1000:
            frames.append(self.frames[number])
            number = self.frames[number].parent
        return frames
