"""How fast a device of a target is: matmuls by their shape, attention, passes over memory."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from jaxpar.base.hardware import Hardware
from jaxpar.rehearse.targets import Target

_TPU_SHARE = 0.86
"""The share of a TPU's peak at which its compiler's cycles have large matmuls."""
_TPU_ATTENTION = (0.75, 0.70)
"""The shares of the peak that a TPU's attention kernels reach where heads fill the matrix unit,
forward and backward."""
_TILE = 128
"""Rows or columns of a matmul's tile. A matmul of fewer tiles leaves matrix units idle."""
_GUESS = Hardware(hbm_bandwidth=1e11)
"""The figures of a device that has none, such as a CPU."""


class Rates(NamedTuple):
    """What a device does in a second.

    Attributes:
      matmul: the FLOP/s of large matmuls.
      tile: the rows and columns at which a matmul reaches half of that.
      memory: bytes/s of passes over memory.
      attention: the FLOP/s of attention's kernels, forward and backward.
      ring: those of the kernels of a ring, which go over parts of a sequence.
      launch: seconds between kernels.
      host: bytes/s to host memory.
    """

    matmul: float
    tile: float
    memory: float
    attention: tuple[float, float]
    ring: tuple[float, float]
    launch: float
    host: float

    def matmul_seconds(self, rows: float, inner: float, columns: float, width: int) -> float:
        """Return the seconds of a matmul: of its arithmetic, or of its bytes where they take
        longer.

        Args:
          width: the bytes of an entry.
        """
        flops = 2.0 * rows * inner * columns
        tile = self.tile
        full = rows * inner * columns
        full /= (rows + tile) * (inner + tile) * (columns + tile)
        moved = width * (rows * inner + inner * columns + rows * columns)
        return max(flops / (self.matmul * full), moved / self.memory)


@lru_cache(maxsize=256)
def rates_of(target: Target, compute: str, head_dim: int, keys: float) -> Rates:
    """Find what a device of a target does in a second.

    Args:
      target: the hardware.
      compute: the dtype of matmuls.
      head_dim: the width of a head.
      keys: the mean number of keys of a query.
    """
    hardware = target.hardware
    peaks = hardware.peak_flops
    peak = getattr(peaks, compute) or peaks.bfloat16 or 1e12
    prices = hardware.prices
    if target.platform == "tpu":
        share = _TPU_SHARE
        filled = min(1.0, head_dim / (hardware.matrix_unit or head_dim))
        forward = peak * filled * _TPU_ATTENTION[0]
        backward = peak * filled * _TPU_ATTENTION[1]
        ring = (forward, backward)
    else:
        share = prices.matmul_float32 if compute == "float32" else prices.matmul
        # A causal query sees half of a sequence on average.
        tokens = int(2 * keys)
        own = prices.attention_share("pallas_gpu", head_dim, tokens)
        row = prices.attention_share("cudnn", head_dim, tokens) or own
        forward = peak * (row.forward if row else 0.3)
        backward = peak * (row.backward if row else 0.2)
        # A ring has this library's own kernels, and of two devices each has two quarters.
        row = prices.attention_share("pallas_gpu", head_dim, max(tokens // 4, 1)) or row
        ring = (peak * row.forward, peak * row.backward) if row else (forward, backward)
    slower = prices.compute
    return Rates(
        matmul=peak * share / slower,
        tile=_tile_of(target),
        memory=(hardware.hbm_bandwidth or _GUESS.hbm_bandwidth) * prices.memory / slower,
        attention=(forward / slower, backward / slower),
        ring=(ring[0] / slower, ring[1] / slower),
        launch=hardware.launch_overhead,
        host=hardware.host_link_bandwidth or 1e10,
    )


def _tile_of(target: Target) -> float:
    """Return the size of a dim at which a matmul loses half: the share of a tile that the last one
    fills, and what fills the device once.
    """
    return _TILE / 4 if target.platform == "tpu" else _TILE / 2
