"""The run of a schedule's table inside one jit: `shard_map` over the stages, and all the rest of
the plan inside a stage.

All stages run the same ticks, and what a stage computes while it is idle is thrown away. A tick
ends with one `ppermute` to the neighbour; a cotangent travels beside the forward tick that follows
it, an activation beside the backward tick. Buffers are as deep as the schedule needs, for any
number of microbatches (see `jaxpar.parallel.pipeline.program`).

No single stage runs the ends of the model, since all others would wait for it. The output of the
last stage is shared out for the final norm, the loss and their gradients (`shared_head`). The
gradients of the head and of the embedding are summed over the stages once, at the end, so that a
tied table gets both. Every stage computes the embedding, a lookup.

In this module the program becomes scans over rounds; `ticks` has the values that one stage carries
from round to round, and the work of each tick, and `stage_inputs` the arguments of a stage.

Shapes: M microbatches, B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxpar.base.layout.plan import Plan
from jaxpar.parallel.cross_entropy import LIKELIHOOD, LossSums, LossWeights
from jaxpar.parallel.padding import TokenCounts, count_tokens, with_text
from jaxpar.parallel.pipeline.layers import layers_of
from jaxpar.parallel.pipeline.pipelined_model import Params, PipelinedModel
from jaxpar.parallel.pipeline.program import Rows, Segment, program
from jaxpar.parallel.pipeline.schedule_table import ActionKind, Table
from jaxpar.parallel.pipeline.schedules import schedule
from jaxpar.parallel.pipeline.stage_inputs import StageArrays, Task
from jaxpar.parallel.pipeline.ticks import Carry, Often, Shares, Stage, StageGradients
from jaxpar.parallel.zigzag import axes_of, in_order

Batch = Mapping[str, Array]


def gradients(
    model: PipelinedModel,
    params: Params,
    batch: Batch,
    plan: Plan,
    key: jax.Array | None,
    weights: LossWeights,
    table: Table | None = None,
    counts: TokenCounts | None = None,
) -> tuple[LossSums, Params]:
    """Compute the summed loss of a batch and its gradient, with its microbatches in the
    plan's pipeline.

    Row r of the batch is in microbatch r % M, as it is where microbatches are accumulated one after
    another.

    Args:
      model: the model, whose blocks can be run layer by layer.
      params: parameters whose blocks are stacked in the plan's `stored_order`.
      batch: the arrays that `Model.loss` takes, [M B, S].
      plan: the plan, which has a pipeline of M microbatches.
      key: the dropout key, of which microbatch i uses `fold_in(key, i)`; None = no dropout.
      table: the actions of each stage in each tick; None = the plan's schedule.
      counts: the numbers of tokens of the whole step; None = the batch is the whole step.

    Returns:
      The sums of the loss, float32 scalars, and the gradients of what is trained, in the
      parameters' form and the plan's dtype for sums over microbatches.
    """
    pipeline = plan.pipeline
    table = table or schedule(
        pipeline.schedule, plan.size("stage"), pipeline.microbatches, pipeline.virtual
    )
    if counts is None:
        counts = count_tokens(batch)
    layers = layers_of(model.config.layers, plan.size("stage"), pipeline)
    task = Task(model, plan, weights, layers, program(table), backward=True)
    sums, grads = _run(task, params, batch, key, counts)
    assert grads is not None  # the task has a backward
    return sums, {**grads.ends, "blocks": grads.blocks}


def loss(
    model: PipelinedModel,
    params: Params,
    batch: Batch,
    plan: Plan,
    weights: LossWeights = LIKELIHOOD,
) -> LossSums:
    """Compute the loss alone: only forward ticks run, and nothing is kept.

    Few microbatches at a time go through all virtual stages, so that few activations wait for the
    next of these.

    Args:
      model: the model, whose blocks can be run layer by layer.
      params: parameters whose blocks are stacked in the plan's `stored_order`.
      batch: the arrays that `Model.loss` takes, [M B, S].
      plan: the plan, which has a pipeline of M microbatches.

    Returns:
      The sums over the batch.
    """
    pipeline = plan.pipeline
    table = schedule("interleaved", plan.size("stage"), pipeline.microbatches, pipeline.virtual)
    layers = layers_of(model.config.layers, plan.size("stage"), pipeline)
    task = Task(model, plan, weights, layers, program(table, backward=False), backward=False)
    sums, _ = _run(task, params, batch, None, count_tokens(batch))
    return sums


def _run(
    task: Task, params: Params, batch: Batch, key: jax.Array | None, counts: TokenCounts
) -> tuple[LossSums, StageGradients | None]:
    """Run a task's program in a `shard_map` over the stages.

    Returns:
      The sums of the loss, and the gradients of all stages' layers [stages x virtual x places, ...]
      and of the ends; None where the task has no backward.
    """
    axes = task.plan.mesh_axes("stage")
    arrays = _stage_arrays(task, params, batch, key, counts)
    ticks = [segment.ticks for segment in task.program.segments]
    by_stage = P(axes)
    of_ticks = [
        jax.tree.map(lambda x: P(None, axes) if x.ndim == 2 else P(), tick) for tick in ticks
    ]
    if task.backward:
        of_gradients = StageGradients(by_stage, P())
    else:
        of_gradients = P()
    run = jax.shard_map(
        partial(_run_stage, task),
        mesh=task.plan.mesh,
        in_specs=(
            StageArrays(
                blocks=by_stage,
                ends=P(),
                rows=P(),
                key=P(),
                order=by_stage,
                labels_per_token=P(),
            ),
            of_ticks,
        ),
        out_specs=(P(), of_gradients),
        axis_names=set(axes),
        check_vma=False,
    )
    return run(arrays, ticks)


def _stage_arrays(
    task: Task, params: Params, batch: Batch, key: jax.Array | None, counts: TokenCounts
) -> StageArrays:
    """Return the arguments of all stages, the batch [M B, S] cut into microbatches [M, B, S]."""
    plan = task.plan

    def cut(x_BS: Array) -> Array:
        x_BMS = x_BS.reshape(-1, plan.pipeline.microbatches, *x_BS.shape[1:])
        return plan.constrain(x_BMS.swapaxes(0, 1), (None, *axes_of(x_BS)))

    if task.model.config.experts:
        told = with_text(batch)
    else:
        told = batch
    ordered = in_order(told, plan, plan.context.strategy, plan.overlap.cuts_sequence)
    rows = jax.tree.map(cut, ordered)
    order = jnp.asarray(task.layers.order)
    if task.model.config.experts:
        labels_per_token = counts.labels_per_token
    else:
        labels_per_token = None
    return StageArrays(
        blocks=params["blocks"],
        ends={name: params[name] for name in params if name != "blocks"},
        rows=rows,
        key=key,
        order=order,
        labels_per_token=labels_per_token,
    )


def _run_stage(
    task: Task, arrays: StageArrays, ticks: list[dict[ActionKind, Rows]]
) -> tuple[LossSums, StageGradients | None]:
    """Run one stage, inside the `shard_map`, on its part of the arrays and of the rows [rounds, 1]
    of each segment.
    """
    stage = Stage(task, arrays)
    carry = stage.start()
    for segment, rows in zip(task.program.segments, ticks, strict=True):
        carry = _run_rounds(stage, carry, segment, rows)
    return stage.finish(carry)


def _often(rounds: np.ndarray) -> Often:
    """Count the rounds in which something is asked for."""
    return Often(int(np.count_nonzero(rounds)), len(rounds))


def _run_rounds(
    stage: Stage, carry: Carry, segment: Segment, rows: dict[ActionKind, Rows]
) -> Carry:
    """Scan over the rounds of a segment, with this stage's rows [rounds, 1]."""
    shares: dict[ActionKind, Shares] = {
        kind: Shares(
            first=_often(of_all.some_end),
            last=_often(of_all.some_score),
        )
        for kind, of_all in segment.ticks.items()
    }

    def body(carry: Carry, row: dict[ActionKind, Rows]) -> tuple[Carry, None]:
        return stage.round(carry, row, shares), None

    carry, _ = jax.lax.scan(body, carry, rows)
    return carry
