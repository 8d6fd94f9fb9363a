"""Tables and pictures of many rehearsed configs: the combinations of a sweep, and how settings
compose.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from matplotlib.typing import ColorType
from rich.table import Table

from jaxpar.base.console import bytes_text
from jaxpar.plan.compositions import ADD_UP, Gain, Study
from jaxpar.plan.figures import Point

_BASE = "#777777"
_POINT = "#4477aa"
_BEST = "#cc3311"
_MIB = 2**20


def points_table(points: Sequence[Point], base: Point | None = None) -> Table:
    """Make a table with a row for each rehearsed config.

    Args:
      base: the config that speeds are shares of; None = there is none.
    """
    trained = any(point.loss is not None for point in points)
    table = Table(box=None, pad_edge=False)
    table.add_column("settings")
    for name in ("step", "tok/s", *(["speed"] if base else []), "MFU", "exposed", "host", "memory"):
        table.add_column(name, justify="right")
    if trained:
        table.add_column("loss", justify="right")
    table.add_column("remark")
    for point in points:
        cells = _cells(point, base)
        if trained:
            cells.append("" if point.loss is None else f"{point.loss:.4f}")
        table.add_row(point.name, *cells, point.remark)
    return table


def _cells(point: Point, base: Point | None) -> list[str]:
    """Write the figures of a point; empty where there are none."""
    figures = point.figures
    if figures is None:
        return [""] * (7 if base else 6)
    cells = [f"{1e3 * figures.step:,.1f} ms", f"{figures.tokens_per_second:,.0f}"]
    if base is not None and base.figures is not None:
        cells.append(f"{figures.tokens_per_second / base.figures.tokens_per_second:.3f}")
    mfu = "" if figures.mfu is None else f"{100 * figures.mfu:.1f} %"
    exposed = f"{1e3 * figures.exposed:,.1f} ms"
    host = f"{1e3 * figures.host_stall:,.1f} ms"
    return [*cells, mfu, exposed, host, bytes_text(figures.memory)]


def gains_table(gains: Sequence[Gain]) -> Table:
    """Make a table of `Study.gains`, with a row for each pair of settings: what it gains, and what
    its parts come to.
    """
    trained = any(gain.loss is not None for gain in gains)
    table = Table(box=None, pad_edge=False)
    table.add_column("pair")
    for name in ("speed", "parts", "memory", "parts", "exposed", "parts"):
        table.add_column(name, justify="right")
    if trained:
        table.add_column("loss", justify="right")
        table.add_column("parts", justify="right")
    table.add_column("they")
    for gain in gains:
        numbers = [
            _text(gain.speed, "{:.3f}"),
            _text(gain.speed_of_parts, "{:.3f}"),
            _text(gain.memory, "{:+,.0f} MiB", 1 / _MIB),
            _text(gain.memory_of_parts, "{:+,.0f} MiB", 1 / _MIB),
            _text(gain.exposed, "{:+,.1f} ms", 1e3),
            _text(gain.exposed_of_parts, "{:+,.1f} ms", 1e3),
        ]
        if trained:
            numbers += [_text(gain.loss, "{:+.4f}"), _text(gain.loss_of_parts, "{:+.4f}")]
        table.add_row(gain.pair.name, *numbers, gain.verdict or gain.pair.why_not)
    return table


def _text(value: float | None, form: str, scale: float = 1.0) -> str:
    return "" if value is None else form.format(value * scale)


def composition_figure(study: Study, title: str) -> Figure:
    """Draw how settings compose, and what each point takes.

    On the left a square for each pair: its speed as a share of the base's, above the product of its
    parts' speeds. Its colour is the one over the other. On the diagonal is each setting alone. On
    the right each point by its time and memory.
    """
    count = len(study.alone)
    side = 3.2 + 0.85 * count
    figure = Figure(figsize=(2 * side, side), dpi=110, layout="constrained")
    squares, plane = figure.subplots(1, 2)
    _draw_pairs(squares, study)
    _draw_plane(plane, study)
    figure.suptitle(title)
    return figure


def _draw_pairs(axes: Axes, study: Study) -> None:
    """Draw the square of settings by settings."""
    names = [point.settings[0] for point in study.alone]
    share = _shares(study)
    furthest = max((abs(value - 1) for value in share.values()), default=0.0)
    reach = max(furthest, 0.02)
    norm = TwoSlopeNorm(1, 1 - reach, 1 + reach)
    colors = matplotlib.colormaps["RdBu"]
    for place, point in enumerate(study.alone):
        speed = study.speed(point)
        text = "none" if speed is None else f"{speed:.3f}"
        _square(axes, place, place, "#e8e8e8", f"alone\n{text}")
    for gain in study.gains():
        first, second = (names.index(name) for name in gain.pair.settings)
        if gain.speed is None:
            _square(axes, second, first, "white", "no pair")
            continue
        parts = _text(gain.speed_of_parts, "{:.3f}") or "?"
        value = share.get(gain.pair.settings)
        if value is None:
            color = "white"
        elif gain.verdict == ADD_UP:
            color = "whitesmoke"
        else:
            color = colors(norm(value))
        _square(axes, second, first, color, f"{gain.speed:.3f}\n({parts})")
    size = len(names)
    axes.set(
        xlim=(-0.5, size - 0.5),
        ylim=(size - 0.5, -0.5),
        xticks=range(size),
        yticks=range(size),
        xlabel="",
        title="speed of each pair, and (the product of its parts)\n"
        "blue: more together than apart; red: they cancel; pale: they add up",
    )
    axes.set_xticklabels(names, rotation=35, ha="right")
    axes.set_yticklabels(names)
    axes.set_aspect("equal")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _shares(study: Study) -> dict[tuple[str, ...], float]:
    """Divide the speed of each pair by the product of its parts."""
    return {
        gain.pair.settings: gain.speed / gain.speed_of_parts
        for gain in study.gains()
        if gain.speed is not None and gain.speed_of_parts
    }


def _square(axes: Axes, x: int, y: int, color: ColorType, text: str) -> None:
    """Draw one square with its text."""
    corner = (x - 0.5, y - 0.5)
    square = Rectangle(corner, 1, 1, facecolor=color, edgecolor="white", linewidth=2)
    axes.add_patch(square)
    is_dark = sum(to_rgb(color)) < 1.5
    ink = "white" if is_dark else "black"
    axes.text(x, y, text, ha="center", va="center", fontsize=8, color=ink)


def _draw_plane(axes: Axes, study: Study) -> None:
    """Draw every point by its seconds a token and its memory."""
    usable = 0.0
    highest = 0.0
    shades = matplotlib.colormaps["viridis"]
    colors = {point: shades(i / len(study.alone)) for i, point in enumerate(study.alone)}
    shapes = dict(zip(study.alone, cycle("os^DvP<>h"), strict=False))
    for point in study.points:
        figures = point.figures
        if figures is None:
            continue
        usable = figures.usable / 2**30
        highest = max(highest, figures.memory / 2**30)
        is_named = point in (study.base, study.best, *study.alone)
        if point == study.best:
            color = _BEST
        elif point == study.base:
            color = _BASE
        else:
            color = colors.get(point, _POINT)
        x = 1e6 / figures.tokens_per_second
        y = figures.memory / 2**30
        marker = shapes.get(point, "o") if figures.fits else "x"
        name = point.name.replace(" + ", "\n+ ") if is_named else None
        size = 8 if is_named else 4
        axes.plot(x, y, marker, color=color, markersize=size, alpha=0.8, label=name, ls="")
    near = usable < 2 * highest  # further away it would press all points together
    if near:
        axes.axhline(usable, color=_BASE, linestyle="--", linewidth=1)
    axes.set(
        xlabel="microseconds a token, all devices together",
        ylabel=f"GiB of a device ({'dashed: ' if near else ''}of {usable:.1f})",
        title="all points; red: the best found; a cross does not fit",
    )
    axes.margins(x=0.15)
    if axes.get_legend_handles_labels()[0]:  # beside the points, where no names overlap
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7, frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def sweep_points_figure(points: Sequence[Point], title: str) -> Figure:
    """Draw the step of each config, with the part that is exposed, and beside it its memory.

    Args:
      points: the configs; those that were refused are left out.
    """
    known = [(point.name, point.figures) for point in points if point.figures is not None]
    figure = Figure(figsize=(10, 1.8 + 0.4 * max(len(known), 4)), dpi=110, layout="constrained")
    steps, memory = figure.subplots(1, 2)
    places = range(len(known))
    names = [name.replace(" ", "\n") for name, _ in known]
    rows = [figures for _, figures in known]
    milliseconds = [1e3 * row.step for row in rows]
    bars = steps.barh(places, milliseconds, height=0.6, color=_POINT)
    steps.barh(places, [1e3 * row.exposed for row in rows], height=0.6, color=_BEST)
    steps.bar_label(bars, [f" {step:,.4g}" for step in milliseconds])
    steps.set(xlabel="milliseconds a step (red: exposed)", yticks=places, yticklabels=names)
    sizes = [row.memory / 2**30 for row in rows]
    colors = [_POINT if row.fits else _BEST for row in rows]
    bars = memory.barh(places, sizes, height=0.6, color=colors)
    memory.bar_label(bars, [f" {bytes_text(row.memory)}" for row in rows])
    memory.set(xlabel="GiB of a device (red: does not fit)", yticks=[])
    for axes in (steps, memory):
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    return figure
