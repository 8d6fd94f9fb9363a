"""A step that does not fit its device: by how much, and what would help most."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.base.config import Config
from jaxpar.base.console import bytes_text
from jaxpar.base.jax_compat import compiler_said
from jaxpar.base.plan import Plan
from jaxpar.models import Model
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.pipeline.layers import layers_of
from jaxpar.parallel.pipeline.program import program
from jaxpar.parallel.pipeline.schedules import schedule
from jaxpar.parallel.pipeline.stage import LayerContext, Recipe, Stack

_STATE = ("parameters", "optimizer", "gradients")
_MOVING = ("activations", "temporaries")
_SIZE = r"([\d.]+)([KMGT]?)"
# XLA:TPU speaks in one way when it sees before scheduling that nothing will help (its "temporaries" count the arguments
# too), in another when it has tried.
_MESSAGES = (
    rf"required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)",
    rf"Used {_SIZE} of {_SIZE} hbm",
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def needs_and_has(message: str) -> tuple[int, int] | None:
    """Bytes that a step takes and bytes that a device has, from what a compiler says as it refuses; else None."""
    for pattern in _MESSAGES:
        if match := re.search(pattern, message):
            return round(float(match[1]) * _UNITS[match[2]]), round(float(match[3]) * _UNITS[match[4]])
    return None


def refusal(message: str, target: str, config: Config, plan: Plan, parameters: int, optimizer: int) -> str:
    """What to tell the user of a compiler's refusal, in a line.

    Args:
      message: the compiler's.
      target: its name.
      config: the experiment.
      plan: mesh and rules.
      parameters, optimizer: bytes a device.
    """
    found = needs_and_has(message)
    if found is None:
        return f"the compiler for {target} refuses this step: {compiler_said(message)}"
    needs, has = found
    rest = max(needs - 2 * parameters - optimizer, 0)
    categories = {"parameters": parameters, "optimizer": optimizer, "gradients": parameters, "activations": rest}
    lines = advice(categories, needs, has, config, plan)
    return (
        f"this {config.model.family} does not fit {target}: a step needs {bytes_text(needs)} a device, "
        f"{bytes_text(needs - has)} more than its {bytes_text(has)}; {'; '.join(lines)}"
    )


def advice(categories: Mapping[str, int], needs: int, has: int, config: Config, plan: Plan) -> list[str]:
    """What would help a step that does not fit, most first, each with what it saves at the least.

    Args:
      categories: bytes a device, as in the report.
      needs: all of them.
      has: bytes of a device.
      config: the experiment.
      plan: mesh and rules.
    """
    state, moving = (sum(categories.get(name, 0) for name in names) for names in (_STATE, _MOVING))
    over = needs - has
    copies = _copies_to_split(config, plan)
    here = [*_splitting(state, over, copies, config, plan)]
    if plan.size("stage") > 1:
        here += _piping(moving, over, config, plan)
    else:
        here += [*_recomputing(categories, config), *_accumulating(moving, over, config, plan)]
    here.sort(key=lambda change: -change[0])
    lines = [f"saves about {bytes_text(saved)}{', enough' if saved >= over else ''}: {text}" for saved, text in here]
    if sum(saved for saved, _ in here) >= over:
        return lines
    pieces = max(copies, default=1)
    left = moving - sum(saved for saved, text in here if "mesh.fsdp" not in text)
    return [*lines, _more_chips(state // pieces, left, has, pieces, config, plan)]


def _more_chips(state: int, moving: int, has: int, copies: int, config: Config, plan: Plan) -> str:
    """How many times the chips would do, as few as can be, and of those as few as can be along tensor.

    Args:
      state: bytes a device of parameters, optimizer and gradients once the plan's copies are split.
      moving: bytes a device of what along tensor only is split further.
      has: bytes of a device.
      copies: how many the plan has.
      config: the experiment.
      plan: mesh and rules.
    """
    fsdp, tensor = plan.mesh.shape["fsdp"] * copies, plan.mesh.shape["tensor"]
    for times in (2**n for n in range(1, 13)):
        for wider in (2**n for n in range(times.bit_length())):
            if config.model.heads % (tensor * wider) == 0 and state // times + moving // wider <= has:
                sizes = f"mesh.fsdp {fsdp * times // wider}" + (f" x mesh.tensor {tensor * wider}" if wider > 1 else "")
                together = bytes_text(state * plan.mesh.size)
                return f"{times} times the chips ({sizes}): parameters, optimizer and gradients are {together} in all"
    return f"{bytes_text(moving)} of activations do not fit whatever the mesh: shorten the sequences"


def _recomputing(categories: Mapping[str, int], config: Config) -> Iterator[tuple[int, str]]:
    kept = categories.get("activations", 0)
    if config.memory.policy == "none" and kept:
        yield kept * 9 // 10, "--memory.policy full (keeps one array a layer)"


def _copies_to_split(config: Config, plan: Plan) -> list[int]:
    """How many times larger mesh.fsdp could be at the expense of mesh.data."""
    data, fsdp = plan.mesh.shape["data"] // config.mesh.dcn.data, plan.mesh.shape["fsdp"]
    return [n for n in range(2, data + 1) if data % n == 0 and config.model.embed % (fsdp * n) == 0]


def _splitting(state: int, over: int, copies: list[int], config: Config, plan: Plan) -> Iterator[tuple[int, str]]:
    """Devices that hold copies of the state made to hold parts of it: as few as are enough, else all there are."""
    if copies and state:
        n = next((n for n in copies if state - state // n >= over), copies[-1])
        fsdp, data = (plan.mesh.shape[axis] // getattr(config.mesh.dcn, axis) for axis in ("fsdp", "data"))
        flags = f"--mesh.fsdp {fsdp * n} --mesh.data {data // n}"
        yield state - state // n, f"{flags} (splits parameters, optimizer and gradients)"


def _accumulating(moving: int, over: int, config: Config, plan: Plan) -> Iterator[tuple[int, str]]:
    """Fewer sequences at a time."""
    each = config.train.batch // config.train.accumulation // plan.size("batch")
    times = [n for n in range(2, each + 1) if each % (n * plan.overlap.parts) == 0]  # Domino cuts what is left in two
    if times and moving:
        n = next((n for n in times if moving - moving // n >= over), times[-1])
        yield moving - moving // n, f"--train.accumulation {config.train.accumulation * n} ({n} times fewer at a time)"


def _piping(moving: int, over: int, config: Config, plan: Plan) -> Iterator[tuple[int, str]]:
    """What lets a pipeline keep less, each beside those before it, so that what they save adds up.

    More stages are not among it: they split the state no further than fsdp does, and keep more microbatches.
    """
    now = plan.pipeline
    name = "interleaved" if now.virtual > 1 else "1f1b"
    fewer = "no gradients of weights wait" if now.schedule == "zb_h1" else "keeps fewer microbatches at a time"
    changes: list[tuple[dict[str, Any], str]] = [
        ({"remat": "full"}, "--memory.policy full (keeps what goes in, and computes the rest again)"),
        ({"stash": "stage"}, "--pipeline.stash stage (keeps the input of a stage, and runs its forward once more)"),
        ({"schedule": name}, f"--pipeline.schedule {name} ({fewer})"),
    ]
    for change, text in changes:
        less = _changed(plan, change)
        saved = min(_held(config, plan) - _held(config, less), moving)
        if saved > 0:
            yield saved, text
            plan, moving, over = less, moving - saved, over - saved
    held, each = min(_held(config, plan), moving), config.train.batch // config.train.accumulation
    each = each // now.microbatches // plan.size("batch")
    times = [n for n in range(2, each + 1) if each % (n * plan.overlap.parts) == 0]
    if not times or not moving:
        return

    def saving(n: int) -> int:
        left = min(_held(config, _changed(plan, {"microbatches": now.microbatches * n})), held)
        return held - left + (moving - held) * (n - 1) // n

    n = next((n for n in times if saving(n) >= over), times[-1])
    yield saving(n), f"--pipeline.microbatches {now.microbatches * n} ({n} times fewer sequences in each)"


def _changed(plan: Plan, change: dict[str, Any]) -> Plan:
    """A plan with `remat`, or a field of its pipeline, another."""
    return replace(plan, **change) if "remat" in change else replace(plan, pipeline=replace(plan.pipeline, **change))


def _held(config: Config, plan: Plan) -> int:
    """Bytes that a device holds from tick to tick for a backward to come, if all arrays are split over all devices."""
    model, pipeline, stages = config.model, plan.pipeline, plan.size("stage")
    steps = program(schedule(pipeline.schedule, stages, pipeline.microbatches, pipeline.virtual))
    places = layers_of(model.layers, stages, pipeline).places
    rows = config.train.batch // config.train.accumulation // pipeline.microbatches
    x = jax.ShapeDtypeStruct((rows, config.data.seq_len, model.embed), plan.dtype)
    kept, waits = _bytes(x), 0
    by_stage = plan.recomputes and pipeline.stash == "stage"
    if steps.waiting or not by_stage:
        recipe = _recipe(config, plan, x, steps.waiting > 0, not by_stage)
        kept = kept if by_stage else places * _bytes(*recipe.kept.shapes)
        waits = places * _bytes(*recipe.parts.needed) if recipe.parts else 0
    messages = (steps.inbox + steps.cotangents) * _bytes(x)
    return (steps.stash * kept + steps.waiting * waits + messages) // (plan.mesh.size // stages)


def _recipe(config: Config, plan: Plan, x: jax.ShapeDtypeStruct, waits: bool, stashed: bool) -> Recipe:
    """What a layer of the pipeline keeps; arguments as for `Stack.prepare`."""
    model, parts = Model(config.model), plan.overlap.parts
    found: list[Recipe] = []

    def prepare(weights: Any) -> int:
        positions = jnp.zeros((x.shape[0] // parts, x.shape[1]), jnp.int32)
        added = RouterSums(*jnp.zeros(3)) if config.model.experts else None
        layers = Stack(model, plan, weights, lambda *_: LayerContext([(positions, None)] * parts, None, None), 1, added)
        layers.prepare(x, waits, stashed)
        found.append(layers.recipe)
        return 0

    jax.eval_shape(prepare, model.shapes()["blocks"])
    return found[0]


def _bytes(*shapes: Any) -> int:
    return sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in shapes)
