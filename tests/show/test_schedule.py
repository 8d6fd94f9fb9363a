"""Pictures of schedules: every action is drawn where it happens, and what is said of them is so."""

from __future__ import annotations

import itertools
import re
from io import StringIO

import numpy as np
import pytest
from matplotlib.colors import to_hex
from rich.console import Console

from jaxpar.parallel.pipeline.schedules import Table, Times, schedule, simulate_schedule
from jaxpar.show.figures import save_figure
from jaxpar.show.schedule import schedule_figure, schedule_text

SOME = {
    "1f1b": (schedule("1f1b", 4, 6), Times(1, 2.5)),
    "interleaved": (
        schedule("interleaved", 3, 6, 2),
        Times(0.5, 1, transfer=0.25),
    ),
    "one stage": (schedule("gpipe", 1, 1), Times()),
}


def bars(axes) -> list[list[tuple[float, float, str]]]:
    """Start, length and colour of each bar, by row."""
    found = []
    for row in axes.collections:
        boxes = [path.get_extents() for path in row.get_paths()]
        found.append(
            [
                (b.x0, b.width, to_hex(c))
                for b, c in zip(
                    boxes,
                    row.get_facecolors(),
                    strict=True,
                )
            ]
        )
    return found


@pytest.mark.parametrize("name", SOME)
def test_every_action_is_a_bar_and_every_bar_a_number(name):
    table, times = SOME[name]
    found = simulate_schedule(table, times)
    gantt, _ = schedule_figure(table, times, "a schedule").axes
    rows = bars(gantt)
    looks = {}
    assert len(rows) == table.stages
    for s, row in enumerate(rows):
        expected = [(found.starts[t], tick[s]) for t, tick in enumerate(table.ticks) if tick[s]]
        spans = [(t, times.of(a.kind)) for t, a in expected]
        np.testing.assert_allclose([(x, width) for x, width, _ in row], spans)
        for (_, _, color), (_, action) in zip(row, expected, strict=True):
            looks.setdefault((action.kind, action.chunk), set()).add(color)
        texts = [
            (t.get_position()[0], int(t.get_text()))
            for t in gantt.texts
            if t.get_position()[1] == s
        ]
        middles = [(t + times.of(a.kind) / 2, a.microbatch) for t, a in expected]
        np.testing.assert_allclose(texts, middles)
    assert {len(colors) for colors in looks.values()} == {1}
    assert len(set().union(*looks.values())) == len(looks)  # a colour for each kind and chunk
    assert gantt.get_xlim() == (0, found.makespan)
    assert gantt.get_title() == (
        f"a schedule: bubble {100 * found.bubble:.1f} %, at most {max(found.stash)} input"
        f"{'' if name == 'one stage' else 's'} kept"
    )


@pytest.mark.parametrize("name", SOME)
def test_the_curve_of_what_is_kept(name):
    """At the start of every action as many as the simulator says, at the end none."""
    table, times = SOME[name]
    found = simulate_schedule(table, times)
    _, axes = schedule_figure(table, times, "a schedule").axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        f"stage {s}: {kept}" for s, kept in enumerate(found.stash)
    ]
    for s, line in enumerate(axes.lines):
        when, kept = line.get_data()
        assert line.get_drawstyle() == "steps-post"
        assert kept[-1] == 0
        held = 0
        for t, action in enumerate(tick[s] for tick in table.ticks):
            held += action is not None and action.kind == "forward"
            if action is not None:
                assert kept[np.searchsorted(when, found.starts[t] + 1e-9) - 1] == held
            held -= action is not None and action.kind in ("backward", "weight")


def test_numbers_are_left_out_where_they_have_no_room():
    gantt, _ = schedule_figure(schedule("1f1b", 4, 8), Times(), "short").axes
    assert len(gantt.texts) == 2 * 4 * 8
    gantt, _ = schedule_figure(schedule("1f1b", 4, 120), Times(), "long").axes
    assert not gantt.texts
    figure = schedule_figure(schedule("1f1b", 8, 32), Times(), "as long as it gets with numbers")
    figure.draw_without_rendering()
    gantt = figure.axes[0]
    assert len(gantt.texts) == 2 * 8 * 32
    boxes = [text.get_window_extent() for text in gantt.texts]
    cells = [
        bar.transformed(gantt.transData)
        for row in gantt.collections
        for bar in (path.get_extents() for path in row.get_paths())
    ]
    assert all(c.x0 <= b.x0 and b.x1 <= c.x1 for b, c in zip(boxes, cells, strict=True))
    assert all(c.ymin <= b.ymin and b.ymax <= c.ymax for b, c in zip(boxes, cells, strict=True))


def test_nothing_written_lies_on_anything_else(tmp_path):
    figure = schedule_figure(
        *SOME["interleaved"], "interleaved, 3 stages x 2 chunks, 6 microbatches"
    )
    figure.draw_without_rendering()
    gantt, curve = figure.axes
    (keys,) = figure.legends
    marks = [
        label for axis in (gantt.yaxis, curve.yaxis, curve.xaxis) for label in axis.get_ticklabels()
    ]
    written = [
        gantt.title,
        curve.xaxis.label,
        curve.yaxis.label,
        keys,
        curve.get_legend(),
        *marks,
    ]
    boxes = [one.get_window_extent() for one in written]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    page = figure.bbox
    assert all(
        page.x0 <= b.x0 and b.x1 <= page.x1 and page.y0 <= b.y0 and b.y1 <= page.y1 for b in boxes
    )
    assert [text.get_text() for text in keys.get_texts()] == [
        "forward",
        "backward",
        "chunk 0",
        "chunk 1",
    ]
    save_figure(figure, tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").stat().st_size > 10_000


# In a terminal.


def cells(line: str) -> list[str]:
    return line.split(" keeps ")[0].split()[2:]


@pytest.mark.parametrize("name", SOME)
def test_every_tick_is_a_cell(name):
    table, times = SOME[name]
    *rows, said = schedule_text(table, 10_000, times).plain.splitlines()
    assert len(rows) == table.stages
    found = simulate_schedule(table, times)
    for s, line in enumerate(rows):
        assert line.startswith(f"stage {s} ")
        assert line.endswith(f" keeps {found.stash[s]}")
        expected = [
            "."
            if a is None
            else f"{a.kind[0].upper()}{a.microbatch}" + ("ab"[a.chunk] if table.virtual > 1 else "")
            for a in (tick[s] for tick in table.ticks)
        ]
        assert cells(line) == expected
    assert said.startswith(f"{len(table.ticks)} ticks, bubble {100 * found.bubble:.1f} %; ")


@pytest.mark.parametrize("width", [40, 79, 80, 81, 100, 160])
@pytest.mark.parametrize(
    "table",
    [schedule("1f1b", 12, 100), schedule("interleaved", 4, 12, 2)],
)
def test_a_long_table_keeps_its_first_and_last_ticks(table: Table, width):
    *rows, said = schedule_text(table, width).plain.splitlines()
    whole = [cells(line) for line in schedule_text(table, 10_000).plain.splitlines()[:-1]]
    shown = [cells(line) for line in rows]
    assert all(len(line) <= width for line in rows)
    assert len({line.index("keeps") for line in rows}) == 1
    cut = shown[0].index("…")
    for short, full in zip(shown, whole, strict=True):
        first = short[:cut]
        last = short[cut + 1 :]
        assert first == full[: len(first)]
        assert last == full[-len(last) :]
        assert abs(len(first) - len(last)) <= 1
    assert f"{len(table.ticks)} ticks ({len(shown[0]) - 1} shown), bubble" in said


def test_a_terminal_gets_colours_and_a_pipe_does_not():
    text = schedule_text(schedule("1f1b", 2, 2), 80)
    on = Console(file=StringIO(), force_terminal=True, color_system="truecolor", width=80)
    off = Console(file=StringIO(), width=80)
    on.print(text)
    off.print(text)
    shown, plain = (out.file.getvalue() for out in (on, off))  # type: ignore[attr-defined]
    assert set(re.findall(r"48;2;(\d+;\d+;\d+)m", shown)) == {"0;114;178", "230;159;0"}
    assert "\x1b" not in plain
