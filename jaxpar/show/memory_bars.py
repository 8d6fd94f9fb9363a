"""The picture of what fills a device's memory, part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from jaxpar.base.layout.activation_names import NAMES

_STATE = {
    "parameters": "#1f4e8c",
    "optimizer": "#5b8fc9",
    "gradients": "#a9cbe8",
    "activations": "#e6842a",
}
_REST = "#b3b3b3"
_NO_NAME = "#d9d9d9"
_LIMIT = "#cc3311"
_NEAR = 4
"""The most times the longest bar at which a line at what a device has is still drawn."""
_SEEN = 1 / 500
"""The share of the longest bar that a part must exceed to be drawn."""
_UNITS = {"GiB": 2**30, "MiB": 2**20, "B": 1}
Bars = Mapping[str, Mapping[str, int]]


def memory_figure(bars: Bars, title: str, has: int = 0) -> Figure:
    """Draw a bar for each label, of bytes by part one after another, and a dashed line at what a
    device has.

    Parts of the same name have the same colour: blue for state, brown for the named activations in
    the order in which a block makes them, grey for the rest.

    Args:
      bars: the bytes of each part, by the label of its bar.
      has: the bytes that a device has; 0 = no line.
    """
    largest = max(sum(parts.values()) for parts in bars.values())
    near = has <= _NEAR * largest
    if near:
        largest = max(largest, has)
    letters = next(word for word, size in _UNITS.items() if largest >= size)
    unit = _UNITS[letters]
    names = _drawn_names(bars, _SEEN * largest)
    height = max(1.2 + 0.45 * len(bars), 0.9 + 0.21 * len(names))
    figure = Figure(figsize=(10, height), dpi=120, layout="constrained")
    axes = figure.subplots()
    ends = _draw_parts(axes, bars, names, unit, largest)
    for place, (label, parts) in enumerate(bars.items()):
        total = sum(parts.values()) / unit
        axes.text(ends[label], place, f" {total:.3g}", va="center", fontsize=9)
    if has:
        _draw_limit(axes, has / unit, letters, near)
    axes.invert_yaxis()
    axes.set(xlabel=f"{letters} of one device", xlim=(0, 1.1 * largest / unit))
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure


def _drawn_names(bars: Bars, least: float) -> list[str]:
    """List the parts with more bytes than `least` in some bar: state, activations, then the
    others.
    """
    others = [name for parts in bars.values() for name in parts]
    order = dict.fromkeys([*_STATE, *NAMES, "no name", *others])
    return [name for name in order if any(parts.get(name, 0) > least for parts in bars.values())]


def _colors(names: Sequence[str]) -> dict[str, Any]:
    """Choose the colour of each part."""
    browns = matplotlib.colormaps["YlOrBr"](np.linspace(0.1, 0.95, len(NAMES)))
    known = dict(zip(NAMES, browns, strict=True)) | _STATE | {"no name": _NO_NAME}
    return {name: known.get(name, _REST) for name in names}


def _draw_parts(
    axes: Axes, bars: Bars, names: Sequence[str], unit: int, largest: float
) -> dict[str, float]:
    """Draw the parts of all bars one after another, and return where each bar ends, by label."""
    colors = _colors(names)
    ends = dict.fromkeys(bars, 0.0)
    for name in names:
        sizes = [parts.get(name, 0) / unit for parts in bars.values()]
        drawn = axes.barh(
            [*bars],
            sizes,
            0.7,
            [*ends.values()],
            color=colors[name],
            edgecolor="white",
            label=name,
        )
        dark = sum(to_rgb(colors[name])) < 1.4
        has_room = [size * unit > 0.013 * len(name) * largest for size in sizes]
        axes.bar_label(
            drawn,
            [name if room else "" for room in has_room],
            label_type="center",
            fontsize=7,
            color="white" if dark else "black",
        )
        ends = {label: end + size for (label, end), size in zip(ends.items(), sizes, strict=True)}
    return ends


def _draw_limit(axes: Axes, has: float, letters: str, near: bool) -> None:
    """Draw a line at what a device has, or say that it is far to the right of all bars, where it
    would leave these no room.
    """
    says = f"a device has {has:.3g} {letters}"
    if near:
        axes.axvline(has, color=_LIMIT, linestyle="--", label=says)
        return
    axes.annotate(
        f"{says}, far to the right",
        (1, 1),
        xycoords="axes fraction",
        ha="right",
        va="bottom",
        color=_LIMIT,
        fontsize=9,
    )
