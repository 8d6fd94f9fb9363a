"""A trace of a few steps by JAX's profiler, which XProf opens, and the line of the model of every instruction in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.stages import Compiled

from jaxpar.base.errors import UserError
from jaxpar.base.runtime import write_whole
from jaxpar.hlo.read import read_program
from jaxpar.hlo.tasks import Loop, Node, Place, Task


class Profile:
    """Traces `steps` on this process's devices into `profile/` of a run that goes on after the step `done`.

    Steps that are traced already are not traced again: the same command resumes a run.

    Raises:
      UserError: the steps are done, and were not traced.
    """

    def __init__(self, steps: range, folder: Path, done: int):
        self._folder, self._running = folder / "profile", False
        self.file = self._folder / f"steps_{steps.start}_{steps.stop - 1}.json"
        left = range(max(steps.start, done + 1), steps.stop)
        if steps and not left and not self.file.exists():
            raise UserError(f"metrics.profile: the run goes on after step {done}, try {done + 2}:{done + 6}")
        self.first, self.last = (left[0], left[-1]) if left and not self.file.exists() else (0, 0)

    def start(self) -> None:
        """Begin the trace, without Python's own calls, which would slow the steps."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(self._folder, profiler_options=options)
        self._running = True

    def close(self) -> None:
        """End the trace and write it, if one is running."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()

    def write_lines(self, compiled: Compiled, devices: list[jax.Device]) -> None:
        """Write beside the trace where in the model each instruction of the step is."""
        program = read_program(compiled.as_text() or "")
        trace = max(self._folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
        found = {
            "steps": [self.first, self.last], "trace": str(trace.relative_to(self._folder)), "module": program.name,
            "device_kind": devices[0].device_kind, "devices": len(devices), "traced": jax.local_device_count(),
            "lines": {name: [place.scope, place.source, place.phase] for name, place in _places(program.nodes)},
        }  # fmt: skip
        write_whole(self.file, json.dumps(found) + "\n")


def _places(nodes: tuple[Node, ...]) -> Iterator[tuple[str, Place]]:
    """Yield the name and place of every instruction that takes time; a wait is where what it waits for was started."""
    for node in nodes:
        if isinstance(node, Loop):
            yield from _places(node.body)
        elif isinstance(node, Task):
            yield node.name, node.place
        elif isinstance(task := nodes[node.task], Task):
            yield node.name, task.place
