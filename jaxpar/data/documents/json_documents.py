"""One column of JSON files as a data set of `datasets`, whatever other columns the files have.

The reader of `datasets` makes a table of all columns, which must then be of one type in all files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow

from jaxpar.data.rows import row_texts


@dataclass
class _OneColumn(datasets.BuilderConfig):
    column: str = "text"


class JsonDocuments(datasets.ArrowBasedBuilder):
    """The texts of a column of JSON files; a row without text gives None."""

    BUILDER_CONFIG_CLASS = _OneColumn
    config: Any

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=text_features(self.config.column))

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        return [
            datasets.SplitGenerator(name=split, gen_kwargs={"files": list(files)})
            for split, files in self.config.data_files.items()
        ]

    # the arguments are those of `gen_kwargs`
    def _generate_tables(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, files: Sequence[str]
    ) -> Iterator[tuple[Any, pyarrow.Table]]:
        column = self.config.column
        for number, file in enumerate(files):
            for place, texts in enumerate(row_texts(Path(file), column, "set data.column")):
                table = pyarrow.table({column: pyarrow.array(texts, pyarrow.string())})
                yield (number, place), table


def text_features(column: str) -> datasets.Features:
    """Describe a table of one column of text to `datasets`."""
    return datasets.Features({column: datasets.Value("string")})
