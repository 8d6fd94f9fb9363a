"""The writing of Hugging Face safetensors checkpoints, tensor by tensor, so that no host ever holds
the whole model.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxpar.base.atomic_write import sync, sync_below
from jaxpar.base.errors import UserError, require_local, suggest
from jaxpar.base.layout.sharding import Axes, path_name
from jaxpar.base.layout.specs import is_axes
from jaxpar.kernels.weight_forms import WeightForm
from jaxpar.models.hf.config_json import hf_config
from jaxpar.models.hf.families import HF_FAMILIES, Json, model_type
from jaxpar.models.hf.layout import (
    Dtype,
    Tensor,
    dim_letters,
    dim_sizes,
    hf_layout,
    require_mapping,
)
from jaxpar.models.hf.load import shift_norms
from jaxpar.models.lora import lora_scale
from jaxpar.models.model import Model
from jaxpar.models.part_protocols import Params
from jaxpar.models.sparsity import form_of_parameter, read_stacked
from jaxpar.models.views import base_config

_WRITTEN = {"float32": "F32", "bfloat16": "BF16"}


def export_hf(
    params: Params,
    model: Model,
    folder: str | Path,
    max_shard_bytes: int = 5 * 10**9,
    dtype: Dtype = "float32",
    token_ids: Mapping[str, Any] | None = None,
) -> None:
    """Write a folder that `transformers` loads: config.json and safetensors, in one file or in
    several with an index.

    LoRA's pairs are merged into the matrices that they stand beside: W + (alpha / rank) A B,
    computed in float32; sparse matrices are written with their zeros. One tensor at a time passes
    through host memory. Every process must call this, because parameters split over hosts are
    gathered, tensor by tensor; process 0 writes. The folder appears whole, by a rename, or not at
    all.

    Args:
      params: parameters in any sharding.
      folder: a folder that does not exist yet or is empty.
      max_shard_bytes: the size of the largest file, in bytes of tensors; a larger tensor gets a
        file of its own.
      dtype: the dtype of the tensors that are written.
      token_ids: the keys of config.json about the tokenizer, such as `{"eos_token_id": [1, 106]}`;
        missing ones are null.

    Raises:
      UserError: the model has parts of one's own, the folder has files in it, the dtype is unknown,
        the sizes have no Hugging Face form, or a write failed.
    """
    if dtype not in _WRITTEN:
        raise UserError(
            f"cannot export dtype {dtype!r}{suggest(dtype, _WRITTEN)}: it is one of "
            f"{', '.join(_WRITTEN)}"
        )
    require_library_parts(model)
    config = hf_config(base_config(model.config)) | {"dtype": dtype} | dict(token_ids or {})
    params = shift_norms(params, -HF_FAMILIES[model_type(model.config)].norm_offset)
    arrays = hf_tensors(params, model, dtype)

    def write(unfinished: Path) -> None:
        write_json(unfinished / "config.json", config)
        _write_files(unfinished, hf_layout(model), max_shard_bytes, arrays, dtype)

    write_folder(Path(folder), write, arrays)


def require_library_parts(model: Model) -> None:
    """Refuse a model with parts of one's own, which nobody who loads the folder would compute.

    Raises:
      UserError: the model has such a part.
    """
    for part, name in model.own_parts().items():
        raise UserError(
            f"{part}={name} is a part of your own, and transformers would compute "
            f"{model.config.family}: keep the run folder, or write the arrays of "
            "jaxpar.models.hf.export.hf_tensors for a reader that knows it"
        )


def write_folder(
    folder: Path,
    write: Callable[[Path], None],
    arrays: Iterator[object],
) -> None:
    """Let process 0 write a new folder, which appears whole or not at all. All processes must call
    this.

    Args:
      folder: a folder that does not exist yet or is empty.
      write: fills the folder that it is given, from `arrays`.
      arrays: the arrays that all processes make together, one after another.

    Raises:
      UserError: the path is a URL, there is something at it, or it cannot be written.
    """
    require_local(folder)
    if folder.exists() and not (folder.is_dir() and next(folder.iterdir(), None) is None):
        raise UserError(f"{folder} is there already and not an empty folder: export into a new one")
    if jax.process_index() == 0:
        unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
        try:
            unfinished.mkdir(parents=True)
            write(unfinished)
            sync_below(unfinished)
            unfinished.rename(folder)
            sync(folder.parent)
        except OSError as error:
            raise UserError(
                f"cannot write {folder}: {error.strerror}: free some space, or export elsewhere"
            ) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)  # it no longer exists once it was renamed
    else:
        for _ in arrays:  # each process takes part in each gather
            pass
    multihost_utils.sync_global_devices("export_hf")


def hf_tensors(
    params: Params, model: Model, dtype: Dtype = "float32", layout: Sequence[Tensor] | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor of a model's checkpoint, in the file's order; each is fetched on demand.

    Args:
      params: the parameters, or arrays of the same form, such as gradients.
      dtype: the dtype of the values.
      layout: the tensors to yield; None = all tensors of the model's checkpoint.

    Yields:
      The name and the value of a tensor, with the dims of the file and without the vocabulary's
      padding.

    Raises:
      UserError: the model's parameters are not the ones that the family's checkpoints have.
    """
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    require_mapping(model)
    letters = dim_letters(model)
    sizes = dim_sizes(model)
    scale = lora_scale(model.config.lora)
    every_axes = {
        path_name(path): axes
        for path, axes in jax.tree_util.tree_leaves_with_path(model.axes, is_leaf=is_axes)
    }
    for tensor in hf_layout(model) if layout is None else layout:
        parts = []
        for name in tensor.params:
            pair = name.replace("blocks.", "blocks.lora.")
            group = [leaves[key] for key in (name, f"{pair}.a", f"{pair}.b") if key in leaves]
            axes = every_axes[name][len(tensor.slices) :]
            form = form_of_parameter(model.config, name)
            host = _fetch(_piece(group, tensor.slices, dtype, scale, form, axes))
            # without the vocabulary's padding
            host = host[tuple(slice(sizes[c]) for c in letters[name])]
            host = host.transpose([letters[name].index(c) for c in "".join(tensor.dims)])
            parts.append(
                host.reshape([math.prod(sizes[c] for c in merged) for merged in tensor.dims])
            )
        yield (
            tensor.name,
            parts[0]
            if len(parts) == 1
            else np.concatenate(
                parts,
                axis=-1 if tensor.along is None else tensor.along,
            ),
        )


def _fetch(piece: jax.Array) -> np.ndarray:
    """Copy a piece to this host. This is a function of its own so that nothing holds the piece
    while the next one is made.
    """
    return np.asarray(
        piece
        if piece.is_fully_addressable
        else multihost_utils.process_allgather(piece, tiled=True)
    )


@partial(jax.jit, static_argnames=("dtype", "scale", "form", "axes"))
def _piece(
    group: list[jax.Array],
    index: tuple[int, ...],
    dtype: Dtype,
    scale: float,
    form: WeightForm | None,
    axes: Axes,
) -> jax.Array:
    """Slice a stacked parameter, or take all of another, as a new array: jax keeps the host copy of
    an array that numpy has seen. A LoRA pair that follows the parameter in the group is merged into
    it, in float32. A sparse matrix has its zeros; `axes` are the logical axes of the slice.
    """

    def cut(leaf: jax.Array) -> jax.Array:
        for number in index:
            # Indexing a dim that is split over devices would gather all slices on each device. A
            # sum moves only one slice, and a sum of bits leaves it unchanged.
            here = (jnp.arange(len(leaf)) == number).reshape(
                -1,
                *[1] * (leaf.ndim - 1),
            )
            bits = jnp.dtype(f"int{8 * leaf.dtype.itemsize}")
            leaf = jnp.sum(leaf.view(bits), axis=0, where=here, dtype=bits).view(leaf.dtype)
        return leaf

    leaf, *pair = map(cut, group)
    if pair:
        a, b = (x.astype("float32") for x in pair)
        leaf = leaf.astype("float32") + scale * jnp.tensordot(
            a,
            b,
            1,
            precision="highest",
        )
    if form is not None:
        leaf = read_stacked(leaf, form, axes)
    return leaf.astype(dtype)


def _write_files(
    folder: Path,
    tensors: list[Tensor],
    max_bytes: int,
    arrays: Iterator[tuple[str, np.ndarray]],
    dtype: Dtype,
) -> None:
    """Write the safetensors files, each filled in order, and their index when there are several."""
    files = list[list[Tensor]]()
    room = 0
    for tensor in tensors:
        if (size := tensor.bytes(dtype)) > room:
            files.append([])
            room = max_bytes
        files[-1].append(tensor)
        room -= size
    if len(files) == 1:
        return write_tensors(folder / "model.safetensors", tensors, arrays, dtype)
    weight_map: dict[str, str] = {}
    for number, group in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_tensors(folder / name, group, islice(arrays, len(group)), dtype)
        weight_map |= dict.fromkeys((tensor.name for tensor in group), name)
    index = {
        "metadata": {"total_size": sum(tensor.bytes(dtype) for tensor in tensors)},
        "weight_map": weight_map,
    }
    write_json(folder / "model.safetensors.index.json", index)


def write_tensors(
    file: Path, tensors: list[Tensor], arrays: Iterable[tuple[str, np.ndarray]], dtype: Dtype
) -> None:
    """Write one file: header length, JSON header, data. The `save_file` of safetensors needs all
    tensors at once.

    Args:
      file: the file, which must not exist yet.
      tensors: the tensors of the file, in its order.
      arrays: the names and values of the tensors in the same order, in `dtype`.
      dtype: the dtype that the header states for all tensors.

    Raises:
      OSError: the file is there already or cannot be written.
    """
    header: Json = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start = end
        end = end + tensor.bytes(dtype)
        header[tensor.name] = {
            "dtype": _WRITTEN[dtype],
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    with file.open("xb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, array in arrays:
            out.write(np.ascontiguousarray(array).view(np.uint8).data)


def write_json(file: Path, value: Json) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
