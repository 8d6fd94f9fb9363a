"""`jaxpar bench pipeline` compiles the step for a target in every schedule, with more and more microbatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import get_args

from jaxpar.base.config import Config
from jaxpar.base.errors import UserError
from jaxpar.base.plan import Schedule
from jaxpar.bench.alternate import Row
from jaxpar.parallel.pipeline import schedule
from jaxpar.parallel.pipeline.simulator import simulate_schedule
from jaxpar.plan import resolve
from jaxpar.rehearse.of_config import compile_step
from jaxpar.rehearse.simulate import simulate
from jaxpar.rehearse.targets import Target, check_mesh
from jaxpar.train.plans import make_plan

_TIMES = (2, 4, 16)  # how many microbatches there are for each stage


def compare_schedules(config: Config, target: Target, say: Callable[[str], None] = lambda line: None) -> list[Row]:
    """Give a row for every schedule with 2 to 16 microbatches a stage, each of as many sequences as the config's.

    The config's mesh must have stages and fit the target. Interleaved and looped schedules take its chunks, or else 2.

    Raises:
      UserError: the config has no stages, or `compile_step` refuses it.
    """
    check_mesh(config.mesh, target)
    plan = make_plan(config, target.devices())
    stages, given = plan.size("stage"), plan.pipeline
    if stages == 1:
        raise UserError("bench pipeline compares schedules of a config with stages: try mesh.stage=4")
    rows_each = config.train.batch // config.train.accumulation // given.microbatches
    chunks, rows = max(given.virtual, 2), []
    layers = config.model.layers
    divided = layers % (stages * chunks) == 0
    if not divided:
        say(f"without interleaved and looped: {stages} stages x {chunks} do not divide model.layers={layers}")
    for name in get_args(Schedule):
        virtual = chunks if name in ("interleaved", "looped") else 1
        if virtual > 1 and not divided:
            continue
        for M in (times * stages for times in _TIMES):
            say(f"{name}, {M} microbatches")
            pipeline = dataclasses.replace(given, schedule=name, microbatches=M, virtual=virtual, layers=())
            train = dataclasses.replace(config.train, batch=rows_each * M, accumulation=1)
            rows.append(_row(dataclasses.replace(config, pipeline=pipeline, train=train), target, stages))
    return rows


def _row(config: Config, target: Target, stages: int) -> Row:
    """The row of one compiled step: bytes on a device, the idle share of a stage in the schedule, seconds as played."""
    compiled, pipeline = compile_step(resolve(config, target), target).compiled, config.pipeline
    stats, seconds = compiled.stats, simulate(compiled.text, compiled.mesh, target).timeline.seconds
    table = schedule(pipeline.schedule, stages, pipeline.microbatches, pipeline.virtual)
    peak = getattr(stats, "peak_memory_in_bytes", 0)  # 0 where the compiler does not say
    chunks = f", {pipeline.virtual} chunks" if pipeline.virtual > 1 else ""
    return {
        "schedule": pipeline.schedule + chunks, "microbatches": pipeline.microbatches, "ticks": len(table.ticks),
        "bubble, %": 100 * simulate_schedule(table).bubble, "temporaries, GiB": stats.temp_size_in_bytes / 2**30,
        "peak less arguments, GiB": (peak - stats.argument_size_in_bytes) / 2**30 if peak else None,
        "step, s": seconds, "tokens/s": config.train.batch * config.data.seq_len / seconds,
    }  # fmt: skip
