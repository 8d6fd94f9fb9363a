"""A prediction of the bytes of a training step, part by part, from shapes, to stand beside what the
compiler says.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax

from jaxpar.base.console import bytes_text
from jaxpar.base.jax_compat import compiler_message
from jaxpar.base.layout.activation_names import NAMES
from jaxpar.models.parameters import vocab_rows
from jaxpar.parallel.cross_entropy import Tiling, tiling
from jaxpar.train.activations import activations, unnamed_bytes
from jaxpar.train.experiment import Experiment
from jaxpar.train.state_memory import more_devices, more_microbatches, state_bytes
from jaxpar.train.teacher_memory import teacher_bytes


class MemoryPart(NamedTuple):
    """A part of what a step holds, in bytes of one device."""

    name: str
    what: str
    device: int
    host: int = 0


def memory_account(experiment: Experiment, platform: str) -> list[MemoryPart]:
    """Predict the parts of a step from shapes alone, in bytes of one device; the last part is a
    guess.

    What a block works with, the loss and the update do not exist at once, so that the largest
    counts. On the platform `cpu` host memory is the device's own.

    Args:
      experiment: the experiment. Its devices need not be here.
      platform: the platform that it runs on: `cpu`, `cuda` or `tpu`.
    """
    plan = experiment.plan
    state = state_bytes(experiment, platform)
    work = work_bytes(experiment)
    kept = []
    for one in activations(experiment):
        if one.action == "offload" and platform != "cpu":
            away = one.kept_bytes
        else:
            away = 0
        if one.kept_bytes:
            kept.append(
                MemoryPart(
                    one.name,
                    NAMES[one.name].what,
                    one.kept_bytes - away,
                    away,
                )
            )
    if unnamed := unnamed_bytes(experiment):
        kept.append(MemoryPart("no name", "what else the backward is given", unnamed))
    held = sum(part.device for part in kept)
    if work >= state.update - held:
        what = "what a block and the loss work with"
    else:
        what = "what the update works with"
    parts = [
        MemoryPart("parameters", plan.params, *state.parameters),
        MemoryPart("optimizer", f"moments, {plan.moments_text}", *state.optimizer),
        MemoryPart("gradients", "", *state.gradients),
        MemoryPart("batch", "", *state.batch),
        *_of_teacher(experiment),
        *kept,
        MemoryPart("work", f"{what}, a guess", max(work, state.update - held)),
    ]
    if state.host_update:
        parts.append(MemoryPart("host update", "what the host works with", 0, state.host_update))
    return parts


def _of_teacher(experiment: Experiment) -> list[MemoryPart]:
    """List the parameters of a teacher that runs beside, where there is one."""
    size = teacher_bytes(experiment)
    if not size:
        return []
    return [MemoryPart("teacher", "its parameters, beside the training", size)]


def work_bytes(experiment: Experiment) -> int:
    """Guess the bytes of one device that a block's backward or the loss works with, whichever is
    more; the compiler corrects it. 0 for a whole model of one's own, which is not taken apart.

    A block has a gradient of everything that has a name, those named arrays that are not on the
    device, and its weights where they are gathered. The loss has scores of some tokens in float32
    and in the compute dtype, and the gathered vocabulary matrix with its gradient. The lookup has
    the gathered table with its gradient.
    """
    plan = experiment.plan
    if not experiment.model.has_blocks:
        return 0
    blocks = experiment.state.params["blocks"]
    layer = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(blocks))
    if plan.mesh.size > 1:
        gathered = layer * plan.dtype.itemsize // plan.size("mlp")
    else:
        gathered = 0
    named = sum(one.bytes * (1 if one.action == "save" else 2) for one in activations(experiment))
    block = named + gathered
    (tokens, rows, D, (chunks, slices)) = loss_cut(experiment)
    width = plan.dtype.itemsize
    if plan.size("embed") > 1:
        table = rows * D * (width + 4)
    else:
        table = 0
    return max(
        block,
        table,
        (rows * -(-tokens // chunks) * (4 + width) + table) // slices,
    )


class LossCut(NamedTuple):
    """A device's tokens of a microbatch, its part [rows, embed] of the vocabulary matrix, and the
    loss's tiling.
    """

    tokens: int
    rows: int
    embed: int
    tiling: Tiling


def loss_cut(experiment: Experiment) -> LossCut:
    """Compute how the loss divides a microbatch under a plan, in the sizes of one device's part.

    Args:
      experiment: the experiment, whose model has blocks.
    """
    plan = experiment.plan
    # An embedding of one's own need not have a table from which they could be read.
    V = vocab_rows(experiment.config.model)
    D = experiment.config.model.embed
    sequences = experiment.sequences // plan.size("batch")
    tokens = max(
        sequences * experiment.config.data.seq_len // plan.size("seq") // plan.size("stage"),
        1,
    )
    rows = V // plan.size("vocab")
    return LossCut(tokens, rows, D, tiling(tokens, rows, D, plan, plan.loss_mib))


def out_of_memory(
    message: str,
    parts: list[MemoryPart],
    experiment: Experiment,
    has: int,
) -> str:
    """Tell the user in one line of a step that does not fit.

    Args:
      message: what the runtime said.
      parts: what `memory_account` predicted.
      experiment: the experiment that does not fit.
      has: the bytes that a device has; 0 = not known.
    """
    config = experiment.config
    if has:
        where = f"a device has {bytes_text(has)}"
    else:
        where = "what a device has is not known"
    if config.memory.budget:
        budget = "a smaller memory.budget"
    else:
        budget = f"memory.budget={'auto' if has else '14GiB'}"
    other = " or ".join(filter(None, (more_devices(experiment), more_microbatches(experiment))))
    return (
        "out of memory: a step was predicted to take "
        f"{bytes_text(sum(part.device for part in parts))}, {where}; try "
        f"{budget}, which finds what to keep, offload and recompute, "
        f"{other} ({compiler_message(message)[:200]})"
    )
