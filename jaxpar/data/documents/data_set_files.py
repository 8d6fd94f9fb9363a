"""Gives files of this machine to `datasets`, which takes each path for a pattern."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jaxpar.base.errors import UserError, reading
from jaxpar.data.patterns import IN_A_PATTERN

_CARDS = ("README.md", ".huggingface.yaml")
"""Where a folder may say which of its files are which split."""
_HAS_CONFIGS = re.compile(r"^configs:", re.MULTILINE)


def named_files(splits: Mapping[str, Iterable[Path]]) -> Any:
    """Return files in the form in which `datasets` keeps those that it has found.

    Args:
      splits: the files of each split.

    Returns:
      A `DataFilesDict`, which is equal to another as long as no file is written anew.
    """
    from datasets.data_files import DataFilesDict, DataFilesList

    found = DataFilesDict()
    for split, files in splits.items():
        paths = [file.absolute() for file in files]
        written = [(str(path.stat().st_mtime),) for path in paths]
        found[split] = DataFilesList([str(path) for path in paths], written)
    return found


def is_pattern_to_datasets(place: Path) -> bool:
    """Return whether a folder's path has a character that `datasets` takes for a pattern's."""
    return bool(IN_A_PATTERN.search(str(place.resolve())))


def folder_splits(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each split of a folder, as the names of files and folders tell them to
    `datasets`.

    It looks at them through a link whose path has no character of a pattern.

    Raises:
      UserError: the folder has a card that says which files are which split.
    """
    from datasets.data_files import DataFilesDict, get_data_patterns

    for name in _CARDS:
        card = folder / name
        if card.is_file() and _has_configs(card):
            raise UserError(
                f"{folder} has characters of a pattern in its path, and {name} with configs, which "
                "`datasets` would look for by that pattern: rename the folder, or take single files"
            )
    with TemporaryDirectory() as made:
        link = Path(made).resolve() / "folder"
        link.symlink_to(folder.resolve(), target_is_directory=True)
        patterns = get_data_patterns(str(link))
        found = DataFilesDict.from_patterns(patterns, base_path=str(link))
        return {
            split: [folder / Path(file).relative_to(link) for file in files]
            for split, files in found.items()
        }


def _has_configs(card: Path) -> bool:
    with reading(card):
        text = card.read_text(encoding="utf-8", errors="replace")
    if card.suffix == ".md":
        text = text.removeprefix("---").partition("\n---")[0]
    return bool(_HAS_CONFIGS.search(text))
