"""A schedule's table run inside one jit: `shard_map` over the stages, everything else of the plan inside a stage.

All stages run the same ticks, and what a stage does while it is idle is thrown away. A tick ends with one `ppermute` to
the neighbour; a cotangent travels beside the forward tick that follows it, an activation beside the backward tick.
Buffers are as deep as the schedule asks for, whatever the number of microbatches (`jaxpar.parallel.pipeline.program`).

No stage has the ends of the model for itself, which all others would wait for. The output of the last stage is shared
out, a part of its tokens to each stage, for the final norm, the loss and their gradients (Yeung et al. 2024,
arXiv:2411.05288, share out the vocabulary instead, and wait for its sums); these are summed over the stages once, at
the end, with those of the embedding, so that a tied table has both. The embedding is a lookup: every stage looks up.

Shapes: M microbatches, B batch, S sequence, D embed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxpar.base.plan import Plan, gradient_dtype
from jaxpar.base.sharding import state_axes
from jaxpar.parallel.collectives import first_turn, is_axes, manual, reduce_scatter, turn_after, waits
from jaxpar.parallel.cross_entropy import LIKELIHOOD, LossSums, LossWeights
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.linear import GATHERED, STORED
from jaxpar.parallel.pipeline.layers import layers_in
from jaxpar.parallel.pipeline.program import Rows, Segment, TickProgram, program
from jaxpar.parallel.pipeline.schedules import Kind, Table, schedule
from jaxpar.parallel.pipeline.stage import LayerContext, PipelinedModel, Stack, empty, put, taken
from jaxpar.parallel.token_order import TOKENS, halves, in_order

Batch = Any
Params = Any


def gradients(
    model: PipelinedModel, params: Params, batch: Batch, plan: Plan, key: jax.Array | None, weights: LossWeights,
    table: Table | None = None,
) -> tuple[LossSums, Params]:  # fmt: skip
    """Summed loss of a batch and its float32 gradient, its microbatches in the plan's pipeline.

    Row r of the batch is in microbatch r % M, as it is where microbatches are accumulated one after another.

    Args:
      model: its three functions.
      params: blocks stacked in the plan's `stored_order`.
      batch: arrays [M B, S], as for `Model.loss`.
      plan: with more than one stage, and a number of microbatches.
      key: dropout key; microbatch i has `fold_in(key, i)`. None = no dropout.
      weights: of what is added to the likelihood.
      table: what each stage does in each tick; None = the plan's schedule.
    """
    pipeline = plan.pipeline
    table = table or schedule(pipeline.schedule, plan.size("stage"), pipeline.microbatches, pipeline.virtual)
    return _run(model, params, batch, plan, key, weights, program(table), backward=True)


def loss(
    model: PipelinedModel, params: Params, batch: Batch, plan: Plan, weights: LossWeights = LIKELIHOOD
) -> LossSums:
    """The loss alone: forward ticks, and nothing kept. Arguments as for `gradients`."""
    pipeline = plan.pipeline
    table = schedule("looped", plan.size("stage"), pipeline.microbatches, pipeline.virtual)
    return _run(model, params, batch, plan, None, weights, program(table, backward=False), backward=False)[0]


def _run(
    model: PipelinedModel, params: Params, batch: Batch, plan: Plan, key: jax.Array | None, weights: LossWeights,
    steps: TickProgram, backward: bool,
) -> tuple[LossSums, Params]:  # fmt: skip
    M, axes = plan.pipeline.microbatches, plan.mesh_axes("stage")
    layers = layers_in(plan, model.config.layers)
    assert layers is not None, "a pipeline has stages"

    def parts(x_BS: Array) -> Array:
        x_BMS = x_BS.reshape(-1, M, x_BS.shape[1])
        return plan.constrain(x_BMS.swapaxes(0, 1), (None, *TOKENS))

    rows = jax.tree.map(parts, in_order(batch, plan, plan.context.strategy))
    ends = {name: params[name] for name in params if name != "blocks"}
    order = jnp.asarray(layers.order)
    ticks = [segment.ticks for segment in steps.segments]

    def local(blocks: Params, ends: Params, rows: Batch, key: Any, order: Array, ticks: Any) -> Any:
        stage = _Stage(
            model, plan, blocks, ends, rows, key, order, weights, layers.places, -1 in layers.order, backward
        )
        carry = stage.start(steps)
        for segment, mine in zip(steps.segments, ticks, strict=True):
            body = partial(stage.round, ends=_Ends.of(segment))
            carry, _ = jax.lax.scan(lambda carry, row, body=body: (body(carry, row), None), carry, mine)
        return stage.finish(carry)

    by_stage = P(axes)
    of_ticks = [jax.tree.map(lambda x: P(None, axes) if x.ndim == 2 else P(), tick) for tick in ticks]
    run = jax.shard_map(
        local, mesh=plan.mesh, in_specs=(by_stage, P(), P(), P(), by_stage, of_ticks),
        out_specs=(P(), {"blocks": by_stage, "ends": P()} if backward else P()), axis_names=set(axes), check_vma=False,
    )  # fmt: skip
    sums, grads = run(params["blocks"], ends, rows, key, order, ticks)
    return sums, {**grads["ends"], "blocks": grads["blocks"]} if backward else None


class _Ends(NamedTuple):
    """In which share of some rounds a stage is at the first virtual stage, and at the last."""

    first: float
    last: float

    @staticmethod
    def of(segment: Segment) -> dict[Kind, _Ends]:
        return {
            kind: _Ends(float(np.mean(rows.some_end)), float(np.mean(rows.some_score)))
            for kind, rows in segment.ticks.items()
        }


class _Carry(NamedTuple):
    """What goes from tick to tick on one stage; None where there is no backward.

    Attributes:
      inbox: activations that have arrived [slots, B, S, D].
      sums: of the loss, of this stage's part.
      stash: what the forward keeps for the backward, arrays [slots x places, ...], or of a stage's input [slots, ...].
      cotangents: those that have arrived [slots, B, S, D].
      leaving: the cotangent that is sent next [B, S, D].
      entering: inside a round, the activation that is on its way to the inbox [B, S, D].
      waiting: what gradients of weights wait for, arrays [slots x places, ...].
      blocks: gradients of this stage's layers [virtual x places, ...], in the plan's dtype of such sums.
      ends: gradients of embedding and head, of this stage's part.
      turn: what the next op with a collective waits for, on CPU (`turn_after`).
    """

    inbox: Array
    sums: LossSums
    stash: Any = None
    cotangents: Any = None
    leaving: Any = None
    entering: Any = None
    waiting: Any = None
    blocks: Any = None
    ends: Any = None
    turn: Any = None


class _Stage:
    """One stage inside the `shard_map`: its arrays, and what it does in each kind of tick."""

    def __init__(
        self, model: PipelinedModel, plan: Plan, blocks: Params, ends: Params, rows: Batch, key: Any, order: Array,
        weights: LossWeights, places: int, gaps: bool, backward: bool,
    ):  # fmt: skip
        self.model, self.plan, self.ends, self.rows, self.key = model, plan, ends, rows, key
        self.weights, self.with_backward = weights, backward
        self.axes, self.stages = plan.mesh_axes("stage"), plan.size("stage")
        self.order, self.gaps, self.places = order, gaps, places
        L, added = model.config.layers, None
        if model.config.experts:
            shares = weights.balance_loss / L, weights.router_z_loss / L, 0.0
            added = RouterSums(*(jnp.float32(share) for share in shares))
        self.layers = Stack(model, plan, blocks, self._place, places, added)

    def _keys(self, i: Any) -> tuple[Any, Any]:
        """Of a microbatch's embedding, and of its layers, as `Model.hidden` has them."""
        if self.key is None:
            return None, None
        embed, blocks = jax.random.split(jax.random.fold_in(self.key, i))
        return embed, jax.random.split(blocks, self.model.config.layers)

    def _place(self, i: Any, chunk: Any, j: Any) -> LayerContext:
        row, plan = self._row(i), self.plan
        places = zip(halves(row["positions"], TOKENS, plan), halves(row.get("segments"), TOKENS, plan), strict=True)
        layer, keys = self.order[chunk * self.places + j], self._keys(i)[1]
        key = None if keys is None else keys[jnp.maximum(layer, 0)]
        return LayerContext(list(places), key, layer >= 0 if self.gaps else None)

    def _row(self, i: Any) -> Any:
        return {name: taken(x, i) for name, x in self.rows.items()}

    def _embed(self, ends: Params, i: Any) -> Array:
        row = self._row(i)
        x_BSD = self.model.embed(ends, row["tokens"], row["positions"], self.plan, self._keys(i)[0])
        return self.plan.constrain(x_BSD, STORED)

    # Buffers.

    def start(self, steps: TickProgram) -> _Carry:
        """Empty buffers and zero gradients."""
        plan, routed = self.plan, RouterSums(*jnp.zeros(3)) if self.model.config.experts else None
        self.x = jax.eval_shape(lambda: self._embed(self.ends, 0))

        def messages(slots: int) -> Array:
            return plan.constrain(jnp.zeros((slots, *self.x.shape), self.x.dtype), (None, *STORED))

        def kept(shapes: Sequence[Any], slots: int) -> list[Array]:
            return [empty(shape, slots * self.places) for shape in shapes]

        stored = partial(jax.tree.map, state_axes, is_leaf=is_axes)
        self.layouts = {
            "entering": STORED, "leaving": STORED, "cotangents": (None, *STORED),
            "blocks": jax.tree.map(lambda axes: (None, *axes[1:]), stored(self.model.axes["blocks"]), is_leaf=is_axes),
            "ends": {name: stored(self.model.axes[name]) for name in self.ends},
        }  # fmt: skip
        carry = _Carry(messages(steps.inbox), LossSums(*jnp.zeros(3), routed=routed), turn=first_turn(plan))
        if not self.with_backward:
            return carry
        self.by_stage = plan.recomputes and plan.pipeline.stash == "stage"
        self.layers.prepare(self.x, steps.waiting > 0, not self.by_stage)
        recipe, axes = self.layers.recipe, self.model.axes
        self._kept = partial(kept, recipe.kept.shapes)
        blocks = jax.tree.map(lambda x, axes: self._zeros(x, (None, *axes[1:])), self.layers.weights, axes["blocks"])
        return carry._replace(
            stash=messages(steps.stash) if self.by_stage else self._kept(steps.stash),
            cotangents=messages(steps.cotangents),
            leaving=messages(1)[0],
            waiting=kept(recipe.parts.needed, steps.waiting) if recipe.parts else None,
            blocks=blocks,
            ends={name: jax.tree.map(self._zeros, self.ends[name], axes[name]) for name in self.ends},
        )

    def _zeros(self, weight: Array, axes: Any) -> Array:
        """A gradient to add to, laid out as gradients are."""
        return self.plan.constrain(jnp.zeros(weight.shape, gradient_dtype(axes, self.plan)), state_axes(axes))

    def finish(self, carry: _Carry) -> Any:
        """The sums, and the gradients: this stage's layers, and the ends summed over the stages."""
        with jax.named_scope("sum"):
            sums = jax.tree.map(lambda x: jax.lax.psum(x, self.axes), waits(carry.sums, carry.turn))
            if not self.with_backward:
                return sums, None
            stored, summed = self.layouts["ends"], partial(jax.tree.map, self.total)
            ends = manual(summed, self.plan, (stored,), stored)(waits(carry.ends, carry.turn))
            return sums, {"blocks": carry.blocks, "ends": ends}

    def total(self, grad: Array) -> Array:
        """Over the stages, in float32 as every sum of gradients over devices."""
        return jax.lax.psum(grad.astype(jnp.float32), self.axes).astype(grad.dtype)

    # Ticks.

    def round(self, carry: _Carry, ticks: dict[Kind, Rows], ends: dict[Kind, _Ends]) -> _Carry:
        """The ticks of a round, one after another."""
        ticks = {kind: jax.tree.map(lambda x: x[0] if x.ndim else x, row) for kind, row in ticks.items()}
        run = {"forward": self._forward, "backward": self._backward, "input": self._backward, "weight": self._weight}
        back = {"backward", "input"}.intersection(ends)
        arriving = None
        if back:
            with jax.named_scope("backward"):  # sent before the forward tick and taken after it: it travels beside it
                arriving = self._sent(waits(carry.leaving, carry.turn), -1)
                carry = carry._replace(turn=turn_after(carry.turn, arriving, STORED, self.plan))
        for kind in ends:  # in the round's order, which a pytree does not keep
            if kind in back:
                arrived, cotangents = jax.lax.optimization_barrier((arriving, carry.cotangents))
                carry = carry._replace(cotangents=put(cotangents, arrived, ticks[kind].arrives))
            with jax.named_scope(kind):
                carry = run[kind](carry, waits(ticks[kind], carry.turn), ends[kind])
        if "forward" in ends:  # taken after the other ticks
            arrived, leaving = jax.lax.optimization_barrier((carry.entering, carry.leaving))
            inbox = put(carry.inbox, arrived, ticks["forward"].arrives)
            carry = carry._replace(inbox=inbox, entering=None, leaving=leaving)
        return carry

    def _then(self, carry: _Carry, *made: str) -> _Carry:
        """The carry whose next op with a collective comes after those that made these parts of it."""
        for name in made if carry.turn is not None else ():
            # Of the sums only what every program needs: a turn keeps alive what it hangs on.
            arrays, axes = (carry.sums.nll, ()) if name == "sums" else (getattr(carry, name), self.layouts[name])
            carry = carry._replace(turn=turn_after(carry.turn, arrays, axes, self.plan))
        return carry

    def _sent(self, x_BSD: Array, by: int) -> Array:
        """What a neighbour had: of the stage before (by 1) or after (by -1), round the ends."""
        around = [(s, (s + by) % self.stages) for s in range(self.stages)]
        with jax.named_scope("send"):
            return manual(lambda x: jax.lax.ppermute(x, self.axes, around), self.plan, (STORED,), STORED)(x_BSD)

    def _forward(self, carry: _Carry, row: Rows, ends: _Ends) -> _Carry:
        i, chunk = row.microbatch, row.chunk
        x_BSD = taken(carry.inbox, row.taken)
        x_BSD = _some(ends.first, row.some_end, lambda x: jnp.where(row.ends > 0, self._embed(self.ends, i), x), x_BSD)
        if not self.with_backward:
            y_BSD, _, routed = self.layers.forward(x_BSD, i, chunk)
        elif self.by_stage:
            y_BSD, _, routed = self.layers.forward(x_BSD, i, chunk)
            carry = carry._replace(stash=put(carry.stash, x_BSD, row.kept))
        else:
            y_BSD, stash, routed = self.layers.forward(x_BSD, i, chunk, carry.stash, row.kept)
            carry = carry._replace(stash=stash)
        if routed is not None:
            carry = carry._replace(sums=self._with_routed(carry.sums, routed, row.on))
        carry = self._then(carry._replace(entering=self._sent(y_BSD, 1)), "entering")
        row = waits(row, carry.turn)
        carry = _some(ends.last, row.some_score, lambda carry: self._scored(carry, y_BSD, row), carry)
        return self._then(carry, "sums", "cotangents")

    def _with_routed(self, sums: LossSums, routed: RouterSums, on: Array) -> LossSums:
        """The routers' part of the loss, means over all layers, of this stage's layers."""
        share = jax.tree.map(lambda x: jnp.where(on > 0, x, 0) / self.model.config.layers, routed)
        added = self.weights.balance_loss * share.balance + self.weights.router_z_loss * share.z
        total = jax.tree.map(jnp.add, sums.routed, share)
        return sums._replace(loss=sums.loss + added, routed=total)

    def _scored(self, carry: _Carry, y_BSD: Array, row: Rows) -> _Carry:
        """The loss of the last stage's output, and its gradients, each stage with a part of the tokens."""
        part_BSD = self._shared(jnp.where(row.scores > 0, y_BSD, 0))
        labels_BS = jnp.where(row.some_score, self._own_labels(self._row(row.scored)["labels"]), -1)

        def score(ends: Params, x_BSD: Array) -> tuple[Array, LossSums]:
            sums = self.model.score(ends, x_BSD, labels_BS, self.plan, self.weights)
            return sums.loss, sums

        if not self.with_backward:
            return carry._replace(sums=_plus(carry.sums, score(self.ends, part_BSD)[1]))
        (_, sums), (dends, dpart_BSD) = jax.value_and_grad(score, (0, 1), has_aux=True)(self.ends, part_BSD)
        return carry._replace(
            sums=_plus(carry.sums, sums),
            ends=_added(carry.ends, dends),
            cotangents=put(carry.cotangents, self._whole(dpart_BSD, y_BSD.shape[1]), row.cotangent),
        )

    def _shared(self, y_BSD: Array) -> Array:
        """The sum over the stages [B, S, D], all but one of which are zero: to each a part of every device's tokens."""

        def local(y_BSD: Array) -> Array:
            y_BSD = jnp.pad(y_BSD, ((0, 0), (0, -y_BSD.shape[1] % self.stages), (0, 0)))
            return reduce_scatter(y_BSD, self.axes, 1, self.stages)

        with jax.named_scope("share"):
            return manual(local, self.plan, (STORED,), STORED)(y_BSD)

    def _whole(self, part_BSD: Array, S: int) -> Array:
        """The inverse: all parts, on every stage."""
        here = S // self.plan.size("residual_seq")

        def local(part_BSD: Array) -> Array:
            return jax.lax.all_gather(part_BSD, self.axes, axis=1, tiled=True)[:, :here]

        with jax.named_scope("share"):
            return manual(local, self.plan, (STORED,), STORED)(part_BSD)

    def _own_labels(self, labels_BS: Array) -> Array:
        """The labels of this stage's part; those of tokens that are filled in do not count."""
        pieces = self.plan.size("residual_seq") // self.plan.size("seq")

        def local(labels_BS: Array) -> Array:
            labels_BTS = labels_BS.reshape(len(labels_BS), pieces, -1)
            missing = -labels_BTS.shape[2] % self.stages
            labels_BTS = jnp.pad(labels_BTS, ((0, 0), (0, 0), (0, missing)), constant_values=-1)
            labels_BTPS = labels_BTS.reshape(*labels_BTS.shape[:2], self.stages, -1)
            own = jax.lax.dynamic_index_in_dim(labels_BTPS, jax.lax.axis_index(self.axes), 2, keepdims=False)
            return own.reshape(len(labels_BS), -1)

        return manual(local, self.plan, (GATHERED[:2],), GATHERED[:2])(labels_BS)

    def _stashed(self, carry: _Carry, row: Rows) -> tuple[Any, Any]:
        """What the layers of a chunk have kept, and the slot it is in: where only its input was, it is run again."""
        if not self.by_stage:
            return carry.stash, row.kept
        x_BSD = taken(carry.stash, row.kept)
        return self.layers.forward(x_BSD, row.microbatch, row.chunk, self._kept(1), 0)[1], 0

    def _backward(self, carry: _Carry, row: Rows, ends: _Ends) -> _Carry:
        dy_BSD, (stash, slot) = taken(carry.cotangents, row.taken), self._stashed(carry, row)
        dx_BSD, blocks, waiting = self.layers.backward(
            dy_BSD, row.microbatch, row.chunk, stash, slot, carry.blocks, row.on > 0, carry.waiting, row.waits
        )
        carry = self._passed_back(carry._replace(blocks=blocks, waiting=waiting), dx_BSD, row, ends)
        return self._then(carry, "leaving", "ends")

    def _weight(self, carry: _Carry, row: Rows, ends: _Ends) -> _Carry:
        blocks = self.layers.weight_gradient(
            row.microbatch, row.chunk, carry.stash, row.kept, carry.waiting, row.waits, carry.blocks, row.on > 0
        )
        return self._then(carry._replace(blocks=blocks), "blocks")

    def _passed_back(self, carry: _Carry, dx_BSD: Array, row: Rows, ends: _Ends) -> _Carry:
        """The cotangent ready to leave, or at the first virtual stage in the embedding's gradient."""

        def embedded(ends: Params) -> Params:
            _, pull = jax.vjp(lambda ends: self._embed(ends, row.microbatch), self.ends)
            (more,) = pull(jnp.where(row.ends > 0, dx_BSD, 0))
            return _added(ends, more)

        return carry._replace(leaving=dx_BSD, ends=_some(ends.first, row.some_end, embedded, carry.ends))


def _some(share: float, some: Array, do: Callable[[Any], Any], x: Any) -> Any:
    """`do(x)` in the rounds in which some stage asks for it, and in others too where these are fewer than half.

    All stages agree on these rounds, so `do` may communicate.
    """
    if not share:
        return x
    return do(x) if share > 0.5 else jax.lax.cond(some, do, lambda x: x, x)


def _added(total: Params, more: Params) -> Params:
    """Gradients added to sums, in the sums' dtypes."""
    return jax.tree.map(lambda x, y: (x + y).astype(x.dtype), total, more)


def _plus(total: LossSums, more: LossSums) -> LossSums:
    return total._replace(loss=total.loss + more.loss, nll=total.nll + more.nll, tokens=total.tokens + more.tokens)
