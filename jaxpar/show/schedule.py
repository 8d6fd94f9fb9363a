"""Pictures of pipeline schedules: which microbatch each stage works on at a time, and what it keeps
meanwhile.
"""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from rich.text import Text

from jaxpar.parallel.pipeline.schedules import (
    UNIT,
    Action,
    ActionKind,
    Simulation,
    Table,
    Times,
    simulate_schedule,
)

# These are blue and orange of Okabe and Ito's palette, which all kinds of colour vision tell apart.
_COLORS: dict[ActionKind, str] = {"forward": "#0072b2", "backward": "#e69f00"}
_HEIGHT = 0.86  # the height of a bar as a share of its row


def schedule_figure(table: Table, times: Times, title: str) -> Figure:
    """Draw a schedule in time with a row for each stage, and below it the number of inputs that
    each stage keeps.

    Each action shows its microbatch where there is room for the number. Later chunks of a stage are
    lighter.

    Args:
      times: the times of one action of one virtual stage, in any unit.
      title: the title, to which the idle share is added.

    Raises:
      UserError: the table is not valid.
    """
    found = simulate_schedule(table, times)
    width = float(np.clip(2.2 + 0.32 * len(table.ticks), 8, 17))
    rows = float(np.clip(0.34 * table.stages, 1.1, 6.5))
    figure = Figure(figsize=(width, rows + 3.1), dpi=130, layout="constrained")
    gantt, curve = figure.subplots(
        2,
        1,
        sharex=True,
        height_ratios=[rows + 0.5, 1.7],
    )
    _draw(gantt, table, times, found, 72 * (width - 1.9))
    most = max(found.stash)
    kept = f"at most {most} input{'s' if most > 1 else ''} kept"
    gantt.set_title(f"{title}: bubble {100 * found.bubble:.1f} %, {kept}", fontsize=11)
    _draw_stash(curve, table, times, found)
    curve.set_xlabel(f"time (a forward {times.forward:.3g}, a backward {times.backward:.3g})")
    v = table.virtual
    if v > 1:
        chunks = {*_even_steps(v, 4), v - 1}
    else:
        chunks = set()
    keys = [Patch(color=color, label=kind) for kind, color in _COLORS.items()]
    keys += [
        Patch(color=_lighten("#666666", chunk, v), label=f"chunk {chunk}")
        for chunk in sorted(chunks)
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    return figure


def _draw(
    axes: Axes,
    table: Table,
    times: Times,
    found: Simulation,
    points: float,
) -> None:
    """Draw the bars of a schedule on axes that are `points` wide."""
    scale = points / max(found.makespan, 1e-9)
    for s in range(table.stages):
        column = [(t, tick[s]) for t, tick in enumerate(table.ticks)]
        actions = [(found.starts[t], action) for t, action in column if action]
        shades = [
            _lighten(_COLORS[action.kind], action.chunk, table.virtual) for _, action in actions
        ]
        spans = [(start, times.of(action.kind)) for start, action in actions]
        axes.broken_barh(
            spans,
            (s - _HEIGHT / 2, _HEIGHT),
            facecolors=shades,
            edgecolor="white",
            linewidth=min(0.8, 0.08 * scale * min(length for _, length in spans)),
        )
        for (start, length), shade, (_, action) in zip(spans, shades, actions, strict=True):
            size = min(
                10.0,
                length * scale / (0.74 * len(str(table.microbatches - 1))),
            )
            if size >= 4.5:
                if _is_dark(shade):
                    color = "white"
                else:
                    color = "black"
                middle = start + length / 2
                axes.text(
                    middle,
                    s,
                    str(action.microbatch),
                    size=size,
                    color=color,
                    ha="center",
                    va="center_baseline",
                )
    ticks = _even_steps(table.stages, 16)
    axes.set(
        ylim=(table.stages - 0.5, -0.5), xlim=(0, found.makespan), ylabel="stage", yticks=ticks
    )
    axes.tick_params(length=0, labelsize=9)
    axes.spines[:].set_visible(False)


def _draw_stash(axes: Axes, table: Table, times: Times, found: Simulation) -> None:
    """Draw how many inputs each stage keeps: one more when a forward starts, one less when its
    whole backward ends.
    """
    colors = matplotlib.colormaps["viridis"]
    named = {*_even_steps(table.stages, 8), table.stages - 1}
    for s in range(table.stages):
        steps = {0.0: 0, found.makespan: 0}  # by time; an end at the time of a start makes no step
        for t, tick in enumerate(table.ticks):
            action = tick[s]
            start = found.starts[t]
            if action and action.kind == "forward":
                steps[start] = steps.get(start, 0) + 1
            elif action:
                end = start + times.of(action.kind)
                steps[end] = steps.get(end, 0) - 1
        when = sorted(steps)
        if s in named:
            label = f"stage {s}: {found.stash[s]}"
        else:
            label = None
        shade = colors(0.9 * s / max(table.stages - 1, 1))
        axes.step(
            when,
            np.cumsum([steps[t] for t in when]),
            where="post",
            color=shade,
            linewidth=1.3,
            label=label,
        )
    axes.set(
        ylim=(0, max(found.stash) * 1.08 + 0.2),
        ylabel="inputs kept",
    )
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    legend = axes.legend(
        title="at most", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9
    )
    legend.get_title().set_fontsize(9)


def _even_steps(count: int, most: int) -> range:
    """Take at most `most` of the first `count` integers in even steps."""
    return range(0, count, -(-count // most))


def _lighten(color: str, chunk: int, virtual: int) -> str:
    """Lighten the colour of a kind, the more the later the chunk is."""
    share = 0.6 * chunk / max(virtual - 1, 1)
    r, g, b = (x + (1 - x) * share for x in to_rgb(color))
    return to_hex((r, g, b))


def _is_dark(color: str) -> bool:
    return float(np.dot(to_rgb(color), (0.299, 0.587, 0.114))) < 0.5


def schedule_text(table: Table, width: int = 100, times: Times = UNIT) -> Text:
    """Write a schedule for a terminal with a row for each stage and a cell for each tick: of
    microbatch 3, `F3` is the forward, `B3` the backward, and `F3b` the forward with the second
    chunk. The most inputs that each stage keeps and the bubble follow.

    Args:
      table: the schedule.
      width: the columns of the terminal. Of a longer table the first and the last ticks are shown.
      times: the times of one action of one virtual stage, from which the bubble is computed.

    Raises:
      UserError: the table is not valid.
    """
    found = simulate_schedule(table, times)
    ticks = table.ticks
    lettered = 1 < table.virtual <= 26

    def cell(action: Action) -> str:
        return f"{action.kind[0].upper()}{action.microbatch}" + (
            chr(ord("a") + action.chunk) if lettered else ""
        )

    wide = max(len(cell(action)) for tick in ticks for action in tick if action)
    head = len(f"stage {table.stages - 1} ")
    room = max(
        (width - head - len(" keeps 999") - 2) // (wide + 1),
        2,
    )
    if len(ticks) <= room:
        front = len(ticks)
    else:
        front = -(-room // 2)
    if front < len(ticks):
        rest = range(len(ticks) - room + front, len(ticks))
    else:
        rest = range(0)
    text = Text()
    for s in range(table.stages):
        text.append(f"stage {s}".ljust(head))
        for t in (*range(front), *rest):
            action = ticks[t][s]
            if rest and t == rest[0]:
                text.append("\u2026 ")
            if action is None:
                text.append(".".ljust(wide + 1), style="dim")
            else:
                shade = _lighten(_COLORS[action.kind], action.chunk, table.virtual)
                text.append(
                    cell(action).ljust(wide),
                    style=f"{'#ffffff' if _is_dark(shade) else '#000000'} on {shade}",
                )
                text.append(" ")
        text.append(f"keeps {found.stash[s]}\n")
    if rest:
        cut = f" ({front + len(rest)} shown)"
    else:
        cut = ""
    text.append(
        f"{len(ticks)} ticks{cut}, bubble {100 * found.bubble:.1f} %; F forward, B backward"
    )
    text.append(", then the microbatch" + (" and the chunk" if lettered else ""))
    return text
