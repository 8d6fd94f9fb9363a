"""The pipeline for a model of one's own, given as embed, block and score functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxpar.base.errors import UserError
from jaxpar.base.layout.plan import Pipeline, Plan
from jaxpar.base.layout.sharding import Layout, PyTree
from jaxpar.parallel.cross_entropy import LIKELIHOOD, LossSums, LossWeights, SoftTargets
from jaxpar.parallel.domino import LayerInfo, Places
from jaxpar.parallel.pipeline.executor import gradients
from jaxpar.parallel.pipeline.layers import check_stages, reorder_layers, stored_order
from jaxpar.parallel.pipeline.schedule_table import Table, check_table

Params = Mapping[str, PyTree]


class _Functions:
    """Three functions in the form of a `PipelinedModel`."""

    numbers_layers = False

    def __init__(
        self,
        functions: Sequence[Callable[..., Array]],
        axes: PyTree,
        layers: int,
    ):
        (self._embed, self._block, self._score) = functions
        self.axes = axes
        self.config = SimpleNamespace(
            layers=layers, experts=0, scan_layers=True, kinds=1, query_layer=False
        )

    def trained(self, tree: PyTree) -> PyTree:
        return tree

    def embed(
        self,
        params: Params,
        tokens_BS: Array,
        positions_BS: Array,
        plan: Plan,
        key: Any = None,
        types_BS: Array | None = None,
    ) -> Array:
        if types_BS is not None:
            raise UserError(
                "the batch has token_types, and the embedding is called with tokens and "
                "positions: leave them out"
            )
        return self._embed(params, tokens_BS, positions_BS)

    def layer(
        self,
        layer: PyTree,
        xs: tuple[Array, ...],
        places: Sequence[Places],
        plan: Plan,
        info: LayerInfo,
    ) -> tuple[tuple[Array, ...], None]:
        (x_BSD,) = xs
        (here,) = places
        return (self._block(layer, x_BSD, here.positions),), None

    def query(self, params: Params, x_BSD: Array, places: Places, plan: Plan, key: Any) -> Array:
        raise NotImplementedError("its config has no query layer")

    def score(
        self,
        params: Params,
        x_BSD: Array,
        labels_BS: Array,
        plan: Plan,
        weights: LossWeights,
        soft: SoftTargets | None = None,
    ) -> LossSums:
        loss = self._score(params, x_BSD, labels_BS)
        tokens = jnp.sum(labels_BS >= 0, dtype=jnp.float32)
        return LossSums(loss, jax.lax.stop_gradient(loss), tokens)


def value_and_grad(
    embed: Callable[[Params, Array, Array], Array],
    block: Callable[[Any, Array, Array], Array],
    score: Callable[[Params, Array, Array], Array],
    axes: Params,
    layout: Layout,
    *,
    microbatches: int,
    schedule: str | Table = "1f1b",
    virtual: int = 1,
) -> Callable[[Params, Mapping[str, Array]], tuple[Array, Params]]:
    """Return the mean loss and the gradients of a model whose blocks are stages of a pipeline.

    It all runs inside one jit: `shard_map` over the layout's `stage` axis, and the rest of the
    layout inside a stage, where the ops of `jaxpar.parallel` and sharding constraints work as
    usual. Forward and backward ticks of the microbatches follow each other as the schedule's table
    says, and so the schedule sets the memory. Use `jaxpar.parallel` for lookups in split tables and
    for the loss: XLA aborts at plain indexing of a split table.

    Args:
      embed: `(params, tokens [B, S], positions [B, S]) -> x [B, S, D]`; params are all parameters
        but `blocks`.
      block: `(layer, x, positions) -> x`; a layer is a slice of `params["blocks"]`.
        `jax.checkpoint` has it recomputed.
      score: `(params, x, labels [B, S]) -> ` the loss *summed* over labels not below zero. It sees
        some tokens at a time.
      axes: logical axes of each parameter, in a tree of the parameters' form; those of `blocks`
        begin with "layers".
      layout: a layout with more than one device along `stage`.
      microbatches: how many microbatches the batch's rows are cut into.
      schedule: `gpipe`, `1f1b`, `interleaved`, `looped`, one that `register_schedule` made known,
        or a table of one's own, which also sets microbatches and virtual stages
        (`jaxpar.parallel.pipeline.schedule_table.check_table` says which tables are valid).
      virtual: how many chunks of layers a stage has.

    Returns:
      A function of (params, batch) for `jax.jit`: params is a dict with stacked `blocks` [layers,
      ...], and the batch a dict of `tokens` and `labels` [B, S]. It returns the mean loss per
      label, and gradients in the parameters' form. Where layers are not stored in the order of the
      stages (`virtual` above 1, or layers that do not divide), it puts them into that order and
      back, which moves them between devices.

    Raises:
      UserError: there are no stages, the rules or sizes make no pipeline, the table is not valid,
        or the parameters have no `blocks`. Errors that depend on the arrays are raised when the
        function is traced.
    """
    pipeline = _pipeline_of(layout, schedule, microbatches, virtual)
    table = schedule if isinstance(schedule, Table) else None
    if "blocks" not in axes:
        raise UserError(
            f"a pipeline's parameters have stacked `blocks`, and these are {', '.join(axes)}"
        )
    plan = Plan(layout.mesh, layout.rules, layout.compute, pipeline=pipeline)

    def run(params: Params, batch: Mapping[str, Array]) -> tuple[Array, Params]:
        layers = len(jax.tree.leaves(params["blocks"])[0])
        check_stages(plan, layers, pipeline.microbatches)
        _require_microbatches(batch, layout, pipeline.microbatches)
        order = stored_order(plan, layers)

        def moved(
            blocks: PyTree, before: Sequence[int] | None, after: Sequence[int] | None
        ) -> PyTree:
            return jax.tree.map(lambda x: reorder_layers(x, before, after, layers), blocks)

        model = _Functions((embed, block, score), axes, layers)
        stored = {**params, "blocks": moved(params["blocks"], None, order)}
        sums, grads = gradients(model, stored, batch, plan, None, LIKELIHOOD, table)
        grads = {**grads, "blocks": moved(grads["blocks"], order, None)}
        return sums.loss / sums.tokens, jax.tree.map(
            lambda grad: grad / sums.tokens,
            grads,
        )

    return run


def _pipeline_of(
    layout: Layout, schedule: str | Table, microbatches: int, virtual: int
) -> Pipeline:
    """The pipeline of a plan; see `value_and_grad` for the arguments.

    Raises:
      UserError: there are no stages, or the table is not valid, or for other stages.
    """
    stages = layout.size("stage")
    if stages == 1:
        raise UserError(
            "a pipeline needs stages, and this layout has one: make_mesh(stage=4) has four"
        )
    if isinstance(schedule, str):
        return Pipeline(schedule, microbatches, virtual)
    check_table(schedule)
    if schedule.stages != stages:
        raise UserError(f"a table of {schedule.stages} stages on a layout that has {stages}")
    # A table stands in place of a schedule; `looped` is one that may have any virtual stages.
    return Pipeline("looped", schedule.microbatches, schedule.virtual)


def _require_microbatches(batch: Mapping[str, Array], layout: Layout, microbatches: int) -> None:
    """Refuse rows that cannot be cut into microbatches, or microbatches that cannot be laid out."""
    rows, S = batch["tokens"].shape
    if rows % microbatches:
        raise UserError(
            f"{rows} rows are not cut into {microbatches} microbatches: try a divisor of {rows}"
        )
    layout.sharding(("batch", "residual_seq"), (rows // microbatches, S), "a microbatch")
