"""The memory of a training state: its bytes on a device, counted from shapes and shardings alone,
the check that refuses an experiment for which this machine has none, before any of it is made, and
the settings with which a device's part of a step is smaller, as messages advise them.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax

from jaxpar.base.console import bytes_text
from jaxpar.base.errors import UserError
from jaxpar.base.layout.placements import local_bytes
from jaxpar.base.layout.plan import Plan, gradient_dtype
from jaxpar.base.layout.sharding import Axes, KeyPath, state_axes
from jaxpar.models import AnyModel
from jaxpar.train.activations import activations
from jaxpar.train.experiment import Experiment
from jaxpar.train.optimizer.per_matrix import hidden_matrices
from jaxpar.train.optimizer.update import is_stacked
from jaxpar.train.state import Shape


class BytesByMemory(NamedTuple):
    """The bytes of one device in its own memory and in the host's."""

    device: int
    host: int = 0


class StateBytes(NamedTuple):
    """The bytes of a training state that one device holds.

    Attributes:
      parameters, optimizer, gradients, batch: the bytes of each, by memory.
      update: the bytes that the optimizer's step works with on the device.
      host_update: the bytes that the step works with in host memory, where the host computes it.
      streamed: the bytes that go to host memory or come from there in a step, without activations.
    """

    parameters: BytesByMemory
    optimizer: BytesByMemory
    gradients: BytesByMemory
    batch: BytesByMemory
    update: int
    host_update: int
    streamed: int

    @property
    def device(self) -> int:
        return sum(held.device for held in self[:4])

    @property
    def host(self) -> int:
        return sum(held.host for held in self[:4])


def state_bytes(experiment: Experiment, platform: str) -> StateBytes:
    """Count the bytes of a step's state from shapes alone; on the `platform` cpu host memory is the
    device's own.
    """
    model = experiment.model
    plan = experiment.plan
    parts = experiment.config.train.accumulation
    state = experiment.state
    away = experiment.in_host
    parameters = _by_memory(state.params, away.params, platform)
    moments = _by_memory(state.opt_state, away.opt_state, platform)
    adds_up = parts > 1 or plan.size("stage") > 1
    trained = model.trained(state.params)
    own = _gradient_bytes(trained, model, plan, sums=False)
    if adds_up:
        gradients = _gradient_bytes(trained, model, plan, sums=True)
    else:
        gradients = own
    gradients += own if parts > 1 and plan.size("stage") == 1 else 0
    updated = _by_memory(trained, model.trained(away.params), platform)
    in_host = 0 if adds_up else updated.host  # gradients of layers in host memory are made there
    on_device = max(gradients - in_host, 0)
    # Parameters are fetched for every forward and backward pass. Gradients that are made in host
    # memory are sent there, and fetched for their norm.
    streamed = 2 * parts * parameters.host + 2 * in_host
    host_update = 0
    if plan.optimizer == "host":
        # Other gradients go down for the update, and so do parameters, which come up again into
        # their own place. A host computes new arrays of what lies in its memory beside the old.
        streamed += on_device + 2 * updated.device
        if platform != "cpu":
            host_update = on_device + updated.device + updated.host + moments.host
    else:
        # For the update all that is in host memory is fetched, and sent back but for gradients.
        streamed += 2 * updated.host + in_host + 2 * moments.host
    return StateBytes(
        parameters,
        moments,
        BytesByMemory(on_device, in_host),
        BytesByMemory(local_bytes(experiment.batch)),
        _update_bytes(experiment)
        + _whole_matrix_bytes(experiment)
        + _gathered_bytes(trained, model, plan),
        host_update,
        streamed,
    )


def require_memory(experiment: Experiment, has: int, training: bool = True) -> None:
    """Refuse an experiment whose state and kept activations alone are more than this machine's
    memory, before any is made.

    The check is for simulated and other CPU devices only, which share the machine's memory and do
    not say when it is full. Another device says so itself.

    Args:
      has: the bytes of memory that this machine has; 0 = not known.
      training: whether the experiment is trained; an evaluation keeps only the residual stream of a
        block and of the next.

    Raises:
      UserError: the experiment cannot fit.
    """
    plan = experiment.plan
    here = [
        device for device in plan.mesh.devices.flat if device.process_index == jax.process_index()
    ]
    if not has or not here or here[0].platform != "cpu":
        return
    state = state_bytes(experiment, "cpu")
    if training:
        held = state.device
        kept = sum(one.kept_bytes for one in activations(experiment))
    else:
        held = state.parameters.device + state.batch.device
        config = experiment.config
        rows = config.train.microbatch // plan.size("batch")
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
            f"{'a step' if training else 'an evaluation'} needs {bytes_text(held + kept)} "
            f"of this machine's memory, which has {bytes_text(has)}: "
            f"{what} take {bytes_text(held)}, and activations {bytes_text(kept)}; "
            "try a smaller model or train.batch, or a higher train.accumulation"
        )


def more_devices(experiment: Experiment) -> str:
    """Name the setting with which more devices share the parameters.

    Returns:
      A setting such as `mesh.fsdp=8`; on a program's own mesh, the axes to make longer.
    """
    plan = experiment.plan
    spec = experiment.config.mesh
    if "fsdp" in plan.mesh.shape:
        return f"mesh.fsdp={2 * plan.mesh.shape['fsdp'] // spec.dcn.fsdp}"
    axes = plan.mesh_axes("embed") or plan.mesh.axis_names
    return f"a mesh with more devices along {' or '.join(map(str, axes))}"


def more_microbatches(experiment: Experiment) -> str:
    """Name the setting with which fewer sequences are on a device at a time.

    Returns:
      A setting such as `train.accumulation=4`, or with stages `pipeline.microbatches=8`; empty
      where the batch does not split into more microbatches.
    """
    train = experiment.config.train
    plan = experiment.plan
    if plan.size("stage") == 1:
        key = "train.accumulation"
        count = train.accumulation
        sequences = train.batch
    else:
        key = "pipeline.microbatches"
        count = plan.pipeline.microbatches
        sequences = train.microbatch
    shards = plan.size("batch")
    more = range(2 * count, sequences + 1, count)
    fitting = next((n for n in more if sequences % (n * shards) == 0), 0)
    return f"{key}={fitting}" if fitting else ""


def _by_memory(tree: Any, away: Any, platform: str) -> BytesByMemory:
    """Count the bytes of a pytree of ShapeDtypeStructs; `away` says of each whether it lies in host
    memory.
    """
    whole = local_bytes(tree)
    flags = jax.tree.leaves(away)
    leaves = jax.tree.leaves(tree)
    host = local_bytes([leaf for leaf, flag in zip(leaves, flags, strict=True) if flag])
    if platform == "cpu":
        return BytesByMemory(whole)
    return BytesByMemory(whole - host, host)


def _local_entries(shape: tuple[int, ...], axes: Axes, plan: Plan) -> int:
    """Count the entries of one device's part of a parameter's gradient or moment."""
    return math.prod(plan.sharding(state_axes(axes), shape).shard_shape(shape))


def _update_bytes(experiment: Experiment) -> int:
    """Count the bytes that the update needs besides the state: the float32 state of one layer, and
    the state of the tables.

    A state that stays on the device, or that the host updates, needs none there.
    """
    state = experiment.state
    model = experiment.model
    plan = experiment.plan
    if not plan.streams:
        return 0

    def entries_of(leaf: Shape) -> tuple[int, ...]:
        return leaf.sharding.shard_shape(leaf.shape)

    stacked = _stacked_parts(model.trained(state.params), model)
    rows = jax.tree_util.tree_leaves_with_path(state.opt_state)
    layer = sum(4 * math.prod(entries_of(leaf)[1:]) for path, leaf in rows if _in(stacked, path))
    # All offloaded tables fetch their state and a parameter at once.
    flags = jax.tree.leaves(experiment.in_host.opt_state)
    tables = sum(
        4 * math.prod(entries_of(leaf))
        for (path, leaf), away in zip(rows, flags, strict=True)
        if away and not _in(stacked, path)
    )
    if plan.optimizer == "offload":
        for part, leaves in model.trained(state.params).items():
            if part not in stacked:
                entries = jax.tree.map(
                    lambda leaf, axes: _local_entries(leaf.shape, axes, plan),
                    leaves,
                    model.axes[part],
                )
                tables += 4 * sum(jax.tree.leaves(entries))
    return tables + layer


def _gathered_bytes(trained: Mapping[str, Any], model: AnyModel, plan: Plan) -> int:
    """Count the bytes of new parameters that are gathered beside the old ones, and of the new
    pieces that wait for it, where the state is split further than they are (ZeRO-1).

    A parameter that is updated where it lies takes the old one's place; the result of a gather does
    not, and the compiler gathers all of them before an old one is let go. Where the state streams,
    they go layer by layer, as it does.
    """

    def one(param: Shape, axes: Axes, by_layer: bool) -> int:
        shape = param.sharding.shard_shape(param.shape)
        held = math.prod(shape)
        piece = _local_entries(param.shape, axes, plan)
        if piece == held:
            return 0
        layers = shape[0] if by_layer else 1
        return (held + piece) // layers * param.dtype.itemsize

    streamed = _stacked_parts(trained, model) if plan.streams else set[str]()
    total = 0
    for part, axes in model.trained(model.axes).items():
        gathered = jax.tree.map(partial(one, by_layer=part in streamed), trained[part], axes)
        total += sum(jax.tree.leaves(gathered))
    return total


def _whole_matrix_bytes(experiment: Experiment) -> int:
    """Count the bytes of the matrices that an optimizer such as Muon gathers for its step.

    A stack of matrices is one array of its step, in float32, and the compiler gathers all of it on
    every device; where the state goes layer by layer, so do they.
    """
    count = experiment.optimizer.whole_matrices
    if not count:
        return 0
    model = experiment.model
    trained = model.trained(experiment.state.params)
    streamed = _stacked_parts(trained, model) if experiment.plan.streams else set[str]()
    largest = 0
    for part, axes in model.trained(model.axes).items():
        leaves, structure = jax.tree.flatten(trained[part])
        hidden = structure.flatten_up_to(hidden_matrices(axes))
        for leaf, dims in zip(leaves, hidden, strict=True):
            if dims is not None:
                shape = leaf.shape[1:] if part in streamed else leaf.shape
                largest = max(largest, 4 * math.prod(shape))
    return count * largest


def _stacked_parts(params: Mapping[str, Any], model: AnyModel) -> set[str]:
    """Find the parts of a model that are stacked over its layers, which a streamed update goes
    through one by one.
    """
    axes = model.trained(model.axes)
    return {part for part in params if is_stacked(params[part], axes[part])}


def _in(parts: Container[str], path: KeyPath) -> bool:
    """Return whether an array of an optimizer's state belongs to one of these parts of a model."""
    return any(getattr(key, "key", "") in parts for key in path)


def _gradient_bytes(
    params: Mapping[str, Any],
    model: AnyModel,
    plan: Plan,
    sums: bool,
) -> int:
    """Count the bytes on a device of a microbatch's gradients, in the parameters' dtypes, or of
    their sums.
    """

    def one(param: jax.ShapeDtypeStruct, axes: Axes) -> int:
        width = (gradient_dtype(axes, plan) if sums else param.dtype).itemsize
        return _local_entries(param.shape, axes, plan) * width

    return sum(jax.tree.leaves(jax.tree.map(one, params, model.trained(model.axes))))
