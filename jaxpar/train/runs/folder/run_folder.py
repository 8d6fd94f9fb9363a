"""A run's folder and its config: what makes a folder a run folder, and whether a config is still
the run's experiment.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.checksum_line import add_checksum, require_intact
from jaxpar.base.config import RESOLVED, Config, incompatible_changes, parse
from jaxpar.base.config.checks import outdated
from jaxpar.base.errors import UTF8, UserError, reading, require_local
from jaxpar.base.layout.mesh import MESH_AXES
from jaxpar.base.process.multihost import run_on_first
from jaxpar.base.toml import flatten, to_toml
from jaxpar.models import FAMILIES
from jaxpar.train.runs.folder.steps import CHECKPOINTS, steps_in


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run folder; a URL is refused (UserError)."""
    require_local(folder)
    return os.path.exists(folder / "config.toml")  # which is False of a name that is too long


def runs_in(folder: Path) -> list[Path]:
    """List the run folders in a folder and in its subfolders; a run folder is its own.

    Raises:
      UserError: there is no run folder.
    """
    if is_run(folder):
        return [folder]
    found = [
        path.parent for deep in ("*", "*/*") for path in sorted(folder.glob(f"{deep}/config.toml"))
    ]
    if not found:
        raise UserError(
            f"{folder} is no run folder, and has none in it: a run folder has a config.toml"
        )
    return found


def read_run_config(folder: Path) -> Config:
    """Read the config that a run folder was made with, or was last resumed with; a folder without
    one is refused (UserError).
    """
    path = folder / "config.toml"
    if not is_run(folder):
        raise UserError(f"{folder} is no run folder: it has no config.toml")
    with reading(path):
        text = path.read_text(encoding=UTF8)
    require_intact(text, str(path))
    return parse(text, str(path))


def finished_steps(folder: Path) -> list[int]:
    """List the steps of a run folder's finished checkpoints, as they are at the moment."""
    return steps_in(folder / CHECKPOINTS)


def moved_data(changes: Sequence[str]) -> list[str]:
    """Leave out of the changes of a config (`incompatible_changes`) those that only move its data
    to another place.
    """
    return [text for text in changes if not text.startswith(("data.path: ", "data.val_path: "))]


def refused_changes(folder: Path, before: Config, config: Config) -> list[str]:
    """List the changes that make a config another experiment than the run in a folder.

    A run without a finished checkpoint is no experiment yet. An import that has not trained has its
    arrays alone. A value in a run of an earlier version that is refused today may be replaced.

    Args:
      before: the config in the folder.
      config: the config that the run is to be resumed with.

    Returns:
      The changes, as `incompatible_changes` writes them.
    """
    steps = finished_steps(folder)
    if not steps:
        return []
    changed = incompatible_changes(before, config)
    if steps == [0]:
        return [text for text in changed if text.startswith(("model.", "precision."))]
    replaceable = outdated(before)
    return [text for text in changed if text.partition(":")[0] not in replaceable]


def replaced_values(before: Config, config: Config) -> str:
    """Say which values of a run, that are refused today, a config replaces; empty = none."""
    was = flatten(before)
    now = flatten(config)
    changed = sorted(key for key in outdated(before) if was[key] != now[key])
    values = ", ".join(f"{key} {was[key]} -> {now[key]}" for key in changed)
    if values:
        return f"settings of this run that are refused today are replaced: {values}"
    return ""


def resized_note(before: Config, config: Config) -> str:
    """Say how the layout of a run differs from the layout of its last call; empty = it does not."""
    was = flatten(before)
    now = flatten(config)
    keys = [*(f"mesh.{axis}" for axis in MESH_AXES), "train.accumulation"]
    keys += [key for key in was if key.startswith("mesh.dcn.")]
    changed = ", ".join(f"{key} {was[key]} -> {now[key]}" for key in keys if was[key] != now[key])
    if changed:
        return (
            f"the run goes on in another layout: {changed}; train.batch={config.train.batch} and "
            "the order of the data stay"
        )
    return ""


def compare_run(folder: Path, config: Config, data_compared: bool = False) -> Config | None:
    """Refuse a folder that has the run of another experiment. Nothing is written.

    Only process 0 looks, and tells the others what it found.

    Args:
      folder: the run folder, which may be absent.
      data_compared: whether the data are known to be the run's, wherever they lie now.

    Returns:
      On process 0 the config in the folder, or None; None elsewhere.

    Raises:
      UserError: the folder has another experiment, is no run folder or cannot be used; or it is a
        URL.
    """
    require_local(folder)
    return run_on_first(lambda: _compare_run(folder, config, data_compared))


def _compare_run(folder: Path, config: Config, data_compared: bool) -> Config | None:
    if is_run(folder):
        before = read_run_config(folder)
        theirs = before.model.family
        if theirs != config.model.family and theirs not in FAMILIES:
            raise UserError(
                f"{folder} is a run of {theirs}, a whole model that a program gave: give "
                "make_experiment the model= that was trained, or use another --run folder"
            )
        changed = refused_changes(folder, before, config)
        if data_compared:
            changed = moved_data(changed)
        if changed:
            differences = "; ".join(changed[:3] + ["..."] * (len(changed) > 3))
            why = f"{folder} holds a run of another config ({differences})"
            raise UserError(f"{why}: use another --run folder, or give the old values")
        return before
    if os.path.exists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{folder} is there and is no run folder (it has no config.toml): use another --run "
            "folder"
        )
    return None


def keep_config(folder: Path, config: Config) -> None:
    """Write a run's `config.toml`, on process 0, which tells the others whether it succeeded (else
    a UserError).
    """
    text = add_checksum(to_toml(_for_next_call(config), RESOLVED))
    run_on_first(lambda: write_whole(folder / "config.toml", text))


def _for_next_call(config: Config) -> Config:
    """Reset the settings of a config that hold for one call alone."""
    return replace(config, data=replace(config.data, accept_changed=False))
