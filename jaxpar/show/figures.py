"""Pictures of losses, of a run's and of a sweep's, of how arrays lie on the mesh, and of where a
device's bytes are.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from jax.sharding import NamedSharding
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from jaxpar.base.activation_names import NAMES
from jaxpar.base.console import check_folders
from jaxpar.base.errors import UserError, visible
from jaxpar.base.runtime import replacing
from jaxpar.base.sharding import Layout, Placement
from jaxpar.parallel.token_order import chunk_order

_Numbers = Mapping[str, float]
_TRAIN = "#4477aa"
_VAL = "#cc3311"
_REFERENCE = "#777777"
# Paul Tol's light scheme, which all kinds of colour vision tell apart under black letters.
_DEVICES = "#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#aaaa00"
_STATE = {
    "parameters": "#1f4e8c",
    "optimizer": "#5b8fc9",
    "gradients": "#a9cbe8",
    "activations": "#e6842a",
}
_NEAR = 4
"""A line at what a device has is drawn up to so many times the longest bar."""
# an array's height and width in points; a letter's width by its size
_ROOM = (185, 235)
_LETTER = 0.54
# of the letters of a shard that names all its devices, and of one that names the first
_SIZES = 10, 6


def loss_figure(
    rows: Sequence[_Numbers],
    title: str,
    references: _Numbers | None = None,
) -> Figure:
    """Draw the training and validation loss by step.

    `rows` are the lines of `metrics.jsonl`, and `references` horizontal lines by label, such as the
    text's unigram entropy (nats a token).
    """
    figure = Figure(figsize=(7.5, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    for key, label, color, marker in (
        ("loss", "train", _TRAIN, None),
        ("val_loss", "validation", _VAL, "o"),
    ):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            dot = "." if len(points) < 5 else marker  # a line through one point cannot be seen
            (line,) = axes.plot(
                *zip(*points, strict=True),
                color=color,
                marker=dot,
                linewidth=1.3,
            )
            line.set(label=f"{label} (last {points[-1][1]:.3f})", markersize=4 if dot == "o" else 8)
    for label, value in (references or {}).items():
        axes.axhline(
            value, color=_REFERENCE, linestyle="--", linewidth=1, label=f"{label} ({value:.3f})"
        )
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    return figure


def sweep_figure(rows: Mapping[str, Sequence[_Numbers]], rates: Mapping[str, float]) -> Figure:
    """Draw the loss of each run by step, of its lines of `metrics.jsonl`, and beside it its tokens
    a second.
    """
    figure = Figure(
        figsize=(10, 2.4 + 0.35 * max(len(rates), 5)),
        dpi=120,
        layout="constrained",
    )
    curves, bars = figure.subplots(1, 2, width_ratios=(4, 3))
    for place, (name, rate) in enumerate(rates.items()):
        # the first curves are widest: one that later ones cover is seen
        behind = 1 - place / max(len(rates) - 1, 1)
        color = matplotlib.colormaps["viridis"](0.9 - 0.9 * behind)
        points = [(row["step"], row["loss"]) for row in rows[name] if "loss" in row]
        curves.plot(
            *zip(*points, strict=True),
            color=color,
            linewidth=1.2 + 4 * behind,
        )
        bars.bar_label(
            bars.barh(place, rate, color=color, height=0.6),
            [f" {rate:,.0f}"],
        )
    curves.set(xlabel="step", ylabel="training loss (nats a token)")
    curves.grid(alpha=0.25)
    names = [name.replace(" ", "\n") for name in rates]
    bars.set(
        xlabel="tokens a second",
        yticks=range(len(names)),
        yticklabels=names,
        xticks=[],
    )
    bars.margins(x=0.2)
    bars.invert_yaxis()
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG, or an SVG if the path ends so, whole or not at all; an SVG has the same bytes
    each time.

    Raises:
      UserError: the file cannot be written, or its folder is not there.
    """
    check_folders(path)
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)  # a name may have two dollars in it
        text.set_text(visible(text.get_text()))
    svg = path.suffix == ".svg"
    try:
        with (
            replacing(path) as file,
            matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxpar"}),
        ):
            figure.savefig(
                file, format="svg" if svg else "png", metadata={"Date": None} if svg else None
            )
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def mesh_figure(
    placements: Sequence[Placement], layout: Layout, title: str, most: int = 6
) -> Figure:
    """Draw how the largest arrays lie on the mesh, as rectangles of shards coloured by the devices
    that hold them.

    Dims are flattened to the two that are split (or the last two). If more are split, several share
    an axis, each unrolled inside every part of the one before it, with thick lines between the
    parts. A shard that several devices hold lists them all, or if there is no room the first of
    them and a plus, or nothing.
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


def memory_figure(bars: Mapping[str, Mapping[str, int]], title: str, has: int = 0) -> Figure:
    """Draw a bar for each label, of bytes by part one after another, and a dashed line at what a
    device has (0 = no line).

    Parts of the same name have the same colour: blue for state, brown for the named activations in
    the order in which a block makes them, grey for the rest.
    """
    largest = max(sum(parts.values()) for parts in bars.values())
    near = has <= _NEAR * largest
    if near:
        largest = max(largest, has)
    unit, letters = next(
        (size, word) for size, word in ((2**30, "GiB"), (2**20, "MiB"), (1, "B")) if largest >= size
    )
    order = dict.fromkeys(
        (
            *_STATE,
            *NAMES,
            "no name",
            *(name for parts in bars.values() for name in parts),
        )
    )
    names = [
        name for name in order if any(parts.get(name, 0) > largest / 500 for parts in bars.values())
    ]
    browns = matplotlib.colormaps["YlOrBr"](np.linspace(0.1, 0.95, len(NAMES)))
    colors = (
        dict.fromkeys(names, "#b3b3b3")
        | dict(zip(NAMES, browns, strict=True))
        | _STATE
        | {"no name": "#d9d9d9"}
    )
    height = max(1.2 + 0.45 * len(bars), 0.9 + 0.21 * len(names))
    figure = Figure(figsize=(10, height), dpi=120, layout="constrained")
    axes = figure.subplots()
    left = dict.fromkeys(bars, 0.0)
    for name in names:
        sizes = [parts.get(name, 0) / unit for parts in bars.values()]
        drawn = axes.barh(
            [*bars], sizes, 0.7, [*left.values()], color=colors[name], edgecolor="white", label=name
        )
        if sum(to_rgb(colors[name])) < 1.4:
            ink = "white"
        else:
            ink = "black"
        inside = [name if size * unit > 0.013 * len(name) * largest else "" for size in sizes]
        axes.bar_label(drawn, inside, label_type="center", fontsize=7, color=ink)
        left = {label: at + size for (label, at), size in zip(left.items(), sizes, strict=True)}
    for at, (label, parts) in enumerate(bars.items()):
        axes.text(left[label], at, f" {sum(parts.values()) / unit:.3g}", va="center", fontsize=9)
    says = f"a device has {has / unit:.3g} {letters}"
    if has and near:
        axes.axvline(has / unit, color=_VAL, linestyle="--", label=says)
    elif has:
        # a line far to the right would leave the bars no room
        axes.annotate(
            f"{says}, far to the right",
            (1, 1),
            xycoords="axes fraction",
            ha="right",
            va="bottom",
            color=_VAL,
            fontsize=9,
        )
    axes.invert_yaxis()
    axes.set(xlabel=f"{letters} of one device", xlim=(0, 1.1 * largest / unit))
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure


def ring_figure(layout: Layout) -> Figure:
    """Draw which device computes which part of causal attention in which step of a ring that splits
    the sequence.

    A cell is a chunk of queries (down) with a chunk of keys (across), a colour is a device, and a
    number the hops that the keys have made. The bars below are each device's work in each step, in
    pairs of chunks; a pair on the diagonal is half of one. On the left each device has consecutive
    chunks, on the right those of `chunk_order`.

    Raises:
      UserError: the layout splits the sequence over one device, or over more than eight.
    """
    n = layout.size("attention_seq")
    if not 1 < n <= len(_DEVICES):
        raise UserError(
            f"a ring is drawn for 2 to {len(_DEVICES)} devices, found {n}: try context=4"
        )
    orders = {"consecutive chunks": list(range(2 * n)), "zigzag": chunk_order(layout, "ring")}
    figure = Figure(figsize=(10.5, 6.6), dpi=110, layout="constrained")
    grids, charts = figure.subplots(2, 2, height_ratios=[2.6, 1], sharey="row")
    for (name, order), grid, chart in zip(
        orders.items(),
        grids,
        charts,
        strict=True,
    ):
        owner = {chunk: place // 2 for place, chunk in enumerate(order)}
        work = np.zeros((n, n))
        for q, k in zip(
            *(index.tolist() for index in np.tril_indices(2 * n)),
            strict=True,
        ):
            hops = (owner[q] - owner[k]) % n
            work[hops, owner[q]] += 1 if k < q else 0.5
            grid.add_patch(
                Rectangle(
                    (k, q),
                    1,
                    1,
                    facecolor=_DEVICES[owner[q]],
                    edgecolor="white",
                )
            )
            grid.text(
                k + 0.5, q + 0.5, str(hops), ha="center", va="center", fontsize=min(11, 88 / n)
            )
        grid.set(
            xlim=(0, 2 * n),
            ylim=(2 * n, 0),
            aspect="equal",
            xlabel="chunk of keys",
        )
        for axis in (grid.xaxis, grid.yaxis):
            axis.set_ticks(
                np.arange(2 * n) + 0.5,
                labels=map(str, range(2 * n)),
            )
        for device in range(n):
            chart.bar(
                np.arange(n) + (device + 0.5) / n * 0.8 - 0.4,
                work[:, device],
                0.8 / n,
                color=_DEVICES[device],
            )
        longest = work.max(axis=1).sum()
        grid.set_title(
            f"{name}: steps last {longest:g} pairs, a device works on {work.sum() / n:g}",
            fontsize=11,
        )
        chart.set(xlabel="step of the ring = hops of the keys", xticks=range(n))
        for axes in (grid, chart):
            axes.tick_params(length=0)
            axes.spines[["top", "right"]].set_visible(False)
    grids[0].set_ylabel("chunk of queries")
    charts[0].set_ylabel("pairs of chunks")
    handles = [
        Patch(color=color, label=f"device {device}") for device, color in enumerate(_DEVICES[:n])
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=n, frameon=False)
    return figure


def draw_array(axes: Axes, row: Placement, layout: Layout) -> None:
    """Draw one array as a grid of shards, coloured by the first of the devices that hold each."""
    sharding = NamedSharding(layout.mesh, row.spec)
    ids = {device: i for i, device in enumerate(layout.mesh.devices.ravel())}
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, index in sharding.devices_indices_map(row.shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, row.shape, strict=True))
        holders.setdefault(bounds, []).append(ids[device])
    split = [d for d in range(len(row.shape)) if d < len(row.spec) and row.spec[d] is not None]
    whole = [d for d in reversed(range(len(row.shape))) if d not in split]
    dims = sorted([*split, *whole][: max(2, len(split))])
    half = max(1, len(dims) // 2)
    # the dims along y and along x, with the outer ones first
    down = dims[:-half]
    across = dims[-half:]
    spans = [
        (_span(bounds, row.shape, down), _span(bounds, row.shape, across)) for bounds in holders
    ]
    high, wide = (
        points / len(set(cuts))
        for points, cuts in zip(_ROOM, zip(*spans, strict=True), strict=True)
    )
    texts, size = _labels(list(holders.values()), high, wide)
    edge = min(1, 0.4 * high, 0.4 * wide)
    for devices, ((top, bottom), (left, right)), text in zip(
        holders.values(), spans, texts, strict=True
    ):
        few = len(ids) <= len(_DEVICES)
        place = devices[0]
        if few:
            tint = _DEVICES[place]
        else:
            tint = matplotlib.colormaps["turbo"](place / len(ids), alpha=0.75)
        shard = Rectangle(
            (left, top),
            right - left,
            bottom - top,
            facecolor=tint,
            edgecolor="white",
            linewidth=edge,
        )
        axes.add_patch(shard)
        if text:
            axes.text(
                (left + right) / 2,
                (top + bottom) / 2,
                text,
                ha="center",
                va="center",
                fontsize=size,
            )
    for axis, dims, line, most in (
        (axes.yaxis, down, axes.axhline, 16),
        (axes.xaxis, across, axes.axvline, 4),
    ):
        ticks = {0, row.shape[dims[0]] if dims else 1}
        for depth in range(1, len(dims)):
            starts = {_span(bounds, row.shape, dims[:depth])[0] for bounds in holders}
            for start in starts - {0}:
                line(start, color="white", linewidth=3 * edge * (len(dims) - depth))
            # the parts of the outermost dim, whose units the axis has
            if depth == 1 and len(starts) <= most:
                ticks |= starts
        axis.set_ticks(sorted(ticks))
        axis.set_label_text(", then ".join(_dim_label(row, dim) for dim in dims), fontsize=10)
    rows, cols = (row.shape[dims[0]] if dims else 1 for dims in (down, across))
    axes.set(xlim=(0, cols), ylim=(rows, 0))
    axes.set_title(f"{row.name}\n{tuple(row.shape)}  {row.spec}", fontsize=10)


def _span(
    bounds: Sequence[tuple[int, int]], shape: Sequence[int], dims: Sequence[int]
) -> tuple[float, float]:
    """The start and end of a shard along an axis of these dims, in units of the first; each is
    inside the last.
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
    """The labels and font size that fit on shards of this size in points: all devices, the first
    one, or nothing.
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
    if dim < len(row.spec):
        entry = row.spec[dim]
    else:
        entry = None
    if entry is None:
        over = ""
    else:
        over = " over " + (entry if isinstance(entry, str) else ", ".join(entry))
    return f"{row.axes[dim] or 'dim ' + str(dim)}{over}"


def _device_list(devices: list[int]) -> str:
    shown = ", ".join(map(str, sorted(devices)[:8]))
    return f"device{'s' if len(devices) > 1 else ''} {shown}" + (" ..." if len(devices) > 8 else "")
