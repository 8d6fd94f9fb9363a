"""The reading of Hugging Face safetensors checkpoints, tensor by tensor, so that no host ever holds
the whole model.

Shapes: V vocab, P positions, D embed, H heads, K kv heads, h head_dim, F mlp, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors import SafetensorError, safe_open

from jaxpar.base.errors import UserError, read_json, reading
from jaxpar.base.layout.plan import Plan, param_dtype
from jaxpar.base.layout.sharding import Axes, KeyPath, path_name
from jaxpar.models.hf.config_json import hf_config, model_config_from_hf
from jaxpar.models.hf.families import HF_FAMILIES, model_type
from jaxpar.models.hf.layout import (
    Tensor,
    base_model,
    dim_letters,
    dim_sizes,
    hf_layout,
    require_mapping,
)
from jaxpar.models.hf.misfits import other_head, require_unquantised, what_helps
from jaxpar.models.model import Model
from jaxpar.models.part_protocols import Params

__all__ = ["hf_config", "import_hf", "model_config_from_hf"]

Bounds = tuple[tuple[int, int], ...]  # (start, stop) of each dim
# reads a block of a parameter, or of one of the arrays stacked in it
Read = Callable[[Bounds], np.ndarray]

_READABLE = ("F32", "BF16", "F16")


class Source(NamedTuple):
    """A tensor of a safetensors file, not read yet."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self, index: slice | tuple[slice, ...]) -> np.ndarray:
        """Read a part. The file is opened for it alone: the pages of a mapped file that were read
        count as this process's memory until it is closed."""
        with safe_open(self.file, framework="numpy") as handle:
            return handle.get_slice(self.name)[index]


def import_hf(
    path: str | Path,
    model: Model,
    plan: Plan,
    allow_nonfinite: bool = False,
) -> Params:
    """Read parameters from a Hugging Face checkpoint, each straight into its sharding and the dtype
    it is stored in.

    All names, shapes and dtypes are checked before any data is read. Each process reads only what
    its devices hold, and its memory holds one device's part of one tensor at a time, as it is read
    and as it is stored. The vocabulary's padding is zeros. LoRA's matrices are not among the
    parameters.

    Args:
      path: a folder with model.safetensors or model.safetensors.index.json; its tensors are
        float32, bfloat16 or float16.
      model: the model of the checkpoint, such as `Model(model_config_from_hf(path))`.
      plan: the plan that says where the parameters go.
      allow_nonfinite: whether entries may be NaN or infinite.

    Returns:
      The parameters, in the tree of `model.shapes()` without LoRA.

    Raises:
      UserError: the checkpoint cannot be read, does not fit the model or has an entry that is not
        finite, or the plan does not fit the model.
    """
    model = base_model(model)
    require_mapping(model)
    folder = Path(path)
    pairs = _match(find_tensors(_files(folder)), model, folder)
    read = read_params(pairs, model, plan, model.shapes(), allow_nonfinite)
    return shift_norms(read, HF_FAMILIES[model_type(model.config)].norm_offset)


def shift_norms(params: Params, by: float) -> Params:
    """Add the number that a checkpoint leaves out to the scales of norms.

    Args:
      params: parameters as they were read.
      by: the number that is added to each entry, such as 1.

    Returns:
      The parameters, with other arrays where a path ends with `norm.scale`.
    """

    def shift(path, leaf):
        if path_name(path).endswith("norm.scale"):
            return leaf + by
        return leaf

    if by:
        return jax.tree_util.tree_map_with_path(shift, params)
    return params


def read_params(
    pairs: Sequence[tuple[Tensor, Source]],
    model: Model,
    plan: Plan,
    shapes: Params,
    allow_nonfinite: bool = False,
) -> Params:
    """Read parameters from the tensors that hold them.

    Args:
      pairs: the tensors, each with where it is read from.
      plan: says where the parameters go, and in which dtype.
      shapes: ShapeDtypeStructs of all or some of the model's parameters.
      allow_nonfinite: whether entries may be NaN or infinite.

    Returns:
      The parameters, in a tree of the form of `shapes`.

    Raises:
      UserError: the plan does not fit the model, or an entry is not finite and has to be.
    """
    finish = (lambda found, source: found) if allow_nonfinite else _require_finite
    letters = dim_letters(model)
    sizes = dim_sizes(model)
    reads: dict[str, dict[tuple[int, ...], Read]] = {name: {} for name in letters}
    for tensor, source in pairs:
        for part, name in enumerate(tensor.params):
            reads[name][tensor.slices] = partial(
                _read, source, tensor, part, letters[name], sizes, finish
            )

    for name in HF_FAMILIES[model_type(model.config)].first_lacks:
        reads[name].setdefault((0,), _ones)

    def load(tree_path: KeyPath, leaf: jax.ShapeDtypeStruct, axes: Axes) -> jax.Array:
        name = path_name(tree_path)
        stacked = len(leaf.shape) - len(letters[name])
        sharding = plan.sharding(axes, leaf.shape, name)
        return _place(leaf.shape, sharding, param_dtype(axes, plan), reads[name], stacked)

    plan.sharding(model.axes, model.shapes())  # refused before anything is read
    axes = {name: {key: model.axes[name][key] for key in part} for name, part in shapes.items()}
    return jax.tree_util.tree_map_with_path(load, shapes, axes)


def _ones(bounds: Bounds) -> np.ndarray:
    """Make the ones that a layer has in place of a parameter that it does not use."""
    return np.ones([stop - start for start, stop in bounds], np.float32)


def find_tensors(files: Sequence[Path]) -> dict[str, Source]:
    """Find every tensor of a checkpoint's safetensors files, by its name.

    Raises:
      UserError: a file cannot be read as safetensors, or two files have a tensor of one name.
    """
    sources: dict[str, Source] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as handle:
                for name in handle.keys():  # noqa: SIM118 (it is no dict)
                    if name in sources:
                        again = "download it again into an empty folder"
                        raise UserError(f"{file.parent} holds {name} in two files: {again}")
                    tensor = handle.get_slice(name)
                    sources[name] = Source(
                        file, name, tuple(tensor.get_shape()), tensor.get_dtype()
                    )
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file} is truncated or not a safetensors file ({error}): download it again"
            ) from error
    return sources


def _files(folder: Path) -> list[Path]:
    """Find the safetensors files of a checkpoint."""
    if (single := folder / "model.safetensors").is_file():
        return [single]
    if (index := folder / "model.safetensors.index.json").is_file():
        return _index_files(index)
    if not folder.is_dir():
        raise UserError(f"no checkpoint at {folder}: pass the folder that holds model.safetensors")
    if pickled := next(
        (file for ending in ("bin", "pt", "pth") for file in folder.glob(f"*.{ending}")), None
    ):
        raise UserError(
            f"{pickled} is not safetensors, and a PyTorch pickle is never read because it can "
            "run code: convert it "
            f"with transformers' from_pretrained({str(folder)!r}) and save_pretrained"
        )
    if gguf := next(folder.glob("*.gguf"), None):
        raise UserError(
            f"{gguf} is GGUF, whose weights are quantised as a rule, and only safetensors of 16 or "
            "32 bits are read: take the folder of the model that it was made from"
        )
    raise UserError(
        f"{folder} holds no model.safetensors and no index of several: is it the right folder?"
    )


def _index_files(index: Path) -> list[Path]:
    """Return the files that an index names, after checking that all of them are present."""
    names = read_json(index, {"weight_map": dict[str, str]}).get("weight_map")
    if not names:
        raise UserError(
            f"{index} has no weight_map, which says what is in which file: download it again"
        )
    files = [index.parent / name for name in sorted(set(names.values()))]
    for file in files:
        with reading(index):
            beside = file.parent == index.parent and file.is_file()
        if not beside:
            raise UserError(
                f"{index} names {file.name}, which is not beside it: download the missing files"
            )
    return files


def _match(
    sources: dict[str, Source],
    model: Model,
    folder: Path,
) -> list[tuple[Tensor, Source]]:
    """Pair each tensor that the model needs with its source, after checking that names, shapes and
    dtypes all agree.
    """
    family = HF_FAMILIES[model_type(model.config)]
    wanted = {tensor.name.removeprefix(family.prefix): tensor for tensor in hf_layout(model)}
    found: dict[str, Source] = {}
    for name, source in sources.items():
        if name.endswith(family.ignored):
            continue
        bare = name.removeprefix(family.prefix)
        for old, new in family.renamed:
            if bare.endswith(old):
                bare = bare.removesuffix(old) + new
        if bare in found:
            raise UserError(
                f"{folder} holds {bare} twice, with and without {family.prefix!r} before it: "
                "remove one"
            )
        found[bare] = source
    if model.config.tied_head:
        tied_head = found.pop(family.head, None)
    else:
        tied_head = None
    dtypes = {name: source.dtype for name, source in found.items()}
    require_unquantised(folder, list(wanted), dtypes, _READABLE)
    pairs = pair_up(wanted, found, str(folder), partial(what_helps, folder, model))
    if tied_head is not None:
        embedding = next(name for name, tensor in wanted.items() if "embed.tokens" in tensor.params)
        _check_tied(tied_head, found[embedding], model, folder)
    return pairs


def pair_up(
    wanted: dict[str, Tensor],
    found: dict[str, Source],
    origin: str,
    what_helps: Callable[[list[str], list[str]], str],
) -> list[tuple[Tensor, Source]]:
    """Pair tensors with their sources of the same names.

    Args:
      wanted: the tensors of the model, by name.
      found: the tensors of the checkpoint, by name.
      origin: the checkpoint's name in a message.
      what_helps: makes the end of a message from the names that are missing and the names that
        have no place in the model.

    Returns:
      The pairs, in the order of `wanted`.

    Raises:
      UserError: one of the two lacks a name, or a shape or dtype does not agree.
    """
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    if missing:
        problems = [f"it lacks {_first(missing)}"]
    else:
        problems = []
    problems += [f"the model has no place for its {_first(extra)}"] if extra else []
    if problems:
        raise UserError(
            f"{origin} does not fit the model: {', and '.join(problems)}: "
            f"{what_helps(missing, extra)}"
        )
    for name, tensor in wanted.items():
        shape = found[name].shape
        dtype = found[name].dtype
        if shape != tensor.shape:
            raise UserError(
                f"{origin}: {name} has shape {shape}, the model wants {tensor.shape}: "
                f"{what_helps([], [])}"
            )
        if dtype not in _READABLE:
            raise UserError(
                f"{origin}: {name} is {dtype}, not one of {', '.join(_READABLE)}: convert it to "
                "BF16 first"
            )
    return [(tensor, found[name]) for name, tensor in wanted.items()]


def _first(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{names[0]} (and {len(names) - 1} more)"


def _check_tied(head: Source, table: Source, model: Model, folder: Path) -> None:
    """Check the head of a tied model: a checkpoint may hold its vocabulary table twice, but not two
    different ones.
    """
    rows = table.shape[0]
    step = 1024  # compared in pieces, because either table may have gigabytes
    pieces = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    same_shape = head.shape == table.shape
    if not same_shape or not all(np.array_equal(head.read(cut), table.read(cut)) for cut in pieces):
        raise UserError(
            f"{folder}: {head.name} is not the embedding, but the model ties them: "
            f"{other_head(folder, model, same_shape)}"
        )


def _require_finite(found: np.ndarray, source: Source) -> np.ndarray:
    """Return the part of a tensor that was read, or refuse it with a UserError where it has an
    entry that is not finite.
    """
    finite = np.isfinite(found)
    if not finite.all():
        count = found.size - int(np.count_nonzero(finite))
        raise UserError(
            f"{source.file}: {count} of {found.size} entries read of {source.name} are NaN or "
            "infinite, so the model "
            "computes nothing but NaN: download it again, or take it as it is with "
            "train.allow_nonfinite=true"
        )
    return found


def _read(
    source: Source,
    tensor: Tensor,
    part: int,
    letters: str,
    sizes: dict[str, int],
    finish: Callable[[np.ndarray, Source], np.ndarray],
    bounds: Bounds,
) -> np.ndarray:
    """Read a block of parameter number `part` of a tensor; it is smaller than `bounds` where they
    pass the vocabulary.

    Each of the tensor's dims may merge several letters; `bounds` and the result have the order of
    `letters`.
    """
    block = {
        c: (min(start, sizes[c]), min(stop, sizes[c]))
        for c, (start, stop) in zip(letters, bounds, strict=True)
    }
    # nothing but padding; safetensors reads no empty slice
    if any(start == stop for start, stop in block.values()):
        return np.empty([stop - start for start, stop in block.values()])
    # A merged dim is read from the first to the last index of its outermost letter; the inner ones
    # are cut in memory.
    reads = []
    shape = []
    cuts = []
    for outer, *inner in tensor.dims:
        (start, stop), stride = block[outer], math.prod(sizes[c] for c in inner)
        reads.append(slice(start * stride, stop * stride))
        shape += [stop - start, *(sizes[c] for c in inner)]
        cuts += [slice(None), *(slice(*block[c]) for c in inner)]
    if (dim := tensor.along) is not None:
        offset = part * math.prod(sizes[c] for c in tensor.dims[dim])
        reads[dim] = slice(
            reads[dim].start + offset,
            reads[dim].stop + offset,
        )
    order = "".join(tensor.dims)
    return (
        finish(source.read(tuple(reads)), source)
        .reshape(shape)[tuple(cuts)]
        .transpose([order.index(c) for c in letters])
    )


def _place(
    shape: tuple[int, ...],
    sharding: NamedSharding,
    dtype: np.dtype,
    reads: dict[tuple[int, ...], Read],
    stacked: int,
) -> jax.Array:
    """Make a parameter that is stacked over its first dims, layer by layer and expert by expert."""

    def block(read: Read, bounds: Bounds) -> np.ndarray:
        """Read a block in this dtype; entries past the vocabulary are zeros."""
        out = np.zeros([stop - start for start, stop in bounds], dtype)
        found = read(bounds)
        out[tuple(map(slice, found.shape))] = found
        return out

    if not stacked:
        return _shards(shape, sharding, partial(block, reads[()]))
    local = sharding.shard_shape(shape)[:stacked]
    pieces = tuple(size // here for size, here in zip(shape, local, strict=False))
    whole = _empty(shape, dtype, sharding)
    for place in product(*map(range, local)):

        def read(bounds: Bounds, place: tuple[int, ...] = place) -> np.ndarray:
            index = (
                start * here + at
                for (start, _), here, at in zip(bounds, local, place, strict=False)
            )
            return block(reads[tuple(index)], bounds[stacked:])[(None,) * stacked]

        # each device's slice at this place
        slices = _shards((*pieces, *shape[stacked:]), sharding, read)
        whole = jax.block_until_ready(_write_slices(whole, slices, np.asarray(place), sharding))
    return whole


@partial(jax.jit, static_argnums=(0, 1, 2))
def _empty(
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: NamedSharding,
) -> jax.Array:
    return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)


@partial(jax.jit, static_argnums=3, donate_argnums=0)
def _write_slices(
    whole: jax.Array, slices: jax.Array, place: jax.Array, sharding: NamedSharding
) -> jax.Array:
    def local(
        whole: jax.Array,
        slices: jax.Array,
        place: jax.Array,
    ) -> jax.Array:
        return jax.lax.dynamic_update_slice(
            whole, slices, (*place, *[0] * (whole.ndim - len(place)))
        )

    spec = sharding.spec
    return jax.shard_map(
        local, mesh=sharding.mesh, in_specs=(spec, spec, P()), out_specs=spec, check_vma=False
    )(whole, slices, place)


def _shards(
    shape: tuple[int, ...],
    sharding: NamedSharding,
    read: Read,
) -> jax.Array:
    """Make an array from one block at a time: `jax.make_array_from_callback` holds all blocks, and
    replicas too.
    """
    holders: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(cut.indices(size)[:2] for cut, size in zip(index or (), shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    shards = [shard for bounds, devices in holders.items() for shard in _put(read(bounds), devices)]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _put(
    block: np.ndarray,
    devices: Sequence[jax.Device],
) -> list[jax.Array]:
    """Copy a block to each device and wait for it: unfinished transfers would keep their blocks in
    host memory.
    """
    return jax.block_until_ready([jax.device_put(block, device) for device in devices])
