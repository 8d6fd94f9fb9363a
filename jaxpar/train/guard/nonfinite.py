"""Looks once more at a step whose loss, gradients or update were not finite: what is the first not
to be finite in it, and whether a device, the batch or the computation is at fault.

The first is found in the step's own order, with the weights that it had: the weights themselves and
the batch, then each named activation of each layer, the loss, and the gradient of each parameter,
last layer first. Nothing of the state is changed. Then the step is run again (`look_again`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.base.errors import UserError
from jaxpar.base.jax_compat import compiler_message
from jaxpar.base.layout.sharding import PyTree, path_name
from jaxpar.hlo.collective_order import require_order
from jaxpar.models import Model, Params
from jaxpar.parallel.cross_entropy import LossSums
from jaxpar.parallel.host_memory import on_device
from jaxpar.parallel.pipeline import stored_order
from jaxpar.train.batch import cut_microbatches
from jaxpar.train.experiment import Experiment
from jaxpar.train.guard.failures import StepNumbers
from jaxpar.train.guard.layer_by_layer import Batch, Forward
from jaxpar.train.guard.named_counts import count_nonfinite, count_true
from jaxpar.train.state import TrainState
from jaxpar.train.step import dropout_key, gradients

Program = Callable[[TrainState[jax.Array], Batch], Any]
"""The compiled training step: state and batch to state and metrics."""
_PARTS = ("embed", "blocks", "head")


def first_nonfinite(experiment: Experiment, state: TrainState[jax.Array], batch: Batch) -> str:
    """Look at a step once more, and name what is the first in it not to be finite.

    All processes must call this.

    Args:
      experiment: what is trained.
      state: the state as it was before the step, its number too.
      batch: the step's batch, on the mesh.

    Returns:
      What to say of it: where a look was not possible too, and where all is finite now.
    """
    looks = (_weights, _batch, _activations, _gradients)
    missed = []
    for look in looks:
        try:
            said = look(experiment, state, batch)
        except (jax.errors.JaxRuntimeError, UserError) as error:
            name = look.__name__.strip("_")
            missed.append(f"its {name} could not be looked at ({compiler_message(str(error))})")
            continue
        if said:
            return "; ".join([*missed, said])
    if not isinstance(experiment.model, Model):
        missed.append("the activations of a whole model of one's own have no names")
    return "; ".join([*missed, "looked at once more, all that it computes is finite"])


class _Place(NamedTuple):
    """A parameter or its gradient, or the slice of one layer, and how many of its entries are not
    finite.
    """

    name: str
    layer: int | None
    entries: int

    @property
    def text(self) -> str:
        """What a message calls it."""
        if self.layer is None:
            return self.name
        return f"{self.name} of layer {self.layer}"


def _places(experiment: Experiment, counts: Params) -> list[_Place]:
    """List where counts of `_count_by_layer` are not 0, in the order of the forward pass."""
    model = experiment.model
    order = stored_order(experiment.plan, model.config.layers)
    if isinstance(model, Model):
        declared = {name: place for place, name in enumerate(model.parameter_names())}
    else:
        declared = {}
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(counts)):
        if not np.ndim(leaf):
            if leaf:
                found.append(_Place(path_name(path), None, int(leaf)))
            continue
        for index in np.flatnonzero(leaf):
            layer = int(index) if order is None else order[index]
            found.append(_Place(path_name(path), layer, int(leaf[index])))

    def key(place: _Place) -> tuple[int, int, int]:
        part = place.name.partition(".")[0]
        number = _PARTS.index(part) if part in _PARTS else 0
        return number, place.layer or 0, declared.get(place.name, 0)

    return sorted(found, key=key)


def _count_by_layer(x: jax.Array, axes: Any) -> jax.Array:
    """Count what is not finite, [layers] for an array that is stacked over them."""
    x = on_device(x)
    stacked = axes[:1] == ("layers",)
    return count_true(~jnp.isfinite(x), range(int(stacked), x.ndim))


def _weights(experiment: Experiment, state: TrainState[jax.Array], batch: Batch) -> str:
    """Name the first parameter, or array of the optimizer's state, that is not finite itself."""
    axes = experiment.model.axes
    counts = jax.jit(lambda params: jax.tree.map(_count_by_layer, params, axes))(state.params)
    apart = "and no computation of this step made it so"
    if places := _places(experiment, counts):
        first = places[0]
        where = f"{first.text} is not finite itself, in {first.entries:,} entries"
        return f"the parameter {where}, {apart}"
    count_of = jax.jit(lambda x: count_nonfinite(on_device(x)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        count = int(count_of(leaf))
        if count:
            name = path_name(path)
            return f"{name} of the optimizer is not finite itself, in {count:,} entries, {apart}"
    return ""


def _batch(experiment: Experiment, state: TrainState[jax.Array], batch: Batch) -> str:
    """Say what is wrong with a batch: ids that are none, numbers that are not finite, no label."""
    vocab = experiment.config.model.vocab_size

    def look(batch: Batch) -> dict[str, jax.Array]:
        found = {
            name: count_nonfinite(x)
            for name, x in batch.items()
            if jnp.issubdtype(x.dtype, jnp.floating)
        }
        tokens = batch["tokens"]
        found["tokens"] = jnp.sum((tokens < 0) | (tokens >= vocab))
        found["labels"] = jnp.sum(batch["labels"] >= vocab)
        found["that count"] = jnp.sum(batch["labels"] >= 0)
        return found

    read = jax.device_get(jax.jit(look)(dict(batch)))
    counts = {name: int(count) for name, count in read.items()}
    if not counts.pop("that count"):
        return "no label of the batch counts, and the mean of no losses is no number"
    for name, count in counts.items():
        if count and name in ("tokens", "labels"):
            return f"{count:,} {name} of the batch are no ids of the vocabulary, 0 to {vocab - 1}"
        if count:
            return f"{name} of the batch is not finite, in {count:,} entries"
    return ""


def _activations(experiment: Experiment, state: TrainState[jax.Array], batch: Batch) -> str:
    """Name the first activation that is not finite, and its layer, or the loss."""
    model = experiment.model
    if not isinstance(model, Model):
        return ""
    accumulation = experiment.config.train.accumulation
    key = dropout_key(experiment.config, state.step)
    forward = Forward(experiment, model)
    if accumulation == 1:
        return forward.first_nonfinite(state.params, batch, key)
    plan = experiment.plan
    cut = jax.jit(lambda batch: cut_microbatches(batch, accumulation, plan))(dict(batch))
    for number in range(accumulation):
        rows = jax.tree.map(lambda x, number=number: x[number], cut)
        own_key = None if key is None else jax.random.fold_in(key, number)
        if said := forward.first_nonfinite(state.params, rows, own_key):
            return f"{said}, of microbatch {number + 1} of {accumulation}"
    return ""


def _gradients(experiment: Experiment, state: TrainState[jax.Array], batch: Batch) -> str:
    """Name the first gradient that is not finite, in the order of the backward pass, or that is too
    large for the sum of squares."""
    config = experiment.config
    model = experiment.model
    trained_axes = model.trained(model.axes)

    def look(params: Params, batch: Batch, step: jax.Array) -> tuple[LossSums, PyTree, PyTree]:
        key = dropout_key(config, step)
        sums, grads = gradients(experiment, params, batch, key)
        counts = jax.tree.map(_count_by_layer, grads, trained_axes)
        largest = jax.tree.map(lambda x: jnp.max(jnp.abs(on_device(x))), grads)
        return sums, counts, largest

    options = experiment.compiler_options
    arguments = (state.params, dict(batch), state.step)
    program = jax.jit(look, compiler_options=options).lower(*arguments).compile()
    require_order(program, experiment.devices)
    sums, counts, largest = program(*arguments)
    if places := _places(experiment, counts):
        first = places[-1]
        return (
            "the activations are finite, and the first gradient of the backward pass that is not "
            f"is that of {first.text}, in {first.entries:,} entries"
        )
    sizes = [
        (float(size), path_name(path))
        for path, size in jax.tree_util.tree_leaves_with_path(jax.device_get(largest))
    ]
    size, name = max(sizes)
    squares = np.square(np.float32(size) / np.float32(sums.tokens))
    if not np.isfinite(squares):
        return f"all gradients are finite, and their squares are not: that of {name} has {size:.2g}"
    if not np.isfinite(sums.nll):
        return "the loss of the whole batch is not finite, and that of its parts is"
    return ""


def look_again(
    experiment: Experiment,
    program: Program,
    state: TrainState[jax.Array],
    batches: Iterator[Batch],
    row: StepNumbers,
    finite_since: int,
) -> str:
    """Look for what was not finite in a step, and run it again, on its batch and on the next.

    All processes must call this together. It uses the state up, which is not the run's any more.

    Args:
      experiment: what is trained.
      program: its compiled step.
      state: the state that the step has left as it was.
      batches: gives the step's batch and then the one after it, on the mesh.
      row: the step's numbers, read.
      finite_since: how many finite steps have changed the weights since.

    Returns:
      What to say of it.
    """
    before = row.step - 1
    at_step = jax.make_array_from_callback((), state.step.sharding, lambda _: np.int32(before))
    state = state._replace(step=at_step)
    batch = next(batches)
    said = first_nonfinite(experiment, state, batch)
    state, metrics = program(state, batch)
    again = _read(row.step, metrics)
    another = None
    if not again.finite:
        state, metrics = program(state, next(batches))
        another = _read(row.step + 1, metrics)
    return f"{said}; {verdict(row, again, another, finite_since)}"


def _read(step: int, metrics: Mapping[str, jax.Array]) -> StepNumbers:
    return jax.device_get(StepNumbers.of(step, metrics))


def same_numbers(one: StepNumbers, other: StepNumbers) -> bool:
    """Whether two steps, whose numbers have been read, say the same of themselves; NaN is NaN."""
    first = np.asarray((one.loss, one.norm, one.overflows), np.float64)
    second = np.asarray((other.loss, other.norm, other.overflows), np.float64)
    return bool(np.array_equal(first, second, equal_nan=True))


def verdict(
    before: StepNumbers, again: StepNumbers, another: StepNumbers | None, moved: int
) -> str:
    """Return what to say of a step that was run again, and of the next batch's.

    Args:
      before: the numbers of the step that was not finite.
      again: those of the same step on the same batch, run once more.
      another: those of the step on the batch after it; None = `again` was finite, so that it was
        not run.
      moved: how many steps had changed the weights since; with 0 they are those of the step.

    Returns:
      A clause that begins with `transient`, `data` or `persistent`.
    """
    if moved and again.finite:
        return (
            f"transient, as it seems: the steps after it were finite ({moved}), and with the "
            "weights that they left so is this one: a device is suspected"
        )
    if again.finite:
        return (
            "transient: run again on the same batch it is finite, so that a device is suspected "
            "(train.check_replicas compares copies)"
        )
    if not moved and not same_numbers(before, again):
        return (
            f"transient: run again on the same batch it has loss {again.loss} and gradient norm "
            f"{again.norm}, so that a device is suspected"
        )
    if another is not None and another.finite:
        return "data: run again it is the same, and finite on the next batch"
    return "persistent: run again it is the same, and on the next batch it is not finite either"
