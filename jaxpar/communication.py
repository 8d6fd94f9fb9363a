"""The bytes a plan sends in a training step, in closed form: arithmetic on shapes, no tracing and no compiler.

One row for each place where a step's arrays change their layout, derived from the parameters' shapes and logical axes
and the plan's rules, as the ops of `jaxpar.parallel`, `jaxpar.loss` and `jaxpar.step` write them out. It is to the byte
what `jaxpar.planned` finds in the traced step: a move that is written twice counts once where both stand in one loop
body (unrolled blocks that are not recomputed keep what the forward gathered). What XLA moves as it sees fit (norms,
biases, the gradient's norm) stands in rows that are not `asked` for; their bytes
are an estimate.

Shapes: B batch, S sequence, D embed, V vocab, L layers; weights [D, *out] (column linears) and [*in, D] (row linears).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

import jax

from jaxpar.collectives import further_split, split_over
from jaxpar.config import Config, ModelConfig
from jaxpar.hlo.tasks import CollectiveKind, sent_bytes
from jaxpar.loss import chunk_count
from jaxpar.mesh import MeshAxis
from jaxpar.parallel import ATTENDED, GATHERED, STORED, used_axes
from jaxpar.sharding import Form, LogicalAxis, Plan, beside, copying, path_name, state_axes

Phase = Literal["forward", "recomputed", "backward", "update"]
Sent = dict[tuple[str, frozenset[str]], float]

SUBLAYERS: dict[str, tuple[tuple[LogicalAxis, ...], tuple[LogicalAxis | None, ...]]] = {
    "attention": (("heads", "kv_heads"), ATTENDED),
    "mlp": (("mlp",), GATHERED),
}
"""The parts of a block in their order: the logical axes of what lies between their two linears, and the layout of the
residual stream as these use it."""

_FLOAT32 = 4  # bytes


class Site(NamedTuple):
    """One move of arrays between devices, as often as a step makes it.

    Attributes:
      scope: of the model, as `jax.named_scope` has it: `block/attention`.
      what: what moves: `q, k, v weights`.
      phase: of the step.
      kind: of collective.
      axes: mesh axes of more than one device.
      devices: along them.
      bytes: of one group's whole array, as `hlo.tasks.Collective.bytes`; of a ppermute, one message.
      times: how often in a step.
      asked: written by an op of this library, rather than left to XLA, whose bytes are then an estimate.
    """

    scope: str
    what: str
    phase: Phase
    kind: CollectiveKind
    axes: frozenset[MeshAxis]
    devices: int
    bytes: int
    times: int
    asked: bool = True

    @property
    def sent(self) -> float:
        """Bytes one device sends in a step, by a bandwidth-optimal algorithm."""
        return self.times * sent_bytes(self.kind, self.bytes, self.devices)


def sent(sites: Iterable[Site]) -> Sent:
    """Bytes one device sends in a step, by kind of collective and mesh axes; `site.asked` tells what to leave out."""
    total: Sent = defaultdict(float)
    for site in sites:
        total[site.kind, site.axes] += site.sent
    return dict(total)


class Array(NamedTuple):
    """A global array: its shape, and one logical axis or None for each dim."""

    shape: tuple[int, ...]
    axes: tuple[LogicalAxis | None, ...]

    def entries(self, plan: Plan) -> int:
        """On one device."""
        return math.prod(self.shape) // plan.pieces(split_over(self.axes, plan))


class _Move(NamedTuple):
    kind: CollectiveKind
    axes: tuple[MeshAxis, ...]
    bytes: int
    times: int = 1


class _Step(NamedTuple):
    """What the rows are made from.

    Attributes:
      plan: mesh, rules and the rest.
      stream: shape [B, S, D] of a microbatch's residual stream.
      microbatches: in a step.
      layers: of the model.
      apart: forward and backward of a block share no gathers: they stand in two loops, or the forward is recomputed.
    """

    plan: Plan
    stream: tuple[int, int, int]
    microbatches: int
    layers: int
    apart: bool

    @property
    def width(self) -> int:
        """Bytes of an entry in the compute dtype."""
        return self.plan.dtype.itemsize

    def tokens(self, used: Sequence[LogicalAxis | None] = GATHERED) -> tuple[MeshAxis, ...]:
        """The mesh axes over which a sum over tokens in this layout is partial."""
        return split_over(used[:2], self.plan)

    @property
    def of_a_part(self) -> _Step:
        """The step of what a block does for each part of its batch, of which Domino makes two."""
        parts, (rows, *rest) = self.plan.overlap.parts, self.stream
        return self._replace(stream=(rows // parts, *rest), microbatches=self.microbatches * parts)

    def rows(self, scope: str, what: str, phase: Phase, moves: Iterable[_Move], asked: bool = True) -> Iterator[Site]:
        """Rows of a scope, which runs once a microbatch and, in a block, once a layer."""
        times = self.microbatches * (self.layers if scope.startswith("block") else 1)
        return _rows(self.plan, scope, what, phase, moves, times, asked)


def sites(parameters: Mapping[str, Array], config: Config, plan: Plan) -> list[Site]:
    """Every move of one training step.

    Args:
      parameters: of the model, from `arrays`.
      config: whose batch, accumulation, sequence length and `scan_layers` count.
      plan: from `jaxpar.step.make_plan`; one on an `AbstractMesh` will do, no device is asked.
    """
    embed, head = part_of(parameters, "embed"), part_of(parameters, "head")
    layers, blocks = one_block(parameters)
    tables = [array for array in (*head.values(), *embed.values()) if array.axes[0] == "vocab"]
    train = config.train
    stream = train.batch // train.accumulation, config.data.seq_len, tables[0].shape[-1]
    apart = plan.remat == "full" or config.model.scan_layers
    step = _Step(plan, stream, train.accumulation, layers, apart)
    return [
        *_lookups(embed, step),
        *_blocks(blocks, step),
        *_attention(config.model, step),
        *_loss(tables[0], len(tables) == 1, step),
        *_left_to_xla("block", blocks, step),
        *_left_to_xla("head", head, step),
        *_update(parameters, plan),
    ]


def arrays(shapes: Any, axes: Any) -> dict[str, Array]:
    """The arrays of a tree by name: `arrays(model.shapes(), model.axes)`."""
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    names = jax.tree.leaves(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    return {path_name(path): Array(leaf.shape, axes) for (path, leaf), axes in zip(leaves, names, strict=True)}


def part_of(parameters: Mapping[str, Array], part: str) -> dict[str, Array]:
    """`{"q": ...}` of `{"blocks.q": ..., "embed.tokens": ...}`, for the part `blocks`."""
    return {name.removeprefix(part + "."): array for name, array in parameters.items() if name.startswith(part + ".")}


def one_block(parameters: Mapping[str, Array]) -> tuple[int, dict[str, Array]]:
    """How many layers there are, and the arrays of one."""
    stacked = part_of(parameters, "blocks")
    blocks = {name: Array(array.shape[1:], array.axes[1:]) for name, array in stacked.items()}
    return next(iter(stacked.values())).shape[0], blocks


def sublayers(blocks: Mapping[str, Array]) -> Iterator[tuple[str, dict[str, Array], dict[str, Array]]]:
    """Of each part of a block: its name, its column linears' weights (which share one input), its row linear's."""
    for part, (inner, _) in SUBLAYERS.items():
        columns = {name: a for name, a in blocks.items() if a.axes[0] == "embed" and a.axes[-1] != "embed"}
        columns = {name: a for axis in inner for name, a in columns.items() if a.axes[1] == axis}
        rows = {name: a for name, a in blocks.items() if a.axes[0] in inner and a.axes[-1] == "embed"}
        if columns and rows:
            yield part, columns, rows


def _lookups(tables: dict[str, Array], step: _Step) -> Iterator[Site]:
    """A device looks up the rows of a table that it has, and the rest are zeros: sums where rows are split."""
    plan, stream = step.plan, step.stream
    for name, table in tables.items():
        yield from step.rows("embed", f"{name} table", "forward", _used([table], step))
        found = _sum(stream, plan.mesh_axes(table.axes[0]), GATHERED, STORED, step.width, plan)
        yield from step.rows("embed", f"rows of {name}", "forward", found)
    yield from step.rows("embed", "gradient of the stream", "backward", _gather(stream, STORED, GATHERED, step))
    for name, table in tables.items():
        yield from step.rows("embed", f"gradient of {name}", "backward", _gradients([table], step.tokens(), step))


def _blocks(blocks: dict[str, Array], step: _Step) -> Iterator[Site]:
    parts = list(sublayers(blocks))
    for part, columns, rows in parts:
        last = part == parts[-1][0]  # nothing in the backward needs its output
        yield from _sublayer(f"block/{part}", columns, rows, step, step.plan.remat == "full" and not last)


def _sublayer(
    scope: str, columns: dict[str, Array], rows: dict[str, Array], step: _Step, again: bool
) -> Iterator[Site]:
    """Column linears, what lies between (which sends nothing here), and the row linear; `again`: its sum is made
    once more in the backward."""
    into, out = ", ".join(columns), ", ".join(rows)
    plan, part = step.plan, step.of_a_part
    hidden, (_, used) = next(iter(rows.values())).axes[:-1], SUBLAYERS[scope.rpartition("/")[2]]

    def scatter(partial: Sequence[MeshAxis]) -> list[_Move]:
        moves = list(_sum(part.stream, partial, used, STORED, step.width, plan))
        ring = set(partial) == set(_ring_axes(used, plan))
        return _ring(moves, used, plan.overlap.form("scatter", hidden[0]), part) if ring else moves

    gathered = list(_gather(part.stream, STORED, used, step))
    gathered = _ring(gathered, used, plan.overlap.form("gather", hidden[0]), part)
    summed = scatter(split_over(hidden, plan))
    yield from part.rows(scope, f"{into} input", "forward", gathered)
    yield from step.rows(scope, f"{into} weights", "forward", _used(columns.values(), step))
    yield from step.rows(scope, f"{out} weights", "forward", _used(rows.values(), step))
    yield from part.rows(scope, f"{out} output", "forward", summed)
    if again:
        yield from part.rows(scope, f"{out} output", "recomputed", summed)
    yield from part.rows(scope, f"gradient of {out} output", "backward", gathered)
    if step.apart:
        yield from step.rows(scope, f"{out} weights", "backward", _used(rows.values(), step))
        yield from part.rows(scope, f"{into} input", "backward", gathered)
        yield from step.rows(scope, f"{into} weights", "backward", _used(columns.values(), step))
    for over in {split_over((beside(array.axes[1], plan), *array.axes[2:]), plan): None for array in columns.values()}:
        yield from part.rows(scope, f"gradient of {into} input", "backward", scatter(over))
    tokens = step.tokens(used)
    for copied in (False, True):  # the gradients of kv heads that devices have copies of are summed over these too
        some = [a for a in columns.values() if copied == (beside(a.axes[1], plan) != a.axes[1])]
        over = (*tokens, *copying(plan)) if copied else tokens
        yield from part.rows(scope, f"gradients of {into}", "backward", _gradients(some, over, step))
    yield from part.rows(scope, f"gradients of {out}", "backward", _gradients(rows.values(), tokens, step))


def _attention(model: ModelConfig, step: _Step) -> Iterator[Site]:
    """What a split sequence sends between q, k, v and the output of attention: see `jaxpar.context`."""
    plan, part, scope = step.plan, step.of_a_part, "block/attention/core"
    axes = plan.mesh_axes("attention_seq")
    if not axes:
        return
    rows, S, _ = part.stream
    n, h = plan.pieces(axes), model.head_dim or model.embed // model.heads
    kv_heads, copied = model.kv_heads or model.heads, plan.pieces(copying(plan))
    kv_heads = math.lcm(kv_heads, copied * plan.size("kv_heads")) if copying(plan) else kv_heads
    here = Array((rows, S), ("batch", "attention_seq")).entries(plan) * h  # entries of one head of one device
    H, K = model.heads // plan.size("heads"), kv_heads // plan.size(beside("kv_heads", plan))

    def moves(kind: CollectiveKind, entries: int, width: int) -> list[_Move]:
        """Of arrays of which a device holds so many entries."""
        if kind == "ppermute":
            return [_Move(kind, axes, entries * width, n - 1)]
        return [_Move(kind, axes, entries * width * (1 if kind == "all-to-all" else n))]

    if plan.context.strategy == "ulysses":
        # Each device is sent the kv heads of its share of the query heads.
        share = H // n
        K = n * (share * K // H if share % (H // K) == 0 else 1 if (H // K) % share == 0 else share)
        there, back = moves("all-to-all", here * (H + 2 * K), step.width), moves("all-to-all", here * H, step.width)
        again = moves("all-to-all", here * (2 * H + 2 * K), step.width) + moves("all-to-all", here * H // h, _FLOAT32)
        returned = moves("all-to-all", here * (H + 2 * K), step.width)
        yield from part.rows(scope, "q, k, v", "forward", there)
        yield from part.rows(scope, "output", "forward", back)
        if plan.remat == "full":
            yield from part.rows(scope, "q, k, v", "recomputed", there)
            yield from part.rows(scope, "output", "recomputed", back)
        yield from part.rows(scope, "q, k, v, gradient of output", "backward", again)
        yield from part.rows(scope, "gradients of q, k, v", "backward", returned)
        return
    ring = plan.context.strategy == "ring"
    keys = moves("ppermute" if ring else "all-gather", here * 2 * K, step.width)
    yield from part.rows(scope, "k, v", "forward", keys)
    if plan.remat == "full":
        yield from part.rows(scope, "k, v", "recomputed", keys)
    yield from part.rows(scope, "k, v", "backward", keys)
    summed = moves("ppermute" if ring else "reduce-scatter", here * 2 * K, _FLOAT32)
    yield from part.rows(scope, "gradients of k, v", "backward", summed)


def _loss(table: Array, tied: bool, step: _Step) -> Iterator[Site]:
    """The fused head and loss: its backward's sums are made in the forward."""
    plan, stream, vocab = step.plan, step.stream, step.plan.mesh_axes("vocab")
    yield from step.rows("loss", "head input", "forward", _gather(stream, STORED, GATHERED, step))
    if not tied:  # else the lookup has gathered it
        yield from step.rows("loss", "head table", "forward", _used([table], step))
    tokens = Array(stream[:2], GATHERED[:2]).entries(plan)
    chunks = chunk_count(tokens)
    if vocab:  # largest score, sum of exponentials, label's score
        scores = _Move("all-reduce", vocab, 3 * _FLOAT32 * -(-tokens // chunks), chunks)
        yield from step.rows("loss", "scores of the tokens", "forward", [scores])
    if step.tokens():
        yield from step.rows("loss", "sums of the loss", "forward", [_Move("all-reduce", step.tokens(), 2 * _FLOAT32)])
    scattered = _sum(stream, vocab, GATHERED, STORED, step.width, plan)
    yield from step.rows("loss", "gradient of head input", "backward", scattered)
    yield from step.rows("loss", "gradient of head", "backward", _gradients([table], step.tokens(), step))


def _left_to_xla(scope: str, part: dict[str, Array], step: _Step) -> Iterator[Site]:
    """Norms and biases, which no op moves: gathered where they are used, their gradients summed whole."""
    vectors = [array for array in part.values() if array.axes == ("embed",) or "embed" not in array.axes]
    stream = tuple(split_over(STORED, step.plan))
    gathers = [move for array in vectors for move in _weights(array, used_axes(array.axes), _FLOAT32, step.plan)]
    sums = []
    for array in vectors:
        over = stream if array.axes == ("embed",) else step.tokens()
        if over:
            size = Array(array.shape, used_axes(array.axes)).entries(step.plan) * _FLOAT32
            sums.append(_Move("all-reduce", over, size))
    yield from step.rows(scope, "norms and biases", "forward", gathers, asked=False)
    yield from step.rows(scope, "gradients of norms and biases", "backward", sums, asked=False)


def _update(parameters: Mapping[str, Array], plan: Plan) -> Iterator[Site]:
    """Where the state is split further than the parameters, these are gathered anew: ZeRO-1."""
    states = {name: Array(array.shape, state_axes(array.axes)) for name, array in parameters.items()}
    if plan.mesh_axes("state_embed") != plan.mesh_axes("embed"):
        moves = [move for name, state in states.items() for move in _weights(state, parameters[name].axes, 4, plan)]
        yield from _rows(plan, "update", "updated parameters", "update", moves)
    over = {axis for state in states.values() for axis in split_over(state.axes, plan)}
    if over:  # at most: one scalar an array
        norm = _Move("all-reduce", tuple(axis for axis in plan.mesh.axis_names if axis in over), 4 * len(states))
        yield from _rows(plan, "update", "norm of the gradients", "update", [norm], asked=False)


# Moves of arrays between layouts: what `jaxpar.collectives` and `jaxpar.collective_matmul` do, in bytes.


def _weights(array: Array, used: Sequence[LogicalAxis | None], width: int, plan: Plan) -> Iterator[_Move]:
    """As `collectives.gather`."""
    size = array.entries(plan) * width
    for _, moved in further_split(array.axes, used, plan):
        size *= plan.pieces(moved)
        yield _Move("all-gather", moved, size)


def _gather(
    shape: tuple[int, ...], stored: Sequence[LogicalAxis | None], used: Sequence[LogicalAxis | None], step: _Step
) -> Iterator[_Move]:
    return _weights(Array(shape, tuple(stored)), used, step.width, step.plan)


def _used(weights: Iterable[Array], step: _Step) -> list[_Move]:
    """Weights as they are multiplied, gathered in the compute dtype."""
    return [move for w in weights for move in _weights(w, used_axes(w.axes), step.width, step.plan)]


def _sum(
    shape: tuple[int, ...], partial: Sequence[MeshAxis], used: Sequence[LogicalAxis | None],
    stored: Sequence[LogicalAxis | None], width: int, plan: Plan,
) -> Iterator[_Move]:  # fmt: skip
    """As `collectives.reduce`."""
    size, left = Array(shape, tuple(used)).entries(plan) * width, set(partial)
    for _, moved in further_split(stored, used, plan):
        for summed, run in groupby(moved, left.__contains__):
            mesh_axes = tuple(run)
            if summed:
                yield _Move("reduce-scatter", mesh_axes, size)
            size //= plan.pieces(mesh_axes)
        left.difference_update(moved)
    if left:
        yield _Move("all-reduce", tuple(axis for axis in plan.mesh.axis_names if axis in left), size)


def _gradients(weights: Iterable[Array], over: Sequence[MeshAxis], step: _Step) -> list[_Move]:
    """Float32 sums over mesh axes, left where the optimizer's state lies."""
    return [
        move
        for w in weights
        for move in _sum(w.shape, over, used_axes(w.axes), state_axes(w.axes), _FLOAT32, step.plan)
    ]


def _ring_axes(used: Sequence[LogicalAxis | None], plan: Plan) -> tuple[MeshAxis, ...]:
    """The mesh axes around which the residual stream's sequence may go; none where another dim moves as well."""
    moves = further_split(STORED, used, plan)
    return moves[0][1] if [dim for dim, _ in moves] == [1] else ()


def _ring(moves: list[_Move], used: Sequence[LogicalAxis | None], form: Form, step: _Step) -> list[_Move]:
    """A gather or scatter of the residual stream in the plan's form: a ring hands on a device's chunk each hop."""
    axes = _ring_axes(used, step.plan)
    if form == "xla" or not axes:
        return moves
    hops = step.plan.pieces(axes) - 1
    return [_Move("ppermute", axes, Array(step.stream, STORED).entries(step.plan) * step.width, hops)]


def _rows(
    plan: Plan, scope: str, what: str, phase: Phase, moves: Iterable[_Move], times: int = 1, asked: bool = True
) -> Iterator[Site]:
    """Rows of moves, those of one kind over the same mesh axes together."""
    together: dict[tuple[CollectiveKind, tuple[MeshAxis, ...], int], int] = defaultdict(int)
    for move in moves:
        together[move.kind, move.axes, move.times] += move.bytes
    for (kind, axes, count), size in together.items():
        yield Site(scope, what, phase, kind, frozenset(axes), plan.pieces(axes), size, times * count, asked)
