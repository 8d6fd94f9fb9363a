"""Reads a run folder's `config.toml`, and writes it when a run begins or goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax

from jaxpar.base.config import RESOLVED, Config, incompatible_changes, parse
from jaxpar.base.errors import UserError
from jaxpar.base.runtime import run_together
from jaxpar.base.toml import to_toml

TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"
_BESIDE = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", GENERATION)
"""Files of a Hugging Face folder that say what its ids mean, how a conversation is written, and which end a text."""


def carry_tokenizer(source: Path, target: Path) -> None:
    """Copy a tokenizer's files, as far as they are there, to another folder."""
    for name in _BESIDE:
        if (source / name).exists() and source.resolve() != target.resolve():
            shutil.copyfile(source / name, target / name)


def read_run_config(folder: Path) -> Config:
    """Read the config that a run folder was made with, or last went on with.

    Raises:
      UserError: the folder has no config.
    """
    path = folder / "config.toml"
    if not path.exists():
        raise UserError(f"{folder} is no run folder: it has no config.toml")
    return parse(path.read_text(encoding="utf-8"), str(path))


def open_run(folder: Path, config: Config) -> Config | None:
    """Make a run folder with its `config.toml`, or check that the existing one belongs to the same experiment.

    Only process 0 does this and tells the others whether it succeeded, because they might see a half-written file.

    Returns:
      On process 0 the config that was there; None where there was none.

    Raises:
      UserError: the folder belongs to another experiment, or is not a run folder.
    """
    return run_together(lambda: _open_run(folder, config) if jax.process_index() == 0 else None)


def _open_run(folder: Path, config: Config) -> Config | None:
    path, before = folder / "config.toml", None
    if path.exists():
        before = read_run_config(folder)
        changed = incompatible_changes(before, config)
        if [name.name for name in (folder / "checkpoints").glob("[0-9]*")] == ["0"]:
            # An import has not trained yet: how it trains is still open, but its arrays are fixed.
            changed = [text for text in changed if text.startswith(("model.", "precision."))]
        if changed:
            differences = "; ".join(changed[:3] + ["..."] * (len(changed) > 3))
            raise UserError(
                f"{folder} holds a run of another config ({differences}): "
                "use another --run folder, or give the old values"
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there and is no run folder (it has no config.toml): use another --run folder")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(to_toml(config, RESOLVED), encoding="utf-8")
    return before
