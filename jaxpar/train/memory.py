"""Counts what a training step holds on a device, as its plan says: the state, from shapes and
shardings alone, and the activations that are kept for the backward pass, by tracing one block.

Shapes: B batch, S sequence, D embed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxpar.base.activation_names import NAMES, Action, Keep
from jaxpar.base.config import Config, ModelConfig
from jaxpar.base.console import bytes_text
from jaxpar.base.errors import UserError
from jaxpar.base.jax_compat import NAME, SHARD_MAP, ClosedJaxpr
from jaxpar.base.plan import Plan, gradient_dtype
from jaxpar.base.sharding import Axes, local_bytes, merge_trees, output_axis, state_axes
from jaxpar.models import Model, Params
from jaxpar.parallel.cross_entropy import Tiling, tiling
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.host_memory import HOST
from jaxpar.parallel.linear import STORED
from jaxpar.parallel.pipeline.layers import layers_in
from jaxpar.parallel.pipeline.program import program
from jaxpar.parallel.pipeline.schedules import schedule
from jaxpar.parallel.token_order import Places, halves, places_of_halves
from jaxpar.train.step import step_shapes


class Held(NamedTuple):
    """The bytes of one device in its own memory and in the host's."""

    device: int
    host: int = 0


class StateBytes(NamedTuple):
    """What one device holds of a training state.

    Attributes:
      parameters, optimizer, gradients, batch: the bytes of each, by memory.
      update: the bytes that the optimizer's step works with on the device.
      streamed: the bytes that go to host memory or come from there in a step, without activations.
    """

    parameters: Held
    optimizer: Held
    gradients: Held
    batch: Held
    update: int
    streamed: int

    @property
    def device(self) -> int:
        return sum(held.device for held in self[:4])

    @property
    def host(self) -> int:
        return sum(held.host for held in self[:4])


def state_bytes(config: Config, plan: Plan, platform: str) -> StateBytes:
    """Count the bytes of a step's state from shapes alone; on the `platform` cpu host memory is the
    device's own.
    """
    model = Model(config.model)
    parts = config.train.accumulation
    state, batch = step_shapes(model, config, plan)
    parameters = _by_memory(state.params, platform)
    optimizer = _by_memory(state.opt_state, platform)
    adds_up = parts > 1 or plan.size("stage") > 1
    trained = model.trained(state.params)
    own = _gradient_bytes(trained, model, plan, sums=False)
    if adds_up:
        gradients = _gradient_bytes(trained, model, plan, sums=True)
    else:
        gradients = own
    gradients += own if parts > 1 and plan.size("stage") == 1 else 0
    updated = _by_memory(trained, platform).host
    in_host = 0 if adds_up else updated  # gradients of layers in host memory are made there
    # Parameters are fetched for every forward and backward pass, and those that are trained fetched
    # and sent back for the update. Gradients that are made in host memory are sent there, and
    # fetched for their norm and for the update.
    streamed = (
        2 * parts * parameters.host + (2 + (0 if adds_up else 3)) * updated + 2 * optimizer.host
    )
    return StateBytes(
        parameters,
        optimizer,
        Held(max(gradients - in_host, 0), in_host),
        Held(local_bytes(batch)),
        _update_bytes(trained, model, plan),
        streamed,
    )


def require_memory(config: Config, plan: Plan, has: int, training: bool = True) -> None:
    """Refuse what has more state and kept activations alone than this machine has memory, before
    any is made.

    Of simulated and other CPU devices only, which share the machine's memory and do not say when it
    is full. Another device says so itself.

    Args:
      config: the experiment.
      plan: its plan.
      has: the bytes that this machine has; 0 = not known.
      training: whether it is a training, and no evaluation, which keeps the residual stream of a
        block and of the next.

    Raises:
      UserError: it cannot fit.
    """
    here = [
        device for device in plan.mesh.devices.flat if device.process_index == jax.process_index()
    ]
    if not has or not here or here[0].platform != "cpu":
        return
    state = state_bytes(config, plan, "cpu")
    if training:
        held = state.device
    else:
        held = state.parameters.device + state.batch.device
    if training:
        kept = sum(one.kept_bytes for one in activations(config, plan))
    else:
        rows = config.train.batch // config.train.accumulation // plan.size("batch")
        tokens = rows * config.data.seq_len // plan.size("residual_seq")
        kept = 2 * tokens * config.model.embed * plan.dtype.itemsize
    held = len(here) * held
    kept = len(here) * kept
    if held + kept > has:
        if training:
            what = "parameters, gradients, moments and batch"
        else:
            what = "parameters and batch"
        raise UserError(
            f"{'a step' if training else 'an evaluation'} needs {bytes_text(held + kept)} of "
            "this machine's memory, "
            f"which has {bytes_text(has)}: {what} take {bytes_text(held)}, and activations "
            f"{bytes_text(kept)}; try a "
            "smaller model or train.batch, or a higher train.accumulation"
        )


def _by_memory(tree: Any, platform: str) -> Held:
    """Count the bytes of a pytree of ShapeDtypeStructs, whose shardings say in which memory each
    array lies.
    """
    whole = local_bytes(tree)
    host = local_bytes(
        [leaf for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind == HOST]
    )
    if platform == "cpu":
        return Held(whole)
    return Held(whole - host, host)


def _local_entries(shape: tuple[int, ...], axes: Axes, plan: Plan) -> int:
    """Count the entries of one device's part of a parameter's gradient or moment."""
    return math.prod(plan.sharding(state_axes(axes), shape).shard_shape(shape))


def _update_bytes(params: Mapping[str, Any], model: Model, plan: Plan) -> int:
    """Return the bytes that the update needs besides the state: the float32 moments of one layer
    and of the tables.

    A state that stays on the device is updated in place and needs none.
    """
    if not plan.streams:
        return 0
    entries = jax.tree.map(
        lambda p, axes: _local_entries(p.shape, axes, plan), params, model.trained(model.axes)
    )
    layers = sum(jax.tree.leaves(entries["blocks"]))
    tables = sum(jax.tree.leaves(entries)) - layers
    # All offloaded tables fetch two moments and a parameter at once.
    return (12 * tables if plan.optimizer == "offload" else 0) + 8 * (layers // model.config.layers)


def _gradient_bytes(
    params: Mapping[str, Any],
    model: Model,
    plan: Plan,
    sums: bool,
) -> int:
    """Return the bytes on a device of a microbatch's gradients, in the parameters' dtypes, or of
    their sums.
    """

    def one(param: jax.ShapeDtypeStruct, axes: Axes) -> int:
        width = (gradient_dtype(axes, plan) if sums else param.dtype).itemsize
        return _local_entries(param.shape, axes, plan) * width

    return sum(jax.tree.leaves(jax.tree.map(one, params, model.trained(model.axes))))


_OF_ROWS: Axes = ("batch", "seq", None, "mlp")  # the axes of the experts' hidden rows


class Activation(NamedTuple):
    """A named activation under a plan, and what is done with it: its global shape for one
    microbatch in one block, its bytes in one block on one device, and for how many blocks it exists
    at a time: all layers, or those of a stage for its microbatches."""

    name: str
    action: Action
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    blocks: int

    @property
    def kept_bytes(self) -> int:
        """The bytes that are kept at a time, on the device or in host memory; 0 if it is
        recomputed.
        """
        if self.action == "recompute":
            return 0
        return self.bytes * self.blocks


def activations(config: Config, plan: Plan) -> list[Activation]:
    """Return the named activations of a block, in the order in which it makes them. The plan is the
    config's, by `plans.make_plan`, or one on an `AbstractMesh`."""
    found = dict[str, Activation]()
    blocks = blocks_kept(config, plan)
    for name, aval, local in _named_arrays(
        _trace_forward(one_block(config, plan))[0].jaxpr,
        False,
    ):
        if len(aval.shape) == 4 and NAMES[name].axes[-1] == "mlp":
            axes = _OF_ROWS
        else:
            axes = NAMES[name].axes
        if local:
            pieces = 1
        else:
            pieces = math.prod(plan.size(output_axis(axis, plan)) for axis in axes)
        size = math.prod(aval.shape) * aval.dtype.itemsize // pieces
        size += found[name].bytes if name in found else 0  # Domino has two halves of each
        found[name] = Activation(
            name, plan.action(name), tuple(aval.shape), str(aval.dtype), size, blocks
        )
    return [found[name] for name in NAMES if name in found]


def unnamed_bytes(config: Config, plan: Plan) -> int:
    """Return the bytes of unnamed arrays that one device keeps at a time; 0 if the plan recomputes
    anything.

    Each array is assumed to be divided over the whole mesh except its stages, as blocks divide
    their work.
    """
    if plan.recomputes:
        return 0
    traced, made = _trace_forward(one_block(config, plan))
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
    """Refuse, with a UserError, a `memory.keep` that recomputes a block's input or names what the
    model has not.
    """
    asked = [name for name, choice in vars(plan.keep).items() if choice != "policy"]
    if not asked:
        return
    if plan.keep.block_input == "recompute":
        raise UserError(
            "memory.keep.block_input = recompute: a block is made again from its input, which "
            "has to be kept: save or "
            "offload it (with stages, pipeline.stash = stage keeps the input of a whole stage "
            "alone)"
        )
    there = [one.name for one in activations(config, plan)]
    family = config.model.family
    for name in asked:
        if name not in there:
            why = (
                f"{family} under this plan has no activation of that name: it has "
                f"{', '.join(there)}"
            )
            raise UserError(f"memory.keep.{name}: {why}")


class OneBlock(NamedTuple):
    """One block of a model on a microbatch, `(layer, x_BSD, positions_BS, segments_BS) -> (halves
    of x_BSD, routers' sums)`. It is hashable, so that its trace can be cached."""

    config: ModelConfig
    rows: int
    seq_len: int
    packed: bool
    plan: Plan

    def __call__(
        self,
        layer: Params,
        x_BSD: jax.Array,
        positions_BS: jax.Array,
        segments_BS: jax.Array | None,
    ) -> tuple[tuple[jax.Array, ...], RouterSums | None]:
        plan = self.plan
        key = jax.random.key(0) if self.config.dropout else None
        if self.config.experts:
            text_BS = jnp.ones(positions_BS.shape, bool)
        else:
            text_BS = None
        places = places_of_halves(Places(positions_BS, segments_BS, text_BS), plan)
        return Model(self.config).layer(
            layer,
            halves(x_BSD, STORED, plan),
            places,
            plan,
            key,
        )

    def shapes(
        self,
    ) -> tuple[Params, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct | None]:
        """Return the arguments as global ShapeDtypeStructs without shardings."""
        blocks = Model(self.config).shapes()["blocks"]
        layer = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
            blocks,
        )
        x_BSD = jax.ShapeDtypeStruct(
            (self.rows, self.seq_len, self.config.embed),
            self.plan.dtype,
        )
        ids_BS = jax.ShapeDtypeStruct((self.rows, self.seq_len), jnp.int32)
        return layer, x_BSD, ids_BS, ids_BS if self.packed else None


def one_block(config: Config, plan: Plan) -> OneBlock:
    """Return a block of this config as this plan runs it, without what the plan keeps or where it
    has the state.
    """
    rows = config.train.batch // config.train.accumulation // microbatches_of(plan)
    plan = replace(
        plan, remat="none", keep=Keep(), loss_mib=0, parameters="device", optimizer="device"
    )
    return OneBlock(config.model, rows, config.data.seq_len, config.data.pack, plan)


@lru_cache(maxsize=16)
def _trace_forward(block: OneBlock) -> tuple[ClosedJaxpr, int]:
    """Trace a block's forward as autodiff runs it, with everything kept. The results are the
    block's outputs, whose number is returned too, and then what the backward pass is given."""

    def forward(
        layer: Params, x_BSD: jax.Array, positions_BS: jax.Array, segments_BS: jax.Array | None
    ) -> Any:
        trained = Model(block.config).trained({"blocks": layer})["blocks"]
        return jax.vjp(
            lambda part, x_BSD: block(merge_trees(layer, part), x_BSD, positions_BS, segments_BS),
            trained,
            x_BSD,
        )

    traced, (made, _) = jax.make_jaxpr(forward, return_shape=True)(*block.shapes())
    return traced, len(jax.tree.leaves(made))


class LossCut(NamedTuple):
    """A device's tokens of a microbatch, its part [rows, embed] of the vocabulary matrix, and the
    loss's tiling.
    """

    tokens: int
    rows: int
    embed: int
    tiling: Tiling


def loss_cut(config: Config, plan: Plan) -> LossCut:
    """Return how the loss divides a microbatch under a plan."""
    V, D = Model(config.model).shapes()["embed"]["tokens"].shape
    sequences = (
        config.train.batch
        // config.train.accumulation
        // microbatches_of(plan)
        // plan.size("batch")
    )
    tokens = max(
        sequences * config.data.seq_len // plan.size("seq") // plan.size("stage"),
        1,
    )
    rows = V // plan.size("vocab")
    return LossCut(tokens, rows, D, tiling(tokens, rows, D, plan, plan.loss_mib))


def microbatches_of(plan: Plan) -> int:
    """Return the number of microbatches of a plan's pipeline; 1 where it has no stages."""
    if plan.size("stage") > 1:
        return plan.pipeline.microbatches
    return 1


def _array_of(var: core.Var) -> jax.ShapeDtypeStruct:
    aval: Any = var.aval  # JAX types it as any abstract value
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _named_arrays(
    jaxpr: core.Jaxpr, local: bool
) -> Iterator[tuple[str, jax.ShapeDtypeStruct, bool]]:
    """Yield every name in a jaxpr, the array it names, and whether that is only one device's
    part.
    """
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == NAME and eqn.params["name"] in NAMES:
            yield eqn.params["name"], _array_of(eqn.outvars[0]), local
        for value in eqn.params.values():
            if isinstance(value, core.Jaxpr | ClosedJaxpr):
                inner: Any = getattr(value, "jaxpr", value)  # newer JAX has one class for both
                yield from _named_arrays(inner, local or eqn.primitive.name == SHARD_MAP)
