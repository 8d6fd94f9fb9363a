"""The rows of a block: its linears, attention over a split sequence, experts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from jaxpar.base.config import ModelConfig
from jaxpar.base.heads import beside, copying
from jaxpar.base.mesh import MeshAxis
from jaxpar.base.sharding import LogicalAxis
from jaxpar.hlo.tasks import CollectiveKind
from jaxpar.parallel.collectives import split_over
from jaxpar.parallel.linear import ATTENDED, GATHERED, STORED
from jaxpar.plan.communication.moves import (
    FLOAT32,
    Array,
    Gradients,
    Move,
    PartRun,
    Site,
    gradient_sums,
    in_form,
    ring_axes,
    stream_gather,
    sum_moves,
    weight_gathers,
)  # fmt: skip

SUBLAYERS: dict[str, tuple[tuple[LogicalAxis, ...], tuple[LogicalAxis | None, ...]]] = {
    "attention": (("heads", "kv_heads"), ATTENDED),
    "mlp": (("mlp",), GATHERED),
}
"""The parts of a block in their order: the logical axes of what lies between their two linears, and the layout of the
residual stream as these use it."""


def sublayers(blocks: Mapping[str, Array]) -> Iterator[tuple[str, dict[str, Array], dict[str, Array]]]:
    """Of each part of a block: its name, its column linears' weights (which share one input), its row linear's."""
    for part, (inner, _) in SUBLAYERS.items():
        columns = {name: a for name, a in blocks.items() if a.axes[0] == "embed" and a.axes[-1] != "embed"}
        columns = {name: a for axis in inner for name, a in columns.items() if a.axes[1] == axis}
        rows = {name: a for name, a in blocks.items() if a.axes[0] in inner and a.axes[-1] == "embed"}
        if columns and rows:
            yield part, columns, rows


def linear_rows(blocks: dict[str, Array], step: PartRun) -> Iterator[Site]:
    """What the linears of all blocks send."""
    for part, columns, rows in sublayers(blocks):
        # What the attention's output goes into is needed in the backward; nothing needs that of the last sublayer.
        output = part == "attention" and step.plan.again("mlp_input")
        yield from _sublayer(f"block/{part}", columns, rows, step, output, step.plan.again(*columns))


def _sublayer(
    scope: str, columns: dict[str, Array], rows: dict[str, Array], step: PartRun, output: bool, inner: bool
) -> Iterator[Site]:
    """Column linears, what lies between (which sends nothing here), and the row linear. Made once more in the backward:
    its sum (`output`), what lies between (`inner`)."""
    into, out = ", ".join(columns), ", ".join(rows)
    plan, part = step.plan, step.of_a_part
    hidden, (_, used) = next(iter(rows.values())).axes[:-1], SUBLAYERS[scope.rpartition("/")[2]]

    def scatter(partial: Sequence[MeshAxis]) -> list[Move]:
        moves = list(sum_moves(part.stream, partial, used, STORED, step.width, plan))
        ring = set(partial) == set(ring_axes(used, plan))
        return in_form(moves, used, plan.overlap.form("scatter", hidden[0]), part) if ring else moves

    gathered = list(stream_gather(part.stream, STORED, used, step))
    gathered = in_form(gathered, used, plan.overlap.form("gather", hidden[0]), part)
    summed = scatter(split_over(hidden, plan))
    # Both linears' backward give gradients of input and weights: of the row's both need the gathered gradient, of the
    # column's the weights' need the gathered input, which outputs that are made again need too.
    whole: Gradients = "both" if inner else "weight"
    yield from part.forward(scope, f"{into} input", gathered)
    yield from step.forward(scope, f"{into} weights", weight_gathers(columns.values(), step))
    yield from step.forward(scope, f"{out} weights", weight_gathers(rows.values(), step))
    yield from part.forward(scope, f"{out} output", summed, recomputed=output)
    yield from part.backward(scope, f"gradient of {out} output", "both", gathered)
    if step.apart:
        yield from step.backward(scope, f"{out} weights", "input", weight_gathers(rows.values(), step))
        yield from part.backward(scope, f"{into} input", whole, gathered)
        yield from step.backward(scope, f"{into} weights", "input", weight_gathers(columns.values(), step))
    for over in {split_over((beside(array.axes[1], plan), *array.axes[2:]), plan): None for array in columns.values()}:
        yield from part.backward(scope, f"gradient of {into} input", "input", scatter(over))
    tokens = step.tokens(used)
    for copied in (False, True):  # the gradients of kv heads that devices have copies of are summed over these too
        some = [a for a in columns.values() if copied == (beside(a.axes[1], plan) != a.axes[1])]
        over = (*tokens, *copying(plan)) if copied else tokens
        yield from part.backward(scope, f"gradients of {into}", "weight", gradient_sums(some, over, step))
    yield from part.backward(scope, f"gradients of {out}", "weight", gradient_sums(rows.values(), tokens, step))


def attention_rows(model: ModelConfig, step: PartRun) -> Iterator[Site]:
    """What a split sequence sends between q, k, v and the output of attention: see `jaxpar.parallel.context`."""
    plan, part, scope = step.plan, step.of_a_part, "block/attention/core"
    again = plan.again("attention_out", "attention_lse")
    axes = plan.mesh_axes("attention_seq")
    if not axes:
        return
    rows, S, _ = part.stream
    n, h = plan.pieces(axes), model.head_dim or model.embed // model.heads
    kv_heads, copied = model.kv_heads or model.heads, plan.pieces(copying(plan))
    kv_heads = math.lcm(kv_heads, copied * plan.size("kv_heads")) if copying(plan) else kv_heads
    here = Array((rows, S), ("batch", "attention_seq")).entries(plan) * h  # entries of one head of one device
    H, K = model.heads // plan.size("heads"), kv_heads // plan.size(beside("kv_heads", plan))

    def moves(kind: CollectiveKind, entries: int, width: int) -> list[Move]:
        """Of arrays of which a device holds so many entries."""
        if kind == "ppermute":
            return [Move(kind, axes, entries * width, n - 1)]
        return [Move(kind, axes, entries * width * (1 if kind == "all-to-all" else n))]

    if plan.context.strategy == "ulysses":
        # Each device is sent the kv heads of its share of the query heads.
        share = H // n
        K = n * (share * K // H if share % (H // K) == 0 else 1 if (H // K) % share == 0 else share)
        there, back = moves("all-to-all", here * (H + 2 * K), step.width), moves("all-to-all", here * H, step.width)
        sent = moves("all-to-all", here * (2 * H + 2 * K), step.width) + moves("all-to-all", here * H // h, FLOAT32)
        returned = moves("all-to-all", here * (H + 2 * K), step.width)
        yield from part.forward(scope, "q, k, v", there, recomputed=again)
        yield from part.forward(scope, "output", back, recomputed=again)
        yield from part.backward(scope, "q, k, v, gradient of output", "input", sent)
        yield from part.backward(scope, "gradients of q, k, v", "input", returned)
        return
    ring = plan.context.strategy == "ring"
    keys = moves("ppermute" if ring else "all-gather", here * 2 * K, step.width)
    yield from part.forward(scope, "k, v", keys, recomputed=again)
    yield from part.backward(scope, "k, v", "input", keys)
    summed = moves("ppermute" if ring else "reduce-scatter", here * 2 * K, FLOAT32)
    yield from part.backward(scope, "gradients of k, v", "input", summed)
