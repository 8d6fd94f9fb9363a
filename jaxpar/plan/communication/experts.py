"""The rows of a mixture of experts, as `jaxpar.parallel.experts` writes its moves out.

Shapes: T tokens of a device's residual stream, R rows of its buffers, D embed, E experts, X devices along `experts`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from jaxpar.base.config import ModelConfig
from jaxpar.base.mesh import MeshAxis
from jaxpar.hlo.tasks import CollectiveKind
from jaxpar.parallel.collectives import split_over
from jaxpar.parallel.linear import GATHERED, STORED
from jaxpar.plan.communication.moves import (
    FLOAT32,
    Array,
    Move,
    PartRun,
    Site,
    gather_moves,
    gradient_sums,
    weight_gathers,
)

_WHOLE = (None, None)


def expert_rows(blocks: Mapping[str, Array], model: ModelConfig, step: PartRun) -> Iterator[Site]:
    """Every move of the experts of all blocks; none for a model without."""
    weights = {name: array for name, array in blocks.items() if array.axes[0] == "experts"}
    if not weights:
        return
    plan, part, hidden_again = step.plan, step.of_a_part, step.plan.again("gate", "up")
    router = next(array for array in blocks.values() if array.axes == ("embed", None))
    E, k, D, X = router.shape[1], model.experts_per_token, router.shape[0], plan.size("experts")
    rows_B, S, _ = part.stream
    T = Array((rows_B, S), STORED[:2]).entries(plan)
    R = X * T * min(k, E // X)
    if model.capacity_factor:
        R = E * min(T, math.ceil(T * k / E * model.capacity_factor))
    along, tokens, hidden = plan.mesh_axes("residual_seq"), split_over(STORED[:2], plan), plan.mesh_axes("mlp")
    gathered: list[MeshAxis] = [
        axis for axis in along if axis not in plan.mesh_axes("seq")
    ]  # rows are, as the sequence is elsewhere
    pieces = plan.pieces(gathered)
    others: list[MeshAxis] = [axis for axis in split_over(GATHERED[:2], plan) if axis not in plan.mesh_axes("experts")]

    def over(axes: Sequence[MeshAxis], kind: CollectiveKind, size: int) -> list[Move]:
        return [Move(kind, tuple(axes), size)] if axes else []

    ordered: tuple[MeshAxis, ...] = tuple(axis for axis in plan.mesh.axis_names if axis in tokens)
    choices = over(along, "all-reduce", rows_B // plan.size("batch") * E * FLOAT32)
    scores = list(gather_moves(router, _WHOLE, FLOAT32, plan))
    counts = [] if model.capacity_factor else over(plan.mesh_axes("experts"), "all-to-all", E * FLOAT32)
    exchange = over(plan.mesh_axes("experts"), "all-to-all", R * D * step.width)
    buffers = over(gathered, "all-gather", R * D * step.width * pieces)
    used = [] if model.capacity_factor else over(gathered, "all-gather", E * FLOAT32 * pieces)
    summed = over(hidden, "reduce-scatter", R * D * step.width * pieces)
    table = weight_gathers(weights.values(), step)

    # Nothing in the backward needs the sums of the router; a stage that runs its forward once more wants no balance.
    yield from part.forward(
        "block/mlp/router", "choices of the router", choices, again=False, recomputed=plan.recomputes
    )
    yield from part.forward("block/mlp/router", "rows an expert", counts, recomputed=plan.recomputes)
    yield from part.forward(
        "block/mlp/dispatch", "rows for the experts", exchange, recomputed=plan.again("expert_input")
    )
    yield from part.forward("block/mlp/experts", "rows", buffers + used)
    yield from part.forward("block/mlp/experts", "sums of the experts", summed, recomputed=plan.again("expert_out"))
    yield from part.forward("block/mlp/combine", "answers", exchange, recomputed=plan.again("expert_out"))
    sums = over(ordered, "all-reduce", 8)
    lost = over(ordered, "all-reduce", FLOAT32) if model.capacity_factor else []
    yield from part.forward("block/mlp/router", "sums of the router", sums, again=False)
    yield from part.forward("block/mlp/router", "dropped", lost, again=False)
    yield from step.forward("block/mlp/router", "router", scores)
    yield from step.forward("block/mlp/experts", f"{', '.join(weights)} weights", table)
    if step.apart:  # a block that is recomputed has made these for its own ends
        yield from step.backward("block/mlp/router", "router", "both", scores)
        yield from step.backward("block/mlp/experts", f"{', '.join(weights)} weights", "input", table)
        yield from part.backward("block/mlp/experts", "rows", "both" if hidden_again else "weight", buffers)
        yield from part.backward("block/mlp/experts", "rows", "both", used)
    yield from part.backward("block/mlp/combine", "gradient of answers", "input", exchange)
    yield from part.backward("block/mlp/experts", "gradient of the sums", "both", buffers)
    yield from part.backward("block/mlp/experts", "gradient of rows", "input", summed)
    yield from part.backward("block/mlp/dispatch", "gradient of rows", "input", exchange)
    of_experts = gradient_sums(weights.values(), others, step)
    yield from part.backward("block/mlp/experts", f"gradients of {', '.join(weights)}", "weight", of_experts)
    yield from part.backward(
        "block/mlp/router", "gradient of the router", "weight", gradient_sums([router], tokens, step)
    )
