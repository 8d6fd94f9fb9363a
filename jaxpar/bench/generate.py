"""`jaxpar bench generate` times prefill and decoding of a config's model, in turns with `transformers`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict

import jax
import numpy as np

from jaxpar.base.config import Config
from jaxpar.base.plan import Plan
from jaxpar.bench.alternate import Row
from jaxpar.bench.step import torch_process
from jaxpar.models import Model
from jaxpar.models.hf_families import hf_config
from jaxpar.train.generation import Generator, Spent

PARTS = ("prefill", "decode")


def bench_generate(
    config: Config, plan: Plan, batch: int, prompt_tokens: int, new_tokens: int, rounds: int,
    say: Callable[[str], None] = lambda line: None,
) -> list[Row]:  # fmt: skip
    """Time both parts of generation with random weights: the first new token of random prompts, and all others.

    Both sides are greedy, and have the same shapes and dtype; `transformers` runs as its `generate` does by default.
    They take turns, `rounds` times, after one call each. Where PyTorch cannot run, `say` is told why.

    Returns:
      A row for each side, with the medians of tokens a second.
    """
    ours = jaxpar_seconds(config, plan, batch, prompt_tokens)
    asked = {
        "model": hf_config(config.model), "vocab_size": config.model.vocab_size, "prompt": [batch, prompt_tokens],
        "compute": config.precision.compute, "platform": jax.default_backend(),
    }  # fmt: skip
    candidates: dict[str, Callable[[int], Row]] = {"jaxpar": ours}
    with contextlib.ExitStack() as stack:
        try:
            theirs = stack.enter_context(torch_process(asked))
            candidates[str(theirs(2)["by"])] = theirs
        except ChildProcessError as missing:
            say(f"not beside PyTorch: {missing}")
        ours(new_tokens)
        found = [[run(new_tokens) for run in candidates.values()] for _ in range(rounds)]
    seconds = np.array([[[row[part] for part in PARTS] for row in rows] for rows in found], np.float64)
    tokens = batch * np.array([prompt_tokens, new_tokens - 1])
    for index, part in enumerate(PARTS if len(candidates) > 1 else ()):
        low, middle, high = np.percentile(seconds[:, 1, index] / seconds[:, 0, index], (25, 50, 75))
        say(f"{part}: jaxpar is {middle:.2f} times as fast (quartiles {low:.2f} to {high:.2f}, {rounds} rounds)")
    rates = (tokens / np.median(seconds, axis=0)).tolist()
    return [
        {"by": by, "prefill tokens/s": prefill, "decode tokens/s": decode, "ms a step": 1e3 * batch / decode}
        for by, (prefill, decode) in zip(candidates, rates, strict=True)
    ]


def jaxpar_seconds(config: Config, plan: Plan, batch: int, prompt_tokens: int) -> Callable[[int], Row]:
    """`run(n)` continues the same random prompts by n tokens, and returns the seconds of both parts."""
    model = Model(config.model)
    params = jax.jit(model.init, out_shardings=plan.sharding(model.axes, model.shapes()))(jax.random.key(0))
    generator = Generator(model, params, plan)
    ids = np.random.default_rng(0).integers(0, config.model.vocab_size, (batch, prompt_tokens))

    def run(n: int) -> Row:
        generator.spent = Spent()
        generator.generate(list(ids), n, rows=batch)
        spent = asdict(generator.spent)
        return {part: spent[f"{part}_seconds"] for part in PARTS}

    return run
