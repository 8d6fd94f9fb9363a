"""`jaxpar bench generate`: both sides generate, and their times become rates and ratios."""

from __future__ import annotations

import contextlib

import jax
import pytest

from jaxpar.base.config import load_config, override
from jaxpar.base.errors import UserError
from jaxpar.bench import generate as bench
from jaxpar.bench.generate import Parts
from jaxpar.cli.main import main
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment


def small() -> Experiment:
    config = override(load_config("shakespeare_char_cpu"), {"model.layers": 1})
    return make_experiment(config, jax.devices()[:1])


def test_a_row_for_each_side_and_the_ratios_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {"by": "torch", "prefill": 0.4, "decode": 1.0}
    monkeypatch.setattr(
        bench, "torch_process", lambda *_: contextlib.nullcontext(lambda new: theirs)
    )
    monkeypatch.setattr(bench, "generation_seconds", lambda *_: lambda new: Parts(0.1, 0.5))
    said: list[str] = []
    ours, other = bench.bench_generate(small(), 2, 8, 11, 3, said.append)
    assert ours == {
        "by": "jaxpar",
        "prefill tokens/s": pytest.approx(160.0),
        "decode tokens/s": pytest.approx(40.0),
        "ms a token": pytest.approx(50.0),
    }
    assert (other["by"], other["prefill tokens/s"]) == ("torch", pytest.approx(40.0))
    assert other["decode tokens/s"] == pytest.approx(20.0)
    assert said == [
        "prefill: jaxpar is 4.00 times as fast (quartiles 4.00 to 4.00, 3 rounds)",
        "decode: jaxpar is 2.00 times as fast (quartiles 2.00 to 2.00, 3 rounds)",
    ]


def test_without_pytorch_ours_is_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: int) -> bench.BenchRow:
        raise ChildProcessError("no torch")

    monkeypatch.setattr(bench, "torch_process", lambda *_: contextlib.nullcontext(absent))
    said: list[str] = []
    (row,) = bench.bench_generate(small(), 2, 8, 4, 2, said.append)
    assert said == ["not beside PyTorch: no torch"]
    assert row["by"] == "jaxpar"
    assert float(row["prefill tokens/s"] or 0) > 0 and float(row["decode tokens/s"] or 0) > 0


def test_what_cannot_be_generated_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"are more than model\.max_seq_len=64: try fewer"):
        bench.bench_generate(small(), 1, 60, 8, 1)
    with pytest.raises(UserError, match="--new-tokens 1: "):
        bench.bench_generate(small(), 1, 8, 1, 1)
    assert main(["bench", "generate", "tiny", "--new-tokens", "1"]) == 2
    assert "new_tokens=1 is below 2" in capsys.readouterr().err


@pytest.mark.slow
def test_both_sides_generate() -> None:
    pytest.importorskip("torch", reason="install the parity extra")
    pytest.importorskip("transformers", reason="install the parity extra")
    rows = bench.bench_generate(small(), 2, 8, 6, 2)
    assert [str(row["by"]).split(",")[0] for row in rows] == ["jaxpar", "transformers"]
    assert all(float(row["prefill tokens/s"] or 0) > 0 for row in rows)
