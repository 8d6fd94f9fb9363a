"""A limit of the time of a step, with times of hundredths of a second."""

from __future__ import annotations

import threading
import time

from jaxpar.train.guard.watchdog import Watchdog


def test_a_step_that_does_not_finish_ends_the_process() -> None:
    said: list[str] = []
    ended = threading.Event()

    def end(line: str) -> None:
        said.append(line)
        ended.set()

    with Watchdog(0.2, end) as dog:
        for _ in range(3):
            dog.beat()
        assert ended.wait(10)
    assert len(said) == 1 and "(train.hang_seconds=0.2)" in said[0]


def test_a_batch_of_an_evaluation_that_does_not_finish_ends_it_too() -> None:
    said: list[str] = []
    ended = threading.Event()

    def end(line: str) -> None:
        said.append(line)
        ended.set()

    with Watchdog(0.3, end) as dog, dog.paused():
        time.sleep(0.5)  # its program compiles
        for _ in range(3):
            dog.batch_done()
            time.sleep(0.1)
        assert said == []
        assert ended.wait(10)
    assert len(said) == 1 and said[0].startswith("no batch of the evaluation has finished for 0 s")


def test_beats_and_pauses_keep_it_quiet_and_slow_steps_widen_it() -> None:
    said: list[str] = []
    with Watchdog(0.5, said.append) as dog:
        for _ in range(4):
            time.sleep(0.2)
            dog.beat()
        with dog.paused():
            time.sleep(1.0)
        assert dog.limit >= 20 * 0.2
        dog.beat()
    assert said == []
    with Watchdog(0.0, said.append):  # which watches nothing
        time.sleep(0.3)
    assert said == []
