"""Of two real processes that save together, one fails alone: both end in a line, and neither waits
for the other for ever.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

DISK_FAILS = "Input/output error"
CASES = {"begin": 1, "close": 0}
"""Where a process fails, and which one does."""
PEER_SAYS = {
    "begin": "another process has not written its part of a checkpoint",
    "close": "process 0 cannot go on, so none can",
}


LATE = "late"
"""The case in which a process makes the folders of its checkpoint after its peer."""


@pytest.mark.parametrize("case", CASES)
def test_both_leave_when_one_cannot_save(case: str, tmp_path: Path) -> None:
    said = ended(case, tmp_path)
    failed = CASES[case]
    assert DISK_FAILS in said[failed]
    assert PEER_SAYS[case] in said[1 - failed]


def test_a_process_whose_folders_are_made_late_saves_too(tmp_path: Path) -> None:
    # each has a folder of its own, and must not take the word of the other that it is there
    assert all("saved ['1']" in said for said in ended(LATE, tmp_path))


def ended(case: str, folder: Path) -> list[str]:
    """Run a case in two processes, and return what each printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    pair = [
        subprocess.Popen(
            [sys.executable, __file__, case, str(folder / "checkpoints")],
            env=os.environ
            | {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": str(index),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        said = [process.communicate(timeout=120) for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert [process.returncode for process in pair] == [0, 0], said
    return [out for out, _ in said]


def rows_of_two() -> dict[str, Any]:
    """Let two processes meet, and make a state of which each has a half."""
    import jax
    import numpy as np

    from jaxpar.base.layout.mesh import MeshSpec, make_mesh
    from jaxpar.base.process.runtime import start

    spec = MeshSpec(data=2, platform="cpu", distributed=True)
    mesh = make_mesh(spec, start(spec))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    rows = np.arange(8.0, dtype=np.float32)
    return {"w": jax.make_array_from_callback((8,), sharding, lambda index: rows[index])}


def save_late(folder: Path) -> None:
    """Save a step into folders of each process, of which the first makes its own late."""
    import asyncio

    import jax
    from orbax.checkpoint._src.path import atomicity

    from jaxpar.base.config import CheckpointConfig
    from jaxpar.train.runs.stores import OwnDiskStore
    from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints

    state = rows_of_two()
    create = atomicity.AtomicRenameTemporaryPath.create

    async def late(path: Any) -> Any:
        await asyncio.sleep(2.0)
        return await create(path)

    if jax.process_index() == 0:
        atomicity.AtomicRenameTemporaryPath.create = late
    own = folder / str(jax.process_index())
    config = CheckpointConfig(keep=2, keep_best=False)
    checkpoints = TrainingCheckpoints(own, config, store=OwnDiskStore)
    checkpoints.save(1, state, {"place": 1})
    checkpoints.close()
    print(f"saved {[path.name for path in own.iterdir()]}", flush=True)


def save_with_a_failure(case: str, folder: Path) -> None:
    """Save a step, and then another, of which one process fails; print what was raised."""
    import jax
    from orbax.checkpoint._src.multihost import multihost

    from jaxpar.base.config import CheckpointConfig
    from jaxpar.base.errors import UserError
    from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints

    state = rows_of_two()
    multihost._DEFAULT_BARRIER_TIMEOUT = 5  # of 300 seconds
    checkpoints = TrainingCheckpoints(folder, CheckpointConfig(keep=2, keep_best=False))
    checkpoints.save(1, state, {"place": 1})
    checkpoints.wait()

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, DISK_FAILS)

    manager = checkpoints._manager
    if jax.process_index() == CASES[case]:
        setattr(manager, "save" if case == "begin" else "wait_until_finished", fail)
    try:
        if case == "begin":
            checkpoints.save(2, state, {"place": 2})
        else:
            checkpoints.close()
    except UserError as error:
        print(error, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == LATE:
        save_late(Path(sys.argv[2]))
    else:
        save_with_a_failure(sys.argv[1], Path(sys.argv[2]))
