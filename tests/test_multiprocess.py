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
    "--train.eval-every", "3", "--train.eval-batches", "2", "--train.final-eval-batches", "2",
    "--checkpoint.every", "3", "--metrics.log-every", "1",
]  # fmt: skip


def launch(folder: Path, environment: dict[str, str], *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jaxpar.cli", "train", "tiny", "--run", str(folder), *FLAGS, *flags]
    # Files, not pipes: nobody reads them while the other process is waited for.
    return subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL, text=True)


def launch_two(folder: Path, *flags: str) -> list[int]:
    """The exit codes of both processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    pair = [
        launch(
            folder,
            {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(index)},
            "--mesh.distributed", "True", *flags,
        )
        for index in range(2)
    ]  # fmt: skip
    return [process.wait(timeout=240) for process in pair]


def test_two_processes_read_their_own_rows_and_reach_the_losses_of_one(tmp_path: Path) -> None:
    for stop_at in ("4", "0"):  # stopped after step 4 and resumed, both processes together
        assert launch_two(tmp_path / "two", "--train.stop-at", stop_at) == [0, 0]
    assert launch(tmp_path / "one", {}).wait(timeout=240) == 0

    def curve(folder: Path, key: str, steps: list[int]) -> list[float]:
        return [row[key] for row in read_metrics(folder) if key in row and row["step"] in steps]

    for key, steps in (("loss", [1, 2, 3, 4, 5, 6]), ("val_loss", [3, 6])):
        two, one = (curve(tmp_path / name, key, steps) for name in ("two", "one"))
        assert len(one) == len(steps)
        # Collectives of gloo and of one process sum in different orders.
        np.testing.assert_allclose(two, one, rtol=1e-5)


def test_a_folder_that_one_process_refuses_is_refused_by_both(tmp_path: Path) -> None:
    (tmp_path / "a_file").write_text("of the user's")
    assert launch_two(tmp_path) == [2, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["a_file"]
