"""Ways to damage a file: its values by what they are, and its bytes, in an order that a seed alone
decides.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

Damage = Callable[[bytes, random.Random], bytes]
"""Takes the bytes of a whole file and gives those of a damaged one."""

NONSENSE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    2**31,
    2**63,
    2**70,
    10**400,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "0",
    "nan",
    "\x1b[31mred",
    "[bold]",
    "$x^2$",
    "\u202e",
    "\ud800",
    "/",
    "..",
    "a/b",
    "\x00",
    [],
    {},
    [None],
    [[]],
    [1, 2],
    ["x"],
    [{}],
    {"": None},
    {"x": 1},
    {"content": 1},
    {"factor": "x"},
)
"""Values that hardly any key can have."""
_DEEP = 20_000


def damage_bytes(content: bytes, draw: random.Random) -> bytes:
    """Flip, cut, insert or repeat bytes, or put another file in its place."""
    place, end = (sorted(draw.randrange(len(content) + 1) for _ in range(2))) if content else (0, 0)
    flipped = bytearray(content or b"\0")
    for _ in range(draw.choice((1, 4, 64))):
        flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
    inserted = draw.choice(
        (b"\0", b"\xff\xfe", b'"', b"{", b"]", b"\n", b"9" * 5000, b"\xed\xa0\x80")
    )
    choices = [
        bytes(flipped),
        bytes(flipped),
        content[:place],
        content[end:],
        content[:place] + content[end:],
        content[:place] + inserted + content[place:],
        content[:end] + content[place:],
        b"",
        b"\0" * 64,
        b"\xef\xbb\xbf" + content,
        content.decode("latin-1").encode("utf-16"),
        b"\x89PNG\r\n\x1a\n" + content,
        b"[" * _DEEP,
        b'{"a":' * _DEEP,
        draw.randbytes(200),
    ]
    return draw.choice(choices)


def damage_json(content: bytes, draw: random.Random) -> bytes:
    """Delete, replace, retype, rename or double a value of a JSON text."""
    tree = json.loads(content)
    changed = copy.deepcopy(tree)
    path = draw.choice(list(_paths(tree)))
    parent, key = _parent(changed, path)
    way = draw.choice(
        ("delete", "replace", "replace", "replace", "retype", "retype", "rename", "twice")
    )
    if way == "twice" and isinstance(parent, dict) and isinstance(changed, dict):
        # Two of one key at the top: which of them counts, JSON does not say.
        name = json.dumps(path[0])
        return f"{{{name}: {json.dumps(draw.choice(NONSENSE))}, {json.dumps(changed)[1:]}".encode()
    if parent is None:
        return json.dumps(draw.choice(NONSENSE)).encode()
    if way == "delete":
        del parent[key]
    elif way == "rename" and isinstance(parent, dict):
        parent[draw.choice(("", "x", str(key).upper(), f" {key}"))] = parent.pop(key)
    elif way == "retype":
        parent[key] = _retyped(parent[key], draw)
    else:
        parent[key] = draw.choice(NONSENSE)
    return json.dumps(changed).encode()


def damage_jsonl(content: bytes, draw: random.Random) -> bytes:
    """Damage one line of a file that has a JSON text a line."""
    lines = content.splitlines()
    place = draw.randrange(len(lines))
    lines[place] = draw.choice((damage_json, damage_json, damage_bytes))(
        lines[place],
        draw,
    )
    return b"\n".join(lines) + b"\n"


def damage_toml(content: bytes, draw: random.Random) -> bytes:
    """Delete, replace, rename or double a line of a TOML text."""
    lines = content.decode().splitlines()
    place = draw.choice([i for i, line in enumerate(lines) if line.strip()])
    key, equals, _ = lines[place].partition(" = ")
    nonsense = (
        "",
        "true",
        "-1",
        "0",
        "1.5",
        "nan",
        "-inf",
        str(2**63 - 1),
        str(2**70),
        "1e400",
        '""',
        '"x"',
        '"\\u001b[31m"',
        '"[bold]"',
        "[]",
        "[[]]",
        "[1]",
        '["x"]',
        "{}",
        "{a = 1}",
        "1979-05-27",
        '"""',
        "9" * 5000,
        "[" * 3000,
    )
    choices = [
        [],
        [lines[place]] * 2,
        ["x" + lines[place]],
        [lines[place], "[x]"],
        ["[[model]]"],
    ]
    if equals:
        choices += [[f"{key} = {value}"] for value in nonsense]
    lines[place : place + 1] = draw.choice(choices)
    return "\n".join(lines).encode()


def damage_safetensors(content: bytes, draw: random.Random) -> bytes:
    """Damage the header of a safetensors file, or say a wrong length of it."""
    (size,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + size]
    data = content[8 + size :]
    way = draw.choice(("header", "header", "header", "length", "data"))
    if way == "length":
        wrong = draw.choice(
            (
                0,
                1,
                size - 1,
                size + 1,
                size + 8,
                len(content),
                2**31,
                2**40,
                2**63,
                2**64 - 1,
            )
        )
        return struct.pack("<Q", wrong) + header + data
    if way == "data":
        return (
            content[:8]
            + header
            + draw.choice(
                (
                    data[:-1],
                    data + b"\0",
                    b"",
                    data[: len(data) // 2],
                )
            )
        )
    damaged = damage_json(header, draw)
    return struct.pack("<Q", len(damaged)) + damaged + data


def _retyped(value: Any, draw: random.Random) -> Any:
    """The value as one of another type."""
    if isinstance(value, str):
        text = value
    else:
        text = json.dumps(value)
    others: list[Any] = [
        text,
        [value],
        {"x": value},
        [value] * 3,
    ]
    if isinstance(value, int | float):
        others += [float(value), -value, value * 1_000_003, value + 0.5]
    if isinstance(value, dict):
        others += [list(value.items()), list(value)]
    if isinstance(value, list):
        others += [dict(enumerate(value)), value * 2, value[:-1]]
    if isinstance(value, str):
        others += [value.upper(), value + "\x1b[0m", list(value)]
    return draw.choice(others)


def _paths(
    tree: Any,
    path: tuple[Any, ...] = (),
) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every value of a JSON tree."""
    yield path
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    else:
        items = ()
    for key, value in items:
        yield from _paths(value, (*path, key))


def _parent(tree: Any, path: tuple[Any, ...]) -> tuple[Any, Any]:
    """What holds the value at `path`, and its key there; nothing holds the whole."""
    if not path:
        return None, None
    for key in path[:-1]:
        tree = tree[key]
    return tree, path[-1]
