"""`train.max_time`: what it may be, and how much time is kept for a step and a save."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from jaxpar.base.config import Config, override
from jaxpar.base.config.checks import check
from jaxpar.base.durations import process_began, seconds_of
from jaxpar.base.errors import UserError
from jaxpar.train.guard.time_limit import TimeLimit, save_seconds

NAME = "train.max_time=1h"


class Clock:
    """A clock that goes when it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def stops_at(limit: TimeLimit, clock: Clock, step: float) -> float:
    """The time at which a run with steps of so many seconds is told to stop."""
    while not (why := limit.asks()):
        clock.now += step
    assert why == NAME
    return clock.now


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("11h45m", 42_300), ("90s", 90), ("1d2h3m4s", 93_784), ("90m", 5_400)],
)
def test_a_duration(text: str, seconds: int) -> None:
    assert seconds_of("train.max_time", text) == seconds


@pytest.mark.parametrize("text", ["45m11h", "12", "h", "1.5h", "0s", "366d", "-1h", "11h 45m"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"train\.max_time=.*try train\.max_time=11h45m"):
        check(override(Config(), {"train.max_time": text}))


@pytest.mark.parametrize(
    ("save", "several", "reserve"),
    [
        (0.0, False, 60.0 + 2 * 5.0),  # no save was seen
        (100.0, False, 2 * (100.0 + 5.0)),
        (100.0, True, 2 * (100.0 + 5.0) + 15.0),  # others have to agree
    ],
)
def test_time_is_kept_for_a_step_and_a_save(save: float, several: bool, reserve: float) -> None:
    clock = Clock()
    limit = TimeLimit(3600, 0.0, NAME, clock, several)
    limit.note_save(save)
    stopped = stops_at(limit, clock, step=5.0)
    assert 3600 - reserve <= stopped < 3600 - reserve + 5.0


def test_a_short_limit_keeps_a_tenth_and_no_limit_never_asks() -> None:
    clock = Clock()
    assert stops_at(TimeLimit(50, 0.0, NAME, clock, False), clock, step=1.0) == 43.0
    clock.now = 1e9
    assert not TimeLimit(0, 0.0, NAME, clock, False).asks()


def test_it_counts_from_the_begin_of_the_process() -> None:
    began = process_began()
    assert 0 < time.monotonic() - began < 24 * 3600
    time.sleep(0.05)
    assert process_began() == pytest.approx(began, abs=0.03)  # a tick is 0.01 s


def test_how_long_a_save_took_stands_beside_it(tmp_path: Path) -> None:
    assert save_seconds(tmp_path) == 0.0
    noted = {"init_timestamp_nsecs": 2 * 10**9, "commit_timestamp_nsecs": 5 * 10**9}
    (tmp_path / "_CHECKPOINT_METADATA").write_text(json.dumps(noted))
    assert save_seconds(tmp_path) == 3.0
    (tmp_path / "_CHECKPOINT_METADATA").write_text("{")
    assert save_seconds(tmp_path) == 0.0
