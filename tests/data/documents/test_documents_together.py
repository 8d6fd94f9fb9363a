"""Documents that processes tokenize together: the batches of one process to the bit, each
document tokenized by one of them, and a place that any number of processes goes on from.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

datasets = pytest.importorskip("datasets")
record = pytest.importorskip("array_record.python.array_record_module")
pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("documents_worker.py")
DOCUMENTS = 1500


class Found(NamedTuple):
    """What processes have read together."""

    arrays: dict[str, np.ndarray]
    """The arrays of each global batch."""
    told: list[dict[str, Any]]
    """What each process says: how many tokens it made, how many records it left out, how many blocks
    are kept for the others, and its state before each batch and at the end.
    """


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of different lengths, as JSONL and as ArrayRecord, and some to validate on."""
    root = tmp_path_factory.mktemp("documents")
    numbers = random.Random(0)
    texts = [f"{number} " + "word " * numbers.randrange(60) for number in range(DOCUMENTS)]
    texts[700] = "long " * 3000
    rows = [{"text": text} for text in texts]
    rows[5]["text"] = None
    for name, some in (("train", rows), ("val", rows[100:150])):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    writer = record.ArrayRecordWriter(str(root / "train.array_record"), "group_size:1")
    for text in texts:
        writer.write(text.encode())
    writer.close()
    return root


def read(count: int, folder: Path, data: dict[str, Any], **asked: Any) -> Found:
    """Read batches with so many processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    out = folder / f"of_{count}"
    out.mkdir(exist_ok=True)
    told = {"data": data, "processes": count, "address": address, "out": str(out)}
    told |= {"batches": 0, "state": None, "validation": False, "prefetch": 2, **asked}
    begun = [
        subprocess.Popen([sys.executable, str(WORKER), json.dumps(told | {"index": index})])
        for index in range(count)
    ]
    try:
        assert [process.wait(240) for process in begun] == [0] * count
    finally:
        for process in begun:
            process.kill()
    parts = [np.load(out / f"{index}.npz") for index in range(count)]
    return Found(
        {name: np.concatenate([part[name] for part in parts]) for name in parts[0].files},
        [json.loads((out / f"{index}.json").read_text()) for index in range(count)],
    )


def assert_same(found: Found, one: Found) -> None:
    assert found.arrays.keys() == one.arrays.keys() and one.arrays
    for name, array in one.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array, err_msg=name)
    for told in found.told:
        assert told["states"] == one.told[0]["states"]
        assert told["skipped"] == one.told[0]["skipped"]


def test_documents_in_random_access_are_tokenized_by_one_of_the_processes(folder: Path) -> None:
    """More than an epoch, on 1, 2 and 4; then 4 go on from a place of 1."""
    data = {"source": "arrayrecord", "path": str(folder / "train.array_record")}
    data |= {"seq_len": 512, "pack": True}
    one = read(1, folder, data, batches=70)
    two = read(2, folder, data, batches=70)
    four = read(4, folder, data, batches=70)
    assert_same(two, one)
    assert_same(four, one)
    whole = one.told[0]["tokenized"]
    for found in (two, four):
        shares = [told["tokenized"] / whole for told in found.told]
        # blocks are of different lengths, and each process is some blocks ahead of what was read
        assert max(shares) < 1.6 / len(shares), shares
        # of some 60 blocks the first process keeps those that not all have passed
        assert all(2 < told["kept"] < 30 for told in found.told)
    rest = read(4, folder, data, batches=40, state=one.told[0]["states"][30])
    assert rest.told[0]["states"] == one.told[0]["states"][30:]
    for name, array in rest.arrays.items():
        number, _, what = name.partition("/")
        np.testing.assert_array_equal(array, one.arrays[f"{int(number) + 30}/{what}"])


def test_a_stream_is_tokenized_together_and_goes_on_with_another_number(folder: Path) -> None:
    data = {"source": "hf", "path": str(folder / "train.jsonl"), "streaming": True}
    data |= {"shuffle_window": 40, "seq_len": 512}
    one = read(1, folder, data, batches=40)
    two = read(2, folder, data, batches=15)
    assert one.told[0]["skipped"][0] == two.told[0]["skipped"][0] == 1
    rest = read(1, folder, data, batches=25, state=two.told[1]["states"][-1])
    assert rest.told[0]["states"] == one.told[0]["states"][15:]
    for name, array in one.arrays.items():
        number, _, what = name.partition("/")
        there = two.arrays if int(number) < 15 else rest.arrays
        place = int(number) - (0 if int(number) < 15 else 15)
        np.testing.assert_array_equal(there[f"{place}/{what}"], array)
    # either alone would have made all tokens of 15 batches of 8 rows, and what is read ahead
    assert max(told["tokenized"] for told in two.told) < 0.8 * 15 * 8 * 513


def test_validation_and_mixtures_are_the_same_on_two_processes(folder: Path) -> None:
    file = str(folder / "train.jsonl")
    data = {"source": "hf", "val_path": str(folder / "val.jsonl"), "seq_len": 64}
    data |= {"mixture": [f"{file}:train[:60%] 0.7", f"{file}:train[60%:] 0.3"]}
    for asked in ({"batches": 8}, {"validation": True}):
        assert_same(read(2, folder, data, **asked), read(1, folder, data, **asked))
