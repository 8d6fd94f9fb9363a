"""Bytes of a device that a training step holds besides activations: from shapes and shardings alone."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from jaxpar.base.config import Config
from jaxpar.base.plan import Plan, gradient_dtype
from jaxpar.base.sharding import state_axes
from jaxpar.models import Model
from jaxpar.train.state import in_host, state_shapes
from jaxpar.train.step import step_shapes


def local_bytes(tree: Any) -> int:
    """Bytes of a device's part of ShapeDtypeStructs with shardings."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


class StateBytes(NamedTuple):
    """Bytes of one device's part of a training state."""

    params: int
    opt_state: int


def by_memory(state: Any, host: Any = None) -> tuple[StateBytes, StateBytes]:
    """Bytes of a state on a device, and in host memory.

    Args:
      state: the TrainState, as ShapeDtypeStructs with shardings.
      host: whether each array is in host memory, in its form; None = the device has no other.
    """

    def total(tree: Any, flags: Any, there: bool) -> int:
        flags = jax.tree.map(lambda _: False, tree) if flags is None else flags
        pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(flags), strict=True)
        return local_bytes([leaf for leaf, flag in pairs if flag is there])

    params, opt_state = (None, None) if host is None else (host.params, host.opt_state)
    found = (
        StateBytes(total(state.params, params, there), total(state.opt_state, opt_state, there))
        for there in (False, True)
    )
    return next(found), next(found)


class State(NamedTuple):
    """Bytes a device of what a step holds besides activations, and seconds of streaming it through.

    Attributes:
      parameters, optimizer, gradients, batch: on the device.
      host_parameters, host_optimizer, host_gradients: in host memory.
      update: what the optimizer's step works with on the device.
      moved: seconds in a step, which nothing hides.
    """

    parameters: int
    optimizer: int
    gradients: int
    batch: int
    host_parameters: int
    host_optimizer: int
    host_gradients: int
    update: int
    moved: float

    @property
    def host(self) -> int:
        return self.host_parameters + self.host_optimizer + self.host_gradients

    @property
    def device(self) -> int:
        return self.parameters + self.optimizer + self.gradients + self.batch


def state_of(config: Config, plan: Plan, platform: str, link: float = math.inf) -> State:
    """The state of a step, from shapes alone.

    Args:
      config: the experiment.
      plan: of the config.
      platform: on `cpu` host memory is the device's own.
      link: bytes/s to host memory.
    """
    model = Model(config.model)
    state, batch = step_shapes(model, config, plan)
    flags = in_host(state_shapes(model, config, plan), model, plan) if platform != "cpu" else None
    there, away = by_memory(state, flags)
    sums = config.train.accumulation > 1 or plan.size("stage") > 1
    own = _gradient_bytes(state.params, model, plan, sums=False)
    gradients = _gradient_bytes(state.params, model, plan, sums=True) if sums else own
    gradients += own if config.train.accumulation > 1 and plan.size("stage") == 1 else 0
    streamed = away.params if not sums else 0  # gradients of layers in host memory are made there
    parts = config.train.accumulation
    # Parameters come in for every forward and backward, and in and out for the update; gradients that are made in host
    # memory go out, and come in for their norm and for the update.
    moved = (2 * parts + 2 + (0 if sums else 3)) * away.params + 2 * away.opt_state
    return State(
        there.params, there.opt_state, max(gradients - streamed, 0), local_bytes(batch),
        away.params, away.opt_state, streamed, _update_bytes(state.params, model, plan), moved / link,
    )  # fmt: skip


def _update_bytes(params: Any, model: Model, plan: Plan) -> int:
    """What the update works with besides the state itself: a layer's moments and those of the tables in float32.

    A state that stays on the device in floats is updated where it is.
    """
    if not plan.streams:
        return 0

    def entries(param: Any, axes: Any) -> int:
        return math.prod(plan.sharding(state_axes(axes), param.shape).shard_shape(param.shape))

    sizes = {name: jax.tree.leaves(jax.tree.map(entries, part, model.axes[name])) for name, part in params.items()}
    tables = [size for name, found in sizes.items() if name != "blocks" for size in found]
    layer = sum(sizes["blocks"]) // model.config.layers
    # Fetched: both moments, and a parameter, of all tables at once; unpacked: both moments of one after another.
    of_tables = 12 * sum(tables) if plan.optimizer == "offload" else 8 * max(tables) if plan.moments == "int8" else 0
    return of_tables + 8 * layer


def _gradient_bytes(params: Any, model: Model, plan: Plan, sums: bool) -> int:
    """Bytes a device of all gradients: of a microbatch's, in the parameters' dtypes, or of their sums."""

    def one(param: Any, axes: Any) -> int:
        shape = plan.sharding(state_axes(axes), param.shape).shard_shape(param.shape)
        return math.prod(shape) * (gradient_dtype(axes, plan) if sums else param.dtype).itemsize

    return sum(jax.tree.leaves(jax.tree.map(one, params, model.axes)))
