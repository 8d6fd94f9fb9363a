"""This module reads the text of a compiled program, `compiled.as_text()`, into a `Module`.

An instruction begins a line.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import lru_cache

from jaxpar.base.errors import UserError, short
from jaxpar.hlo.program.module import Computation, Frame, Instruction, Module, Shape
from jaxpar.hlo.program.text import closing, fields, split, unquote, without_comments, words_of

_ARRAY = re.compile(r"(\w+)\[([^\]]*)\](?:\{([^}]*)\})?")
_COMPUTATION = re.compile(
    r"^(ENTRY )?%?([\w.\-]+)[^\n]*\{\n(.*?)^\}(?:, execution_thread=[^\n]*)?$", re.M | re.S
)
_NEXT = re.compile(r"^\s+(?=(?:ROOT )?%?[\w.\-]+ = )", re.M)
_LINE_END = re.compile(r"\s*\n\s*")
_LEAST_OPERANDS = {
    "get-tuple-element": 1,
    "while": 1,
    "copy": 1,
    "bitcast": 1,
    "optimization-barrier": 1,
    "dynamic-slice": 1,
    "dynamic-update-slice": 2,
    "dot": 2,
    "convolution": 2,
}
"""The least number of operands of an opcode; opcodes that end in -done need one, and others none.
"""
_SPACE = re.compile(r"S\((\d+)\)")


def parse_module(text: str) -> Module:
    """Read a module's text, `compiled.as_text()`.

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
        name=name.strip(),
        header=fields(header),
        computations=computations,
        entry=entry,
        frames=_frames(text[: found[0].start()].splitlines()[1:]),
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
        name=name,
        instructions={one.name: one for one in instructions},
        root=(roots + first + [""])[0],
    )


def _instruction(line: str) -> Instruction:
    """Read a line of the form `%name = shape opcode(operands), attributes`."""
    name, _, rest = line.partition(" = ")
    if rest.startswith("("):
        end = closing(rest, 0)
    else:
        end = rest.index(" ")
    shape = rest[:end]
    rest = rest[end:].lstrip()
    start = rest.index("(")
    end = closing(rest, start)
    opcode = rest[:start]
    inside = rest[start + 1 : end - 1]
    tail = rest[end:].lstrip(", ")
    if opcode in ("constant", "parameter", "iota"):
        return Instruction(name.lstrip("%"), opcode, parse_shape(shape), (), inside, tail)
    # Older texts put each operand's shape before its name.
    operands = tuple(operand.split(" ")[-1].lstrip("%") for operand in split(inside))
    least = _LEAST_OPERANDS.get(opcode, 1 if opcode.endswith("-done") else 0)
    if len(operands) < least:
        raise ValueError(f"{short(name)} has {len(operands)} operands, and {opcode} takes {least}")
    return Instruction(name.lstrip("%"), opcode, parse_shape(shape), operands, "", tail)


@lru_cache(maxsize=100_000)
def parse_shape(text: str) -> Shape:
    """Read a shape `bf16[2,3]{1,0:T(8,128)S(1)}`, or a tuple of shapes in round brackets.

    Args:
      text: the shape as HLO writes it, with or without a layout.

    Returns:
      The shape. A word that is no array, such as `token[]`, is a dtype without dims.
    """
    text = without_comments(text)
    if text.startswith("("):
        parts = split(text[1 : text.rindex(")")])
        return Shape("tuple", parts=tuple(parse_shape(part) for part in parts))
    if (match := _ARRAY.match(text)) is None:
        return Shape(text)
    layout = match[3] or ""
    space = _SPACE.search(layout)
    dims = tuple(int(dim) for dim in re.findall(r"\d+", match[2]))
    return Shape(
        dtype=match[1],
        dims=dims,
        tiled="T(" in layout,
        space=int(space[1]) if space else 0,
        layout=layout,
    )


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
        file = unquote(files.get(int(place.get("file_name_id", 0)), ""))
        frames[number] = Frame(
            file=file,
            line=int(place.get("line", 0)),
            parent=int(row.get("parent_frame_id", 0)) - shift,
        )
    return frames
