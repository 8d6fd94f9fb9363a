"""When a step does not fit its device, this says by how much, and what would help most."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from jaxpar.base.console import bytes_text
from jaxpar.base.jax_compat import compiler_message
from jaxpar.base.mesh import MeshSpec
from jaxpar.base.plan import Plan
from jaxpar.base.sharding import LogicalAxis

_STATE = ("parameters", "optimizer", "gradients")
_MOVING = ("activations", "temporaries")
_SIZE = r"([\d.]+)([KMGT]?)"
# XLA:TPU has one message for when it sees before scheduling that nothing will help (its "temporaries" count the
# arguments too), and another for when it has tried.
_MESSAGES = (
    rf"required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)",
    rf"Used {_SIZE} of {_SIZE} hbm",
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class StepSizes:
    """The sizes of a config's training step, for advice in the config's own words."""

    plan: Plan
    mesh: MeshSpec
    """The mesh as the config has it, with sizes inside a slice and between slices."""
    sizes: Mapping[LogicalAxis, int]
    """The sizes for all devices together; `batch` is the number of sequences that are computed together."""
    accumulation: int


def needs_and_has(message: str) -> tuple[int, int] | None:
    """The bytes that a step takes and those that a device has, by a compiler's refusal; None if it names none."""
    for pattern in _MESSAGES:
        if match := re.search(pattern, message):
            return round(float(match[1]) * _UNITS[match[2]]), round(float(match[3]) * _UNITS[match[4]])
    return None


def refusal(message: str, target: str, advise: Callable[[int, int], list[str]] = lambda needs, has: []) -> str:
    """Tell the user of a compiler's refusal in one line.

    Args:
      message: the compiler's message.
      target: the target's name.
      advise: returns what would help, given the bytes that the step needs and those that a device has.
    """
    found = needs_and_has(message)
    if found is None:
        return f"the compiler for {target} refuses this step: {compiler_message(message)}"
    needs, has = found
    over = f"it needs {bytes_text(needs)} a device, {bytes_text(needs - has)} more than its {bytes_text(has)}"
    return "; ".join([f"this step does not fit {target}: {over}", *advise(needs, has)])


def advice(categories: Mapping[str, int], needs: int, has: int, step: StepSizes) -> list[str]:
    """Say what would help a step that does not fit. The largest saving comes first, each with the least it saves.

    Args:
      categories: the bytes a device by category, as in the report.
      needs: the bytes that the step takes in all.
      has: the bytes that a device has.
      step: the sizes of the step.
    """
    state, moving = (sum(categories.get(name, 0) for name in names) for names in (_STATE, _MOVING))
    over = needs - has
    splits = list(_splitting(state, over, step))
    others = []
    if step.plan.size("stage") == 1:
        others = [*_recomputing(categories, step), *_accumulating(moving, over, step)]
    found = sorted([*splits, *others], reverse=True)
    lines = [f"saves about {bytes_text(saved)}{', enough' if saved >= over else ''}: {text}" for saved, text in found]
    if step.plan.size("stage") > 1:
        lines += [f"may help: {text}" for text in _piping(step)]
    elif sum(saved for saved, _ in found) < over:
        pieces = max(_copies_to_split(step), default=1)
        lines.append(_more_chips(state // pieces, moving - sum(saved for saved, _ in others), has, pieces, step))
    return lines


def _more_chips(state: int, moving: int, has: int, copies: int, step: StepSizes) -> str:
    """Say how many times as many chips would be enough: as few as possible, and of those as few along tensor.

    Args:
      state: the bytes a device of parameters, optimizer and gradients once the plan's copies are split.
      moving: the bytes a device of arrays that only tensor splits further.
      has: the bytes that a device has.
      copies: the number of copies that the plan has.
      step: the sizes of the step.
    """
    mesh = step.plan.mesh
    fsdp, tensor = mesh.shape["fsdp"] * copies, mesh.shape["tensor"]
    for times in (2**n for n in range(1, 13)):
        for wider in (2**n for n in range(times.bit_length())):
            if step.sizes["heads"] % (tensor * wider) == 0 and state // times + moving // wider <= has:
                sizes = f"mesh.fsdp={fsdp * times // wider}" + (f" mesh.tensor={tensor * wider}" if wider > 1 else "")
                together = bytes_text(state * mesh.size)
                return f"{times} times the chips ({sizes}): parameters, optimizer and gradients are {together} in all"
    return f"{bytes_text(moving)} of activations do not fit whatever the mesh: shorten the sequences"


_Saving = tuple[int, str]
"""The bytes saved, and the settings that save them."""


def _recomputing(categories: Mapping[str, int], step: StepSizes) -> Iterator[_Saving]:
    kept = categories.get("activations", 0)
    if step.plan.remat == "none" and kept:
        yield kept * 9 // 10, "memory.policy=full (keeps one array a layer)"


def _copies_to_split(step: StepSizes) -> list[int]:
    """The factors by which mesh.fsdp could be larger at the expense of mesh.data."""
    data, fsdp = step.plan.mesh.shape["data"] // step.mesh.dcn.data, step.plan.mesh.shape["fsdp"]
    return [n for n in range(2, data + 1) if data % n == 0 and step.sizes["embed"] % (fsdp * n) == 0]


def _splitting(state: int, over: int, step: StepSizes) -> Iterator[_Saving]:
    """Split the state over devices that now hold copies of it: over as few as are enough, or else over all."""
    copies = _copies_to_split(step)
    if copies and state:
        n = next((n for n in copies if state - state // n >= over), copies[-1])
        shape, slices = step.plan.mesh.shape, step.mesh.dcn
        settings = f"mesh.fsdp={shape['fsdp'] // slices.fsdp * n} mesh.data={shape['data'] // slices.data // n}"
        yield state - state // n, f"{settings} (splits parameters, optimizer and gradients)"


def _fewer_sequences(step: StepSizes) -> list[int]:
    """The numbers that can divide the sequences a device computes together; Domino cuts what is left in two."""
    each = step.sizes["batch"] // step.plan.size("batch")
    return [n for n in range(2, each + 1) if each % (n * step.plan.overlap.parts) == 0]


def _accumulating(moving: int, over: int, step: StepSizes) -> Iterator[_Saving]:
    times = _fewer_sequences(step)
    if times and moving:
        n = next((n for n in times if moving - moving // n >= over), times[-1])
        yield moving - moving // n, f"train.accumulation={step.accumulation * n} ({n} times fewer at a time)"


def _piping(step: StepSizes) -> Iterator[str]:
    """Settings that let a pipeline keep less. What each saves depends on the others, which a rehearsal shows.

    More stages are not among them: they split the state no further than fsdp does, and keep more microbatches.
    """
    pipeline, remat = step.plan.pipeline, step.plan.remat
    name = "interleaved" if pipeline.virtual > 1 else "1f1b"
    if remat != "full":
        yield "memory.policy=full (keeps what goes in, and computes the rest again)"
    if pipeline.stash != "stage":
        yield "pipeline.stash=stage (keeps the input of a stage, and runs its forward once more)"
    if pipeline.schedule not in ("1f1b", "interleaved"):
        fewer = "no gradients of weights wait" if pipeline.schedule == "zb_h1" else "keeps fewer microbatches at a time"
        yield f"pipeline.schedule={name} ({fewer})"
    if times := _fewer_sequences(step):
        yield f"pipeline.microbatches={pipeline.microbatches * times[0]} ({times[0]} times fewer sequences in each)"
