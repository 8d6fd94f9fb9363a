"""Sparse matrices as the values and indices of their entries, from which runtimes with 2:4 hardware
begin.

Of each M neighbours N values are kept, in their order, each with its place among the M. Places are
bytes here, which every reader has; tensor cores read them in 2 bits each.

Shapes: G groups of M along the dim that is summed over.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt8
from safetensors.numpy import save_file

from jaxpar.base.errors import UserError
from jaxpar.kernels.weight_forms import NOfM
from jaxpar.models.hf.config_json import hf_config
from jaxpar.models.hf.export import hf_tensors, require_library_parts, write_folder, write_json
from jaxpar.models.hf.families import HF_FAMILIES, model_type
from jaxpar.models.hf.layout import Dtype, Tensor, hf_layout
from jaxpar.models.hf.load import shift_norms
from jaxpar.models.model import Model
from jaxpar.models.part_protocols import Params
from jaxpar.models.sparsity import form_of_parameter
from jaxpar.models.views import base_config

COMPRESSED = "compressed.safetensors"
"""The file's name, which is not the name of a file of dense tensors, so that no reader takes the
file for one.
"""
_ROWS = ("out", "down")
"""The matrices that map to the residual stream; the others sum over it."""


class Compressed(NamedTuple):
    """A matrix of form N:M.

    Attributes:
      values: the entries that multiply; the dim that is summed over is N / M as long.
      indices: the place of each value among its M neighbours, of the same shape.
    """

    values: np.ndarray
    indices: UInt8[np.ndarray, ...]


def compress(matrix: np.ndarray, form: NOfM, dim: int) -> Compressed:
    """Take the values that multiply out of a matrix.

    Args:
      matrix: the matrix, with or without zeros for the other entries.
      form: a form N of M of single entries.
      dim: the dim that is summed over, whose size is a multiple of M.

    Returns:
      The values and their indices.
    """
    groups_GM = _in_groups(matrix, form.m, dim)
    kept = np.asarray(form.mask(jnp.asarray(groups_GM)[..., None]))[..., 0]
    places = np.argsort(~kept, axis=-1, kind="stable")[..., : form.n]
    values = np.take_along_axis(groups_GM, places, axis=-1)
    flat = (*groups_GM.shape[:-2], -1)
    return Compressed(
        np.moveaxis(values.reshape(flat), -1, dim),
        np.moveaxis(places.astype(np.uint8).reshape(flat), -1, dim),
    )


def expand(compressed: Compressed, form: NOfM, dim: int) -> np.ndarray:
    """Return the matrix, with its zeros, that `compress` took the values and indices from with the
    same form and dim.
    """
    values_GN = _in_groups(compressed.values, form.n, dim)
    places_GN = _in_groups(compressed.indices, form.n, dim)
    groups_GM = np.zeros((*values_GN.shape[:-1], form.m), compressed.values.dtype)
    np.put_along_axis(groups_GM, places_GN.astype(np.int64), values_GN, axis=-1)
    flat = (*groups_GM.shape[:-2], -1)
    return np.moveaxis(groups_GM.reshape(flat), -1, dim)


def _in_groups(matrix: np.ndarray, size: int, dim: int) -> np.ndarray:
    """Put a dim last, and cut it into groups of a size."""
    moved = np.moveaxis(matrix, dim, -1)
    return moved.reshape(*moved.shape[:-1], -1, size)


def export_compressed(
    params: Params, model: Model, folder: str | Path, dtype: Dtype = "float32"
) -> None:
    """Write a folder of config.json and `compressed.safetensors`, in which each sparse tensor NAME
    of the model's Hugging Face checkpoint is NAME.values and NAME.indices, and the others are as
    they are.

    config.json has a key `sparsity`, with N, M and the dim of each sparse tensor. The compressed
    model passes through the memory of process 0.

    Args:
      params: the parameters, in any sharding.
      folder: a folder that does not exist yet or is empty.
      dtype: the dtype of the values.

    Raises:
      UserError: no matrix is sparse, whole blocks are, or `export_hf` refuses the model or the
        folder.
    """
    require_library_parts(model)
    sparsity = model.config.sparsity
    if not sparsity.form or sparsity.block:
        raise UserError(
            f"--compressed: model.sparsity.form={sparsity.form!r} and "
            f"block={list(sparsity.block)}: only single entries of a form such as 2:4 are "
            "compressed: leave it out"
        )
    form = NOfM(*sparsity.counts)
    family = HF_FAMILIES[model_type(model.config)]
    tensors = hf_layout(model)
    dims = {tensor.name: _summed_dim(tensor, model) for tensor in tensors}
    arrays = hf_tensors(shift_norms(params, -family.norm_offset), model, dtype)

    def write(unfinished: Path) -> None:
        stored = dict[str, np.ndarray]()
        for name, array in arrays:
            dim = dims[name]
            if dim is None:
                stored[name] = np.ascontiguousarray(array)
                continue
            parts = compress(array, form, dim)
            stored[f"{name}.values"] = np.ascontiguousarray(parts.values)
            stored[f"{name}.indices"] = np.ascontiguousarray(parts.indices)
        save_file(stored, unfinished / COMPRESSED, {"format": "pt"})
        summed = {name: dim for name, dim in dims.items() if dim is not None}
        told = {"sparsity": {"n": form.n, "m": form.m, "summed_dims": summed}}
        config = hf_config(base_config(model.config))
        write_json(unfinished / "config.json", config | {"dtype": dtype} | told)

    write_folder(Path(folder), write, arrays)


def _summed_dim(tensor: Tensor, model: Model) -> int | None:
    """Return the dim of a tensor that a matmul sums over; None where not all of it is sparse."""
    if any(form_of_parameter(model.config, name) is None for name in tensor.params):
        return None
    of_stream = tensor.dims.index("D")
    is_row = tensor.params[0].rpartition(".")[2] in _ROWS
    return 1 - of_stream if is_row else of_stream
