"""Files of this machine, given to `datasets`, which takes each path for a pattern."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jaxpar.base.errors import UserError, reading
from jaxpar.data.patterns import IN_A_PATTERN
from jaxpar.data.rows import is_json

_CARDS = ("README.md", ".huggingface.yaml")
"""The files in which a folder may say which of its files are which split."""
_HAS_CONFIGS = re.compile(r"^configs:", re.MULTILINE)


class _UnreadFile(logging.Filter):
    """A filter that keeps the name of a file that `datasets` cannot read: it logs the name, and
    raises the error without it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._name = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is logged: not where its error is raised too."""
        found = _UNREAD.match(record.getMessage())
        if found:
            self._name = found[1]
        return not found

    def take(self) -> str:
        """Return the name that was last logged, and forget it; empty = none."""
        name = self._name
        self._name = ""
        return name


_UNREAD = re.compile(r"Failed to read (?:file|schema from) '(.*?)' with error")
unread_file = _UnreadFile()
for _kind in ("csv", "json", "parquet"):
    logging.getLogger(f"datasets.packaged_modules.{_kind}.{_kind}").addFilter(unread_file)


def named_files(splits: Mapping[str, Iterable[Path]]) -> Any:
    """Make a `DataFilesDict` of files, as `datasets` keeps those that it has found.

    It equals another as long as no file is written anew.

    Args:
      splits: the files of each split.
    """
    from datasets.data_files import DataFilesDict, DataFilesList

    found = DataFilesDict()
    for split, files in splits.items():
        paths = [file.absolute() for file in files]
        written: list[Any] = [(str(path.stat().st_mtime),) for path in paths]
        found[split] = DataFilesList([str(path) for path in paths], written)
    return found


def is_pattern_to_datasets(place: Path) -> bool:
    """Return whether a folder's path has a character that `datasets` takes for a pattern's."""
    return bool(IN_A_PATTERN.search(str(place.resolve())))


def folder_splits(folder: Path) -> dict[str, list[Path]]:
    """Find the files of each split of a folder, as `datasets` tells them by the names of files and
    folders.

    `datasets` sees them through a link whose path has no character of a pattern.

    Raises:
      UserError: the folder has a card that says which files are which split.
    """
    from datasets.data_files import DataFilesDict, get_data_patterns
    from datasets.packaged_modules import _EXTENSION_TO_MODULE

    if has_configs(folder):
        raise UserError(
            f"{folder} has characters of a pattern in its path, and a README.md with configs, "
            "which `datasets` would look for by that pattern: rename the folder, or take single "
            "files"
        )
    with TemporaryDirectory() as made:
        link = Path(made).resolve() / "folder"
        link.symlink_to(folder.resolve(), target_is_directory=True)
        patterns = get_data_patterns(str(link))
        found = DataFilesDict.from_patterns(
            patterns, base_path=str(link), allowed_extensions=[*_EXTENSION_TO_MODULE, ".zip"]
        )
        return {
            split: [folder / Path(file).relative_to(link) for file in files]
            for split, files in found.items()
        }


def has_configs(folder: Path) -> bool:
    """Return whether a folder has a card that says which of its files are which split."""
    for name in _CARDS:
        card = folder / name
        if not card.is_file():
            continue
        with reading(card):
            text = card.read_text(encoding="utf-8", errors="replace")
        if card.suffix == ".md":
            text = text.removeprefix("---").partition("\n---")[0]
        if _HAS_CONFIGS.search(text):
            return True
    return False


def is_parquet(file: Path) -> bool:
    """Return whether a file's name ends as that of a Parquet file."""
    return file.suffix == ".parquet"


def is_table(file: Path) -> bool:
    """Return whether a file's name ends as that of a file of rows, JSON or another kind."""
    return is_json(file) or file.suffix in (".parquet", ".csv", ".tsv", ".arrow")
