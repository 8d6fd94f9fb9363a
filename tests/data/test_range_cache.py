"""Token files in a bucket, on fsspec's file system in memory."""

import uuid
from dataclasses import replace

import numpy as np
import pytest

from jaxpar.base.config import DataConfig
from jaxpar.base.errors import UserError
from jaxpar.base.storage import Bucket
from jaxpar.data import range_cache
from jaxpar.data.corpus import load_corpus, train_batches, val_batches
from jaxpar.data.identity import difference, identify
from jaxpar.data.range_cache import RangedFile
from jaxpar.data.streams.token_files import open_tokens, tokenize


@pytest.fixture
def bucket(tmp_path, monkeypatch) -> Bucket:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(range_cache, "BLOCK", 1000)
    return Bucket(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def both(bucket, tmp_path) -> tuple[DataConfig, DataConfig]:
    """A token file of several documents on this machine, and the same in a bucket."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(9):
        (texts / f"{number}.txt").write_text(f"text {number}, " * 300)
    tokenize(DataConfig(source="text", path=str(texts)), tmp_path / "ids.bin")
    for file in tmp_path.glob("ids.bin*"):
        bucket.send(file, file.name)
    here = DataConfig(source="tokens", path=str(tmp_path / "ids.bin"), seq_len=64, pack=True)
    return here, replace(here, path=f"{bucket.url}/ids.bin")


def test_batches_of_a_bucket_are_those_of_a_file(both):
    found = []
    for data in both:
        corpus = load_corpus(data, 300)
        assert corpus.tokenizer is not None and corpus.val is not None
        train = train_batches(corpus.train, data, 4, range(4), 300)
        batches = [next(train) for _ in range(20)]
        batches += list(val_batches(corpus.val, data, 4, range(4), 300))
        found.append((batches, corpus.train.size, corpus.train.sample[:100], identify(corpus)))
    here, there = found
    assert len(here[0]) > 20 and here[1] == there[1]
    np.testing.assert_array_equal(here[2], there[2])
    for ours, theirs in zip(here[0], there[0], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name])
    # a run goes on when its data move to a bucket
    assert difference(here[3], there[3]) == ""
    assert there[3][0].name == both[1].path


def test_blocks_are_fetched_when_they_are_read_and_once(both, monkeypatch):
    read = list[tuple[int, int]]()
    ask = Bucket.read

    def counted(self, name="", start=None, stop=None):
        read.append((start, stop))
        return ask(self, name, start, stop)

    monkeypatch.setattr(Bucket, "read", counted)
    tokens = open_tokens(both[1].path).tokens
    header = [(0, 1000), (1000, 2000)]
    assert sorted(read) == header
    np.asarray(tokens[1600:1900])
    assert sorted(read) == [*header, (3000, 4000)]
    np.asarray(open_tokens(both[1].path).tokens[1600:1900])  # from this machine
    assert len(read) == 3


def test_a_damaged_block_on_this_machine_is_fetched_again(bucket, tmp_path):
    bucket.write("x.bin", bytes(range(200)))
    assert RangedFile(f"{bucket.url}/x.bin").read(0, 200) == bytes(range(200))
    (block,) = (tmp_path / "cache").glob("jaxpar/buckets/blocks/*/0")
    content = bytearray(block.read_bytes())
    content[50] ^= 1
    block.write_bytes(content)
    assert RangedFile(f"{bucket.url}/x.bin").read(0, 200) == bytes(range(200))


def test_an_object_that_changes_under_the_run_is_noticed(bucket):
    bucket.write("x.bin", bytes(5000))
    opened = RangedFile(f"{bucket.url}/x.bin")
    opened.read(0, 10)
    bucket.write("x.bin", bytes(4999) + b"\1")
    with pytest.raises(UserError, match=r"x\.bin has changed \(5,000 bytes"):
        opened.read(3000, 3010)
    bucket.remove(["x.bin"])
    with pytest.raises(UserError, match="no such object"):
        opened.read(4000, 4010)
    with pytest.raises(UserError, match="no such object"):
        RangedFile(f"{bucket.url}/x.bin")


def test_the_cache_has_an_end(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(range_cache, "CACHE_BYTES", 5000)
    monkeypatch.setattr(range_cache, "_LOOK_EVERY", 2)
    bucket.write("x.bin", bytes(50_000))
    assert RangedFile(f"{bucket.url}/x.bin").read(0, 50_000) == bytes(50_000)
    kept = [file.stat().st_size for file in (tmp_path / "cache").glob("jaxpar/*/blocks/*/*")]
    assert 0 < sum(kept) < 5000 + 2 * 8 * 1100  # what was fetched since it was last looked at


def test_room_that_another_process_made_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(range_cache, "CACHE_BYTES", 5000)
    files = [tmp_path / str(number) for number in range(10)]
    for file in files[5:]:
        file.write_bytes(bytes(1000))
    seen_before = [(float(age), 1000, file) for age, file in enumerate(files)]
    monkeypatch.setattr(range_cache, "_states", lambda: iter(seen_before))
    range_cache._remove_old_blocks()
    assert [file for file in files if file.exists()] == files[6:]


def test_what_is_no_block_in_the_cache_is_left_alone(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(range_cache, "CACHE_BYTES", 5000)
    monkeypatch.setattr(range_cache, "_LOOK_EVERY", 2)
    blocks = tmp_path / "cache" / "jaxpar" / "buckets" / "blocks"
    (blocks / "a" / "b").mkdir(parents=True)
    (blocks / ".DS_Store").write_bytes(b"x")
    bucket.write("x.bin", bytes(50_000))
    assert RangedFile(f"{bucket.url}/x.bin").read(0, 50_000) == bytes(50_000)
    assert (blocks / "a" / "b").is_dir() and (blocks / ".DS_Store").is_file()


def test_a_file_is_read_where_no_cache_can_be_made(bucket, tmp_path):
    (tmp_path / "cache").write_text("a file where a folder was to be")
    bucket.write("x.bin", bytes(range(200)) * 20)
    assert RangedFile(f"{bucket.url}/x.bin").read(0, 4000) == bytes(range(200)) * 20


def test_a_file_that_stands_twice_in_the_data_is_identified_once(both):
    for data in both:
        path = data.path
        data = replace(data, path="", mixture=(f"{path} 0.5", f"{path} 0.5"), val_fraction=0.0)
        pieces = identify(load_corpus(data, 300))
        assert len(pieces) == 2  # the ids, and where documents begin


def test_an_object_with_another_content_is_another(bucket):
    bucket.write("x.bin", bytes(200))
    before = RangedFile(f"{bucket.url}/x.bin")
    assert before == RangedFile(f"{bucket.url}/x.bin")
    bucket.write("x.bin", bytes(201))
    assert before != RangedFile(f"{bucket.url}/x.bin")


def test_a_token_file_in_a_bucket_that_is_cut_short_is_refused(both, bucket):
    whole = bucket.read("ids.bin")
    bucket.write("ids.bin", whole[:-100])
    with pytest.raises(UserError, match=f"{bucket.url}/ids.bin has .* its .json says"):
        load_corpus(both[1], 300)
