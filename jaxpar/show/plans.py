"""The answer of a search over plans, as a person reads it: tables, lines, and a picture of time
against memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from rich.console import RenderableType
from rich.table import Table

from jaxpar.base.console import bytes_text, count_text
from jaxpar.plan.layout_search import Answer, Found
from jaxpar.plan.layout_search.config_file import step_line
from jaxpar.rehearse.report.report_tables import seconds_text

_GIB = 2**30
_POINT = "#4477aa"
_BEST = "#cc3311"
_LINE = "#777777"
_PARTS = ("parameters", "gradients", "optimizer", "activations", "working")


def answer_parts(answer: Answer) -> list[RenderableType]:
    """List what is printed of an answer: the plan, its step and memory, the next plans, why the
    others lost, and what would change the choice.
    """
    parts: list[RenderableType] = []
    if answer.best is None:
        parts.append(f"nothing fits {answer.request.target.name}")
    else:
        parts += [f"plan: {answer.best.name}", f"step: {step_line(answer)}"]
        parts += _cost_lines(answer)
        parts += [_memory_line(answer, answer.best), "", found_table(answer)]
    parts += _listed("why others lost", answer.lost)
    parts += _listed("cannot run", list(answer.refused.values()))
    parts += _listed("what would change it", answer.changed)
    parts += [f"note: {note}" for note in answer.notes]
    return parts


def _listed(title: str, lines: Sequence[object]) -> list[RenderableType]:
    return ["", f"{title}:", *(f"  {line}" for line in lines)] if lines else []


def _cost_lines(answer: Answer) -> list[RenderableType]:
    """Write how long the run takes, and what it costs."""
    steps = answer.request.config.train.steps
    text = f"run: {steps:,} steps take {answer.days:,.1f} days"
    if answer.cost:
        text += f" and cost {answer.cost:,.0f} USD at {answer.chip_hour:g} USD a chip and hour"
    return [text]


def _memory_line(answer: Answer, best: Found) -> str:
    """Write the memory of the best plan by part."""
    of = best.estimate.estimate.bytes
    known = "rehearsed" if best.figures is not None else "expected"
    parts = ", ".join(
        f"{name} {bytes_text(getattr(of, name))}" for name in _PARTS if getattr(of, name) >= 2**20
    )
    return (
        f"memory: {bytes_text(best.bytes)} of {bytes_text(answer.request.budget)} {known}; by the "
        f"closed forms {parts}"
    )


def found_table(answer: Answer) -> Table:
    """Make a table of the best plan and the next ones, one for each mesh."""
    assert answer.best is not None
    table = Table(box=None, pad_edge=False)
    table.add_column("plan")
    for name in ("step", "times", "tokens/s", "memory"):
        table.add_column(name, justify="right")
    table.add_column("known by")
    for one in (answer.best, *answer.runners_up):
        table.add_row(
            one.name,
            seconds_text(one.seconds),
            f"{one.seconds / answer.best.seconds:.2f}",
            count_text(answer.request.tokens / one.seconds),
            bytes_text(one.bytes),
            "closed forms" if one.figures is None else "rehearsal",
        )
    return table


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """List the points of time and memory that no other beats in both, the fastest first."""
    found = list[tuple[float, float]]()
    for seconds, size in sorted(points):
        if not found or size < found[-1][1]:
            found.append((seconds, size))
    return found


def plans_figure(answer: Answer, title: str) -> Figure:
    """Draw the plans that fit by time and memory, with the frontier, the rehearsed ones, and the
    budget of a device.
    """
    figure = Figure(figsize=(9, 6), dpi=110, layout="constrained")
    axes = figure.subplots()
    points = [*answer.points]
    points += [
        (one.figures.step, float(one.figures.memory))
        for one in answer.rehearsed
        if one.figures is not None
    ]
    if points:
        axes.scatter(
            [1e3 * seconds for seconds, _ in points],
            [size / _GIB for _, size in points],
            s=9,
            color=_POINT,
            alpha=0.35,
            label=f"the best plan of each of {len(answer.points):,} meshes and batchings",
        )
        edge = frontier(points)
        axes.step(
            [1e3 * seconds for seconds, _ in edge],
            [size / _GIB for _, size in edge],
            where="post",
            color=_LINE,
            label="frontier: none of these is faster and smaller",
        )
    rehearsed = [one.figures for one in answer.rehearsed if one.figures is not None]
    if rehearsed:
        axes.scatter(
            [1e3 * one.step for one in rehearsed],
            [one.memory / _GIB for one in rehearsed],
            s=42,
            facecolors="none",
            edgecolors="black",
            label="rehearsed",
        )
    if answer.best is not None:
        place = (1e3 * answer.best.seconds, answer.best.bytes / _GIB)
        axes.scatter(*[[one] for one in place], s=70, color=_BEST, label=answer.best.name)
    axes.axhline(
        answer.request.budget / _GIB, color=_BEST, linestyle="--", linewidth=1, label="budget"
    )
    axes.set(
        xlabel="milliseconds a step",
        ylabel="GiB of a device",
        title=title,
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", fontsize=8, frameon=False, ncols=2)
    return figure
