"""The trace of the steps of `metrics.profile`, which JAX's profiler writes and XProf opens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from types import TracebackType

import jax
from jax.stages import Compiled

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.errors import UserError
from jaxpar.hlo.program.tasks import Loop, Node, Origin, Task
from jaxpar.hlo.read import read_program
from jaxpar.train.hooks.evaluations import evaluates_after
from jaxpar.train.hooks.hook import Hook, HookedRun
from jaxpar.train.opening import OpenRun
from jaxpar.train.state import TrainState


def steps_to_trace(run: OpenRun) -> range:
    """Return which steps of `metrics.profile` a run has to trace here: none where they are traced
    already, because the same command resumes a run. Only the first process traces: its devices do
    what all do.

    Raises:
      UserError: they are done, and were not traced.
    """
    asked = run.experiment.config.metrics.profiled
    done = run.after
    if jax.process_index() > 0 or done >= run.last:
        return range(0)
    if not asked or _lines_file(run.folder, asked).exists():
        return range(0)
    left = range(max(asked.start, done + 1), asked.stop)
    if not left:
        # steps that this call could trace: the first after a start is slower than the others
        first = min(done + 2, run.last)
        last = min(first + 4, run.last)
        evaluated = [step for step in range(first, last) if evaluates_after(run, step)]
        instead = f"{first}:{min([last, *evaluated])}"
        raise UserError(f"metrics.profile: the run goes on after step {done}, try {instead}")
    return left


class Profile(Hook):
    """Traces steps on this process's devices into `profile/` of the run, with the line of the model
    of every instruction. It is a context manager, which ends the trace and waits for these lines.

    A step that is run again, as the run went back, is not traced again.
    """

    def __init__(self, asked: range, left: range, program: Compiled, beside: Executor):
        """Take what is to be traced.

        Args:
          asked: the steps of `metrics.profile`.
          left: those of them that this call traces, at least one.
          program: the compiled step.
          beside: the thread that finds the lines.
        """
        self._asked = asked
        self._left = left
        self._program = program
        self._beside = beside
        self._run: HookedRun | None = None
        self._is_running = False
        self._lines: Future[None] | None = None

    def on_begin(self, run: HookedRun, state: TrainState[jax.Array]) -> None:
        """Take the run; where it goes back, the trace ends here."""
        if self._run is not None:
            self._left = range(0)
            self._stop()
        self._run = run

    def before_step(self, step: int) -> None:
        """Begin the trace before its first step."""
        if self._left and step == self._left[0]:
            assert self._run is not None
            with self._run.apart("other"):
                self._start(self._run.folder)

    def on_started(self, step: int) -> None:
        """End the trace once its last step has run, and have the other thread find the lines."""
        if self._left and step == self._left[-1]:
            assert self._run is not None
            with self._run.apart("other"):
                self._stop()
            self._lines = self._beside.submit(self._write_lines, self._run, self._left)

    def _start(self, run: Path) -> None:
        """Begin the trace, without Python's own calls, which would slow the steps."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(_folder_in(run), profiler_options=options)
        self._is_running = True

    def _stop(self) -> None:
        """End the trace and write it, if one is running."""
        if self._is_running:
            self._is_running = False
            jax.profiler.stop_trace()

    def __enter__(self) -> Profile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        if error is None and self._lines is not None and self._run is not None:
            self._lines.result()
            folder = self._run.folder
            self._run.say(f"wrote {_folder_in(folder)}: `jaxpar watch {folder} --profile` shows it")

    def _write_lines(self, run: HookedRun, steps: range) -> None:
        """Write beside the trace where in the model each instruction of the step is."""
        program = read_program(self._program.as_text() or "")
        folder = _folder_in(run.folder)
        trace = max(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
        devices = run.experiment.devices
        found = {
            "steps": [steps[0], steps[-1]],
            "trace": str(trace.relative_to(folder)),
            "module": program.name,
            "device_kind": devices[0].device_kind,
            "devices": len(devices),
            "traced": jax.local_device_count(),
            "lines": {
                name: [origin.scope, origin.source, origin.phase]
                for name, origin in _origins(program.nodes)
            },
        }
        write_whole(_lines_file(run.folder, self._asked), json.dumps(found) + "\n")


def _folder_in(run: Path) -> Path:
    return run / "profile"


def _lines_file(run: Path, asked: range) -> Path:
    """What is written once the steps are traced."""
    return _folder_in(run) / f"steps_{asked.start}_{asked.stop - 1}.json"


def _origins(nodes: tuple[Node, ...]) -> Iterator[tuple[str, Origin]]:
    """Yield the name and place of every instruction that takes time; a wait is where what it waits
    for was started.
    """
    for node in nodes:
        if isinstance(node, Loop):
            yield from _origins(node.body)
        elif isinstance(node, Task):
            yield node.name, node.origin
        elif isinstance(task := nodes[node.task], Task):
            yield node.name, task.origin
