"""A table of the tile sizes of the Triton kernels by chip, head_dim and dtype."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


class Tile(NamedTuple):
    """One kernel's queries and keys in a tile, warps in a program, and stages of its software pipeline."""

    block_q: int
    block_k: int
    warps: int = 4
    stages: int = 2


class Sizes(NamedTuple):
    """The tiles of the three kernels."""

    forward: Tile
    dq: Tile
    dkv: Tile


def _row(*sizes: tuple[int, int, int, int]) -> Sizes:
    return Sizes(*(Tile(*size) for size in sizes))


# The forward's sizes start from the defaults of PyTorch's FlexAttention, which were measured. All were compiled for
# their chip: they fit its shared memory (227 KB a block on an H100, 163 KB on an A100, 99 KB on smaller chips), and
# of the larger tiles tried they are the ones whose registers spill hardly or not at all. float32 is multiplied outside
# the tensor cores, so it has the same sizes on all chips.
_FLOAT32 = {
    64: _row((32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
    128: _row((32, 32, 4, 2), (32, 32, 4, 2), (16, 32, 4, 2)),
    256: _row((32, 16, 4, 2), (16, 16, 4, 2), (16, 16, 4, 2)),
}
_BFLOAT16 = {
    "hopper": {
        64: _row((128, 128, 4, 3), (128, 64, 8, 2), (64, 128, 8, 2)),
        128: _row((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 8, 2)),
        256: _row((64, 32, 4, 3), (64, 64, 8, 2), (32, 64, 8, 2)),
    },
    "ampere": {
        64: _row((128, 64, 4, 3), (128, 64, 8, 2), (64, 128, 8, 2)),
        128: _row((128, 64, 8, 3), (64, 64, 4, 2), (128, 64, 8, 2)),
        256: _row((64, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2)),
    },
    "small": {
        64: _row((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3)),
        128: _row((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2)),
        256: _row((32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
    },
}
_KINDS = {"H100": "hopper", "H200": "hopper", "GH200": "hopper", "B200": "hopper", "A100": "ampere"}
"""Parts of a `device_kind`, and the family of chips that each one names."""


def sizes_for(h: int, dtype: DTypeLike, chip: str) -> Sizes:
    """The sizes for a head_dim `h` and a chip, which is given by its `device_kind`."""
    family = next((family for part, family in _KINDS.items() if part in chip), "small")
    width = next(width for width in (64, 128, 256) if h <= width)  # head_dims of one row take as much room
    return (_FLOAT32 if jnp.dtype(dtype) == jnp.float32 else _BFLOAT16[family])[width]


def sizes_here(h: int, dtype: DTypeLike) -> Sizes:
    """The sizes for the devices of the mesh that a function is traced for; without a mesh, for JAX's own devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return sizes_for(h, dtype, device.device_kind if device else jax.devices()[0].device_kind)
