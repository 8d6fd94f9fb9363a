"""Which settings may change in a run that goes on: those that never change its answer, which is
said at their fields (`Trait.MAY_CHANGE`). Any other difference is another experiment.
"""

from __future__ import annotations

import os

from jaxpar.base.config.schema import Config
from jaxpar.base.field_marks import Trait, keys_with
from jaxpar.base.toml import flatten


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
    free = keys_with(Config, Trait.MAY_CHANGE)
    paths = keys_with(Config, Trait.PATH)
    changed = [key for key in after if before[key] != after[key] and key not in free]
    return [
        f"{key}: {before[key]!r} -> {after[key]!r}"
        for key in changed
        if not (key in paths and _is_same_path(before[key], after[key]))
    ]


def _is_same_path(one: str, other: str) -> bool:
    """Whether two words name one place: `model`, `./model/`."""
    return bool(one and other) and os.path.abspath(one) == os.path.abspath(other)
