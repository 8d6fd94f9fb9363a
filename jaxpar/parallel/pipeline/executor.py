"""Run a schedule's table inside one jit: `shard_map` over the stages, and all the rest of the plan
inside a stage.

All stages run the same ticks, and what a stage computes while it is idle is thrown away. A tick
ends with one `ppermute` to the neighbour; a cotangent travels beside the forward tick that follows
it, an activation beside the backward tick. Buffers are as deep as the schedule needs, for any
number of microbatches (see `jaxpar.parallel.pipeline.program`).

No single stage runs the ends of the model, since all others would wait for it. The output of the
last stage is shared out, a part of its tokens to each stage, for the final norm, the loss and their
gradients (Yeung et al. 2024, arXiv:2411.05288, share out the vocabulary instead, and wait for its
sums). These gradients are summed over the stages once, at the end, with those of the embedding, so
that a tied table gets both. Every stage does the embedding, a lookup.

Shapes: M microbatches, B batch, S sequence, T pieces of the sequence that a device has, P stages, D
embed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxpar.base.plan import Plan, gradient_dtype
from jaxpar.base.sharding import Axes, PyTree, is_axes, state_axes
from jaxpar.parallel.collectives import (
    first_order_token,
    manual,
    order_token_after,
    ready_after,
    reduce_scatter,
)
from jaxpar.parallel.cross_entropy import LIKELIHOOD, LossSums, LossWeights
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.linear import GATHERED, STORED
from jaxpar.parallel.padding import TokenCounts, count_tokens, with_text
from jaxpar.parallel.pipeline.layers import Layers, layers_of
from jaxpar.parallel.pipeline.program import Rows, TickProgram, program
from jaxpar.parallel.pipeline.schedules import ActionKind, Table, schedule
from jaxpar.parallel.pipeline.stage import LayerContext, Params, PipelinedModel, Stack, read, write
from jaxpar.parallel.token_order import TOKENS, Places, in_order, places_of_halves

Batch = Mapping[str, Array]
_X = TypeVar("_X")


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
    """Compute the summed loss of a batch and its float32 gradient, with its microbatches in the
    plan's pipeline.

    Row r of the batch is in microbatch r % M, as it is where microbatches are accumulated one after
    another.

    Args:
      model: the model, whose blocks can be run layer by layer.
      params: parameters whose blocks are stacked in the plan's `stored_order`.
      batch: arrays [M B, S], as for `Model.loss`.
      plan: the plan, which has a pipeline of M microbatches.
      key: the dropout key, of which microbatch i uses `fold_in(key, i)`; None = no dropout.
      weights: the weights of what is added to the likelihood.
      table: what each stage does in each tick; None = the plan's schedule.
      counts: the tokens of the whole step, as for `Model.loss`; None = the batch is all of it.

    Returns:
      The sums over the batch, and a float32 gradient for each parameter, in a tree of their form.
    """
    pipeline = plan.pipeline
    table = table or schedule(
        pipeline.schedule, plan.size("stage"), pipeline.microbatches, pipeline.virtual
    )
    if counts is None:
        counts = count_tokens(batch)
    task = _Task(model, plan, weights, program(table), backward=True)
    sums, grads = _run(task, params, batch, key, counts)
    return sums, {**grads["ends"], "blocks": grads["blocks"]}


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
      model: as for `gradients`.
      params: as there.
      batch: as there.
      plan: as there.
      weights: the weights of what is added to the likelihood; nothing is by default.

    Returns:
      The sums over the batch.
    """
    pipeline = plan.pipeline
    table = schedule("interleaved", plan.size("stage"), pipeline.microbatches, pipeline.virtual)
    task = _Task(model, plan, weights, program(table, backward=False), backward=False)
    return _run(task, params, batch, None, count_tokens(batch))[0]


class _Task(NamedTuple):
    """What all stages know: the model, how it runs, and the ticks."""

    model: PipelinedModel
    plan: Plan
    weights: LossWeights
    steps: TickProgram
    backward: bool


class _Arrays(NamedTuple):
    """The arrays that a stage is given."""

    blocks: PyTree
    """The stacked weights of its layers, [virtual x places, ...]."""
    ends: PyTree
    """The parameters of the embedding and the head."""
    rows: PyTree
    """The batch, [M, B, S]."""
    key: PyTree
    """The key of the dropout, or None."""
    order: PyTree
    """The layer at each of its places, [virtual x places]; -1 = none."""
    labels_per_token: PyTree
    """The step's labels that count over its tokens of text, where the model has routers."""


def _run(
    task: _Task, params: Params, batch: Batch, key: jax.Array | None, counts: TokenCounts
) -> tuple[LossSums, Any]:
    """Return the sums of the loss, and the gradients of `blocks` and `ends`, which are None without
    `backward`.
    """
    plan = task.plan
    axes = task.plan.mesh_axes("stage")
    M = task.plan.pipeline.microbatches

    def cut(x_BS: Array) -> Array:
        x_BMS = x_BS.reshape(-1, M, x_BS.shape[1])
        return plan.constrain(x_BMS.swapaxes(0, 1), (None, *TOKENS))

    if task.model.config.experts:
        told = with_text(batch)
    else:
        told = batch
    rows = jax.tree.map(cut, in_order(told, plan, plan.context.strategy))
    ends = {name: params[name] for name in params if name != "blocks"}
    layers = layers_of(task.model.config.layers, plan.size("stage"), plan.pipeline)
    if task.model.config.experts:
        per_token = counts.labels_per_token
    else:
        per_token = None
    arrays = _Arrays(
        params["blocks"],
        ends,
        rows,
        key,
        jnp.asarray(layers.order),
        per_token,
    )
    ticks = [segment.ticks for segment in task.steps.segments]

    def local(
        arrays: _Arrays,
        ticks: list[dict[ActionKind, Rows]],
    ) -> tuple[LossSums, Any]:
        stage = _Stage(task, arrays, layers)
        carry = stage.start()
        for segment, mine in zip(task.steps.segments, ticks, strict=True):
            shares: dict[ActionKind, _Shares] = {
                kind: _Shares(
                    float(np.mean(rows.some_end)),
                    float(np.mean(rows.some_score)),
                )
                for kind, rows in segment.ticks.items()
            }
            body = partial(stage.round, shares=shares)
            carry, _ = jax.lax.scan(
                lambda carry, row, body=body: (body(carry, row), None), carry, mine
            )
        return stage.finish(carry)

    by_stage = P(axes)
    of_ticks = [
        jax.tree.map(lambda x: P(None, axes) if x.ndim == 2 else P(), tick) for tick in ticks
    ]
    if task.backward:
        of_gradients = {"blocks": by_stage, "ends": P()}
    else:
        of_gradients = P()
    run = jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=(
            _Arrays(by_stage, P(), P(), P(), by_stage, P()),
            of_ticks,
        ),
        out_specs=(P(), of_gradients),
        axis_names=set(axes),
        check_vma=False,
    )
    return run(arrays, ticks)


class _Shares(NamedTuple):
    """The share of some rounds in which a stage works at the first virtual stage, and the share at
    the last.
    """

    first: float
    last: float


class _Carry(NamedTuple):
    """What one stage carries from tick to tick; the fields of the backward are None where there is
    none.
    """

    inbox: Array
    """The activations that have arrived, [slots, B, S, D]."""
    sums: LossSums
    """The sums of the loss, for this stage's part."""
    order_token: Array | None
    """What the next op with a collective waits for, on CPU (`order_token_after`)."""
    stash: Any = None
    """What the forward keeps for the backward: a stack's buffers, or a stage's input [slots,
    ...].
    """
    cotangents: Any = None
    """The cotangents that have arrived, [slots, B, S, D]."""
    leaving: Any = None
    """The cotangent that is sent next, [B, S, D]."""
    entering: Any = None
    """The activation that is on its way to the inbox inside a round, [B, S, D]."""
    blocks: Any = None
    """The gradients of this stage's layers, [virtual x places, ...], in the plan's dtype for such
    sums.
    """
    ends: Any = None
    """The gradients of embedding and head, for this stage's part, if these are trained."""


class _Stage:
    """One stage inside the `shard_map`: its arrays, and what it does in each kind of tick."""

    def __init__(self, task: _Task, arrays: _Arrays, layers: Layers):
        self.model = task.model
        self.plan = task.plan
        self.weights = task.weights
        self.steps = task.steps
        self.arrays = arrays
        self.ends = arrays.ends
        self.backward = task.backward
        self.places = layers.places
        self.gaps = -1 in layers.order
        self.axes = self.plan.mesh_axes("stage")
        self.by_stage = (
            task.backward and self.plan.recomputes and self.plan.pipeline.stash == "stage"
        )
        stored = partial(jax.tree.map, state_axes, is_leaf=is_axes)
        trained = self.model.trained(self.model.axes)
        axes = {name: stored(trained[name]) for name in trained}
        self.trained_ends = {name: self.ends[name] for name in axes if name != "blocks"}
        blocks = jax.tree.map(
            lambda axes: (None, *axes[1:]),
            axes.pop("blocks"),
            is_leaf=is_axes,
        )
        self.layouts = {
            "entering": STORED,
            "leaving": STORED,
            "cotangents": (None, *STORED),
            "blocks": blocks,
            "ends": axes,
        }
        self.added = self._router_weights()
        self.layers = Stack(
            self.model, self.plan, arrays.blocks, self._context, self.places, self.added
        )

    def _router_weights(self) -> RouterSums | None:
        """Return the weights of a layer's router sums in the loss, if there are any: the losses of
        routers are means over the layers and over the text, beside a likelihood that is a sum over
        labels (see `Model.loss`)."""
        if not self.model.config.experts:
            return None
        share = self.arrays.labels_per_token / self.model.config.layers
        return RouterSums(self.weights.balance_loss * share, self.weights.router_z_loss * share)

    def _keys(self, i: ArrayLike) -> tuple[Array | None, Array | None]:
        """Return the keys of a microbatch's embedding and of its layers, as `Model.hidden_states`
        makes them.
        """
        if self.arrays.key is None:
            return None, None
        embed, blocks = jax.random.split(
            jax.random.fold_in(
                self.arrays.key,
                i,
            )
        )
        return embed, jax.random.split(blocks, self.model.config.layers)

    def _context(self, i: ArrayLike, chunk: ArrayLike, j: ArrayLike) -> LayerContext:
        row = self._row(i)
        places = places_of_halves(
            Places(row["positions"], row.get("segments"), row.get("text")), self.plan
        )
        layer = self.arrays.order[chunk * self.places + j]
        _, keys = self._keys(i)
        if keys is None:
            key = None
        else:
            key = keys[jnp.maximum(layer, 0)]
        return LayerContext(places, key, layer >= 0 if self.gaps else None)

    def _row(self, i: ArrayLike) -> dict[str, Array]:
        return {name: read(x, i) for name, x in self.arrays.rows.items()}

    def _embed(self, ends: Params, i: ArrayLike) -> Array:
        row = self._row(i)
        key, _ = self._keys(i)
        x_BSD = self.model.embed(
            ends,
            row["tokens"],
            row["positions"],
            self.plan,
            key,
        )
        return self.plan.constrain(x_BSD, STORED)

    # Buffers.

    def start(self) -> _Carry:
        """Return empty buffers and zero gradients."""
        plan = self.plan
        steps = self.steps
        if self.model.config.experts:
            routed = RouterSums(*jnp.zeros(2))
        else:
            routed = None
        x = jax.eval_shape(lambda: self._embed(self.ends, 0))

        def messages(slots: int) -> Array:
            return plan.constrain(
                jnp.zeros((slots, *x.shape), x.dtype),
                (None, *STORED),
            )

        sums = LossSums(*jnp.zeros(3), routed=routed)
        carry = _Carry(messages(steps.inbox), sums, first_order_token(plan))
        if not self.backward:
            return carry
        self.layers.prepare(x)
        axes = self.model.trained(self.model.axes)
        trained = self.model.trained({"blocks": self.arrays.blocks})["blocks"]
        blocks = jax.tree.map(
            lambda x, axes: self._zeros(x, (None, *axes[1:])), trained, axes["blocks"]
        )
        ends = {
            name: jax.tree.map(self._zeros, end, axes[name])
            for name, end in self.trained_ends.items()
        }
        if self.by_stage:
            stash = messages(steps.stash)
        else:
            stash = self.layers.empty_stash(steps.stash)
        cotangents = messages(steps.cotangents)
        leaving = messages(1)[0]
        return carry._replace(
            stash=stash, cotangents=cotangents, leaving=leaving, blocks=blocks, ends=ends
        )

    def _zeros(self, weight: Array, axes: Axes) -> Array:
        """Return a zero gradient to add to, laid out as gradients are."""
        zeros = jnp.zeros(weight.shape, gradient_dtype(axes, self.plan))
        return self.plan.constrain(zeros, state_axes(axes))

    def finish(self, carry: _Carry) -> tuple[LossSums, Any]:
        """Return the sums, this stage's gradients of its layers, and the gradients of the ends
        summed over stages.
        """
        with jax.named_scope("sum"):
            own = ready_after(carry.sums, carry.order_token)
            sums = jax.tree.map(
                lambda x: jax.lax.psum(x, self.axes),
                own,
            )
            if not self.backward:
                return sums, None
            stored = self.layouts["ends"]
            summed = partial(jax.tree.map, self._total)
            own_ends = ready_after(carry.ends, carry.order_token)
            ends = manual(summed, self.plan, (stored,), stored)(own_ends)
            return sums, {"blocks": carry.blocks, "ends": ends}

    def _total(self, grad: Array) -> Array:
        """Sum over the stages, in float32 as in every sum of gradients over devices."""
        return jax.lax.psum(grad.astype(jnp.float32), self.axes).astype(grad.dtype)

    # Ticks.

    def round(
        self,
        carry: _Carry,
        ticks: dict[ActionKind, Rows],
        shares: dict[ActionKind, _Shares],
    ) -> _Carry:
        """Run the ticks of a round, one after another."""
        ticks = {
            kind: jax.tree.map(lambda x: x[0] if x.ndim else x, row) for kind, row in ticks.items()
        }
        run = {"forward": self._forward, "backward": self._backward}
        arriving = None
        if "backward" in shares:
            # sent before the forward tick, taken after it: it travels meanwhile
            with jax.named_scope("backward"):
                arriving = self._send(ready_after(carry.leaving, carry.order_token), -1)
                token = order_token_after(carry.order_token, arriving, STORED, self.plan)
                carry = carry._replace(order_token=token)
        for kind in shares:  # in the round's order, which a pytree does not keep
            if kind == "backward":
                arrived, cotangents = jax.lax.optimization_barrier((arriving, carry.cotangents))
                carry = carry._replace(cotangents=write(cotangents, arrived, ticks[kind].arrives))
            with jax.named_scope(kind):
                tick = ready_after(ticks[kind], carry.order_token)
                carry = run[kind](carry, tick, shares[kind])
        if "forward" in shares:  # taken after the other ticks
            arrived, leaving = jax.lax.optimization_barrier((carry.entering, carry.leaving))
            inbox = write(carry.inbox, arrived, ticks["forward"].arrives)
            carry = carry._replace(inbox=inbox, entering=None, leaving=leaving)
        return carry

    def _order_after(self, carry: _Carry, *made: str) -> _Carry:
        """Return the carry such that its next op with a collective runs after those that made these
        parts of it.
        """
        if carry.order_token is None:
            return carry
        for name in made:
            # Of the sums it takes only what every program needs, because an order token keeps alive
            # what it depends on.
            if name == "sums":
                arrays = carry.sums.nll
                axes = ()
            else:
                arrays = getattr(carry, name)
                axes = self.layouts[name]
            token = order_token_after(carry.order_token, arrays, axes, self.plan)
            carry = carry._replace(order_token=token)
        return carry

    def _send(self, x_BSD: Array, by: int) -> Array:
        """Return what a neighbour had: the stage before (by 1) or after (by -1), round the ends."""
        stages = self.plan.size("stage")
        around = [(s, (s + by) % stages) for s in range(stages)]
        with jax.named_scope("send"):
            return manual(
                lambda x: jax.lax.ppermute(x, self.axes, around), self.plan, (STORED,), STORED
            )(x_BSD)

    def _forward(self, carry: _Carry, row: Rows, shares: _Shares) -> _Carry:
        def embedded(x_BSD: Array) -> Array:
            return jnp.where(
                row.ends > 0,
                self._embed(self.ends, row.microbatch),
                x_BSD,
            )

        x_BSD = _if_some(
            shares.first,
            row.some_end,
            embedded,
            read(carry.inbox, row.taken),
        )
        y_BSD, stash, routed = self.layers.forward(
            x_BSD, row, None if self.by_stage else carry.stash
        )
        carry = carry._replace(
            stash=write(carry.stash, x_BSD, row.kept) if self.by_stage else stash
        )
        if routed is not None:
            carry = carry._replace(sums=self._add_routed(carry.sums, routed, row.on))
        carry = self._order_after(carry._replace(entering=self._send(y_BSD, 1)), "entering")
        row = ready_after(row, carry.order_token)
        carry = _if_some(
            shares.last, row.some_score, lambda carry: self._score(carry, y_BSD, row), carry
        )
        return self._order_after(carry, "sums", "cotangents")

    def _add_routed(self, sums: LossSums, routed: RouterSums, on: Array) -> LossSums:
        """Add the routers' part of the loss for this stage's layers, as a share of the mean over
        all layers.
        """
        found = jax.tree.map(
            lambda x: jnp.where(on > 0, x, 0),
            routed,
        )
        added = sum(jax.tree.leaves(jax.tree.map(jnp.multiply, self.added, found)))
        total = jax.tree.map(
            lambda total, x: total + x / self.model.config.layers, sums.routed, found
        )
        return sums._replace(loss=sums.loss + added, routed=total)

    def _score(self, carry: _Carry, y_BSD: Array, row: Rows) -> _Carry:
        """Compute the loss of the last stage's output, and its gradients, with a part of the tokens
        on each stage.
        """
        part_BSD = _share_tokens(jnp.where(row.scores > 0, y_BSD, 0), self.plan)
        labels_BS = jnp.where(
            row.some_score, _own_labels(self._row(row.scored)["labels"], self.plan), -1
        )

        def score(trained: Params, x_BSD: Array) -> tuple[Array, LossSums]:
            sums = self.model.score(
                self.ends | trained,
                x_BSD,
                labels_BS,
                self.plan,
                self.weights,
            )
            return sums.loss, sums

        if not self.backward:
            return carry._replace(
                sums=_add_sums(
                    carry.sums,
                    score(self.ends, part_BSD)[1],
                )
            )
        (_, sums), (dends, dpart_BSD) = jax.value_and_grad(score, (0, 1), has_aux=True)(
            self.trained_ends, part_BSD
        )
        dy_BSD = _gather_tokens(dpart_BSD, y_BSD.shape[1], self.plan)
        ends = _add_gradients(carry.ends, dends)
        cotangents = write(carry.cotangents, dy_BSD, row.cotangent)
        return carry._replace(sums=_add_sums(carry.sums, sums), ends=ends, cotangents=cotangents)

    def _backward(self, carry: _Carry, row: Rows, shares: _Shares) -> _Carry:
        """Take the cotangent through the layers, to leave, or at the first virtual stage into the
        embedding.
        """
        i = row.microbatch
        on_first = row.ends > 0
        dy_BSD = read(carry.cotangents, row.taken)
        stash = carry.stash
        if self.by_stage:  # only the stage's input is kept, and its layers are run again
            x_BSD = read(stash, row.kept)
            row = row._replace(kept=0)
            stash = self.layers.forward(x_BSD, row, self.layers.empty_stash(1))[1]
        dx_BSD, blocks = self.layers.backward(dy_BSD, row, stash, carry.blocks)

        def embedded(ends: Params) -> Params:
            _, pull = jax.vjp(
                lambda trained: self._embed(self.ends | trained, i), self.trained_ends
            )
            return _add_gradients(ends, *pull(jnp.where(on_first, dx_BSD, 0)))

        ends = _if_some(shares.first, row.some_end, embedded, carry.ends)
        carry = carry._replace(blocks=blocks, leaving=dx_BSD, ends=ends)
        return self._order_after(carry, "leaving", "ends")


def _if_some(
    share: float,
    some: Array,
    do: Callable[[_X], _X],
    x: _X,
) -> _X:
    """Run `do(x)` in the rounds in which some stage asks for it, or in all rounds if the others are
    fewer than half.

    All stages agree on these rounds, so `do` may communicate.
    """
    if not share:
        return x
    if share > 0.5:
        return do(x)
    return jax.lax.cond(some, do, lambda x: x, x)


def _add_gradients(total: Params, more: Params) -> Params:
    """Add gradients to sums, in the sums' dtypes."""
    return jax.tree.map(
        lambda x, y: (x + y).astype(x.dtype),
        total,
        more,
    )


def _add_sums(total: LossSums, more: LossSums) -> LossSums:
    return total._replace(
        loss=total.loss + more.loss, nll=total.nll + more.nll, tokens=total.tokens + more.tokens
    )


def _share_tokens(y_BSD: Array, plan: Plan) -> Array:
    """Sum over the stages, all but one of which have zeros, and give each stage a part of every
    device's tokens.
    """
    axes = plan.mesh_axes("stage")
    stages = plan.size("stage")

    def local(y_BSD: Array) -> Array:
        y_BSD = jnp.pad(
            y_BSD,
            (
                (0, 0),
                (0, -y_BSD.shape[1] % stages),
                (0, 0),
            ),
        )
        return reduce_scatter(y_BSD, axes, 1, stages)

    with jax.named_scope("share"):
        return manual(local, plan, (STORED,), STORED)(y_BSD)


def _gather_tokens(part_BSD: Array, S: int, plan: Plan) -> Array:
    """The inverse of `_share_tokens`: gather all parts of the S tokens on every stage."""
    axes = plan.mesh_axes("stage")
    here = S // plan.size("residual_seq")

    def local(part_BSD: Array) -> Array:
        return jax.lax.all_gather(part_BSD, axes, axis=1, tiled=True)[:, :here]

    with jax.named_scope("share"):
        return manual(local, plan, (STORED,), STORED)(part_BSD)


def _own_labels(labels_BS: Array, plan: Plan) -> Array:
    """Return the labels of this stage's part; those of padding tokens do not count."""
    axes = plan.mesh_axes("stage")
    stages = plan.size("stage")
    pieces = plan.size("residual_seq") // plan.size("seq")

    def local(labels_BS: Array) -> Array:
        labels_BTS = labels_BS.reshape(len(labels_BS), pieces, -1)
        missing = -labels_BTS.shape[2] % stages
        labels_BTS = jnp.pad(
            labels_BTS,
            ((0, 0), (0, 0), (0, missing)),
            constant_values=-1,
        )
        labels_BTPS = labels_BTS.reshape(*labels_BTS.shape[:2], stages, -1)
        own = jax.lax.dynamic_index_in_dim(
            labels_BTPS,
            jax.lax.axis_index(axes),
            2,
            keepdims=False,
        )
        return own.reshape(len(labels_BS), -1)

    return manual(local, plan, (GATHERED[:2],), GATHERED[:2])(labels_BS)
