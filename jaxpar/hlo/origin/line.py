"""The line of Python that a task is from: the frame of its stack that tells most.

    dirs     ("/src/jaxpar/models", "models"), ("/src/jaxpar/jaxpar", "jaxpar")
    frames   /src/jaxpar/jaxpar/parallel/linear/ring_matmul.py:88     the innermost
             /src/jaxpar/models/linears.py:40
             /src/jaxpar/models/transformer.py:72
    line     models/transformer.py:72

The first directory that has a frame holds the models, so the library's own line is not taken. All
linears go through `models/linears.py`, so the line that calls it is taken.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import jax

from jaxpar.hlo.program.module import Frame

PackageDirs = Sequence[tuple[str, str]]
"""(directory, name shown) pairs, the most telling first: ("/home/me/jaxpar/models", "models").
`OWN` stands for the files of somebody else's program, which belong to no installed package, nor to
Python, nor to this library."""
OWN = ("", "")
_HELPERS = ("models/linears.py:",)
"""Lines through which all linears of a model go, so that they cannot tell one linear from another.
"""
_INSTALLED = ("/site-packages/", "/dist-packages/")


def default_dirs() -> PackageDirs:
    """Return the directories of the models and of the library, as they are installed here."""
    found = []
    for module, shown in (("jaxpar.models", "models"), ("jaxpar", "jaxpar")):
        spec = importlib.util.find_spec(module)
        found += (
            [(folder, shown) for folder in (spec.submodule_search_locations or ())] if spec else []
        )
    return tuple(found)


def source_line(frames: list[Frame], dirs: PackageDirs) -> str:
    """Write the innermost frame in the first directory that has any.

    Where that calls a program of somebody else, as a model calls a block that it was given, the
    innermost frame of that program is written. A file that many parts of a model call is passed
    over for the line that calls it.

    Args:
      frames: the stack of an instruction, the innermost frame first.
      dirs: (directory, name shown) pairs, the most telling first.

    Returns:
      The line, `models/transformer.py:72`; empty if no directory has a frame.
    """
    for folder, shown in dirs:
        if (folder, shown) == OWN:
            if own := _own_line(frames, dirs):
                return own
            continue
        inside = [
            (depth, f"{shown}/{Path(frame.file).relative_to(folder).as_posix()}:{frame.line}")
            for depth, frame in enumerate(frames)
            if _inside(frame.file, folder)
        ]
        callers = [(depth, line) for depth, line in inside if not line.startswith(_HELPERS)]
        for depth, line in callers or inside:
            return _own_line(frames[:depth], dirs) or line
    return ""


def _own_line(frames: list[Frame], dirs: PackageDirs) -> str:
    """Write the innermost frame of somebody else's program; empty if there is none."""
    known = [*_packages(), *(folder for folder, _ in dirs if folder)]
    for frame in frames:
        installed = any(folder in frame.file for folder in _INSTALLED)  # of another Python, too
        if not installed and not any(_inside(frame.file, folder) for folder in known):
            return f"{_from_here(Path(frame.file))}:{frame.line}"
    return ""


def _from_here(file: Path) -> str:
    """Write a file from the working directory on; its name alone where it is not in there."""
    try:
        return str(file.relative_to(Path.cwd()))
    # another folder, or the working directory is deleted
    except (ValueError, OSError):
        return file.name


def _inside(file: str, folder: str) -> bool:
    return file.startswith(folder.rstrip("/") + "/")


@lru_cache(maxsize=1)
def _packages() -> tuple[str, ...]:
    """Return the folders of Python, of the installed packages and of this library."""
    installed = [
        sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")
    ]
    others = [
        str(Path(jax.__file__).parents[1]),
        *(folder for folder, _ in default_dirs()),
    ]
    return tuple(dict.fromkeys([*installed, *others]))
