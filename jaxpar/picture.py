"""Pictures: a run's loss curve, and how arrays lie on the mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jax.sharding import NamedSharding
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from jaxpar.sharding import Placement, Plan

_TRAIN, _VAL, _REFERENCE = "#4477aa", "#cc3311", "#777777"


def loss_figure(rows: Sequence[dict[str, Any]], title: str, references: dict[str, float] | None = None) -> Figure:
    """Training and validation loss by step.

    Args:
      rows: lines of `metrics.jsonl`.
      title: of the figure.
      references: horizontal lines by label, such as the text's unigram entropy (nats a token).
    """
    figure = Figure(figsize=(7.5, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    for key, label, color, marker in (("loss", "train", _TRAIN, None), ("val_loss", "validation", _VAL, "o")):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            line = axes.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=4, linewidth=1.3)[0]
            line.set_label(f"{label} (last {points[-1][1]:.3f})")
    for label, value in (references or {}).items():
        axes.axhline(value, color=_REFERENCE, linestyle="--", linewidth=1, label=f"{label} ({value:.3f})")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG, or what else the path's suffix says, whole or not at all; an SVG is the same each time."""
    partial, form = path.with_suffix(".partial"), path.suffix.removeprefix(".")
    if form == "svg":
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxpar"}):  # text stays text
            figure.savefig(partial, format=form, metadata={"Date": None})
    else:
        figure.savefig(partial, format="png")
    partial.replace(path)


def mesh_figure(placements: Sequence[Placement], plan: Plan, title: str, most: int = 6) -> Figure:
    """How the largest arrays lie on the mesh: each a rectangle cut into shards, coloured by the device that holds it.

    Dims are flattened to the two that are split (or the last two); a shard that several devices hold lists them
    (where many shards leave no room: the first of them and a plus).
    """
    largest = sorted(placements, key=lambda row: -math.prod(row.shape))[:most]
    columns = min(3, len(largest))
    lines = -(-len(largest) // columns)
    figure = Figure(figsize=(4.3 * columns, 3.4 * lines + 0.5), dpi=110, layout="constrained")
    figure.suptitle(title)
    grid = np.atleast_1d(figure.subplots(lines, columns)).ravel()
    for axes, row in zip(grid, largest, strict=False):
        _draw_array(axes, row, plan)
    for axes in grid[len(largest) :]:
        axes.set_visible(False)
    return figure


def _draw_array(axes: Any, row: Placement, plan: Plan) -> None:
    """One array as a grid of shards."""
    sharding = NamedSharding(plan.mesh, row.spec)
    ids = {device: i for i, device in enumerate(plan.mesh.devices.ravel())}
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, index in sharding.devices_indices_map(row.shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, row.shape, strict=True))
        holders.setdefault(bounds, []).append(ids[device])
    split = [d for d in range(len(row.shape)) if d < len(row.spec) and row.spec[d] is not None]
    dims = ([*split, *(d for d in reversed(range(len(row.shape))) if d not in split), None, None])[:2]
    dims = sorted(dims, key=lambda d: -1 if d is None else d)
    colors = matplotlib.colormaps["tab20" if len(ids) <= 20 else "turbo"]
    for bounds, devices in holders.items():
        (top, bottom), (left, right) = ((0, 1) if d is None else bounds[d] for d in dims)
        tint = colors(devices[0] % 20) if len(ids) <= 20 else colors(devices[0] / len(ids))
        axes.add_patch(
            Rectangle((left, top), right - left, bottom - top, facecolor=tint, edgecolor="white", alpha=0.75)
        )
        middle = (left + right) / 2, (top + bottom) / 2
        if len(holders) <= 16:
            axes.text(*middle, _device_list(devices), ha="center", va="center", fontsize=8)
        elif len(holders) <= 256:  # room for a number only
            more = "+" if len(devices) > 1 else ""
            axes.text(*middle, f"{min(devices)}{more}", ha="center", va="center", fontsize=6)
    rows, cols = (1 if d is None else row.shape[d] for d in dims)
    axes.set(xlim=(0, cols), ylim=(rows, 0), xticks=[0, cols], yticks=[0, rows])
    axes.set_xlabel(_dim_label(row, dims[1]), fontsize=9)
    axes.set_ylabel(_dim_label(row, dims[0]), fontsize=9)
    axes.set_title(f"{row.name}\n{tuple(row.shape)}  {row.spec}", fontsize=9)


def _dim_label(row: Placement, dim: int | None) -> str:
    if dim is None:
        return ""
    entry = row.spec[dim] if dim < len(row.spec) else None
    over = "" if entry is None else " over " + (entry if isinstance(entry, str) else ", ".join(entry))
    return f"{row.axes[dim] or 'dim ' + str(dim)}{over}"


def _device_list(devices: list[int]) -> str:
    shown = ", ".join(map(str, sorted(devices)[:8]))
    return f"device{'s' if len(devices) > 1 else ''} {shown}" + (" ..." if len(devices) > 8 else "")
