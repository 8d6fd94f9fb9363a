"""`jaxpar bench generate` times both parts of generation, prefill and decoding, in turns with
`transformers`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from jaxpar.base.errors import Say, UserError
from jaxpar.bench.measure import BenchRow, torch_process
from jaxpar.models import in_parts
from jaxpar.models.hf import hf_config
from jaxpar.train.experiment import Experiment
from jaxpar.train.generation import GenerationTimes, Generator


class Parts(NamedTuple):
    """The seconds of one call: for the first new token of all prompts, and for all the others."""

    prefill: float
    decode: float


def bench_generate(
    experiment: Experiment,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    say: Say = lambda line: None,
) -> list[BenchRow]:
    """Time prefill and decoding of random prompts by a model of random weights.

    Both sides take the likeliest token, and have the same shapes and dtype; `transformers` runs as
    its `generate` does by default. They take turns, `rounds` times, after a call each. Where
    PyTorch cannot run the model, `say` is told why, and ours is timed alone.

    Args:
      experiment: the model, its plan and devices.
      batch: the number of prompts at once.
      prompt_tokens: the tokens of each prompt.
      new_tokens: the new tokens of each prompt, 2 at least: the first of them is the prefill's.
      rounds: the turns of each side.
      say: is called with notes, such as the ratio with its quartiles.

    Returns:
      A row for each side, with the medians of tokens a second.

    Raises:
      UserError: the prompts with their new tokens are longer than the model takes, a number is too
        small, or the model is a whole one of a program's own.
    """
    if new_tokens < 2:
        raise UserError(
            f"--new-tokens {new_tokens}: the first is the prefill's, so 2 at least are needed"
        )
    longest = experiment.config.model.max_seq_len
    if prompt_tokens + new_tokens > longest:
        raise UserError(
            f"--prompt-tokens {prompt_tokens} and --new-tokens {new_tokens} are more than "
            f"model.max_seq_len={longest}: try fewer"
        )
    ours = generation_seconds(experiment, batch, prompt_tokens)
    candidates: dict[str, Callable[[int], Parts]] = {"jaxpar": ours}
    with contextlib.ExitStack() as stack:
        asked = _asked_of_torch(experiment, batch, prompt_tokens)
        theirs = stack.enter_context(torch_process("torch_generate.py", asked))
        try:
            name = str(theirs(2)["by"])
        except ChildProcessError as missing:
            say(f"not beside PyTorch: {missing}")
        else:
            candidates[name] = lambda n: _parts_of(theirs(n))
        for run in candidates.values():
            run(new_tokens)
        turns = [[run(new_tokens) for run in candidates.values()] for _ in range(rounds)]
    seconds = np.array(turns)  # rounds x candidates x parts
    tokens = batch * np.array([prompt_tokens, new_tokens - 1])
    if len(candidates) > 1:
        _say_ratios(seconds, rounds, say)
    rates = (tokens / np.median(seconds, axis=0)).tolist()
    return [
        {
            "by": by,
            "prefill tokens/s": prefill,
            "decode tokens/s": decode,
            "ms a token": 1e3 * batch / decode,
        }
        for by, (prefill, decode) in zip(candidates, rates, strict=True)
    ]


def generation_seconds(
    experiment: Experiment, batch: int, prompt_tokens: int
) -> Callable[[int], Parts]:
    """Make `run(n)`, which continues the same random prompts by n tokens, and returns the seconds
    of both parts.
    """
    model = in_parts(experiment.model, "bench generate")
    plan = experiment.plan
    shardings = plan.sharding(model.axes, model.shapes())
    params = jax.jit(model.init, out_shardings=shardings)(jax.random.key(0))
    generator = Generator(model, params, plan)
    vocab = experiment.config.model.vocab_size
    prompts = list(
        np.random.default_rng(0).integers(
            0,
            vocab,
            (batch, prompt_tokens),
        )
    )

    def run(n: int) -> Parts:
        generator.times = GenerationTimes()
        generator.generate(prompts, n, rows=batch)
        return Parts(generator.times.prefill_seconds, generator.times.decode_seconds)

    return run


def _asked_of_torch(experiment: Experiment, batch: int, prompt_tokens: int) -> Mapping[str, object]:
    config = experiment.config
    return {
        "model": hf_config(config.model),
        "vocab_size": config.model.vocab_size,
        "prompt": [batch, prompt_tokens],
        "compute": config.precision.compute,
        "platform": jax.default_backend(),
    }


def _parts_of(row: BenchRow) -> Parts:
    return Parts(float(row["prefill"] or 0), float(row["decode"] or 0))


def _say_ratios(
    seconds: np.ndarray,
    rounds: int,
    say: Say,
) -> None:
    """Say how much faster ours is than the other side, in each part."""
    for index, part in enumerate(Parts._fields):
        ratios = seconds[:, 1, index] / seconds[:, 0, index]
        low, middle, high = np.percentile(ratios, (25, 50, 75))
        say(
            f"{part}: jaxpar is {middle:.2f} times as fast (quartiles {low:.2f} to {high:.2f}, "
            f"{rounds} rounds)"
        )
