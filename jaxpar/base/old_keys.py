"""Keys of earlier versions that files, run folders, programs and command lines may still have, as
what they mean now.

`train.min_learning_rate` was the rate at which the schedule ended. It stayed where it was when
`train.learning_rate` was lowered, and then the rate rose to it. `train.min_learning_rate_ratio` is
a share of `train.learning_rate` instead.

AdamW was the only optimizer, and its numbers stood in `train`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from jaxpar.base.errors import UserError, short

OLD_FLOOR = "train.min_learning_rate"
FLOOR = "train.min_learning_rate_ratio"
RENAMED = {
    f"train.{key}": f"optimizer.adamw.{key}" for key in ("beta1", "beta2", "eps", "weight_decay")
}
"""The keys of today by those of earlier versions that meant the same."""
_DIGITS = 12  # of a ratio: 6e-5 / 6e-4 is 0.1 and not 0.09999999999999999


def floor_ratio(floor: Any, peak: Any, origin: str) -> float:
    """Turn an old `train.min_learning_rate` into a share of `train.learning_rate`.

    Args:
      floor: the old value, and `peak` the learning rate beside it; any type, as a file gives them.
      peak: see `floor`.
      origin: what a message calls the place of the old key.

    Returns:
      The share; 0 where the learning rate is no number, which is refused elsewhere.

    Raises:
      UserError: the floor is not a number.
    """
    if isinstance(floor, bool) or not isinstance(floor, int | float):
        raise UserError(f"{origin}: {OLD_FLOOR} is a number, found {floor!r}")
    if not 0 <= floor <= sys.float_info.max:
        raise UserError(
            f"{origin}: {OLD_FLOOR} is a finite number of 0 or more, found {short(floor)}"
        )
    if isinstance(peak, bool) or not isinstance(peak, int | float) or peak == 0:
        return 0.0  # the learning rate is what is refused
    try:
        ratio = floor / peak
    except OverflowError as error:  # of whole numbers
        raise UserError(
            f"{origin}: {OLD_FLOOR} and train.learning_rate are too large: found {short(floor)}"
        ) from error
    return float(f"{ratio:.{_DIGITS}g}")


def renew_tables(
    tables: Mapping[str, Any],
    default_peak: float,
    origin: str,
) -> Mapping[str, Any]:
    """Give the tables of a TOML file the keys of today.

    Args:
      tables: the file's tables, by name.
      default_peak: the learning rate of a file that gives none.
      origin: what a message calls the file.

    Raises:
      UserError: the file has the old key and the new one, or the old one is not a number.
    """
    tables = _renamed_tables(tables, origin)
    train = tables.get("train")
    old = OLD_FLOOR.partition(".")[2]
    new = FLOOR.partition(".")[2]
    if not isinstance(train, Mapping) or old not in train:
        return tables
    if new in train:
        raise UserError(same_thing(OLD_FLOOR, origin))
    ratio = floor_ratio(train[old], train.get("learning_rate", default_peak), origin)
    if train.get("schedule") == "constant":  # which never comes to its floor
        ratio = min(ratio, 1.0)
    kept = {key: value for key, value in train.items() if key != old}
    return {**tables, "train": {**kept, new: ratio}}


def _renamed_tables(tables: Mapping[str, Any], origin: str) -> Mapping[str, Any]:
    """Move the keys of `RENAMED` to their tables of today."""
    train = tables.get("train")
    if not isinstance(train, Mapping):
        return tables
    old = [key for key in train if f"train.{key}" in RENAMED]
    optimizer = tables.get("optimizer", {})
    if not old or not isinstance(optimizer, Mapping):
        return tables
    adamw = optimizer.get("adamw", {})
    if not isinstance(adamw, Mapping):
        return tables
    for key in old:
        if key in adamw:
            raise UserError(same_thing(f"train.{key}", origin))
    moved = {key: train[key] for key in old}
    kept = {key: value for key, value in train.items() if key not in moved}
    return {
        **tables,
        "train": kept,
        "optimizer": {**optimizer, "adamw": {**adamw, **moved}},
    }


def same_thing(old: str, origin: str = "") -> str:
    """The sentence about a key of an earlier version beside that of today."""
    new = FLOOR if old == OLD_FLOOR else RENAMED[old]
    place = f"{origin}: " if origin else ""
    return f"{place}{old} and {new} say the same thing: keep {new}"


def renew_changes(
    changes: Mapping[str, Any],
    peak: float,
    origin: str,
) -> Mapping[str, Any]:
    """Do the same for dotted keys, such as `{"train.min_learning_rate": 1e-5}`.

    Args:
      changes: values by dotted key.
      peak: the learning rate where the changes give none.
      origin: what a message calls them.

    Returns:
      The values by the keys of today.

    Raises:
      UserError: see `renew_tables`.
    """
    for key in changes:
        if key in RENAMED and RENAMED[key] in changes:
            raise UserError(same_thing(key, origin))
    changes = {RENAMED.get(key, key): value for key, value in changes.items()}
    if OLD_FLOOR not in changes:
        return changes
    if FLOOR in changes:
        raise UserError(same_thing(OLD_FLOOR, origin))
    ratio = floor_ratio(changes[OLD_FLOOR], changes.get("train.learning_rate", peak), origin)
    return {
        **{key: value for key, value in changes.items() if key != OLD_FLOOR},
        FLOOR: ratio,
    }
