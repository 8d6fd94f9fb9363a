"""Pictures of how arrays lie on a mesh: rectangles of shards, coloured by their devices."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import matplotlib
import numpy as np
from jax.sharding import NamedSharding
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from jaxpar.base.layout.placements import Placement
from jaxpar.base.layout.sharding import Layout

DEVICES = "#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#aaaa00"
"""The colours of devices: Paul Tol's light scheme, which all kinds of colour vision tell apart
under black letters.
"""
_ROOM = (185, 235)
"""The height and width of an array, in points."""
_LETTER = 0.54
"""The width of a letter as a share of its size."""
_SIZES = 10, 6
"""The sizes of the letters of a shard that names all its devices, and of one that names the
first.
"""
Color = str | tuple[float, float, float, float]
_Bounds = tuple[tuple[int, int], ...]
"""The start and end of a shard in every dim."""


class _Spans(NamedTuple):
    """The start and end of a shard along y and along x."""

    down: tuple[float, float]
    across: tuple[float, float]


def mesh_figure(
    placements: Sequence[Placement], layout: Layout, title: str, most: int = 6
) -> Figure:
    """Draw how the largest arrays lie on the mesh, as rectangles of shards coloured by the devices
    that hold them.

    Dims are flattened to the two that are split (or the last two). If more are split, several share
    an axis, each unrolled inside every part of the one before it, with thick lines between the
    parts. A shard that several devices hold lists them all, or if there is no room the first of
    them and a plus, or nothing.

    Args:
      placements: the arrays, each with where it lies.
      layout: the layout whose mesh they lie on.
      most: the number of arrays that are drawn.
    """
    largest = sorted(placements, key=lambda row: -math.prod(row.shape))[:most]
    columns = min(3, len(largest))
    lines = -(-len(largest) // columns)
    figure = Figure(
        figsize=(4.3 * columns, 3.4 * lines + 0.5),
        dpi=110,
        layout="constrained",
    )
    figure.suptitle(title)
    grid = np.atleast_1d(figure.subplots(lines, columns)).ravel()
    for axes, row in zip(grid, largest, strict=False):
        draw_array(axes, row, layout)
    for axes in grid[len(largest) :]:
        axes.set_visible(False)
    return figure


def draw_array(axes: Axes, row: Placement, layout: Layout) -> None:
    """Draw one array as a grid of shards, coloured by the first of the devices that hold each.

    Args:
      row: the array, with its shape and its spec.
      layout: the layout whose mesh it lies on.
    """
    ids = {device: i for i, device in enumerate(layout.mesh.devices.ravel())}
    holders = _holders(row, layout, ids)
    down, across = _drawn_dims(row)
    spans = [
        _Spans(_span(bounds, row.shape, down), _span(bounds, row.shape, across))
        for bounds in holders
    ]
    high = _ROOM[0] / len({one.down for one in spans})
    wide = _ROOM[1] / len({one.across for one in spans})
    edge = min(1, 0.4 * high, 0.4 * wide)
    texts, size = _labels(list(holders.values()), high, wide)
    for devices, span, text in zip(holders.values(), spans, texts, strict=True):
        tint = _tint(devices[0], len(ids))
        _draw_shard(axes, span, tint, edge)
        if text:
            _write(axes, span, text, size, _letters_on(tint))
    _draw_axis(axes.yaxis, axes.axhline, row, down, list(holders), edge, most=16)
    _draw_axis(axes.xaxis, axes.axvline, row, across, list(holders), edge, most=4)
    axes.set(xlim=(0, _units(row, across)), ylim=(_units(row, down), 0))
    axes.set_title(f"{row.name}\n{tuple(row.shape)}  {row.spec}", fontsize=10)


def _holders(
    row: Placement, layout: Layout, ids: Mapping[jax.Device, int]
) -> dict[_Bounds, list[int]]:
    """List the numbers of the devices that hold each shard, by its start and end in every dim."""
    sharding = NamedSharding(layout.mesh, row.spec)
    found: dict[_Bounds, list[int]] = {}
    for device, index in sharding.devices_indices_map(row.shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, row.shape, strict=True))
        found.setdefault(bounds, []).append(ids[device])
    return found


def _drawn_dims(row: Placement) -> tuple[list[int], list[int]]:
    """List the dims along y and along x, with the outer ones first: all that are split, two at
    least.
    """
    every = range(len(row.shape))
    split = [dim for dim in every if dim < len(row.spec) and row.spec[dim] is not None]
    whole = [dim for dim in reversed(every) if dim not in split]
    dims = sorted([*split, *whole][: max(2, len(split))])
    half = max(1, len(dims) // 2)
    return dims[:-half], dims[-half:]


def _tint(device: int, devices: int) -> Color:
    """Choose the colour of a device: of few devices each has one that anyone can tell from the
    others.
    """
    if devices <= len(DEVICES):
        return DEVICES[device]
    return matplotlib.colormaps["turbo"](device / devices, alpha=0.75)


def _draw_shard(axes: Axes, span: _Spans, tint: Color, edge: float) -> None:
    top, bottom = span.down
    left, right = span.across
    shard = Rectangle(
        (left, top),
        right - left,
        bottom - top,
        facecolor=tint,
        edgecolor="white",
        linewidth=edge,
    )
    axes.add_patch(shard)


def _letters_on(tint: Color) -> str:
    """Choose a colour of letters that can be read on a tint, as it lies on white paper."""
    *parts, alpha = to_rgba(tint)
    red, green, blue = (1 - alpha * (1 - part) for part in parts)
    luminance = 0.299 * red + 0.587 * green + 0.114 * blue  # ITU-R BT.601
    return "black" if luminance > 0.5 else "white"


def _write(axes: Axes, span: _Spans, text: str, size: int, color: str) -> None:
    """Write a label in the middle of a shard."""
    axes.text(
        sum(span.across) / 2,
        sum(span.down) / 2,
        text,
        ha="center",
        va="center",
        fontsize=size,
        color=color,
    )


def _draw_axis(
    axis: Axis,
    line: Callable[..., object],
    row: Placement,
    dims: Sequence[int],
    shards: Sequence[_Bounds],
    edge: float,
    most: int,
) -> None:
    """Draw the ticks of an axis, its label, and thick lines between the parts of outer dims.

    Args:
      line: draws a line across it.
      dims: the dims along the axis, the outermost first.
      shards: the bounds of every shard.
      edge: the width of a shard's edge in points.
      most: ticks that there is room for.
    """
    ticks = {0.0, float(_units(row, dims))}
    for depth in range(1, len(dims)):
        starts = {_span(bounds, row.shape, dims[:depth])[0] for bounds in shards}
        for start in starts - {0}:
            line(start, color="white", linewidth=3 * edge * (len(dims) - depth))
        # the parts of the outermost dim, whose units the axis has
        if depth == 1 and len(starts) <= most:
            ticks |= starts
    axis.set_ticks(sorted(int(tick) if tick == int(tick) else tick for tick in ticks))
    axis.set_label_text(", then ".join(_dim_label(row, dim) for dim in dims), fontsize=10)


def _units(row: Placement, dims: Sequence[int]) -> int:
    """Return the size of the outermost dim along an axis; 1 where there is none."""
    return row.shape[dims[0]] if dims else 1


def _span(
    bounds: Sequence[tuple[int, int]], shape: Sequence[int], dims: Sequence[int]
) -> tuple[float, float]:
    """Compute the start and end of a shard along an axis of these dims, in units of the first; each
    is inside the last.
    """
    start, stop = bounds[dims[0]] if dims else (0, 1)
    for dim in dims[1:]:
        start, stop = (start + (stop - start) * bound / shape[dim] for bound in bounds[dim])
    return start, stop


def _labels(
    holders: Sequence[list[int]],
    high: float,
    wide: float,
) -> tuple[list[str], int]:
    """Choose the labels and font size that fit on shards of this size in points: all devices, the
    first one, or nothing.
    """
    width = max(1, int(wide / (_LETTER * _SIZES[0])))
    lists = [
        textwrap.fill(_device_list(devices), width, break_long_words=False) for devices in holders
    ]
    firsts = [f"{min(devices)}{'+' if len(devices) > 1 else ''}" for devices in holders]
    for texts, size, most in ((lists, _SIZES[0], 16), (firsts, _SIZES[1], 256)):
        lines = max(text.count("\n") + 1 for text in texts)
        letters = max(len(line) for text in texts for line in text.split("\n"))
        if (
            len(holders) <= most
            and (1.2 * lines - 0.3) * size <= high
            and letters * _LETTER * size <= wide
        ):
            return texts, size
    return [""] * len(holders), size


def _dim_label(row: Placement, dim: int) -> str:
    name = row.axes[dim] or f"dim {dim}"
    entry = row.spec[dim] if dim < len(row.spec) else None
    if entry is None:
        return name
    mesh_axes = [entry] if isinstance(entry, str) else entry
    return f"{name} over {', '.join(mesh_axes)}"


def _device_list(devices: list[int]) -> str:
    shown = ", ".join(map(str, sorted(devices)[:8]))
    if len(devices) == 1:
        return f"device {shown}"
    if len(devices) > 8:
        return f"devices {shown} ..."
    return f"devices {shown}"
