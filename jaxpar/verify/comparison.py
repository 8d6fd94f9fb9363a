"""Two answers compared: every copy of a loss and of its gradients that devices hold, and how far each is off.

An error is |got - want| / max(|want|, floor), by root mean squares. The floor is a tenth of that of the whole gradient:
one that is zero by mathematics (GPT-2's key bias: softmax ignores what is added to every score of a row) is nothing but
rounding and has no scale of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxpar.base.sharding import PyTree, path_name
from jaxpar.verify.report import GradientRow, Verdict

FLOOR = 0.1

Reorder = Callable[[str, np.ndarray], np.ndarray]
"""`(name, copies [n, *shape])` -> the same in the order of the reference."""


class Answer(NamedTuple):
    """A loss and its gradients, in every copy that there is.

    Attributes:
      losses: [copies].
      grads: by the parameter's name, [copies, *shape].
      arrays: the gradients as they lie on devices; empty where nobody asks.
      tokens: [copies], how many tokens the loss counts, where the program says so.
      reorder: what brings copies of `arrays` into the order of `grads`.
    """

    losses: np.ndarray
    grads: Mapping[str, np.ndarray]
    arrays: Mapping[str, jax.Array] = {}
    tokens: np.ndarray | float = 0.0
    reorder: Reorder = lambda name, copies: copies


def answer_of(loss: jax.Array, grads: PyTree, reorder: Reorder = lambda name, copies: copies) -> Answer:
    """A loss and its gradients, fetched from the devices."""
    arrays = by_name(grads)
    return Answer(copies(loss), {name: reorder(name, copies(x)) for name, x in arrays.items()}, arrays, reorder=reorder)


def by_name(tree: PyTree) -> dict[str, jax.Array]:
    """The arrays of a tree by their paths: `blocks.up`."""
    return {path_name(path) or "params": leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def copies(array: jax.Array) -> np.ndarray:
    """Every copy of an array that this process's devices hold, [copies, *shape]."""
    shards = array.addressable_shards
    found = np.empty((1 + max(shard.replica_id for shard in shards), *array.shape), array.dtype)
    for shard in shards:
        found[(shard.replica_id, *shard.index)] = np.asarray(shard.data)
    return found


def copies_by_axis(array: jax.Array) -> dict[str, np.ndarray]:
    """For each mesh axis that an array is not split over, the array as each coordinate has it, [n, *shape].

    The other such axes are held at coordinate 0. Only for arrays that this process holds whole.
    """
    sharding = sharding_of(array)
    mesh = sharding.mesh
    place = {device: dict(zip(mesh.axis_names, at, strict=True)) for at, device in np.ndenumerate(mesh.devices)}
    split = [axis for dim in range(array.ndim) for axis in axes_of_dim(sharding, dim)]
    free = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in split]
    found = {axis: np.empty((mesh.shape[axis], *array.shape), array.dtype) for axis in free}
    for shard in array.addressable_shards:
        at = place[shard.device]
        for axis in free:
            if all(at[other] == 0 for other in free if other != axis):
                found[axis][(at[axis], *shard.index)] = np.asarray(shard.data)
    return found


def sharding_of(array: jax.Array) -> NamedSharding:
    """Where an array lies on its mesh."""
    assert isinstance(array.sharding, NamedSharding), f"jit gave an array the sharding {array.sharding}"
    return array.sharding


def axes_of_dim(sharding: NamedSharding, dim: int) -> tuple[str, ...]:
    """The mesh axes of more than one device that split a dim."""
    entry = sharding.spec[dim] if dim < len(sharding.spec) else None
    axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return tuple(axis for axis in axes if sharding.mesh.shape[axis] > 1)


def compare(
    got: Answer, want: Answer, limits: Mapping[str, float], loss_limit: float, name: str = "float32"
) -> Verdict:
    """The errors of an answer against the reference's.

    Args:
      got: the program's; of several copies the worst counts.
      want: the reference's, one copy.
      limits: what each gradient may be off by, in the order of the rows.
      loss_limit: what the loss may be off by.
      name: of the comparison.
    """
    reference = float(want.losses[0])
    loss = max(map(float, got.losses), key=lambda value: _finite(abs(value - reference)))
    rows = (GradientRow(n, want.grads[n].shape[1:], relative_error(got, want, n), limit) for n, limit in limits.items())
    return Verdict(
        name, loss, reference, _finite(abs(loss - reference) / max(abs(reference), 1e-30)), loss_limit, tuple(rows),
        tokens_agree=bool(np.all(got.tokens == want.tokens)),
    )  # fmt: skip


def relative_error(got: Answer, want: Answer, name: str) -> float:
    """How far the worst copy of a gradient is off; infinite where one is not finite."""
    return max(distance(copy, want.grads[name][0]) for copy in got.grads[name]) / scale_of(want, name)


def scale_of(want: Answer, name: str) -> float:
    """What the error of a gradient is relative to: its root mean square, or the floor."""
    whole = np.concatenate([grads.ravel() for grads in want.grads.values()])
    return max(_rms(want.grads[name][0]), FLOOR * _rms(whole), 1e-30)


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """Root mean square of a difference; infinite for NaN."""
    return _finite(_rms(got.astype(np.float64) - want))


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) if x.size else 0.0


def _finite(error: float) -> float:
    return error if math.isfinite(error) else math.inf
