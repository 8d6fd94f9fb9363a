"""Documents of every source: the rows, the position that a resume finds again, mixtures, and what
is refused.
"""

import argparse
import gzip
import hashlib
import itertools
import json
import signal
import subprocess
import sys
import uuid
from dataclasses import replace

import grain
import numpy as np
import pytest
from tiers import some

from jaxpar.base.config import Config, DataConfig, override
from jaxpar.base.errors import UserError
from jaxpar.base.storage import Bucket
from jaxpar.base.toml import to_toml
from jaxpar.data.corpus import load_corpus, train_batches, unigram_entropy, val_batches
from jaxpar.data.mixture import skipped_records
from jaxpar.data.streams.tokens import Tokens, read_windows

datasets = pytest.importorskip("datasets")
parquet = pytest.importorskip("pyarrow.parquet")
arrow = pytest.importorskip("pyarrow")
record = pytest.importorskip("array_record.python.array_record_module")

DOCUMENTS = [
    f"{i} {line} " * (i % 4)
    for i, line in enumerate(
        [
            *argparse.__doc__.split()[:60],
            "é",
            "x",
            "🙂🙂",
        ]
    )
]
KINDS = {
    "hf": {"source": "hf", "path": "jsonl"},
    "hf saved": {"source": "hf", "path": "saved:train"},
    "hf slices": {"source": "hf", "path": "jsonl:train[40%:]+train[:9]"},
    "hf streaming slices": {
        "source": "hf",
        "path": "jsonl:train[5:20] + train[22:]",
        "streaming": True,
    },
    "hf streaming": {"source": "hf", "path": "jsonl:train", "streaming": True},
    "hf streaming, shuffled": {
        "source": "hf",
        "path": "jsonl",
        "streaming": True,
        "shuffle_window": 5,
    },
    "parquet": {"source": "parquet", "path": "parquet"},
    "parquet, shuffled": {"source": "parquet", "path": "parquet", "shuffle_window": 7},
    "arrayrecord": {"source": "arrayrecord", "path": "records"},
    "parquet mixed": {
        "source": "parquet",
        "mixture": ("parquet/0.parquet 0.7", "parquet/[12].parquet 0.3"),
    },
    "arrayrecord mixed": {
        "source": "arrayrecord",
        "mixture": ("records/0.array_record 3", "records/ 1"),
    },
    "text mixed": {
        "source": "text",
        "mixture": ("texts/0.txt 3", "texts/1.txt 2"),
        "val_fraction": 0.0,
    },
    "chat mixed": {"source": "chat", "mixture": ("talks/0.jsonl 2", "talks/1.jsonl 1")},
}
STREAMS = [kind for kind in KINDS if "streaming" in kind or "parquet" in kind]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same documents, in three files of each kind."""
    root = tmp_path_factory.mktemp("documents")
    for name in ("jsonl", "parquet", "records", "texts", "talks"):
        (root / name).mkdir()
    for i, part in enumerate(
        np.array_split(
            np.arange(len(DOCUMENTS)),
            3,
        )
    ):
        texts = [DOCUMENTS[j] for j in part]
        table = arrow.table({"id": part, "text": texts})
        parquet.write_table(table, root / "parquet" / f"{i}.parquet", row_group_size=4)
        (root / "jsonl" / f"{i}.jsonl").write_text(
            "".join(json.dumps({"id": 1, "text": t}) + "\n" for t in texts)
        )
        (root / "texts" / f"{i}.txt").write_text("".join(texts))
        talks = [json.dumps({"prompt": "p", "completion": text[:20]}) for text in texts if text]
        (root / "talks" / f"{i}.jsonl").write_text("\n".join(talks))
        writer = record.ArrayRecordWriter(
            str(root / "records" / f"{i}.array_record"), "group_size:1"
        )
        for text in texts:
            writer.write(text.encode())
        writer.close()
    parquet.write_table(table.slice(0, 0), root / "parquet" / "3.parquet")  # a file without rows
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": DOCUMENTS})}).save_to_disk(
        root / "saved"
    )
    return root


@pytest.fixture(autouse=True)
def here(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)


def config_of(kind, **changes):
    return replace(DataConfig(seq_len=24, **KINDS[kind]), **changes)


def batches(data, count, rows=range(4), state=None):
    iterator = train_batches(load_corpus(data, 256).train, data, 4, rows, 256)
    if state is not None:
        iterator.set_state(json.loads(json.dumps(state)))
    return [next(iterator) for _ in range(count)], iterator


def assert_same(found, expected):
    for left, right in zip(found, expected, strict=True):
        assert left.keys() == right.keys()
        for key in left:
            np.testing.assert_array_equal(left[key], right[key], err_msg=key)
            assert left[key].dtype == np.int32


@pytest.mark.slow
@pytest.mark.parametrize("kind", some(KINDS, 9))
def test_the_position_is_exact_in_any_state(kind):
    """Over more than two epochs, with and without reading ahead, from a state that has been through
    JSON.
    """
    data = config_of(kind, pack="mixed" not in kind, prefetch=0)
    whole, _ = batches(data, 40)
    _, running = batches(replace(data, prefetch=2), 0)
    for step in range(36):
        if step in (0, 8, 17, 18, 26, 35):  # each opens the data again
            assert_same(
                batches(data, 3, state=running.get_state())[0],
                whole[step : step + 3],
            )
        next(running)


@pytest.mark.parametrize("kind", ["hf streaming", "arrayrecord mixed", "text mixed"])
def test_processes_together_read_the_global_batch(kind):
    whole, _ = batches(config_of(kind), 6)
    halves = [batches(config_of(kind), 6, rows)[0] for rows in ([0, 3], [1, 2])]
    for one, (left, right) in zip(
        whole,
        zip(*halves, strict=True),
        strict=True,
    ):
        np.testing.assert_array_equal(one["tokens"][[0, 3]], left["tokens"])
        np.testing.assert_array_equal(one["labels"][[1, 2]], right["labels"])


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("kind", ["hf streaming", "parquet"])
def test_rows_of_a_stream_equal_windows_of_its_text(kind, pack, capsys):
    ids = [np.frombuffer(text.encode(), np.uint8) for text in DOCUMENTS * 3 if text]
    starts = np.cumsum([0, *map(len, ids)])[:-1]
    text = Tokens(np.concatenate(ids), starts, "text")
    whole, _ = batches(config_of(kind, pack=pack), 20)
    expected = [
        read_windows(text, np.arange(i, i + 4) * 25, 24, pack, 256) for i in range(0, 80, 4)
    ]
    assert_same(whole, expected)
    assert f"{KINDS[kind]['path']} is read to its end: epoch 2 begins" in capsys.readouterr().out


def test_random_access_reads_every_document_once_an_epoch_in_a_new_order():
    data = config_of("hf saved", pack=True, seq_len=8)
    texts = b"".join(
        bytes(row[:].astype(np.uint8)) for batch in batches(data, 90)[0] for row in batch["tokens"]
    )
    other = batches(replace(data, seed=1), 1)[0][0]["tokens"]
    assert not np.array_equal(other, batches(data, 1)[0][0]["tokens"])
    words = [text.split()[0].encode() for text in DOCUMENTS if len(text) > 20]
    assert sum(word in texts for word in words) > 0.9 * len(words)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("split", "kept"),
    [
        ("train[:50%]", slice(20)),
        ("train[30:]", slice(30, 40)),
        ("train[-3:]", slice(37, 40)),
        ("train[10%:20%](closest)", slice(4, 8)),
    ],
)
def test_a_split_may_be_a_slice_as_datasets_writes_it(tmp_path, split, kept, streaming):
    texts = [f"{i:02d}" for i in range(40)]
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": texts})}).save_to_disk(
        tmp_path / "saved"
    )
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name in ("saved", "a.jsonl"):
        data = DataConfig(
            source="hf", path=f"{tmp_path}/{name}:{split}", seq_len=2, streaming=streaming
        )
        if streaming and name == "a.jsonl" and split != "train[30:]":
            with pytest.raises(UserError, match=r"end of a stream, .*train\[1000:\]"):
                load_corpus(data, 256)
        else:
            assert bytes(load_corpus(data, 256).train.sample.astype(np.uint8)).decode() == "".join(
                texts[kept]
            )


def test_a_slice_that_datasets_does_not_know_is_refused(folder):
    for name, message in (
        ("jsonl:train[x]", "Unrecognized"),
        ("saved:no[:3]", "Unknown split"),
        ("a:b:c:d", "3 colons"),
    ):
        with pytest.raises(UserError, match=message):
            load_corpus(DataConfig(source="hf", path=name), 256)


@pytest.mark.parametrize("kind", ["hf", "hf streaming", "parquet", "arrayrecord"])
def test_a_document_without_text_leaves_no_end_of_text(kind, tmp_path, monkeypatch):
    """As `encode_document`, which every source calls: two ends side by side would teach that one
    follows the other.
    """
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "<|endoftext|>": 1}, unk_token="a")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_special_tokens(["<|endoftext|>"])
    words.save(str(tmp_path / "tokenizer.json"))
    texts = ["", "a a", "", " \n", "\ufeffa", "\ufeff", ""]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "parquet")
    writer = record.ArrayRecordWriter(str(tmp_path / "records"), "group_size:1")
    for text in texts:
        writer.write(text.encode())
    writer.close()
    data = config_of(
        kind,
        path=str(KINDS[kind]["path"]).partition(":")[0],
        seq_len=4,
        prefetch=0,
    )
    data = replace(data, tokenizer=str(tmp_path / "tokenizer.json"))
    if kind.startswith("hf"):
        (tmp_path / "jsonl").rename(tmp_path / "a.jsonl")
        data = replace(data, path="a.jsonl")
    corpus = load_corpus(data, 2)
    assert corpus.train.sample.tolist() == [0, 0, 1, 0, 1]
    assert "(documents without text, left out: 5 of the first 7)" in corpus.train.amount
    row = next(train_batches(corpus.train, data, 1, range(1), 2))["tokens"][0].tolist()
    assert (1, 1) not in itertools.pairwise(row)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_may_be_one_file(folder, monkeypatch, streaming):
    monkeypatch.chdir(folder / "jsonl")
    corpus = load_corpus(DataConfig(source="hf", path="0.jsonl", streaming=streaming), 256)
    assert corpus.train.size == (None if streaming else len(np.array_split(DOCUMENTS, 3)[0]))
    assert corpus.val is None


def test_a_mixture_has_the_shares_it_asks_for(tmp_path):
    for name in "ab":
        parquet.write_table(
            arrow.table({"text": [name * 7] * 500}),
            tmp_path / f"{name}.parquet",
        )
    data = DataConfig(
        source="parquet", mixture=(f"{tmp_path}/a.parquet 3", f"{tmp_path}/b.parquet 1"), seq_len=8
    )
    data = replace(data, val_path=f"{tmp_path}/b.parquet")
    corpus = load_corpus(data, 256)
    read = np.concatenate([b["tokens"] for b in batches(data, 100)[0]])
    assert np.mean(read == ord("a")) == pytest.approx(0.75, abs=0.01)
    assert unigram_entropy(corpus.train.sample) == pytest.approx(0.5623, abs=0.02)  # of 3/4 and 1/4
    assert corpus.train.size == 1000 and "0.75" in corpus.train.origin
    assert corpus.val is not None


@pytest.mark.parametrize("kind", ["hf streaming", "parquet", "arrayrecord"])
def test_validation_reads_each_document_once_and_fills_up(kind):
    data = config_of(kind, pack=True)
    data = replace(data, val_path=data.path)
    corpus = load_corpus(data, 256)
    read = list(val_batches(corpus.val, data, 4, range(4), 256))
    total = sum(len(text.encode()) for text in DOCUMENTS)
    rows = -(-total // 25)
    assert len(read) == -(-rows // 4)
    segments = np.concatenate([batch["segments"] for batch in read])
    # a row leaves its last token to the label
    assert (segments > 0).sum() in (total - rows, total - rows + 1)
    assert not any((batch["labels"][batch["segments"] == 0] != -1).any() for batch in read)
    assert_same(
        list(val_batches(corpus.val, data, 4, range(4), 256, 2)),
        read[:2],
    )
    assert_same(
        list(val_batches(corpus.val, data, 4, [2], 256)),
        [{k: v[[2]] for k, v in b.items()} for b in read],
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"source": "hf", "path": "jsonl", "column": "body"},
            r"jsonl has no column 'body', .*it has id, text",
        ),
        (
            {"source": "parquet", "path": "parquet", "column": "body"},
            "has no column 'body'.*it has id, text",
        ),
        (
            {"source": "parquet", "path": "parquet", "column": "id"},
            "column 'id' .*no text",
        ),
        ({"source": "parquet", "path": "parquet/3.parquet"}, r"3\.parquet is empty"),
        ({"source": "parquet", "path": "jsonl"}, r"no \.parquet file at jsonl"),
        (
            {"source": "parquet", "path": "jsonl/0.jsonl"},
            "cannot read jsonl/0.jsonl as data.source=parquet",
        ),
        (
            {"source": "arrayrecord", "path": "records/*.rec"},
            r"no \.array_record file at records/\*\.rec",
        ),
        (
            {"source": "hf", "path": "nobody/no_such_set"},
            "cannot read nobody/no_such_set as data.source=hf: .*reach",
        ),
        (
            {"source": "hf", "path": "jsonl:test"},
            "cannot read jsonl:test as data.source=hf: .*test",
        ),
        ({"source": "hf", "path": ""}, "data.source=hf needs data.path"),
        (
            {"source": "hf", "path": "jsonl", "tokenizer": "chars"},
            "data.tokenizer=chars .*data.source=hf",
        ),
        (
            {"source": "parquet", "path": "parquet/2.parquet", "seq_len": 99999},
            "training tokens, one window",
        ),
        ({"source": "text", "mixture": ("texts/0.txt",)}, "a path and a weight"),
        ({"source": "text", "mixture": ("texts/0.txt -1",)}, "a path and a weight"),
        ({"source": "text", "mixture": ("texts/9.txt 1",)}, "no file or folder texts/9.txt"),
    ],
)
def test_bad_input_is_one_clear_line(changes, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=message) as refused:
        load_corpus(DataConfig(**changes), 256)
    assert "\n" not in str(refused.value)


def test_a_stream_that_breaks_off_later_is_one_clear_line(tmp_path):
    for i in range(2):
        parquet.write_table(arrow.table({"text": ["abc"] * 20}), tmp_path / f"{i}.parquet")
    data = DataConfig(source="parquet", path=str(tmp_path), seq_len=8, prefetch=0)
    iterator = train_batches(load_corpus(data, 256).train, data, 2, range(2), 256)
    (tmp_path / "1.parquet").unlink()
    with pytest.raises(UserError, match=r"cannot read .* as data\.source=parquet: .*1\.parquet"):
        list(iterator)


@pytest.mark.parametrize("kind", ["parquet", "text mixed"])
def test_a_mixture_keeps_all_of_its_parts(kind):
    data = replace(config_of(kind), val_fraction=0.5, pack=False)
    assert load_corpus(data, 256).val is None
    one = replace(
        data, path="", mixture=("texts/0.txt 1",) if kind == "text mixed" else ("parquet 1",)
    )
    whole = load_corpus(one, 256)
    assert (
        whole.val is None
        and whole.train.size
        == load_corpus(replace(one, val_path=one.mixture[0][:-2]), 256).train.size
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_that_does_not_fit_the_vocabulary_is_refused(kind):
    with pytest.raises(UserError, match=r"has 256 tokens, model\.vocab_size=255"):
        load_corpus(config_of(kind), 255)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'jaxpar\[data\]'"):
        load_corpus(config_of("hf"), 256)


WATCHED = """
import hashlib, os, signal, sys
import jaxpar.train.loop.run_step as run_step
from jaxpar.cli.main import main
put, (record, last), folder = run_step.put_batch, sys.argv[1:3], sys.argv[3]
def watched(rows, plan):
    ids = b"".join(rows[name].tobytes() for name in ("tokens", "labels", "segments"))
    with open(record, "a") as file:
        file.write(hashlib.sha256(ids).hexdigest() + "\\n")
    if os.path.isdir(f"{folder}/checkpoints/{last}") and last != "none":
        os.kill(os.getpid(), signal.SIGKILL)
    return put(rows, plan)
run_step.put_batch = watched
sys.exit(main(sys.argv[4:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hf streaming, shuffled", "arrayrecord", "parquet mixed"])
def test_a_killed_run_goes_on_with_the_same_ids(kind, folder, tmp_path):
    """SIGKILL in the middle of real training, some steps after a checkpoint; the ids are hashed,
    batch by batch.
    """
    data = config_of(kind, pack=True)
    run = tmp_path / "run"
    steps = 30
    expected = [
        hashlib.sha256(
            b"".join(batch[name].tobytes() for name in ("tokens", "labels", "segments"))
        ).hexdigest()
        for batch in batches(data, steps)[0]
    ]
    config = {"data." + key: value for key, value in vars(data).items()}
    config |= {
        "train.steps": steps,
        "train.batch": 4,
        "train.warmup_steps": 1,
        "checkpoint.every": 5,
    }
    config |= {
        "model.layers": 1,
        "model.embed": 32,
        "model.heads": 2,
        "model.mlp": 32,
        "mesh.platform": "cpu",
    }
    (tmp_path / "config.toml").write_text(to_toml(override(Config(), config)))

    def train(record, last):
        words = [
            str(tmp_path / record),
            last,
            str(run),
            "train",
            str(tmp_path / "config.toml"),
            "--run",
            str(run),
        ]
        done = subprocess.run(
            [sys.executable, "-c", WATCHED, *words],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        return done, (tmp_path / record).read_text().split()

    killed, before = train("before", "15")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed, after = train("after", "none")
    assert resumed.returncode == 0, resumed.stderr
    assert before == expected[: len(before)] and 15 < len(before) < steps
    assert len(after) in (15, 10), "resumed at the newest checkpoint"
    assert after == expected[-len(after) :]
    print(
        f"{kind}: killed at batch {len(before)}, resumed at {steps - len(after) + 1}, sha256 "
        f"{after[-1][:16]}"
    )


@pytest.mark.parametrize("kind", ["hf", "parquet"])
def test_records_that_are_no_text_are_left_out_and_counted(kind, tmp_path):
    """The batches are those of the same records without them."""
    good = [f"{i} " + "lorem ipsum " * 5 for i in range(30)]
    found = {}
    for name, texts in (
        ("good", good),
        (
            "bad",
            [*good[:12], None, *good[12:], None],
        ),
    ):
        (tmp_path / name).mkdir()
        parquet.write_table(arrow.table({"text": texts}), tmp_path / name / "a.parquet")
        data = DataConfig(
            source=kind, path=str(tmp_path / name), seq_len=24, streaming=kind == "hf"
        )
        stream = load_corpus(data, 256).train
        (counts,) = skipped_records(stream)
        assert counts.count == 0, "the beginning was read before"
        iterator = train_batches(stream, data, 4, range(4), 256)
        found[name] = [next(iterator) for _ in range(30)]  # more than an epoch
    assert_same(found["bad"], found["good"])
    assert counts.count >= 2 and counts.text.startswith(
        f"records left out until now: {counts.count}, "
    )
    assert counts.text.endswith("column 'text' has a value that is no text: None")
    for bad in (7, ["a"], b"bytes"):
        before = counts.count
        assert len(stream.tokens_of({"text": bad})["tokens"]) == 0 and counts.count == before + 1


def test_a_damaged_record_is_left_out_and_a_source_that_is_gone_is_not_read_for_ever(
    tmp_path, monkeypatch
):
    class Damaged:
        def __len__(self):
            return 40

        def __getitem__(self, place):
            if place == 7 or gone:
                raise ValueError("CRC mismatch\nin a chunk")
            return b"lorem ipsum " * 3

    gone = False
    monkeypatch.setattr(grain.sources, "ArrayRecordDataSource", lambda files: Damaged())
    data = DataConfig(source="arrayrecord", path="records", seq_len=24, prefetch=0)
    corpus = load_corpus(data, 256)
    iterator = train_batches(corpus.train, data, 4, range(4), 256)
    for _ in range(20):
        next(iterator)
    (counts,) = skipped_records(corpus.train)
    assert counts.count > 0 and counts.text.endswith(
        "records: record 7 cannot be read: CRC mismatch"
    )
    gone = True
    with pytest.raises(UserError, match=r"1,000 records .*CRC"):
        for _ in range(2000):
            next(iterator)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"body": ["x"]}, r"b\.parquet has no column 'text', set data\.column: it has body"),
        (
            {"text": [3]},
            r"b\.parquet: column 'text' .*int64",
        ),
    ],
)
def test_a_later_file_with_other_columns_is_refused_before_a_training_begins(
    tmp_path, column, message
):
    parquet.write_table(
        arrow.table({"text": ["lorem ipsum " * 9] * 20}),
        tmp_path / "a.parquet",
    )
    parquet.write_table(arrow.table(column), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=message):
        load_corpus(DataConfig(source="parquet", path=str(tmp_path), seq_len=24), 256)


def texts_of(corpus):
    return bytes(corpus.train.sample.astype(np.uint8)).decode()


def write_documents(folder, word, name="a"):
    """A document of one word in a file of each kind, under a name."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text(json.dumps({"text": word}) + "\n")
    parquet.write_table(arrow.table({"text": [word]}), folder / f"{name}.parquet")
    writer = record.ArrayRecordWriter(str(folder / f"{name}.array_record"), "group_size:1")
    writer.write(word.encode())
    writer.close()


ODD_NAMES = ["a[12]", "a*", "a?", "{a,a1}", "[!b]1", "a[0:1]"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_file_is_read_whose_name_is_also_a_pattern(tmp_path, monkeypatch, name, streaming):
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path, "other", "a1")
    write_documents(tmp_path, "mine", name)
    write_documents(tmp_path / name, "mine")
    (tmp_path / f"{name}.array_record").rename(tmp_path / name / name)
    for source, path in (
        ("hf", f"{name}.jsonl"),
        ("hf", f"{name}.jsonl:train[:1]"),
        ("hf", f"{name}.parquet"),
        ("hf", f"{name}/a.jsonl"),
        ("parquet", f"{name}.parquet"),
        ("parquet", name),
        ("parquet", f"{name}/*.parquet"),
        ("parquet", f"{tmp_path}/{name}/*.parquet"),
        ("arrayrecord", f"{name}/{name}"),
        ("arrayrecord", f"{name}/*.array_record"),
    ):
        data = DataConfig(source=source, path=path, seq_len=2, streaming=streaming)
        corpus = load_corpus(data, 256)
        assert texts_of(corpus) == "mine", path
        assert not corpus.train.files or name in str(corpus.train.files[0])


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_is_a_data_set_whose_name_is_also_a_pattern(tmp_path, streaming):
    place = tmp_path / "crawl[2024]"
    for split in ("train", "test"):
        (place / f"{split}-[1]").mkdir(parents=True)
        (place / split).mkdir()
        for folder in (f"{split}-[1]", split):
            (place / folder / "a[0].jsonl").write_text(json.dumps({"text": split}) + "\n")
    found = datasets.Dataset.from_dict({"text": ["saved"]})
    found.save_to_disk(tmp_path / "saved[1]")
    data = DataConfig(source="hf", seq_len=2, streaming=streaming)
    for name, text in (
        ("crawl[2024]", "traintrain"),
        ("crawl[2024]:test", "testtest"),
        ("crawl[2024]/test-[1]/a[0].jsonl", "test"),
        ("saved[1]", "saved"),
    ):
        assert texts_of(load_corpus(replace(data, path=f"{tmp_path}/{name}"), 256)) == text
    (place / "README.md").write_text("---\nconfigs:\n- config_name: default\n---\n# Texts\n")
    with pytest.raises(UserError, match=r"crawl\[2024\] has characters"):
        load_corpus(replace(data, path=str(place)), 256)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_an_object_of_a_bucket_is_read_whose_name_is_also_a_pattern(tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_documents(tmp_path / "local", "other", "a1")
    write_documents(tmp_path / "local", "mine", name)
    bucket = Bucket(f"memory://{uuid.uuid4().hex}/to[p]")
    for file in (tmp_path / "local").iterdir():
        bucket.send(file, file.name)
        if name in file.name:
            bucket.send(file, f"{name}/a{file.suffix}")
    for text, word in ((f"{name}.txt", b"mine"), ("a1.txt", b"other"), (f"{name}/a.txt", b"mine")):
        bucket.write(text, word)
    for source, path in (
        ("hf", f"{name}.jsonl"),
        ("hf", f"{name}.jsonl:train[:1]"),
        ("hf", f"{name}/a.jsonl"),
        ("parquet", f"{name}.parquet"),
        ("parquet", name),
        ("parquet", f"{name}/*.parquet"),
        ("arrayrecord", f"{name}/*.array_record"),
        ("text", f"{name}.txt"),
        ("text", f"{name}/a.txt"),
    ):
        data = DataConfig(source=source, path=f"{bucket.url}/{path}", seq_len=2, val_fraction=0.0)
        assert texts_of(load_corpus(data, 256)) == "mine", path


OTHER_COLUMNS = {
    "of another type": ({"id": [1, 2]}, {"id": ["x1", "x2"]}),
    "in one file only": ({}, {"score": [0.5, 0.7]}),
    "nested otherwise": ({"meta": [{"a": 1}] * 2}, {"meta": [{"b": "x"}, {"c": [1]}]}),
    "of two types in a file": ({"id": [1, "x"]}, {"id": [{"a": 1}, None]}),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("ending", ["parquet", "jsonl", "json", "jsonl.gz"])
@pytest.mark.parametrize("columns", OTHER_COLUMNS)
def test_of_a_data_set_only_the_column_of_its_texts_is_read(tmp_path, columns, ending, streaming):
    (tmp_path / "set").mkdir()
    for name, others in zip("ab", OTHER_COLUMNS[columns], strict=True):
        table = {"text": [name * 3, name * 4], **others}
        rows = [{key: values[i] for key, values in table.items()} for i in range(2)]
        file = tmp_path / "set" / f"{name}.{ending}"
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        if ending == "jsonl.gz":
            file.write_bytes(gzip.compress(lines))
        elif ending == "json":
            file.write_text(json.dumps(rows, indent=2))
        elif ending == "jsonl":
            file.write_bytes(lines)
        elif "two types" in columns:
            pytest.skip("a column of Parquet has one type")
        else:
            parquet.write_table(arrow.table(table), file)
    sources = ["hf", "parquet"] if ending == "parquet" else ["hf"]
    for source in sources:
        data = DataConfig(source=source, path=str(tmp_path / "set"), seq_len=2, streaming=streaming)
        corpus = load_corpus(data, 256)
        assert texts_of(corpus) == "aaaaaaabbbbbbb"
        read = b"".join(bytes(batch["tokens"].astype(np.uint8)) for batch in batches(data, 8)[0])
        assert b"a" in read and b"b" in read


def test_texts_of_parquet_may_be_of_any_type_of_text_in_each_file(tmp_path):
    for i, kind in enumerate(
        [
            arrow.null(),
            arrow.string(),
            arrow.large_string(),
            arrow.dictionary(arrow.int32(), arrow.string()),
        ]
    ):
        texts = arrow.array([None if kind == arrow.null() else f"t{i}"], kind)
        parquet.write_table(arrow.table({"text": texts}), tmp_path / f"{i}.parquet")
    for source in ("hf", "parquet"):
        data = DataConfig(source=source, path=str(tmp_path), seq_len=2)
        assert texts_of(load_corpus(data, 256)) == "t1t2t3"


@pytest.mark.parametrize("source", ["hf", "parquet"])
def test_a_damaged_file_of_a_data_set_is_named_in_one_line(tmp_path, source, capsys):
    for name in "ab":
        texts = [f"{name} {i} lorem ipsum" for i in range(400)]
        parquet.write_table(arrow.table({"text": texts}), tmp_path / f"{name}.parquet")
    content = bytearray((tmp_path / "b.parquet").read_bytes())
    content[8:3000] = bytes(2992)
    (tmp_path / "b.parquet").write_bytes(content)
    data = DataConfig(source=source, path=str(tmp_path), seq_len=24)
    with pytest.raises(UserError, match=r"cannot read .*/b\.parquet as data\.source="):
        load_corpus(data, 256)
    assert "Failed to read" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (['{"text": "a"}', '{"text": '], r"a\.jsonl, line 2 is not valid JSON"),
        (['{"body": "a"}'], r"a\.jsonl has no column 'text', set data\.column: it has body"),
        (['{"text": 3}'], r"a\.jsonl, line 1: column 'text' .*: 3"),
        (["7"], r"a\.jsonl, line 1: found 7"),
        (['{"text": "a"}', "\0\0"], r"a\.jsonl, line 2 has a NUL byte"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_broken_row_of_json_is_named(tmp_path, rows, message, streaming):
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    data = DataConfig(source="hf", path=str(tmp_path), seq_len=2, streaming=streaming)
    with pytest.raises(UserError, match=message) as refused:
        load_corpus(data, 256)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_files_that_a_data_set_leaves_out_are_named(tmp_path, streaming, capsys):
    write_documents(tmp_path / "set", "mine", "a")
    write_documents(tmp_path / "set", "more", "b")
    (tmp_path / "set" / "a.parquet").unlink()
    (tmp_path / "set" / "NOTES.md").write_text("Not of the data set.")
    data = DataConfig(source="hf", path=str(tmp_path / "set"), seq_len=2, streaming=streaming)
    assert texts_of(load_corpus(data, 256)) == "minemore"
    said = " ".join(capsys.readouterr().out.split())
    assert said.endswith("has files of several kinds, of which one is read: left out are b.parquet")
