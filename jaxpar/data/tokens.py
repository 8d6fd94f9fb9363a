"""Reads text and token files as one long stream of tokens, which is cut into windows; writes token
files.

Shapes: N tokens of a stream, B rows of this process, S sequence length, T = S + 1.
"""

from __future__ import annotations

import json
import os
import platform
import sysconfig
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from rich.progress import track

from jaxpar.base.config import DataConfig
from jaxpar.base.console import PlainConsole
from jaxpar.base.errors import UserError, is_url, read_json, reading, require_local
from jaxpar.base.storage import as_url, local_path
from jaxpar.base.whole_files import replacing, write_whole
from jaxpar.data.id_files import look_at, look_at_ranged, require_guess, require_ids, unknown_id
from jaxpar.data.mapped import require_uncut
from jaxpar.data.parts import PartDefaults
from jaxpar.data.ranged import RangedFile, RangedIds
from jaxpar.data.special_tokens import carry_declared
from jaxpar.data.tokenizer import (
    UTF16_MARKS,
    Tokenizer,
    encode_files,
    load_tokenizer,
    make_tokenizer,
    read_text,
    token_dtype,
)
from jaxpar.data.urls import data_here

HostBatch = dict[str, np.ndarray]
"""`tokens` and `labels` (the next token; -1 = not counted), and if packed `segments` and
`positions`; int32 [B, S].
"""

# Folders of the standard library that hold other packages, tests or generated tables, or are often
# not installed.
_STDLIB_LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "encodings",
    "pydoc_data",
    "idlelib",
    "lib2to3",
    "turtledemo",
}


@dataclass(frozen=True)
class Tokens(PartDefaults):
    """A stream of tokens, unsigned ids [N], in memory, memory-mapped, or in a bucket."""

    tokens: np.ndarray | RangedIds
    document_starts: np.ndarray | None
    """Where each document begins, sorted int64 [documents], the first at 0; None = not known."""
    origin: str
    """The name of the file, folder or corpus, for messages."""
    offset: int = 0
    """How many tokens of `origin` come before these."""
    files: tuple[Path | RangedFile, ...] = ()
    """The files that they were read from, as far as there are any."""
    note: str = ""
    """What was left out."""
    begin_of_text: int | None = None
    """The id that each window begins with, in place of its first; None = windows begin as they were
    cut.
    """

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def sample(self) -> np.ndarray:
        if isinstance(self.tokens, RangedIds):
            return np.asarray(self.tokens[:_SAMPLE])
        return self.tokens

    @property
    def amount(self) -> str:
        return f"{self.size:,} tokens{self.note}"

    def split(self, val_fraction: float) -> tuple[Tokens, Tokens]:
        """Split off the last `val_fraction`; a document may be cut in two, as in nanoGPT's
        split.
        """
        cut = int(self.size * (1 - val_fraction))
        starts = train_starts = val_starts = self.document_starts
        if starts is not None:
            running = np.searchsorted(starts, cut, side="right") - 1
            train_starts = starts[: np.searchsorted(starts, cut)]
            val_starts = np.maximum(starts[running:] - cut, 0)
        train = replace(self, tokens=self.tokens[:cut], document_starts=train_starts)
        held_out = self.tokens[cut:]
        return train, replace(
            self, tokens=held_out, document_starts=val_starts, offset=cut, note=""
        )

    def require_enough(self, data: DataConfig, what: str, fix: str) -> None:
        """See `parts.Part`; documents are kept apart only where it is known where they begin."""
        super().require_enough(data, what, fix)
        if data.pack and self.document_starts is None:
            raise UserError(
                f"{self.origin} has no document offsets (.bin.docs) beside it, which data.pack "
                "needs: write it with `jaxpar tokenize`, or leave data.pack off"
            )


# Text, where each file is a document.


def load_texts(
    paths: Sequence[str], data: DataConfig, vocab_size: int
) -> tuple[list[Tokens], Tokenizer]:
    """Load text sources; an empty path is the standard library's. The tokenizer `chars` knows the
    characters of all.
    """
    sources = [_source_files(path, data) for path in paths]
    texts = (read_text(file) for files, _ in sources for file in files)
    tokenizer = make_tokenizer(data.tokenizer, texts, vocab_size, data.bos)
    streams = []
    for files, origin in sources:
        documents = [document for document in encode_files(files, tokenizer) if len(document)]
        if not documents:
            raise UserError(f"{origin} {NOTHING_IN_IT}")
        ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        note = left_out(len(files) - len(documents))
        origins = tuple(files)
        begin = tokenizer.begin_of_text
        found = Tokens(
            np.concatenate(documents), starts, origin, files=origins, note=note, begin_of_text=begin
        )
        streams.append(found)
    return streams, tokenizer


_SAMPLE = 2**24
"""Ids of a file in a bucket that are read for their frequencies."""
NOTHING_IN_IT = "is empty: there is no document with text in it"


def left_out(empty: int, of: int = 0) -> str:
    """Return the note on so many documents without text, which may be those `of` the first that
    were read.
    """
    among = f" of the first {of:,}" if of else ""
    if empty:
        return f" (documents without text, left out: {empty:,}{among})"
    return ""


def _source_files(path: str, data: DataConfig) -> tuple[list[Path], str]:
    """Return the documents of a text source, and a name for it."""
    if path:
        return text_files(path), path
    return stdlib_files(
        data.max_bytes
    ), f"the standard library of Python {platform.python_version()}"


def stdlib_files(max_bytes: int) -> list[Path]:
    """Return as many of Python's own library sources, sorted by path, as fit in `max_bytes`; no
    tests, no tables.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    # The build of Python writes _sysconfigdata, which has paths of that machine.
    sources = [file for file in files_below(root, _STDLIB_LEFT_OUT) if file.match("*.py")]
    files = [file for file in sources if not file.name.startswith("_sysconfigdata")]
    total = np.cumsum([file.stat().st_size for file in files])
    files = files[: np.searchsorted(total, max_bytes, side="right")]
    if not files:
        raise UserError(
            f"no standard library source in {root} fits in data.max_bytes={max_bytes}: raise it"
        )
    return files


def text_files(path: str) -> list[Path]:
    """Return the file at `path`, or every text file in the folder, sorted by path.

    Hidden and empty files of a folder are left out, and so are files with a NUL byte in their first
    8 KiB (git's test for binary), so that a picture among the texts does no harm.
    """
    root = Path(path)
    if root.is_file():
        if root.stat().st_size == 0:
            raise UserError(f"{path} is empty: give a file with text in it")
        return [root]
    if not root.is_dir():
        raise UserError(f"no file or folder {path}: look at data.path and data.val_path")
    files = [file for file in files_below(root) if not _looks_binary(file)]
    if not files:
        raise UserError(
            f"folder {path} has no text in it: hidden, empty and binary files do not count"
        )
    return files


def files_below(root: Path, left_out: Collection[str] = ()) -> list[Path]:
    """Return a folder's files, sorted by relative path, but no empty or hidden ones and none in
    `left_out` folders.
    """
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(".") and name not in left_out]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    found = [file for file in found if file.is_file() and file.stat().st_size]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _looks_binary(file: Path) -> bool:
    with reading(file), file.open("rb") as opened:
        beginning = opened.read(8192)
    # text, which `read_text` says is to convert
    return b"\0" in beginning and not beginning.startswith(UTF16_MARKS)


# A token file is NAME.bin (raw ids); beside it lie NAME.bin.json (dtype and counts), NAME.bin.docs
# (raw int64 document starts) and NAME.bin.tokenizer.json, with the files beside that tokenizer
# under such names too. A .bin alone is nanoGPT's, whose ids are uint16, or llm.c's, which has a
# header; documents and tokenizer are unknown.

_BEGIN = "begin_of_text"


def tokenize(data: DataConfig, out: str | Path) -> Tokens:
    """Write the text source of a config as a token file, and open it.

    Of the config count `source`, `path`, `tokenizer`, `bos` and `max_bytes`. One document is in
    memory at a time, progress goes to stderr, and each file appears whole or not at all. A
    UserError says what is wrong with the source or the name, or why a file cannot be written.
    """
    require_local(out)
    data = data_here(data)
    out = Path(out)
    if out.suffix != ".bin" or data.source == "tokens":
        raise UserError(
            f"tokenize writes text to a .bin file, found source={data.source} and {out}: try "
            "tokens.bin"
        )
    files, _ = _source_files(data.path if data.source == "text" else "", data)
    tokenizer = make_tokenizer(data.tokenizer, map(read_text, files), bos=data.bos)
    dtype = token_dtype(tokenizer.vocab_size)
    count = 0
    documents = 0
    said = PlainConsole(stderr=True, soft_wrap=True)
    for note in tokenizer.notes:
        said.print(note)
    try:
        with replacing(out.with_suffix(".bin.docs")) as starts, replacing(out) as ids:
            progress = track(
                files, "tokenizing", console=said, transient=True, disable=not said.is_terminal
            )
            for document in encode_files(progress, tokenizer):
                if not len(document):
                    continue
                starts.write(np.array(count, "<i8").tobytes())
                ids.write(document.tobytes())
                count += len(document)
                documents += 1
            if not documents:
                raise UserError(f"{data.path} {NOTHING_IN_IT}")
        begin = tokenizer.begin_of_text
        meta = {"dtype": dtype.name, "tokens": count, "documents": documents, _BEGIN: begin}
        write_whole(out.with_suffix(".bin.json"), json.dumps(meta))
        write_whole(out.with_suffix(".bin.tokenizer.json"), tokenizer.to_json())
        carry_declared(tokenizer.file, out.with_suffix(".bin.tokenizer.json"))
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    return replace(open_tokens(out), note=left_out(len(files) - documents))


def load_token_files(
    paths: Sequence[str], data: DataConfig, vocab_size: int
) -> tuple[list[Tokens], Tokenizer | None]:
    """Open token files, which must all have been written with one tokenizer, as far as they say."""
    streams = [open_tokens(path) for path in paths]
    named = data.tokenizer
    for stream in streams:
        require_ids(stream.tokens, vocab_size, stream.origin)
    files = {path: _place_of(path).with_suffix(".bin.tokenizer.json") for path in paths}
    # Presets name a tokenizer file that need not exist, because a .bin brings its own.
    if named.endswith(".json") and (Path(named).exists() or not files[paths[0]].exists()):
        files = {f"data.tokenizer={named}": Path(named)} | files
    there = {what: file for what, file in files.items() if file.exists() or what not in paths}
    known = {what: load_tokenizer(file, vocab_size, data.bos) for what, file in there.items()}
    first = next(iter(known), "")
    for what, tokenizer in known.items():
        if tokenizer.to_json() != known[first].to_json():
            raise UserError(
                f"{what} was tokenized otherwise than {first}, so its ids mean something else: "
                "write it again with "
                f"`jaxpar tokenize --tokenizer {files[first]}`"
            )
    tokenizer = known.get(first)
    if tokenizer:
        begin = tokenizer.begin_of_text
    else:
        begin = None
    for stream in streams if tokenizer else ():
        _require_begin(stream, begin)
    return [replace(stream, begin_of_text=begin) for stream in streams], tokenizer


def _require_begin(stream: Tokens, begin: int | None) -> None:
    """Refuse a token file whose documents begin otherwise than texts do under `data.bos`."""
    described = _place_of(stream.origin).with_suffix(".bin.json")
    if described.exists():
        meta = read_json(described)
    else:
        meta = {}
    there = meta.get(_BEGIN)
    # written by an older version
    if _BEGIN not in meta and begin is not None and stream.document_starts is not None:
        if stream.tokens[0] == begin:
            there = begin
        else:
            there = None
    elif _BEGIN not in meta:
        return
    if there != begin:
        if there is None:
            found = "without a begin of text"
        else:
            found = f"with id {there} before each document"
        if begin is None:
            wanted = "takes none"
        else:
            wanted = f"puts id {begin} there"
        other = "false" if there is None else "true"
        raise UserError(
            f"{stream.origin} was written {found}, and this config {wanted}: set data.bos={other}, "
            "or write it again with `jaxpar tokenize`"
        )


def open_tokens(path: str | Path) -> Tokens:
    """Open a token file, memory-mapped or, in a bucket, by range, with those beside it; a UserError
    if one is missing, cut short or another's.
    """
    place = _place_of(path)
    if place.suffix != ".bin":
        raise UserError(
            f"{path} is not a .bin file, which data.source=tokens reads: for text set "
            "data.source=text"
        )
    described = place.with_suffix(".bin.json")
    file = RangedFile(str(path)) if is_url(path) else place
    itself = look_at_ranged(file) if isinstance(file, RangedFile) else look_at(file)
    kinds = {"dtype": str, "tokens": int, "documents": int}
    meta: dict[str, Any] = (
        read_json(described, kinds) if described.exists() else {"dtype": itself.dtype}
    )
    if meta.get("dtype") not in ("uint16", "uint32"):
        raise UserError(
            f'{described} describes a token file, so it must say "dtype": "uint16" or "uint32"'
        )
    if itself.says and meta["dtype"] != itself.dtype:
        raise UserError(
            f"{file} has llm.c's header for {itself.dtype}, and {described} says {meta['dtype']}"
        )
    dtype = np.dtype(meta["dtype"]).newbyteorder("<")
    if isinstance(file, RangedFile):
        count = _require_ids_of(file.size - itself.offset, dtype, file.url)
        tokens = RangedIds(file, dtype, itself.offset, count)
    else:
        tokens = _memory_map(file, dtype, itself.offset)
    if not (itself.says or described.exists()):
        require_guess(tokens, str(file))
    docs = place.with_suffix(".bin.docs")
    if docs.exists():
        starts = _memory_map(docs, np.dtype("<i8"))
    else:
        starts = None
    for what, found in (("tokens", tokens), ("documents", starts)):
        if found is not None and len(found) != meta.get(what, len(found)):
            raise UserError(
                f"{file} has {len(found)} {what}, its .json says {meta[what]}: "
                "one of them was cut short or is from another run, so write them again with "
                "`jaxpar tokenize`"
            )
    if starts is not None and not _begin_documents(starts, len(tokens)):
        raise UserError(
            f"{docs} is damaged: its documents do not begin one after another in {file}, so "
            "write them again"
        )
    if docs.exists():
        files = (file, docs)
    else:
        files = (file,)
    return Tokens(tokens, starts, str(file), files=files)


def _place_of(path: str | Path) -> Path:
    """Where the files beside a token file lie on this machine; those of a bucket are copied."""
    if not is_url(path):
        return Path(path)
    folder, _, name = as_url(path).rpartition("/")
    if not name.endswith(".bin"):
        return Path(name)
    beside = local_path(folder, lambda other: other.startswith(f"{name}."), f"beside {name}")
    return beside / name


def _begin_documents(starts: np.ndarray, count: int) -> bool:
    """Whether documents begin there, one after another, from the first of so many tokens on."""
    return bool(starts[0] == 0 and starts[-1] < count and (np.diff(starts) >= 0).all())


def _memory_map(path: Path, dtype: np.dtype, offset: int = 0) -> np.ndarray:
    with reading(path):
        _require_ids_of(path.stat().st_size - offset, dtype, str(path))
        return np.memmap(path, dtype, mode="r", offset=offset)


def _require_ids_of(size: int, dtype: np.dtype, path: str) -> int:
    """Return how many ids so many bytes are; refuse none, and a part of one."""
    if size == 0 or size % dtype.itemsize:
        raise UserError(
            f"{path} has {size} bytes, not a positive multiple of {dtype.itemsize} "
            f"({dtype.name}): "
            "it was cut short, or needs a .bin.json beside it that gives another dtype"
        )
    return size // dtype.itemsize


# Windows.


def window_count(stream: Tokens, seq_len: int, stride: int) -> int:
    """Count the windows of seq_len tokens, plus the label of the last token, that begin at
    multiples of `stride`.
    """
    return max((len(stream.tokens) - seq_len - 1) // stride + 1, 0)


def read_windows(
    stream: Tokens, starts_B: np.ndarray, seq_len: int, pack: bool, vocab_size: int
) -> HostBatch:
    """Read the windows that begin at `starts_B` as a batch.

    Where texts begin with an id of their own (`begin_of_text`), so does each window, in place of
    its first token. That token is still the last label of the window before, so none is lost.

    If packed, `segments` numbers the documents of a window from 1, `positions` counts from the
    start of the document or, where it began earlier, of the window, and the last token of a
    document has label -1.

    Raises:
      UserError: the vocabulary does not have an id that was read, or the file was cut meanwhile.
    """
    if isinstance(stream.tokens, RangedIds):
        ids_BT = stream.tokens.windows(starts_B, seq_len + 1)
    else:
        require_uncut(stream.tokens, stream.origin)
        ids_BT = sliding_window_view(stream.tokens, seq_len + 1)[starts_B]
    if ids_BT.max() >= vocab_size:
        row, place = np.unravel_index(ids_BT.argmax(), ids_BT.shape)
        at = stream.offset + starts_B[row] + place
        raise unknown_id(int(ids_BT[row, place]), stream.origin, at, vocab_size)
    batch = {
        "tokens": ids_BT[:, :-1].astype(np.int32),
        "labels": ids_BT[:, 1:].astype(np.int32),
    }
    begin = stream.begin_of_text
    if begin is not None:
        batch["tokens"][:, 0] = begin
    if not pack and (begin is None or stream.document_starts is None):
        return batch
    assert stream.document_starts is not None, (
        "load_corpus refuses data.pack without document starts"
    )
    require_uncut(stream.document_starts, f"{stream.origin}.docs")
    where_BT = starts_B[:, None] + np.arange(seq_len + 1)
    document_BT = np.searchsorted(stream.document_starts, where_BT, side="right") - 1
    # nor is a begin of text, which is given, a label
    batch["labels"][document_BT[:, 1:] != document_BT[:, :-1]] = -1
    if not pack:
        return batch
    begin_BT = np.maximum(stream.document_starts[document_BT], starts_B[:, None])
    batch["segments"] = (document_BT - document_BT[:, :1] + 1)[:, :-1].astype(np.int32)
    batch["positions"] = (where_BT - begin_BT)[:, :-1].astype(np.int32)
    return batch
