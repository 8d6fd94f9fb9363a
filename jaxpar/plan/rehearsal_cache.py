"""A cache of rehearsals: the few figures by which configs are compared, remembered in a folder.

A file is named by the digest of all that a rehearsal depends on: the config, the target, the
versions of the compilers and the library's own source. So the same command goes on where it broke
off, and nothing that is out of date is taken.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.config import Config
from jaxpar.base.errors import Say, UserError, read_json
from jaxpar.base.machine import versions
from jaxpar.base.toml import flatten
from jaxpar.plan.budget import resolve_and_compile
from jaxpar.plan.figures import Figures
from jaxpar.rehearse.of_config import on_target, rehearse
from jaxpar.rehearse.report.memory import DoesNotFit
from jaxpar.rehearse.targets import Target

_PACKAGES = ("jaxpar", "jaxpar.models", "jaxpar.meshes")


def rehearse_point(
    config: Config,
    target: Target,
    folder: Path,
    say: Say = lambda line: None,
) -> Figures:
    """Rehearse a config, or read what was remembered of it.

    Args:
      config: the config; `overlap = auto` and a memory budget are settled first.
      folder: the folder in which rehearsals are remembered. It is made if it is absent.
      say: is called with the lines of a search for overlap or a budget.

    Raises:
      DoesNotFit: the compiler refuses the step for its memory, which is remembered too.
      UserError: `jaxpar.rehearse.config` refuses the config.
    """
    file = folder / f"{digest_of(config, target.name)}.json"
    if file.exists():
        known = read_json(file, {"figures": dict[str, Any], "refused": str})
        if "refused" in known:
            raise DoesNotFit(known["refused"])
        return _read_figures(known["figures"], file)
    try:
        settled, program = resolve_and_compile(on_target(config, target), target, say)
        figures = Figures.of(rehearse(settled, target, program=program))
    except DoesNotFit as refused:
        write_whole(file, json.dumps({"refused": str(refused)}) + "\n")
        raise
    write_whole(file, json.dumps({"figures": asdict(figures)}) + "\n")
    return figures


def _read_figures(table: Mapping[str, Any], file: Path) -> Figures:
    try:
        return Figures(**table)
    except TypeError as error:
        raise UserError(f"{file} is no remembered rehearsal: remove it to make it anew") from error


def digest_of(config: Config, *others: str) -> str:
    """Make a name, of 16 hexadecimal digits, from what a rehearsal or a short training depends on:
    the config, the versions of JAX and of the compilers, and the library's source.

    Args:
      config: every setting counts.
      others: what counts besides, such as the name of the target.
    """
    parts = {
        "config": flatten(config),
        "others": others,
        "versions": versions(),
        "source": _source_digest(),
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _source_digest() -> str:
    """Hash the library's source and its figures of chips: a rehearsal by another state of the
    library is not taken for one by this.
    """
    found = hashlib.sha256()
    for package in _PACKAGES:
        for folder in import_module(package).__path__:
            root = Path(folder)
            for file in sorted([*root.rglob("*.py"), *root.rglob("*.toml")]):
                found.update(str(file.relative_to(root)).encode())
                found.update(file.read_bytes())
    return found.hexdigest()
