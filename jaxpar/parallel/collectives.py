"""Moves of arrays between layouts inside `shard_map`, with their collectives and the mesh axes that
these run over.

If XLA chose the collectives, it might turn partial sums into all-reduces and small gathers into
large ones. Here every collective of an op is written out in its place, so that a layout's
communication is known in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jaxpar.base.errors import UserError
from jaxpar.base.hardware import LANES
from jaxpar.base.layout.mesh import MeshAxis
from jaxpar.base.layout.sharding import Axes, Layout, LogicalAxis, PyTree, state_axes
from jaxpar.base.layout.specs import is_axes

Out = TypeVar("Out")


def manual(
    local: Callable[..., Out], layout: Layout, in_axes: PyTree, out_axes: PyTree
) -> Callable[..., Out]:
    """Return a function that runs `local` on every device's own part of the arrays; on one device
    it is `local` itself.

    Inside a `shard_map` over some mesh axes (a pipeline's stages) the parts are those along the
    other axes, even where these have size 1. With only a part manual, XLA:CPU aborts at a bfloat16
    `psum`, and Mosaic kernels are refused.

    Args:
      local: a function of local arrays that names its collectives.
      layout: mesh and rules, by which the logical axes are split.
      in_axes: the logical axes of each argument, in trees of the arguments' forms (an array's axes
        are a tuple).
      out_axes: the logical axes of the result, in a tree of its form.

    Returns:
      A function of the global arrays, or of the parts that the `shard_map` around it has.

    Raises:
      UserError: `jax.set_mesh` has a mesh of Explicit axes.
    """
    context = jax.sharding.get_abstract_mesh()
    around = context.manual_axes
    axes = frozenset(layout.mesh.axis_names).difference(around)
    if not axes or (not around and layout.mesh.size == 1):
        return local
    if AxisType.Explicit in context.axis_types:
        names = ", ".join(map(str, context.axis_names))
        raise UserError(
            f"jax.set_mesh has a mesh of Explicit axes ({names}), "
            "in which nothing may be laid out by the ops: set layout.mesh, whose axes are Auto, or "
            "none"
        )

    def specs(axes: PyTree) -> PyTree:
        # None stays, for an argument that is None
        return jax.tree.map(layout.spec, axes, is_leaf=is_axes)

    return jax.shard_map(
        local,
        mesh=None if around else layout.mesh,
        in_specs=specs(in_axes),
        out_specs=specs(out_axes),
        axis_names=axes,
        check_vma=False,
    )


def manual_vjp(
    forward: Callable[..., Out],
    backward: Callable[..., tuple[PyTree, ...]],
    layout: Layout,
    in_axes: tuple[PyTree, ...],
    out_axes: PyTree,
) -> Callable[..., Out]:
    """Return `manual(forward, ...)` with a gradient that is written out, so that every collective
    of the backward stands where it should.

    Args:
      forward: a function of local arrays. Its arguments are kept for `backward`.
      backward: a function of the same arguments and of the cotangent of the result. It returns the
        gradient of each argument, laid out as gradients are (`state_axes`), and None for an
        argument of integers.
      layout: mesh and rules, by which the logical axes are split.
      in_axes: the logical axes of each argument, in trees of the arguments' forms.
      out_axes: the logical axes of the result of `forward`.

    Returns:
      A function of the global arrays that JAX can differentiate once, in reverse.

    Raises:
      UserError: when the function is called, and `jax.set_mesh` has a mesh of Explicit axes.
    """

    @jax.custom_vjp
    def run(*args: PyTree) -> Out:
        return manual(forward, layout, in_axes, out_axes)(*args)

    def pull(args: tuple[PyTree, ...], cotangent: Out) -> tuple[PyTree, ...]:
        def gradient_axes(axes: Axes, x: jax.Array) -> Axes | None:
            if jnp.issubdtype(x.dtype, jnp.floating):
                return state_axes(axes)
            return None

        gradients = jax.tree.map(gradient_axes, in_axes, args, is_leaf=is_axes)
        return manual(backward, layout, (*in_axes, out_axes), gradients)(*args, cotangent)

    run.defvjp(lambda *args: (run(*args), args), pull)
    return run


def platform_of(layout: Layout) -> str:
    """Return the platform of the layout's devices: `cpu`, `gpu` or `tpu`."""
    return layout.mesh.devices.flat[0].platform


def capability_of(layout: Layout) -> str:
    """Return the compute capability of the layout's GPUs, such as `9.0`; empty for other devices.
    The GPUs may be absent.
    """
    return str(getattr(layout.mesh.devices.flat[0], "compute_capability", ""))


def gather(
    x: jax.Array,
    stored: Axes,
    used: Axes,
    layout: Layout,
) -> jax.Array:
    """Inside `manual`: move an array from the layout it is stored in to the one it is used in,
    split over fewer mesh axes.

    Args:
      x: this device's part, as it is stored.
      stored: the logical axes of the stored array.
      used: the logical axes of the array as it is used, one for each dim.

    Returns:
      This device's part as it is used; a dim is larger by the devices it was gathered from.

    Raises:
      UserError: the mesh axes that split a dim as it is used are not the first of those that split
        it as stored.
    """
    for dim, moved in further_split(stored, used, layout):
        x = jax.lax.all_gather(x, moved, axis=dim, tiled=True)
    return x


def reduce(
    x: jax.Array, partial: Iterable[MeshAxis], used: Axes, stored: Axes, layout: Layout
) -> jax.Array:
    """Inside `manual`: the transpose of `gather`, for a partial sum.

    The sum is reduce-scattered over those mesh axes that split a dim of the stored layout, and
    all-reduced over the others. Where a dim is split over an axis along which `x` is the same on
    every device, each device keeps its own piece.

    Args:
      x: this device's summand, as it is used.
      partial: the mesh axes over which the sum is partial.
      used: the logical axes of the array as it is used.
      stored: the logical axes of the sum as it is stored, one for each dim.

    Returns:
      This device's part of the sum, as it is stored.

    Raises:
      UserError: the mesh axes that split a dim as it is used are not the first of those that split
        it as stored.
    """
    left = set(partial)
    for dim, moved in further_split(stored, used, layout):
        # outermost first: each cuts the piece left by the last
        for summed, run in groupby(moved, left.__contains__):
            mesh_axes = tuple(run)
            if summed:
                cut = reduce_scatter
            else:
                cut = own_piece
            x = cut(x, mesh_axes, dim, layout.pieces(mesh_axes))
        left.difference_update(moved)
    rest = tuple(axis for axis in layout.mesh.axis_names if axis in left)
    return jax.lax.psum(x, rest) if rest else x


def own_piece(
    x: jax.Array,
    mesh_axes: tuple[MeshAxis, ...],
    dim: int,
    pieces: int,
) -> jax.Array:
    """Inside `manual`: cut out each device's piece of an array that is the same along some mesh
    axes.

    Args:
      mesh_axes: the mesh axes, outermost first.
      dim: the dim that is cut.
      pieces: the number of devices along these axes, which divides the dim.

    Returns:
      The piece, in which the dim is smaller by `pieces`.
    """
    size = x.shape[dim] // pieces
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(mesh_axes) * size, size, dim)


def reduce_scatter(
    x: jax.Array, mesh_axes: tuple[MeshAxis, ...], dim: int, pieces: int
) -> jax.Array:
    """Inside `manual`: sum over mesh axes and leave each device with its piece of `dim`.

    The pieces are first moved to the front, each as rows whose lanes are full where its dims allow.
    In other forms XLA:TPU may use an all-reduce of the whole and a slice, which sends twice the
    bytes. This happens with a dim in the middle, with a last dim of 16-bit numbers or of pieces
    that fill half the lanes, and with a few long rows.

    Args:
      x: this device's summand, whole.
      mesh_axes: the mesh axes to sum over, outermost first.
      dim: the dim that is cut.
      pieces: the number of devices along these axes, which divides the dim.

    Returns:
      The piece of the sum, in which the dim is smaller by `pieces`.
    """
    front = x.shape[:dim]
    back = x.shape[dim + 1 :]
    piece = x.shape[dim] // pieces
    if not back and piece % LANES == 0 and x.dtype.itemsize == 4:
        return jax.lax.psum_scatter(x, mesh_axes, scatter_dimension=dim, tiled=True)
    widths = [math.prod(back[n:]) for n in range(len(back))] or [piece]
    width = next(
        (width for width in reversed(widths) if width % LANES == 0),
        widths[0],
    )
    if back:
        x = jax.lax.optimization_barrier(
            x.reshape(
                *front,
                x.shape[dim],
                -1,
                width,
            )
        )
    x = jnp.moveaxis(x.reshape(*front, pieces, -1, width), dim, 0).reshape(
        pieces,
        -1,
        width,
    )
    return jax.lax.psum_scatter(x, mesh_axes, scatter_dimension=0).reshape(
        *front,
        piece,
        *back,
    )


def first_row(axis: LogicalAxis | None, rows: int, layout: Layout) -> jax.Array | int:
    """Inside `manual`: find where this device's rows of a split dim begin in the whole array.

    Args:
      axis: the logical axis of the rows; None = they are not split.
      rows: how many rows each device has.

    Returns:
      The first row's number in the whole array, known at run time where the rows are split.
    """
    split = layout.mesh_axes(axis)
    if split:
        return jax.lax.axis_index(split) * rows
    return 0


def split_over(axes: Axes, layout: Layout) -> tuple[MeshAxis, ...]:
    """Return the mesh axes that split any of these logical axes: a sum along these logical axes is
    partial over them.
    """
    return tuple(mesh_axis for axis in axes for mesh_axis in layout.mesh_axes(axis))


def further_split(
    stored: Axes, used: Axes, layout: Layout
) -> list[tuple[int, tuple[MeshAxis, ...]]]:
    """Find the dims that the stored layout splits further than the used one.

    Args:
      stored: the logical axes of an array as it is stored.
      used: the logical axes of the array as it is used, one for each dim.

    Returns:
      For each such dim its number, and the mesh axes that split it only as it is stored, outermost
      first.

    Raises:
      UserError: the mesh axes that split a dim as it is used are not the first of those that split
        it as stored.
    """
    moves = []
    for dim, (outer, inner) in enumerate(zip(stored, used, strict=True)):
        split = layout.mesh_axes(outer)
        kept = layout.mesh_axes(inner)
        if split[: len(kept)] != kept:
            fitting = ", ".join(
                (
                    *kept,
                    *(axis for axis in split if axis not in kept),
                )
            )
            raise UserError(
                f"dim {dim} is used split over {_words(inner, kept)} and stored split over "
                f"{_words(outer, split)}, "
                f"which does not begin with it: try rules.{outer}=({fitting})"
            )
        if extra := split[len(kept) :]:
            moves.append((dim, extra))
    return moves


def _words(axis: LogicalAxis | None, split: tuple[MeshAxis, ...]) -> str:
    return f"{' x '.join(split) or 'nothing'} (rules.{axis})"
