"""What is known of a machine, and the file that keeps it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxpar.rehearse.here.figures import (
    CpuFigures,
    CpuRates,
    figures_file,
    keep_figures,
    rate_at,
    read_figures,
)

RATES = CpuRates(
    matmul_float32=((1e3, 1e9), (1e7, 9e9)),
    narrow_float32=((1e3, 1e8),),
    matmul_bfloat16=((1e3, 2e9),),
    narrow_bfloat16=((1e3, 1e8),),
    memory=((1e3, 4e9), (1e6, 2e9)),
    strided=((1e3, 5e8),),
    simple=8e9,
    costly=1e9,
    tasks=1e6,
)
FIGURES = CpuFigures(
    cores=4, alone=RATES, together=replace(RATES, costly=2e9), call=1e-5, argument=1e-6
)


def test_rates_between_sizes():
    rates = RATES.matmul_float32
    assert rate_at(rates, 1.0) == 1e9, "below the smallest it is the smallest's"
    assert rate_at(rates, 1e12) == 9e9
    assert rate_at(rates, 1e5) == pytest.approx(5e9), "halfway by the logarithm"
    assert rate_at(RATES.matmul_bfloat16, 1e5) == 2e9
    assert RATES.best("memory") == 4e9


def test_figures_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = figures_file(1)
    assert file.is_relative_to(tmp_path) and file != figures_file(8)
    assert read_figures(file) is None
    keep_figures(file, FIGURES)
    assert read_figures(file) == FIGURES


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cores": 2}', '{"memory": 3}', '{"no": 1}'])
def test_a_damaged_file_is_no_figures(text, tmp_path):
    file = tmp_path / "here.json"
    file.write_text(text)
    assert read_figures(file) is None


def test_an_edited_value_is_no_figure(tmp_path):
    file = tmp_path / "here.json"
    keep_figures(file, FIGURES)
    text = file.read_text()
    for value in ('"fast"', "[]", "[[1, 2, 3]]", "null", "{}"):
        file.write_text(text.replace("8000000000.0", value))
        assert file.read_text() != text and read_figures(file) is None
