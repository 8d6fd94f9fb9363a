"""The parser turns a compiled module's text into typed data: computations, instructions, shapes and
stack frames.

The text is `compiled.as_text()`. An instruction begins a line, and a small scanner matches the
brackets and quotes in it. Attributes are kept as text under their names, and only the code that
knows one reads it, so an attribute or opcode that this file has never seen is not an error.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod

from jaxpar.base.errors import UserError

_MARK = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/|[{(\[\])},]')
_OPEN = "{(["
_CLOSE = "})]"
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"(\w+)\[([^\]]*)\](?:\{([^}]*)\})?")
_COMPUTATION = re.compile(
    r"^(ENTRY )?%?([\w.\-]+)[^\n]*\{\n(.*?)^\}(?:, execution_thread=[^\n]*)?$", re.M | re.S
)
_NEXT = re.compile(r"^\s+(?=(?:ROOT )?%?[\w.\-]+ = )", re.M)
_LINE_END = re.compile(r"\s*\n\s*")
_TILE = re.compile(r"T\(([\d,]+)\)")
_WIDTH = re.compile(r"(?:bf|[fsuc])(\d+)")
_SPACE = re.compile(r"S\((\d+)\)")
_WORD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')
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
    def stored_bytes(self) -> int:
        """The bytes in memory: those of data, and what fills the dims up to whole tiles."""
        if self.dtype == "tuple":
            return sum(part.stored_bytes for part in self.parts)
        tile = _TILE.search(self.layout)
        if tile is None or not (self.dims and self.elements):
            return self.bytes
        sizes = [int(size) for size in tile[1].split(",")]
        order = [int(dim) for dim in self.layout.partition(":")[0].split(",") if dim]
        inner = [self.dims[dim] for dim in order]
        for place, size in enumerate(reversed(sizes[-len(inner) :])):
            inner[place] = -(-inner[place] // size) * size
        return self.bytes * prod(inner) // self.elements

    def leaves(self) -> Iterator[Shape]:
        """Yield the shapes of the arrays in it, in order."""
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
        """The frontend attributes."""
        return fields(self.attributes.get("frontend_attributes", "")[1:-1])

    @property
    def base(self) -> str:
        """The opcode without what makes it the start of an asynchronous pair: `copy` for
        copy-start.
        """
        return self.opcode.removesuffix("-start")

    @property
    def target(self) -> str:
        """The target of a custom call; empty for any other opcode."""
        if self.opcode == "custom-call":
            return self.attributes.get("custom_call_target", "")
        return ""

    @property
    def index(self) -> int:
        """The index of the part of a tuple that a get-tuple-element takes."""
        return int(self.attributes["index"])

    @property
    def op_name(self) -> str:
        """jax's path of the operation, `jit(step)/jvp(loss)/dot_general`; empty where the compiler
        made it.
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
        """Read a list attribute such as `dimensions={0,1}`; it is empty when absent.

        Args:
          key: the name of the attribute.

        Returns:
          The numbers in the order of the text.
        """
        return tuple(
            int(n)
            for n in re.findall(
                r"-?\d+",
                self.attributes.get(key, ""),
            )
        )


@dataclass(frozen=True)
class Computation:
    """The instructions by name, in the order of the text, which is the schedule's if the module is
    scheduled.
    """

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of their numbers."""
        found = {
            int(i.literal): i.name for i in self.instructions.values() if i.opcode == "parameter"
        }
        return tuple(found[number] for number in sorted(found))

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """List the instructions that an instruction uses, except those missing from a text that was
        cut short.

        Args:
          instruction: an instruction of this computation.

        Returns:
          The instructions, in the order in which it names them.
        """
        return [
            self.instructions[name] for name in instruction.operands if name in self.instructions
        ]

    def behind(
        self, name: str, through: Container[str] = ("copy", "bitcast")
    ) -> Instruction | None:
        """Find the instruction that made a value, past those that hand it on.

        Args:
          name: the name of the value.
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
    """A line of Python, and the number of the frame that called it (0 = none)."""

    file: str
    line: int
    parent: int


@dataclass(frozen=True)
class Module:
    """A compiled module, such as `jit_step`."""

    name: str
    header: dict[str, str]
    """The attributes of its first line."""
    computations: dict[str, Computation]
    entry: str
    """The name of the computation that is run."""
    frames: dict[int, Frame]
    """The stack frames by number, from the tables at the module's top."""

    @cached_property
    def tiled(self) -> bool:
        """Whether it is compiled for a TPU: only there do layouts have tiles, and S(1) is memory on
        the chip.
        """
        entry = self.computations[self.entry]
        return any(leaf.tiled for i in entry.instructions.values() for leaf in i.shape.leaves())

    @cached_property
    def devices(self) -> int:
        """The number of devices: replicas times partitions."""
        return prod(int(self.header.get(key, 1)) for key in ("replica_count", "num_partitions"))

    def called(self, instruction: Instruction) -> list[Computation]:
        """List the computations that an instruction calls, except those missing from a text that
        was cut short.

        Args:
          instruction: an instruction of any computation.

        Returns:
          The computations: of a `while` the condition and then the body.
        """
        return [self.computations[name] for name in instruction.called if name in self.computations]

    def body(self, loop: Instruction) -> Computation:
        """Return the body of a `while`."""
        return self.computations[loop.attributes["body"].lstrip("%")]

    def handed_on(
        self, loop: Instruction, through: Container[str] = ("copy", "bitcast")
    ) -> set[int]:
        """Return the numbers of the state's parts that a `while` body hands on unchanged;
        `through`: see `behind`.

        Args:
          loop: a `while`.
          through: the opcodes that hand their first operand on inside the body.

        Returns:
          The numbers, from 0; empty where the body does not end in a tuple.
        """
        body = self.body(loop)
        root = body.instructions[body.root]
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
        """List an instruction's frames, innermost first.

        Args:
          instruction: an instruction of any computation.

        Returns:
          The frames, each called by the next; empty where the compiler kept none.
        """
        frames = []
        number = int(instruction.metadata.get("stack_frame_id", 0))
        while number in self.frames and len(frames) < 1000:
            frames.append(self.frames[number])
            number = self.frames[number].parent
        return frames


def parse_module(text: str) -> Module:
    """Read a module's text.

    Args:
      text: the text of a compiled module, `compiled.as_text()`.

    Returns:
      The module.

    Raises:
      UserError: there is no module or no entry computation, so this is not the text of a compiled
        program.
    """
    first = text.lstrip().partition("\n")[0]
    if not first.startswith("HloModule "):
        raise UserError(
            f"not the text of a compiled module: it starts with {first[:40]!r}, try "
            "compiled.as_text()"
        )
    name, _, header = first.removeprefix("HloModule ").partition(",")
    found = list(_COMPUTATION.finditer(text))
    computations = {
        title: _computation(title, body) for _, title, body in map(re.Match.groups, found)
    }
    entry = next((match[2] for match in found if match[1]), None)
    if entry is None:
        raise UserError(
            f"module {name.strip()} has no ENTRY computation: the text was cut short, read it whole"
        )
    return Module(
        name.strip(),
        fields(header),
        computations,
        entry,
        _frames(text[: found[0].start()].splitlines()[1:]),
    )


def _computation(name: str, body: str) -> Computation:
    # An instruction may go on over several lines: a literal, or a kernel's own notes.
    lines = [_LINE_END.sub(" ", piece).strip() for piece in _NEXT.split(body) if " = " in piece]
    instructions = [_instruction(line.removeprefix("ROOT ")) for line in lines]
    roots = [
        one.name for one, line in zip(instructions, lines, strict=True) if line.startswith("ROOT ")
    ]
    first = [one.name for one in instructions[:1]]  # the text may have no root
    return Computation(
        name,
        {one.name: one for one in instructions},
        (roots + first + [""])[0],
    )


def _instruction(line: str) -> Instruction:
    """Read a line of the form `%name = shape opcode(operands), attributes`."""
    name, _, rest = line.partition(" = ")
    if rest.startswith("("):
        end = _closing(rest, 0)
    else:
        end = rest.index(" ")
    shape = rest[:end]
    rest = rest[end:].lstrip()
    start = rest.index("(")
    end = _closing(rest, start)
    opcode = rest[:start]
    inside = rest[start + 1 : end - 1]
    tail = rest[end:].lstrip(", ")
    if opcode in ("constant", "parameter", "iota"):
        return Instruction(name.lstrip("%"), opcode, parse_shape(shape), (), inside, tail)
    # Older texts put each operand's shape before its name.
    operands = tuple(operand.split(" ")[-1].lstrip("%") for operand in split(inside))
    return Instruction(name.lstrip("%"), opcode, parse_shape(shape), operands, "", tail)


@lru_cache(maxsize=100_000)
def parse_shape(text: str) -> Shape:
    """Read a shape `bf16[2,3]{1,0:T(8,128)S(1)}`, or a tuple of shapes in round brackets.

    Args:
      text: the shape as HLO writes it, with or without a layout.

    Returns:
      The shape. A word that is no array, such as `token[]`, is a dtype without dims.
    """
    text = _COMMENT.sub("", text).strip()
    if text.startswith("("):
        return Shape(
            "tuple", parts=tuple(parse_shape(part) for part in split(text[1 : text.rindex(")")]))
        )
    if (match := _ARRAY.match(text)) is None:
        return Shape(text)
    layout = match[3] or ""
    space = _SPACE.search(layout)
    dims = tuple(int(dim) for dim in re.findall(r"\d+", match[2]))
    return Shape(
        match[1],
        dims,
        "T(" in layout,
        int(space[1]) if space else 0,
        layout=layout,
    )


def split(text: str) -> list[str]:
    """Split a text at the commas that stand in no bracket and no quotes, and take comments out.

    Args:
      text: a list as HLO writes it, without the brackets around it.

    Returns:
      The pieces without spaces around them; empty ones are left out.
    """
    pieces = []
    depth = 0
    start = 0
    for mark in _MARK.finditer(text):
        sign = text[mark.start()]
        depth += (sign in _OPEN) - (sign in _CLOSE)
        if sign == "," and depth == 0:
            pieces.append(text[start : mark.start()])
            start = mark.end()
    pieces.append(text[start:])
    return [piece for piece in (_COMMENT.sub("", piece).strip() for piece in pieces) if piece]


def _closing(text: str, start: int) -> int:
    """Return the position just past the bracket that closes the one at `start`."""
    depth = 0
    for mark in _MARK.finditer(text, start):
        sign = text[mark.start()]
        depth += (sign in _OPEN) - (sign in _CLOSE)
        if depth == 0:
            return mark.end()
    return len(text)


def fields(text: str) -> dict[str, str]:
    """Read `key=value, key={a, b}` as values by key, without quotes around the values."""
    pairs = (piece.partition("=") for piece in split(text))
    return {key: _unquote(value) for key, equals, value in pairs if equals}


def words_of(text: str) -> dict[str, str]:
    """Read `{key=value key="a b"}`, where spaces separate the pairs, as values by key without
    quotes.
    """
    return {key: _unquote(value) for key, value in _WORD.findall(text.strip("{}"))}


def _unquote(value: str) -> str:
    if value.startswith('"'):
        return re.sub(r"\\(.)", r"\1", value[1:-1])
    return value


def _frames(lines: list[str]) -> dict[int, Frame]:
    """Join the four tables at a module's top.

    A text prints parents one too high, so that 1 means none, unless it prints 0 somewhere.
    """
    tables: defaultdict[str, dict[int, str]] = defaultdict(dict)
    title = ""
    for line in lines:
        number, _, value = line.partition(" ")
        if number.isdigit():
            tables[title][int(number)] = value
        elif line:
            title = line.strip()
    files = tables["FileNames"]
    places = {number: words_of(row) for number, row in tables["FileLocations"].items()}
    stacks = {number: words_of(row) for number, row in tables["StackFrames"].items()}
    if any(row.get("parent_frame_id", "0") == "0" for row in stacks.values()):
        shift = 0
    else:
        shift = 1
    frames = {}
    for number, row in stacks.items():
        place = places.get(int(row.get("file_location_id", 0)), {})
        file = _unquote(files.get(int(place.get("file_name_id", 0)), ""))
        frames[number] = Frame(
            file, int(place.get("line", 0)), int(row.get("parent_frame_id", 0)) - shift
        )
    return frames


def words(text: str) -> frozenset[str]:
    """Return the set of the words in a text."""
    return frozenset(text.split())
