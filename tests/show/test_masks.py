"""The picture of masks: its tiles are those of the mask, by kind of layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.axes import Axes

from jaxpar.base.config import load_config
from jaxpar.kernels.masks import Causal, Tiles, Window, tile_states
from jaxpar.show.masks import mask_figure, masks_of_layers, tiles_to_draw


def drawn(axes: Axes) -> np.ndarray:
    (image,) = axes.images
    return np.asarray(image.get_array())


def test_each_mask_has_its_tiles() -> None:
    tiles = Tiles(S=96, T=96, block_q=16, block_k=16)
    masks = {"all": Causal(), "some": Causal() & Window(20)}
    first, second = mask_figure(masks, tiles).axes
    for axes, (name, mask) in zip((first, second), masks.items(), strict=True):
        np.testing.assert_array_equal(drawn(axes), tile_states(mask, tiles))
        assert axes.get_title().startswith(f"{name}\n")
    assert first.get_title().endswith("58% of the tiles are computed"), "21 of 36"
    (dots,) = first.collections
    # the lower triangle of each tile on the diagonal
    assert len(dots.get_offsets()) == 6 * 16 * 17 // 2


def test_kinds_of_layers_have_a_panel_each() -> None:
    model = load_config("gemma2_9b").model
    names = list(masks_of_layers(replace(model, layers=5)))
    assert names == ["window(4096)\nlayers 0, 2, 4", "causal\nlayers 1, 3"]
    assert next(iter(masks_of_layers(model))).endswith("\nlayers 0, 2, 4, 6, 8, 10, ...")
    assert list(masks_of_layers(load_config("llama3_8b").model)) == ["causal\nall layers"]


def test_equal_masks_are_drawn_once() -> None:
    """Gemma 3 has five local layers before each global one."""
    model = replace(load_config("gemma3_1b").model, layers=12)
    local, whole = masks_of_layers(model)
    assert local.startswith("window(512)") and "\nlayers 0, 1, 2, 3, 4, 6, ..." in local
    assert whole == "causal\nlayers 5, 11"


@pytest.mark.parametrize(("length", "block"), [(12, 1), (128, 16), (8192, 128), (131_072, 2048)])
def test_tiles_can_be_seen(length: int, block: int) -> None:
    tiles = tiles_to_draw(length)
    assert (tiles.block_q, tiles.block_k) == (block, block)
    assert 8 <= tiles.shape[0] <= 64
