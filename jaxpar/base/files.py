"""Files that a user gave: what is wrong with one is told in a line that names it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxpar.base.errors import UserError


@contextmanager
def reading(file: str | Path) -> Iterator[None]:
    """Turn an error of the system inside into a UserError that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Another program wrote it, so its values may be anything.

    Raises:
      UserError: the file cannot be read, is not JSON, or holds no object.
    """
    try:
        with reading(file):
            value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{file} is not a JSON object")
    return value
