"""The places of a model's parameters in the tensors of a Hugging Face checkpoint.

Shapes: V vocab, P positions, T token types, D embed, d embed after a head's transform, H heads,
K kv heads, h head_dim, F mlp, E experts, r rank.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.base.errors import UserError
from jaxpar.base.layout.sharding import LogicalAxis, path_name
from jaxpar.models.hf.families import HF_FAMILIES, model_type
from jaxpar.models.model import Model
from jaxpar.models.part_protocols import part_name
from jaxpar.models.views import base_model

Dtype = Literal["float32", "bfloat16"]
_LETTERS: dict[LogicalAxis | None, str] = {
    "vocab": "V",
    "embed": "D",
    "heads": "H",
    "kv_heads": "K",
    "head_dim": "h",
    "mlp": "F",
    "rank": "r",
}
_UNKNOWN = "?"  # a dim of a part of one's own, which no tensor of a family has
# the dim of a parameter that has no logical axis
_NEVER_SPLIT = {
    "embed.positions": "P",
    "embed.types": "T",
    "blocks.router": "E",
    "head.transform.dense": "d",
}


class Tensor(NamedTuple):
    """A tensor of a checkpoint, which holds one or several parameters, or of stacked parameters the
    slice at `slices`: layer, expert. Several lie side by side `along` a dim; None = each of them is
    this one tensor."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    params: tuple[str, ...]
    slices: tuple[int, ...]
    along: int | None = -1

    def bytes(self, dtype: Dtype) -> int:
        return math.prod(self.shape) * jnp.dtype(dtype).itemsize


def hf_layout(model: Model) -> list[Tensor]:
    """List the tensors of a model's checkpoint in the file's order, a block's tensors together."""
    sizes = dim_sizes(model)
    present = dim_letters(model)
    family = HF_FAMILIES[model_type(model.config)]
    rows = [row for row in family.tensors.items() if row[1][1] in present]
    tensors = []
    for stacked, group in groupby(rows, key=lambda row: "{layer}" in row[0]):
        group = list(group)
        for layer in range(model.config.layers) if stacked else (None,):
            for name, (dims, *params) in group:
                if layer == 0 and params[0] in family.first_lacks:
                    continue
                along = next((dim for dim, word in enumerate(dims.split()) if word[0] == "*"), -1)
                merged = tuple(dims.replace("*", "").split())
                shape = [math.prod(sizes[letter] for letter in letters) for letters in merged]
                shape[along] *= len(params)
                for expert in range(model.config.experts) if "{expert}" in name else (None,):
                    index = tuple(number for number in (layer, expert) if number is not None)
                    full = name.format(layer=layer, expert=expert)
                    tensors.append(
                        Tensor(
                            full,
                            tuple(shape),
                            merged,
                            tuple(params),
                            index,
                            along,
                        )
                    )
    return tensors


def dim_sizes(model: Model) -> dict[str, int]:
    """Return the size of each dim in a model's checkpoint by its letter; V is the vocabulary
    without our padding.
    """
    config = model.config
    return {
        "V": config.vocab_size,
        "P": config.max_seq_len,
        "T": config.token_types,
        "D": config.embed,
        "d": config.embed,
        "H": config.heads,
        "K": config.kv_head_count,
        "h": config.head_size,
        "F": config.mlp,
        "E": config.experts,
        "r": config.lora.rank,
    }


def dim_letters(model: Model) -> dict[str, str]:
    """Spell out the dims of every parameter of a model as letters.

    Returns:
      The letters by the parameter's name, in our order, without the dims that it is stacked over:
      `{"blocks.q": "DHh"}`.
    """
    leaves = jax.tree_util.tree_leaves_with_path(
        model.axes, is_leaf=lambda leaf: isinstance(leaf, tuple)
    )
    named = {
        path_name(path): [axis for axis in axes if axis not in ("layers", "experts")]
        for path, axes in leaves
    }
    return {
        name: "".join(_LETTERS.get(axis) or _NEVER_SPLIT.get(name, _UNKNOWN) for axis in axes)
        for name, axes in named.items()
    }


def require_mapping(model: Model) -> None:
    """Refuse a model with parameters that its family's checkpoints do not have.

    Blocks of one's own may have parameters of the same names and dims, and are then imported.

    Raises:
      UserError: a parameter has a name or dims that no tensor of the checkpoints has.
    """
    rows = HF_FAMILIES[model_type(model.config)].tensors.values()
    dims_there = {
        name: dims.replace(" ", "").replace("*", "") for dims, *names in rows for name in names
    }
    sizes = dim_sizes(model)
    leaves = jax.tree_util.tree_leaves_with_path(base_model(model).shapes())
    shapes = {path_name(path): leaf.shape for path, leaf in leaves}
    letters = dim_letters(model)
    for name, shape in shapes.items():
        dims = letters[name]
        known = sorted(dims) == sorted(dims_there.get(name, _UNKNOWN)) and all(
            dim == "V" or size == sizes[dim]
            for dim, size in zip(
                dims[::-1],
                shape[::-1],
                strict=False,
            )
        )
        if not known:
            made_by = part_name(getattr(model.parts, name.split(".")[0]))
            raise UserError(
                f"the parameter {name} {list(shape)} of {made_by} is none of the checkpoints of "
                f"{model.config.family} at Hugging Face: only parts with the names and dims of the "
                "library's own are imported and exported"
            )
