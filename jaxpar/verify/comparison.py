"""The comparison of two answers: every copy of the loss and of its gradients that the devices hold,
and how far each is off.

An error is |got - want| / max(|want|, floor), where |x| is the root mean square. The floor is a
tenth of the root mean square of the whole gradient. A gradient that is zero by mathematics (of
GPT-2's key bias, because softmax ignores what is added to every score of a row) is nothing but
rounding, and so has no scale of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxpar.base.layout.sharding import PyTree, path_name
from jaxpar.verify.report import GradientRow, Verdict

FLOOR = 0.1
# The tolerance in float32: a gradient is a float32 sum of at most a few thousand products. In
# another order it is off by a few ulps (6e-8), and a few dozen ops lie between it and the loss.
# Over all plans of docs/verified.md the worst is 5.9e-6.
FLOAT32 = 1e-5


class Answer(NamedTuple):
    """A loss and its gradients, with every copy that the devices hold.

    Attributes:
      losses: every copy of the loss, [copies].
      grads: the gradients by parameter name, [copies, *shape].
      shardings: the shardings that the gradients had; empty where they are not needed.
      tokens: how many tokens the loss counts, [copies], where the program reports it.
    """

    losses: np.ndarray
    grads: Mapping[str, np.ndarray]
    shardings: Mapping[str, NamedSharding] = {}
    tokens: np.ndarray | float = 0.0


def answer_of(loss: jax.Array, grads: PyTree) -> Answer:
    """Fetch a loss and its gradients from the devices.

    Args:
      grads: a tree of gradients, of any shapes.

    Returns:
      Every copy that this process's devices hold, on the host. It has the shardings of the
      gradients that have a NamedSharding, and counts no tokens.
    """
    arrays = by_name(grads)
    shardings = {
        name: x.sharding for name, x in arrays.items() if isinstance(x.sharding, NamedSharding)
    }
    return Answer(
        copies(loss),
        {name: copies(x) for name, x in arrays.items()},
        shardings,
    )


def by_name(tree: PyTree) -> dict[str, Any]:
    """Key the arrays of a tree by their paths.

    Args:
      tree: a tree of arrays, of jax or numpy.

    Returns:
      The arrays in the tree's order, by names such as `blocks.up`; a tree that is a single array
      has the name `params`.
    """
    return {
        path_name(path) or "params": leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def copies(array: jax.Array) -> np.ndarray:
    """Fetch every copy of an array that this process's devices hold.

    Returns:
      The copies in the order of the mesh, [copies, *shape], in the array's dtype.
    """
    shards = array.addressable_shards
    found = np.empty(
        (1 + max(shard.replica_id for shard in shards), *array.shape),
        array.dtype,
    )
    for shard in shards:
        found[(shard.replica_id, *shard.index)] = np.asarray(shard.data)
    return found


def copies_by_axis(copies: np.ndarray, sharding: NamedSharding) -> dict[str, np.ndarray]:
    """Return, for each mesh axis that an array is not split over, the copy at each coordinate of
    it. The other such axes are held at coordinate 0.

    Args:
      copies: all copies of the array in the order of the mesh, [copies, *shape], as the function of
        this name fetches them.
      sharding: the sharding of the array.

    Returns:
      The copies by mesh axis, each [n, *shape] with n the devices along the axis. Axes of one
      device are left out.
    """
    split = [axis for dim in range(copies.ndim - 1) for axis in axes_of_dim(sharding, dim)]
    free = {
        axis: size for axis, size in sharding.mesh.shape.items() if size > 1 and axis not in split
    }
    grid = copies.reshape(*free.values(), *copies.shape[1:])
    others = (0,) * (len(free) - 1)
    return {axis: np.moveaxis(grid, at, 0)[(slice(None), *others)] for at, axis in enumerate(free)}


def axes_of_dim(sharding: NamedSharding, dim: int) -> tuple[str, ...]:
    """Return the mesh axes of more than one device that split a dim.

    Args:
      sharding: the sharding of an array.
      dim: the number of a dim, from 0.

    Returns:
      The axes, the outermost first; empty where the dim is whole on each device.
    """
    if dim < len(sharding.spec):
        entry = sharding.spec[dim]
    else:
        entry = None
    if isinstance(entry, tuple):
        axes = entry
    elif entry is None:
        axes = ()
    else:
        axes = (entry,)
    return tuple(axis for axis in axes if sharding.mesh.shape[axis] > 1)


def compare(
    got: Answer, want: Answer, limits: Mapping[str, float], loss_limit: float, name: str = "float32"
) -> Verdict:
    """Compare every copy of an answer with the reference, and keep the worst of each.

    Args:
      want: the reference's answer, which has one copy.
      limits: the largest relative error allowed in each gradient, by parameter name, in the order
        of the rows.
      loss_limit: the largest relative error allowed in the loss.
      name: what the verdict is called, such as the precision.

    Returns:
      The verdict, with a row for each parameter in `limits` and no findings. An error is infinite
      where a copy is not finite.
    """
    reference = float(want.losses[0])
    error = max(_finite(abs(float(loss) - reference)) for loss in got.losses) / max(
        abs(reference), 1e-30
    )
    rows = (_row(got, want, parameter, limit) for parameter, limit in limits.items())
    return Verdict(
        name, error, loss_limit, tuple(rows), tokens_agree=bool(np.all(got.tokens == want.tokens))
    )


def _row(got: Answer, want: Answer, name: str, limit: float) -> GradientRow:
    """Make the row of one gradient, which is too small to tell where zeros in its place would be
    within the limit.
    """
    grads = want.grads[name]
    error = relative_error(got, want, name)
    too_small = _rms(grads[0]) <= limit * scale_of(want, name)
    return GradientRow(name, grads.shape[1:], error, limit, too_small=too_small)


def relative_error(got: Answer, want: Answer, name: str) -> float:
    """Return how far the worst copy of a gradient is off, relative to `scale_of`.

    Args:
      got: the answer under test, with all of its copies.
      name: the name of the parameter.

    Returns:
      The error, from 0; infinite where a copy is not finite.
    """
    return max(distance(copy, want.grads[name][0]) for copy in got.grads[name]) / scale_of(
        want, name
    )


def scale_of(want: Answer, name: str) -> float:
    """Return the scale of a gradient's error: the gradient's root mean square, or the floor if that
    is larger.
    """
    whole = np.concatenate([grads.ravel() for grads in want.grads.values()])
    return max(
        _rms(want.grads[name][0]),
        FLOOR * _rms(whole),
        1e-30,
    )


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """Compute the root mean square of a difference in float64; infinite where it is not finite, and
    0 for empty arrays.
    """
    return _finite(_rms(got.astype(np.float64) - want))


def _rms(x: np.ndarray) -> float:
    if x.size:
        return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))
    return 0.0


def _finite(error: float) -> float:
    return error if math.isfinite(error) else math.inf
