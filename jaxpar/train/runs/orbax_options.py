"""The options of Orbax: which processes write which files, which steps stay, and what of its log is
shown.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from glob import glob
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils.epath.gpath import PosixGPath
from orbax.checkpoint.options import MultiprocessingOptions

from jaxpar.base.process.multihost import numbers_from_first
from jaxpar.train.runs.folder.orbax_names import DATA, STATE
from jaxpar.train.runs.folder.val_losses import lowest
from jaxpar.train.runs.stores import CheckpointStore, Disk

SLOWEST_BYTES = 1e7
"""The bytes a second that a process writes at the least: 10 MB, a tenth of a slow hard disk."""
ORBAX_SECONDS = 1200.0
"""The time for which Orbax waits for a save by default."""


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def _is_not_of_unread_future(record: logging.LogRecord) -> bool:
    return "exception was never retrieved" not in record.getMessage()


# What Orbax logs is raised too, or is of no use to whoever trains; its lines have no form of ours.
# Of its writes that fail together it raises the first, and asyncio logs the others.
logging.getLogger("absl").addFilter(_is_not_of_orbax)
logging.getLogger("asyncio").addFilter(_is_not_of_unread_future)


class LiteralPath(PosixGPath):
    """A folder's path for Orbax. Orbax looks for files in it by patterns, of which the folder's own
    name is no part: with a plain path it would find nothing in `run[1]`, and a step would be saved
    without its arrays.
    """

    def glob(self, pattern: str) -> Iterator[LiteralPath]:
        """Yield the files below this folder that match a pattern."""
        for name in glob(pattern, root_dir=self):
            yield self / name


class Manager(ocp.CheckpointManager):
    """Orbax's manager of checkpoints, which does not ask JAX's preemption service, and which
    removes old steps only once the store keeps the new one.

    The service lets all processes stop after the same call, by a number that each gives it and that
    grows: `jaxpar.base.process.preemption.Stop` counts its calls. Orbax would give it the step, and
    a stop that was asked for around a save would wait for that number.
    """

    def __init__(self, store: CheckpointStore, options: ocp.CheckpointManagerOptions):
        """Open the checkpoints in the folder of a store."""
        self._store = store
        handlers = item_handlers(store.disk)
        super().__init__(LiteralPath(store.folder), options=options, item_handlers=handlers)

    def reached_preemption(self, step: int) -> bool:
        """Return False: the run itself saves before it stops."""
        return False

    def _finalize_checkpoint(self, step: int) -> None:
        """Keep a step in the store: Orbax calls this in its thread when the step has its name,
        before it removes others.
        """
        super()._finalize_checkpoint(step)
        if (self._store.folder / str(step)).is_dir():
            self._store.write(step)


class Retention:
    """The rule for Orbax on which steps a save leaves: the newest, the best, and those that were
    being read when the first process looked before it. Readers come and go, and all processes must
    keep the same.

    Attributes:
      removed: the steps that the save under way removes once it is written.
    """

    def __init__(self, store: CheckpointStore, newest: int, losses: Mapping[int, float]):
        """Choose how many of the newest steps are kept, and by which losses the best is.

        Args:
          store: knows which steps are being read.
          newest: the number of the newest steps that are kept.
          losses: the known losses, which grow while the run trains; the step with the lowest is
            kept. Empty = none is kept for its loss.
        """
        self._store = store
        self._newest = newest
        self._losses = losses
        self._read: list[int] = []
        self.removed: list[int] = []

    def look(self, steps: Sequence[int]) -> None:
        """Look which steps are being read; all processes must call this."""
        main = jax.process_index() == 0
        self._read = numbers_from_first(sorted(self._store.steps_in_use(steps)) if main else [])

    def old(self, steps: Sequence[int], read: Collection[int]) -> list[int]:
        """List the steps that are not kept.

        Args:
          steps: the steps that the run has, sorted.
          read: the steps that are being read.
        """
        kept = {*steps[-self._newest :], lowest(self._losses, steps), *read}
        return [step for step in steps if step not in kept]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Say for each checkpoint whether it is kept; Orbax asks this at each save."""
        steps = [info.step for info in checkpoints]
        self.removed = self.old(steps, self._read)
        return [step not in self.removed for step in steps]


def writing_processes(disk: Disk) -> MultiprocessingOptions:
    """Choose the processes that write: the first process writes what all have, or, where each has a
    folder of its own, each does.

    Processes are named one by one, so that they wait for each other by JAX's coordination service,
    which ends after a time: by default Orbax waits in a collective, without end where one of them
    has failed.
    """
    count = jax.process_count()
    if count == 1:
        return MultiprocessingOptions()
    return MultiprocessingOptions(
        primary_host=0 if disk == "shared" else None,
        active_processes=set(range(count)),
        barrier_sync_key_prefix=disk,
    )


def longest_save(state: Any) -> float:
    """Estimate how many seconds a process may take to write its part of a state: `ORBAX_SECONDS`,
    and besides the time of its bytes at `SLOWEST_BYTES`.

    Args:
      state: arrays, or ShapeDtypeStructs with shardings.
    """
    return ORBAX_SECONDS + held_at_most(state) / SLOWEST_BYTES


def held_at_most(state: Any) -> float:
    """Count the bytes of a state that this process holds, at the most: a part that several of its
    devices hold is counted for each, up to the whole array.

    Args:
      state: arrays, or ShapeDtypeStructs with shardings.
    """
    held = 0
    for leaf in jax.tree.leaves(state):
        size = leaf.dtype.itemsize
        devices = len(leaf.sharding.addressable_devices)
        part = math.prod(leaf.sharding.shard_shape(leaf.shape))
        held += size * min(math.prod(leaf.shape), part * devices)
    return held


def item_handlers(disk: Disk) -> dict[str, Any]:
    """Make the handlers that write the parts of a checkpoint. Where each process has a folder of
    its own, a part of an array is a file of its own too (by default the parts of a process are in
    few files, which the first one joins).
    """
    processes = writing_processes(disk)
    data = ocp.JsonCheckpointHandler(multiprocessing_options=processes)
    if jax.process_count() == 1:
        # By default the devices that hold an array divide it among them, as they may be of several
        # processes; the first save of a training would compile a program for each piece.
        handler = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    elif disk == "shared":
        state = ocp.PyTreeCheckpointHandler(multiprocessing_options=processes)
        return {STATE: state, DATA: data}
    else:
        # of a part that several hold, the first sends its copy; on a disk of its own each needs one
        handler = ocp.type_handlers.ArrayHandler(
            primary_host=None,
            replica_id=0 if disk == "copy" else None,
            use_replica_parallel=None if disk == "copy" else False,
        )
    handlers = [(jax.Array, handler), (np.ndarray, ocp.type_handlers.NumpyHandler())]
    state = ocp.PyTreeCheckpointHandler(
        use_ocdbt=jax.process_count() == 1,
        multiprocessing_options=processes,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(*handlers),
    )
    return {STATE: state, DATA: data}
