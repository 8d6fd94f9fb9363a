"""`jaxpar bench`: the words of each comparison; a module of `jaxpar.bench` measures, and its rows are printed."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxpar.base.config import check
from jaxpar.base.console import check_folders, console
from jaxpar.base.mesh import MeshSpec
from jaxpar.base.runtime import start
from jaxpar.bench.alternate import table
from jaxpar.cli.arguments import Overrides, config_args, parse


@dataclass(frozen=True)
class StepBenchArgs:
    """The training step against that of `transformers` in PyTorch, in turns."""

    config: Overrides
    rounds: int = 15
    """Alternations; the ratio's quartiles are over these."""
    calls: int = 10
    """Steps of each in a round."""


def step_command(words: list[str]) -> int:
    """jaxpar bench step CONFIG [--rounds N] [--calls N] [--section.key value ...]"""
    from jaxpar.bench.step import bench_step
    from jaxpar.train.plans import make_plan

    _, args = config_args(step_command.__doc__, StepBenchArgs, words)
    config, say = check(args.config), console().print
    plan = make_plan(config, start(config.mesh, config.compile.cache))
    say(table(bench_step(config, plan, args.rounds, args.calls, say=say)))
    return 0


def attention_command(words: list[str]) -> int:
    """jaxpar bench attention [--masks NAME ...] [--seq-lens N ...] [--json FILE]"""
    from jaxpar.bench.attention import FLOPS, AttentionBenchArgs, bench_attention

    args = parse(attention_command.__doc__, AttentionBenchArgs(), words)
    check_folders(args.json)
    start(MeshSpec())
    rows = bench_attention(args, console().print)
    console().print(f"{table(rows)}\n\n{FLOPS}")
    if args.json:
        device = jax.devices()[0]
        where = {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}
        found = {**where, "bench": dataclasses.asdict(args), "rows": rows}
        Path(args.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0
