"""The sender of changes in the copy of a run to its bucket: each process sends its own files of a
step, and the first one the rest, with the last object of a step when all have sent theirs.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from jaxpar.base.errors import UserError, reading
from jaxpar.base.process.multihost import numbers_from_first
from jaxpar.base.storage import Bucket, Found, say
from jaxpar.train.runs.bucket.layout import (
    PARTS,
    UPLOADED,
    Sizes,
    State,
    names_below,
    read_sizes,
    size_and_hash,
    states_below,
    step_of,
    steps_below,
    whole_steps,
    write_sizes,
)
from jaxpar.train.runs.folder.manifest import LOSS
from jaxpar.train.runs.folder.orbax_names import CHUNK, METRICS
from jaxpar.train.runs.folder.steps import CHECKPOINTS

_EVERY_SECONDS = 30.0
_PEERS_SECONDS = 1800.0
"""The time for which the first process waits for the files of another."""


class Sender:
    """A sender of changes in the copy of a run, in a thread of its own, one thing after another."""

    def __init__(self, folder: Path, bucket: Bucket, steps: set[int], fetched: Mapping[str, State]):
        """Start the thread; all processes must call this.

        Args:
          folder: the folder of the copy.
          bucket: the run folder in the bucket.
          steps: the steps that are whole in the bucket.
          fetched: the small files of the copy, as they are in the bucket.
        """
        self._folder = folder
        self._bucket = bucket
        self._steps = set(steps)
        self._main = jax.process_index() == 0
        self._peers = jax.process_count() - 1
        self._index = jax.process_index()
        self._sent = {name: state for name, state in fetched.items() if self._is_small(name)}
        """The small files as they were sent."""
        self._call = bytes(numbers_from_first(uuid.uuid4().bytes)).hex()
        """A text that tells this call of a command from others, the same on all processes."""
        self._thread = ThreadPoolExecutor(1)
        self._step: Future[None] | None = None
        self._again: int | None = None
        """The last step, if it may be sent once more; None = it may not."""
        self._stopped = threading.Event()
        self._beat: threading.Thread | None = None
        self.seconds = 0.0
        """The seconds that it took to send the last step, once it was written."""
        if self._main:
            self._remove_unfinished()
            self._beat = threading.Thread(target=self._send_now_and_then, daemon=True)
            self._beat.start()
        if self._peers:
            multihost_utils.sync_global_devices("jaxpar_bucket_run")

    def send_step(self, step: int) -> None:
        """Send a step that is on this machine as a whole; `wait` says how that ended. Where the
        sender was stopped meanwhile, the run may be another training's, and nothing is sent.
        """
        if self.stopped:
            return
        self.wait()
        self._again = step
        self._step = self._thread.submit(self._send_step, step)

    def wait(self) -> None:
        """Wait for the last step, and raise the error that kept it from being sent. It may have
        failed long ago, so it is sent once more before that.
        """
        if self._step is None:
            return
        try:
            self._step.result()
        except UserError as error:
            if self._again is None or self.stopped:
                raise
            step, self._again = self._again, None
            say(f"warning: step {step} was not sent ({error}): it is sent once more")
            self._step = self._thread.submit(self._send_step, step)
            self._step.result()

    def stop(self) -> None:
        """Stop the sending of steps and changes by the thread itself. `send` still sends."""
        self._stopped.set()

    @property
    def has_peers(self) -> bool:
        """Whether other processes send files of the same steps."""
        return self._peers > 0

    @property
    def stopped(self) -> bool:
        """Whether nothing is sent any more, unless `send` is called."""
        return self._stopped.is_set()

    def close(self) -> None:
        """Stop, once the thread has sent what it is sending or has failed."""
        self.stop()
        self._thread.shutdown()
        if self._beat is not None:
            self._beat.join()

    def send(self) -> None:
        """Send what has changed, and remove from the bucket what was removed here.

        Raises:
          UserError: the bucket cannot be written, or the last step could not be sent.
        """
        self.wait()
        if self._main:
            self._thread.submit(self._send_small).result()
            self._thread.submit(self._remove_retired).result()

    def _send_now_and_then(self) -> None:
        while not self._stopped.wait(_EVERY_SECONDS):
            # what fails is said by `Bucket`, and raised by the next step
            with suppress(UserError, RuntimeError):
                self._thread.submit(self._send_small).result()

    def _send_step(self, step: int) -> None:
        began = time.monotonic()
        self._send_files(step)
        self.seconds = time.monotonic() - began

    def _send_files(self, step: int) -> None:
        folder = self._folder / CHECKPOINTS / str(step)
        prefix = f"{CHECKPOINTS}/{step}/"
        names = [name for name in names_below(folder) if self._main or CHUNK.fullmatch(name)]
        names = [name for name in names if not name.startswith(f"{METRICS}/")]
        rows = {name: size_and_hash(folder / name) for name in names}
        self._bucket.send_all((folder / name, prefix + name) for name in names)
        if not self._main:
            self._bucket.write(self._part(step, self._index), write_sizes(rows))
            return
        parts = [self._part(step, peer) for peer in range(1, self._peers + 1)]
        for part in parts:
            rows |= self._await_part(part)
        self._send_small()
        self._bucket.write(prefix + UPLOADED, write_sizes(rows))
        self._steps.add(step)
        self._bucket.remove(parts)
        self._remove_retired()

    def _part(self, step: int, process: int) -> str:
        """Return the name of the object that lists a process's files of a step, in this call of the
        command.
        """
        return f"{CHECKPOINTS}/{step}/{PARTS}{self._call}.{process}.json"

    def _await_part(self, part: str) -> Sizes:
        until = time.monotonic() + _PEERS_SECONDS
        while self._bucket.find(part) is None:
            if self.stopped:
                raise UserError(f"{self._bucket.url}/{part} is not waited for, as the run ends")
            if time.monotonic() > until:
                raise UserError(
                    f"another process has not sent its files of {self._bucket.url}/{part} within "
                    f"{_PEERS_SECONDS:.0f} s: look whether it runs"
                )
            time.sleep(1.0)
        return read_sizes(self._bucket.read(part), part)

    def _send_small(self) -> None:
        """Send the files beside the checkpoints, and the losses in these, where they have
        changed.
        """
        now = {name: state for name, state in states_below(self._folder) if self._is_small(name)}
        changed = [name for name, state in now.items() if self._sent.get(name) != state]
        with reading(self._folder):
            self._bucket.send_all((self._folder / name, name) for name in changed)
        gone = self._sent.keys() - now.keys()
        # those of a step go with it, after its last object
        self._bucket.remove(name for name in gone if not name.startswith(CHECKPOINTS + "/"))
        self._sent = now

    def _is_small(self, name: str) -> bool:
        if not name.startswith(CHECKPOINTS + "/"):
            return True
        _, step, *rest = name.split("/")
        later = rest[:1] in ([METRICS], [LOSS])
        return step.isdecimal() and int(step) in self._steps and later

    def _remove_retired(self) -> None:
        """Remove the steps that are gone here from the bucket, each with its last object first.
        They may have been removed for a step that is here and not yet in the bucket: then they stay
        until it is there.
        """
        if steps_below(self._folder) - self._steps:
            return
        for step in sorted(self._steps):
            if not (self._folder / CHECKPOINTS / str(step)).exists():
                self._steps.remove(step)
                self._remove_step(step, self._bucket.files(f"{CHECKPOINTS}/{step}"))

    def _remove_unfinished(self) -> None:
        found = self._bucket.files(CHECKPOINTS)
        whole = whole_steps(found)
        steps = {step_of(name) for name in found} - {None} - whole.keys()
        for step in steps:
            self._remove_step(step, found)

    def _remove_step(self, step: int | None, found: Mapping[str, Found]) -> None:
        prefix = f"{CHECKPOINTS}/{step}/"
        names = [name for name in found if name.startswith(prefix)]
        self._bucket.remove(sorted(names, key=lambda name: name != prefix + UPLOADED))
