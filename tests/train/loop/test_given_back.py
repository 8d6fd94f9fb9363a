"""Whatever fails while a run is opened, trained for a step and closed, all that was opened is given
back: no lock, no thread and no open file is left, and nothing is written once the lock is.

The points are not listed: a run that succeeds is watched, and then each function of the library
that it has called, outside of the step itself, fails once, at its first call and at its last.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import jaxpar
from jaxpar.base.config import Config, ModelConfig, override
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.base.storage import Bucket
from jaxpar.train import opening
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment
from jaxpar.train.goodput import account
from jaxpar.train.hooks import Hook, evaluations
from jaxpar.train.loop import open_run, training
from jaxpar.train.loop.steps import Steps
from jaxpar.train.runs.bucket import sender
from jaxpar.train.runs.locks import run_lock
from jaxpar.train.runs.locks.run_lock import LOCK, BucketLock, RunLock
from jaxpar.train.sinks import Opened, Sink, register_sink

pytestmark = pytest.mark.usefixtures("keeps_programs")

ROOMS = tuple(
    str(Path(jaxpar.__path__[0]) / room)
    for room in (
        "train/loop",
        "train/opening",
        "train/hooks",
        "train/goodput",
        "train/metrics",
        "train/run_data",
        "train/sinks",
        "train/runs",
        "train/guard",
        "base/process",
        "base/storage",
        "base/atomic_write",
    )
)
"""What opens a run and closes it; what is computed in between may fail like any of these."""
GIVES_BACK = {"__exit__", "_close_file", "abandon", "close", "end", "release", "rest", "stop"}
"""Functions that give something back fail in what they call, not at their first line: what is not
even tried nobody can have done.
"""
NOT_KNOWN = {"_is_opened"}
"""What fails there fails before the library knows how to end what a program's sink has begun."""


LEFT_BEHIND = {
    "RunCopy.refresh",
    "Losses.read",
    "Run.train",
    "MetricsLog.__init__",
    "save_watchdog",
    "TrainingCheckpoints.wait",
    "Account._write",
}
"""Where a failure has left something behind: a lock, a thread, a sink, a sender that wrote on."""
CHOSEN = [
    "known",
    pytest.param("each eighth", marks=pytest.mark.slow),
    pytest.param("each", marks=pytest.mark.long),
]


class Planted(Exception):
    """What the test makes a function raise."""


class Point(NamedTuple):
    """A call of a function of the library, by the thread that trains."""

    code: CodeType
    call: int
    """Which of its calls, from 1."""

    @property
    def name(self) -> str:
        """For a message."""
        return f"{Path(self.code.co_filename).stem}.{self.code.co_qualname} call {self.call}"


@dataclass
class Watch:
    """Counts the calls of the library's functions, and fails at one of them.

    Attributes:
      point: where it fails; None = nowhere.
      calls: how often each function was called.
      points: the first and the last call of each in the opening and in the closing.
      failed_in: the functions inside of which it has failed.
    """

    point: Point | None = None
    calls: dict[CodeType, int] = field(default_factory=dict)
    points: dict[tuple[CodeType, bool, bool], Point] = field(default_factory=dict)
    failed_in: set[CodeType] = field(default_factory=set)
    _takes_steps: bool = False
    _closes: bool = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code is Steps._steps.__code__:
            self._takes_steps = event == "call"
            self._closes = event == "return"
        if self._takes_steps or event != "call" or not code.co_filename.startswith(ROOMS):
            return
        if code.co_name in GIVES_BACK | NOT_KNOWN:
            return
        if frame.f_lasti > 0 and code.co_flags & 0x20:  # a generator that goes on
            return
        count = self.calls[code] = self.calls.get(code, 0) + 1
        point = Point(code, count)
        self.points.setdefault((code, self._closes, True), point)
        self.points[code, self._closes, False] = point
        if self.point == (code, count):
            sys.setprofile(None)
            above: FrameType | None = frame
            while above is not None:
                self.failed_in.add(above.f_code)
                above = above.f_back
            raise Planted(self.point.name)


class Place(NamedTuple):
    """Where a run is kept.

    Attributes:
      folder: the run folder, or its URL.
      experiment: what is trained there.
      locks: returns the locks that there are.
      written: returns what there is beside the lock, and when it was written, of what is given
        back with the lock of a folder.
    """

    folder: str
    experiment: Experiment
    locks: Callable[[], list[str]]
    written: Callable[[Path], dict[str, float]]


def _files(folder: Path) -> dict[str, float]:
    found = {}
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file() and path.name != LOCK:
                found[str(path)] = path.stat().st_mtime
    return found


def _objects(bucket: Bucket) -> dict[str, float]:
    store = bucket._fs.store
    root = bucket._root.rstrip("/") + "/"
    return {
        name: one.modified.timestamp()
        for name, one in list(store.items())
        if name.startswith(root) and not name.endswith(LOCK)
    }


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("in the beginning was the word, and the word was with code. " * 60)
    sizes: dict[str, Any] = {"vocab_size": 256, "embed": 16, "heads": 2, "mlp": 32, "layers": 1}
    config = override(
        Config(
            model=ModelConfig(family="gpt2", max_seq_len=32, **sizes),
            mesh=MeshSpec(data=2),
        ),
        {
            "data.source": "text",
            "data.path": str(text),
            "data.seq_len": 32,
            "train.steps": 3,
            "train.batch": 4,
            "train.warmup_steps": 1,
            "train.eval_batches": 1,
            "checkpoint.every": 2,
            "checkpoint.keep": 1,
            "metrics.log_every": 1,
            "metrics.sinks": ("given_back",),
            "mesh.platform": "cpu",
        },
    )
    return make_experiment(config)


OPEN_SINKS: list[Path] = []


@register_sink("given_back")
def _sink(config: Config, folder: Path, first_step: int, run_id: str | None) -> Opened:
    OPEN_SINKS.append(folder)
    return (lambda step, row: None, lambda failed: OPEN_SINKS.remove(folder), None)


def place_of(kind: str, experiment: Experiment, folder: Path) -> Place:
    """A run of a kind that is not there yet."""
    if kind == "bucket":
        bucket = Bucket(f"memory://{uuid.uuid4().hex}/run")

        def lock_object() -> list[str]:
            return [] if bucket.find(LOCK) is None else [f"{bucket.url}/{LOCK}"]

        return Place(bucket.url, experiment, lock_object, lambda _: _objects(bucket))
    own = folder / "run"
    folders = [own]
    if kind == "two tiers":
        local = folder / "local"
        folders.append(local / "0")
        values = {"checkpoint.local": str(local), "checkpoint.local_every": 1}
        experiment = replace(experiment, config=override(experiment.config, values))

    def lock_files() -> list[str]:
        return [str(one / LOCK) for one in folders if (one / LOCK).exists()]

    return Place(str(own), experiment, lock_files, _files)


def train(place: Place, watch: Watch) -> BaseException | None:
    """Open a run, train it and close it; return the error that left."""
    try:
        with watch.watching(), open_run(place.experiment, place.folder) as run:
            run.train([Hook()])
    except Exception as error:
        return error
    return None


def open_files(folder: Path) -> list[str]:
    """The files below a folder that this process has open, where the system says so."""
    found = []
    for link in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            found.append(os.readlink(link))
    return [name for name in found if name.startswith(str(folder))]


def settled(left: Callable[[], Sequence[object]], seconds: float = 5.0) -> Sequence[object]:
    """What is left of something once it had some time to end."""
    until = time.monotonic() + seconds
    while left() and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    return left()


def fail_at(kind: str, experiment: Experiment, folder: Path, point: Point | None) -> list[str]:
    """Let a run fail at a point; return what is wrong afterwards."""
    before = set(threading.enumerate())
    place = place_of(kind, experiment, folder)
    watch = Watch(point)
    given_back = list[tuple[Path, dict[str, float]]]()
    with watch_removals(lambda lock: given_back.append((lock, place.written(lock)))):
        train(place, watch)
    wrong = list[str]()
    if RunLock.close.__code__ not in watch.failed_in:
        wrong += [f"the lock {lock} is left" for lock in place.locks()]
    threads = settled(lambda: [one for one in threading.enumerate() if one not in before])
    wrong += [f"the thread {one} is left" for one in threads]
    wrong += [f"the file {name} is open" for name in settled(lambda: open_files(folder))]
    if Sink.close.__code__ not in watch.failed_in:
        wrong += [f"the sink of {name} is open" for name in OPEN_SINKS]
    OPEN_SINKS.clear()
    time.sleep(0.03)  # what writes of itself does so every few milliseconds
    for lock, written in given_back:
        later = place.written(lock).items() - written.items()
        wrong += [f"{name} was written without the lock" for name, _ in sorted(later)]
    return wrong


@contextmanager
def watch_removals(removed: Callable[[Path], None]) -> Iterator[None]:
    """Say which folders' locks are removed, once they are."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (RunLock, BucketLock):

            def remove(lock: RunLock, own: Callable[..., None] = kind._remove) -> None:
                own(lock)
                removed(lock._folder)

            patch.setattr(kind, "_remove", remove)
        patch.setattr(run_lock, "BEAT", 0.005)
        patch.setattr(account, "WRITE_EVERY", 0.005)
        patch.setattr(sender, "_EVERY_SECONDS", 0.005)
        yield


@pytest.fixture(scope="module", autouse=True)
def _compiled_once(experiment: Experiment) -> Iterator[None]:
    """The programs of a run, which are the same for all of these and compiled once."""
    step = training._compile(experiment)
    evaluation = evaluations.compile_eval_step(experiment)
    state = opening.init_state(experiment)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "_compile", lambda _: step)
        patch.setattr(evaluations, "compile_eval_step", lambda _: evaluation)
        patch.setattr(opening, "init_state", lambda *_: jax.tree.map(jnp.copy, state))
        yield


def find_points(kind: str, experiment: Experiment, folder: Path) -> list[Point]:
    """The points of a run of a kind, in the order in which they are first met."""
    watch = Watch()
    error = train(place_of(kind, experiment, folder), watch)
    assert error is None
    return sorted(set(watch.points.values()), key=[*watch.points.values()].index)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("folder", marks=pytest.mark.slow),
        pytest.param("bucket", marks=pytest.mark.slow),
        "two tiers",
    ],
)
def test_all_is_given_back_whatever_fails(
    kind: str, chosen: str, experiment: Experiment, tmp_path: Path
) -> None:
    points = find_points(kind, experiment, tmp_path / "seen")
    if chosen == "known":
        names = {point.code: point for point in points if point.code.co_qualname in LEFT_BEHIND}
        points = list(names.values())
    elif chosen == "each eighth":
        points = points[::8]
    assert len(points) > 4
    found = list[str]()
    for number, point in enumerate([None, *points]):
        folder = tmp_path / str(number)
        folder.mkdir()
        wrong = fail_at(kind, experiment, folder, point)
        found += [f"{point.name if point else 'no failure'}: {line}" for line in wrong]
    assert not found
