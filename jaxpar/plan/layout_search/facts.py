"""What a search must know of a model and a batch to see which plans cannot run, without a mesh."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax

from jaxpar.base.config import Config
from jaxpar.base.layout.mesh import MESH_AXES
from jaxpar.base.layout.rules import LogicalAxis, named_axes
from jaxpar.base.layout.sharding import is_axes
from jaxpar.models import AnyModel, Model
from jaxpar.plan.layout_search.request import Request

_COPIED = ("kv_heads",)
"""Dims of which each device may have a copy where mesh axes do not divide them."""
_ELSEWHERE = ("layers", "stage")
"""Dims that a pipeline shares out, evenly or not."""


class SplitDim(NamedTuple):
    """A dim of arrays that mesh axes split.

    Attributes:
      axis: its logical axis.
      size: the entries, of all arrays that have the dim those that are hardest to divide.
      places: the places in `MESH_AXES` of the mesh axes that split it.
    """

    axis: LogicalAxis
    size: int
    places: tuple[int, ...]


class Facts(NamedTuple):
    """The facts of a model and a batch that decide which plans can run.

    Attributes:
      dims: the dims that mesh axes must divide.
      batch: the places in `MESH_AXES` of the axes that split the batch.
      layers: the number of layers.
      kinds: how many kinds of layers take turns.
      experts: the number of experts; 0 = there are none.
      has_blocks: whether the model has layers that a pipeline can share out.
      has_moments: whether the optimizer has a state as large as the parameters.
      rounds_moments: whether first moments may be bfloat16.
      dropout: whether dropout is on.
    """

    dims: tuple[SplitDim, ...]
    batch: tuple[int, ...]
    layers: int
    kinds: int
    experts: int
    has_blocks: bool
    has_moments: bool
    rounds_moments: bool
    dropout: bool


def facts_of(request: Request) -> Facts:
    """Collect the facts of a request."""
    config = request.config
    own = request.experiment
    made: AnyModel = Model(config.model) if own is None else own.model
    sizes = _declared_sizes(made)
    length = config.data.seq_len
    if made.has_blocks:
        sizes["seq"] = {length}
        sizes["residual_seq"] = {length}
        # a ring gives each device two chunks, one from either end
        sizes["attention_seq"] = {length // 2 if length % 2 == 0 else length}
    dims = [
        SplitDim(axis, size, _places(axis, config))
        for axis, found in sizes.items()
        for size in found
        if axis not in (*_COPIED, *_ELSEWHERE)
    ]
    settings = config.optimizer
    has_moments = settings.settings.has_moments
    rounds_moments = settings.rounds_first_moments
    if own is not None and own.own_optimizer is not None:
        has_moments = own.optimizer.by_layer
        rounds_moments = False
    return Facts(
        dims=tuple(dim for dim in dims if dim.places),
        batch=_places("batch", config),
        layers=config.model.layers,
        kinds=made.config.kinds if made.has_blocks else 1,
        experts=config.model.experts,
        has_blocks=made.has_blocks,
        has_moments=has_moments,
        rounds_moments=rounds_moments,
        dropout=config.model.dropout > 0,
    )


def _places(axis: LogicalAxis, config: Config) -> tuple[int, ...]:
    """Return the places in `MESH_AXES` of the mesh axes that split a logical axis."""
    names = named_axes(axis, config.rules)
    return tuple(place for place, name in enumerate(MESH_AXES) if name in names)


def _declared_sizes(model: AnyModel) -> dict[LogicalAxis, set[int]]:
    """Collect for each logical axis the sizes that parameters declare."""
    found = dict[LogicalAxis, set[int]]()
    shapes = model.shapes()
    pairs = zip(
        jax.tree.leaves(model.axes, is_leaf=is_axes),
        jax.tree.leaves(shapes),
        strict=True,
    )
    for axes, leaf in pairs:
        for axis, size in zip(axes, leaf.shape, strict=True):
            if axis is not None:
                found.setdefault(axis, set()).add(size)
    return found


def pieces(sizes: tuple[int, ...], places: tuple[int, ...]) -> int:
    """Return into how many pieces the axes of some places cut a dim."""
    return math.prod(sizes[place] for place in places)


def words(sizes: tuple[int, ...], places: tuple[int, ...]) -> str:
    """Write the axes of some places that split anything: `fsdp=8 x tensor=4`."""
    split = [f"{MESH_AXES[place]}={sizes[place]}" for place in places if sizes[place] > 1]
    return " x ".join(split)
