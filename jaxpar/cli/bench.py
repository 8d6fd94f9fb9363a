"""`jaxpar bench`: the words of each comparison; a module of `jaxpar.bench` measures, and its rows are printed."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpar.base.config import check
from jaxpar.base.console import console
from jaxpar.base.errors import UserError
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


@dataclass(frozen=True)
class GenerateBenchArgs:
    """Prefill and decoding against `transformers`, in turns, with random weights."""

    config: Overrides
    batch: int = 1
    """Prompts at once."""
    prompt_tokens: int = 128
    new_tokens: int = 64
    rounds: int = 9
    """Alternations; the ratio's quartiles are over these."""


def generate_command(words: list[str]) -> int:
    """jaxpar bench generate CONFIG [--batch N] [--prompt-tokens N] [--new-tokens N] [--section.key value ...]"""
    from jaxpar.bench.generate import bench_generate
    from jaxpar.train.plans import make_plan

    _, args = config_args(generate_command.__doc__, GenerateBenchArgs, words)
    config, say = check(args.config), console().print
    if args.new_tokens < 2 or min(args.batch, args.prompt_tokens, args.rounds) < 1:
        raise UserError("--new-tokens is at least 2, and --batch, --prompt-tokens and --rounds at least 1")
    plan = make_plan(config, start(config.mesh, config.compile.cache))
    say(table(bench_generate(config, plan, args.batch, args.prompt_tokens, args.new_tokens, args.rounds, say)))
    return 0


def step_command(words: list[str]) -> int:
    """jaxpar bench step CONFIG [--rounds N] [--calls N] [--section.key value ...]"""
    from jaxpar.bench.step import bench_step
    from jaxpar.train.plans import make_plan

    _, args = config_args(step_command.__doc__, StepBenchArgs, words)
    config, say = check(args.config), console().print
    plan = make_plan(config, start(config.mesh, config.compile.cache))
    say(table(bench_step(config, plan, args.rounds, args.calls, say=say)))
    return 0
