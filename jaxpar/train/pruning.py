"""Sets weights to zero while they are trained: which ones is state, laid out as the weights are.

It stands around the optimizer. What it does not see of the loss it takes from a step's gradients,
so that the model, its ops and the checkpoint need not know: a pruned weight is a stored zero.

An entry is chosen by its rank in its own matrix of its own layer (and expert), and ranks are found
by counting: a threshold is built bit by bit, and for each bit all devices add up how many entries
are above it. So the choice is the same on every layout, and nothing is gathered or sorted.

Shapes: L layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxpar.base.config import Config
from jaxpar.base.errors import UserError
from jaxpar.base.pruning_config import Pruning
from jaxpar.base.sharding import Axes, KeyPath, PyTree, is_axes, path_name
from jaxpar.models import Params
from jaxpar.models.sparsity import matrix_split
from jaxpar.train.optimizer import Optimizer

_BITS = 31
"""Of a float32 without its sign: as whole numbers they are in the order of the magnitudes."""


class PruningState(NamedTuple):
    """What a pruning keeps besides the optimizer's state.

    Attributes:
      steps: those that are done.
      pruned: True for an entry that is zero, in a tree of the parameters' form; parameters that are
        not pruned have no array.
      inner: the state of the optimizer.
    """

    steps: Int[Array, ""]
    pruned: PyTree
    inner: optax.OptState


class _Matrix(NamedTuple):
    """A parameter that is pruned, in one step."""

    stepped: Array
    """What the optimizer makes of it."""
    gradient: Array
    pruned: Bool[Array, ...]
    outer: int
    """The dims that it is stacked over."""
    kept: float
    """The share that is not zero in the end."""


def with_pruning(optimizer: Optimizer, config: Config) -> Optimizer:
    """Return an optimizer that keeps weights at zero, and chooses them anew every few steps.

    Args:
      optimizer: any but Schedule-Free, whose average would not be zero.
      config: its `pruning` says when and how far.

    Returns:
      The optimizer; itself where nothing is pruned.

    Raises:
      UserError: it is Schedule-Free.
    """
    pruning = config.pruning
    if pruning.method == "none":
        return optimizer
    if optimizer.name == "schedule_free":
        raise UserError(
            f"pruning.method={pruning.method} with optimizer.name=schedule_free: an average of "
            "steps is zero only where all of them were: try adamw"
        )

    def make(axes: Params) -> optax.GradientTransformation:
        inner = optimizer.make(axes)

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            return _update(inner, updates, state, params, axes, config)

        return optax.GradientTransformation(lambda params: _init(inner, params, pruning), update)

    # one choice for all: see `_choose`
    return replace(optimizer, make=make, by_layer=False)


def is_pruned(path: KeyPath, pruning: Pruning) -> bool:
    """Whether a parameter is pruned, by its place in the parameters' tree."""
    part, _, matrix = path_name(path).partition(".")
    return part == "blocks" and matrix in pruning.names()


def _init(inner: optax.GradientTransformation, params: Any, pruning: Pruning) -> PruningState:
    def start(path: KeyPath, param: Array) -> Any:
        if is_pruned(path, pruning):
            return jnp.zeros(param.shape, bool)
        return optax.MaskedNode()

    pruned = jax.tree_util.tree_map_with_path(start, params)
    return PruningState(jnp.zeros((), jnp.int32), pruned, inner.init(params))


def _update(
    inner: optax.GradientTransformation,
    grads: Params,
    state: PruningState,
    params: Any,
    axes: Params,
    config: Config,
) -> tuple[Params, PruningState]:
    """Make a step of the optimizer without what is pruned, and choose anew where it is time."""
    pruned = _with_arrays(state.pruned)
    masked = jax.tree_util.tree_map_with_path(
        lambda path, grad: _without(grad, pruned.get(path_name(path))), grads
    )
    moves: Any
    moves, inner_state = inner.update(masked, state.inner, params)
    chosen = _choose(state.steps, moves, grads, params, pruned, axes, config)
    updates, pruned = chosen

    def final(path: KeyPath, update: Array, param: Array) -> Array:
        mask = pruned.get(path_name(path))
        if mask is None:
            return update
        return jnp.where(mask, -param, update)

    updates = jax.tree_util.tree_map_with_path(final, updates, params)
    kept_form = jax.tree_util.tree_map_with_path(
        lambda path, _: pruned[path_name(path)], state.pruned
    )
    return updates, PruningState(state.steps + 1, kept_form, inner_state)


def _with_arrays(pruned: PyTree) -> dict[str, Array]:
    """The masks that there are, by the names of their parameters."""
    return {path_name(path): mask for path, mask in jax.tree_util.tree_leaves_with_path(pruned)}


def _without(grad: Array, mask: Array | None) -> Array:
    if mask is None:
        return grad
    return jnp.where(mask, 0, grad)


def _choose(
    count: Array,
    updates: Params,
    grads: Params,
    params: Params,
    pruned: dict[str, Array],
    axes: Params,
    config: Config,
) -> tuple[Params, dict[str, Array]]:
    """Choose what is pruned, where the step is one of those after which that is done.

    All updates pass through one branch: what follows waits for the sums over devices inside, which
    XLA:CPU might otherwise mix with later ones.
    """
    pruning = config.pruning
    names = _axes_by_name(axes)
    sizes = {name: _sides(names[name], mask.shape) for name, mask in pruned.items()}
    shares = pruning.kept(sizes)
    by_name = _with_arrays(params)
    gradients = _with_arrays(grads)
    method = {"magnitude": _by_magnitude, "rigl": _by_regrowth}[pruning.method]
    step = count + 1
    begin = pruning.begin
    last = pruning.last(config.train.steps)
    passed = jnp.clip((step - begin).astype(jnp.float32) / (last - begin), 0, 1)
    regular = (step >= begin) & (step <= last) & ((step - begin) % pruning.every == 0)
    # the first and the last choice are made whatever `every` is
    due = regular | (step == max(begin, 1)) | (step == last)

    def choose(given: tuple[Params, dict[str, Array]]) -> tuple[Params, dict[str, Array]]:
        updates, pruned = given
        moves = _with_arrays(updates)
        found = {}
        for name, mask in pruned.items():
            outer, _ = matrix_split(names[name])
            stepped = jnp.where(mask, 0, by_name[name] + moves[name])
            matrix = _Matrix(stepped, gradients[name], mask, outer, shares[name])
            found[name] = ~method(matrix, passed, pruning)
        return updates, found

    return jax.lax.cond(due, choose, lambda given: given, (updates, pruned))


def _axes_by_name(axes: Params) -> dict[str, Axes]:
    leaves = jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes)
    return {path_name(path): names for path, names in leaves}


def _sides(axes: Axes, shape: tuple[int, ...]) -> tuple[int, int]:
    """The rows and columns of one matrix of a stacked parameter."""
    outer, ins = matrix_split(axes)
    split = outer + ins
    return int(np.prod(shape[outer:split])), int(np.prod(shape[split:]))


def cubic(passed: Float[Array, ""], kept: float) -> Float[Array, ""]:
    """The share that is kept when a part of the schedule has passed (arXiv:1710.01878, equation 1):
    most is pruned early, while the network has much to spare.

    Args:
      passed: from 0 to 1.
      kept: the share in the end.

    Returns:
      A share, from 1 down to `kept`.
    """
    return kept + (1 - kept) * (1 - passed) ** 3


def _by_magnitude(matrix: _Matrix, passed: Array, pruning: Pruning) -> Bool[Array, ...]:
    """Keep the largest, as many as the cubic schedule says."""
    share = cubic(passed, matrix.kept)
    return largest(jnp.abs(matrix.stepped), share * _size(matrix), matrix.outer)


def _by_regrowth(matrix: _Matrix, passed: Array, pruning: Pruning) -> Bool[Array, ...]:
    """Drop the smallest of those that are kept, and grow as many where the gradient is largest,
    among them some that were just dropped, which then keep their values. At first, when none is
    pruned yet, only drop.
    """
    number = jnp.floor(matrix.kept * _size(matrix))
    moved = pruning.regrow * (1 + jnp.cos(jnp.pi * passed)) / 2
    begun = jnp.any(matrix.pruned)
    magnitude = jnp.where(matrix.pruned, -1.0, jnp.abs(matrix.stepped))
    kept = largest(magnitude, jnp.where(begun, (1 - moved) * number, number), matrix.outer)
    inner = tuple(range(matrix.outer, kept.ndim))
    there = jnp.sum(kept, axis=inner, keepdims=True, dtype=jnp.int32)
    wanted = jnp.where(kept, -1.0, jnp.abs(matrix.gradient))
    grown = largest(wanted, number - there, matrix.outer)
    return kept | grown


def _size(matrix: _Matrix) -> int:
    """The entries of one matrix."""
    return int(np.prod(matrix.stepped.shape[matrix.outer :]))


def largest(sizes: Float[Array, ...], number: Array, outer: int) -> Bool[Array, ...]:
    """Tell which entries of each matrix are its largest, by counting.

    Args:
      sizes: float32, stacked over some dims; an entry below zero is never chosen.
      number: how many to choose of each matrix, rounded down; a scalar, or with the dims that
        `sizes` has and 1 for those of a matrix.
      outer: how many dims are stacked over.

    Returns:
      True for at most so many of each matrix: of equal ones at the border none is chosen.
    """
    bits = jax.lax.bitcast_convert_type(sizes.astype(jnp.float32), jnp.int32)
    bits = jnp.where(sizes < 0, -1, bits)
    inner = tuple(range(outer, sizes.ndim))
    number = jnp.floor(number).astype(jnp.int32)

    def above(border: Array) -> Array:
        return jnp.sum(bits > border, axis=inner, keepdims=True, dtype=jnp.int32)

    # the highest border above which there are too many, bit by bit
    lowest = jnp.full((*sizes.shape[:outer], *[1] * len(inner)), -1, jnp.int32)
    border = lowest
    for bit in reversed(range(_BITS)):
        higher = border + (1 << bit)
        border = jnp.where(above(higher) > number, higher, border)
    border = jnp.where(above(lowest) > number, border + 1, lowest)
    return bits > border
