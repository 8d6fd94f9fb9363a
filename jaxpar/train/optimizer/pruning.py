"""Pruning of weights while they are trained: the masks of zeros are state, laid out as the weights
are.

It wraps the optimizer. What it needs to know of the loss it takes from a step's gradients, so that
the model, its ops and the checkpoint need not know: a pruned weight is a stored zero.

An entry is chosen by its rank in its own matrix of its own layer (and expert), which
`jaxpar.train.optimizer.ranks` finds by counting.

Shapes: L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxpar.base.config import Config
from jaxpar.base.config.pruning import Pruning
from jaxpar.base.errors import UserError
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import Axes, KeyPath, PyTree, path_name, state_axes
from jaxpar.base.layout.specs import is_axes
from jaxpar.models import Params
from jaxpar.models.sparsity import matrix_split
from jaxpar.parallel.cpu_collective_order import first_order_token, order_token_after, ready_after
from jaxpar.parallel.pipeline import stored_order
from jaxpar.train.optimizer.definition import Optimizer
from jaxpar.train.optimizer.movement import MovementState, no_movement, with_held, with_step
from jaxpar.train.optimizer.ranks import highest, largest


class PruningState(NamedTuple):
    """The state of a pruning around the state of the optimizer.

    Attributes:
      steps: the number of steps that are done.
      pruned: True for an entry that is zero, in a tree of the parameters' form; parameters that are
        not pruned have no array.
      inner: the state of the optimizer.
      movement: the state of movement pruning; () for any other method.
    """

    steps: Int[Array, ""]
    pruned: PyTree
    inner: optax.OptState
    movement: MovementState | tuple[()] = ()


class _Matrix(NamedTuple):
    """A parameter that is pruned, in one step."""

    stepped: Array
    """The parameter after the optimizer's step."""
    gradient: Array
    pruned: Bool[Array, "*dims"]
    score: Array | None
    """The score of movement pruning; None for other methods."""
    outer: int
    """The number of dims that it is stacked over."""
    kept: float | Array
    """The share that is not zero in the end; an array of each layer's share, where they differ,
    with the dims of the matrix.
    """


class _Choice(NamedTuple):
    """The choice of pruned entries after a step, which may be the same as before."""

    updates: Params
    pruned: dict[str, Array]
    """The masks by the names of the parameters."""


def with_pruning(optimizer: Optimizer, config: Config, plan: Plan | None = None) -> Optimizer:
    """Wrap an optimizer so that it keeps weights at zero, and chooses them anew every few steps.

    Args:
      optimizer: any but Schedule-Free, whose average would not be zero.
      config: the config, whose `pruning` says when and how far.
      plan: the plan, which says in which order layers are stored, and on which devices; None = in
        the model's own order, on one device.

    Returns:
      The optimizer; the one that was given where nothing is pruned.

    Raises:
      UserError: the optimizer is Schedule-Free.
    """
    pruning = config.pruning
    if pruning.method == "none":
        return optimizer
    if optimizer.averages_steps:
        raise UserError(
            f"pruning.method={pruning.method} with optimizer.name={optimizer.name}: an average of "
            "steps is zero only where all of them were: try adamw"
        )

    def make(axes: Params) -> optax.GradientTransformation:
        inner = optimizer.make(axes)

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            return _update(inner, updates, state, params, axes, config, plan)

        return optax.GradientTransformation(lambda params: _init(inner, params, pruning), update)

    # a product of finite numbers may overflow
    stays_finite = optimizer.stays_finite and pruning.method != "movement"
    # one choice for all: see `_choose`
    return replace(optimizer, make=make, by_layer=False, stays_finite=stays_finite)


def is_pruned(path: KeyPath, pruning: Pruning) -> bool:
    """Return whether a parameter is pruned, by its place in the parameters' tree."""
    part, _, matrix = path_name(path).partition(".")
    return part == "blocks" and matrix in pruning.names()


def _init(inner: optax.GradientTransformation, params: Any, pruning: Pruning) -> PruningState:
    def start(path: KeyPath, param: Array) -> Any:
        if is_pruned(path, pruning):
            return jnp.zeros(param.shape, bool)
        return optax.MaskedNode()

    pruned = jax.tree_util.tree_map_with_path(start, params)
    movement = no_movement(pruned) if pruning.method == "movement" else ()
    return PruningState(jnp.zeros((), jnp.int32), pruned, inner.init(params), movement)


def _update(
    inner: optax.GradientTransformation,
    grads: Params,
    state: PruningState,
    params: Any,
    axes: Params,
    config: Config,
    plan: Plan | None,
) -> tuple[Params, PruningState]:
    """Make a step of the optimizer without the pruned entries, and choose these anew where it is
    time.
    """
    was_pruned = _by_name(state.pruned)
    weights = _by_name(params)
    masked = _where_masked(grads, was_pruned, lambda name, mask, grad: jnp.where(mask, 0, grad))
    moves: Any
    moves, inner_state = inner.update(masked, state.inner, params)
    movement = state.movement
    scores = dict[str, Array]()
    if isinstance(movement, MovementState):
        movement = with_step(movement, weights, _by_name(grads))
        scores = _by_name(movement.scores)
        held = _by_name(movement.held)
        # each pruned entry, which is zero, moves to the value that is held for it
        moves = _where_masked(
            moves, was_pruned, lambda name, mask, move: jnp.where(mask, held[name], move)
        )
    before = _Choice(moves, was_pruned)
    names = _by_name(axes, is_axes)
    chosen = _choose(state.steps, before, grads, params, scores, names, config, plan)
    pruned = chosen.pruned
    moves, inner_state, movement = _after_choice(
        (chosen.updates, inner_state, movement), pruned, names, plan
    )

    updates = _where_masked(
        moves, pruned, lambda name, mask, move: jnp.where(mask, -weights[name], move)
    )
    if isinstance(movement, MovementState):
        stepped = _by_name(optax.apply_updates(params, moves))
        movement = with_held(movement, lambda name: jnp.where(pruned[name], stepped[name], 0))
    kept_form = jax.tree_util.tree_map_with_path(
        lambda path, _: pruned[path_name(path)], state.pruned
    )
    return updates, PruningState(state.steps + 1, kept_form, inner_state, movement)


def _by_name(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Collect the leaves of a tree by the names of their parameters; of masks, parameters that are
    not pruned have none.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {path_name(path): leaf for path, leaf in leaves}


def _where_masked(
    tree: Params, masks: dict[str, Array], change: Callable[[str, Array, Array], Array]
) -> Params:
    """Replace each array whose parameter has a mask by `change(name, mask, array)`."""

    def one(path: KeyPath, x: Array) -> Array:
        name = path_name(path)
        return change(name, masks[name], x) if name in masks else x

    return jax.tree_util.tree_map_with_path(one, tree)


def _choose(
    count: Array,
    before: _Choice,
    grads: Params,
    params: Params,
    scores: dict[str, Array],
    names: dict[str, Axes],
    config: Config,
    plan: Plan | None,
) -> _Choice:
    """Choose which entries are pruned, at the steps at which that is due."""
    pruning = config.pruning
    by_name = _by_name(params)
    gradients = _by_name(grads)
    order = None if plan is None else stored_order(plan, config.model.layers)
    shares = _shares(before.pruned, names, config, order)
    method = _METHODS[pruning.method]
    step = count + 1
    begin = pruning.begin
    last = pruning.last(config.train.steps)
    since = step - begin
    passed = jnp.clip(since.astype(jnp.float32) / (last - begin), 0, 1)
    regular = (since >= 0) & (step <= last) & (since % pruning.every == 0)
    # the first and the last choice are made whatever `every` is
    due = regular | (step == max(begin, 1)) | (step == last)

    def choose(given: _Choice) -> _Choice:
        moves = _by_name(given.updates)
        found = {}
        for name, mask in given.pruned.items():
            outer, _ = matrix_split(names[name])
            stepped = by_name[name] + moves[name]
            if pruning.method != "movement":  # of which a pruned entry has its value again
                stepped = jnp.where(mask, 0, stepped)
            matrix = _Matrix(stepped, gradients[name], mask, scores.get(name), outer, shares[name])
            found[name] = ~method(matrix, passed, pruning)
        return _Choice(given.updates, found)

    return jax.lax.cond(due, choose, lambda given: given, before)


def _after_choice(
    arrays: tuple[Params, optax.OptState, MovementState | tuple[()]],
    pruned: dict[str, Array],
    names: dict[str, Axes],
    plan: Plan | None,
) -> Any:
    """Make arrays wait for the sums over devices inside the choice, which XLA:CPU might mix with
    later ones (`order_token_after`).
    """
    if plan is None:
        return arrays
    stored = {name: state_axes(names[name]) for name in pruned}
    token = order_token_after(first_order_token(plan), pruned, stored, plan)

    def wait(x: Array) -> Array:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return ready_after(x, token)
        return x

    return jax.tree.map(wait, arrays)


def _shares(
    pruned: dict[str, Array],
    axes: dict[str, Axes],
    config: Config,
    order: Sequence[int] | None,
) -> dict[str, float | Array]:
    """Return the share of each matrix that is not zero in the end: a number, or an array with the
    share of each layer's place, where layers differ.
    """
    pruning = config.pruning
    sizes = {name: _sides(axes[name], mask.shape) for name, mask in pruned.items()}
    if not pruning.sparsity_by_depth:
        return dict(pruning.kept(sizes, pruning.sparsity))
    layers = config.model.layers
    of_layers = [pruning.kept(sizes, pruning.sparsity_at(i, layers)) for i in range(layers)]
    found = dict[str, float | Array]()
    for name, mask in pruned.items():
        # a place without a layer has zeros only, and any share will do
        of_places = [of_layers[max(i, 0)][name] for i in order or range(layers)]
        found[name] = jnp.asarray(of_places).reshape(-1, *[1] * (mask.ndim - 1))
    return found


def _sides(axes: Axes, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of one matrix of a stacked parameter."""
    outer, ins = matrix_split(axes)
    split = outer + ins
    return int(np.prod(shape[outer:split])), int(np.prod(shape[split:]))


def cubic(passed: Float[Array, ""], kept: float | Array) -> Float[Array, "*dims"]:
    """Return the share that is kept when a part of the schedule has passed (arXiv:1710.01878,
    equation 1): most is pruned early, while the network has much to spare.

    Args:
      passed: the part of the schedule that has passed, from 0 to 1.
      kept: the share in the end, or the share of each layer.

    Returns:
      A share from 1 down to `kept`, in the form of `kept`.
    """
    return kept + (1 - kept) * (1 - passed) ** 3


def _by_magnitude(matrix: _Matrix, passed: Array, pruning: Pruning) -> Bool[Array, "*dims"]:
    """Keep the largest entries, as many as the cubic schedule says."""
    share = cubic(passed, matrix.kept)
    return largest(jnp.abs(matrix.stepped), share * _size(matrix), matrix.outer)


def _by_regrowth(matrix: _Matrix, passed: Array, pruning: Pruning) -> Bool[Array, "*dims"]:
    """Drop the smallest of the kept entries, and grow as many where the gradient is largest, among
    them some that were just dropped, which then keep their values. At first, when none is pruned
    yet, only drop.
    """
    # in float32 however the share is given, so that one for all and one a layer choose alike
    number = jnp.floor(jnp.float32(matrix.kept) * _size(matrix))
    moved = pruning.regrow * (1 + jnp.cos(jnp.pi * passed)) / 2
    begun = jnp.any(matrix.pruned)
    magnitude = jnp.where(matrix.pruned, -1.0, jnp.abs(matrix.stepped))
    kept = largest(magnitude, jnp.where(begun, (1 - moved) * number, number), matrix.outer)
    inner = tuple(range(matrix.outer, kept.ndim))
    there = jnp.sum(kept, axis=inner, keepdims=True, dtype=jnp.int32)
    wanted = jnp.where(kept, -1.0, jnp.abs(matrix.gradient))
    grown = largest(wanted, number - there, matrix.outer)
    return kept | grown


def _by_movement(matrix: _Matrix, passed: Array, pruning: Pruning) -> Bool[Array, "*dims"]:
    """Keep the entries with the highest scores, as many as the cubic schedule says. Among equal
    scores, as where no token was sent to an expert, keep the largest weights.
    """
    assert matrix.score is not None
    number = cubic(passed, matrix.kept) * _size(matrix)
    return highest(matrix.score, jnp.abs(matrix.stepped), number, matrix.outer)


_METHODS = {"magnitude": _by_magnitude, "movement": _by_movement, "rigl": _by_regrowth}


def _size(matrix: _Matrix) -> int:
    """Count the entries of one matrix."""
    return int(np.prod(matrix.stepped.shape[matrix.outer :]))
