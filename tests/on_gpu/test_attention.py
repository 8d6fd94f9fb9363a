"""Attention's speed: what is counted, what is timed, what is said."""

from __future__ import annotations

import numpy as np
import pytest
from on_gpu.attention import MASKS, attention_rows, visible_places

from jaxpar.kernels.masks import Causal, Full, Tiles, bigbird, dense


def test_places_are_those_of_tiles_that_are_not_empty() -> None:
    assert visible_places(Full(), 3, 1024) == 3 * 1024 * 1024
    assert visible_places(Causal(), 2, 1024) == 2 * 128 * 128 * 36
    assert visible_places(Full(), 1, 200) == 200 * 200
    mask = bigbird(2048, 3, 1, 2, 0, 128)
    assert visible_places(mask, 1, 2048) == np.sum(dense(mask, Tiles(2048, 2048, 1, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_what_serves_is_timed_and_what_does_not_is_said(mask: str) -> None:
    said: list[str] = []
    rows = attention_rows(
        mask,
        64,
        16,
        ("splash", "chunked", "reference"),
        128,
        2,
        1,
        said.append,
    )
    assert said == ["not splash: on cpu"]
    assert [row["implementation"] for row in rows] == ["chunked", "reference"]
    for row in rows:
        ways = [
            float(row[f"{way}, ms"] or 0) * float(row[f"{way}, TFLOP/s"] or 0)
            for way in ("forward", "both")
        ]
        assert ways[0] > 0 and ways[1] == pytest.approx(3.5 * ways[0])
