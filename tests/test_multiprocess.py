"""Two real processes, four devices each, over gloo: the losses of one process with eight."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

from jaxpar.metrics import read_metrics

FLAGS = [
    "--model.layers", "1", "--model.embed", "32", "--model.mlp", "64", "--data.max-bytes", "200000",
    "--data.seq-len", "32", "--train.batch", "8", "--train.steps", "6", "--train.warmup-steps", "1",
    "--train.eval-every", "3", "--train.eval-batches", "2", "--checkpoint.every", "3", "--metrics.log-every", "1",
]  # fmt: skip


def launch(folder: Path, environment: dict[str, str], *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jaxpar.cli", "train", "tiny", "--run", str(folder), *FLAGS, *flags]
    # Files, not pipes: nobody reads them while the other process is waited for.
    return subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL, text=True)


def test_two_processes_read_their_own_rows_and_reach_the_losses_of_one(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    for stop_at in ("4", "0"):  # stopped after step 4 and resumed, both processes together
        pair = [
            launch(
                tmp_path / "two",
                {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(index)},
                "--mesh.distributed", "True", "--train.stop-at", stop_at,
            )
            for index in range(2)
        ]  # fmt: skip
        assert [process.wait(timeout=240) for process in pair] == [0, 0]
    assert launch(tmp_path / "one", {}).wait(timeout=240) == 0

    def curve(folder: Path, key: str, steps: list[int]) -> list[float]:
        return [row[key] for row in read_metrics(folder) if key in row and row["step"] in steps]

    for key, steps in (("loss", [1, 2, 3, 4, 5, 6]), ("val_loss", [3, 6])):
        two, one = (curve(tmp_path / name, key, steps) for name in ("two", "one"))
        assert len(one) == len(steps)
        # Collectives of gloo and of one process sum in different orders.
        np.testing.assert_allclose(two, one, rtol=1e-5)
