"""What the time of a run went on, over all processes that trained it, one after another: kept in
`goodput.jsonl` of its folder, a line for each of them.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.base.atomic_write import sync, writing
from jaxpar.base.console import duration_text
from jaxpar.base.errors import Say, UserError, parse_json, reading, require_kinds
from jaxpar.train.goodput.clock import CAUSES, Cause, Clock

GOODPUT = "goodput.jsonl"
"""The file of a run's accounts in its folder."""
WRITE_EVERY = 5.0
"""Seconds between two writings of the file, also where nothing happens. A process that is killed
has lost no more than this of its account.
"""
_MOST_MARKS = 64
"""How many saves have their place in the account kept. Of more the older ones are thinned out: a
run goes on from one of the last, and from an older one where those are damaged or were local.
"""
_MOST_APART = 1.0
"""By how many seconds an account may miss its wall time, which only a damaged line does."""
_LATEST = 1e11
"""No time of a process, in seconds since 1970: the year 5138."""
_LEAST_SHARE = 0.0005
"""The least share of the time that a line has room for."""
_KINDS = {
    "began": float,
    "ended": float,
    "lowest": int,
    "step": int,
    "saves": int,
    "local_saves": int,
    "local_seconds": float,
    "seconds": dict[str, float],
    "marks": list[list[float]],
    "how": str,
}
_MOST_SAID = 200
"""Letters of how a process ended that are kept."""


class Mark(NamedTuple):
    """How many productive seconds a process had counted when a step was saved."""

    step: int
    productive: float


@dataclass
class Life:
    """The account of one process of a run.

    Attributes:
      began: when it began, in seconds since 1970.
      ended: its last sign of life, likewise.
      lowest: the lowest step that it has trained from.
      step: the last one that it has trained.
      saves: how many checkpoints it saved.
      seconds: what the time between these two went on, by cause.
      marks: its place at its saves, in order.
      local_saves: how many of the checkpoints went to the local tier.
      local_seconds: how long the steps waited for those.
      how: how it ended; empty = it has not, or was killed.
    """

    began: float
    ended: float
    lowest: int
    step: int
    saves: int
    seconds: dict[Cause, float]
    marks: list[Mark] = field(default_factory=list)
    local_saves: int = 0
    local_seconds: float = 0.0
    how: str = ""

    def productive_until(self, step: int) -> float:
        """The productive seconds of the steps up to one; between two marks they are taken to be
        alike.
        """
        productive = self.seconds["productive"]
        places = [Mark(self.lowest, 0.0), *self.marks, Mark(self.step, productive)]
        before = [place for place in places if place.step <= step]
        after = [place for place in places if place.step > step]
        if not before:
            return 0.0
        if not after:
            return productive
        share = (step - before[-1].step) / (after[0].step - before[-1].step)
        between = share * (after[0].productive - before[-1].productive)
        return min(max(before[-1].productive + between, 0.0), productive)

    def as_json(self) -> str:
        """The line of the file."""
        seconds = {cause: round(value, 3) for cause, value in self.seconds.items() if value}
        marks = [[mark.step, round(mark.productive, 3)] for mark in self.marks]
        local_seconds = round(self.local_seconds, 3)
        written = vars(self) | {"seconds": seconds, "marks": marks, "local_seconds": local_seconds}
        return json.dumps(written) + "\n"


class Totals(NamedTuple):
    """What the time of a run went on, over all of its processes.

    Attributes:
      seconds: by cause.
      lives: how many processes trained it, one after another.
      saves: how many checkpoints they saved.
    """

    seconds: dict[Cause, float]
    lives: int
    saves: int

    @property
    def wall(self) -> float:
        """The seconds from the start of the first process to the last sign of the last one."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The productive share of the wall time, in [0, 1]."""
        return self.seconds["productive"] / max(self.wall, 1e-9)

    def summary(self) -> str:
        """Return a line: the goodput, and the share of each kind of badput that can be seen."""
        wall = max(self.wall, 1e-9)
        shares = {CAUSES[cause].name: value / wall for cause, value in self.seconds.items()}
        goodput = shares.pop(CAUSES["productive"].name)
        largest = sorted(shares.items(), key=lambda item: -item[1])
        lost = [f"{name} {100 * share:.1f} %" for name, share in largest if share >= _LEAST_SHARE]
        processes = f"{self.lives} processes" if self.lives > 1 else "1 process"
        began = f"goodput {100 * goodput:.1f} % of {duration_text(wall)} in {processes}"
        return ": ".join(filter(None, (began, ", ".join(lost))))

    def row(self) -> dict[str, float]:
        """Return what a row of metrics says of it; causes without time are left out."""
        found = {"goodput": self.goodput, "wall_seconds": self.wall}
        for cause, value in self.seconds.items():
            kind = "productive" if cause == "productive" else f"badput_{cause}"
            if value:
                found[f"{kind}_seconds"] = value
        return found


def add_up(lives: Sequence[Life]) -> Totals:
    """Add up the accounts of the processes that trained a run, one after another.

    The work of a process after the lowest step that a later one went on from was lost. The time
    between two processes is `down`. Where one began before the other had ended, as one that waits
    for a lock, the time that both ran counts once: it is taken out of the later one's start-up, and
    what is more than that out of its other causes, goodput last.

    Args:
      lives: the accounts, in their order.

    Returns:
      The sum, which is the time from the start of the first to the last sign of the last.
    """
    total: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
    until = lives[0].began if lives else 0.0
    for life, kept in zip(lives, _kept(lives), strict=True):
        seconds = dict(life.seconds)
        seconds["wasted"] += seconds["productive"] - kept
        seconds["productive"] = kept
        gap = life.began - until
        if gap >= 0:
            seconds["down"] += gap
        else:
            _take_out(seconds, -gap)
        until = max(until, life.ended)
        for cause, value in seconds.items():
            total[cause] += value
    return Totals(total, len(lives), sum(life.saves for life in lives))


def _take_out(seconds: dict[Cause, float], both: float) -> None:
    """Take the time that two processes ran out of the seconds of one, goodput last."""
    causes = list[Cause](CAUSES)
    causes.append("startup")
    for cause in reversed(causes):
        taken = min(both, seconds[cause])
        seconds[cause] -= taken
        both -= taken


def _kept(lives: Sequence[Life]) -> list[float]:
    """The productive seconds of each account whose work no later process has done again."""
    found = list[float]()
    lowest: int | None = None
    for life in reversed(lives):
        if lowest is None:
            found.append(life.seconds["productive"])
            lowest = life.lowest
        else:
            found.append(life.productive_until(lowest))
            lowest = min(lowest, life.lowest)
    return found[::-1]


class Read(NamedTuple):
    """The accounts in a file, in their order, and how many of its lines are damaged."""

    lives: list[Life]
    damaged: int


def read_lives(folder: Path) -> Read:
    """Read the accounts of a run. One that is damaged is left out; its time then counts as `down`.

    Raises:
      UserError: the file is there and cannot be read.
    """
    path = folder / GOODPUT
    if not path.exists():
        return Read([], 0)
    with reading(path):
        lines = path.read_bytes().splitlines()
    lives = [life for line in lines if (life := _life_of(line)) is not None]
    return Read(lives, len(lines) - len(lives))


def _life_of(line: bytes) -> Life | None:
    try:
        found: dict[str, Any] = require_kinds(parse_json(line, GOODPUT), _KINDS, GOODPUT)
        seconds = {cause: float(found["seconds"].get(cause, 0.0)) for cause in CAUSES}
        marks = [Mark(int(step), productive) for step, productive in found["marks"]]
        life = Life(**(found | {"seconds": seconds, "marks": marks}))
    except (UserError, KeyError, TypeError, ValueError):
        return None
    apart = abs(sum(seconds.values()) - (life.ended - life.began))
    numbers = (life.lowest, life.step, life.saves, life.local_saves, life.local_seconds)
    counts = (*numbers, *seconds.values(), *map(min, life.marks))
    if apart > _MOST_APART or min(counts) < 0 or not 0 <= life.began <= life.ended <= _LATEST:
        return None
    return life


class Account:
    """The account of this process, which the first process of a run keeps in the run's folder.

    Attributes:
      clock: counts the time by cause.
    """

    def __init__(
        self,
        began: float | None = None,
        time_now: Callable[[], float] = time.monotonic,
    ):
        """Begin to count; `open` begins to write.

        Args:
          began: when this process began, by `time_now`; None = now.
          time_now: the seconds that only go forward.
        """
        now = time_now()
        self.clock = Clock(began, time_now=time_now)
        self._now = time_now
        # by the clock of the wall, but what counts are differences of the other
        started = time.time() - (now - (now if began is None else min(began, now)))
        self._life = Life(started, started, lowest=0, step=0, saves=0, seconds={})
        """This process, but for what its time went on, which `_until_now` adds."""
        self._ends = deque[Mark](maxlen=4)
        """Where the last few steps ended."""
        self._file: Path | None = None
        self._owns: Callable[[], bool] = lambda: True
        self._earlier: list[Life] = []
        self._earlier_text = ""
        self._written = 0.0
        # a name that no bucket is sent
        self._unfinished = f".{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def open(
        self,
        folder: Path,
        first: int,
        owns: Callable[[], bool] = lambda: True,
        say: Say = lambda line: None,
    ) -> None:
        """Write to a run's folder, from now on and every few seconds.

        Args:
          first: the step that this process goes on after.
          owns: whether the folder is this training's, which is asked before each writing.
          say: gets a line where accounts are damaged.

        Raises:
          UserError: the file cannot be read or written.
        """
        self._life.lowest = self._life.step = first
        self._ends.append(Mark(first, self._productive()))
        self._owns = owns
        if self._file is not None:  # the folder was given back, and is opened from an older step
            return
        self._earlier, damaged = read_lives(folder)
        if damaged:
            say(
                f"warning: {folder / GOODPUT} has damaged lines, {damaged} in number: the time of "
                "these processes counts as down"
            )
        self._earlier_text = "".join(life.as_json() for life in self._earlier)
        self._file = folder / GOODPUT
        self._write()
        threading.Thread(target=self._beat, name="goodput", daemon=True).start()

    def step_ended(self, step: int) -> None:
        """Note that a step has run."""
        self._life.step = step
        self._ends.append(Mark(step, self._productive()))

    def saving(self, step: int) -> None:
        """Note that a step is about to be saved, to which the run may come back.

        Args:
          step: the step, after which nothing runs.
        """
        life = self._life
        life.step = step
        life.saves += 1
        life.marks.append(Mark(step, self._productive()))
        if len(life.marks) > _MOST_MARKS:
            del life.marks[: _MOST_MARKS // 2 : 2]
        self.note(at_once=True)

    def saved_locally(self, seconds: float) -> None:
        """Note that the last save went to the local tier.

        Args:
          seconds: how long the steps waited for it.
        """
        self._life.local_saves += 1
        self._life.local_seconds += seconds

    def skip(self, step: int) -> None:
        """Count a step that has just run as a bad one."""
        ends = {mark.step: mark.productive for mark in self._ends}
        if step not in ends:
            return
        lost = ends[step] - ends.get(step - 1, ends[step])
        self._move_back(lost)
        for place, mark in enumerate(self._ends):
            if mark.step >= step:
                self._ends[place] = mark._replace(productive=mark.productive - lost)

    def roll_back(self, step: int) -> None:
        """Count the steps after one that the run goes back to as bad ones."""
        now = self._until_now()
        self._move_back(now.seconds["productive"] - now.productive_until(step))
        life = self._life
        while life.marks and life.marks[-1].step > step:
            life.marks.pop()
        self._ends.clear()
        self._ends.append(Mark(step, self._productive()))
        life.step = step
        life.lowest = min(life.lowest, step)

    def _move_back(self, seconds: float) -> None:
        self.clock.move("productive", "guard", seconds)

    def _productive(self) -> float:
        return self.clock.seconds()["productive"]

    def totals(self) -> Totals:
        """Return the sum over all processes of the run until now."""
        return add_up([*self._earlier, self._until_now()])

    def row(self) -> dict[str, float]:
        """Return what a row of metrics says; nothing on a process that keeps no account."""
        return {} if self._file is None else self.totals().row()

    def summary(self) -> str:
        """Return a line about the run until now; nothing on a process that keeps no account."""
        return "" if self._file is None else self.totals().summary()

    def note(self, at_once: bool = False) -> None:
        """Write the account, if it was not written for some seconds.

        What cannot be written now is written later, or the metrics in the same folder cannot be
        either, and end the run.

        Args:
          at_once: whether it is written in any case.
        """
        if self._file is None or self._closed.is_set():
            return
        if at_once or self._now() - self._written >= WRITE_EVERY:
            with suppress(UserError):
                self._write()

    def note_end(self, how: str) -> None:
        """Note how the training in this process ends, for who looks at its folder later."""
        self._life.how = how[:_MOST_SAID]

    def rest(self) -> None:
        """Write the account once more, and then no more until `open`: the folder is given back."""
        try:
            self.note(at_once=True)
        finally:
            with self._lock:  # what is being written is written first
                self._owns = lambda: False

    def close(self) -> None:
        """Write the account once more, unless another process has begun to train the run."""
        try:
            with suppress(UserError):
                if self._is_last():
                    self.note(at_once=True)
        finally:
            self._closed.set()

    def _is_last(self) -> bool:
        """Whether no other process has begun to train the run, so far as its file says."""
        if self._file is None:
            return False
        return len(read_lives(self._file.parent).lives) == len(self._earlier) + 1

    def _until_now(self) -> Life:
        """This process until now; a copy, which another thread may write."""
        seconds = self.clock.seconds()
        life = self._life
        ended = life.began + sum(seconds.values())
        return replace(life, ended=ended, seconds=seconds, marks=list(life.marks))

    def _write(self) -> None:
        """Write the file as a whole, but never its folder, which somebody may have moved."""
        assert self._file is not None
        with self._lock:
            if not self._owns():
                return
            unfinished = self._file.with_name(self._unfinished)
            text = self._earlier_text + self._until_now().as_json()
            with writing(self._file):
                unfinished.write_text(text, encoding="utf-8")
                sync(unfinished)
                unfinished.replace(self._file)
            self._written = self._now()

    def _beat(self) -> None:
        while not self._closed.wait(WRITE_EVERY):
            self.note()
