"""Compare predicted with measured times: training steps of many shapes on one device of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError
from jaxpar.base.hardware import Hardware
from jaxpar.bench.alternate import Row
from jaxpar.bench.step import random_batch
from jaxpar.hlo.tasks import Collective
from jaxpar.models import Model
from jaxpar.rehearse.cost.speeds import SpeedTable
from jaxpar.rehearse.cost.stopwatch import Ready, ready_step
from jaxpar.rehearse.link_costs import CollectiveTime
from jaxpar.rehearse.report.memory import CompiledBytes
from jaxpar.rehearse.timeline.timeline import step_time
from jaxpar.train.plans import make_plan
from jaxpar.train.state import init_state
from jaxpar.train.step import make_train_step

_SHAKESPEARE: dict[str, object] = {
    "model.layers": 4, "model.embed": 128, "model.heads": 4, "model.mlp": 512, "model.vocab_size": 65,
    "model.vocab_multiple": 1, "model.scan_layers": False, "data.seq_len": 64, "train.batch": 12,
}  # fmt: skip
_LLAMA: dict[str, object] = {"model.family": "llama", "model.tied_head": False, "model.mlp": 384}
_CHANGES: dict[str, dict[str, object]] = {
    "gpt2 2 x 64, batch 4": {"model.layers": 2, "model.embed": 64, "model.heads": 2, "model.mlp": 256,
                             "train.batch": 4},
    "gpt2 1 x 128, batch 8": {"model.layers": 1, "train.batch": 8},
    "gpt2 4 x 128 (Shakespeare)": {},
    "  8 layers": {"model.layers": 8},
    "  embed 256": {"model.embed": 256, "model.heads": 8, "model.mlp": 1024},
    "  sequence 256, batch 4": {"data.seq_len": 256, "train.batch": 4},
    "  batch 48": {"train.batch": 48},
    "  vocabulary 8192": {"model.vocab_size": 8192},
    "  scan over layers": {"model.scan_layers": True},
    "  full recompute": {"memory.policy": "full"},
    "  accumulation 3": {"train.accumulation": 3},
    "llama 2 x 128, batch 8": _LLAMA | {"model.layers": 2, "train.batch": 8},
    "llama 4 x 128": _LLAMA,
    "  grouped queries, 4 x 256, sequence 128": _LLAMA | {"model.embed": 256, "model.heads": 8, "model.kv_heads": 2,
                                                          "model.mlp": 768, "data.seq_len": 128, "train.batch": 4},
    "  scan, full recompute, sequence 512": _LLAMA | {"model.scan_layers": True, "memory.policy": "full",
                                                      "data.seq_len": 512, "train.batch": 2},
    "gpt2 6 x 384, sequence 128, batch 8": {"model.layers": 6, "model.embed": 384, "model.heads": 6,
                                            "model.mlp": 1536, "data.seq_len": 128, "train.batch": 8},
}  # fmt: skip


def configs() -> dict[str, Config]:
    """The shapes to compare; an indented name is a change of the one above it."""
    return {name: override(Config(), _SHAKESPEARE | changes) for name, changes in _CHANGES.items()}


def compare_predictions(
    shapes: Mapping[str, Config],
    hardware: Hardware,
    speeds: SpeedTable | None = None,
    rounds: int = 6,
    say: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Predict and measure one-device training steps; the configs take turns, so that a busy moment hits them alike.

    Args:
      hardware: the figures of a device here, measured or published.
      speeds: the speeds of its tasks, where they were measured.
      rounds: how many turns there are; in each, a config runs for about a fifth of a second.

    Returns:
      A row for each config, in milliseconds; `predicted, GiB` is device memory by the compiler's account.
    """
    ready: dict[str, Ready] = {}
    for name, config in shapes.items():
        say(f"compiling {name.strip()}")
        ready[name] = ready_config(config, "compared")
    times: dict[str, list[float]] = {name: [] for name in shapes}
    for i in range(rounds):
        say(f"timing, round {i + 1}/{rounds}")
        for name, step in ready.items():
            for _ in range(int(np.clip(0.2 / step.seconds, 1, 20))):
                began = time.perf_counter()
                step.run()
                times[name].append(time.perf_counter() - began)
    rows: list[Row] = []
    for name, step in ready.items():
        predicted = step_time(step.program, hardware, no_links, speeds).seconds
        rows.append({
            "config": name, "predicted, ms": 1e3 * predicted, "fastest, ms": 1e3 * min(times[name]),
            "median, ms": 1e3 * float(np.median(times[name])), "predicted / fastest": predicted / min(times[name]),
            "predicted, GiB": CompiledBytes.of(step.stats).total / 2**30,
        })  # fmt: skip
    return rows


def ready_config(config: Config, name: str) -> Ready:
    """A training step on one device with random tokens, compiled as a module of this name."""
    plan, model = make_plan(config, jax.devices()[:1]), Model(config.model)
    state, batch = init_state(model, config, plan), random_batch(config, plan)
    return ready_step(make_train_step(model, config, plan), state, batch, name)


def no_links(collective: Collective) -> CollectiveTime:
    """Refuse every collective, for `step_time` on one device.

    Raises:
      UserError: always.
    """
    raise UserError(
        f"a step on one device moves data between devices ({collective.kind}): compare configs without a mesh"
    )


def rank_correlation(rows: Sequence[Row]) -> float:
    """Spearman's rank correlation of predicted and fastest; 1 = every pair of configs is in the right order."""
    predicted, fastest = (
        np.argsort(np.argsort(np.array([row[name] for row in rows], float)))
        for name in ("predicted, ms", "fastest, ms")
    )
    return float(np.corrcoef(predicted, fastest)[0, 1])


def summary(rows: Sequence[Row]) -> str:
    """A line that says how far to trust the predictions."""
    ratios = np.array([row["predicted / fastest"] for row in rows], float)
    errors, worst = np.abs(ratios - 1), int(np.argmax(np.abs(np.log(ratios))))
    return (
        f"Rank correlation (Spearman) {rank_correlation(rows):.3f} over {len(rows)} configs; error "
        f"{100 * np.median(errors):.0f} % at the median, {100 * np.mean(errors):.0f} % on average, worst "
        f"{ratios[worst]:.2f} x ({str(rows[worst]['config']).strip()})."
    )
