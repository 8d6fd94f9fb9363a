"""Encoders' masks under both strategies of a split sequence, verified by the command on more devices
than there are heads, which needs a process with sixteen simulated devices.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_sixteen_devices_and_eight_heads_see_both_ways(strategy: str) -> None:
    sizes = {"data": 1, "fsdp": 1, "tensor": 16}
    mesh = [word for axis, size in sizes.items() for word in (f"--mesh.{axis}", str(size))]
    model = ["--model.masks", "full", "--model.heads", "8"]
    command = ["verify", "tiny", *mesh, *model, "--context.strategy", strategy]
    done = subprocess.run(
        [sys.executable, "-m", "jaxpar.cli.main", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tensor=16 does not divide 2 heads: attention is split over the sequence" in done.stdout
    assert "EQUAL: loss and 20 gradients on tensor=16 (16 x cpu)" in done.stdout
