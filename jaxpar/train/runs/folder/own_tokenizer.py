"""The tokenizer of a run: its own copy, which other files under the name that its config gives do
not change.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.config import Bos, DataConfig
from jaxpar.base.errors import Say, UserError, read_bytes, read_json
from jaxpar.base.registry import SOURCES
from jaxpar.data.chat.answers import open_writer
from jaxpar.data.chat.end_of_turn import ends_of_turn
from jaxpar.data.chat.template.files import read_templates
from jaxpar.data.streams.urls import tokenizer_here
from jaxpar.data.vocabulary.special_tokens import (
    GENERATION,
    TOKEN_IDS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    carried_token_ids,
    carry_declared,
    read_declared,
    read_special_tokens,
)
from jaxpar.data.vocabulary.stranger import find_put, put_before
from jaxpar.data.vocabulary.tokenizer import HFTokenizer, Tokenizer, load_tokenizer, make_tokenizer
from jaxpar.train.runs.folder.run_folder import finished_steps, is_run, read_run_config

_FORMS = ("added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt")
"""Files that have a tokenizer in other forms, for other programs."""
_IMPORTED = [0]
"""The steps of a run that has weights and has not trained yet."""


def carry_tokenizer(source: Path, target: Path, keep: bool = False) -> None:
    """Copy a tokenizer's files, as far as they are there, to another folder, which may be that
    folder itself.

    Args:
      source: the folder that has them.
      target: the other folder.
      keep: whether what the other folder has besides stays, as the files of a model do beside those
        of an adapter.

    Raises:
      UserError: one of them cannot be read.
    """
    if source.resolve() == target.resolve():
        return
    for name in (TOKENIZER, *_FORMS):
        if (source / name).exists():
            write_whole(target / name, read_bytes(source / name))
        elif not keep:
            (target / name).unlink(missing_ok=True)
    carry_declared(source / TOKENIZER, target / TOKENIZER, keep)


def export_tokenizer(source: Path, target: Path, data: DataConfig) -> None:
    """Copy the tokenizer of a run to an exported folder, where texts begin and end as they do in
    the run.

    After a training on chats, what is generated ends also at the token with which the template
    closes a turn.

    Args:
      source: the run folder.
      target: the exported folder, whose config.json has the ids of `exported_ids`.

    Raises:
      UserError: a file cannot be read.
    """
    carry_tokenizer(source, target)
    (target / TOKEN_IDS).unlink(missing_ok=True)
    file = target / TOKENIZER
    ids = exported_ids(source, data.bos)
    # as transformers writes it, which reads what ends a text from it
    if ids and not (target / GENERATION).exists():
        write_whole(
            target / GENERATION, json.dumps({"_from_model_config": True, **ids}, indent=2) + "\n"
        )
    _end_at(_learned_ends(source / TOKENIZER, data), target / GENERATION)
    if file.exists():
        _begin_as_trained(file, data.bos)


def _begin_as_trained(file: Path, bos: Bos) -> None:
    """Let a tokenizer.json begin texts by its post-processor and by the config beside it as it does
    with `bos`.
    """
    tokenizer = load_tokenizer(file, bos=bos)
    config_file = file.with_name(TOKENIZER_CONFIG)
    if not isinstance(tokenizer, HFTokenizer):
        return
    begin = tokenizer.begin_of_text
    named = None if begin is None else tokenizer.inner.id_to_token(begin)
    if find_put(tokenizer.inner, named, file) == begin == load_tokenizer(file).begin_of_text:
        return
    write_whole(file, put_before(tokenizer.inner, begin))
    if config_file.exists():
        config = read_json(config_file)
    else:
        config = {}
    write_whole(
        config_file,
        json.dumps({**config, "add_bos_token": begin is not None}, indent=2),
    )


def _learned_ends(file: Path, data: DataConfig) -> list[int]:
    """Return the ids with which the chat template that a run was trained with closes a turn, if it
    was and one does.
    """
    has_templates = "template_args" in SOURCES[data.source].reads
    if not has_templates or not read_templates(file):
        return []
    writer = open_writer(file, data.template_args, data.template_date)
    return ends_of_turn(writer, load_tokenizer(file, bos=data.bos))


def _end_at(ids: Sequence[int], generation: Path) -> None:
    """Let what is generated end at ids besides those that a generation_config.json, which may be
    missing, has.
    """
    if generation.exists():
        config = read_json(generation)
    else:
        config = {}
    there = config.get("eos_token_id")
    if isinstance(there, list):
        ends = there
    elif isinstance(there, int):
        ends = [there]
    else:
        ends = []
    more = [id for id in ids if id not in ends]
    if not more:
        return
    ends = [*ends, *more]
    config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    # with it transformers would take the ids of config.json instead
    config.pop("_from_model_config", None)
    write_whole(generation, json.dumps(config, indent=2) + "\n")


def exported_ids(source: Path, bos: Bos) -> dict[str, Any]:
    """Return the token ids for the config.json of a run's export: those of the folder that it was
    imported from, or what its tokenizer says; none where there is neither.

    Args:
      source: the run folder.

    Returns:
      Ids by their key in config.json: `{"eos_token_id": 2}`.

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
    """Keep the tokenizer of a run in its folder, where it is never replaced once the run has
    weights.

    Until the run has trained, what lies beside it is what lies beside the tokenizer of the data.

    Args:
      tokenizer: the tokenizer of the data.

    Raises:
      UserError: the run has another, or a file cannot be read.
    """
    own = folder / TOKENIZER
    steps = finished_steps(folder)
    if own.exists() and steps:
        if load_tokenizer(own).to_json() != tokenizer.to_json():
            raise _another("the tokenizer of the data", folder)
        if steps == _IMPORTED and tokenizer.file is not None and read_declared(tokenizer.file):
            carry_declared(tokenizer.file, own)
        return
    if tokenizer.file is not None and tokenizer.file.name == TOKENIZER:
        carry_tokenizer(tokenizer.file.parent, folder)
    else:
        for name in _FORMS:
            (folder / name).unlink(missing_ok=True)
        carry_declared(tokenizer.file, own)
    write_whole(own, tokenizer.to_json())


def with_own_tokenizer(data: DataConfig, folder: Path, say: Say = lambda line: None) -> DataConfig:
    """Return the data of a run with its own copy of the tokenizer, once the run has weights that
    know its ids.

    An import that has not trained yet takes what the files beside another copy of its tokenizer
    declare, such as the chat template that a model without one is to be tuned with.

    Args:
      folder: the run folder, or where it will be.
      say: gets a line where the file that the run's config names has become another, or the files
        beside it declare something else than those of the run.

    Returns:
      The data with the path of that copy as their tokenizer, or as they are.

    Raises:
      UserError: another tokenizer is asked for than that of the run, or a file cannot be read.
    """
    own = folder / TOKENIZER
    steps = finished_steps(folder)
    data = replace(data, tokenizer=tokenizer_here(data.tokenizer))
    if not (own.exists() and is_run(folder) and steps):
        return data
    as_made = tokenizer_here(read_run_config(folder).data.tokenizer)
    kept = replace(data, tokenizer=str(own))
    if not _is_the_same(data, own):
        if data.tokenizer != as_made:
            raise _another(f"data.tokenizer={data.tokenizer}", folder)
        say(
            f"data.tokenizer={as_made} has changed since this run began: its own copy, {own}, "
            "is used"
        )
        return kept
    others = " and ".join(_declared_otherwise(data.tokenizer, own))
    if not others:
        return kept
    if steps == _IMPORTED:
        say(
            f"data.tokenizer={data.tokenizer}: the {others} beside it are taken in place of "
            "those that were imported"
        )
        return data
    say(
        f"data.tokenizer={data.tokenizer}: the {others} beside it are not those of this run, "
        "whose own are used"
    )
    return kept


def have_other_tokenizers(one: Path, other: Path) -> bool:
    """Whether two folders have tokenizers that differ, so that the ids of one mean other tokens in
    the other; False where one of them has none.
    """
    files = (one / TOKENIZER, other / TOKENIZER)
    if not all(file.exists() for file in files):
        return False
    if files[0].read_bytes() == files[1].read_bytes():
        return False
    try:
        texts = [load_tokenizer(file).to_json() for file in files]
    except UserError:  # one is damaged, or what reads it is not installed: they are not the same
        return True
    return texts[0] != texts[1]


def _declared_otherwise(name: str, own: Path) -> list[str]:
    """Return what the files beside a `data.tokenizer` declare, if anything, otherwise than those of
    a run.
    """
    file = Path(name)
    if not (name.endswith(".json") and file.exists() and read_declared(file)):
        return []
    found = {
        "chat templates": read_templates(file) == read_templates(own),
        "special tokens": read_special_tokens(file) == read_special_tokens(own),
    }
    return [what for what, is_the_same in found.items() if not is_the_same]


def _is_the_same(data: DataConfig, own: Path) -> bool:
    """Whether a `data.tokenizer` is the run's own: a file that is gone is taken for it, and so are
    its characters.

    Token files bring theirs, which is compared where they are read, unless a file is named.
    """
    name = data.tokenizer
    named = name.endswith(".json")
    if named and not Path(name).exists():
        return True
    if SOURCES[data.source].has_tokenizer and not named:
        return True
    there = load_tokenizer(own).to_json()
    if name == "chars":
        return json.loads(there).get("tokenizer") == name
    return make_tokenizer(name).to_json() == there


def _another(what: str, folder: Path) -> UserError:
    return UserError(
        f"{what} is not that of the run {folder}, whose weights know the ids of "
        f"{folder / TOKENIZER}: leave "
        f"data.tokenizer out, or begin another run with train.init={folder}"
    )
