"""The layers of a virtual stage, forward and backward, with what lies between written out.

The forward of a microbatch and its backward are in different ticks: what the one leaves for the other is an array in a
buffer, not a tracer of autodiff. A layer's forward gives what its `jax.vjp` would keep under the plan's remat policy,
less what the stage has anyway: its weights, the places of the tokens, the keys. The backward puts them together again.

Shapes: B batch, S sequence, D embed; places, slots and layers lead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxpar.base.plan import Plan
from jaxpar.parallel.cross_entropy import LossSums, LossWeights
from jaxpar.parallel.host_memory import on_device, on_host
from jaxpar.parallel.linear import STORED
from jaxpar.parallel.pipeline.split_backward import Kept, Parts, kept, split
from jaxpar.parallel.remat import remat
from jaxpar.parallel.token_order import halves, whole_batch


class PipelinedModel(Protocol):
    """What a pipeline needs of a model: see `jaxpar.models.Model`."""

    axes: Any
    config: Any

    def embed(self, params: Any, tokens_BS: Any, positions_BS: Any, plan: Plan, key: Any = None) -> Array: ...
    def layer(self, layer: Any, xs: Any, places: Any, plan: Plan, key: Any) -> tuple[tuple[Array, ...], Any]: ...
    def score(self, params: Any, x_BSD: Any, labels_BS: Any, plan: Plan, weights: LossWeights) -> LossSums: ...


class LayerContext(NamedTuple):
    """What a layer is told besides its weights and its input.

    Attributes:
      places: positions and segments of the tokens, of each of the batch's `halves`.
      key: of its dropout, or None.
      there: whether there is a layer at this place; None = at all places.
    """

    places: Any
    key: Array | None
    there: Array | None


class Recipe(NamedTuple):
    """How a layer's backward is put together.

    Attributes:
      tree: of `jax.vjp`'s function.
      kept: which of its arrays are kept, and how to have the others again.
      parts: the backward in two, where weights' gradients wait.
    """

    tree: Any
    kept: Kept
    parts: Parts | None = None


class Stack:
    """The layers of one stage, inside the `shard_map` over stages.

    Args:
      model, plan: as anywhere.
      weights: stacked weights [virtual x places, ...] of this stage.
      place: of (microbatch, chunk, place in it) what the layer is told.
      count: places of a virtual stage.
      added: cotangents of a layer's router sums, or None.
    """

    def __init__(
        self, model: PipelinedModel, plan: Plan, weights: Any, place: Callable[..., LayerContext], count: int,
        added: Any,
    ):  # fmt: skip
        self.model, self.plan, self.weights, self.place, self.count = model, plan, weights, place, count
        self.added = added
        self._recipe: Recipe | None = None

    def _run(self, weights: Any, place: LayerContext, xs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Any]:
        def layer(weights: Any, xs: tuple[Array, ...]) -> tuple[tuple[Array, ...], Any]:
            ys, routed = self.model.layer(weights, xs, place.places, self.plan, place.key)
            if (there := place.there) is None:
                return ys, routed
            ys = tuple(jnp.where(there, y, x) for y, x in zip(ys, xs, strict=True))
            return ys, jax.tree.map(lambda x: jnp.where(there, x, 0), routed)

        return remat(layer, self.plan, self.model.config.scan_layers)(weights, xs)

    def _at(self, chunk: Any, j: Any) -> Any:
        """The weights of a place of a chunk, fetched where they lie in host memory."""
        return jax.tree.map(lambda x: on_device(taken(x, chunk * self.count + j)), self.weights)

    def _differentiated(self, weights: Any, place: LayerContext, xs: Any) -> tuple[Any, list[Array], Any]:
        """A layer's outputs, and its backward's arrays and the tree they are in."""
        out, pull = jax.vjp(lambda weights, xs: self._run(weights, place, xs), weights, xs)
        return out, *jax.tree.flatten(pull)

    def _pulled(self, kept: Sequence[Array], weights: Any, place: LayerContext, dout: Any) -> Any:
        """Gradients of a layer's weights and inputs."""
        leaves = self.recipe.kept.restore(kept, weights, place)
        return jax.tree.unflatten(self.recipe.tree, leaves)(dout)

    @property
    def recipe(self) -> Recipe:
        assert self._recipe is not None, "prepare() comes first"
        return self._recipe

    def prepare(self, x: jax.ShapeDtypeStruct, waits: bool, stashed: bool) -> None:
        """Learn what a layer keeps.

        Args:
          x: shape [B, S, D] of its input.
          waits: weights' gradients do.
          stashed: what a layer keeps is there still when they are made.
        """
        found: dict[str, Any] = {}

        def leaves(weights: Any, place: LayerContext, xs: Any) -> list[Array]:
            out, arrays, found["tree"] = self._differentiated(weights, place, xs)
            found["out"] = jax.eval_shape(lambda: out)
            return arrays

        weights, place = jax.eval_shape(lambda: (self._at(0, 0), self.place(0, 0, 0)))
        given = kept(leaves, weights, place, jax.eval_shape(self._halves, x))
        self._stashed, self._recipe = stashed, Recipe(found["tree"], given)
        if waits:
            shapes = list(given.shapes), weights, place, found["out"]
            again = (0, 1, 2) if stashed else (1, 2)
            self._recipe = self._recipe._replace(parts=split(self._pulled, shapes, self._now(), again))

    def _now(self) -> Any:
        """Of a layer's backward, whether a result belongs to the input's part: vectors' gradients are no work."""
        weights = jax.eval_shape(lambda: self._at(0, 0))
        return jax.tree.map(lambda x: x.ndim < 2, weights), (True,) * self.plan.overlap.parts

    def _halves(self, x: Array) -> tuple[Array, ...]:
        return halves(x, STORED, self.plan)

    def _scan(self, body: Callable[[Any, Any], Any], carry: Any, reverse: bool = False) -> Any:
        """`body(carry, j)` for each place of a chunk, in a loop or one after another as the model has its layers."""
        if self.model.config.scan_layers:
            return jax.lax.scan(lambda c, j: (body(c, j), None), carry, jnp.arange(self.count), reverse=reverse)[0]
        for j in range(self.count)[:: -1 if reverse else 1]:
            carry = body(carry, j)
        return carry

    def forward(self, x: Array, i: Any, chunk: Any, stash: Any = None, slot: Any = 0) -> tuple[Array, Any, Any]:
        """The output of a chunk for a microbatch, the stash with what its layers keep in `slot`, and the router's sums
        over the layers (of arrays [slots x places, ...]; None = nothing is kept)."""

        def body(carry: Any, j: Any) -> Any:
            xs, stash, total = carry
            weights, place = self._at(chunk, j), self.place(i, chunk, j)
            if stash is None:
                xs, routed = self._run(weights, place, xs)
            else:
                (xs, routed), arrays, _ = self._differentiated(weights, place, xs)
                kept = (arrays[at] for at in self.recipe.kept.places)
                stash = [put(buffer, x, slot * self.count + j) for buffer, x in zip(stash, kept, strict=True)]
            return xs, stash, jax.tree.map(jnp.add, total, routed)

        zeros = None if self.added is None else jax.tree.map(jnp.zeros_like, self.added)
        xs, stash, routed = self._scan(body, (self._halves(x), stash, zeros))
        return whole_batch(xs, STORED, self.plan), stash, routed

    def backward(
        self, dy: Array, i: Any, chunk: Any, stash: Any, slot: Any, grads: Any, on: Any, waiting: Any = None,
        wait: Any = 0,
    ) -> tuple[Array, Any, Any]:  # fmt: skip
        """The gradient of a chunk's input; `grads` with those of its weights added where the stage is `on`.

        Where weights' gradients wait only vectors' are added; what those of matrices are made of goes into slot `wait`
        of `waiting`, arrays [slots x places, ...].
        """
        parts = self.recipe.parts

        def body(carry: Any, j: Any) -> Any:
            dxs, grads, waiting = carry
            given = _slot(stash, slot * self.count + j), self._at(chunk, j), self.place(i, chunk, j), (dxs, self.added)
            if parts is None:
                dweights, dxs = self._pulled(*given)
            else:
                (dweights, dxs), needed = parts.first(*given)
                waiting = [put(buffer, x, wait * self.count + j) for buffer, x in zip(waiting, needed, strict=True)]
            return dxs, self._added(grads, dweights, chunk, j, on), waiting

        dxs, grads, waiting = self._scan(body, (self._halves(dy), grads, waiting), reverse=True)
        return whole_batch(dxs, STORED, self.plan), grads, waiting

    def weight_gradient(
        self, i: Any, chunk: Any, stash: Any, slot: Any, waiting: Any, wait: Any, grads: Any, on: Any
    ) -> Any:
        """`grads` with those of a chunk's matrices added, which have waited."""
        parts = self.recipe.parts
        assert parts is not None

        def body(grads: Any, j: Any) -> Any:
            kept = (_slot(stash, slot * self.count + j),) if self._stashed else ()
            dweights, _ = parts.second(
                _slot(waiting, wait * self.count + j), *kept, self._at(chunk, j), self.place(i, chunk, j)
            )
            return self._added(grads, dweights, chunk, j, on)

        return self._scan(body, grads)

    def _added(self, grads: Any, dweights: Any, chunk: Any, j: Any, on: Any) -> Any:
        at = chunk * self.count + j

        def add(total: Array, x: Array | None) -> Array:
            if x is None:
                return total
            more = jnp.where(on, x.astype(total.dtype), 0)
            return jax.lax.dynamic_update_index_in_dim(total, taken(total, at) + more, at, 0)

        return jax.tree.map(add, grads, dweights, is_leaf=lambda x: x is None)


def taken(x: Array, at: Any) -> Array:
    """`x[at]` of an index that is not known ahead."""
    return jax.lax.dynamic_index_in_dim(x, at, keepdims=False)


def empty(shape: Any, slots: int) -> Array:
    """A buffer [slots, ...] of arrays of this shape, where they lie: on the device or in host memory."""
    zeros = jnp.zeros((slots, *shape.shape), shape.dtype)
    return on_host(zeros) if getattr(shape, "memory_space", None) == jax.memory.Space.Host else zeros


def _slot(buffers: Sequence[Array], at: Any) -> list[Array]:
    """What is at [at] of each."""
    return [taken(buffer, at) for buffer in buffers]


def put(buffer: Array, x: Array, at: Any) -> Array:
    """`x` at [at]: one index, as the TPU compiler cuts arrays in host memory along one dim only."""
    return jax.lax.dynamic_update_index_in_dim(buffer, x, at, 0)
