"""The copies on this machine of data whose paths are URLs: files, folders, and a tokenizer with
what lies beside it. Token files are read by range (`jaxpar.data.range_cache`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from jaxpar.base.config import DataConfig
from jaxpar.base.errors import is_url
from jaxpar.base.storage import Bucket, as_url, local_path
from jaxpar.base.storage.hub import hub_tokenizer, is_hub
from jaxpar.data.patterns import IN_A_PATTERN, matches
from jaxpar.data.vocabulary.special_tokens import TOKENIZER

_SPLIT = re.compile(r":(?!//)(?![^\[]*\])")
"""The colon that parts a data set's path from its config and its split."""
_OF_A_TOKENIZER = ("*.json", "*.jinja", "tokenizer.model", "vocab.json", "merges.txt")
_LARGE_INDEX = "*.index.json"


def data_here(data: DataConfig) -> DataConfig:
    """Copy to this machine what a config reads from URLs.

    Args:
      data: the data, of which any path may be a URL.

    Returns:
      The config with paths of this machine, but for token files, which stay URLs.

    Raises:
      UserError: a bucket cannot be read.
    """
    tokenizer = tokenizer_here(data.tokenizer)
    if data.source == "tokens":
        return replace(data, tokenizer=tokenizer)
    return replace(
        data,
        path=_path_here(data.path, data.source),
        val_path=_path_here(data.val_path, data.source),
        mixture=tuple(_entry_here(entry, data.source) for entry in data.mixture),
        tokenizer=tokenizer,
    )


def tokenizer_here(path: str) -> str:
    """Copy a tokenizer to this machine, with the files beside it that say how it is used.

    Args:
      path: a `data.tokenizer`, which may be a URL, a folder that has a tokenizer.json, or a model
        of the Hugging Face Hub, `hf://org/name`.

    Returns:
      The path of the file on this machine; any other `path` is returned as it is.

    Raises:
      UserError: a bucket or the Hub cannot be read.
    """
    if is_hub(path):
        return str(hub_tokenizer(path))
    if not is_url(path):
        return str(Path(path) / TOKENIZER) if Path(path).is_dir() else path
    url = as_url(path)
    if not url.endswith(".json"):
        url = f"{url}/{TOKENIZER}"
    folder, _, name = url.rpartition("/")

    def belongs(other: str) -> bool:
        return other == name or any(
            fnmatch(other, pattern) and not fnmatch(other, _LARGE_INDEX)
            for pattern in _OF_A_TOKENIZER
        )

    return str(local_path(folder, belongs, f"tokenizer {name}") / name)


def _entry_here(entry: str, source: str) -> str:
    """Copy one entry of a mixture, a path and its weight, to this machine."""
    path, space, weight = entry.rpartition(" ")
    return f"{_path_here(path.strip(), source)}{space}{weight}" if is_url(path) else entry


def _path_here(path: str, source: str) -> str:
    if not is_url(path):
        return path
    url = as_url(path)
    names = list[str]()
    if source == "hf" and _SPLIT.search(url) and not _is_there(url):
        url, *names = _SPLIT.split(url)
    # a data set of Hugging Face has a name, and no pattern
    if source == "hf" or not IN_A_PATTERN.search(url) or _is_there(url):
        return ":".join([str(local_path(url)), *names])
    folder, pattern = _folder_of_pattern(url)
    found = local_path(folder, lambda name: matches(name, pattern), pattern)
    return f"{found}/{pattern}"


def _folder_of_pattern(url: str) -> tuple[str, str]:
    """Split a pattern into the folder below which it looks, and the rest, as `matching_files`
    does.
    """
    first = IN_A_PATTERN.search(url)
    assert first is not None
    folder = url[: first.start()].rpartition("/")[0]
    parts = url[len(folder) + 1 :].split("/")
    while len(parts) > 1 and _is_there(f"{folder}/{parts[0]}"):
        folder = f"{folder}/{parts[0]}"
        parts = parts[1:]
    return folder, "/".join(parts)


def _is_there(url: str) -> bool:
    """Return whether an object has this URL, or is in a folder that has it."""
    bucket = Bucket(url)
    return bucket.find() is not None or bool(bucket.files())
