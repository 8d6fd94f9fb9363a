"""The dims of a parameter that make its matrix, by its logical axes, and an optimizer for each
matrix.

Parameters are stacked over layers (and experts), and a matrix may have several dims on a side, as
[embed, heads, head_dim] has. An optimizer that looks at rows and columns has to be told.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax import Array

from jaxpar.base.layout.plan import is_matrix
from jaxpar.base.layout.sharding import Axes, PyTree
from jaxpar.base.layout.specs import is_axes
from jaxpar.train.optimizer.state_layout import View, param_trees, with_param_trees


class MatrixDims(NamedTuple):
    """The dims of a parameter: the dims it is stacked over, and the dims of a matrix's inputs
    (rows) and outputs (columns). A vector has no rows.
    """

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """All dims, beginning with the dims of the batch."""
        return self.batch + self.rows + self.columns

    def view(self, shape: tuple[int, ...]) -> View:
        """Return the shape of the batch and one matrix (or of a vector, whose dims stay as they
        are).
        """
        if not self.rows:
            return View(tuple(shape[dim] for dim in self.order), self.order)
        rows = math.prod(shape[dim] for dim in self.rows)
        columns = math.prod(shape[dim] for dim in self.columns)
        batch = tuple(shape[dim] for dim in self.batch)
        return View(
            (*batch, rows, columns),
            (*self.batch, self.rows[0], self.columns[0]),
        )


def matrix_dims(axes: Axes) -> MatrixDims:
    """Find the matrix in a parameter by its logical axes.

    One side is `embed`, or else a LoRA `rank`; the other side is all else that is neither layers
    nor experts. (A router's outputs are its experts, and no batch.) With names of a program's own,
    or none, two dims are the inputs and the outputs, and more of them are no matrix.
    """
    inner = [dim for dim, axis in enumerate(axes) if axis != "layers"]
    batch = [dim for dim, axis in enumerate(axes) if axis == "layers"]
    if "experts" in axes and len(inner) > 2:
        of_experts = axes.index("experts")
        batch.append(of_experts)
        inner.remove(of_experts)
    alone = MatrixDims(tuple(batch), (), tuple(inner))
    if not is_matrix(axes):
        return alone
    side = next(
        (axes.index(name) for name in ("embed", "rank") if name in axes),
        None,
    )
    if side is None:
        if len(inner) == 2:
            return MatrixDims(tuple(batch), (inner[0],), (inner[1],))
        return alone
    if side == inner[0]:
        return MatrixDims(tuple(batch), (side,), tuple(inner[1:]))
    if side == inner[-1]:
        return MatrixDims(tuple(batch), tuple(inner[:-1]), (side,))
    return alone


def hidden_matrices(axes: PyTree) -> PyTree:
    """Find the parameters that are hidden matrices, which Muon is for, and their dims.

    Args:
      axes: the logical axes of each parameter, such as `Model.axes`.

    Returns:
      A tree of the same form: the `MuonDimensionNumbers` of each matrix, and None where AdamW is to
      be used: for embeddings, the head, norms, biases, and matrices outside of the stacked layers
      with a dim that has no name.
    """

    def one(names: Axes) -> optax.contrib.MuonDimensionNumbers | None:
        dims = matrix_dims(names)
        is_table = "vocab" in names or ("layers" not in names and None in names)
        if not dims.rows or is_table:
            return None
        return optax.contrib.MuonDimensionNumbers(dims.rows, dims.columns)

    return jax.tree.map(one, axes, is_leaf=is_axes)


def muon_dimensions(axes: PyTree) -> Callable[[PyTree], PyTree]:
    """Make the function that tells `optax.contrib.muon` the dims of a model's hidden matrices.

        optax.contrib.muon(1e-3, muon_weight_dimension_numbers=muon_dimensions(model.axes))

    Without them it takes an array of two dims for a matrix and leaves what is stacked over layers
    to AdamW.

    Args:
      axes: the logical axes of each parameter, such as `Model.axes`.

    Returns:
      A function of the parameters that returns `hidden_matrices(axes)`. (A tree by itself would not
      do: `optax.tree_map_params`, which tells where a state lies, asks with a tree that has no
      leaves.)
    """
    dimensions = hidden_matrices(axes)

    def dimensions_of(params: PyTree) -> PyTree:
        if jax.tree.leaves(params):
            return dimensions
        return params

    return dimensions_of


def per_matrix(
    optimizer: optax.GradientTransformation, axes: PyTree
) -> optax.GradientTransformation:
    """Run an optimizer on each matrix (and vector) of each layer by itself.

    The optimizer sees arrays of at most two dims, so that its sums over rows and columns, and its
    root mean squares, are of one matrix. Its state has the trees that it would have, with the dims
    of the batch first in each array.

    Args:
      optimizer: a transformation that treats every parameter by itself.
      axes: the logical axes of each parameter.
    """

    def views_of(params: PyTree) -> list[MatrixDims]:
        names = jax.tree.structure(params).flatten_up_to(axes)
        return [matrix_dims(one) for one in names]

    def init(params: PyTree) -> optax.OptState:
        leaves, structure = jax.tree.flatten(params)
        if not leaves:  # what `optax.tree_map_params` asks with
            return optimizer.init(params)
        states = []
        for leaf, dims in zip(leaves, views_of(params), strict=True):
            each = lambda x: param_trees(optimizer, optimizer.init(x))  # noqa: E731
            for _ in dims.batch:
                each = jax.vmap(each)
            states.append(each(_viewed(leaf, dims)))
        scalars = optimizer.init(leaves[0])
        trees = [structure.unflatten(arrays) for arrays in zip(*states, strict=True)]
        return with_param_trees(optimizer, scalars, trees)

    def update(
        updates: PyTree, state: optax.OptState, params: PyTree | None = None
    ) -> tuple[PyTree, optax.OptState]:
        gradients, structure = jax.tree.flatten(updates)
        values = structure.flatten_up_to(params)
        arrays = [structure.flatten_up_to(tree) for tree in param_trees(optimizer, state)]
        done = []
        scalars = state
        for at, dims in enumerate(views_of(updates)):

            def each(gradient: Array, value: Array, of_parameter: list[Array]) -> Any:
                before = with_param_trees(optimizer, state, of_parameter)
                change, after = optimizer.update(gradient, before, value)
                found = param_trees(optimizer, after)
                return change, found, with_param_trees(optimizer, after, [()] * len(found))

            for _ in dims.batch:
                each = jax.vmap(each, out_axes=(0, 0, None))
            gradient = _viewed(gradients[at], dims)
            change, found, scalars = each(
                gradient,
                _viewed(values[at], dims),
                [leaves[at] for leaves in arrays],
            )
            done.append((_unviewed(change, gradients[at].shape, dims), found))
        trees = [
            structure.unflatten([found[number] for _, found in done])
            for number in range(len(arrays))
        ]
        changes = structure.unflatten([change for change, _ in done])
        return changes, with_param_trees(optimizer, scalars, trees)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _viewed(x: Array, dims: MatrixDims) -> Array:
    return x.transpose(dims.order).reshape(dims.view(x.shape).shape)


def _unviewed(x: Array, shape: tuple[int, ...], dims: MatrixDims) -> Array:
    """Invert `_viewed`, for a parameter of this shape."""
    ordered = x.reshape([shape[dim] for dim in dims.order])
    inverse = sorted(range(len(shape)), key=lambda dim: dims.order[dim])
    return ordered.transpose(inverse)
