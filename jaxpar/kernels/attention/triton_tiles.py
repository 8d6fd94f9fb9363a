"""The sizes of the tiles of the Triton attention kernels, from a chip's file in
`jaxpar.meshes.chips`, and small ones for a GPU that no file names.

A chip's tiles fit its shared memory (227 KB a block on an H100, 163 KB on an A100, 99 KB on an L4).
The tiles of an H100 are the fastest of some that were timed on it. The tiles of other chips were
only compiled for them: of the larger tiles tried they are the ones whose registers spill hardly or
not at all, and the forward's start from the defaults of PyTorch's FlexAttention, which were
measured.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpar.base.compiled_for import device_of_compilation
from jaxpar.base.hardware import CHIPS, AttentionTiles, load_chip
from jaxpar.base.toml import presets

log = logging.getLogger(__name__)

LEAST = 16
"""The fewest entries that a side of a tile may have in Triton's matrix products."""


class Tile(NamedTuple):
    """The size of a tile of one kernel, and how a program runs over it."""

    block_q: int
    """The number of queries in a tile."""
    block_k: int
    """The number of keys in a tile."""
    warps: int = 4
    """The number of warps of a program."""
    stages: int = 2
    """The number of stages of its software pipeline."""


class TileSizes(NamedTuple):
    """The tiles of the three kernels."""

    forward: Tile
    dq: Tile
    dkv: Tile


_FLOAT32 = {
    64: TileSizes(
        Tile(32, 32),
        Tile(32, 32),
        Tile(32, 32),
    ),
    128: TileSizes(
        Tile(32, 32),
        Tile(32, 32),
        Tile(16, 32),
    ),
    256: TileSizes(
        Tile(32, 16),
        Tile(16, 16),
        Tile(16, 16),
    ),
}
"""The tiles of float32, by the head_dim up to which they serve. float32 is multiplied outside the
tensor cores, so they are the same on all chips."""
_SMALL = {
    64: TileSizes(
        Tile(64, 64, stages=3),
        Tile(64, 64),
        Tile(64, 64, stages=3),
    ),
    128: TileSizes(
        Tile(64, 64, stages=3),
        Tile(64, 64),
        Tile(64, 64),
    ),
    256: TileSizes(
        Tile(32, 32),
        Tile(32, 32),
        Tile(32, 32),
    ),
}
"""The tiles of bfloat16 on a GPU that no chip file names: they fit 99 KB of shared memory, as much
as any GPU of compute capability 8.0 or later has for a block."""


def tile_sizes_for(h: int, dtype: DTypeLike, device_kind: str) -> TileSizes:
    """Look up the tiles for a head_dim and a chip.

    Args:
      h: the head_dim, at most 256.
      dtype: the dtype of queries, keys and values.
      device_kind: the text of `jax.Device.device_kind` on the chip. Where no file of
        `jaxpar.meshes.chips` names that GPU, its tiles are small ones, and the log says so once.
    """
    if jnp.dtype(dtype) == jnp.float32:
        by_head_dim = _FLOAT32
    else:
        by_head_dim = _of_chip(device_kind)
    # head_dims up to one row's take as much room
    return next(sizes for most, sizes in sorted(by_head_dim.items()) if h <= most)


def tile_sizes_here(h: int, dtype: DTypeLike) -> TileSizes:
    """Look up the tiles (`tile_sizes_for`) for the devices of the mesh that a function is traced
    for; without a mesh, for a rehearsal's target or JAX's own devices.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device:
        kind = device.device_kind
    else:
        kind = device_of_compilation().kind
    return tile_sizes_for(h, dtype, kind)


@functools.lru_cache(maxsize=64)
def _of_chip(device_kind: str) -> dict[int, TileSizes]:
    """Read a chip's tiles of bfloat16, by the head_dim up to which they serve."""
    tables = [load_chip(name).attention for name in presets(CHIPS)]
    words = set(re.findall(r"\w+", device_kind))
    table = next(
        (table for table in tables if words.intersection(table.gpus)),
        AttentionTiles(),
    )
    if table.bfloat16:
        return {
            row.head_dim: TileSizes(
                Tile(*row.forward),
                Tile(*row.dq),
                Tile(*row.dkv),
            )
            for row in table.bfloat16
        }
    if device_kind != "cpu":  # where kernels are only interpreted
        log.warning(
            "attention on %s: no file of meshes/chips names this GPU under [attention], so its "
            "Triton kernels take small tiles, which fit any GPU, and may be slower than they need "
            "be",
            device_kind,
        )
    return _SMALL
