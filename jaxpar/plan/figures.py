"""The few figures by which rehearsed configs are compared, and the points of a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxpar.rehearse.report.schema import Rehearsal


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
