"""`jaxpar bench`: the words of each comparison, and what it prints; a `bench_*` module does the measuring."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from jaxpar.base.config import check
from jaxpar.base.console import check_folders, console
from jaxpar.base.errors import UserError
from jaxpar.cli.arguments import Overrides, config_args, parse
from jaxpar.rehearse.targets import Target, load_target


@dataclass(frozen=True)
class StepBenchArgs:
    """The training step against another implementation of it, alternating in one run."""

    config: Overrides
    rounds: int = 15
    """Alternations; the ratio's quartiles are over these."""
    calls: int = 10
    """Steps of each in a round."""


@dataclass(frozen=True)
class RehearseBenchArgs:
    """Predicted against measured training steps of many shapes, on one device of this machine."""

    picture: str = ""
    """Where to draw predicted against measured (PNG)."""


@dataclass(frozen=True)
class OverlapBenchArgs:
    """A block in each form of overlap, rehearsed for a target."""

    config: Overrides
    target: str = ""
    """The hardware, as for `jaxpar rehearse`."""
    step: bool = False
    """Rehearse the whole step too, not a block alone."""


@dataclass(frozen=True)
class PipelineBenchArgs:
    """The step in every schedule, with more and more microbatches, compiled for a target."""

    config: Overrides
    target: str = ""
    """The hardware, as for `jaxpar rehearse`."""


def step_command(words: list[str]) -> int:
    """jaxpar bench step CONFIG [--rounds N] [--calls N] [--section.key value ...]"""
    from jaxpar.bench.alternate import bench_step, table

    _, args = config_args(step_command.__doc__, StepBenchArgs, words)
    console().print(table([bench_step(check(args.config), args.rounds, args.calls)]))
    return 0


def rehearse_command(words: list[str]) -> int:
    """jaxpar bench rehearse [--picture FILE]"""
    from jaxpar.base.hardware import Hardware
    from jaxpar.base.mesh import MeshSpec
    from jaxpar.base.runtime import start
    from jaxpar.bench.rehearse import compare_predictions, configs, prediction_figure, prediction_table
    from jaxpar.rehearse.calibrate import calibrated
    from jaxpar.show.figures import save_figure

    args = parse(rehearse_command.__doc__, RehearseBenchArgs(), words)
    check_folders(args.picture)
    start(MeshSpec(), "off")  # as `rehearse`: it reads what the compiler writes
    say = console().print
    kept = calibrated(say)
    rows = compare_predictions(configs(), kept.hardware(Hardware()), kept.speeds(), say=say)
    say(prediction_table(rows))
    if args.picture:
        save_figure(prediction_figure(rows, "predicted and measured steps, one device here"), Path(args.picture))
    return 0


def overlap_command(words: list[str]) -> int:
    """jaxpar bench overlap CONFIG --target T [--step] [--section.key value ...]"""
    from jaxpar.bench.overlap import compare_forms, overlap_table

    _, args = config_args(overlap_command.__doc__, OverlapBenchArgs, words)
    target, say = _target("overlap", args.target), console().print
    say(overlap_table(compare_forms(check(args.config), target, args.step, say)))
    return 0


def pipeline_command(words: list[str]) -> int:
    """jaxpar bench pipeline CONFIG --target T [--section.key value ...]"""
    from jaxpar.bench.pipeline import compare_schedules, schedules_table

    _, args = config_args(pipeline_command.__doc__, PipelineBenchArgs, words)
    target, say = _target("pipeline", args.target), console().print
    say(schedules_table(compare_schedules(check(args.config), target, say)))
    return 0


def _target(bench: str, name: str) -> Target:
    if not name:
        raise UserError(f"bench {bench} needs --target: v5p-64, v5e-8, h100x64, ...: docs/targets.md lists them")
    return load_target(name)


def attention_command(words: list[str]) -> int:
    """jaxpar bench attention [--masks NAME ...] [--seq-lens N ...] [--tune] [--json FILE] [--picture FILE]"""
    from jaxpar.base.mesh import MeshSpec
    from jaxpar.base.runtime import start
    from jaxpar.bench import attention as bench
    from jaxpar.show.figures import save_figure

    args = parse(attention_command.__doc__, bench.AttentionBenchArgs(), words)
    check_folders(args.json, args.picture)
    start(MeshSpec())
    say = console().print
    if args.tune:
        bench.tune_first(args, say)
    rows = bench.bench_attention(args, say)
    found = bench.attention_json(args, rows)
    say(bench.attention_table(rows))
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    if args.picture:
        save_figure(bench.attention_figure(rows, f"attention on {found['device']}"), Path(args.picture))
    return 0


def fusions_command(words: list[str]) -> int:
    """jaxpar bench fusions [--targets T ...] [--seq-len N] [--tensor N]"""
    from jaxpar.bench.fusions import FusionBenchArgs, bench_fusions, fusion_table

    args, say = parse(fusions_command.__doc__, FusionBenchArgs(), words), console().print
    say(fusion_table(bench_fusions(args, say)))
    return 0


def gpu_command(words: list[str]) -> int:
    """jaxpar bench gpu [--out DIR] [--pieces NAME ...] [--small]"""
    from jaxpar.bench.gpu import GpuBenchArgs, bench_gpu

    args, say = parse(gpu_command.__doc__, GpuBenchArgs(), words), console().print
    done = bench_gpu(args, say)
    say((Path(args.out) / "report.md").read_text(encoding="utf-8"))
    return 0 if done else 1
