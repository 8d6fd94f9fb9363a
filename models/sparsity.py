"""The sparse matrices of a model, and the forms in which they multiply."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxpar.base.config import ModelConfig
from jaxpar.base.config.sparsity import MATRICES
from jaxpar.base.errors import UserError
from jaxpar.base.layout.sharding import Axes, Layout, state_axes
from jaxpar.kernels.weight_forms import CyclicBlocks, NOfM, WeightForm
from jaxpar.models.part_protocols import Params
from jaxpar.parallel.linear.weight_view import read, require_units

_OUTER = ("layers", "experts")
"""The dims that a matrix may be stacked over."""


def weight_form(config: ModelConfig, name: str) -> WeightForm | None:
    """Return the form in which a matrix of a block multiplies; None = it multiplies as it is
    stored.

    Args:
      config: its `sparsity` says which matrices are sparse.
      name: the name of the matrix, such as `up`.
    """
    sparsity = config.sparsity
    if name not in sparsity.names((name,)):
        return None
    if sparsity.pattern == "cyclic":
        return CyclicBlocks(*sparsity.counts, *sparsity.block_size)
    return NOfM(*sparsity.counts, *sparsity.block_size)


def require_sparse(config: ModelConfig, names: Sequence[str], own_block: str | None) -> None:
    """Refuse sparse matrices where the block lacks one that is named, or reads its weights itself.

    Args:
      config: its `sparsity` has a form.
      names: the names of the block's parameters.
      own_block: the name of a block of one's own; None = the block is the library's.

    Raises:
      UserError: the block has no such matrix, the block is one's own, or there are shared experts.
    """
    form = config.sparsity.form
    if own_block:
        raise UserError(
            f"model.sparsity.form={form}, and {own_block} reads its weights itself: leave the form "
            "empty, and give the ops a jaxpar.parallel.WeightView of each sparse weight"
        )
    for name in config.sparsity.targets:
        if name not in names:
            there = ", ".join(one for one in MATRICES if one in names)
            raise UserError(
                f"model.sparsity.targets: {config.family} has no matrix {name!r}: it has {there}"
            )
    of_experts = config.sparsity.names(("gate", "up", "down"))
    if config.shared_experts and of_experts:
        raise UserError(
            f"model.sparsity.form={form} of {', '.join(of_experts)} with model.shared_experts="
            f"{config.shared_experts}, whose matrices have no sparse form: leave shared experts "
            "out, or name other matrices in model.sparsity.targets"
        )


def form_of_parameter(config: ModelConfig, name: str) -> WeightForm | None:
    """Return the form of a parameter by its whole name, such as `blocks.up`; None = it has none."""
    part, _, matrix = name.partition(".")
    if part != "blocks" or matrix not in config.sparsity.names():
        return None
    return weight_form(config, matrix)


def read_stacked(weight: jax.Array, form: WeightForm | None, axes: Axes) -> jax.Array:
    """Make the form of a parameter, which may be stacked over layers and experts.

    Args:
      form: the form; None = the parameter multiplies as it is stored.
      axes: the logical axes of the parameter; a matrix's begin or end with `embed`.

    Returns:
      The array that multiplies, of the same shape and dtype.
    """
    outer, ins = matrix_split(axes)
    return read(weight, form, ins, outer)


def matrix_split(axes: Axes) -> tuple[int, int]:
    """Count the dims that a matrix is stacked over, and the dims that it sums over.

    It sums over `embed`, or over all other dims where it maps to the residual stream.
    """
    outer = sum(axis in _OUTER for axis in axes)
    if axes[-1] == "embed":
        return outer, len(axes) - 1 - outer
    return outer, 1


def require_whole_groups(config: ModelConfig, axes: Params, shapes: Params, layout: Layout) -> None:
    """Refuse a layout of parameters, or of their gradients and moments, in which the entries of a
    sparse matrix that are read together lie on several devices.

    Args:
      config: its `sparsity` says which matrices are sparse.
      axes: the logical axes of a block's parameters.
      shapes: the same parameters, stacked, as ShapeDtypeStructs.
      layout: the layout of the parameters, or of their gradients and moments.

    Raises:
      UserError: a device has no whole number of groups.
    """
    for name in config.sparsity.names(tuple(axes)):
        form = weight_form(config, name)
        outer, ins = matrix_split(axes[name])
        for laid_out in (axes[name], state_axes(axes[name])):
            shape = shapes[name].shape
            require_units(form, shape, laid_out, layout, ins, outer, what=f"blocks.{name}")
