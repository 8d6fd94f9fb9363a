"""`jaxpar bench pipeline`: the step in every schedule, with more and more microbatches, compiled for a target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, get_args

from jaxpar.base.config import Config
from jaxpar.base.errors import UserError
from jaxpar.base.plan import Schedule
from jaxpar.parallel.pipeline import schedule
from jaxpar.parallel.pipeline.simulator import simulate_schedule
from jaxpar.plan import resolve
from jaxpar.rehearse.of_config import compile_step
from jaxpar.rehearse.simulate import simulate
from jaxpar.rehearse.targets import Target, check_mesh
from jaxpar.train.plans import make_plan

_TIMES = (2, 4, 16)  # microbatches a stage


class ScheduleRow(NamedTuple):
    """One compiled step.

    Attributes:
      schedule, virtual, microbatches: of the pipeline.
      ticks: of the schedule.
      bubble: idle share, a backward taken as twice a forward.
      temporaries: bytes of a device, `temp_size_in_bytes`.
      peak: bytes of a device in use at most, less the arguments'; 0 where the compiler does not say.
      seconds: of a step, played.
      tokens_per_second: of all devices.
    """

    schedule: Schedule
    virtual: int
    microbatches: int
    ticks: int
    bubble: float
    temporaries: int
    peak: int
    seconds: float
    tokens_per_second: float


def compare_schedules(
    config: Config, target: Target, say: Callable[[str], None] = lambda line: None
) -> list[ScheduleRow]:
    """Every schedule with two to sixteen microbatches a stage, each of as many sequences as the config's.

    Args:
      config: an experiment with stages whose mesh fits the target; interleaved and looped take its chunks, or 2.
      target: from `load_target`.
      say: called with a line for each.

    Raises:
      UserError: a config without stages, or what `compile_step` refuses.
    """
    check_mesh(config.mesh, target)
    plan = make_plan(config, target.devices())
    stages, given = plan.size("stage"), plan.pipeline
    if stages == 1:
        raise UserError("bench pipeline compares schedules of a config with stages: try --mesh.stage 4")
    rows_each = config.train.batch // config.train.accumulation // given.microbatches
    chunks, found = max(given.virtual, 2), []
    layers = config.model.layers
    divided = layers % (stages * chunks) == 0
    if not divided:
        say(f"without interleaved and looped: {stages} stages x {chunks} do not divide model.layers={layers}")
    for name in get_args(Schedule):
        virtual = chunks if name in ("interleaved", "looped") else 1
        if virtual > 1 and not divided:
            continue
        for M in (times * stages for times in _TIMES):
            pipeline = dataclasses.replace(given, schedule=name, microbatches=M, virtual=virtual, layers=())
            train = dataclasses.replace(config.train, batch=rows_each * M, accumulation=1)
            found.append(_row(dataclasses.replace(config, pipeline=pipeline, train=train), target, stages))
            say(_line(found[-1]))
    return found


def _row(config: Config, target: Target, stages: int) -> ScheduleRow:
    compiled, pipeline = compile_step(resolve(config, target), target).compiled, config.pipeline
    stats, seconds = compiled.stats, simulate(compiled.text, compiled.mesh, target).timeline.seconds
    table = schedule(pipeline.schedule, stages, pipeline.microbatches, pipeline.virtual)
    peak = getattr(stats, "peak_memory_in_bytes", 0)
    return ScheduleRow(
        pipeline.schedule, pipeline.virtual, pipeline.microbatches, len(table.ticks), simulate_schedule(table).bubble,
        stats.temp_size_in_bytes, peak - stats.argument_size_in_bytes if peak else 0, seconds,
        config.train.batch * config.data.seq_len / seconds,
    )  # fmt: skip


def schedules_table(rows: Sequence[ScheduleRow]) -> str:
    """A Markdown table."""
    head = (
        "schedule", "microbatches", "ticks", "bubble", "temporaries, GiB", "peak less arguments", "step, s", "tokens/s",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *map(_line, rows)])


def _line(row: ScheduleRow) -> str:
    name = row.schedule + (f", {row.virtual} chunks" if row.virtual > 1 else "")
    peak = f"{row.peak / 2**30:.2f}" if row.peak else ""
    cells = [name, str(row.microbatches), str(row.ticks), f"{100 * row.bubble:.1f} %"]
    cells += [f"{row.temporaries / 2**30:.2f}", peak, f"{row.seconds:.3f}", f"{row.tokens_per_second:,.0f}"]
    return "| " + " | ".join(cells) + " |"
