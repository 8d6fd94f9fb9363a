"""Measurements that compare: two things alternating in one run, so that a noisy machine is noisy for both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpar.config import Config
from jaxpar.errors import UserError
from jaxpar.models import Model
from jaxpar.models.hf import hf_config
from jaxpar.runtime import start
from jaxpar.step import init_state, make_plan, make_train_step, put_batch


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
    times = np.array([[_time(function, calls) for function in (first, second)] for _ in range(rounds)])
    ratios = times[:, 0] / times[:, 1]
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    medians = np.median(times, axis=0)
    return Comparison(names, (float(medians[0]), float(medians[1])), float(middle), (float(low), float(high)), rounds)


def _time(function: Callable[[], Any], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - began) / calls


def bench_step(config: Config, rounds: int = 15, calls: int = 10) -> Comparison:
    """One training step of a config against `transformers` in PyTorch, eager, at the same shape, both in float32.

    Both do forward, backward, clipping by global norm and AdamW on one batch of random tokens already in memory, and
    wait for the loss. Needs the parity extra.

    Raises:
      UserError: no torch or transformers here, or a config that asks for another precision.
    """
    model = config.model
    if config.precision.compute != "float32":
        raise UserError("bench step compares in float32: try --precision.compute float32")
    plan = make_plan(config, start(config.mesh, config.compile.cache))
    rng = np.random.default_rng(0)
    ids = rng.integers(0, model.vocab_size, (config.train.batch, config.data.seq_len + 1), dtype=np.int32)
    theirs = _torch_step(config, ids)
    step, state = make_train_step(Model(model), config, plan), init_state(Model(model), config, plan)
    batch = put_batch({"tokens": ids[:, :-1], "labels": ids[:, 1:]}, plan)

    def ours() -> float:
        nonlocal state
        state, metrics = step(state, batch)
        return float(jax.device_get(metrics["loss"]))

    return alternate(("jaxpar", "transformers (eager)"), ours, theirs, rounds, calls)


def _torch_step(config: Config, ids: np.ndarray) -> Callable[[], float]:
    """The same step in PyTorch."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
        from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError("bench step needs torch and transformers: pip install 'jaxpar[parity]'") from error
    train, shape = config.train, hf_config(config.model)
    theirs = AutoConfig.for_model(shape.pop("model_type"), **shape)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"):
        if hasattr(theirs, name):
            setattr(theirs, name, config.model.dropout)
    model = AutoModelForCausalLM.from_config(theirs, attn_implementation="eager")
    optimizer = torch.optim.AdamW(
        model.parameters(), train.learning_rate, (train.beta1, train.beta2), train.eps, train.weight_decay
    )
    tokens = torch.from_numpy(ids[:, :-1].astype(np.int64))
    labels = torch.from_numpy(ids[:, 1:].astype(np.int64))

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
