"""`jaxpar bench attention`: what it counts, what it times, what it says."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar.bench import attention as bench
from jaxpar.cli.main import main
from jaxpar.kernels.masks import BigBird, Causal, Full, Tiles, dense


def test_places_are_those_of_tiles_that_are_not_empty() -> None:
    assert bench.visible_places(Full(), 3, 1024) == 3 * 1024 * 1024
    assert bench.visible_places(Causal(), 2, 1024) == 2 * 128 * 128 * 36
    assert bench.visible_places(Full(), 1, 200) == 200 * 200
    mask = BigBird(2048, 3, 1, 2, 0, 128)
    assert bench.visible_places(mask, 1, 2048) == np.sum(dense(mask, Tiles(2048, 2048, 1, 1)))


@pytest.mark.slow
def test_the_command_in_a_small_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every mask, by all that serves here; what does not is said."""
    words = ["bench", "attention", "--seq-lens", "64", "128", "--head-dims", "16", "--tokens", "128", "--rounds", "1"]
    out = tmp_path / "found.json"
    assert main([*words, "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "causal, 64 x 16: not splash: on cpu" in " ".join(said.split())
    assert "FLOPs: 4 H h a place" in said
    assert "| mask | sequence | head_dim | implementation | forward, ms | forward, TFLOP/s |" in said
    found = json.loads(out.read_text())
    served = {"chunked", "reference", "jax, dense mask"}
    assert {row["implementation"] for row in found["rows"]} == served
    assert len(found["rows"]) == 2 * len(bench.MASKS) * len(served)
    for row in found["rows"]:
        flops = 1e9 * row["forward, ms"] * row["forward, TFLOP/s"]
        assert flops > 0 and 1e9 * row["both, ms"] * row["both, TFLOP/s"] == pytest.approx(3.5 * flops)
    assert found["platform"] == jax.default_backend()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--masks casual", "bench attention knows no 'casual' (did you mean 'causal'?)"),
        ("--implementations flash", "bench attention knows no 'flash'"),
        ("--heads 3", "3 heads, no multiple of 2 kv heads: try --heads 2"),
    ],
)
def test_bad_input_is_refused_in_a_line(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", *words.split()]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
