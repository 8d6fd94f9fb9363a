"""The layers of a virtual stage, forward and backward, with what passes between the two written
out: of what a layer's `jax.vjp` keeps, `residuals` chooses what goes into a stash.

Shapes: B batch, S sequence, D embed; places, slots and layers come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import PyTree, merge_trees
from jaxpar.parallel.domino import LayerInfo, Places, halves, whole_batch
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.host_memory import on_device, on_host
from jaxpar.parallel.linear import STORED
from jaxpar.parallel.pipeline.pipelined_model import PipelinedModel
from jaxpar.parallel.pipeline.program import Rows
from jaxpar.parallel.pipeline.residuals import Kept, Shape, choose_residuals
from jaxpar.parallel.remat import remat

Buffers = list[list[Array]]
"""For each kind of layer, arrays [slots x places of that kind, ...]."""
_Carry = TypeVar("_Carry")


class LayerContext(NamedTuple):
    """What a layer is given besides its weights and its input."""

    places: Sequence[Places]  # of the halves of a microbatch
    key: Array | None  # the key of its dropout, or None
    there: Array | None  # whether there is a layer at this place; None = at all places
    number: Array | None  # its number, where the model's blocks are told it


@dataclass
class Stack:
    """The layers of one stage, inside the `shard_map` over stages.

    Place j of every chunk has a layer of kind j % `kinds`. With several kinds the places are
    unrolled, and what layers keep is in buffers of its own for each kind.
    """

    model: PipelinedModel
    plan: Plan
    weights: PyTree
    """This stage's stacked weights, [virtual x places, ...]."""
    context: Callable[[ArrayLike, ArrayLike, ArrayLike], LayerContext]
    """A function of (microbatch, chunk, place in it) that returns what the layer is told."""
    places: int
    """The number of places of a virtual stage."""
    added: RouterSums | None
    """The cotangents of a layer's router sums, or None."""
    kept: list[Kept] = field(default_factory=list)
    """What a layer of each kind keeps of its vjp, after `prepare`."""

    @property
    def kinds(self) -> int:
        """The number of kinds of layers that a chunk has."""
        return min(self.model.config.kinds, self.places)

    def forward(
        self, x_BSD: Array, row: Rows, stash: Buffers | None = None
    ) -> tuple[Array, Any, Any]:
        """Run the stage's layers of one chunk on one microbatch.

        Args:
          x_BSD: the input of the chunk, in the residual stream's layout.
          row: this tick of this stage; of the stash, the slot `row.kept` is written.
          stash: what layers have kept so far; None = nothing is kept.

        Returns:
          The output [B, S, D], the stash with what the layers keep of this tick, and the routers'
          sums.
        """

        def body(carry: Any, j: ArrayLike, kind: int) -> Any:
            xs, stash, total = carry
            weights = self._weights(row.chunk, j)
            context = self.context(row.microbatch, row.chunk, j)
            if stash is None:
                xs, routed = self._apply(weights, context, xs, kind)
            else:
                (xs, routed), pull = self._vjp(weights, context, xs, kind)
                arrays = jax.tree.leaves(pull)
                at = self._at(row.kept, j, kind)
                kept = self.kept[kind].places
                written = [
                    write(buffer, arrays[place], at)
                    for buffer, place in zip(stash[kind], kept, strict=True)
                ]
                stash = [*stash[:kind], written, *stash[kind + 1 :]]
            return xs, stash, jax.tree.map(jnp.add, total, routed)

        zeros = jax.tree.map(jnp.zeros_like, self.added)
        xs, stash, routed = self._scan(
            body,
            (halves(x_BSD, STORED, self.plan), stash, zeros),
        )
        return whole_batch(xs, STORED, self.plan), stash, routed

    def backward(
        self, dy_BSD: Array, row: Rows, stash: Buffers, grads: PyTree
    ) -> tuple[Array, PyTree]:
        """Go back through the stage's layers of one chunk and one microbatch.

        Args:
          dy_BSD: the gradient of the chunk's output, in the residual stream's layout.
          row: this tick of this stage; of the stash, the slot `row.kept` is read.
          stash: what `forward` kept.
          grads: the gradients of the stage's weights so far.

        Returns:
          The gradient of the chunk's input [B, S, D], and `grads` plus those of this tick where the
          stage is on.
        """

        def body(carry: Any, j: ArrayLike, kind: int) -> Any:
            dxs, grads = carry
            at = self._at(row.kept, j, kind)
            weights = self._weights(row.chunk, j)
            kept = [read(buffer, at) for buffer in stash[kind]]
            pull = self.kept[kind].restore(
                kept, weights, self.context(row.microbatch, row.chunk, j)
            )
            dweights, dxs = pull((dxs, self.added))
            place = row.chunk * self.places + j

            def add(total: Array, x: Array) -> Array:
                return write(
                    total,
                    read(total, place)
                    + jnp.where(
                        row.on > 0,
                        x.astype(total.dtype),
                        0,
                    ),
                    place,
                )

            return dxs, jax.tree.map(add, grads, dweights)

        dxs, grads = self._scan(
            body,
            (halves(dy_BSD, STORED, self.plan), grads),
            reverse=True,
        )
        return whole_batch(dxs, STORED, self.plan), grads

    def prepare(self, x: jax.ShapeDtypeStruct) -> None:
        """Find out what a layer of each kind keeps, for `kept`.

        Args:
          x: the shape [B, S, D] and the dtype of a layer's input.
        """
        weights, context = jax.eval_shape(
            lambda: (
                self._weights(0, 0),
                self.context(0, 0, 0),
            )
        )
        xs = jax.eval_shape(lambda x: halves(x, STORED, self.plan), x)
        pulls = [
            lambda w, c, x, kind=kind: self._vjp(w, c, x, kind)[1] for kind in range(self.kinds)
        ]
        self.kept = [choose_residuals(pull, weights, context, xs) for pull in pulls]

    def empty_stash(self, slots: int) -> Buffers:
        """Make room for what layers keep, in the same memory: the device's or the host's.

        Args:
          slots: for how many ticks there is room.

        Returns:
          For each kind of layer its buffers, of zeros.
        """

        def empty(shape: Shape, count: int) -> Array:
            zeros = jnp.zeros((count, *shape.shape), shape.dtype)
            if getattr(shape, "memory_space", None) == jax.memory.Space.Host:
                return on_host(zeros)
            return zeros

        counts = (slots * self._places_of(kind) for kind in range(self.kinds))
        return [
            [empty(shape, n) for shape in kept.shapes]
            for kept, n in zip(self.kept, counts, strict=True)
        ]

    # One layer.

    def _apply(
        self, weights: PyTree, context: LayerContext, xs: tuple[Array, ...], kind: int
    ) -> tuple[tuple[Array, ...], RouterSums | None]:
        def layer(
            weights: PyTree, xs: tuple[Array, ...]
        ) -> tuple[tuple[Array, ...], RouterSums | None]:
            info = LayerInfo(context.key, kind, context.number)
            ys, routed = self.model.layer(weights, xs, context.places, self.plan, info)
            if (there := context.there) is None:
                return ys, routed
            ys = tuple(jnp.where(there, y, x) for y, x in zip(ys, xs, strict=True))
            return ys, jax.tree.map(
                lambda x: jnp.where(there, x, 0),
                routed,
            )

        return remat(layer, self.plan, self._looped)(weights, xs)

    def _vjp(
        self, weights: PyTree, context: LayerContext, xs: tuple[Array, ...], kind: int
    ) -> tuple[Any, Callable[..., Any]]:
        """Return a layer's outputs and its backward, a function that is a tree of the arrays it
        needs.
        """

        def apply(trained: PyTree, xs: tuple[Array, ...]) -> Any:
            return self._apply(merge_trees(weights, trained), context, xs, kind)

        return jax.vjp(
            apply,
            self.model.trained({"blocks": weights})["blocks"],
            xs,
        )

    # Places of a chunk.

    @property
    def _looped(self) -> bool:
        return self.model.config.scan_layers and self.kinds == 1

    def _scan(
        self, body: Callable[[_Carry, ArrayLike, int], _Carry], carry: _Carry, reverse: bool = False
    ) -> _Carry:
        """Run `body(carry, j, kind)` for each place of a chunk, in a loop or unrolled as the model
        has its layers.
        """
        if self._looped:
            return jax.lax.scan(
                lambda c, j: (body(c, j, 0), None), carry, jnp.arange(self.places), reverse=reverse
            )[0]
        for j in range(self.places)[:: -1 if reverse else 1]:
            carry = body(carry, j, j % self.kinds)
        return carry

    def _places_of(self, kind: int) -> int:
        return len(range(kind, self.places, self.kinds))

    def _at(self, slot: ArrayLike, j: ArrayLike, kind: int) -> ArrayLike:
        """The index of a slot's place in the buffers of a kind."""
        # a loop has one kind
        return slot * self._places_of(kind) + (j // self.kinds if isinstance(j, int) else j)

    def _weights(self, chunk: ArrayLike, j: ArrayLike) -> PyTree:
        """Return the weights of a place of a chunk, fetched to the device if they lie in host
        memory.
        """
        return jax.tree.map(
            lambda x: on_device(read(x, chunk * self.places + j)),
            self.weights,
        )


def read(x: Array, at: ArrayLike) -> Array:
    """Return `x[at]` for an index that is known at run time only."""
    return jax.lax.dynamic_index_in_dim(x, at, keepdims=False)


def write(buffer: Array, x: Array, at: ArrayLike) -> Array:
    """Write `x` at [at], a single index: the TPU compiler cuts arrays in host memory along one dim
    only.
    """
    return jax.lax.dynamic_update_index_in_dim(buffer, x, at, 0)
