"""One layer of a model under a plan is drawn here: how its arrays are cut, and the collectives of either direction.

The embedding, the block, the loss and whatever else sends something have a section each, with four columns of cards:
weights and activations with their logical axes and the mesh axes these are split over, and the collectives of the
traced step in order (`jaxpar.plan.communication`). Nothing here knows a model: other parameters make another picture.

Lengths are in inches, downwards from the top left corner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from jaxpar.base.activation_names import NAMES, Action
from jaxpar.base.console import bytes_text
from jaxpar.base.heads import output_axis
from jaxpar.base.plan import Plan
from jaxpar.base.sharding import LogicalAxis, Placement
from jaxpar.hlo.tasks import CollectiveKind
from jaxpar.plan.communication import StepCollective
from jaxpar.train.saved_activations import Activation

_KINDS: dict[CollectiveKind, str] = {
    "all-gather": "#0077bb", "reduce-scatter": "#cc3311", "all-reduce": "#aa3377", "all-to-all": "#00796b",
    "ppermute": "#b8520a",
}  # fmt: skip
_WEIGHT = "#fdf3d8"
_ACTIONS: dict[Action, str] = {"save": "#d3e6f7", "offload": "#d9ecd0", "recompute": "#f6f6f6"}
_ACTION_WORDS: dict[Action, str] = {"save": "kept", "offload": "in host memory", "recompute": "made again"}
_COLUMNS = (
    "weights, as stored",
    "activations",
    "forward, one after another",
    "backward, one after another (again: recomputed)",
)
_SECTIONS = {
    "embed": "embedding", "block": "one layer", "loss": "head and loss", "send": "from stage to stage",
    "sum": "sums of all stages, after the last tick", "accumulate": "after the last microbatch", "update": "update",
}  # fmt: skip
_PART = {"embed": "embed", "blocks": "block", "head": "loss"}
"""The section of each part of the parameters."""
_SCOPE = {"head": "loss", "share": "loss"}
"""The section of each scope that has none of its own name."""

_WIDTH, _COLUMN, _MARGIN, _TOP = 14.0, 3.3, 0.2, 1.5
_CARD, _GAP, _HEADING = 0.4, 0.07, 0.5
_FONT = 8.5


class _Card(NamedTuple):
    lines: tuple[str, ...]
    color: str


_Columns = tuple[list[_Card], list[_Card], list[_Card], list[_Card]]


def layer_figure(
    parameters: Sequence[Placement], named: Sequence[Activation], collectives: Sequence[StepCollective], plan: Plan,
    title: str,
) -> Figure:  # fmt: skip
    """Draw a layer under a plan.

    Args:
      parameters: the parameters with where they live, from `base.sharding.placements`.
      named: the activations of a block, from `train.saved_activations.activations`.
      collectives: the collectives from `plan.communication.step_collectives`.
      plan: the plan with its mesh, rules and the rest.
      title: the title of the figure.
    """
    sections = _sections(parameters, named, collectives, plan)
    tops = [_TOP]
    for columns in sections.values():
        tops.append(tops[-1] + _height(columns) + _MARGIN)
    figure = Figure(figsize=(_WIDTH, tops[-1]), dpi=100)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, _WIDTH), ylim=(tops[-1], 0))
    axes.set_axis_off()
    _draw_heading(axes, title, sections.values())
    for (name, columns), top in zip(sections.items(), tops, strict=False):
        _draw_section(axes, name, columns, top)
    return figure


# What is drawn.


def _sections(
    parameters: Sequence[Placement], named: Sequence[Activation], collectives: Sequence[StepCollective], plan: Plan
) -> dict[str, _Columns]:
    """The four columns of each section by its name, in the order of a step."""
    found: defaultdict[str, _Columns] = defaultdict(lambda: ([], [], [], []))
    for section in _PART.values():
        found[section][0].extend(_weights(parameters, section, plan))
    found["block"][1].extend(_activation(one, plan) for one in named)
    for one in collectives:
        first, _, inner = one.scope.partition("/")
        backward = one.phase in ("recomputed", "backward")
        found[_SCOPE.get(first, first)][3 if backward else 2].append(_collective(one, inner))
    return {_SECTIONS.get(name, name): columns for name, columns in found.items() if any(columns)}


def _weights(parameters: Sequence[Placement], section: str, plan: Plan) -> Iterator[_Card]:
    """The parameters of a section, of which a block shows one layer's; parameters that are alike share a card."""
    alike: defaultdict[tuple[tuple[int, ...], tuple[LogicalAxis | None, ...], int], list[str]] = defaultdict(list)
    for row in parameters:
        part, _, name = row.name.partition(".")
        if _PART.get(part) == section:
            stacked = row.axes[:1] == ("layers",)
            size = row.bytes_per_device // (row.shape[0] // plan.size("layers") if stacked else 1)
            alike[row.shape[stacked:], row.axes[stacked:], size].append(name)
    for (shape, axes, size), names in alike.items():
        each = " each" if len(names) > 1 else ""
        title = f"{', '.join(names)} {list(shape)}, {bytes_text(size)}{each}"
        yield _Card((title, _split_text(axes, plan)), _WEIGHT)


def _activation(one: Activation, plan: Plan) -> _Card:
    title = f"{one.name} {list(one.shape)}, {bytes_text(one.bytes)}"
    return _Card((title, _split_text(NAMES[one.name].axes, plan)), _ACTIONS[one.action])


def _split_text(axes: Iterable[LogicalAxis | None], plan: Plan) -> str:
    """Write the dims and the mesh axes over which each is cut: `batch / fsdp=4 x seq / tensor=2 x embed`."""
    words = []
    for axis in axes:
        mesh_axes = plan.mesh_axes(output_axis(axis, plan))
        over = " ".join(f"{mesh_axis}={plan.mesh.shape[mesh_axis]}" for mesh_axis in mesh_axes)
        words.append((axis or "whole").removeprefix("residual_").removeprefix("attention_") + (over and f" / {over}"))
    return " x ".join(words)


def _collective(one: StepCollective, inner: str) -> _Card:
    """A card with what one device sends each time, how often in a step, and the array whose bytes these are."""
    sent = f"{one.kind} over {' x '.join(one.axes)}, {bytes_text(one.sent_bytes)}"
    times = f" x {one.count}" if one.count > 1 else ""
    place = f"{inner}: " if inner else ""
    again = ", again" if one.phase == "recomputed" else ""
    return _Card((sent + times, f"{place}{one.dtype} {list(one.shape)}{again}"), _KINDS[one.kind])


# How it is drawn.


def _height(columns: _Columns) -> float:
    return _HEADING + max(map(len, columns)) * (_CARD + _GAP) + _GAP


def _draw_heading(axes: Axes, title: str, sections: Iterable[_Columns]) -> None:
    """Draw the title and the legend."""
    axes.text(_WIDTH / 2, 0.3, title, ha="center", va="center", fontsize=14, weight="bold")
    notes = (
        "Arrays: the shape of a whole microbatch's, or as stored; the bytes of it on each device; below, the mesh axes "
        "over which each dim is cut.",
        "Collectives: the bytes that one device sends each time, and how many times in a step; below, the array that "
        "is gathered, summed or passed on.",
    )
    for line, note in enumerate(notes):
        axes.text(_WIDTH / 2, 0.6 + 0.19 * line, note, ha="center", va="center", fontsize=_FONT, color="#444444")
    used = {card.color for columns in sections for column in columns for card in column}
    known = {"weights": _WEIGHT} | {_ACTION_WORDS[action]: color for action, color in _ACTIONS.items()} | _KINDS
    shown = [_Card((word,), color) for word, color in known.items() if color in used]
    step = 1.6
    left = (_WIDTH - step * len(shown)) / 2
    for at, card in enumerate(shown):
        _draw_card(axes, card, left + at * step, 1.03, step - 0.1, 0.25)


def _draw_section(axes: Axes, name: str, columns: _Columns, top: float) -> None:
    """Draw a section's frame, name and columns, with an arrow along each column that has an order."""
    height = _height(columns)
    _draw_box(axes, 0.1, top, _WIDTH - 0.2, height, "none", "#bbbbbb")
    axes.text(0.25, top + 0.16, name, va="center", fontsize=_FONT + 2, weight="bold")
    step = (_WIDTH - 0.2) / len(columns)
    for at, (cards, title) in enumerate(zip(columns, _COLUMNS, strict=True)):
        left = 0.1 + at * step + (step - _COLUMN) / 2
        if not cards:
            continue
        axes.text(left, top + 0.37, title, va="center", fontsize=_FONT - 1, color="#666666")
        for place, card in enumerate(cards):
            _draw_card(axes, card, left, top + _HEADING + place * (_CARD + _GAP), _COLUMN, _CARD)
        if at >= 2:
            ends = (left - 0.07, top + _HEADING + len(cards) * (_CARD + _GAP)), (left - 0.07, top + _HEADING)
            axes.annotate("", *ends, arrowprops={"arrowstyle": "->", "color": "#777777", "shrinkA": 0, "shrinkB": 0})


def _draw_card(axes: Axes, card: _Card, left: float, top: float, width: float, height: float) -> None:
    _draw_box(axes, left, top, width, height, card.color, "#999999")
    ink, rows = "white" if card.color in _KINDS.values() else "black", len(card.lines)
    for at, line in enumerate(card.lines):
        # A letter is about 0.62 of its size wide; a line that does not fit is smaller.
        size = min(_FONT, (width - 0.12) * 72 / (0.62 * len(line)))
        weight = "bold" if at == 0 and rows > 1 else "normal"
        down = top + height * (at + 1) / (rows + 1) + 0.02 * (2 * at + 1 - rows)
        axes.text(left + width / 2, down, line, ha="center", va="center", fontsize=size, color=ink, weight=weight)


def _draw_box(axes: Axes, left: float, top: float, width: float, height: float, color: str, edge: str) -> None:
    style = "round,pad=0,rounding_size=0.05"
    axes.add_patch(
        FancyBboxPatch((left, top), width, height, boxstyle=style, facecolor=color, edgecolor=edge, linewidth=0.8)
    )
