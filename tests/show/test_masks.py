"""The picture of masks: a panel each, coloured by the states of its tiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxpar.kernels.masks import BigBird, Causal, Segments, Tiles, Window, tile_states
from jaxpar.show.figures import save_figure
from jaxpar.show.masks import mask_figure

pytestmark = pytest.mark.quick


def test_a_panel_shows_the_states_of_its_tiles(tmp_path: Path) -> None:
    ids = np.repeat([[0, 1]], 24, axis=1)
    masks = [Causal() & Window(9), BigBird(48, block=8), Causal() & Segments(ids, ids), Causal(), Window(3, 3)]
    tiles = Tiles(48, 40, 8, 16)
    masks[2] = Causal() & Segments(ids, ids[:, :40])
    figure = mask_figure(masks, tiles, columns=3)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert len(panels) == len(masks)
    for axes, mask in zip(panels, masks, strict=True):
        states = np.asarray(tile_states(mask, tiles))
        np.testing.assert_array_equal(axes.images[0].get_array(), states if states.ndim == 2 else states[0])
    assert "56% of tiles" in panels[0].get_title()
    save_figure(figure, tmp_path / "masks.png")
    assert (tmp_path / "masks.png").stat().st_size > 10_000
