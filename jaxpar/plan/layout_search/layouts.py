"""The meshes that a search goes through, and what each does with the batch: the part of the space
that decides what is sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxpar.base.layout.mesh import MESH_AXES
from jaxpar.plan.candidate import ONE_DEVICE, Candidate
from jaxpar.plan.layout_search.facts import Facts, SplitDim, pieces, words
from jaxpar.plan.layout_search.infeasible import Infeasible
from jaxpar.plan.layout_search.request import Request

_STAGE = MESH_AXES.index("stage")
_DATA = MESH_AXES.index("data")
_CONTEXT = MESH_AXES.index("context")
_EXPERT = MESH_AXES.index("expert")
_TENSOR = MESH_AXES.index("tensor")
_ACROSS_FIRST = (
    MESH_AXES,
    ("data", "fsdp", "stage", "context", "expert", "tensor"),
)
"""Orders in which axes take slices or nodes: those that send least come first. A pipeline may have
its stages across them or inside.
"""
_VIRTUAL = (1, 2, 4)


class Layout(NamedTuple):
    """A mesh with the axes that lie across slices or nodes."""

    mesh: tuple[int, ...]
    dcn: tuple[int, ...]


def factorings(count: int, places: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write a number as an ordered product of so many factors."""
    if places == 1:
        yield (count,)
        return
    for first in divisors(count):
        for rest in factorings(count // first, places - 1):
            yield (first, *rest)


def divisors(count: int) -> list[int]:
    """Return the divisors of a number, the smallest first."""
    low = [one for one in range(1, math.isqrt(count) + 1) if count % one == 0]
    return sorted({*low, *(count // one for one in low)})


def layouts(request: Request, facts: Facts) -> list[Layout]:
    """List the meshes of a target's devices that fixed and forbidden choices allow, those that send
    least first.
    """
    target = request.target
    open_axes = [place for place in range(len(MESH_AXES)) if _may_split(place, request, facts)]
    found = dict[Layout, None]()
    for factors in factorings(target.device_count, len(open_axes)):
        sizes = list[int](ONE_DEVICE)
        for place, size in zip(open_axes, factors, strict=True):
            sizes[place] = size
        for dcn in _spans(tuple(sizes), target.slices):
            inside = tuple(whole // across for whole, across in zip(sizes, dcn, strict=True))
            layout = Layout(inside, dcn)
            if request.allows_layout(Candidate(*layout)):
                found[layout] = None
    return sorted(found, key=_talk)


def nothing_left(request: Request) -> Infeasible:
    """Say that no plan of the target's devices has what is fixed without what is forbidden."""
    count = request.target.device_count
    asked = [f"{key}={value}" for key, value in request.fixed.items()]
    asked += [f"no {name}" for name in sorted(request.forbidden)]
    return Infeasible(
        "request",
        f"no plan of {count:,} devices has {', '.join(asked)}",
        count,
        "devices",
        "fewer choices that are fixed or forbidden, or sizes whose product divides the devices",
    )


def _may_split(place: int, request: Request, facts: Facts) -> bool:
    """Return whether a search tries more than one device along an axis."""
    axis = MESH_AXES[place]
    if request.fixes_axis(axis):
        return True
    if axis == "expert" and not facts.experts:
        return False
    return facts.has_blocks or axis in ("data", "fsdp")


def _spans(sizes: tuple[int, ...], slices: int) -> set[tuple[int, ...]]:
    """List the ways in which axes of these sizes share so many slices or nodes out."""
    if slices == 1:
        return {ONE_DEVICE}
    found = set[tuple[int, ...]]()
    for order in _ACROSS_FIRST:
        left = slices
        dcn = list[int](ONE_DEVICE)
        for axis in order:
            place = MESH_AXES.index(axis)
            dcn[place] = math.gcd(sizes[place], left)
            left //= dcn[place]
        if left == 1:
            found.add(tuple(dcn))
    return found


def _talk(layout: Layout) -> tuple[int, ...]:
    """Return by how much a layout sends within a layer, which orders layouts."""
    sizes = [inside * across for inside, across in zip(*layout, strict=True)]
    within = sizes[_TENSOR] * sizes[_CONTEXT] * sizes[_STAGE]
    return (within, layout.dcn[_TENSOR] * layout.dcn[_CONTEXT], sizes[_DATA], *sizes)


def refused_layout(layout: Layout, facts: Facts) -> Infeasible | None:
    """Say why a mesh cannot hold the model; None = it can."""
    sizes = Candidate(*layout).sizes
    for dim in facts.dims:
        parts = pieces(sizes, dim.places)
        if dim.size % parts:
            return _does_not_divide(dim, sizes, parts)
    if sizes[_CONTEXT] > 1 and facts.dropout:
        return Infeasible(
            "dropout",
            "dropout with a sequence that is split",
            1,
            "settings",
            "model.dropout=0, or no context",
        )
    if sizes[_STAGE] > facts.layers // facts.kinds:
        return Infeasible(
            "layers",
            f"{facts.layers} layers for stage={sizes[_STAGE]}",
            sizes[_STAGE] - facts.layers // facts.kinds,
            "layers",
            f"stage={facts.layers // facts.kinds} or fewer",
        )
    if sizes[_STAGE] > 1 and facts.kinds > 1 and facts.layers % (sizes[_STAGE] * facts.kinds):
        return Infeasible(
            "layers",
            f"{facts.layers} layers of {facts.kinds} kinds in turn for stage={sizes[_STAGE]}",
            facts.layers % (sizes[_STAGE] * facts.kinds),
            "layers",
            "a stage for each of as many whole turns",
        )
    return None


def _does_not_divide(dim: SplitDim, sizes: tuple[int, ...], parts: int) -> Infeasible:
    """Say that mesh axes do not divide a dim."""
    most = math.gcd(dim.size, parts)
    return Infeasible(
        dim.axis,
        f"{dim.axis} {dim.size:,} is not divisible by {words(sizes, dim.places)}",
        parts - most,
        "devices",
        f"at most {most} along these axes",
    )


def batchings(
    layout: Layout, request: Request, facts: Facts
) -> tuple[list[Candidate], list[Infeasible]]:
    """List what a mesh may do with the batch, and why it can do nothing with it.

    Returns:
      Candidates that keep everything on the device, and the reasons against others.
    """
    base = Candidate(*layout, **_usual(request))
    sizes = base.sizes
    shards = pieces(sizes, facts.batch)
    each, rest = divmod(request.sequences, shards)
    if rest:
        return [], [_too_few_sequences(request.sequences, shards, sizes, facts)]
    zeros = request.options("zero", [False, True] if sizes[_DATA] > 1 else [False])
    if sizes[_STAGE] > 1:
        grown, reasons = _pipelines(base, each, request, facts)
    else:
        counts = request.options("train.accumulation", divisors(each))
        grown = [base._replace(accumulation=count) for count in counts if each % count == 0]
        reasons = [] if grown else [_not_accumulated(each, counts[0])]
    found = [one._replace(zero=zero) for one in grown for zero in zeros]
    return [one for one in found if request.allows(one)], reasons


def _usual(request: Request) -> dict[str, Any]:
    """Return the choices that are the config's own until a search refines them."""
    config = request.config
    return {
        "moments": request.fixed.get("precision.moments", config.precision.moments),
        "loss_mib": request.fixed.get("memory.loss_mib", config.memory.loss_mib),
        "scan": request.fixed.get("model.scan_layers", config.model.scan_layers),
    }


def _pipelines(
    base: Candidate, each: int, request: Request, facts: Facts
) -> tuple[list[Candidate], list[Infeasible]]:
    """List the schedules of a pipeline, in which each shard has so many sequences."""
    stages = base.size("stage")
    found = list[Candidate]()
    for accumulation in request.options("train.accumulation", [1]):
        if each % accumulation:
            return [], [_not_accumulated(each, accumulation)]
        rows = each // accumulation
        usual = [count for count in divisors(rows) if count >= stages]
        counts = request.options("pipeline.microbatches", usual)
        for count in (count for count in counts if count and rows % count == 0):
            found += _schedules(base, accumulation, count, request, facts)
    if found:
        return found, []
    return [], [
        Infeasible(
            "pipeline",
            f"{_sequences(each)} for each data rank, which stage={stages} would wait for",
            max(stages - each, 1),
            "sequences",
            "a larger global batch, or fewer stages",
        )
    ]


def _schedules(
    base: Candidate, accumulation: int, microbatches: int, request: Request, facts: Facts
) -> Iterator[Candidate]:
    """Yield the schedules for some microbatches; a virtual stage has a whole number of layers."""
    stages = base.size("stage")
    for virtual in request.options("pipeline.virtual", _VIRTUAL):
        if virtual > 1 and facts.layers % (stages * virtual * facts.kinds):
            continue
        names = request.options("pipeline.schedule", ["1f1b" if virtual == 1 else "interleaved"])
        for name in names:
            yield base._replace(
                accumulation=accumulation,
                microbatches=microbatches,
                schedule=name,
                virtual=virtual,
            )


def _too_few_sequences(
    sequences: int, shards: int, sizes: Sequence[int], facts: Facts
) -> Infeasible:
    more = -sequences % shards
    return Infeasible(
        "batch",
        f"global batch {sequences:,} sequences over {shards:,} data ranks "
        f"({words(tuple(sizes), facts.batch)})",
        more,
        "sequences",
        f"a global batch of {sequences + more:,}, or more of tensor, context or stage",
    )


def _not_accumulated(each: int, count: int) -> Infeasible:
    return Infeasible(
        "batch",
        f"{_sequences(each)} for each data rank in train.accumulation={count} parts",
        -each % count,
        "sequences",
        "another train.accumulation, or a larger global batch",
    )


def _sequences(count: int) -> str:
    return "1 sequence" if count == 1 else f"{count:,} sequences"
