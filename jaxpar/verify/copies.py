"""Every copy of an array that devices hold, also where they are not equal as they should be, and how far it is off."""

from __future__ import annotations

import math
from collections.abc import Iterable

import jax
import numpy as np
from jax.sharding import Mesh

FLOOR = 0.1
"""Of the root mean square of all gradients: one that is zero by mathematics has no scale of its own."""


def copies(array: jax.Array) -> np.ndarray:
    """Every copy of an array that this process's devices hold, [copies, *shape]."""
    shards = array.addressable_shards
    found = np.empty((1 + max(shard.replica_id for shard in shards), *array.shape), array.dtype)
    for shard in shards:
        found[(shard.replica_id, *shard.index)] = np.asarray(shard.data)
    return found


def copies_by_axis(array: jax.Array, mesh: Mesh) -> dict[str, np.ndarray]:
    """For each mesh axis that an array is not split over, the array as each coordinate has it, [n, *shape].

    The other such axes are held at coordinate 0. Only for arrays that this process holds whole.
    """
    grid = mesh.devices
    place = {device: dict(zip(mesh.axis_names, at, strict=True)) for at, device in np.ndenumerate(grid)}
    split = {name for entry in array.sharding.spec for name in (entry if isinstance(entry, tuple) else (entry,))}  # pyright: ignore[reportAttributeAccessIssue]
    free = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in split]
    found = {axis: np.empty((mesh.shape[axis], *array.shape), array.dtype) for axis in free}
    for shard in array.addressable_shards:
        at = place[shard.device]
        for axis in free:
            if all(at[other] == 0 for other in free if other != axis):
                found[axis][(at[axis], *shard.index)] = np.asarray(shard.data)
    return found


def relative_error(copies: Iterable[np.ndarray], want: np.ndarray, floor: float) -> float:
    """The worst copy's |got - want| / max(|want|, floor), by root mean squares; infinite where one is not finite."""
    off = max(finite(rms(copy.astype(np.float64) - want)) for copy in copies)
    return off / max(rms(want), floor, 1e-30)


def floor_of(gradients: Iterable[np.ndarray]) -> float:
    """The least that an error of these gradients is relative to."""
    return FLOOR * rms(np.concatenate([gradient.ravel() for gradient in gradients]))


def finite(error: float) -> float:
    return error if math.isfinite(error) else math.inf


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) if x.size else 0.0
