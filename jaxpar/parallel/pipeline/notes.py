"""What a user should know of the pipeline they asked for: lines for the log."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from jaxpar.base.config import Config
from jaxpar.base.hardware import hardware_of
from jaxpar.base.plan import Plan
from jaxpar.base.runtime import memory_of
from jaxpar.parallel.pipeline.layers import layers_in
from jaxpar.parallel.pipeline.schedules import schedule
from jaxpar.parallel.pipeline.simulator import Times, simulate_schedule

_MOMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / 32}  # int8: a scale for 32 values at least
_ROOM = 0.8  # of a device's memory, for state and block inputs; the rest is for what one layer and the loss need
_LONG = 0.25  # an idle share worth a word


def pipeline_notes(config: Config, plan: Plan, parameters: int) -> list[str]:
    """The schedule in figures, and what speaks against it: idle stages, layers that do not divide, an fsdp that would
    do. A backward is taken as twice a forward, and one more each for recomputing blocks and the stage.

    Args:
      config: the experiment.
      plan: from `jaxpar.train.plans.make_plan`, with or without stages.
      parameters: of the model.
    """
    pipeline, P = plan.pipeline, plan.size("stage")
    layers = layers_in(plan, config.model.layers)
    if layers is None:
        return _without_stages(config)
    M, v = pipeline.microbatches, pipeline.virtual
    table = schedule(pipeline.schedule, P, M, v)
    again = (1 + (pipeline.stash == "stage")) * plan.recomputes
    found = simulate_schedule(table, Times(1.0, 2.0 + again, 1.0))
    idle = 100 * found.bubble
    kept = f"keeps {max(found.stash)} input{'s' if max(found.stash) > 1 else ''} at most"
    sizes = f"{pipeline.schedule}, {P} stages, {M} microbatches"
    notes = [f"pipeline: {sizes}: {len(table.ticks)} ticks, idle {idle:.0f} %, a stage {kept}"]
    if min(layers.counts) < layers.places:
        notes.append(
            f"virtual stages have {', '.join(map(str, layers.counts))} layers: each tick lasts as long as the largest, "
            f"{layers.places}, on all of them"
        )
    if pipeline.schedule == "interleaved" and v == 1:
        notes.append("interleaved with one virtual stage is 1f1b: try --pipeline.virtual 2")
    if config.train.accumulation > 1:
        notes.append(
            f"the pipeline fills and drains {config.train.accumulation} times a step: train.accumulation 1 and "
            f"--pipeline.microbatches {M * config.train.accumulation} would once"
        )
    if found.bubble >= _LONG:
        notes.append(_if_idle(config, plan, parameters, idle))
    return notes


def _without_stages(config: Config) -> list[str]:
    """Settings of a pipeline in a plan that has none."""
    asked = [name for name in ("microbatches", "layers") if getattr(config.pipeline, name)]
    asked += ["virtual"] if config.pipeline.virtual > 1 else []
    words = " and ".join(f"pipeline.{name}" for name in asked)
    return [f"{words} {'do' if len(asked) > 1 else 'does'} nothing: mesh.stage is 1"] if asked else []


def _if_idle(config: Config, plan: Plan, parameters: int, idle: float) -> str:
    """What to do about a long bubble: no pipeline, if the plan fits without; else more microbatches."""
    P, M, fsdp = plan.size("stage"), plan.pipeline.microbatches, plan.mesh.shape["fsdp"]
    said = f"a pipeline of {P} with {M} microbatches idles {idle:.0f} %"
    needed, there = _bytes_by_fsdp(config, plan, parameters), _memory(plan)
    rows = config.train.batch // config.train.accumulation
    if there and needed < _ROOM * there and rows % (plan.size("batch") * P) == 0 and config.mesh.dcn.stage == 1:
        return (
            f"fsdp alone fits: about {needed / 2**30:.1f} of {there / 2**30:.0f} GiB a device with --mesh.stage 1 "
            f"--mesh.fsdp {fsdp * P} and memory.policy full; {said}"
        )
    more = simulate_schedule(schedule(plan.pipeline.schedule, P, 4 * P, plan.pipeline.virtual)).bubble
    return f"{said}; with {4 * P} it would {100 * more:.0f} %: try --pipeline.microbatches {4 * P} and a batch for it"


def _bytes_by_fsdp(config: Config, plan: Plan, parameters: int) -> float:
    """State and block inputs of a device where the stages' devices split parameters and batch instead."""
    devices = math.prod(plan.mesh.shape[axis] for axis in ("stage", "fsdp", "tensor"))
    rows = config.train.batch // config.train.accumulation / (plan.size("batch") * plan.size("stage"))
    tokens = rows * config.data.seq_len / plan.size("residual_seq")
    inputs = tokens * config.model.embed * plan.dtype.itemsize * config.model.layers
    return _state_bytes(config, plan, parameters) / devices + inputs


def _state_bytes(config: Config, plan: Plan, parameters: int) -> float:
    """Parameters, gradients and moments on all devices together, as the plan stores them and where, without stages."""
    model, width = config.model, jnp.dtype(plan.params).itemsize
    tables = model.vocab_size * model.embed * (1 if model.tied_head else 2)
    here = tables if plan.parameters == "offload" else parameters
    # A microbatch's gradients are added to sums; the layers' are made in host memory where there is one microbatch.
    several = config.train.accumulation > 1
    gradients = parameters * (width + jnp.dtype(plan.gradients).itemsize) if several else here * width
    moments = 0 if plan.optimizer == "offload" else 2 * parameters * _MOMENT_BYTES[plan.moments]
    return here * width + gradients + moments


def _memory(plan: Plan) -> int:
    """Of a device, 0 where nothing says."""
    device: Any = plan.mesh.devices.flat[0]
    known = hardware_of(device.device_kind)
    return known.hbm_bytes if known is not None and known.hbm_bytes else memory_of(device)
