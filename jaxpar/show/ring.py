"""The picture of a ring that splits the sequence: which device computes what in which step, and how
evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from jaxpar.base.errors import UserError
from jaxpar.base.layout.sharding import Layout
from jaxpar.parallel.zigzag import chunk_order
from jaxpar.show.shards import DEVICES


def ring_figure(layout: Layout) -> Figure:
    """Draw which device computes which part of causal attention in which step of a ring that splits
    the sequence.

    A cell is a chunk of queries (down) with a chunk of keys (across), a colour is a device, and a
    number the hops that the keys have made. The bars below are each device's work in each step, in
    pairs of chunks; a pair on the diagonal is half of one. On the left each device has consecutive
    chunks, on the right those of `chunk_order`.

    Args:
      layout: splits `attention_seq` over the devices of the ring.

    Raises:
      UserError: the layout splits the sequence over one device, or over more than eight.
    """
    n = layout.size("attention_seq")
    if not 1 < n <= len(DEVICES):
        raise UserError(
            f"a ring is drawn for 2 to {len(DEVICES)} devices, found {n}: try context=4"
        )
    orders = {"consecutive chunks": list(range(2 * n)), "zigzag": chunk_order(layout, "ring")}
    figure = Figure(figsize=(10.5, 6.6), dpi=110, layout="constrained")
    grids, charts = figure.subplots(2, 2, height_ratios=[2.6, 1], sharey="row")
    for (name, order), grid, chart in zip(orders.items(), grids, charts, strict=True):
        work = _draw_pairs(grid, order)
        _draw_work(chart, work)
        longest = work.max(axis=1).sum()
        grid.set_title(
            f"{name}: steps last {longest:g} pairs, a device works on {work.sum() / n:g}",
            fontsize=11,
        )
        for axes in (grid, chart):
            axes.tick_params(length=0)
            axes.spines[["top", "right"]].set_visible(False)
    grids[0].set_ylabel("chunk of queries")
    charts[0].set_ylabel("pairs of chunks")
    handles = [
        Patch(color=color, label=f"device {device}") for device, color in enumerate(DEVICES[:n])
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=n, frameon=False)
    return figure


def _draw_pairs(grid: Axes, order: Sequence[int]) -> np.ndarray:
    """Draw every pair of chunks that sees one another, in the colour of its device.

    Args:
      order: the chunks in the order of the devices, two each.

    Returns:
      The pairs that each device works on in each step, [step, device].
    """
    chunks = len(order)
    n = chunks // 2
    owner = {chunk: place // 2 for place, chunk in enumerate(order)}
    work = np.zeros((n, n))
    for q in range(chunks):
        for k in range(q + 1):
            hops = (owner[q] - owner[k]) % n
            work[hops, owner[q]] += 1 if k < q else 0.5
            cell = Rectangle((k, q), 1, 1, facecolor=DEVICES[owner[q]], edgecolor="white")
            grid.add_patch(cell)
            grid.text(
                k + 0.5, q + 0.5, str(hops), ha="center", va="center", fontsize=min(11, 88 / n)
            )
    grid.set(xlim=(0, chunks), ylim=(chunks, 0), aspect="equal", xlabel="chunk of keys")
    for axis in (grid.xaxis, grid.yaxis):
        axis.set_ticks(np.arange(chunks) + 0.5, labels=map(str, range(chunks)))
    return work


def _draw_work(chart: Axes, work: np.ndarray) -> None:
    """Draw the work of each device in each step as bars beside each other."""
    n = len(work)
    for device in range(n):
        chart.bar(
            np.arange(n) + (device + 0.5) / n * 0.8 - 0.4,
            work[:, device],
            0.8 / n,
            color=DEVICES[device],
        )
    chart.set(xlabel="step of the ring = hops of the keys", xticks=range(n))
