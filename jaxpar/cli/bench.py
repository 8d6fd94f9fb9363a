"""`jaxpar bench`: the words of each comparison; a module of `jaxpar.bench` measures, and its rows are printed."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpar.base.config import check
from jaxpar.base.console import console
from jaxpar.base.runtime import start
from jaxpar.bench.alternate import table
from jaxpar.cli.arguments import Overrides, config_args


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
