"""Measurements that compare: two things alternating in one run, so that a noisy machine is noisy for both."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpar.base.config import Config
from jaxpar.base.errors import UserError
from jaxpar.base.plan import Plan
from jaxpar.base.runtime import start
from jaxpar.models import Model
from jaxpar.rehearse.calibrate import random_batch
from jaxpar.train.plans import make_plan
from jaxpar.train.state import init_state
from jaxpar.train.step import make_train_step


class Comparison(NamedTuple):
    """Medians of two alternating measurements in seconds, and the quartiles of the ratio of neighbouring rounds.

    A ratio below 1 means that the first is faster.
    """

    names: tuple[str, str]
    seconds: tuple[float, float]
    ratio: float
    ratio_quartiles: tuple[float, float]
    rounds: int


def alternate(
    names: tuple[str, str], first: Callable[[], Any], second: Callable[[], Any], rounds: int, calls: int
) -> Comparison:
    """Time `calls` calls of one, then of the other, `rounds` times over; each call must wait for its own result."""
    first()
    second()
    times = np.array([[mean_seconds(function, calls) for function in (first, second)] for _ in range(rounds)])
    ratios = times[:, 0] / times[:, 1]
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    medians = np.median(times, axis=0)
    return Comparison(names, (float(medians[0]), float(medians[1])), float(middle), (float(low), float(high)), rounds)


def mean_seconds(function: Callable[[], Any], calls: int) -> float:
    """Seconds a call, of so many one after another; arrays that the last one gives are waited for."""
    began, last = time.perf_counter(), None
    for _ in range(calls):
        last = function()
    jax.block_until_ready(last)
    return (time.perf_counter() - began) / calls


def train_steps(config: Config, plan: Plan) -> Callable[[int], float]:
    """`run(n)` takes n training steps on the same random tokens and gives the last one's loss, which it waits for."""
    model = Model(config.model)
    step, batch = make_train_step(model, config, plan), random_batch(config, plan)
    state = init_state(model, config, plan)

    def run(n: int) -> float:
        nonlocal state
        for _ in range(n):
            state, metrics = step(state, batch)
        return float(jax.device_get(metrics["loss"]))

    return run


def bench_step(config: Config, rounds: int = 15, calls: int = 10) -> Comparison:
    """One training step of a config against `transformers` in PyTorch, eager, at the same shape, both in float32.

    Both do forward, backward, clipping by global norm and AdamW on one batch of random tokens already in memory, and
    wait for the loss. Needs the parity extra.

    Raises:
      UserError: no torch or transformers here, or a config that asks for another precision.
    """
    if config.precision.compute != "float32":
        raise UserError("bench step compares in float32: try --precision.compute float32")
    plan = make_plan(config, start(config.mesh, config.compile.cache))
    theirs, ours = _torch_step(config, random_batch(config, plan)), train_steps(config, plan)
    return alternate(("jaxpar", "transformers (eager)"), lambda: ours(1), theirs, rounds, calls)


def _torch_step(config: Config, batch: Mapping[str, jax.Array]) -> Callable[[], float]:
    """The same step in PyTorch."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
        from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError("bench step needs torch and transformers: pip install 'jaxpar[parity]'") from error
    from jaxpar.models.hf import hf_config  # imports safetensors

    train, shape = config.train, hf_config(config.model)
    theirs = AutoConfig.for_model(shape.pop("model_type"), **shape)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"):
        if hasattr(theirs, name):
            setattr(theirs, name, config.model.dropout)
    model = AutoModelForCausalLM.from_config(theirs, attn_implementation="eager")
    optimizer = torch.optim.AdamW(
        model.parameters(), train.learning_rate, (train.beta1, train.beta2), train.eps, train.weight_decay
    )
    tokens, labels = (torch.from_numpy(np.asarray(batch[name], np.int64)) for name in ("tokens", "labels"))

    def step() -> float:
        logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def table(comparisons: Sequence[Comparison]) -> str:
    """A Markdown table of comparisons."""
    head = "| first | second | first, ms | second, ms | ratio (quartiles) | rounds |\n|---|---|---|---|---|---|"
    rows = [
        f"| {c.names[0]} | {c.names[1]} | {1e3 * c.seconds[0]:.1f} | {1e3 * c.seconds[1]:.1f} | "
        f"{c.ratio:.2f} ({c.ratio_quartiles[0]:.2f} to {c.ratio_quartiles[1]:.2f}) | {c.rounds} |"
        for c in comparisons
    ]
    return "\n".join([head, *rows])
