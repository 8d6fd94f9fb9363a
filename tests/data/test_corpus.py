import bz2
import gzip
import json
import lzma
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.base.config import DataConfig
from jaxpar.base.errors import UserError
from jaxpar.data.corpus import load_corpus, train_batches, unigram_entropy, val_batches
from jaxpar.data.mixture import Mixture
from jaxpar.data.patterns import matches
from jaxpar.data.streams.texts import data_files, is_text, stdlib_files
from jaxpar.data.streams.token_files import open_tokens, tokenize
from jaxpar.data.streams.tokens import Tokens, read_windows, window_count
from jaxpar.data.vocabulary.tokenizer import BytesTokenizer, CharsTokenizer

VOCAB = 1000


def numbered(count, starts=(0,)):
    """A stream whose ids are their own places, so that a batch tells where it was read."""
    return Tokens(
        np.arange(count, dtype=np.uint16),
        np.array(starts),
        "numbers",
    )


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for left, right in zip(found, expected, strict=True):
        assert left.keys() == right.keys()
        for key in left:
            np.testing.assert_array_equal(left[key], right[key], err_msg=key)


@st.composite
def packed_case(draw):
    """A stream with documents, and windows of it."""
    lengths = draw(
        st.lists(
            st.integers(1, 9),
            min_size=1,
            max_size=12,
        )
    )
    seq_len = draw(st.integers(1, 12))
    lengths.append(seq_len + 1)
    starts = np.cumsum([0, *lengths[:-1]])
    count = sum(lengths)
    windows = draw(
        st.lists(
            st.integers(0, count - seq_len - 1),
            min_size=1,
            max_size=4,
        )
    )
    return numbered(count, starts), seq_len, np.array(windows)


def slow_window(stream, start, seq_len):
    """One packed window, token by token."""
    begins = set(stream.document_starts.tolist())
    tokens = []
    labels = []
    segments = []
    positions = []
    segment = 1
    position = 0
    for place in range(start, start + seq_len):
        if place in begins and place > start:
            segment = segment + 1
            position = 0
        tokens.append(int(stream.tokens[place]))
        labels.append(-1 if place + 1 in begins else int(stream.tokens[place + 1]))
        segments.append(segment)
        positions.append(position)
        position += 1
    return {"tokens": tokens, "labels": labels, "segments": segments, "positions": positions}


@given(packed_case())
def test_packed_windows_equal_the_slow_reference(case):
    stream, seq_len, starts = case
    batch = read_windows(stream, starts, seq_len, pack=True, vocab_size=VOCAB)
    assert batch.keys() == {"tokens", "labels", "segments", "positions"}
    for row, start in enumerate(starts):
        for key, expected in slow_window(stream, int(start), seq_len).items():
            assert batch[key].dtype == np.int32
            assert batch[key][row].tolist() == expected, key


def test_plain_windows_have_the_next_token_as_label():
    batch = read_windows(
        numbered(20, (0, 4)),
        np.array([3, 0]),
        5,
        pack=False,
        vocab_size=VOCAB,
    )
    assert batch.keys() == {"tokens", "labels"}
    np.testing.assert_array_equal(
        batch["tokens"],
        [
            [3, 4, 5, 6, 7],
            [0, 1, 2, 3, 4],
        ],
    )
    np.testing.assert_array_equal(batch["labels"], batch["tokens"] + 1)
    assert batch["tokens"].dtype == batch["labels"].dtype == np.int32


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 15),
)
def test_window_count_is_what_fits(count, seq_len, stride):
    fitting = [start for start in range(0, count, stride) if start + seq_len + 1 <= count]
    assert window_count(numbered(count), seq_len, stride) == len(fitting)


@pytest.mark.parametrize("stride", [0, 1, 3])
def test_each_epoch_has_every_window_once_in_a_new_order(stride):
    stream = numbered(46)
    data = DataConfig(seq_len=4, stride=stride)
    windows = window_count(stream, 4, stride or 4)
    data_iterator = train_batches(stream, data, 1, [0], VOCAB)
    epochs = [
        [int(batch["tokens"][0, 0]) for batch in take(data_iterator, windows)] for _ in range(3)
    ]
    for epoch in epochs:
        assert sorted(epoch) == [i * (stride or 4) for i in range(windows)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(epoch != sorted(epoch) for epoch in epochs)


def test_order_comes_from_the_seed():
    stream = numbered(100)
    data = DataConfig(seq_len=4)
    first = take(train_batches(stream, data, 6, range(6), VOCAB), 5)
    assert_same(
        take(train_batches(stream, data, 6, range(6), VOCAB), 5),
        first,
    )
    other = take(
        train_batches(stream, replace(data, seed=1), 6, range(6), VOCAB),
        5,
    )
    assert any((a["tokens"] != b["tokens"]).any() for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("pack", [False, True])
def test_rows_of_all_processes_make_the_global_batch(pack):
    stream = numbered(200, (0, 31, 77, 150))
    data = DataConfig(seq_len=5, pack=pack)
    whole = take(train_batches(stream, data, 6, range(6), VOCAB), 9)
    for parts in ([[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]):
        processes = [take(train_batches(stream, data, 6, rows, VOCAB), 9) for rows in parts]
        order = np.argsort(np.concatenate(parts))
        joined = [
            {key: np.concatenate([part[key] for part in step])[order] for key in step[0]}
            for step in zip(*processes, strict=True)
        ]
        assert_same(joined, whole)


@settings(deadline=None, max_examples=20)
@given(
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(0, 5),
    st.integers(0, 5),
)
@pytest.mark.slow
def test_resume_is_exact_whatever_was_read_ahead(before, after, prefetch, prefetch_resumed):
    stream = numbered(60, (0, 20))
    data = DataConfig(seq_len=4, prefetch=prefetch, pack=True)
    running = train_batches(stream, data, 4, range(4), VOCAB)
    take(running, before)
    state = json.loads(json.dumps(running.get_state()))
    expected = take(running, after)
    resumed = train_batches(stream, replace(data, prefetch=prefetch_resumed), 4, range(4), VOCAB)
    take(resumed, 2)
    resumed.set_state(state)
    assert_same(take(resumed, after), expected)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_unknown_id_reaches_the_caller_as_a_user_error(prefetch):
    stream = replace(numbered(49), offset=7)
    iterator = train_batches(
        stream,
        DataConfig(seq_len=4, prefetch=prefetch),
        4,
        range(4),
        48,
    )
    with pytest.raises(
        UserError, match=r"numbers has id 48 at token 55, model\.vocab_size=48: .* at least 49"
    ):
        take(iterator, 4)  # an epoch is 12 windows
    assert len(take(train_batches(stream, DataConfig(seq_len=4), 4, range(4), 49), 4)) == 4


def test_large_unsigned_id_does_not_wrap():
    stream = Tokens(
        np.array([1, 2**32 - 1, 3], np.uint32),
        None,
        "wide",
    )
    with pytest.raises(UserError, match="wide has id 4294967295 at token 1"):
        read_windows(stream, np.array([0]), 2, pack=False, vocab_size=VOCAB)


@given(
    st.integers(1, 40),
    st.integers(1, 6),
    st.integers(1, 7),
)
def test_validation_sees_every_window_once_and_pads_with_uncounted_rows(extra, seq_len, batch):
    stream = numbered(seq_len + extra)
    data = DataConfig(seq_len=seq_len, stride=1)
    batches = list(val_batches(stream, data, batch, range(batch), VOCAB))
    windows = (len(stream.tokens) - 1) // seq_len
    assert len(batches) == math.ceil(windows / batch)
    assert all(b["tokens"].shape == b["labels"].shape == (batch, seq_len) for b in batches)
    labels = np.concatenate([b["labels"] for b in batches])
    np.testing.assert_array_equal(
        labels[:windows].ravel(),
        np.arange(1, windows * seq_len + 1),
    )
    assert (labels[windows:] == -1).all()
    tokens = np.concatenate([b["tokens"] for b in batches])
    np.testing.assert_array_equal(tokens[:windows], labels[:windows] - 1)


def test_validation_rows_and_limit():
    stream = numbered(102, (0, 50))
    data = DataConfig(seq_len=4, pack=True)
    whole = list(val_batches(stream, data, 4, range(4), VOCAB))
    assert len(whole) == 6 + 1
    for limit in (7, 90):
        assert_same(
            list(val_batches(stream, data, 4, range(4), VOCAB, limit)),
            whole,
        )
    # 8 of the 25 windows, from the first to one near the end.
    part = [
        batch["tokens"][:, 0]
        for batch in val_batches(
            stream,
            data,
            4,
            range(4),
            VOCAB,
            2,
        )
    ]
    np.testing.assert_array_equal(
        np.concatenate(part),
        4
        * np.array(
            [
                0,
                3,
                6,
                9,
                12,
                15,
                18,
                21,
            ]
        ),
    )
    odd = list(val_batches(stream, data, 4, [1, 3], VOCAB))
    assert_same(
        odd,
        [{key: value[[1, 3]] for key, value in batch.items()} for batch in whole],
    )


@given(packed_case(), st.integers(1, 9))
def test_split_keeps_every_token_and_document(case, tenths):
    stream, _, _ = case
    train, val = stream.split(tenths / 10)
    np.testing.assert_array_equal(
        np.concatenate([train.tokens, val.tokens]),
        stream.tokens,
    )
    assert len(train.tokens) == int(len(stream.tokens) * (1 - tenths / 10))
    assert val.offset == len(train.tokens)
    begins = set(stream.document_starts.tolist())
    assert set(train.document_starts.tolist()) == {start for start in begins if start < val.offset}
    assert val.document_starts[0] == 0
    assert set((val.document_starts + val.offset).tolist()) == {
        start for start in begins if start > val.offset
    } | {val.offset}


def test_unigram_entropy():
    assert unigram_entropy(np.repeat(np.arange(8, dtype=np.uint16), 5)) == pytest.approx(
        math.log(8)
    )
    assert unigram_entropy(np.array([3, 3, 3, 9])) == pytest.approx(
        -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    )
    assert unigram_entropy(np.array([1, 1, 2, 2]), sample=2) == 0


# Text.


@pytest.fixture
def folder(tmp_path):
    """Two documents, and much that is none."""
    root = tmp_path / "texts"
    (root / "b").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "b" / "z.txt").write_text("zebra")
    (root / "b.md").write_text("apple é")
    (root / "empty.txt").write_text("")
    (root / ".hidden.txt").write_text("hidden")
    (root / ".git" / "config").write_text("hidden")
    (root / "picture.png").write_bytes(b"\x89PNG\0\0")
    return root


def text_config(path, **changes):
    return replace(DataConfig(source="text", path=str(path), seq_len=3), **changes)


def test_folder_gives_its_texts_in_order(folder):
    assert [
        file.relative_to(folder).as_posix() for file in data_files(str(folder), is_text)[0]
    ] == [
        "b.md",
        "b/z.txt",
    ]
    train, val, tokenizer = load_corpus(text_config(folder, val_fraction=0), 256)
    assert val is None
    assert tokenizer.decode(train.tokens) == "apple ézebra"
    assert train.document_starts.tolist() == [0, len("apple é".encode())]


ROWS = [{"text": "zebra"}, {"text": ""}, {"text": "apple é", "id": 3}]


def write_rows(file, rows):
    """Write rows into a file, in the form that its name says."""
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    match file.suffix:
        case ".gz":
            file.write_bytes(gzip.compress(lines))
        case ".bz2":
            file.write_bytes(bz2.compress(lines))
        case ".xz":
            file.write_bytes(lzma.compress(lines))
        case ".zst":
            pyarrow = pytest.importorskip("pyarrow")
            with pyarrow.output_stream(file, compression="zstd") as opened:
                opened.write(lines)
        case ".parquet":
            pyarrow = pytest.importorskip("pyarrow")
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        case _:
            file.write_bytes(lines)


ROW_FILES = ["a.jsonl", "a.ndjson", "a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.xz", "a.jsonl.zst"]


@pytest.mark.parametrize("name", [*ROW_FILES, "a.parquet"])
def test_each_row_is_a_document_of_text(tmp_path, name):
    (tmp_path / "texts").mkdir()
    write_rows(tmp_path / "texts" / name, ROWS)
    (tmp_path / "texts" / "b.txt").write_text("me")
    for path, text in (("texts", "zebraapple éme"), (f"texts/{name}", "zebraapple é")):
        data = text_config(tmp_path / path, val_fraction=0, tokenizer="chars")
        train, _, tokenizer = load_corpus(data, 256)
        assert tokenizer.decode(train.tokens) == text
        assert train.document_starts[:2].tolist() == [0, 5]
        assert "(documents without text, left out: 1)" in train.amount
        written = tokenize(replace(data, tokenizer="bytes"), tmp_path / "out.bin")
        assert bytes(np.asarray(written.tokens).astype(np.uint8)).decode() == text
        assert "(documents without text, left out: 1)" in written.amount


def test_compressed_text_is_read(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"zebra"))
    train, _, _ = load_corpus(text_config(tmp_path, val_fraction=0), 256)
    assert bytes(train.tokens.astype(np.uint8)) == b"zebra"


def test_what_a_folder_of_texts_leaves_out_or_takes_as_it_is_is_named(folder):
    write_rows(folder / "talk.jsonl", [{"prompt": "a", "completion": "b"}])
    (folder / "code.zip").write_bytes(b"PK\x03\x04")
    train = load_corpus(text_config(folder, val_fraction=0), 256).train
    assert "(files that are no text, left out: code.zip, picture.png)" in train.amount
    assert "(rows without a `text`, taken as they are: talk.jsonl)" in (train.amount)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (
            b'{"prompt": "a"}\n{"prompt": "b"}\n',
            "a.jsonl",
            r"a\.jsonl has no column 'text', .*prompt",
        ),
        (b'{"text": "a"}\n{"text": ', "a.jsonl", r"a\.jsonl, line 2 is not valid JSON"),
        (b'{"text"', "a.jsonl", r"a\.jsonl, line 1 is not valid JSON"),
        (b'{"text": 3}', "a.jsonl", "line 1: column 'text' .*: 3"),
        (
            gzip.compress(b"text" * 99, mtime=0)[:-9],
            "a.txt.gz",
            r"a\.txt\.gz: .*gzip",
        ),
        (gzip.compress(b"te\0xt", mtime=0), "a.txt.gz", r"a\.txt\.gz is binary \(NUL at byte 2\)"),
        (b"PK\x03\x04...", "a.zip", r"a\.zip is a zip"),
    ],
)
def test_a_file_that_cannot_be_read_as_text_is_named_as_what_it_is(
    tmp_path, content, name, message
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as refused:
        load_corpus(text_config(tmp_path / name), 256)
    assert "\n" not in str(refused.value)


def test_characters_come_from_training_and_validation_text(folder, tmp_path):
    (tmp_path / "val.txt").write_text("question")
    corpus = load_corpus(
        text_config(folder, tokenizer="chars", val_path=str(tmp_path / "val.txt")), 256
    )
    assert corpus.tokenizer == CharsTokenizer("".join(sorted(set("apple ézebraquestion"))))
    assert corpus.tokenizer.decode(corpus.train.tokens) == "apple ézebra"
    assert corpus.tokenizer.decode(corpus.val.tokens) == "question"


def test_last_part_of_the_text_is_for_validation(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 4)
    corpus = load_corpus(text_config(tmp_path / "a.txt", val_fraction=0.25), 256)
    assert corpus.tokenizer.decode(corpus.train.tokens) == "0123456789" * 3
    assert corpus.tokenizer.decode(corpus.val.tokens) == "0123456789"


def test_stdlib_is_capped_sorted_and_the_same_again():
    files = stdlib_files(500_000)
    assert files == stdlib_files(500_000)
    assert len(files) > 5
    assert files == sorted(files, key=lambda file: file.as_posix())
    sizes = [file.stat().st_size for file in files]
    assert 250_000 < sum(sizes) <= 500_000
    assert min(sizes) > 0
    assert stdlib_files(sum(sizes)) == files
    assert stdlib_files(sum(sizes) - 1) == files[:-1]
    assert not any(
        {"site-packages", "test", "tests"} & set(file.parts[-3:]) for file in stdlib_files(10**9)
    )
    corpus = load_corpus(DataConfig(max_bytes=500_000), 256)
    assert len(corpus.train.tokens) + len(corpus.val.tokens) == sum(sizes)


@pytest.mark.parametrize(
    ("files", "changes", "message"),
    [
        ({}, {"path": ""}, r"data\.source=text needs data\.path"),
        ({}, {"path": "gone.txt"}, r"no file or folder gone\.txt"),
        ({"a.txt": b""}, {}, r"a\.txt is empty"),
        ({"a.txt": b"ab\0cdef"}, {}, r"a\.txt is binary \(NUL at byte 2\)"),
        ({"a.txt": b"caf\xe9 au lait"}, {}, r"a\.txt is not UTF-8 text .* at byte 3"),
        (
            {"a.txt": b"abc"},
            {"val_fraction": 0},
            r"3 training tokens, one window .* = 4: .* data\.seq_len=2",
        ),
        (
            {"a.txt": b"abcdefghij"},
            {},
            r"1 validation tokens, one window .* = 4: raise data\.val_fraction",
        ),
        ({"a.txt": b"abcdefghij"}, {"val_path": "val.txt"}, r"no file or folder val\.txt"),
        (
            {"a.txt": b"abcdefghij"},
            {"tokenizer": "char"},
            r"no tokenizer 'char' \(did you mean 'chars'\?\)",
        ),
        (
            {"d/.a.txt": b"abcdefgh", "d/b.png": b"\0", "d/c.txt": b""},
            {"path": "d"},
            "folder d .*no text",
        ),
        (
            {"a.txt": b"abcdefghij"},
            {"source": "stdlib", "max_bytes": 10},
            r"no standard library source .*max_bytes=10",
        ),
        ({"a.txt": b"abcdefghij"}, {"source": "tokens"}, r"a\.txt is not a \.bin file"),
        ({}, {"source": "tokens", "path": ""}, r"data\.source=tokens needs data\.path"),
        (
            {},
            {"source": "tokens", "path": "a.bin"},
            r"a\.bin, .*: `jaxpar tokenize TEXTS a\.bin",
        ),
        ({"a.bin": b""}, {"source": "tokens", "path": "a.bin"}, r"a\.bin has 0 bytes"),
        (
            {"a.bin": b"abc"},
            {"source": "tokens", "path": "a.bin"},
            r"3 bytes, .*2 \(uint16\)",
        ),
        (
            {"a.bin": b"\0" * 40},
            {"source": "tokens", "path": "a.bin", "pack": True},
            r"a\.bin has no document offsets",
        ),
        (
            {"a.bin": b"\0" * 40, "a.bin.json": b"{"},
            {"source": "tokens", "path": "a.bin"},
            r"bin\.json is not valid",
        ),
        (
            {"a.bin": b"\0" * 40, "a.bin.json": b'{"dtype": "int8"}'},
            {"source": "tokens", "path": "a.bin"},
            "must say",
        ),
    ],
)
def test_bad_input_is_one_line_with_its_cause(files, changes, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        load_corpus(replace(text_config("a.txt"), **changes), 256)
    assert "\n" not in str(error.value)


def test_vocabulary_larger_than_the_models_is_refused(folder):
    with pytest.raises(
        UserError, match=r"has 256 tokens, model\.vocab_size=255: try model\.vocab_size=256"
    ):
        load_corpus(text_config(folder), 255)


# Token files.


def test_tokenized_text_reads_back_equal(folder, tmp_path, capfd):
    config = text_config(folder, tokenizer="chars", val_fraction=0.3)
    written = tokenize(config, tmp_path / "new" / "a.bin")
    assert len(capfd.readouterr().out) == 0
    plain = load_corpus(config, 256)
    stored = load_corpus(
        replace(config, source="tokens", path=str(tmp_path / "new" / "a.bin"), tokenizer="bytes"),
        256,
    )
    assert stored.tokenizer == plain.tokenizer
    for left, right in ((stored.train, plain.train), (stored.val, plain.val)):
        np.testing.assert_array_equal(left.tokens, right.tokens)
        np.testing.assert_array_equal(left.document_starts, right.document_starts)
    assert written.document_starts.tolist() == [0, 7]
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == [
        "a.bin",
        "a.bin.docs",
        "a.bin.json",
        "a.bin.tokenizer.json",
    ]


def test_documents_without_text_are_left_out_and_counted(folder, tmp_path):
    (folder / "b" / "blank.txt").write_text("\n \n")
    plain = load_corpus(text_config(folder, val_fraction=0), 256).train
    written = tokenize(text_config(folder), tmp_path / "a.bin")
    for stream in (plain, written):
        assert stream.document_starts.tolist() == [0, len("apple é".encode())]
        assert stream.amount == (
            "13 tokens (documents without text, left out: 1) (files that are no text, left out: "
            "picture.png)"
        )
    (tmp_path / "blank.txt").write_text(" \n")
    for refused in (load_corpus, lambda config, _: tokenize(config, tmp_path / "b.bin")):
        with pytest.raises(UserError, match=r"blank\.txt is empty"):
            refused(text_config(tmp_path / "blank.txt"), 256)
    assert not (tmp_path / "b.bin").exists()


def test_token_files_are_memory_mapped(folder, tmp_path):
    tokenize(text_config(folder), tmp_path / "a.bin")
    corpus = load_corpus(text_config(tmp_path / "a.bin", source="tokens", val_fraction=0.4), 256)
    for array in (corpus.train.tokens, corpus.val.tokens, corpus.train.document_starts):
        assert isinstance(array, np.memmap)
        assert not array.flags.writeable
    batch = next(
        train_batches(
            corpus.train,
            DataConfig(seq_len=3),
            2,
            [0, 1],
            256,
        )
    )
    assert not isinstance(batch["tokens"], np.memmap)


def test_lone_token_file_is_uint16_as_nanogpts(tmp_path):
    np.arange(20, dtype="<u2").tofile(tmp_path / "train.bin")
    np.arange(20, 30, dtype="<u2").tofile(tmp_path / "val.bin")
    (tmp_path / "some.json").write_text(BytesTokenizer().to_json(), encoding="utf-8")
    config = text_config(
        tmp_path / "train.bin", source="tokens", val_path=str(tmp_path / "val.bin")
    )
    corpus = load_corpus(config, 30)
    assert corpus.tokenizer is None
    assert corpus.train.tokens.tolist() == list(range(20))
    assert corpus.val.tokens.tolist() == list(range(20, 30))
    named = load_corpus(replace(config, tokenizer=str(tmp_path / "some.json")), 256)
    assert isinstance(named.tokenizer, BytesTokenizer)


def llm_c(
    path,
    magic=20240520,
    version=1,
    count=None,
    dtype="<u2",
    ids=range(200),
):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.array(ids, dtype).tobytes())
    return path


@pytest.mark.parametrize(
    ("magic", "version", "dtype"),
    [
        (20240520, 1, "<u2"),
        (20240801, 7, "<u4"),
    ],
)
def test_the_header_of_llm_c_is_read_and_is_no_text(tmp_path, magic, version, dtype):
    found = open_tokens(llm_c(tmp_path / "a.bin", magic, version, dtype=dtype))
    assert found.tokens.tolist() == list(range(200)) and found.tokens.dtype == dtype


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2, .*version 1"),
        ({"count": 201}, "200 ids .*201"),
        ({"magic": 20240801}, "header of version 1, and version 7"),
        ({"magic": 20240522}, "questions with several answers"),
        (
            {"ids": [5] * 99 + [300]},
            r"a\.bin has id 300 at token 99, model\.vocab_size=256: .*301",
        ),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(tmp_path, changes, message):
    llm_c(tmp_path / "a.bin", **changes)
    with pytest.raises(UserError, match=message):
        load_corpus(text_config(tmp_path / "a.bin", source="tokens"), 256)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            np.arange(400, dtype="<u4"),
            'looks like ids of 32 bits, .*: if so, write {"dtype": "uint32"} into it',
        ),
        (np.arange(400, dtype="<i8"), "looks like ids of 64 bits, .*: write them as uint32"),
        (
            np.append(0, np.arange(65_540, 65_939)).astype("<i8"),
            "looks like ids of 64 bits, .*: write them as uint32",
        ),
        (b"\x93NUMPY\x01\0" + bytes(90), "an array of NumPy's"),
        (b"MMIDIDX\0\0" + bytes(91), "index of Megatron's"),
        (b"PK\x03\x04" + bytes(96), "archive"),
    ],
)
def test_a_file_of_another_kind_is_refused_before_it_is_trained_on(tmp_path, content, message):
    (tmp_path / "a.bin").write_bytes(content if isinstance(content, bytes) else content.tobytes())
    with pytest.raises(UserError, match=message):
        load_corpus(text_config(tmp_path / "a.bin", source="tokens"), 50_000)
    if not isinstance(content, bytes):
        (tmp_path / "a.bin.json").write_text('{"dtype": "uint16"}')
        assert (
            load_corpus(text_config(tmp_path / "a.bin", source="tokens"), 50_000).train.tokens[0]
            == 0
        )


def test_every_id_is_looked_at_before_a_training_begins(tmp_path, monkeypatch):
    """Those after the last window too, and those of the validation data."""
    monkeypatch.setattr("jaxpar.data.streams.id_files._CHUNK", 100)
    for name, bad in (("train.bin", 948), ("val.bin", 3)):
        ids = np.resize(np.arange(48), 949).astype("<u2")
        ids.tofile(tmp_path / ("val.bin" if name == "train.bin" else "train.bin"))
        ids[bad] = 48
        ids.tofile(tmp_path / name)
        config = text_config(
            tmp_path / "train.bin", source="tokens", val_path=str(tmp_path / "val.bin")
        )
        with pytest.raises(
            UserError, match=rf"{name} has id 48 at token {bad}, model\.vocab_size=48"
        ):
            load_corpus(config, 48)


def test_damaged_document_starts_are_refused(tmp_path):
    np.arange(90, dtype="<u2").tofile(tmp_path / "a.bin")
    for starts in ([0, 50, 20], [1, 50], [0, 90]):
        np.array(starts, "<i8").tofile(tmp_path / "a.bin.docs")
        with pytest.raises(UserError, match=r"a\.bin\.docs is damaged"):
            open_tokens(tmp_path / "a.bin")


def test_dtype_is_read_from_beside_the_file(tmp_path):
    np.array([1, 70_000, 2], "<u4").tofile(tmp_path / "a.bin")
    (tmp_path / "a.bin.json").write_text('{"dtype": "uint32"}')
    assert open_tokens(tmp_path / "a.bin").tokens.tolist() == [1, 70_000, 2]


@pytest.mark.parametrize(
    ("name", "keep", "message"),
    [
        ("a.bin", 6, r"a\.bin has 3 tokens, its \.json says 13"),
        ("a.bin.docs", 8, r"a\.bin has 1 documents, its \.json says 2"),
        ("a.bin.docs", 5, r"a\.bin\.docs has 5 bytes, .*8"),
    ],
)
def test_file_cut_short_is_refused(name, keep, message, folder, tmp_path):
    tokenize(text_config(folder), tmp_path / "a.bin")
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:keep])
    with pytest.raises(UserError, match=message):
        open_tokens(tmp_path / "a.bin")


def test_validation_tokens_of_another_tokenizer_are_refused(folder, tmp_path):
    train = tmp_path / "train.bin"
    val = tmp_path / "val.bin"
    tokenize(text_config(folder, tokenizer="chars"), train)
    tokenize(text_config(folder / "b.md", tokenizer="chars"), val)
    config = text_config(train, source="tokens", val_path=str(val))
    with pytest.raises(
        UserError, match=r"val\.bin was tokenized otherwise .*/train\.bin\.tokenizer\.json"
    ):
        load_corpus(config, 256)
    tokenize(
        text_config(folder / "b.md", tokenizer=str(tmp_path / "train.bin.tokenizer.json")), val
    )
    corpus = load_corpus(config, 256)
    assert corpus.tokenizer.decode(corpus.val.tokens) == "apple é"


def test_failed_tokenize_leaves_what_was_there(folder, tmp_path):
    out = tmp_path / "a.bin"
    tokenize(text_config(folder), out)
    before = {file: file.read_bytes() for file in tmp_path.glob("a.*")}
    (folder / "c.txt").write_bytes(b"good until \xff")
    with pytest.raises(UserError, match=r"c\.txt is not UTF-8"):
        tokenize(text_config(folder), out)
    assert {file: file.read_bytes() for file in tmp_path.glob("a.*")} == before


def test_tokenize_refuses_a_name_or_place_it_cannot_write(folder, tmp_path):
    with pytest.raises(UserError, match=r"out\.txt: try tokens\.bin"):
        tokenize(text_config(folder), tmp_path / "out.txt")
    with pytest.raises(UserError, match=r"cannot write .*picture\.png/a\.bin"):
        tokenize(text_config(folder), folder / "picture.png" / "a.bin")


def test_a_token_file_of_another_tokenizer_than_the_config_names_is_refused(tmp_path):
    """A file that is not there is no contradiction: presets name one, and a .bin brings its own."""
    (tmp_path / "a.txt").write_text("abc" * 99)
    tokenize(DataConfig(source="text", path=str(tmp_path / "a.txt")), tmp_path / "a.bin")
    data = DataConfig(
        source="tokens", path=str(tmp_path / "a.bin"), tokenizer=str(tmp_path / "b.json"), seq_len=8
    )
    assert load_corpus(data, 256).tokenizer
    (tmp_path / "b.json").write_text('{"tokenizer": "chars", "chars": "abc"}')
    with pytest.raises(
        UserError,
        match=(
            r"a\.bin was tokenized otherwise than data\.tokenizer=.*b\.json, so .*: write it "
            r"again"
        ),
    ):
        load_corpus(data, 256)


def test_the_sample_of_a_mixture_has_each_part_by_its_share(monkeypatch: pytest.MonkeyPatch):
    """Where each part alone is longer than a sample, too."""
    monkeypatch.setattr("jaxpar.data.mixture.SAMPLED", 100)
    parts: Any = [SimpleNamespace(sample=np.full(500, number)) for number in (1, 2)]
    sample = Mixture(tuple(parts), (0.75, 0.25)).sample
    assert np.bincount(sample).tolist() == [0, 75, 25]


@pytest.mark.parametrize(
    ("name", "is_one"), [("a.parquet", True), ("x/y/a.parquet", True), ("a.csv", False)]
)
def test_a_pattern_of_any_folders_has_the_files_of_none(name: str, is_one: bool):
    assert matches(name, "**/*.parquet") == is_one
