"""A config from a file or from text, and one with some of its settings changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from jaxpar.base.config.schema import Config
from jaxpar.base.config.train import TrainConfig
from jaxpar.base.errors import UserError
from jaxpar.base.key_aliases import suggest_key
from jaxpar.base.old_keys import renew_changes, renew_tables
from jaxpar.base.toml import as_tables, find_toml, flatten, from_dict, read_tables

RESOLVED = "The resolved config of this run."
"""The first line of a run folder's config.toml."""


def load_config(name: str) -> Config:
    """A preset of `jaxpar.configs` by name, a TOML file by path, or the config of a run folder.

    Args:
      name: the preset's name, or the path of a file or a run folder.

    Returns:
      The config, whose values `jaxpar.base.config.checks.check` may still refuse.

    Raises:
      UserError: no such preset, file or run folder, malformed TOML, an unknown key, or a value of
        the wrong type.
    """
    return parse(*find_toml(name, "jaxpar.configs"))


def parse(text: str, origin: str = "config") -> Config:
    """A config from TOML text.

    The config.toml of a run has every key. One that it lacks was not known when the run was made,
    and is as it was.

    Args:
      text: the TOML.
      origin: what a message calls it.

    Returns:
      The config.

    Raises:
      UserError: the text is no TOML, a key is not known, or a value has the wrong type.
    """
    tables = renew_tables(read_tables(text, origin), TrainConfig.learning_rate, origin)
    config = from_dict(Config, tables, origin)
    older = text.startswith(f"# {RESOLVED}") and "bos" not in tables.get("data", {})
    if older and (config.data.source == "tokens" or config.data.tokenizer.endswith(".json")):
        return replace(config, data=replace(config.data, bos=False))
    return config


def override(config: Config, changes: Mapping[str, Any]) -> Config:
    """A config with dotted keys changed: `override(config, {"train.steps": 20, "mesh.tensor": 4})`.

    Args:
      config: the config.
      changes: the new values by dotted key.

    Returns:
      The changed config.

    Raises:
      UserError: a key is not known, or a value has the wrong type.
    """
    known = flatten(config)
    changes = renew_changes(changes, config.train.learning_rate, "override")
    for key in changes:
        if key not in known:
            raise UserError(f"override: unknown key {key}{suggest_key(key, known, Config)}")
    return from_dict(Config, as_tables(known | dict(changes)), "override")


def fit_schedule(config: Config, given: Collection[str]) -> tuple[Config, str]:
    """Return the config with the warm-up and the decay shortened where `train.steps` alone was made
    smaller.

    Args:
      config: the config with the settings that were given.
      given: their dotted keys. A warm-up or a decay among them stays as it is; `check` refuses one
        that is too long.

    Returns:
      The config, and what was changed in a line; empty = nothing.
    """
    train = config.train
    changes = dict[str, int]()
    if "train.steps" not in given or train.steps < 1:
        return config, ""
    if train.warmup_steps >= train.steps and "train.warmup_steps" not in given:
        changes["train.warmup_steps"] = train.steps // 10
    left = train.steps - changes.get("train.warmup_steps", train.warmup_steps)
    if train.decay_steps > left > 0 and "train.decay_steps" not in given:
        changes["train.decay_steps"] = 0
    if not changes:
        return config, ""
    before = flatten(config)
    changed = ", ".join(f"{key} {before[key]} -> {value}" for key, value in changes.items())
    said = f"train.steps={train.steps} is shorter than the schedule was: {changed}"
    return override(config, changes), said
