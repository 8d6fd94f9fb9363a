"""Mistakes of the user: the exception that the CLI prints as a line before it exits with 2, and how
files are read.

Every file that comes from elsewhere comes in by this door: `reading` for what the system says,
`read_json` and `parse_json` for what stands in it. What is damaged, too deep or of another shape is
refused in one line that names the file and the place in it.
"""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Say = Callable[[str], None]
"""Prints a line for the user."""
UTF8 = "utf-8-sig"
"""The encoding of every text that is read: UTF-8, with or without the byte order mark that Windows
puts in front.
"""
BYTE_ORDER_MARK = "\ufeff"
"""That mark as a character, in a text that another library has read."""
# Control characters but line ends and tabs, marks that turn the direction of a line around, and
# halves of characters.
_OBEYED = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)"
)
_KINDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}
_MOST_INT = 2**63 - 1


_URLS: dict[str, str] = {}
"""The URL that each copy on this machine is of: for messages alone."""


def name_by_url(path: Path, url: str) -> None:
    """Have messages call a path, and all below it, by the URL that it is a copy of.

    Args:
      path: the copy on this machine.
      url: what it is a copy of.
    """
    _URLS[str(path)] = url


def with_urls(text: str) -> str:
    """Write the URL in place of each path of this machine that is a copy of one.

    Args:
      text: a message, or one path.
    """
    for path, url in _URLS.items():
        text = text.replace(path, url)
    return text


_PASSWORD = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")


def without_passwords(text: str) -> str:
    """Write stars in place of the password of each URL that has one, `sftp://name:password@host`.

    Args:
      text: a message.
    """
    return _PASSWORD.sub(r"\1:***@", text)


PEER_LOST = 75
"""What a process exits with that cannot go on because another of its run is not there."""


class UserError(Exception):
    """A mistake in a config, a file, or a request, in one sentence: what was wrong, what was found,
    what to try.

    Attributes:
      exit_code: what the process that it ends exits with; docs/reliability.md has a table of all.
    """

    exit_code = 2
    ends_at_once = False
    """Whether the process is to end without Python's own end, which would wait for other processes
    that are gone."""

    def __init__(self, message: object = ""):
        super().__init__(without_passwords(with_urls(str(message))))


def suggest(word: str, choices: Iterable[str], alike: float = 0.5) -> str:
    """Suggest the closest choice: ` (did you mean 'x'?)`.

    Args:
      word: what was written.
      choices: what might have been meant.
      alike: how close a choice must be, from 0 to 1 = the same.

    Returns:
      The hint, or the empty string when nothing is close.
    """
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=alike)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return ""


# `Path` makes one slash of two.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def is_url(path: str | Path) -> bool:
    """Whether a path begins with a scheme, such as `s3://`; `Path` may have made one slash of two.

    Args:
      path: what was given as a path; empty = none.
    """
    return bool(_URL.match(str(path)))


def require_local(*paths: str | Path) -> None:
    """Refuse a URL where only a path of this machine is read or written: `Path("s3://bucket/run")`
    is a local folder named `s3:`.

    Args:
      paths: files and folders that are about to be read or written; an empty one is none.

    Raises:
      UserError: one of them begins with a scheme, such as `gs://`, `s3://`, `az://`, `hf://` or
        `https://`.
    """
    for path in paths:
        if is_url(path):
            scheme, _, rest = str(path).partition(":/")
            raise UserError(
                f"{scheme}://{rest.lstrip('/')} is a URL, and here only paths of this machine are "
                "read and written: give a path of this machine (run folders, data, tokenizers and "
                "Hugging Face folders may be URLs)"
            )


def visible(text: str) -> str:
    r"""The text with everything that a terminal would obey and not show written out: an escape
    becomes `\\x1b`.

    A name in a file, or a path, may hold colours, moves of the cursor or marks that write from
    right to left. Line ends and tabs stay.
    """
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def json_line(value: object) -> str:
    """A value as one line of JSON, of which a terminal obeys nothing either: what it would obey is
    escaped.
    """
    text = json.dumps(value, ensure_ascii=False)
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def short(value: object) -> str:
    """Write a value as Python does, for a message.

    Returns:
      The text, of at most 80 characters.
    """
    try:
        if isinstance(value, str) and not value.isprintable():
            text = ascii(value)
        else:
            text = repr(value)
            if "\n" in text:  # as of an array
                text = " ".join(text.split())
    # a number with more digits than Python writes; a list in a list in a list
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__} that is too large to show"
    if len(text) <= 80:
        return text
    return text[:77] + "..."


@contextmanager
def reading(file: str | Path) -> Iterator[None]:
    """Turn an error of the system inside, or of a text that is none, into a UserError that names
    the file.

    Args:
      file: the file that is read inside.

    Raises:
      UserError: it is a URL, cannot be read, or is no text.
    """
    require_local(file)
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        why = f"it is no text in {error.encoding} ({error.reason} at byte {error.start})"
        raise UserError(f"cannot read {file}: {why}: download it again, or convert it") from error


def read_json(
    file: Path,
    kinds: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Read the object in a JSON file.

    Args:
      kinds: what some of its values must be, by key: `{"weight_map": dict[str, str], "r": int,
        "bias": str | None}`. A key may be absent. Values of other keys may be anything.

    Raises:
      UserError: the file cannot be read, is no JSON or holds no object, has one key twice with
        different values, or a value is of another kind.
    """
    with reading(file):
        content = file.read_bytes()
    return require_kinds(parse_json(content, str(file)), kinds or {}, str(file))


def parse_json(text: str | bytes, origin: str) -> Any:
    """Parse a JSON text.

    Args:
      text: the text, or its bytes in UTF-8.
      origin: what a message calls it.

    Raises:
      UserError: it is no JSON, is too deep to be read, or has one key twice with different values.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode(UTF8)
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise UserError(
            f"{origin} is not valid JSON: its lists and objects are too deep"
        ) from error
    except ValueError as error:
        raise UserError(f"{origin} is not valid JSON: {error}") from error


def require_kinds(
    value: Any,
    kinds: Mapping[str, Any],
    origin: str,
) -> dict[str, Any]:
    """Require that a value of JSON is an object whose values are of some kinds.

    Args:
      kinds: the kind of each value by its key, which `read_json` takes too.
      origin: what a message calls the value.

    Raises:
      UserError: it is no object, or one of its values is of another kind.
    """
    if not isinstance(value, dict):
        raise UserError(f"{origin} is not a JSON object, found {short(value)}")
    for key, kind in kinds.items():
        if key in value and not is_kind(value[key], kind):
            raise UserError(f"{origin}: {key} is {_kind_text(kind)}, found {short(value[key])}")
    return value


def is_kind(value: object, kind: Any) -> bool:
    """Tell whether a value of JSON is of a kind.

    A whole number is one of 64 bits and no boolean; every number is finite.

    Args:
      kind: a type, `list[int]`, `dict[str, str]`, one of several as in `int | None`, or `Any`.

    Returns:
      Whether it is, with all that is in it.
    """
    if kind is Any:
        return True
    outer = typing.get_origin(kind)
    inner = typing.get_args(kind)
    if outer in (types.UnionType, typing.Union):
        return any(is_kind(value, one) for one in inner)
    if outer is list:
        return isinstance(value, list) and all(is_kind(item, inner[0]) for item in value)
    if outer is dict:
        return isinstance(value, dict) and all(is_kind(item, inner[1]) for item in value.values())
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, int):
        return kind in (int, float) and abs(value) <= _MOST_INT
    if isinstance(value, float):
        return kind is float and abs(value) < float("inf")
    return isinstance(value, kind)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs. JSON does not say which of two values of one key counts, so they
    must be equal.
    """
    table = dict(pairs)
    if len(table) < len(pairs):
        for key, value in pairs:
            if value != table[key]:
                raise ValueError(f"the key {short(key)} is there twice, with different values")
    return table


def _kind_text(kind: Any) -> str:
    outer = typing.get_origin(kind)
    inner = typing.get_args(kind)
    if outer in (types.UnionType, typing.Union):
        return " or ".join(map(_kind_text, inner))
    if outer is None:
        return _KINDS.get(kind, "anything")
    what = _kind_text(inner[-1])
    if outer is list:
        return f"a list, each item {what}"
    return f"an object, each value {what}"
