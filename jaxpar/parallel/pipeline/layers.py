"""The layers of each stage of a pipeline, the order in which they are stored, the number of
microbatches, and lines for the log.

A stacked parameter is stored with its layers in the order of the stages that have them, so that
each stage's layers are together. With several virtual stages, or where stages do not divide the
layers, this is not the model's order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.base.config import Config
from jaxpar.base.config.fitting_batch import fitting_batch
from jaxpar.base.errors import UserError
from jaxpar.base.layout.plan import Pipeline, Plan
from jaxpar.base.layout.sharding import named_axes
from jaxpar.parallel.pipeline.schedule_table import Times, simulate_schedule
from jaxpar.parallel.pipeline.schedules import check_sizes, schedule

_Array = TypeVar("_Array", jax.Array, np.ndarray)
_MOST_A_STAGE = 4  # microbatches by default, which keeps the bubble of 1F1B below a fifth
_LONG = 0.25  # an idle share that is worth a line in the log


class Layers(NamedTuple):
    """The places where a pipeline has the layers of a model."""

    counts: tuple[int, ...]
    """The number of layers of each virtual stage, in the model's order."""
    order: tuple[int, ...]
    """For each place in a stacked parameter, the layer that is stored there; -1 = no layer, but
    zeros.

    A stage's places are together; its chunks follow one another, and all have the same number of
    places.
    """

    @property
    def places(self) -> int:
        """The number of places of a virtual stage."""
        return max(self.counts)

    @property
    def natural(self) -> bool:
        """Whether layers are stored in the model's own order."""
        return self.order == tuple(range(len(self.order)))


def layers_of(layers: int, stages: int, pipeline: Pipeline, kinds: int = 1) -> Layers:
    """Share the layers out among the stages: as `pipeline.layers` says, or as evenly as possible.

    Args:
      pipeline: the settings, of which `virtual` and `layers` are read.
      kinds: the number of kinds of layers that take turns; each stage begins with the first kind.

    Returns:
      How many layers each virtual stage has, and where they are stored.

    Raises:
      UserError: there are fewer layers than virtual stages, virtual stages do not divide the
        layers, or the given layers do not add up to the model's.
    """
    v = pipeline.virtual
    given = pipeline.layers
    whole, rest = divmod(layers, stages * v)
    of_stages = f"{stages} stages" + (f" x {v} virtual" if v > 1 else "")
    if given:
        if len(given) != stages * v or sum(given) != layers or min(given) < 1:
            raise UserError(
                f"pipeline.layers={list(given)} is {len(given)} virtual stages of {sum(given)} "
                f"layers: {of_stages} of "
                f"a model of {layers} layers need {stages * v} numbers of at least 1 that add "
                f"up to {layers}"
            )
    elif not whole:
        if layers >= stages:
            fits = "pipeline.virtual=1"
        else:
            fits = f"mesh.stage={-(-layers // kinds)}"
        raise UserError(f"model.layers={layers} are fewer than {of_stages}: try {fits}")
    elif rest and v > 1:
        fits = next(n for n in range(v, 0, -1) if layers % (stages * n) == 0 or n == 1)
        even = list(_even_layers(layers, stages * v))
        raise UserError(
            f"pipeline.virtual={v}: {of_stages} do not divide model.layers={layers}: try "
            f"pipeline.virtual={fits}, or "
            f"say that they may differ: pipeline.layers={even}"
        )
    counts = given or _even_layers(layers, stages * v)
    places = max(counts)
    starts = [sum(counts[:k]) for k in range(len(counts))]
    stored = (k for s in range(stages) for k in range(s, stages * v, stages))
    order = [starts[k] + j if j < counts[k] else -1 for k in stored for j in range(places)]
    return Layers(tuple(counts), tuple(order))


def _even_layers(layers: int, parts: int) -> tuple[int, ...]:
    """Share layers out as evenly as possible; the middle parts get the extra ones first."""
    whole, rest = divmod(layers, parts)
    from_middle = sorted(
        range(parts),
        key=lambda k: (abs(2 * k - parts + 1), k),
    )
    return tuple(whole + (k in from_middle[:rest]) for k in range(parts))


def layers_in(plan: Plan, layers: int) -> Layers | None:
    """Share a model's layers, so many of them, out among the stages of a plan.

    Returns:
      How many layers each virtual stage has, and where they are stored; None where the plan has no
      stages.

    Raises:
      UserError: `layers_of` refuses.
    """
    stages = plan.size("stage")
    if stages > 1:
        return layers_of(layers, stages, plan.pipeline)
    return None


def stored_order(plan: Plan, layers: int) -> tuple[int, ...] | None:
    """Return the order in which a plan stores a model's layers, so many of them, in stacked
    parameters.

    Returns:
      For each place the layer that is stored there (`Layers.order`); None = the model's own order.

    Raises:
      UserError: `layers_of` refuses.
    """
    found = layers_in(plan, layers)
    if found is None or found.natural:
        return None
    return found.order


def reorder_layers(
    x: _Array, before: Sequence[int] | None, after: Sequence[int] | None, layers: int
) -> _Array:
    """Move a stacked array from one stored order to another.

    Args:
      x: an array [places, ...], of NumPy or of JAX.
      before: the order that it is in, as `stored_order` gives it; None = the model's own.
      after: the order to put it in; None = the model's own.

    Returns:
      An array [places, ...] of the same kind, with as many places as `after` has. Places without a
      layer are zeros.
    """
    if before == after:
        return x
    there = {layer: place for place, layer in enumerate(before or range(layers))}
    wanted = np.array(
        [there.get(layer, -1) if layer >= 0 else -1 for layer in after or range(layers)]
    )
    library: Any = np if isinstance(x, np.ndarray) else jnp
    taken = library.take(x, np.maximum(wanted, 0), axis=0)
    empty = (wanted < 0).reshape(
        -1,
        *[1] * (x.ndim - 1),
    )
    if empty.any():
        return library.where(empty, library.zeros((), x.dtype), taken)
    return taken


def check_stages(plan: Plan, layers: int, count: int, kinds: int = 1) -> None:
    """Refuse a pipeline that cannot run.

    All stages run one program, so a place of a stage has one kind of layer on all of them: where
    layers are of several kinds in turn, each virtual stage begins with the first kind.

    Args:
      plan: the plan, which has stages.
      count: the number of microbatches.
      kinds: how many kinds of layers there are in turn.

    Raises:
      UserError: `layers_of` or `schedules.schedule` refuses, the rules split anything else over the
        stages' mesh axes, they split stacked layers over other axes, or a virtual stage begins with
        another kind of layer.
    """
    stages = set(plan.mesh_axes("stage"))
    rules = plan.rules
    for axis in rules.logical_axes:
        shared = stages.intersection(plan.mesh_axes(axis))
        if shared and axis not in ("layers", "stage"):
            raise UserError(
                f"rules.{axis} splits over {' x '.join(shared)}, whose devices are stages of a "
                f"pipeline: take it out of rules.{axis}, or let rules.stage be another axis"
            )
    if set(plan.mesh_axes("layers")) != stages:
        raise UserError(
            f"rules.layers splits over {' x '.join(rules.layers)}, but a pipeline has its "
            "layers on its stages "
            f"({' x '.join(rules.stage)}): leave rules.layers empty"
        )
    check_sizes(plan.pipeline.schedule, plan.size("stage"), count, plan.pipeline.virtual)
    counts = layers_of(layers, plan.size("stage"), plan.pipeline, kinds).counts
    if any(sum(counts[:k]) % kinds for k in range(len(counts))):
        groups = -(-layers // kinds)
        fits = [kinds * n for n in _even_layers(groups, len(counts))]
        fits[-1] -= -layers % kinds
        if groups >= len(counts):
            advice = f"pipeline.layers={fits}"
        elif groups >= plan.size("stage"):
            advice = f"pipeline.virtual=1 or model.layers={kinds * len(counts)}"
        else:
            advice = f"mesh.stage={groups} or model.layers={kinds * len(counts)}"
        raise UserError(
            f"pipeline stages of {list(counts)} layers, but model.masks has {kinds} kinds of "
            "layers in turn, and each "
            f"stage begins with the first: try {advice}"
        )


def microbatches(config: Config, sizes: Mapping[Any, int]) -> int:
    """Count the microbatches that are in the pipeline together.

    Args:
      config: the config, whose `pipeline` and `train` are read.
      sizes: the number of devices along each mesh axis, over all slices.

    Returns:
      `pipeline.microbatches`; where that is 0, the most that the batch allows, up to a limit for
      each stage.

    Raises:
      UserError: the microbatches are fewer than 0, do not divide the batch, or have fewer sequences
        than there are shards.
    """
    train = config.train
    asked = config.pipeline.microbatches
    if asked < 0:
        raise UserError(
            f"pipeline.microbatches={asked} is below 0: 0 is as many as the batch allows"
        )
    names = (named_axes(axis, config.rules) for axis in ("batch", "stage"))
    shards, stages = (math.prod(sizes[mesh_axis] for mesh_axis in mesh_axes) for mesh_axes in names)
    rows = train.microbatch
    allowed = [n for n in range(1, rows // shards + 1) if rows % (n * shards) == 0]
    if not asked:
        return max((n for n in allowed if n <= _MOST_A_STAGE * stages), default=1)
    if asked not in allowed:
        if train.accumulation > 1:
            parts = f" / accumulation={train.accumulation}"
        else:
            parts = ""
        below = [n for n in allowed if n < asked]
        if below:
            fewer = f"pipeline.microbatches={max(below)}, or "
        else:
            fewer = ""
        raise UserError(
            f"train.batch={train.batch}{parts} does not split into "
            f"pipeline.microbatches={asked} of a sequence for "
            f"each of {shards} data-parallel shards: try {fewer}"
            f"train.batch={fitting_batch(config, shards)}"
        )
    return asked


def pipeline_notes(config: Config, plan: Plan) -> list[str]:
    """Describe the schedule in figures for the log, and what speaks against it: idle stages, or
    uneven layers.

    A backward counts as two forwards, plus one forward each for recomputing the blocks and the
    stage.

    Returns:
      The lines; none where the plan has no stages.

    Raises:
      UserError: `layers_of` or `schedules.schedule` refuses.
    """
    pipeline = plan.pipeline
    P = plan.size("stage")
    layers = layers_in(plan, config.model.layers)
    if layers is None:
        return []
    M = pipeline.microbatches
    v = pipeline.virtual
    table = schedule(pipeline.schedule, P, M, v)
    again = (1 + (pipeline.stash == "stage")) * plan.recomputes
    times = Times(1.0, 2.0 + again)
    found = simulate_schedule(table, times)
    kept = f"keeps {max(found.stash)} input{'s' if max(found.stash) > 1 else ''} at most"
    sizes = f"{pipeline.schedule}, {P} stages, {M} microbatches"
    notes = [
        f"pipeline: {sizes}: {len(table.ticks)} ticks, idle {100 * found.bubble:.0f} %, a stage "
        f"{kept}"
    ]
    if min(layers.counts) < layers.places:
        notes.append(
            f"virtual stages have {', '.join(map(str, layers.counts))} layers: each tick lasts "
            "as long as the largest, "
            f"{layers.places}, on all of them"
        )
    if pipeline.schedule == "interleaved" and v == 1:
        notes.append("interleaved with one virtual stage is 1f1b: try pipeline.virtual=2")
    if config.train.accumulation > 1:
        notes.append(
            f"the pipeline fills and drains {config.train.accumulation} times a step: "
            "train.accumulation 1 and "
            f"pipeline.microbatches={M * config.train.accumulation} would once"
        )
    if found.bubble >= _LONG:
        more = simulate_schedule(schedule(pipeline.schedule, P, 4 * P, v), times).bubble
        notes.append(
            f"a pipeline of {P} with {M} microbatches idles {100 * found.bubble:.0f} %; with "
            f"{4 * P} it would "
            f"{100 * more:.0f} %: try pipeline.microbatches={4 * P} and a batch for it, or "
            "mesh.fsdp in place of "
            "mesh.stage if the model fits so"
        )
    return notes
