"""Which settings may change in a run that goes on: those that never change its answer. Any other
difference is another experiment.
"""

from __future__ import annotations

import os

from jaxpar.base.config.schema import Config
from jaxpar.base.toml import flatten

RESUMABLE = (
    "mesh",
    "rules",
    "overlap",
    "context",
    "pipeline",
    "memory",
    "kernels",
    "compiler",
    "checkpoint",
    "metrics",
    "train.steps",
    "train.stop_at",
    "train.max_time",
    "train.eval_every",
    "train.eval_batches",
    "train.final_eval_batches",
    "train.accumulation",
    "train.allow_nonfinite",
    "train.on_nonfinite",
    "train.on_spike",
    "train.spike_window",
    "train.spike_deviations",
    "train.max_bad_in_a_row",
    "train.max_bad_steps",
    "train.hang_seconds",
    "train.check_replicas",
    "distill.mesh",
    "data.prefetch",
    "data.accept_changed",
    "model.scan_layers",
)
"""Keys, and whole tables, that may change: the layout never changes the answer, and the rest only
says what is reported and kept.
"""
_PATHS = ("train.init", "data.tokenizer", "distill.teacher")
"""Keys whose value names one file or folder, which may be written in several ways."""


def incompatible_changes(old: Config, new: Config) -> list[str]:
    """The differences that make `new` another experiment than `old`: `["train.batch: 32 -> 64",
    ...]`.

    Args:
      old: the config that a run was made with.
      new: the one that it is to go on with.

    Returns:
      A line for each key that may not change in a run; empty = it can go on.
    """
    before = flatten(old)
    after = flatten(new)
    changed = [key for key in after if before[key] != after[key] and not _may_change(key)]
    return [
        f"{key}: {before[key]!r} -> {after[key]!r}"
        for key in changed
        if not (key in _PATHS and _is_same_path(before[key], after[key]))
    ]


def _may_change(key: str) -> bool:
    return any(key == free or key.startswith(free + ".") for free in RESUMABLE)


def _is_same_path(one: str, other: str) -> bool:
    """Whether two words name one place: `model`, `./model/`."""
    return bool(one and other) and os.path.abspath(one) == os.path.abspath(other)
