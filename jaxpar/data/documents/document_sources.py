"""The sources that documents lie in: data sets of Hugging Face, Parquet and ArrayRecord files."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grain
import grain.experimental
import jax

from jaxpar.base.config import DataConfig
from jaxpar.base.console import console
from jaxpar.base.errors import UserError
from jaxpar.data.documents.data_set_files import (
    folder_splits,
    has_configs,
    is_parquet,
    is_pattern_to_datasets,
    is_table,
    named_files,
)
from jaxpar.data.patterns import matching_files
from jaxpar.data.rows import is_json
from jaxpar.data.streams.texts import files_below

_ENDLESS = 2**62
"""The number of documents of a stream that does not state it: more than any has."""
OpenedSource = grain.MapDataset | Callable[[], Any]
"""Documents in random access, or a function that opens a stream of them: an `IterableDataset` of
Hugging Face.
"""
Opened = tuple[OpenedSource, int | None, tuple[Path, ...]]
"""An opened source, the number of its documents, and its files, as far as these are known."""


class Unreadable(NamedTuple):
    """The reason why a record could not be read, in its place."""

    reason: str


class _Records:
    """Records in random access; a damaged record is `Unreadable`."""

    def __init__(self, inner: Any, origin: str):
        self.inner = inner
        self.origin = origin

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, place: int) -> Any:
        try:
            return self.inner[place]
        except Exception as error:  # each library raises exceptions of its own
            said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            return Unreadable(f"{self.origin}: record {place} cannot be read: {said}")


def open_hf(name: str, data: DataConfig) -> Opened:
    """Open `path`, `path:split` or `path:config:split`: a data set of the hub, a folder or a file.

    The split may be a slice or a sum of some, as `datasets` writes them: `train[:50%]`,
    `train[:10]+test`.
    """
    path, config, split = _split_name(name)
    place = Path(path)
    # from save_to_disk
    saved = (place / "dataset_dict.json").exists() or (place / "state.json").exists()
    load = None if saved else _loader(place, config, data.column)

    def opened() -> Any:
        if load is not None:
            found = _loaded_slices(load, split, data.streaming)
        else:
            found = _saved_slices(path, split)
            if data.streaming:
                found = found.to_iterable_dataset()
        if data.column in (found.column_names or ()):
            return found.select_columns(data.column)
        return found

    if place.is_file():
        files = (place,)
    elif place.is_dir():
        files = tuple(files_below(place))
    else:
        files = ()
    if data.streaming:
        return opened, None, files
    found = opened()
    records: Any = _Records(found, name)
    return grain.MapDataset.source(records), len(found), files


def _split_name(name: str) -> tuple[str, list[str], str]:
    """Split a name into the path, the config if there is one, and the split; a colon in a slice or
    a URL parts nothing.
    """
    if Path(name).exists():
        return name, [], "train"
    path, *others = re.split(r":(?!//)(?![^\[]*\])", name)
    if len(others) > 2:
        raise UserError(
            f"{name} is not path, path:split or path:config:split: it has {len(others)} colons"
        )
    if others:
        split = re.sub(r"\s*\+\s*", "+", others[-1])
    else:
        split = "train"
    return path, others[:-1], split


def _loader(place: Path, config: Sequence[str], column: str) -> Callable[[str, bool], Any]:
    """Make a function that loads a split of a data set as `datasets` does, streaming or not.

    Of files of JSON and Parquet only the column is read, as others may have another type in each
    file.
    """
    import datasets
    from datasets.load import infer_module_for_data_files

    load: Any = datasets.load_dataset
    if place.is_file():
        folder = place.absolute().parent
        splits = {"train": [place]}
    elif place.is_dir() and (is_pattern_to_datasets(place) or not (config or has_configs(place))):
        folder = place
        splits = folder_splits(place)
    else:
        return lambda split, streaming: load(str(place), *config, split=split, streaming=streaming)
    named = named_files(splits)
    kind, _ = infer_module_for_data_files(named, path=str(place))
    is_read = {"json": is_json, "parquet": is_parquet}.get(kind or "")
    if is_read is None:
        return lambda split, streaming: load(
            str(folder), *config, data_files=named, split=split, streaming=streaming
        )
    files = [file for found in splits.values() for file in found]
    _say_left_out(place, [file for file in files if is_table(file) and not is_read(file)])
    named = named_files({split: filter(is_read, found) for split, found in splits.items()})
    if kind == "json":
        return partial(_load_json, named, column)
    for file in filter(is_read, files):
        _read_parquet_head(file, column)
    return partial(_load_parquet, named, column)


def _say_left_out(folder: Path, files: Sequence[Path]) -> None:
    """Say which files of a folder are not read, as `datasets` reads files of one kind."""
    if files and jax.process_index() == 0:
        names = ", ".join(str(file.relative_to(folder)) for file in files[:3])
        more = "" if len(files) <= 3 else f" and {len(files) - 3} more"
        console().print(
            f"{folder} has files of several kinds, of which one is read: left out are {names}{more}"
        )


def _load_parquet(files: Any, column: str, split: str, streaming: bool) -> Any:
    import datasets

    from jaxpar.data.documents.json_documents import text_features

    load: Any = datasets.load_dataset
    return load(
        "parquet",
        data_files=files,
        columns=[column],
        features=text_features(column),
        split=split,
        streaming=streaming,
    )


def _load_json(files: Any, column: str, split: str, streaming: bool) -> Any:
    from jaxpar.data.documents.json_documents import JsonDocuments

    builder = JsonDocuments(dataset_name="json", data_files=files, column=column)
    if streaming:
        return builder.as_streaming_dataset(split=split)
    builder.download_and_prepare()
    return builder.as_dataset(split=split)


def _loaded_slices(load: Callable[[str, bool], Any], split: str, streaming: bool) -> Any:
    """Load a split, or slices of splits; `datasets` itself takes no slice of a stream."""
    import datasets

    if not streaming or not re.search(r"[\[+]", split):
        return load(split, streaming)
    instruction = datasets.ReadInstruction.from_spec(split)
    names = [part.split("[")[0].strip() for part in split.split("+")]
    streams = {name: load(name, True) for name in names}
    known = {name: (stream.info.splits or {}).get(name) for name, stream in streams.items()}
    sizes = {name: info.num_examples if info else 0 for name, info in known.items()}
    if not all(sizes.values()):
        if re.search(r"%|\[-|:-", split):
            raise UserError(
                f"{split} counts from the end of a stream, whose length is not known: set "
                "data.streaming=false, or "
                "count in documents from its beginning, as in train[1000:]"
            )
        sizes = dict.fromkeys(sizes, _ENDLESS)
    slices = [
        streams[part.splitname].skip(part.from_).take(part.to - part.from_)
        for part in instruction.to_absolute(sizes)
    ]
    return datasets.concatenate_datasets(slices)


def _saved_slices(path: str, split: str) -> Any:
    """Open a split, or slices of splits, of what `save_to_disk` wrote: several splits by name, or
    one.
    """
    import datasets

    found = datasets.load_from_disk(path)
    if not isinstance(found, datasets.DatasetDict):
        found = {str(found.split or split.split("[")[0]): found}
    instruction = datasets.ReadInstruction.from_spec(split)
    parts = instruction.to_absolute({name: len(part) for name, part in found.items()})
    slices = [found[part.splitname].select(range(part.from_, part.to)) for part in parts]
    return datasets.concatenate_datasets(slices)


def open_parquet(path: str, data: DataConfig) -> Opened:
    found = _files(path, ".parquet")
    counts = {file: _read_parquet_head(file, data.column) for file in found}
    files = [file for file, rows in counts.items() if rows]
    if not files:
        raise UserError(f"{path} is empty: its files have no rows")
    named = named_files({"train": files})
    opened = partial(_load_parquet, named, data.column, "train", streaming=True)
    return opened, sum(counts.values()), tuple(found)


def _read_parquet_head(file: Path, column: str) -> int:
    """Count the rows of a Parquet file, and refuse one without such a column of text."""
    import pyarrow
    import pyarrow.parquet

    try:
        about = pyarrow.parquet.read_metadata(file)
        schema = about.schema.to_arrow_schema()
    except pyarrow.ArrowException as error:
        raise UserError(f"cannot read {file} as data.source=parquet: {error}") from error
    _require_text_column(schema, file, column)
    return about.num_rows


def _require_text_column(schema: Any, file: Path, column: str) -> None:
    """Refuse a Parquet file whose schema (of Arrow) has no such column, or one that is no text."""
    from pyarrow import types

    if column not in schema.names:
        raise UserError(
            f"{file} has no column {column!r}, set data.column: it has {', '.join(schema.names)}"
        )
    kind = schema.field(column).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    text = (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_null(kind)
    )
    if not text:
        raise UserError(
            f"{file}: column {column!r} has a value that is no text: its type is {kind}"
        )


def open_arrayrecord(path: str, data: DataConfig) -> Opened:
    files = _files(path, ".array_record", ".arrayrecord")
    named: list[Any] = [_whole_file(file) for file in files]
    found: Any = grain.sources.ArrayRecordDataSource(named)
    records: Any = _Records(found, path)
    return grain.MapDataset.source(records), len(records), tuple(files)


class _WholeFile(NamedTuple):
    """An ArrayRecord file of which all records are read, as grain takes it."""

    filename: str
    skip: int
    take: int
    examples_in_shard: int


def _whole_file(file: Path) -> str | _WholeFile:
    """Name a file as grain takes it; a name such as `a[0:9]` is nine records of `a` to grain."""
    if not file.name.endswith("]"):
        return str(file)
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(str(file))
    count = reader.num_records()
    reader.close()
    return _WholeFile(str(file), 0, count, count)


def _files(path: str, *endings: str) -> list[Path]:
    """List the file at `path`, or the files below that folder, or those that match it as a pattern;
    sorted.
    """
    root = Path(path)
    if root.is_dir():
        found = [file for file in files_below(root) if file.suffix in endings]
    else:
        if root.is_file():
            found = [root]
        else:
            found = matching_files(path)
    if not found:
        pattern = f"a pattern like 'texts/*{endings[0]}'"
        raise UserError(f"no {endings[0]} file at {path}: give a file, a folder, or {pattern}")
    return found
