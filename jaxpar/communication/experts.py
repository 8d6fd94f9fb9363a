"""The rows of a mixture of experts, as `jaxpar.experts` writes its moves out.

Shapes: T tokens of a device's residual stream, R rows of its buffers, D embed, E experts, X devices along `experts`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from jaxpar.collectives import split_over
from jaxpar.communication.moves import FLOAT32, Array, Move, Site, Step, gather_moves, gradient_sums, weight_gathers
from jaxpar.config import ModelConfig
from jaxpar.hlo.tasks import CollectiveKind
from jaxpar.mesh import MeshAxis
from jaxpar.parallel import GATHERED, STORED

_WHOLE = (None, None)


def expert_rows(blocks: Mapping[str, Array], model: ModelConfig, step: Step) -> Iterator[Site]:
    """Every move of the experts of all blocks; none for a model without."""
    weights = {name: array for name, array in blocks.items() if array.axes[0] == "experts"}
    if not weights:
        return
    plan, part, again = step.plan, step.of_a_part, step.plan.remat == "full"
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
    used = buffers if model.capacity_factor else buffers + over(gathered, "all-gather", E * FLOAT32 * pieces)
    summed = over(hidden, "reduce-scatter", R * D * step.width * pieces)
    table = weight_gathers(weights.values(), step)

    for phase in ("forward", "recomputed") if again else ("forward",):
        yield from part.rows("block/mlp/router", "choices of the router", phase, choices)
        yield from part.rows("block/mlp/router", "rows an expert", phase, counts)
        yield from part.rows("block/mlp/dispatch", "rows for the experts", phase, exchange)
        yield from part.rows("block/mlp/experts", "rows", phase, used)
        yield from part.rows("block/mlp/experts", "sums of the experts", phase, summed)
        yield from part.rows("block/mlp/combine", "answers", phase, exchange)
        if phase == "forward":  # nothing in the backward needs these sums
            lost = over(ordered, "all-reduce", FLOAT32) if model.capacity_factor else []
            yield from part.rows("block/mlp/router", "sums of the router", phase, over(ordered, "all-reduce", 8))
            yield from part.rows("block/mlp/router", "dropped", phase, lost)
        yield from step.rows("block/mlp/router", "router", phase, scores)
        yield from step.rows("block/mlp/experts", f"{', '.join(weights)} weights", phase, table)
    if step.apart and not again:
        yield from step.rows("block/mlp/router", "router", "backward", scores)
        yield from step.rows("block/mlp/experts", f"{', '.join(weights)} weights", "backward", table)
        yield from part.rows("block/mlp/experts", "rows", "backward", used)
    yield from part.rows("block/mlp/combine", "gradient of answers", "backward", exchange)
    yield from part.rows("block/mlp/experts", "gradient of the sums", "backward", buffers)
    yield from part.rows("block/mlp/experts", "gradient of rows", "backward", summed)
    yield from part.rows("block/mlp/dispatch", "gradient of rows", "backward", exchange)
    sums = gradient_sums(weights.values(), others, step)
    yield from part.rows("block/mlp/experts", f"gradients of {', '.join(weights)}", "backward", sums)
    routed = gradient_sums([router], tokens, step)
    yield from part.rows("block/mlp/router", "gradient of the router", "backward", routed)
