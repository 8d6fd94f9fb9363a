"""The identity of a run's data and tokenizer, which the manifest of a checkpoint has. A reader of
the checkpoint compares the tokenizer's files with the run folder's; the data are there for people
to look at.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from jaxpar.base.errors import Say, UserError, is_kind, read_bytes
from jaxpar.data.identity import Piece
from jaxpar.data.vocabulary.special_tokens import TOKEN_IDS, TOKENIZER, declaring_files
from jaxpar.train.runs.folder.manifest import Manifest

_DATA = "data"
_TOKENIZER = "tokenizer"
_MEANING = (TOKENIZER, TOKEN_IDS)
"""The files that give ids their meaning: weights are good for nothing with others."""


def run_identity(folder: Path, pieces: Sequence[Piece]) -> dict[str, Any]:
    """Make the hashes by which the data and the tokenizer of a run are told from others.

    Args:
      pieces: the parts of the data.

    Raises:
      UserError: a file of the tokenizer cannot be read.
    """
    contents = json.dumps([[piece.length, piece.hash] for piece in pieces])
    return {_DATA: _hash(contents.encode()), _TOKENIZER: _tokenizer_hashes(folder)}


def _tokenizer_hashes(folder: Path) -> dict[str, str]:
    """Hash each file of a run's tokenizer, by name."""
    own = folder / TOKENIZER
    names = [TOKENIZER] if own.exists() else []
    found = dict[str, str]()
    for name in [*names, *declaring_files(own)]:
        found[name] = _hash(read_bytes(folder / name))
    return found


def require_tokenizer_files(folder: Path, manifest: Manifest | None, say: Say) -> None:
    """Compare the files of a run's tokenizer with those that a step was saved with.

    An import may be given another tokenizer, or other files beside it, until it is trained.

    Args:
      manifest: the manifest of the step; None = it has none, and nothing is compared.
      say: gets a line about each changed file that does not change the meaning of ids, such as a
        chat template that somebody has mended.

    Raises:
      UserError: a file that gives ids their meaning has changed or is gone.
    """
    before = {} if manifest is None else manifest.identity.get(_TOKENIZER, {})
    if manifest is None or not manifest.step or not is_kind(before, dict[str, str]):
        return
    now = _tokenizer_hashes(folder)
    for name, known in before.items():
        if now.get(name) == known:
            continue
        what = "is not as it was" if name in now else "is gone that was there"
        message = f"{folder / name} {what} when step {manifest.step} was saved"
        if name in _MEANING:
            raise UserError(f"{message}: bring it back, as the weights know its ids alone")
        say(f"warning: {message}: bring it back, unless you have changed it")


def _hash(content: bytes) -> str:
    return xxhash.xxh3_128(content).hexdigest()
