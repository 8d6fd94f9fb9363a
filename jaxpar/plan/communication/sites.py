"""The bytes a plan sends in a training step, in closed form: arithmetic on shapes, no tracing and no compiler.

One row for each place where a step's arrays change their layout, derived from the parameters' shapes and logical axes
and the plan's rules, as the ops of `jaxpar.parallel.linear`, `jaxpar.parallel.cross_entropy` and `jaxpar.train.step`
write them out. It is to the byte what `jaxpar.rehearse.requested_collectives` finds in the traced step: a move that is
written twice counts once where both stand in one loop body (unrolled blocks that are not recomputed keep what the
forward gathered). What XLA moves as it sees fit (norms, biases, the gradient's norm) stands in rows that are not
`asked` for; their bytes are an estimate.

Shapes: B batch, S sequence, D embed, V vocab, L layers; weights [D, *out] (column linears) and [*in, D] (row linears).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxpar.base.config import Config
from jaxpar.base.mesh import MeshAxis
from jaxpar.base.plan import Plan, one_along, param_dtype, summed_last
from jaxpar.base.sharding import path_name, state_axes
from jaxpar.parallel.collectives import split_over
from jaxpar.parallel.cross_entropy import tiling
from jaxpar.parallel.linear import GATHERED, STORED, used_axes
from jaxpar.plan.communication.blocks import attention_rows, linear_rows
from jaxpar.plan.communication.experts import expert_rows
from jaxpar.plan.communication.moves import (
    FLOAT32,
    Array,
    Move,
    PartRun,
    Site,
    gather_moves,
    gradient_sums,
    rows_of,
    stream_gather,
    sum_moves,
    weight_gathers,
)  # fmt: skip
from jaxpar.plan.communication.stages import stage_rows, turns, with_a_stage

Sent = dict[tuple[str, frozenset[str]], float]


def sites(parameters: Mapping[str, Array], config: Config, plan: Plan) -> list[Site]:
    """Every move of one training step.

    Args:
      parameters: of the model as the plan stores them, from `arrays`.
      config: whose batch, accumulation, sequence length and `scan_layers` count.
      plan: from `jaxpar.train.plans.make_plan`; one on an `AbstractMesh` will do, no device is asked.
    """
    embed, head = part_of(parameters, "embed"), part_of(parameters, "head")
    blocks = one_block(parameters)
    tables = [array for array in (*head.values(), *embed.values()) if array.axes[0] == "vocab"]
    train, often = config.train, turns(config, plan)
    over = summed_last(plan, train.accumulation, bool(config.model.dropout or config.model.experts))
    summed, plan = _after_the_last(parameters, over, plan), one_along(plan, over)
    rows = train.batch // train.accumulation // often.microbatches // plan.pieces(over)
    apart = plan.recomputes or config.model.scan_layers or plan.size("stage") > 1
    step = PartRun(plan, (rows, config.data.seq_len, tables[0].shape[-1]), often.layers, apart)
    first = step._replace(runs=often.embedding)
    last = step._replace(runs=often.loss, stream=with_a_stage(step.stream, plan))
    return [
        *_lookups(embed, first),
        *linear_rows(blocks, step),
        *attention_rows(config.model, step),
        *expert_rows(blocks, config.model, step),
        *_loss(tables[0], often.looked_up if len(tables) == 1 else 0, last),
        *stage_rows([*embed.values(), *head.values()], bool(config.model.experts), often, step),
        *_left_to_xla("block", blocks, step),
        *_left_to_xla("head", head, last),
        *summed,
        *_update(parameters, plan),
    ]


def sent(sites: Iterable[Site]) -> Sent:
    """Bytes one device sends in a step, by kind of collective and mesh axes; `site.asked` tells what to leave out."""
    total: Sent = defaultdict(float)
    for site in sites:
        total[site.kind, site.axes] += site.sent
    return dict(total)


def arrays(shapes: Any, axes: Any) -> dict[str, Array]:
    """The arrays of a tree by name: `arrays(model.shapes(), model.axes)`."""
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    names = jax.tree.leaves(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    return {path_name(path): Array(leaf.shape, axes) for (path, leaf), axes in zip(leaves, names, strict=True)}


def part_of(parameters: Mapping[str, Array], part: str) -> dict[str, Array]:
    """`{"q": ...}` of `{"blocks.q": ..., "embed.tokens": ...}`, for the part `blocks`."""
    return {name.removeprefix(part + "."): array for name, array in parameters.items() if name.startswith(part + ".")}


def one_block(parameters: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays of one layer."""
    return {name: Array(array.shape[1:], array.axes[1:]) for name, array in part_of(parameters, "blocks").items()}


def _lookups(tables: dict[str, Array], step: PartRun) -> Iterator[Site]:
    """A device looks up the rows of a table that it has, and the rest are zeros: sums where rows are split."""
    plan, stream = step.plan, step.stream
    for name, table in tables.items():
        yield from step.forward("embed", f"{name} table", weight_gathers([table], step))
        found = sum_moves(stream, plan.mesh_axes(table.axes[0]), GATHERED, STORED, step.width, plan)
        yield from step.forward("embed", f"rows of {name}", found)
    gathered = stream_gather(stream, STORED, GATHERED, step)
    yield from step.backward("embed", "gradient of the stream", "both", gathered)
    for name, table in tables.items():
        sums = gradient_sums([table], step.tokens(), step)
        yield from step.backward("embed", f"gradient of {name}", "both", sums)


def _loss(table: Array, looked_up: int, step: PartRun) -> Iterator[Site]:
    """The fused head and loss: its backward's sums are made in the forward.

    Args:
      table: that scores are made with.
      looked_up: how often in a step the lookup has gathered it, in the same loop body.
      step: of the tokens that a device has.
    """
    plan, stream, vocab = step.plan, step.stream, step.plan.mesh_axes("vocab")
    yield from step.forward("loss", "head input", stream_gather(stream, STORED, GATHERED, step))
    tokens = Array(stream[:2], GATHERED[:2]).entries(plan)
    chunks, slices = tiling(tokens, table.shape[0] // plan.size("vocab"), table.shape[1], plan, plan.loss_mib)
    part = table._replace(shape=(table.shape[0] // slices, table.shape[1]))
    gathers = [move._replace(times=1 if slices == 1 else 2 * slices) for move in weight_gathers([part], step)]
    times = step.runs.forward - (looked_up if slices == 1 else 0)
    yield from rows_of(plan, "loss", "head table", "forward", gathers, times)
    if vocab:  # largest score, sum of exponentials, label's score
        scores = Move("all-reduce", vocab, 3 * FLOAT32 * -(-tokens // chunks), chunks)
        yield from step.forward("loss", "scores of the tokens", [scores])
    if step.tokens():
        yield from step.forward("loss", "sums of the loss", [Move("all-reduce", step.tokens(), 2 * FLOAT32)])
    scattered = sum_moves(stream, vocab, GATHERED, STORED, step.width, plan)
    yield from step.backward("loss", "gradient of head input", "both", scattered)
    sums = [move._replace(times=slices) for move in gradient_sums([part], step.tokens(), step)]
    yield from step.backward("loss", "gradient of head", "both", sums)


def _left_to_xla(scope: str, part: dict[str, Array], step: PartRun) -> Iterator[Site]:
    """Norms and biases, which no op moves: gathered where they are used, their gradients summed whole."""
    vectors = [array for array in part.values() if array.axes == ("embed",) or "embed" not in array.axes]
    stream = tuple(split_over(STORED, step.plan))
    gathers = [move for array in vectors for move in gather_moves(array, used_axes(array.axes), FLOAT32, step.plan)]
    sums = []
    for array in vectors:
        over = stream if array.axes == ("embed",) else step.tokens()
        if over:
            size = Array(array.shape, used_axes(array.axes)).entries(step.plan) * FLOAT32
            sums.append(Move("all-reduce", over, size))
    yield from step.forward(scope, "norms and biases", gathers, asked=False)
    yield from step.backward(scope, "gradients of norms and biases", "input", sums, asked=False)


def _after_the_last(parameters: Mapping[str, Array], over: Sequence[MeshAxis], plan: Plan) -> list[Site]:
    """Likelihood, tokens and all gradients, summed over devices after the last microbatch: see `step.gradients`."""
    entries = sum(Array(array.shape, state_axes(array.axes)).entries(plan) for array in parameters.values())
    moves = [Move("all-reduce", tuple(over), (2 + entries) * FLOAT32)] if over else []
    return list(rows_of(plan, "accumulate", "gradients and sums of the loss", "backward", moves))


def _update(parameters: Mapping[str, Array], plan: Plan) -> Iterator[Site]:
    """Where the state is split further than the parameters, these are gathered anew: ZeRO-1."""
    states = {name: Array(array.shape, state_axes(array.axes)) for name, array in parameters.items()}
    if plan.mesh_axes("state_embed") != plan.mesh_axes("embed"):
        moves = []
        for name, state in states.items():
            axes = parameters[name].axes
            moves += gather_moves(state, axes, param_dtype(axes, plan).itemsize, plan)
        yield from rows_of(plan, "update", "updated parameters", "update", moves)
    over = {axis for state in states.values() for axis in split_over(state.axes, plan)}
    if over:  # at most: one scalar an array
        norm = Move("all-reduce", tuple(axis for axis in plan.mesh.axis_names if axis in over), 4 * len(states))
        yield from rows_of(plan, "update", "norm of the gradients", "update", [norm], asked=False)
