"""A picture of masks shows which places are seen, and which tiles are empty, partial or full."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxpar.kernels.masks import EMPTY, Mask, Tiles, dense, tile_states

_COLORS = ("#f4f4f4", "#9ecae1", "#3f7fb5")
_SEEN = "#1b3a57"


def mask_figure(masks: Sequence[Mask], tiles: Tiles, columns: int = 4) -> Figure:
    """Draw a panel for each mask: its empty, partial and full tiles, and dots on the places seen in partial tiles.

    If a mask has ids, only those of the first sequence are drawn.

    Args:
      masks: the masks to draw.
      tiles: the tiles into which queries and keys are cut.
      columns: the most panels in a row.
    """
    columns = min(columns, len(masks))
    rows = -(-len(masks) // columns)
    figure = Figure(figsize=(2.7 * columns, 2.9 * rows + 0.35), dpi=120, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, mask in zip(panels, masks, strict=False):
        states, seen = np.asarray(tile_states(mask, tiles)), np.asarray(dense(mask, tiles))
        states, seen = (x[0] if x.ndim == 3 else x for x in (states, seen))
        extent = (0, tiles.shape[1] * tiles.block_k, tiles.shape[0] * tiles.block_q, 0)
        axes.imshow(states, cmap=ListedColormap(_COLORS), vmin=0, vmax=2, extent=extent, interpolation="nearest")
        i, j = np.nonzero(seen)
        inside = states[i // tiles.block_q, j // tiles.block_k] == 1
        axes.scatter(j[inside] + 0.5, i[inside] + 0.5, s=(90 / max(seen.shape)) ** 2, c=_SEEN, marker="s", linewidths=0)
        axes.set_xticks(np.arange(0, tiles.T + 1, tiles.block_k), labels=[])
        axes.set_yticks(np.arange(0, tiles.S + 1, tiles.block_q), labels=[])
        axes.grid(color="white", linewidth=0.8)
        axes.tick_params(length=0)
        axes.set_xlim(0, tiles.T)
        axes.set_ylim(tiles.S, 0)
        visited = np.mean(states != EMPTY)
        axes.set_title(f"{textwrap.fill(str(mask), 38)}\n{visited:.0%} of tiles", fontsize=7)
        axes.spines[:].set_visible(False)
    for axes in panels[len(masks) :]:
        axes.set_visible(False)
    labels = "empty", "partial", "full"
    kinds = [Patch(color=color, label=label) for color, label in zip(_COLORS, labels, strict=True)]
    figure.legend(handles=kinds, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure
