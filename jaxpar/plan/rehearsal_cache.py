"""A cache of rehearsals: the few figures by which configs are compared, remembered in a folder.

A file is named by the digest of all that a rehearsal depends on: the config, the target, the
versions of the compilers and the library's own source. So the same command goes on where it broke
off, and nothing that is out of date is taken.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.config import Config
from jaxpar.base.errors import Say, UserError, read_json
from jaxpar.base.machine import versions
from jaxpar.base.toml import flatten
from jaxpar.plan.budget import resolve_and_compile
from jaxpar.rehearse.of_config import on_target, rehearse
from jaxpar.rehearse.report.memory import DoesNotFit
from jaxpar.rehearse.report.schema import Rehearsal
from jaxpar.rehearse.targets import Target

_PACKAGES = ("jaxpar", "jaxpar.models", "jaxpar.meshes")


@dataclass(frozen=True)
class Figures:
    """The figures of a rehearsed step on one device, in seconds and bytes.

    Attributes:
      step: the seconds of the whole step.
      tokens_per_second: the rate of all devices together.
      exposed: the time in which compute waits for a collective.
      host_stall: the time in which compute waits for a copy to or from host memory.
      mfu: model FLOPs over peak, a share of 1; None = the peak is not known.
      memory: the bytes of a device at the peak.
      usable: the bytes that a program may take there.
      compile_seconds: the time that the compiler took.
      program: the digest of the compiled program; empty = not known.
    """

    step: float
    tokens_per_second: float
    exposed: float
    host_stall: float
    mfu: float | None
    memory: int
    usable: int
    fits: bool
    compile_seconds: float
    program: str = ""

    @classmethod
    def of(cls, report: Rehearsal) -> Figures:
        """Take the figures out of the report of a config's step."""
        time = report["time"]
        memory = report["memory"]
        return cls(
            step=time["step"],
            tokens_per_second=time.get("tokens_per_second", 0.0),
            exposed=time["exposed_communication"],
            host_stall=time["host_stall"],
            mfu=time["mfu"],
            memory=memory["total"],
            usable=memory["usable_bytes"],
            fits=memory["fits"],
            compile_seconds=report["compile_seconds"],
            program=report.get("program", ""),
        )


@dataclass(frozen=True)
class Point:
    """A config among several that are compared.

    Attributes:
      settings: the names of what was put into the base; empty = the base itself.
      figures: the figures of its rehearsal; None = there are none, and `refused` or `idle` says
        why.
      loss: its loss after some steps, in nats a token; None = it was not trained.
      refused: the reason why it was not rehearsed.
      idle: the reason why one of its settings changes nothing.
      same_as: the name of an earlier point that compiled to the same program, so that what differs
        between the two changed nothing.
    """

    settings: tuple[str, ...]
    figures: Figures | None = None
    loss: float | None = None
    refused: str = ""
    idle: str = ""
    same_as: str = ""

    @property
    def name(self) -> str:
        """The settings in one line."""
        return " + ".join(self.settings) or "base"

    @property
    def fits(self) -> bool:
        """Whether it was rehearsed and fits the memory of a device."""
        return self.figures is not None and self.figures.fits

    @property
    def why_not(self) -> str:
        """The reason why there are no figures, or why they do not count; empty = they do."""
        if self.figures is not None and not self.figures.fits:
            return "does not fit the memory of a device"
        return self.refused or self.idle

    @property
    def remark(self) -> str:
        """What a table says beside the figures: why there are none, or that the program is another
        point's too.
        """
        if not self.why_not and self.same_as:
            return f"changed nothing: the program of {self.same_as}"
        return self.why_not


def find_same(points: Iterable[Point], figures: Figures) -> str:
    """Find the name of the first point that compiled to the same program; empty = there is none.

    Args:
      points: the points that were rehearsed before.
      figures: those of another point.
    """
    if not figures.program:
        return ""
    known = [point for point in points if point.figures is not None]
    same = (point.name for point in known if point.figures.program == figures.program)  # pyright: ignore[reportOptionalMemberAccess]
    return next(same, "")


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
