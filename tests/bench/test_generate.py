"""`jaxpar bench generate`: both sides generate, and their times become rates and ratios."""

from __future__ import annotations

import contextlib

import jax
import pytest

from jaxpar.base.config import load_config, override
from jaxpar.bench import generate as bench
from jaxpar.bench.alternate import Row
from jaxpar.train.plans import make_plan

CONFIG = override(load_config("shakespeare_char_cpu"), {"model.layers": 1})


def test_a_row_for_each_side_and_the_ratios_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs: Row = {"by": "torch", "prefill": 0.4, "decode": 1.0}
    monkeypatch.setattr(bench, "torch_process", lambda asked: contextlib.nullcontext(lambda new: theirs))
    monkeypatch.setattr(bench, "jaxpar_seconds", lambda *_: lambda new: {"prefill": 0.1, "decode": 0.5})
    said: list[str] = []
    rows = bench.bench_generate(CONFIG, make_plan(CONFIG, jax.devices()[:1]), 2, 8, 11, 3, said.append)
    assert rows[0] == {"by": "jaxpar", "prefill tokens/s": 160.0, "decode tokens/s": 40.0, "ms a step": 50.0}
    assert rows[1]["prefill tokens/s"] == 40.0 and rows[1]["decode tokens/s"] == 20.0
    assert said[0] == "prefill: jaxpar is 4.00 times as fast (quartiles 4.00 to 4.00, 3 rounds)"
    assert said[1].startswith("decode: jaxpar is 2.00 times")


@pytest.mark.slow
def test_both_sides_generate() -> None:
    pytest.importorskip("torch", reason="install the parity extra")
    pytest.importorskip("transformers", reason="install the parity extra")
    rows = bench.bench_generate(CONFIG, make_plan(CONFIG, jax.devices()[:1]), 2, 8, 6, 2)
    assert [str(row["by"]).split()[0] for row in rows] == ["jaxpar", "transformers,"]
    assert all(float(row["decode tokens/s"] or 0) > 0 for row in rows)
