"""Moments in 8 bits: codes stand for values to a step of their roots, with their signs, and zero is for zeros only."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpar.train.moments import block, dequantize, quantize

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("second", "power", "steps", "dtype"), [(False, 2, 127, "int8"), (True, 4, 255, "uint8")])
def test_codes_stand_for_values_to_half_a_step(second: bool, power: int, steps: int, dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((3, 96)) * 10.0 ** rng.integers(-6, 3, (3, 96))).astype(np.float32)
    x, n = np.square(x) if second else x, block(96)
    x[0, :n], x[1, ::5] = 0, 0
    moment = quantize(x, second)
    found = np.asarray(dequantize(moment))
    assert moment.codes.dtype == dtype and moment.scales.shape == (3, 96 // n)
    largest = np.repeat(np.abs(x).reshape(3, -1, n).max(axis=-1), n, axis=-1)
    root = (np.abs(x) / np.maximum(largest, 1e-30)) ** (1 / power)
    # A code is the nearest of `steps` roots; 1e-6 for float32, and for what is too small for a code of its own.
    most = largest * ((root + 0.5 / steps) ** power - root**power + 1e-6)
    assert np.all(np.abs(found - x) <= most)
    assert np.all(found * x >= 0)
    if second:
        assert np.array_equal(found == 0, x == 0)
