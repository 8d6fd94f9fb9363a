"""Of two real processes that save together, one fails alone: both end in a line, and neither waits
for the other for ever.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DISK_FAILS = "Input/output error"
CASES = {"begin": 1, "close": 0}
"""Where a process fails, and which one does."""
PEER_SAYS = {
    "begin": "another process has not written its part of a checkpoint",
    "close": "process 0 cannot go on, so none can",
}


@pytest.mark.parametrize("case", CASES)
def test_both_leave_when_one_cannot_save(case: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    pair = [
        subprocess.Popen(
            [sys.executable, __file__, case, str(tmp_path / "checkpoints")],
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
    failed = CASES[case]
    assert [process.returncode for process in pair] == [0, 0], said
    assert DISK_FAILS in said[failed][0]
    assert PEER_SAYS[case] in said[1 - failed][0]


def save_with_a_failure(case: str, folder: Path) -> None:
    """Save a step, and then another, of which one process fails; print what was raised."""
    import jax
    import numpy as np
    from orbax.checkpoint._src.multihost import multihost

    from jaxpar.base.config import CheckpointConfig
    from jaxpar.base.errors import UserError
    from jaxpar.base.layout.mesh import MeshSpec, make_mesh
    from jaxpar.base.process.runtime import start
    from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints

    spec = MeshSpec(data=2, platform="cpu", distributed=True)
    mesh = make_mesh(spec, start(spec))
    multihost._DEFAULT_BARRIER_TIMEOUT = 5  # of 300 seconds
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    rows = np.arange(8.0, dtype=np.float32)
    state = {"w": jax.make_array_from_callback((8,), sharding, lambda index: rows[index])}
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
    save_with_a_failure(sys.argv[1], Path(sys.argv[2]))
