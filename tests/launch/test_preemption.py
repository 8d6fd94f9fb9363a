"""What a signal to `jaxpar launch ray` does: before there is something to save, and after."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from jaxpar.launch import preemption as module
from jaxpar.launch.gang import _failed
from jaxpar.launch.preemption import Place, Stops, fit
from jaxpar.train.guard.failures import CopiesDiffer, PeerLost

HERE = Place("a node", 7)
THIS = "0" * 56
OTHER = "1" * 56
"""Two names of nodes, as Ray gives them."""


def test_with_nothing_to_save_it_ends_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        Stops().take(signal.SIGINT, None)
    with pytest.raises(SystemExit) as ended:
        Stops().take(signal.SIGTERM, None)
    assert ended.value.code == 143


def test_only_a_second_ctrl_c_ends_at_once_what_has_something_to_save() -> None:
    stops = Stops()
    stops.place = HERE
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        stops.take(number, None)
    assert stops.number == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        stops.take(signal.SIGINT, None)


def test_a_stop_goes_to_the_processes_of_this_start_and_of_the_next(monkeypatch) -> None:
    told: list[Place] = []
    monkeypatch.setattr(module, "_terminate", lambda ray, place: told.append(place))
    stops = Stops()
    stops.place = HERE

    def wait_until_told(places: list[Place]) -> None:
        until = time.monotonic() + 20
        while told != places and time.monotonic() < until:
            time.sleep(0.01)

    def train() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until_told([HERE])
        stops.place = Place("another", 8)
        wait_until_told([HERE, Place("another", 8)])
        return "saved"

    before = signal.getsignal(signal.SIGTERM)
    assert fit(None, train, stops) == "saved"
    assert told == [HERE, Place("another", 8)]
    assert signal.getsignal(signal.SIGTERM) is before


def ray_here() -> SimpleNamespace:
    """As much of Ray as names the node of this process; it can start no task."""
    context = SimpleNamespace(get_node_id=lambda: THIS)
    return SimpleNamespace(get_runtime_context=lambda: context)


def test_a_process_of_this_machine_is_told_without_a_task() -> None:
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    module._terminate(ray_here(), Place(THIS, sleeping.pid, socket.gethostname()))
    assert sleeping.wait(20) == -signal.SIGTERM


@pytest.mark.parametrize(("node", "host"), [(OTHER, socket.gethostname()), (THIS, "another")])
def test_a_process_of_another_machine_is_told_by_a_task(node: str, host: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(AttributeError, match="remote"):
        module._terminate(ray_here(), Place(node, os.getpid(), host))


def test_what_training_raises_is_raised_here() -> None:
    def train() -> None:
        raise ValueError("of the processes")

    with pytest.raises(ValueError, match="of the processes"):
        fit(None, train, Stops())


class _Failed(Exception):
    """As Ray raises it."""

    def __init__(self, *failures: Exception):
        self.worker_failures = dict(enumerate(failures))


def test_the_exit_code_says_what_the_processes_met() -> None:
    died = pytest.importorskip("ray.exceptions").ActorDiedError()
    assert _failed(_Failed(died), 0).exit_code == 75
    internal = pytest.importorskip("ray.train.v2._internal.exceptions")
    seen = internal.WorkerHealthCheckFailedError("a look at it failed", died)
    assert _failed(_Failed(seen), 0).exit_code == 75
    assert _failed(_Failed(PeerLost("gone"), died), 3).exit_code == 75
    assert _failed(_Failed(died, CopiesDiffer("device 1")), 0).exit_code == 77
    assert _failed(_Failed(ValueError("a bug")), 0).exit_code == 1


class _NotBegun(Exception):
    """As Ray raises it where no process came to train."""

    controller_failure = RuntimeError("ray::train()\nImportError: no module is named so")


def test_what_kept_the_processes_from_beginning_is_said() -> None:
    failed = _failed(_NotBegun(), 3)
    assert str(failed) == "the processes could not begin: ImportError: no module is named so"
    assert failed.exit_code == 1
