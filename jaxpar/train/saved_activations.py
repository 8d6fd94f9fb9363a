"""Lists what a plan keeps on a device for its backward pass, activation by activation, by tracing one block.

Shapes: B batch, S sequence, D embed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxpar.base.activation_names import NAMES, Action, Keep
from jaxpar.base.config import Config, ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.base.jax_compat import NAME, SHARD_MAP
from jaxpar.base.plan import Plan
from jaxpar.base.sharding import Axes, output_axis
from jaxpar.models import Model, Params
from jaxpar.parallel.cross_entropy import Tiling, tiling
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.linear import STORED
from jaxpar.parallel.pipeline.layers import layers_in
from jaxpar.parallel.pipeline.program import program
from jaxpar.parallel.pipeline.schedules import schedule
from jaxpar.parallel.token_order import TOKENS, halves

_OF_ROWS: Axes = ("batch", "seq", None, "mlp")  # the axes of the experts' hidden rows


class Activation(NamedTuple):
    """A named activation under a plan.

    Attributes:
      name: one of `activations.NAMES`.
      action: what the plan does with the activation.
      shape: its global shape for one microbatch in one block.
      dtype: the dtype of its entries.
      bytes: its size in one block on one device.
      blocks: for how many blocks it exists at a time: all layers, or those of a stage for its microbatches.
    """

    name: str
    action: Action
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    blocks: int

    @property
    def kept_bytes(self) -> int:
        """The bytes that are kept at a time, on the device or in host memory; 0 if it is recomputed."""
        return 0 if self.action == "recompute" else self.bytes * self.blocks


def activations(config: Config, plan: Plan) -> list[Activation]:
    """Return the named activations of a block, in the order in which it makes them.

    Args:
      config: the config, of which model, batch and sequence length are used.
      plan: the plan from `jaxpar.train.plans.make_plan`, or one on an `AbstractMesh`.
    """
    found, blocks = dict[str, Activation](), blocks_kept(config, plan)
    for name, aval, local in _named_arrays(traced_block(config, plan)[0].jaxpr, False):
        axes = _OF_ROWS if len(aval.shape) == 4 and NAMES[name].axes[-1] == "mlp" else NAMES[name].axes
        pieces = 1 if local else math.prod(plan.size(output_axis(axis, plan)) for axis in axes)
        size = math.prod(aval.shape) * aval.dtype.itemsize // pieces
        size += found[name].bytes if name in found else 0  # Domino has two halves of each
        found[name] = Activation(name, plan.action(name), tuple(aval.shape), str(aval.dtype), size, blocks)
    return [found[name] for name in NAMES if name in found]


def unnamed_bytes(config: Config, plan: Plan) -> int:
    """Return the bytes of unnamed arrays that one device keeps at a time; 0 if the plan recomputes anything.

    Each array is assumed to be divided over the whole mesh except its stages, as blocks divide their work.
    """
    if plan.recomputes:
        return 0
    traced, made = traced_block(config, plan)
    given = {*traced.jaxpr.invars, *traced.jaxpr.constvars}
    kept = {var for var in traced.jaxpr.outvars[made:] if isinstance(var, core.Var)} - given
    total = sum(math.prod(array.shape) * array.dtype.itemsize for array in map(_array_of, kept))
    named = sum(one.bytes for one in activations(config, plan))
    return max(total * plan.size("stage") // plan.mesh.size - named, 0) * blocks_kept(config, plan)


def blocks_kept(config: Config, plan: Plan) -> int:
    """Return how many blocks a device keeps activations of at a time, each for one microbatch."""
    layers = layers_in(plan, config.model.layers)
    if layers is None:
        return config.model.layers
    pipeline = plan.pipeline
    table = schedule(pipeline.schedule, plan.size("stage"), pipeline.microbatches, pipeline.virtual)
    by_stage = plan.recomputes and pipeline.stash == "stage"
    return layers.places * (1 if by_stage else program(table).stash)


def check_names(config: Config, plan: Plan) -> None:
    """Refuse a `memory.keep` that is impossible, or that names activations which the model does not have.

    Raises:
      UserError: the model does not have a named activation, or a block's input would be recomputed.
    """
    asked = [name for name, choice in vars(plan.keep).items() if choice != "policy"]
    if not asked:
        return
    if plan.keep.block_input == "recompute":
        raise UserError(
            "memory.keep.block_input = recompute: a block is made again from its input, which has to be kept: save or "
            "offload it (with stages, pipeline.stash = stage keeps the input of a whole stage alone)"
        )
    there = [one.name for one in activations(config, plan)]
    for name in asked:
        if name not in there:
            raise UserError(
                f"memory.keep.{name}: {config.model.family} under this plan has no activation of that name: it has "
                f"{', '.join(there)}"
            )


class OneBlock(NamedTuple):
    """One block of a model on a microbatch, `(layer, x_BSD, positions_BS, segments_BS) -> (halves of x_BSD, routers'
    sums)`. It is hashable, so that its trace can be cached."""

    config: ModelConfig
    rows: int
    seq_len: int
    packed: bool
    plan: Plan

    def __call__(
        self, layer: Params, x_BSD: jax.Array, positions_BS: jax.Array, segments_BS: jax.Array | None
    ) -> tuple[tuple[jax.Array, ...], RouterSums | None]:
        plan, key = self.plan, jax.random.key(0) if self.config.dropout else None
        places = zip(halves(positions_BS, TOKENS, plan), halves(segments_BS, TOKENS, plan), strict=True)
        return Model(self.config).layer(layer, halves(x_BSD, STORED, plan), list(places), plan, key)

    def shapes(self) -> tuple[Params, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct | None]:
        """Return the arguments as global ShapeDtypeStructs without shardings."""
        layer = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), Model(self.config).shapes()["blocks"]
        )
        x_BSD = jax.ShapeDtypeStruct((self.rows, self.seq_len, self.config.embed), self.plan.dtype)
        ids_BS = jax.ShapeDtypeStruct((self.rows, self.seq_len), jnp.int32)
        return layer, x_BSD, ids_BS, ids_BS if self.packed else None


def one_block(config: Config, plan: Plan) -> OneBlock:
    """Return a block of this config as this plan runs it, without what the plan keeps or where it has the state."""
    rows = config.train.batch // config.train.accumulation // microbatches_of(plan)
    plan = replace(plan, remat="none", keep=Keep(), loss_mib=0, parameters="device", optimizer="device")
    return OneBlock(config.model, rows, config.data.seq_len, config.data.pack, plan)


def traced_block(config: Config, plan: Plan) -> tuple[core.ClosedJaxpr, int]:
    """Trace one block's forward of a microbatch as autodiff runs it, with everything kept. The results are the block's
    outputs, whose number is returned too, and then what the backward pass is given."""
    return _trace_forward(one_block(config, plan))


@lru_cache(maxsize=16)
def _trace_forward(block: OneBlock) -> tuple[core.ClosedJaxpr, int]:
    def forward(layer: Params, x_BSD: jax.Array, positions_BS: jax.Array, segments_BS: jax.Array | None) -> Any:
        trained = Model(block.config).trained({"blocks": layer})["blocks"]
        return jax.vjp(lambda part, x_BSD: block(layer | part, x_BSD, positions_BS, segments_BS), trained, x_BSD)

    traced, (made, _) = jax.make_jaxpr(forward, return_shape=True)(*block.shapes())
    return traced, len(jax.tree.leaves(made))


class LossCut(NamedTuple):
    """A device's tokens of a microbatch, its part [rows, embed] of the vocabulary matrix, and the loss's tiling."""

    tokens: int
    rows: int
    embed: int
    tiling: Tiling


def loss_cut(config: Config, plan: Plan) -> LossCut:
    """Return how the loss divides a microbatch under a plan."""
    V, D = Model(config.model).shapes()["embed"]["tokens"].shape
    sequences = config.train.batch // config.train.accumulation // microbatches_of(plan) // plan.size("batch")
    tokens = max(sequences * config.data.seq_len // plan.size("seq") // plan.size("stage"), 1)
    rows = V // plan.size("vocab")
    return LossCut(tokens, rows, D, tiling(tokens, rows, D, plan, plan.loss_mib))


def microbatches_of(plan: Plan) -> int:
    """Return the number of microbatches of a plan's pipeline; 1 where it has no stages."""
    return plan.pipeline.microbatches if plan.size("stage") > 1 else 1


def _array_of(var: core.Var) -> jax.ShapeDtypeStruct:
    aval: Any = var.aval  # JAX types it as any abstract value
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _named_arrays(jaxpr: core.Jaxpr, local: bool) -> Iterator[tuple[str, jax.ShapeDtypeStruct, bool]]:
    """Yield every name in a jaxpr, the array it names, and whether that is only one device's part."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == NAME and eqn.params["name"] in NAMES:
            yield eqn.params["name"], _array_of(eqn.outvars[0]), local
        for value in eqn.params.values():
            if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
                inner: Any = getattr(value, "jaxpr", value)  # newer JAX has one class for both
                yield from _named_arrays(inner, local or eqn.primitive.name == SHARD_MAP)
