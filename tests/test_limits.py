"""The limits of the fuzzes count what a trial takes, and not what others take of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from limits import Watch, at_most, cost_of

BUSY = "while True: pass"
WORK = 0.1
"""Seconds of a processor, some of its slices of time, of which others take as many."""

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/schedstat"), reason="needs Linux, which says how long one waits"
)


@pytest.fixture
def one_of_three() -> Iterator[None]:
    """Have this thread share its processor with two processes that are always busy."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    try:
        time.sleep(0.1)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.sched_setaffinity(0, before)


def work() -> None:
    """Use a processor for a while."""
    until = time.thread_time() + WORK
    while time.thread_time() < until:
        pass


def test_what_others_take_of_the_machine_is_not_counted(one_of_three):
    began = time.monotonic()
    counted = cost_of(work).seconds
    passed = time.monotonic() - began
    # this thread gets a third, where nothing else runs
    assert passed > 1.5 * WORK
    assert WORK <= counted < 1.4 * WORK


@pytest.mark.slow
def test_threads_that_wait_one_after_another_are_not_counted(one_of_three):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()

        def chain() -> None:
            for _ in range(2):
                pool.submit(work).result()
                work()

        counted = cost_of(chain).seconds
    assert 4 * WORK <= counted < 1.4 * 4 * WORK


def test_a_trial_that_sleeps_is_counted():
    assert cost_of(lambda: time.sleep(0.1)).seconds >= 0.09


@pytest.mark.slow
def test_what_is_ended_has_had_its_seconds(one_of_three):
    watch = Watch()
    with pytest.raises(TimeoutError, match="more than 1 s"), at_most(1):
        while True:
            pass
    assert watch.seconds() >= 1
