"""The layout of an optimizer's state, of any optimizer: an array that belongs to a parameter lies
as the parameter does.

`optax.tree_map_params` tells which parts of a state are trees in the form of the parameters' tree.
The arrays of such a tree may have all dims of their parameters, as moments have, or only some, as
Adafactor's row and column sums have. Which ones is found by a second, abstract `init` from
parameters of which no two dims are alike. All else is replicated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.errors import UserError, short
from jaxpar.base.layout.sharding import PyTree, path_name

Shape = jax.ShapeDtypeStruct
LARGE = 2**20
"""The bytes of an array that lies whole on every device, above which a note says so."""
MOST_NAMED = 3


class View(NamedTuple):
    """A parameter as an optimizer looks at it, with some of its dims taken together.

    Attributes:
      shape: the sizes of the view's dims.
      dims: for each dim of the view, the first of the parameter's dims that it is made of.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]


class StateArray(NamedTuple):
    """An array of an optimizer's state and the parameter that it belongs to.

    Attributes:
      value: the array's shape and dtype.
      parameter: the path of the parameter in their tree; None where it belongs to none.
      dims: the parameter's dim that each dim of the array is, or None for a dim of its own.
    """

    value: Shape
    parameter: tuple[Any, ...] | None
    dims: tuple[int | None, ...]


def optimizer_state(optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Make the state of an optimizer for parameters that lie on a mesh, sharded as they are.

    `jax.jit(optimizer.init)(params)` would put all of it on the first device, since the zeros of
    moments depend on no parameter.

        opt_state = jaxpar.optimizer_state(optimizer, params)

    Args:
      optimizer: any transformation of optax.
      params: a pytree of arrays on one mesh (or on one device), or of ShapeDtypeStructs with their
        shardings, from which nothing is computed.

    Returns:
      The state as `optimizer.init(params)` makes it. An array that belongs to a parameter is split
      where the parameter's dims are; all others, such as counters, lie on every device of the mesh.
      From ShapeDtypeStructs come ShapeDtypeStructs with shardings, by which a checkpoint is
      restored and a step rehearsed.

    Raises:
      UserError: the optimizer is no transformation; the parameters lie on several meshes, or have
        no sharding; or optax cannot tell what of this optimizer's state belongs to parameters.
    """
    if not callable(getattr(optimizer, "init", None)):
        raise UserError(
            "optimizer_state takes an optax.GradientTransformation, and was given "
            f"{short(optimizer)}: write optax.lion(1e-4), for example"
        )
    leaves = jax.tree.leaves(params)
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    placed = [place for place in shardings if place is not None]
    if not leaves or len(placed) < len(leaves):
        raise UserError(
            "optimizer_state takes parameters that lie somewhere: arrays, or ShapeDtypeStructs "
            "with a sharding, and found some without: make them with out_shardings=layout.sharding("
            "axes, shapes)"
        )
    meshes = {place.mesh for place in placed if isinstance(place, NamedSharding)}
    alone = [place for place in placed if not isinstance(place, NamedSharding)]
    if len(meshes) > 1 or (meshes and alone) or len({*alone}) > 1:
        raise UserError(
            "optimizer_state takes parameters of one mesh, or of one device, and found "
            f"{short([*meshes, *alone])}: put them on one with jax.device_put"
        )
    by_path = dict(jax.tree_util.tree_leaves_with_path(params))

    def place(array: StateArray) -> jax.sharding.Sharding:
        if alone:
            return alone[0]
        (mesh,) = meshes
        if array.parameter is None:
            return NamedSharding(mesh, P())
        parameter = by_path[array.parameter]
        spec = [*parameter.sharding.spec, *[None] * parameter.ndim]
        entries = [None if dim is None else spec[dim] for dim in array.dims]
        return NamedSharding(mesh, P(*entries))

    shapes = jax.tree.map(lambda leaf: Shape(leaf.shape, leaf.dtype), params)
    arrays = state_arrays(optimizer, shapes)
    places = jax.tree.map(place, arrays, is_leaf=_is_state_array)
    if all(isinstance(leaf, jax.Array) for leaf in leaves):
        return jax.jit(optimizer.init, out_shardings=places)(params)
    return jax.tree.map(
        lambda array, where: Shape(array.value.shape, array.value.dtype, sharding=where),
        arrays,
        places,
        is_leaf=_is_state_array,
    )


def state_arrays(
    optimizer: optax.GradientTransformation,
    params: PyTree,
    view: Callable[[tuple[Any, ...], tuple[int, ...]], View] | None = None,
) -> PyTree:
    """Find the parameter that each array of an optimizer's state belongs to.

    Args:
      params: the parameters as ShapeDtypeStructs.
      view: returns how the optimizer looks at the parameter of a path and a shape, where it takes
        dims together; None = as it is.

    Returns:
      The state with a `StateArray` at each leaf.

    Raises:
      UserError: optax cannot tell what of this optimizer's state belongs to parameters.
    """
    state = jax.eval_shape(optimizer.init, params)
    distinct = jax.tree.map(
        lambda leaf: Shape(_distinct(leaf.shape), leaf.dtype),
        params,
    )
    try:
        probe = jax.eval_shape(optimizer.init, distinct)
    except (TypeError, ValueError):  # it was made for these very shapes
        probe = state
        distinct = params
    if jax.tree.structure(probe) != jax.tree.structure(state):
        probe = state
        distinct = params
    by_path = dict(jax.tree_util.tree_leaves_with_path(distinct))
    probes = iter(jax.tree.leaves(probe))

    def belonging(path: tuple[Any, ...], value: Shape) -> StateArray:
        there = next(probes)
        parameter = owner(path, by_path)
        if parameter is None:
            return StateArray(value, None, (None,) * value.ndim)
        shape = by_path[parameter].shape
        views = [View(shape, tuple(range(len(shape))))]
        if view is not None:
            views.append(view(parameter, shape))
        found = (_match(there.shape, one) for one in views)
        dims = next(
            (dims for dims in found if dims is not None),
            (None,) * value.ndim,
        )
        return StateArray(value, parameter, dims)

    def of_none(value: Shape) -> StateArray:
        next(probes)
        return StateArray(value, None, (None,) * value.ndim)

    def of_parameters(tree: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(belonging, tree)

    return map_param_trees(optimizer, of_parameters, state, others=of_none)


def map_param_trees(
    optimizer: optax.GradientTransformation,
    change: Callable[[PyTree], PyTree],
    state: PyTree,
    others: Callable[[Any], Any] = lambda leaf: leaf,
) -> PyTree:
    """Replace each tree of a state that has the form of the parameters' tree by `change(tree)`, and
    every other leaf by `others(leaf)`, in the order in which they stand.

    Raises:
      UserError: optax cannot tell what of this optimizer's state belongs to parameters.
    """
    try:
        return optax.tree_map_params(
            optimizer,
            change,
            state,
            transform_non_params=others,
            is_leaf=lambda _: True,
        )
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        if "_ParamsPlaceholder" in str(error):
            advice = (
                "a function of its labels or masks walks the parameters as a dict, which optax "
                "hides here: give the tree that it returns, optax.multi_transform(transforms, "
                "labels(params)), or let it use jax.tree_util.tree_map_with_path"
            )
        else:
            advice = "lay its state out by hand, or try another optimizer"
        raise UserError(
            "optax.tree_map_params cannot tell what of this optimizer's state belongs to "
            f"parameters ({short(str(error))}): {advice}"
        ) from error


def param_trees(optimizer: optax.GradientTransformation, state: PyTree) -> list[PyTree]:
    """List the trees of a state that have the form of the parameters' tree, in the order in which
    they stand.
    """
    found: list[PyTree] = []
    map_param_trees(optimizer, found.append, state)
    return found


def with_param_trees(
    optimizer: optax.GradientTransformation, state: PyTree, trees: Sequence[PyTree]
) -> PyTree:
    """Put these trees into a state, in place of the trees that `param_trees` returns."""
    rest = iter(trees)
    return map_param_trees(optimizer, lambda _: next(rest), state)


def map_state(
    optimizer: optax.GradientTransformation,
    change: Callable[..., Any],
    state: PyTree,
    params: PyTree,
    *trees: PyTree,
    others: Callable[[Any], Any] = lambda leaf: leaf,
) -> PyTree:
    """Replace each array of a state that belongs to a parameter by `change(leaf, *leaves)`.

    Args:
      change: takes the state's leaf and, of each of `trees`, what stands at its parameter.
      state: the state, with any leaves.
      params: a tree of the parameters' form, with any leaves.
      *trees: trees that go as deep as `params` at least.
      others: makes the new value of every other leaf.

    Raises:
      UserError: optax cannot tell what of this optimizer's state belongs to parameters.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    columns = [structure.flatten_up_to(tree) for tree in trees]
    if columns:
        rows = zip(*columns, strict=True)
    else:
        rows = itertools.repeat(())
    by_path = {path: row for (path, _), row in zip(leaves, rows, strict=False)}

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        parameter = owner(path, by_path)
        if parameter is None:
            return others(leaf)
        return change(leaf, *by_path[parameter])

    return map_param_trees(
        optimizer,
        lambda tree: jax.tree_util.tree_map_with_path(one, tree),
        state,
        others,
    )


def owner(
    path: tuple[Any, ...],
    parameters: Any,
) -> tuple[Any, ...] | None:
    """Find the path among `parameters` that a path begins with; None where there is none.

    An optimizer may keep several arrays of a parameter, in a list at the parameter's place.
    """
    firsts = (path[:length] for length in range(len(path), -1, -1))
    return next((first for first in firsts if first in parameters), None)


def replicated_note(state: PyTree) -> str:
    """Say which large arrays of a state, given as ShapeDtypeStructs with shardings on several
    devices, lie whole on every device; empty = none does.
    """
    whole = [
        path_name(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if leaf.sharding.num_devices > 1
        and leaf.sharding.is_fully_replicated
        and _bytes(leaf) > LARGE
    ]
    if not whole:
        return ""
    return f"the optimizer's {few_of(whole)} lie whole on every device"


def few_of(names: Sequence[str]) -> str:
    """Write the first few of some names, and how many more there are."""
    named = ", ".join(names[:MOST_NAMED])
    more = len(names) - MOST_NAMED
    if more > 0:
        named += f" and {more} more"
    return named


def _bytes(value: Shape) -> int:
    return math.prod(value.shape) * value.dtype.itemsize


def _is_state_array(x: Any) -> bool:
    return isinstance(x, StateArray)


def _distinct(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Raise some sizes just enough that no two are alike, which keeps their order."""
    sizes = list(shape)
    last = 0
    for place in sorted(
        range(len(shape)),
        key=lambda place: (shape[place], place),
    ):
        sizes[place] = max(shape[place], last + 1)
        last = sizes[place]
    return tuple(sizes)


def _match(
    shape: tuple[int, ...],
    view: View,
) -> tuple[int | None, ...] | None:
    """Find the dims of a view that an array's dims are, in their order; a dim of size 1 is its own.

    None where one of them is none of the view's.
    """
    dims: list[int | None] = []
    at = 0
    for size in shape:
        if size == 1:
            dims.append(None)
            continue
        if size not in view.shape[at:]:
            return None
        at = view.shape.index(size, at)
        dims.append(view.dims[at])
        at += 1
    return tuple(dims)
