"""Moves between layouts inside `shard_map`: what is gathered, what is summed, and over which mesh axes.

Left to themselves, partial sums may become all-reduces and small gathers large ones: here every collective of an op is
written where it stands, so that a plan's communication is known in closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.mesh import MeshAxis
from jaxpar.sharding import Axes, Plan


def manual(local: Callable[..., Any], plan: Plan, in_axes: Any, out_axes: Any) -> Callable[..., Any]:
    """`local` on every device's own part of the arrays; on one device `local` itself.

    Args:
      local: a function of local arrays, which names its collectives.
      plan: mesh and rules.
      in_axes: logical axes of each argument, in trees of the arguments' forms (an argument's axes are a tuple).
      out_axes: the same of what it returns.
    """
    if plan.mesh.size == 1:
        return local

    def specs(axes: Any) -> Any:
        return jax.tree.map(plan.spec, axes, is_leaf=_is_axes)  # None, for an argument that is None, stays

    return jax.shard_map(local, mesh=plan.mesh, in_specs=specs(in_axes), out_specs=specs(out_axes), check_vma=False)


def _is_axes(tree: Any) -> bool:
    plain = isinstance(tree, tuple) and not hasattr(tree, "_fields")  # a NamedTuple is a tree
    return plain and all(axis is None or isinstance(axis, str) for axis in tree)


def gather(x: jax.Array, stored: Axes, used: Axes, plan: Plan) -> jax.Array:
    """Inside `manual`: `x` from the layout it is stored in to the one it is used in, split over fewer mesh axes."""
    for dim, moved in _moved(stored, used, plan):
        x = jax.lax.all_gather(x, moved, axis=dim, tiled=True)
    return x


def reduce(x: jax.Array, partial: Iterable[MeshAxis], used: Axes, stored: Axes, plan: Plan) -> jax.Array:
    """Inside `manual`: the transpose of `gather`, for an `x` that is a partial sum over the mesh axes `partial`.

    Those that split a dim of the stored layout are reduce-scattered, the others all-reduced.
    """
    left = set(partial)
    for dim, moved in _moved(stored, used, plan):
        if left.issuperset(moved):
            x = _reduce_scatter(x, moved, dim, plan.pieces(moved))
            left.difference_update(moved)
        else:
            size = x.shape[dim] // plan.pieces(moved)
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(moved) * size, size, dim)
    rest = tuple(axis for axis in plan.mesh.axis_names if axis in left)
    return jax.lax.psum(x, rest) if rest else x


def _reduce_scatter(x: jax.Array, mesh_axes: tuple[MeshAxis, ...], dim: int, pieces: int) -> jax.Array:
    """The sum over mesh axes, each device left with its piece of `dim`.

    The pieces are moved to the front first: XLA:TPU turns a reduce-scatter of any other dim but the last into an
    all-reduce of the whole and a slice, twice the bytes.
    """
    front, back = x.shape[:dim], x.shape[dim + 1 :]
    piece = x.shape[dim] // pieces
    if dim == x.ndim - 1:
        return jax.lax.psum_scatter(x, mesh_axes, scatter_dimension=dim, tiled=True)
    x = jax.lax.optimization_barrier(x.reshape(*front, pieces * piece, -1))
    x = jnp.moveaxis(x.reshape(*front, pieces, piece, -1), dim, 0)
    x = jax.lax.psum_scatter(x.reshape(-1, piece, x.shape[-1]), mesh_axes, scatter_dimension=0, tiled=True)
    return x.reshape(*front, piece, *back)


def split_over(axes: Axes, plan: Plan) -> tuple[MeshAxis, ...]:
    """The mesh axes that split any of these logical axes: those over which a sum along them is partial."""
    return tuple(mesh_axis for axis in axes for mesh_axis in plan.mesh_axes(axis))


def _moved(stored: Axes, used: Axes, plan: Plan) -> list[tuple[int, tuple[MeshAxis, ...]]]:
    """The dims that the stored layout splits further than the used one, and the mesh axes that make the difference."""
    moves = []
    for dim, (outer, inner) in enumerate(zip(stored, used, strict=True)):
        kept = plan.mesh_axes(inner)
        if extra := plan.mesh_axes(outer)[len(kept) :]:
            moves.append((dim, extra))
    return moves
