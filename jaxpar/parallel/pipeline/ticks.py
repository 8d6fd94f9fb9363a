"""One stage of a pipeline: the values that it carries from tick to tick, and the work of each tick.

A round is run by `Stage.round`: the backward's message leaves, the round's ticks run one after
another, and the forward's message is put into the inbox. `Stage.start` makes the values before the
first round, and `Stage.finish` takes the results from the values after the last one.

Shapes: B batch, S sequence, D embed; slots and places come first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxpar.base.layout.sharding import PyTree, state_axes
from jaxpar.base.layout.specs import is_axes
from jaxpar.base.taken_share import taken
from jaxpar.parallel.collectives import manual
from jaxpar.parallel.cpu_collective_order import first_order_token, order_token_after, ready_after
from jaxpar.parallel.cross_entropy import LossSums, SoftTargets, teacher_targets
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.linear import STORED
from jaxpar.parallel.pipeline.pipelined_model import Params
from jaxpar.parallel.pipeline.program import Rows
from jaxpar.parallel.pipeline.schedule_table import ActionKind
from jaxpar.parallel.pipeline.shared_head import gather_tokens, own_labels, share_tokens
from jaxpar.parallel.pipeline.stage import Stack, read, write
from jaxpar.parallel.pipeline.stage_inputs import StageArrays, StageInputs, Task

_X = TypeVar("_X")
_SLOTS = (None, *STORED)
"""The axes of a buffer of messages, [slots, B, S, D]."""


class Often(NamedTuple):
    """A number of rounds among all of a scan."""

    times: int
    of: int


class Shares(NamedTuple):
    """The rounds in which a stage works at the first virtual stage, and at the last."""

    first: Often
    last: Often


class Carry(NamedTuple):
    """The values that one stage carries from tick to tick. The fields of the backward are None
    where there is no backward.
    """

    inbox: Array
    """The activations that have arrived, [slots, B, S, D]."""
    sums: LossSums
    """The sums of the loss, for this stage's part."""
    order_token: Array | None
    """The token that the next op with a collective waits for, on CPU (`order_token_after`)."""
    stash: Any = None
    """The arrays that the forward keeps for the backward: a stack's buffers, or a stage's input
    [slots, ...].
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
    """The gradients of embedding and head for this stage's part, if embedding and head are trained.
    """


class StageGradients(NamedTuple):
    """The gradients of a stage's layers, and of the ends, summed over the stages."""

    blocks: PyTree
    """The gradients of the layers, [virtual x places, ...], in the plan's dtype for sums over
    microbatches."""
    ends: PyTree
    """The gradients of the embedding and the head, in the same dtype."""


class _Made(NamedTuple):
    """The arrays that an op with a collective has made, which the next such op waits for."""

    arrays: PyTree
    axes: PyTree
    """The logical axes of each array."""


class Stage:
    """One stage inside the `shard_map`: its arrays, and the work of each kind of tick."""

    def __init__(self, task: Task, arrays: StageArrays):
        """Compute what does not change from tick to tick.

        Args:
          task: the facts that all stages share.
          arrays: this stage's weights, and the batch.
        """
        self.task = task
        self.model = task.model
        self.plan = task.plan
        self.axes = task.plan.mesh_axes("stage")
        self.arrays = arrays
        self.inputs = StageInputs(task, arrays)
        self.keeps_input = (
            task.backward and self.plan.recomputes and self.plan.pipeline.stash == "stage"
        )
        """Whether the forward keeps the stage's input alone, and the backward runs it again."""
        trained = self.model.trained(self.model.axes)
        self.end_axes = {
            name: jax.tree.map(state_axes, axes, is_leaf=is_axes)
            for name, axes in trained.items()
            if name != "blocks"
        }
        """The logical axes of the gradients of the ends."""
        self.trained_ends = {name: arrays.ends[name] for name in self.end_axes}
        self.router_weights = self.inputs.router_weights()
        self.layers = Stack(
            self.model,
            self.plan,
            arrays.blocks,
            self.inputs.layer_context,
            task.layers.places,
            self.router_weights,
        )

    # Buffers.

    def start(self) -> Carry:
        """Return empty buffers and zero gradients."""
        plan = self.plan
        program = self.task.program
        if self.model.config.experts:
            routed = RouterSums(*jnp.zeros(2, jnp.float32))
        else:
            routed = None
        x = jax.eval_shape(lambda: self.inputs.embed(self.arrays.ends, 0))

        def messages(slots: int) -> Array:
            return plan.constrain(
                jnp.zeros((slots, *x.shape), x.dtype),
                (None, *STORED),
            )

        sums = LossSums(*jnp.zeros(3, jnp.float32), routed=routed)
        carry = Carry(messages(program.inbox), sums, first_order_token(plan))
        if not self.task.backward:
            return carry
        self.layers.prepare(x)
        axes = self.model.trained(self.model.axes)
        trained = self.model.trained({"blocks": self.arrays.blocks})["blocks"]
        blocks = jax.tree.map(
            lambda x, axes: self.plan.no_gradient(x, (None, *axes[1:])), trained, axes["blocks"]
        )
        ends = {
            name: jax.tree.map(self.plan.no_gradient, end, axes[name])
            for name, end in self.trained_ends.items()
        }
        if self.keeps_input:
            stash = messages(program.stash)
        else:
            stash = self.layers.empty_stash(program.stash)
        cotangents = messages(program.cotangents)
        leaving = messages(1)[0]
        return carry._replace(
            stash=stash, cotangents=cotangents, leaving=leaving, blocks=blocks, ends=ends
        )

    def finish(self, carry: Carry) -> tuple[LossSums, StageGradients | None]:
        """Return the sums, this stage's gradients of its layers, and the gradients of the ends
        summed over stages.
        """
        with jax.named_scope("sum"):
            own = ready_after(carry.sums, carry.order_token)
            sums = jax.tree.map(
                lambda x: jax.lax.psum(x, self.axes),
                own,
            )
            if not self.task.backward:
                return sums, None
            stored = self.end_axes
            summed = partial(jax.tree.map, self._total)
            own_ends = ready_after(carry.ends, carry.order_token)
            ends = manual(summed, self.plan, (stored,), stored)(own_ends)
            return sums, StageGradients(carry.blocks, ends)

    def _total(self, grad: Array) -> Array:
        """Sum over the stages, in float32 as in every sum of gradients over devices."""
        return jax.lax.psum(grad.astype(jnp.float32), self.axes).astype(grad.dtype)

    # Ticks.

    def round(
        self,
        carry: Carry,
        ticks: dict[ActionKind, Rows],
        shares: dict[ActionKind, Shares],
    ) -> Carry:
        """Run the ticks of a round, one after another.

        Args:
          carry: the values that the round before has left.
          ticks: the rows of each kind of tick, [1] for this stage and [] for all stages.
          shares: how often this scan's rounds need the ends, by kind, in the order of the round's
            ticks, which a pytree does not keep.
        """
        ticks = {
            kind: jax.tree.map(lambda x: x[0] if x.ndim else x, row) for kind, row in ticks.items()
        }
        run = {"forward": self._forward, "backward": self._backward}
        arriving = None
        if "backward" in shares:
            # sent before the forward tick, taken after it: it travels meanwhile
            with jax.named_scope("backward_tick"):
                arriving = self._send(ready_after(carry.leaving, carry.order_token), -1)
                token = order_token_after(carry.order_token, arriving, STORED, self.plan)
                carry = carry._replace(order_token=token)
        for kind in shares:
            if kind == "backward":
                arrived, cotangents = jax.lax.optimization_barrier((arriving, carry.cotangents))
                carry = carry._replace(cotangents=write(cotangents, arrived, ticks[kind].arrives))
            with jax.named_scope(f"{kind}_tick"):
                tick = ready_after(ticks[kind], carry.order_token)
                carry = run[kind](carry, tick, shares[kind])
        if "forward" in shares:  # taken after the other ticks
            arrived, leaving = jax.lax.optimization_barrier((carry.entering, carry.leaving))
            inbox = write(carry.inbox, arrived, ticks["forward"].arrives)
            carry = carry._replace(inbox=inbox, entering=None, leaving=leaving)
        return carry

    def _order_after(self, carry: Carry, *made: _Made) -> Carry:
        """Return the carry with an order token by which the next op with a collective runs after
        the ops that made these arrays.
        """
        if carry.order_token is None:
            return carry
        for one in made:
            token = order_token_after(carry.order_token, one.arrays, one.axes, self.plan)
            carry = carry._replace(order_token=token)
        return carry

    def _send(self, x_BSD: Array, by: int) -> Array:
        """Pass an array on to a neighbour, the stage after (by 1) or before (by -1), round the
        ends, and return the array that comes from the other side.
        """
        stages = self.plan.size("stage")
        around = [(s, (s + by) % stages) for s in range(stages)]
        with jax.named_scope("send"):
            return manual(
                lambda x: jax.lax.ppermute(x, self.axes, around), self.plan, (STORED,), STORED
            )(x_BSD)

    def _forward(self, carry: Carry, row: Rows, shares: Shares) -> Carry:
        """Take an activation from the inbox, or at the first virtual stage from the embedding,
        through the layers; send it on, and score the output of the last virtual stage.
        """

        def embedded(x_BSD: Array) -> Array:
            return jnp.where(
                row.ends > 0,
                self.inputs.embed(self.arrays.ends, row.microbatch),
                x_BSD,
            )

        x_BSD = _if_some(
            shares.first,
            row.some_end,
            embedded,
            read(carry.inbox, row.taken),
        )
        if self.keeps_input:
            y_BSD, _, routed = self.layers.forward(x_BSD, row)
            stash = write(carry.stash, x_BSD, row.kept)
        else:
            y_BSD, stash, routed = self.layers.forward(x_BSD, row, carry.stash)
        carry = carry._replace(stash=stash)
        if routed is not None:
            carry = carry._replace(sums=self._add_routed(carry.sums, routed, row.on))
        entering = self._send(y_BSD, 1)
        carry = self._order_after(carry._replace(entering=entering), _Made(entering, STORED))
        row = ready_after(row, carry.order_token)
        carry = _if_some(
            shares.last, row.some_score, lambda carry: self._score(carry, y_BSD, row), carry
        )
        # Of the sums only what every program needs, because an order token keeps alive what it
        # depends on.
        likelihood = _Made(carry.sums.nll, ())
        return self._order_after(carry, likelihood, _Made(carry.cotangents, _SLOTS))

    def _add_routed(self, sums: LossSums, routed: RouterSums, on: Array) -> LossSums:
        """Add the routers' part of the loss for this stage's layers, as a share of the mean over
        all layers.
        """
        found = jax.tree.map(
            lambda x: jnp.where(on > 0, x, 0),
            routed,
        )
        added = sum(jax.tree.leaves(jax.tree.map(jnp.multiply, self.router_weights, found)))
        total = jax.tree.map(
            lambda total, x: total + x / self.model.config.layers, sums.routed, found
        )
        return sums._replace(loss=sums.loss + added, routed=total)

    def _score(self, carry: Carry, y_BSD: Array, row: Rows) -> Carry:
        """Compute the loss of the last stage's output, and its gradients, with a part of the tokens
        on each stage.
        """
        y_BSD = jnp.where(row.scores > 0, y_BSD, 0)
        query_pull = None
        if self.model.config.query_layer:
            y_BSD, query_pull = jax.vjp(partial(self._query, row), self.trained_ends, y_BSD)
        part_BSD = share_tokens(y_BSD, self.plan)
        rows = self.inputs.row(row.scored)
        labels_BS = jnp.where(row.some_score, own_labels(rows["labels"], self.plan), -1)
        soft = teacher_targets(rows, self.task.weights.temperature)
        if soft is not None:
            soft = SoftTargets(*(own_labels(x, self.plan, filler=0) for x in soft))

        def score(trained: Params, x_BSD: Array) -> tuple[Array, LossSums]:
            sums = self.model.score(
                self.arrays.ends | trained,
                x_BSD,
                labels_BS,
                self.plan,
                self.task.weights,
                soft,
            )
            return sums.loss, sums

        if not self.task.backward:
            return carry._replace(
                sums=_add_sums(
                    carry.sums,
                    score(self.arrays.ends, part_BSD)[1],
                )
            )
        (_, sums), (dends, dpart_BSD) = jax.value_and_grad(score, (0, 1), has_aux=True)(
            self.trained_ends, part_BSD
        )
        dy_BSD = gather_tokens(dpart_BSD, y_BSD.shape[1], self.plan)
        ends = _add_gradients(carry.ends, dends)
        if query_pull is not None:
            dends, dy_BSD = query_pull(dy_BSD)
            ends = _add_gradients(ends, dends)
        cotangents = write(carry.cotangents, dy_BSD, row.cotangent)
        return carry._replace(sums=_add_sums(carry.sums, sums), ends=ends, cotangents=cotangents)

    def _query(self, row: Rows, trained: Params, y_BSD: Array) -> Array:
        """Run the query layer on every stage, and keep the result of the stage that has the last
        layer: the others would only wait for it. They have zeros instead.
        """
        z_BSD = self.inputs.query(self.arrays.ends | trained, row.scored, y_BSD)
        return jnp.where(row.scores > 0, z_BSD, 0)

    def _backward(self, carry: Carry, row: Rows, shares: Shares) -> Carry:
        """Take the cotangent back through the layers, and send it on, or at the first virtual stage
        take it into the embedding.
        """
        i = row.microbatch
        on_first = row.ends > 0
        dy_BSD = read(carry.cotangents, row.taken)
        stash = carry.stash
        if self.keeps_input:  # only the stage's input is kept, and its layers are run again
            x_BSD = read(stash, row.kept)
            row = row._replace(kept=0)
            stash = self.layers.forward(x_BSD, row, self.layers.empty_stash(1))[1]
        dx_BSD, blocks = self.layers.backward(dy_BSD, row, stash, carry.blocks)

        def embedded(ends: Params) -> Params:
            _, pull = jax.vjp(
                lambda trained: self.inputs.embed(self.arrays.ends | trained, i), self.trained_ends
            )
            return _add_gradients(ends, *pull(jnp.where(on_first, dx_BSD, 0)))

        ends = _if_some(shares.first, row.some_end, embedded, carry.ends)
        carry = carry._replace(blocks=blocks, leaving=dx_BSD, ends=ends)
        return self._order_after(carry, _Made(dx_BSD, STORED), _Made(ends, self.end_axes))


def _if_some(
    often: Often,
    some: Array,
    do: Callable[[_X], _X],
    x: _X,
) -> _X:
    """Run `do(x)` in the rounds in which some stage asks for it.

    All stages agree on these rounds, so `do` may communicate.
    """
    if not often.times:
        return x
    if often.times == often.of:
        return do(x)
    with taken(often.times, often.of):
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
