"""The picture of attention masks: which tiles of queries and keys are empty, partial and full."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from jaxpar.base.config import ModelConfig
from jaxpar.kernels.masks import EMPTY, PARTIAL, Mask, Tiles, dense, tile_states
from jaxpar.models.masks import layer_masks

_COLORS = {"empty": "#f1f1f1", "partial": "#9ecae1", "full": "#3f7fb5"}
_SEEN = "#1b3a57"
_COLUMNS = 3
_MOST_TILES = 64
_MOST_DOTS = 256
"""The most tokens for which a dot stands on each place that is seen in a partial tile."""
_MOST_LAYERS = 6


def mask_figure(masks: Mapping[str, Mask], tiles: Tiles) -> Figure:
    """Draw a panel for each mask: its empty, partial and full tiles.

    Of a mask with ids, the first sequence is drawn.

    Args:
      masks: the masks by their names.
      tiles: the tiles into which queries and keys are cut.
    """
    columns = min(_COLUMNS, len(masks))
    lines = -(-len(masks) // columns)
    figure = Figure(
        figsize=(max(4.2 * columns, 5.0), 4.6 * lines + 0.5), dpi=110, layout="constrained"
    )
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes, (name, mask) in zip(panels, masks.items(), strict=False):
        _draw_mask(axes, name, mask, tiles)
    for axes in panels[len(masks) :]:
        axes.set_visible(False)
    kinds = [Patch(color=color, label=kind) for kind, color in _COLORS.items()]
    if tiles.S <= _MOST_DOTS:
        kinds.append(Patch(color=_SEEN, label="seen, in a partial tile"))
    figure.legend(
        handles=kinds,
        title=f"tiles of {tiles.block_q} queries x {tiles.block_k} keys",
        loc="outside lower center",
        ncols=len(kinds),
        frameon=False,
        fontsize=10,
    )
    return figure


def masks_of_layers(config: ModelConfig) -> dict[str, Mask]:
    """List the different masks of a model's layers, each under a name in two lines: `window(1024)`
    and `layers 0, 2, 4`, or `causal` and `all layers` where there is one.
    """
    kinds = layer_masks(config)
    layers_of = dict[Mask, list[int]]()
    words = dict[Mask, str]()
    for layer in range(config.layers):
        kind = layer % len(kinds)
        layers_of.setdefault(kinds[kind], []).append(layer)
        words.setdefault(kinds[kind], config.masks[kind])
    return {
        f"{words[mask]}\n{_layers_text(layers, config.layers)}": mask
        for mask, layers in layers_of.items()
    }


def _layers_text(layers: Sequence[int], count: int) -> str:
    if len(layers) == count:
        return "all layers"
    shown = [str(layer) for layer in layers[:_MOST_LAYERS]]
    more = ["..."] if len(layers) > _MOST_LAYERS else []
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join([*shown, *more])}"


def tiles_to_draw(length: int) -> Tiles:
    """Choose square tiles of a sequence, at most 64 along each side, that are large enough to be
    seen: of 128 tokens as the kernels have them, smaller in a short sequence, larger in a long one.

    Args:
      length: the tokens of the sequence.
    """
    block = 128
    while length // block < 8 and block > 1:
        block //= 2
    while -(-length // block) > _MOST_TILES:
        block *= 2
    return Tiles(S=length, T=length, block_q=block, block_k=block)


def _draw_mask(axes: Axes, name: str, mask: Mask, tiles: Tiles) -> None:
    states = _of_the_first(np.asarray(tile_states(mask, tiles)))
    extent = (
        0,
        tiles.shape[1] * tiles.block_k,
        tiles.shape[0] * tiles.block_q,
        0,
    )
    colors = ListedColormap(list(_COLORS.values()))
    axes.imshow(
        states,
        cmap=colors,
        vmin=0,
        vmax=2,
        extent=extent,
        interpolation="nearest",
    )
    if tiles.S <= _MOST_DOTS:
        seen = _of_the_first(np.asarray(dense(mask, tiles)))
        i, j = np.nonzero(seen)
        partial = states[i // tiles.block_q, j // tiles.block_k] == PARTIAL
        size = (150 / tiles.S) ** 2
        axes.scatter(
            j[partial] + 0.5,
            i[partial] + 0.5,
            s=size,
            c=_SEEN,
            marker="s",
            linewidths=0,
        )
    for lines, count, block in (
        (axes.axvline, tiles.shape[1], tiles.block_k),
        (axes.axhline, tiles.shape[0], tiles.block_q),
    ):
        for place in range(1, count):
            lines(place * block, color="white", linewidth=0.4)
    axes.set(
        xlim=(0, tiles.T),
        ylim=(tiles.S, 0),
        xlabel="keys",
        ylabel="queries",
    )
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    visited = np.mean(states != EMPTY)
    words = "\n".join(textwrap.fill(line, 46) for line in name.split("\n"))
    axes.set_title(f"{words}\n{visited:.0%} of the tiles are computed", fontsize=10)
    axes.spines[:].set_visible(False)


def _of_the_first(places: np.ndarray) -> np.ndarray:
    """Take the first sequence of a mask that has a row for each."""
    return places[0] if places.ndim == 3 else places
