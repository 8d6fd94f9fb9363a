"""The activations of a block that are kept for its backward pass, found by tracing one block.

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

from jaxpar.base.errors import UserError
from jaxpar.base.jax_compat import NAME, SHARD_MAP, ClosedJaxpr
from jaxpar.base.layout.activation_names import NAMES, PRESETS, Action, Keep
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import Axes, merge_trees, output_axis
from jaxpar.models import Model, Params, in_parts
from jaxpar.parallel.domino import LayerInfo, Places, halves, places_of_halves
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.linear import STORED
from jaxpar.parallel.pipeline.layers import layers_in
from jaxpar.parallel.pipeline.program import program
from jaxpar.parallel.pipeline.schedules import schedule
from jaxpar.train.experiment import Experiment

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


def activations(experiment: Experiment) -> list[Activation]:
    """Return the named activations of a block, in the order in which it makes them. The mesh of the
    plan may be an `AbstractMesh`.
    """
    plan = experiment.plan
    if not experiment.model.has_blocks:
        return []
    found = dict[str, Activation]()
    blocks = blocks_kept(experiment)
    traced, _ = _trace_forward(one_block(experiment))
    for name, aval, local in _named_arrays(traced.jaxpr, False):
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


def unnamed_bytes(experiment: Experiment) -> int:
    """Return the bytes of unnamed arrays that one device keeps at a time; 0 if the plan recomputes
    anything.

    Each array is assumed to be divided over the whole mesh except its stages, as blocks divide
    their work.
    """
    plan = experiment.plan
    if plan.recomputes or not experiment.model.has_blocks:
        return 0
    traced, made = _trace_forward(one_block(experiment))
    given = {*traced.jaxpr.invars, *traced.jaxpr.constvars}
    kept = {var for var in traced.jaxpr.outvars[made:] if isinstance(var, core.Var)} - given
    total = sum(math.prod(array.shape) * array.dtype.itemsize for array in map(_array_of, kept))
    named = sum(one.bytes for one in activations(experiment))
    unnamed = max(total * plan.size("stage") // plan.mesh.size - named, 0)
    return unnamed * blocks_kept(experiment)


def blocks_kept(experiment: Experiment) -> int:
    """Return how many blocks a device keeps activations of at a time, each for one microbatch; the
    query layer is one.
    """
    plan = experiment.plan
    model = experiment.config.model
    layers = layers_in(plan, model.layers)
    if layers is None:
        return model.layers + model.query_layer
    pipeline = plan.pipeline
    table = schedule(pipeline.schedule, plan.size("stage"), pipeline.microbatches, pipeline.virtual)
    by_stage = plan.recomputes and pipeline.stash == "stage"
    stashed = layers.places * (1 if by_stage else program(table).stash)
    return stashed + model.query_layer


def check_names(experiment: Experiment) -> None:
    """Refuse, with a UserError, a `memory.keep` that recomputes a block's input or names what the
    model has not.
    """
    plan = experiment.plan
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
    there = [one.name for one in activations(experiment)]
    block = experiment.model.own_parts().get("blocks", experiment.config.model.family)
    for name in asked:
        if name not in there:
            why = (
                f"{block} under this plan has no activation of that name: it has {', '.join(there)}"
            )
            raise UserError(f"memory.keep.{name}: {why}")


def policy_notes(experiment: Experiment) -> list[str]:
    """Say for the log where a block, one of one's own, names nothing of what memory.policy keeps
    besides its input.
    """
    policy = experiment.plan.remat
    wanted = PRESETS[policy] - {"block_input"}
    own = "blocks" in experiment.model.own_parts()  # the library's name all that they should
    if not own or not wanted or policy == "none":
        return []
    there = {one.name for one in activations(experiment)}
    if wanted & there:
        return []
    return [
        f"memory.policy={policy} keeps activations by name, and this model's block names none of "
        "them: all of it is computed again, as by full (jaxpar.parallel.named gives a name)"
    ]


class OneBlock(NamedTuple):
    """One block of a model on a microbatch, `(layer, x_BSD, positions_BS, segments_BS) -> (halves
    of x_BSD, routers' sums)`. It is hashable, so that its trace can be cached."""

    model: Model
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
        if self.model.config.dropout:
            key = jax.random.key(0)
        else:
            key = None
        if self.model.config.experts:
            text_BS = jnp.ones(positions_BS.shape, bool)
        else:
            text_BS = None
        places = places_of_halves(Places(positions_BS, segments_BS, text_BS), plan)
        info = LayerInfo(key, number=0 if self.model.numbers_layers else None)
        return self.model.layer(layer, halves(x_BSD, STORED, plan), places, plan, info)

    def shapes(
        self,
    ) -> tuple[Params, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct | None]:
        """Return the arguments as global ShapeDtypeStructs without shardings."""
        blocks = self.model.shapes()["blocks"]
        layer = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
            blocks,
        )
        x_BSD = jax.ShapeDtypeStruct(
            (self.rows, self.seq_len, self.model.config.embed),
            self.plan.dtype,
        )
        ids_BS = jax.ShapeDtypeStruct((self.rows, self.seq_len), jnp.int32)
        return layer, x_BSD, ids_BS, ids_BS if self.packed else None


def one_block(experiment: Experiment) -> OneBlock:
    """Return a block of an experiment as its plan runs it, without what the plan keeps or where it
    has the state.
    """
    plan = replace(
        experiment.plan,
        remat="none",
        keep=Keep(),
        loss_mib=0,
        parameters="device",
        optimizer="device",
    )
    data = experiment.config.data
    model = in_parts(experiment.model, "memory.policy")
    return OneBlock(model, experiment.sequences, data.seq_len, data.pack, plan)


@lru_cache(maxsize=16)
def _trace_forward(block: OneBlock) -> tuple[ClosedJaxpr, int]:
    """Trace a block's forward as autodiff runs it, with everything kept. The results are the
    block's outputs, whose number is returned too, and then what the backward pass is given."""

    def forward(
        layer: Params, x_BSD: jax.Array, positions_BS: jax.Array, segments_BS: jax.Array | None
    ) -> Any:
        trained = block.model.trained({"blocks": layer})["blocks"]
        return jax.vjp(
            lambda part, x_BSD: block(merge_trees(layer, part), x_BSD, positions_BS, segments_BS),
            trained,
            x_BSD,
        )

    traced, (made, _) = jax.make_jaxpr(forward, return_shape=True)(*block.shapes())
    return traced, len(jax.tree.leaves(made))


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
