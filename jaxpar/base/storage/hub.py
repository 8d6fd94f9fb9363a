"""Models and tokenizers of the Hugging Face Hub by their names, `hf://org/name`, as folders of this
machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpar.base.errors import UserError, name_by_url

# the oldest models have no org: gpt2
_NAME = re.compile(r"hf://?((?:[\w.-]+/)?[\w.-]+)(?:@([\w./-]+))?/?")
READ = ("*.safetensors", "*.json", "*.jinja")
"""The files that a model, its tokenizer and its chat template are read from."""
_TOKENIZER = "tokenizer.json"


def is_hub(path: str | Path) -> bool:
    """Return whether a path names a model of the Hub; `Path` may have made one slash of two."""
    return str(path).startswith("hf:/")


def hub_folder(path: str | Path) -> Path:
    """Fetch a model of the Hub, unless it is in the cache of `huggingface_hub` already.

    Where the Hub cannot be reached, the files in the cache are taken.

    Args:
      path: `hf://org/name`, or `hf://org/name@revision` with a branch, a tag or a commit.

    Returns:
      The model's folder in the cache, with the files of `READ`.

    Raises:
      UserError: there is no such model or revision, it is gated or private, or it can neither be
        reached nor is in the cache.
    """
    return _fetched(path, READ, "config.json", "model of a form that is read here")


def hub_tokenizer(path: str | Path) -> Path:
    """Fetch the tokenizer of a model of the Hub, without its weights.

    Args:
      path: `hf://org/name`, or `hf://org/name@revision` with a branch, a tag or a commit.

    Returns:
      The tokenizer.json in the cache, with the files beside it that say how it is used.

    Raises:
      UserError: there is no such model or revision, it is gated or private, it can neither be
        reached nor is in the cache, or it has no tokenizer.json.
    """
    files = [name for name in READ if name != "*.safetensors"]
    return _fetched(path, files, _TOKENIZER, "tokenizer of a form that is read here") / _TOKENIZER


def _fetched(path: str | Path, files: Sequence[str], needed: str, what: str) -> Path:
    """Fetch files of a model of the Hub, one of which it must have."""
    found = _NAME.fullmatch(str(path))
    if found is None:
        raise UserError(
            f"{path} names no model of the Hub: try hf://org/name, or hf://org/name@revision"
        )
    name, revision = found.groups()
    url = f"hf://{name}" + (f"@{revision}" if revision else "")
    try:
        from huggingface_hub import errors, snapshot_download
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError as error:
        raise UserError(
            f"{url} needs huggingface_hub, and {error}: pip install 'jaxpar[hf]'"
        ) from error
    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=list(files), ignore_patterns=["*/*"]
        )
    # whatever the library, its HTTP client or the disk raises
    except Exception as error:
        raise UserError(_reason(error, errors, url, HF_HUB_CACHE)) from error
    if not (Path(folder) / needed).exists():
        raise UserError(
            f"{url} has no {needed}, so it is no {what}: look at https://huggingface.co/{name}"
        )
    name_by_url(Path(folder), url)
    return Path(folder)


def _reason(error: Exception, errors: Any, url: str, cache: str) -> str:
    """Say in one line why a model could not be fetched, and what to try; `errors` is the library's
    module of errors.
    """
    page = f"https://huggingface.co/{url.removeprefix('hf://').partition('@')[0]}"
    if isinstance(error, errors.GatedRepoError):
        return f"{url} is gated: accept its terms at {page}, and set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{url} has no such revision: {page} lists its branches and commits"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{url} is not on the Hub, or it is private: look at its name, or set HF_TOKEN to a "
            "token that may read it"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"{url} is not in the cache ({cache}), and the Hub cannot be "
            "reached from here: fetch it where there is a network, and give the folder"
        )
    first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return f"{url} cannot be fetched ({first}): try again, or give a folder"
