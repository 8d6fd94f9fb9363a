"""The settings that may change when a run is resumed: those that never change its answer, which are
marked at their fields (`Trait.MAY_CHANGE`). Any other difference makes another experiment.
"""

from __future__ import annotations

import os

from jaxpar.base.config.schema import Config
from jaxpar.base.field_marks import Trait, keys_with
from jaxpar.base.toml import flatten


def incompatible_changes(old: Config, new: Config) -> list[str]:
    """List the differences that make `new` another experiment than `old`: `["train.batch: 32 ->
    64", ...]`.

    Args:
      old: the config that a run was made with.
      new: the config that the run is to be resumed with.

    Returns:
      A line for each key that may not change in a run; empty = the run can be resumed.
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
    """Return whether two paths name one place: `model`, `./model/`."""
    return bool(one and other) and os.path.abspath(one) == os.path.abspath(other)
