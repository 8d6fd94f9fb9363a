"""A small scanner for the lists and pairs that HLO writes, with brackets and quotes matched."""

from __future__ import annotations

import re

_MARK = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/|[{(\[\])},]')
_OPEN = "{(["
_CLOSE = "})]"
_QUOTED_OR_COMMENT = re.compile(r'("(?:[^"\\]|\\.)*")|/\*.*?\*/')
_WORD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')


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
    plain = [without_comments(piece) for piece in pieces]
    return [piece for piece in plain if piece]


def without_comments(text: str) -> str:
    """Return a text without its comments and without spaces around it; what is in quotes is no
    comment.
    """
    return _QUOTED_OR_COMMENT.sub(lambda found: found[1] or "", text).strip()


def closing(text: str, start: int) -> int:
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
    return {key: unquote(value) for key, equals, value in pairs if equals}


def words_of(text: str) -> dict[str, str]:
    """Read `{key=value key="a b"}`, pairs separated by spaces, as values by key without quotes."""
    return {key: unquote(value) for key, value in _WORD.findall(text.strip("{}"))}


def unquote(value: str) -> str:
    """Return a value without the quotes around it, if there are any."""
    if value.startswith('"'):
        return re.sub(r"\\(.)", r"\1", value[1:-1])
    return value
