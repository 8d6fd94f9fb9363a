"""Paths that may be patterns, of files here and of objects in a bucket.

A name of something that exists means just that, whatever characters it has: `notes[12].jsonl` is
that file, and not `notes1.jsonl`.
"""

from __future__ import annotations

import re
from fnmatch import fnmatch
from glob import glob
from pathlib import Path

IN_A_PATTERN = re.compile(r"[*?\[\]{}]")
"""The characters that a library may take for a part of a pattern."""


def matching_files(pattern: str) -> list[Path]:
    """List the files that match a pattern, sorted. Its first folders are no part of it, as far as
    they exist under these very names.
    """
    folder = Path()
    parts = Path(pattern).parts
    while len(parts) > 1 and (folder / parts[0]).is_dir():
        folder /= parts[0]
        parts = parts[1:]
    found = glob(str(Path(*parts)), root_dir=folder, recursive=True)
    return [folder / name for name in sorted(found)]


def matches(name: str, pattern: str) -> bool:
    """Return whether a path below a folder may match a pattern: `**/` is any folders, and none."""
    return fnmatch(name, pattern) or fnmatch(name, pattern.replace("**/", ""))
