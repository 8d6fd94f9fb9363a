"""The tables and the pictures of settings that compose."""

from __future__ import annotations

from matplotlib.text import Text

from jaxpar.plan.compositions import Study
from jaxpar.plan.figures import Figures, Point
from jaxpar.show.compositions import composition_figure, gains_table, points_table


def point(*names: str, speed: float, memory: int = 2**30, loss: float | None = None) -> Point:
    figures = Figures(1 / speed, 1000 * speed, 0.25, 0.0, None, memory, 2**34, memory <= 2**34, 1.0)
    return Point(names, figures, loss)


STUDY = Study(
    base=point(speed=1.0, loss=2.0),
    alone=(
        point("a", speed=1.2, memory=3 * 2**30, loss=2.1),
        point("b", speed=0.9, loss=2.0),
        Point(("c",), idle="c changes nothing: it is so already"),
    ),
    pairs=(
        point("a", "b", speed=1.2, memory=2**35, loss=2.2),
        point("a", "c", speed=1.2),
        Point(("b", "c"), refused="b and c contradict each other"),
    ),
    larger=(),
    best=point("a", speed=1.2, memory=3 * 2**30, loss=2.1),
    search="all 1 were tried",
)


def cells(table) -> dict[str, list[str]]:
    return {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}


def test_each_point_has_a_row_and_its_reason() -> None:
    shown = cells(points_table(STUDY.points, STUDY.base))
    assert shown["settings"][:3] == ["base", "a", "b"] and shown["speed"][1] == "1.200"
    assert shown["loss"][1] == "2.1000" and shown["memory"][1] == "3.00 GiB"
    assert shown["remark"][3:5] == [
        "c changes nothing: it is so already",
        "does not fit the memory of a device",
    ]
    assert shown["remark"][-1] == "b and c contradict each other"


def test_a_pair_stands_beside_its_parts() -> None:
    table = gains_table(STUDY.gains())
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert rows[0][:5] == ("a + b", "1.200", "1.080", "+31,744 MiB", "+2,048 MiB")
    assert rows[0][-3:] == ("+0.2000", "+0.1000", "gain more together")
    assert rows[1][1:3] == ("1.200", "1.200"), "c changes nothing, so that its part is 1"
    assert rows[2][-1] == "b and c contradict each other"


def test_names_of_points_stand_beside_them_and_do_not_overlap() -> None:
    _, plane = composition_figure(STUDY, "here").axes
    legend = plane.get_legend()
    assert legend is not None and not plane.texts
    assert [text.get_text() for text in legend.get_texts()] == ["base", "a", "b"]


def test_the_picture_has_a_square_for_each_pair() -> None:
    squares, plane = composition_figure(STUDY, "here").axes
    texts = {text.get_text() for text in squares.findobj(Text) if isinstance(text, Text)}
    assert {"alone\n1.200", "1.200\n(1.080)", "no pair"} <= texts
    marks = [line.get_marker() for line in plane.lines]
    assert marks.count("x") == 1, "one point does not fit"
