"""The comparison's arithmetic, and that both sides of `bench step` really train."""

from __future__ import annotations

import pytest

from jaxpar.base.config import load_config, override
from jaxpar.base.errors import UserError
from jaxpar.bench import alternate as bench


def test_the_ratio_is_of_neighbouring_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(x for pair in [(1.0, 2.0), (3.0, 4.0), (2.0, 8.0)] for x in pair)
    monkeypatch.setattr(bench, "mean_seconds", lambda function, calls: next(clock))
    found = bench.alternate(("a", "b"), lambda: None, lambda: None, rounds=3, calls=1)
    assert found.seconds == (2.0, 4.0)
    assert found.ratio == 0.5 and found.ratio_quartiles == (0.375, 0.625)
    assert "0.50 (0.38 to 0.62)" in bench.table([found])


def test_both_sides_train_on_the_same_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="install the parity extra")
    pytest.importorskip("transformers", reason="install the parity extra")
    losses: dict[str, list[float]] = {}

    def record(names, first, second, rounds, calls):
        for name, function in zip(names, (first, second), strict=True):
            losses[name] = [function() for _ in range(5)]
        return bench.Comparison(names, (1.0, 1.0), 1.0, (1.0, 1.0), rounds)

    monkeypatch.setattr(bench, "alternate", record)
    config = override(
        load_config("shakespeare_char_cpu"), {"train.learning_rate": 3e-3, "train.warmup_steps": 0, "model.layers": 1}
    )
    bench.bench_step(config)
    for series in losses.values():
        assert 4.0 < series[0] < 4.4 and series[-1] < series[0] - 0.1  # log(65) = 4.17


def test_another_precision_is_refused() -> None:
    config = override(load_config("shakespeare_char_cpu"), {"precision.compute": "bfloat16"})
    with pytest.raises(UserError, match="compares in float32"):
        bench.bench_step(config)
