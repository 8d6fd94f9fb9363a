"""Token files, written and opened.

A token file is NAME.bin (raw ids); beside it lie NAME.bin.json (dtype and counts), NAME.bin.docs
(raw int64 document starts) and NAME.bin.tokenizer.json, with the files beside that tokenizer under
such names too. A .bin alone is nanoGPT's, whose ids are uint16, or llm.c's, which has a header;
documents and tokenizer are unknown.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from jaxpar.base.atomic_write import replacing, write_whole
from jaxpar.base.config import DataConfig
from jaxpar.base.console import PlainConsole
from jaxpar.base.errors import UserError, is_url, read_json, reading, require_local
from jaxpar.base.storage import as_url, local_path
from jaxpar.data.range_cache import RangedFile, RangedIds
from jaxpar.data.streams.id_files import (
    IdFile,
    look_at,
    look_at_ranged,
    require_guess,
    require_ids,
)
from jaxpar.data.streams.texts import NOTHING_IN_IT, document_texts, left_out, source_files
from jaxpar.data.streams.tokens import Tokens
from jaxpar.data.streams.urls import data_here
from jaxpar.data.vocabulary.special_tokens import carry_declared
from jaxpar.data.vocabulary.tokenizer import (
    Tokenizer,
    encode_files,
    load_tokenizer,
    make_tokenizer,
    token_dtype,
)

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
    source = source_files(data.path if data.source == "text" else "", data)
    texts = (text for file in source.files for text in document_texts(file))
    tokenizer = make_tokenizer(data.tokenizer, texts, bos=data.bos)
    dtype = token_dtype(tokenizer.vocab_size)
    count = 0
    documents = 0
    empty = 0
    said = PlainConsole(stderr=True, soft_wrap=True)
    for note in tokenizer.notes:
        said.print(note)
    try:
        with replacing(out.with_suffix(".bin.docs")) as starts, replacing(out) as ids:
            progress = track(
                source.files,
                "tokenizing",
                console=said,
                transient=True,
                disable=not said.is_terminal,
            )
            for document in encode_files(progress, tokenizer, document_texts):
                if not len(document):
                    empty += 1
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
    return replace(open_tokens(out), note=left_out(empty) + source.note)


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
                f"write it again with `jaxpar tokenize --tokenizer {files[first]}`"
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
    """Refuse a token file whose documents begin in another way than texts do under `data.bos`."""
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
    """Open a token file, memory-mapped or, in a bucket, by range, with the files beside it; a
    UserError if one is missing, cut short or another's.
    """
    place = _place_of(path)
    if place.suffix != ".bin":
        raise UserError(
            f"{path} is not a .bin file, which data.source=tokens reads: for text set "
            "data.source=text"
        )
    if not is_url(path) and not place.exists():
        raise UserError(
            f"{path}, a file of token ids, is not there: `jaxpar tokenize TEXTS {path} "
            "--tokenizer hf://gpt2` writes it from a folder of text with GPT-2's tokenizer (extra "
            "hf); or train on the text itself with --data.source text"
        )
    file = RangedFile(str(path)) if is_url(path) else place
    itself = look_at_ranged(file) if isinstance(file, RangedFile) else look_at(file)
    described = place.with_suffix(".bin.json")
    meta = _read_description(described, file, itself)
    dtype = np.dtype(meta["dtype"]).newbyteorder("<")
    if isinstance(file, RangedFile):
        count = _require_ids_of(file.size - itself.offset, dtype, file.url)
        tokens = RangedIds(file, dtype, itself.offset, count)
    else:
        tokens = _memory_map(file, dtype, itself.offset)
    if not (itself.says or described.exists()):
        require_guess(tokens, str(file))
    _require_count(file, "tokens", len(tokens), meta)
    docs = place.with_suffix(".bin.docs")
    if not docs.exists():
        return Tokens(tokens, None, str(file), files=(file,))
    starts = _memory_map(docs, np.dtype("<i8"))
    _require_count(file, "documents", len(starts), meta)
    if not _begin_documents(starts, len(tokens)):
        raise UserError(
            f"{docs} is damaged: its documents do not begin one after another in {file}, so "
            "write them again"
        )
    return Tokens(tokens, starts, str(file), files=(file, docs))


def _read_description(described: Path, file: Path | RangedFile, itself: IdFile) -> dict[str, Any]:
    """Read what the .json beside a token file says of it, or else what the file says itself.

    Raises:
      UserError: it gives no dtype of ids, or another than the file's header.
    """
    if described.exists():
        kinds = {"dtype": str, "tokens": int, "documents": int}
        meta: dict[str, Any] = read_json(described, kinds)
    else:
        meta = {"dtype": itself.dtype}
    if meta.get("dtype") not in ("uint16", "uint32"):
        raise UserError(
            f'{described} describes a token file, so it must say "dtype": "uint16" or "uint32"'
        )
    if itself.says and meta["dtype"] != itself.dtype:
        raise UserError(
            f"{file} has llm.c's header for {itself.dtype}, and {described} says {meta['dtype']}"
        )
    return meta


def _require_count(file: Path | RangedFile, what: str, count: int, meta: dict[str, Any]) -> None:
    """Refuse a file that has another number of tokens or documents than its .json says."""
    if count != meta.get(what, count):
        raise UserError(
            f"{file} has {count} {what}, its .json says {meta[what]}: one of them was cut short "
            "or is from another run, so write them again with `jaxpar tokenize`"
        )


def _place_of(path: str | Path) -> Path:
    """Find where the files beside a token file lie on this machine; files of a bucket are
    copied.
    """
    if not is_url(path):
        return Path(path)
    folder, _, name = as_url(path).rpartition("/")
    if not name.endswith(".bin"):
        return Path(name)
    beside = local_path(folder, lambda other: other.startswith(f"{name}."), f"beside {name}")
    return beside / name


def _begin_documents(starts: np.ndarray, count: int) -> bool:
    """Return whether documents begin at `starts`, one after another, the first at 0, within so many
    tokens.
    """
    return bool(starts[0] == 0 and starts[-1] < count and (np.diff(starts) >= 0).all())


def _memory_map(path: Path, dtype: np.dtype, offset: int = 0) -> np.ndarray:
    with reading(path):
        _require_ids_of(path.stat().st_size - offset, dtype, str(path))
        return np.memmap(path, dtype, mode="r", offset=offset)


def _require_ids_of(size: int, dtype: np.dtype, path: str) -> int:
    """Count the ids in so many bytes; refuse none, and a part of one."""
    if size == 0 or size % dtype.itemsize:
        raise UserError(
            f"{path} has {size} bytes, not a positive multiple of {dtype.itemsize} "
            f"({dtype.name}): it was cut short, or needs a .bin.json beside it that gives another "
            "dtype"
        )
    return size // dtype.itemsize
