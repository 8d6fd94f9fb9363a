"""Candidates in turns: the ratio is of neighbouring rounds, and the table has every column."""

from __future__ import annotations

import pytest

from jaxpar.bench import measure as bench


def test_the_ratio_is_of_neighbouring_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    warm = [9.0, 9.0]
    clock = iter([*warm, 2.0, 1.0, 4.0, 3.0, 8.0, 2.0])
    monkeypatch.setattr(bench, "mean_seconds", lambda function, calls: next(clock))
    found = bench.alternate(
        {"a": lambda: None, "b": lambda: None},
        rounds=3,
        calls=1,
    )
    assert found["a"] == (4.0, 1.0, (1.0, 1.0))
    assert found["b"] == (2.0, 0.5, (0.375, 0.625))


def test_short_calls_are_timed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(
        bench, "mean_seconds", lambda function, calls: counts.append(calls) or 0.004
    )
    bench.alternate({"a": lambda: None}, rounds=2)
    assert counts == [1, 1, 5, 5]


def test_the_table_has_every_column_that_a_row_has() -> None:
    rows: list[dict[str, object]] = [
        {"by": "a", "ms": 0.25, "tokens": 123456},
        {"by": "b", "ms": 123456.7, "MFU, %": None},
    ]
    assert bench.table(rows).splitlines() == [
        "| by | ms | tokens | MFU, % |",
        "| --- | --- | --- | --- |",
        "| a | 0.25 | 123,456 |  |",
        "| b | 123,457 |  |  |",
    ]
    assert bench.table([]) == ""
