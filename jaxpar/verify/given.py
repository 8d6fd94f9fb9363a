"""Checks of what `verify.gradients` is given, before anything is differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.base.errors import UserError, short
from jaxpar.base.layout.mesh import describe
from jaxpar.base.layout.sharding import PyTree, path_name
from jaxpar.verify.comparison import by_name


def read_arrays(params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
    """Return parameters and batch as numpy arrays.

    Args:
      params: a pytree of arrays, of jax or numpy.
      batch: a pytree of arrays, of jax or numpy, or of Python numbers.

    Returns:
      Both trees in the same form, on the host, in their own dtypes.

    Raises:
      UserError: there are no parameters, one of them cannot be differentiated, or a leaf of the
        batch holds no numbers.
    """
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: _read(leaf, f"params {path_name(path)}"), params
    )
    batch = jax.tree_util.tree_map_with_path(
        lambda path, leaf: _read(leaf, f"batch {path_name(path)}"), batch
    )
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise UserError(
            "verify.gradients compares the gradients of params, and was given none: params has "
            "no arrays"
        )
    for path, leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise UserError(
                "verify.gradients differentiates every array of params, and "
                f"{path_name(path) or 'params'} is "
                f"{leaf.dtype}: put what is not trained into the batch"
            )
    return params, batch


def _read(leaf: Any, name: str) -> np.ndarray:
    if jnp.issubdtype(getattr(leaf, "dtype", object), jax.dtypes.prng_key):
        raise UserError(
            f"verify.gradients takes arrays of numbers, and {name.strip()} is a key of "
            "jax.random: give "
            "jax.random.key_data(key), and take jax.random.wrap_key_data of it in the loss"
        )
    array = np.asarray(leaf)
    if not (jnp.issubdtype(array.dtype, jnp.number) or jnp.issubdtype(array.dtype, jnp.bool_)):
        raise UserError(
            f"verify.gradients takes arrays of numbers, and {name.strip()} is {short(leaf)}"
        )
    return array


def place_by(shardings: PyTree, params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
    """Give each array of the parameters and of the batch a sharding.

    Args:
      shardings: a pair for params and for batch; each is one sharding for all of its arrays, or a
        tree of them.

    Returns:
      A pair of trees of the forms of `params` and `batch`, with a sharding in place of each array.

    Raises:
      UserError: the shardings are of another form than the arrays.
    """
    try:
        return jax.tree.broadcast(shardings, (params, batch))
    except ValueError as error:
        raise UserError(
            "verify.gradients takes shardings as (those of params, those of batch), each one "
            "NamedSharding or a tree "
            f"of the arrays' form: {str(error).splitlines()[0]}"
        ) from error


def require_split(params: PyTree, batch: PyTree, placed: tuple[PyTree, PyTree]) -> None:
    """Refuse arrays that their shardings do not divide.

    Args:
      placed: the shardings of both, as `place_by` returns them.

    Raises:
      UserError: an array has too few dims, or one of a size that its mesh axes do not divide.
    """
    for name, arrays, places in (("params", params, placed[0]), ("batch", batch, placed[1])):
        leaves = jax.tree_util.tree_leaves_with_path(arrays)
        for (path, array), place in zip(
            leaves,
            jax.tree.leaves(places),
            strict=True,
        ):
            try:
                place.shard_shape(array.shape)
            except ValueError as error:
                found = f"{name} {path_name(path)}".rstrip()
                raise UserError(
                    f"verify.gradients: {found} of shape {array.shape} is not divided by "
                    f"{place.spec} on "
                    f"{describe(place.mesh.shape)}: give as many rows as there are shards, or "
                    "another sharding"
                ) from error


def makes_gradients(loss: Callable[..., Any], params: PyTree, batch: PyTree) -> bool:
    """Say whether a loss makes its own gradients. It is traced for shapes and is not run.

    Args:
      loss: `(params, batch)` -> a scalar, or (scalar, gradients).

    Raises:
      UserError: it returns anything else, such as `(scalar, metrics)`, or gradients whose names or
        shapes differ from params.
    """
    out = jax.eval_shape(loss, params, batch)
    own = isinstance(out, tuple) and len(out) == 2
    if not _is_scalar(out[0] if own else out):
        raise UserError(
            "verify.gradients needs a loss that is a scalar, or (scalar, gradients), and was "
            f"given {short(out)}"
        )
    if own and _shapes(out[1]) != _shapes(params):
        raise UserError(
            "verify.gradients takes what a loss returns beside its scalar as its gradients, an "
            "array for each of "
            f"params, and was given {short(out[1])}: return the scalar alone, or every gradient "
            "in a tree like params"
        )
    return own


def require_scalar(reference: Callable[..., Any], params: PyTree, batch: PyTree) -> None:
    """Refuse a reference that returns anything but a scalar. It is traced for shapes and is not
    run.

    Args:
      reference: `(params, batch)` -> the loss.

    Raises:
      UserError: it returns anything else than one floating point number.
    """
    out = jax.eval_shape(reference, params, batch)
    if not _is_scalar(out):
        raise UserError(
            "verify.gradients differentiates the reference, which returns a scalar, and was "
            f"given {short(out)}: "
            "return the loss alone"
        )


def _is_scalar(out: Any) -> bool:
    return getattr(out, "shape", None) == () and jnp.issubdtype(out.dtype, jnp.floating)


def _shapes(tree: PyTree) -> dict[str, Any]:
    """List the shapes of the arrays of a tree by their paths."""
    return {name: getattr(leaf, "shape", None) for name, leaf in by_name(tree).items()}
