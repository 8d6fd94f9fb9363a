"""docs/trainer.py, which a reader opens first: it trains, and goes on to the bit where it stopped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAINER = Path(__file__).parents[2] / "docs" / "trainer.py"


def train(folder: Path, steps: int) -> list[dict[str, float]]:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, str(TRAINER), str(folder), str(steps)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=environment,
        cwd=folder.parent,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_it_learns_and_goes_on_to_the_bit_where_it_stopped(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 30)
    assert [row["step"] for row in whole] == [10, 20, 30]
    assert whole[-1]["loss"] < whole[0]["loss"]
    stopped = train(tmp_path / "stopped", 20)
    assert stopped + train(tmp_path / "stopped", 30) == whole


def test_it_is_short() -> None:
    assert len(TRAINER.read_text().splitlines()) <= 150
