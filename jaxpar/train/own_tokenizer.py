"""The tokenizer of a run: its own copy, which other files under the name that its config gives do not change."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxpar.base.config import Bos, DataConfig
from jaxpar.base.errors import UserError, read_json, reading
from jaxpar.base.runtime import write_whole
from jaxpar.data.special_tokens import (
    GENERATION,
    TOKEN_IDS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    carried_token_ids,
    carry_declared,
    put_before,
)
from jaxpar.data.tokenizer import HFTokenizer, Tokenizer, load_tokenizer, make_tokenizer
from jaxpar.train.run_folder import finished_steps, is_run, read_run_config

_FORMS = ("added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt")
"""Files that have a tokenizer in other forms, for other programs."""


def carry_tokenizer(source: Path, target: Path) -> None:
    """Copy a tokenizer's files, as far as they are there, to another folder, which may be that folder itself.

    Raises:
      UserError: one of them cannot be read.
    """
    if source.resolve() == target.resolve():
        return
    for name in (TOKENIZER, *_FORMS):
        if (source / name).exists():
            with reading(source / name):
                content = (source / name).read_bytes()
            write_whole(target / name, content)
    carry_declared(source / TOKENIZER, target / TOKENIZER)


def export_tokenizer(source: Path, target: Path, bos: Bos) -> None:
    """Copy the tokenizer of a run to an exported folder, where it begins texts as it does in the run.

    Args:
      source: the run folder.
      target: the exported folder, whose config.json has the ids of `exported_ids`.
      bos: `data.bos` of the run.

    Raises:
      UserError: a file cannot be read.
    """
    carry_tokenizer(source, target)
    (target / TOKEN_IDS).unlink(missing_ok=True)
    file, ids = target / TOKENIZER, exported_ids(source, bos)
    if ids and not (target / GENERATION).exists():  # as transformers writes it, which reads what ends a text from it
        write_whole(target / GENERATION, json.dumps({"_from_model_config": True, **ids}, indent=2) + "\n")
    if bos == "auto" or not file.exists():
        return
    by_itself, as_trained = load_tokenizer(file), load_tokenizer(file, bos=bos)
    if isinstance(as_trained, HFTokenizer) and by_itself.begin_of_text != as_trained.begin_of_text:
        write_whole(file, put_before(as_trained.inner, as_trained.begin_of_text))
        config = read_json(target / TOKENIZER_CONFIG) if (target / TOKENIZER_CONFIG).exists() else {}
        write_whole(target / TOKENIZER_CONFIG, json.dumps({**config, "add_bos_token": bos}, indent=2))


def exported_ids(source: Path, bos: Bos) -> dict[str, Any]:
    """Return the token ids for the config.json of a run's export: those of the folder that it was imported from, or
    what its tokenizer says; none where there is neither.

    Raises:
      UserError: a file cannot be read.
    """
    file = source / TOKENIZER
    found = carried_token_ids(file)
    if found or not file.exists():
        return found
    tokenizer = load_tokenizer(file, bos=bos)
    ids = {"bos_token_id": tokenizer.begin_of_text, "eos_token_id": tokenizer.end_of_text}
    return {key: id for key, id in ids.items() if id is not None}


def keep_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Keep the tokenizer of a run in its folder, where it is never replaced once the run has weights.

    Raises:
      UserError: the run has another, or a file cannot be read.
    """
    own = folder / TOKENIZER
    if own.exists() and finished_steps(folder):
        if load_tokenizer(own).to_json() != tokenizer.to_json():
            raise _another("the tokenizer of the data", folder)
        return
    if isinstance(tokenizer, HFTokenizer) and tokenizer.file is not None:
        if tokenizer.file.name == TOKENIZER:
            carry_tokenizer(tokenizer.file.parent, folder)
        else:
            carry_declared(tokenizer.file, own)
    write_whole(own, tokenizer.to_json())


def with_own_tokenizer(data: DataConfig, folder: Path, say: Callable[[str], None] = lambda line: None) -> DataConfig:
    """Return the data of a run with its own copy of the tokenizer, once the run has weights that know its ids.

    Args:
      data: how the data are asked for.
      folder: the run folder, or where it will be.
      say: gets a line where the file that the run's config names has become another.

    Raises:
      UserError: another tokenizer is asked for than that of the run.
    """
    own = folder / TOKENIZER
    if not (own.exists() and is_run(folder) and finished_steps(folder)):
        return data
    as_made = read_run_config(folder).data.tokenizer
    if not _is_the_same(data.tokenizer, own):
        if data.tokenizer != as_made:
            raise _another(f"data.tokenizer={data.tokenizer}", folder)
        say(f"data.tokenizer={as_made} has changed since this run began: its own copy, {own}, is used")
    return replace(data, tokenizer=str(own))


def _is_the_same(name: str, own: Path) -> bool:
    """Whether a `data.tokenizer` is the run's own: a file that is gone is taken for it, and so are its characters."""
    if name.endswith(".json") and not Path(name).exists():
        return True
    there = load_tokenizer(own).to_json()
    if name == "chars":
        return json.loads(there).get("tokenizer") == name
    return make_tokenizer(name).to_json() == there


def _another(what: str, folder: Path) -> UserError:
    return UserError(
        f"{what} is not that of the run {folder}, whose weights know the ids of {folder / TOKENIZER}: leave "
        f"data.tokenizer out, or begin another run with train.init={folder}"
    )
