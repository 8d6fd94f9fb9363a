"""The picture of predicted beside measured steps."""

from __future__ import annotations

from pathlib import Path

from jaxpar.show.figures import save_figure
from jaxpar.show.foresight import foresight_figure

ROWS = [
    {"chip": "v5p", "measured": 0.1, "predicted": 0.11},
    {"chip": "h100", "measured": 20.0, "predicted": 15.0},
    {"chip": "h100", "measured": 2.0, "predicted": 2.0},
]


def test_each_chip_has_its_points_in_both_parts(tmp_path: Path) -> None:
    figure = foresight_figure(ROWS)
    above, below = figure.axes
    legend = above.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["±10 %", "h100 (2)", "v5p (1)"]
    points = {tuple(line.get_xdata()): tuple(line.get_ydata()) for line in above.lines}
    assert points[(20.0, 2.0)] == (15.0, 2.0)
    errors = [round(float(y)) for line in below.lines for y in line.get_ydata()]
    assert {-25, 10} <= set(errors)
    save_figure(figure, tmp_path / "foresight.png")
    ticks = [label.get_text() for label in below.get_xticklabels()]
    assert "0.1" in ticks and not any("$" in tick for tick in ticks)
