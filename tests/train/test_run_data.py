"""A run knows its data again: moved they are the same, changed they are refused, mended they are
gone on with.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import jaxpar.data.identity as identity_module
import jaxpar.train.loop as loop
from jaxpar.base.config import Config, DataConfig, ModelConfig, override
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.data.corpus import load_corpus
from jaxpar.data.identity import Piece, difference, identify
from jaxpar.train.experiments import make_experiment
from jaxpar.train.loop.messages import how_often_read
from jaxpar.train.metrics import read_metrics
from jaxpar.train.run_data import compare_data, keep_data, with_run_data
from jaxpar.train.runs.folder.run_folder import compare_run, keep_config, read_run_config

pytestmark = pytest.mark.usefixtures("keeps_programs")

LINES = [f"{i} lorem ipsum dolor sit amet" for i in range(60)]


def write(folder: Path, kind: str, lines: list[str]) -> DataConfig:
    """The lines as data of a kind; the last file is for validation."""
    folder.mkdir(parents=True)
    if kind == "tokens":
        for name, part in (("a.bin", lines), ("val.bin", lines[::-1])):
            np.frombuffer("".join(part).encode(), np.uint8).astype("<u2").tofile(folder / name)
        return DataConfig(
            source="tokens",
            path=str(folder / "a.bin"),
            val_path=str(folder / "val.bin"),
            seq_len=16,
        )
    if kind == "chat":
        rows = [json.dumps({"prompt": line, "completion": "!"}) for line in lines]
        (folder / "a.jsonl").write_text("\n".join(rows))
        return DataConfig(source="chat", path=str(folder / "a.jsonl"), seq_len=64)
    for name, part in (("a.txt", lines[:30]), ("b.txt", lines[30:])):
        (folder / name).write_text("\n".join(part))
    return DataConfig(source="text", path=str(folder), seq_len=16)


def trained(folder: Path, data: DataConfig) -> Config:
    """A run folder with a checkpoint, as far as a comparison looks at it."""
    config = Config(data=data)
    pieces = identify(load_corpus(data, 256))
    keep_config(folder, config)
    keep_data(folder, pieces)
    (folder / "checkpoints" / "5" / "state").mkdir(parents=True)
    return config


@pytest.mark.parametrize("kind", ["tokens", "chat", "text"])
def test_moved_data_are_taken_and_changed_data_are_refused_by_the_name_of_their_file(
    kind: str, tmp_path: Path
) -> None:
    data = write(tmp_path / "there", kind, LINES)
    config = trained(tmp_path / "run", data)
    (tmp_path / "there").rename(tmp_path / "moved")
    moved = {
        key: value.replace("there", "moved")
        for key, value in (("path", data.path), ("val_path", data.val_path))
    }
    config = replace(config, data=replace(data, **moved))
    corpus = load_corpus(config.data, 256)
    found = compare_data(tmp_path / "run", config, corpus)
    assert found.known and not found.changed and not found.note
    compare_run(tmp_path / "run", config, found.known)
    keep_config(tmp_path / "run", config)
    assert read_run_config(tmp_path / "run").data.path == config.data.path
    with pytest.raises(UserError, match="another config"):
        compare_run(tmp_path / "run", replace(config, data=replace(config.data, path="elsewhere")))

    other = list(LINES)
    other[40] = other[40].replace("dolor", "color")  # as many of everything
    again = replace(config, data=write(tmp_path / "other", kind, other))
    name = {"tokens": "a.bin", "chat": "a.jsonl", "text": "b.txt"}[kind]
    with pytest.raises(
        UserError,
        match=f"{name} has other content .*accept_changed=True",
    ):
        compare_data(tmp_path / "run", again, load_corpus(again.data, 256))
    accepting = override(again, {"data.accept_changed": True})
    found = compare_data(tmp_path / "run", accepting, load_corpus(again.data, 256))
    assert found.changed and name in found.note
    compare_run(tmp_path / "run", accepting, found.known)
    keep_config(tmp_path / "run", accepting)
    assert not read_run_config(tmp_path / "run").data.accept_changed, "of one call alone"


def test_what_is_missing_new_or_in_another_order_is_named(tmp_path: Path) -> None:
    data = write(tmp_path / "texts", "text", LINES)
    config = trained(tmp_path / "run", data)

    def said() -> str:
        with pytest.raises(UserError) as refused:
            compare_data(tmp_path / "run", config, load_corpus(data, 256))
        return str(refused.value)

    (tmp_path / "texts" / "c.txt").write_text("more")
    assert "c.txt is new" in said()
    (tmp_path / "texts" / "c.txt").unlink()
    (tmp_path / "texts" / "a.txt").rename(tmp_path / "texts" / "c.txt")
    assert "has another place in their order" in said()
    (tmp_path / "texts" / "c.txt").unlink()
    assert "a.txt is missing" in said()
    (tmp_path / "texts" / "a.txt").write_text("\n".join(LINES[:29]))
    sizes = [len("\n".join(LINES[:count])) for count in (30, 29)]
    assert "a.txt has other content than before, {:,} long, now {:,}".format(*sizes) in said()


A = ("a/1.txt", 5, "x")
B = ("a/2.txt", 5, "y")
C = ("a/3.txt", 7, "z")
COPIES: dict[
    str,
    tuple[
        list[tuple[str, int | None, str]],
        list[tuple[str, int | None, str]],
        str,
    ],
] = {
    # The pieces before and now, and what is said of them.
    "a copy is new": (
        [A, B],
        [A, B, ("a/5.txt", 5, "x")],
        "a/5.txt is new",
    ),
    "a copy that comes first": (
        [A, B],
        [("a/0.txt", 5, "x"), A, B],
        "a/0.txt is new",
    ),
    "a copy in another folder": (
        [A, B],
        [A, B, ("b/1.txt", 5, "x")],
        "b/1.txt is new",
    ),
    "a copy of moved data": (
        [A, B],
        [
            ("c/1.txt", 5, "x"),
            ("c/2.txt", 5, "y"),
            ("c/9.txt", 5, "y"),
        ],
        "c/9.txt is new",
    ),
    "a copy over another": (
        [A, C],
        [A, ("a/3.txt", 5, "x")],
        "a/3.txt has other content than before, 7 long, now 5",
    ),
    "a copy is gone": (
        [A, ("a/0.txt", 5, "x"), B],
        [A, B],
        "a/0.txt is missing",
    ),
    "a length that was not known": (
        [("s", None, "x")],
        [("s", 5, "y")],
        "s has other content than before",
    ),
    "nor is it now": (
        [("s", 5, "x")],
        [("s", None, "y")],
        "s has other content than before",
    ),
    "the name of one that is still there": ([A], [A, ("b/1.txt", 9, "w")], "b/1.txt is new"),
}


@pytest.mark.parametrize("case", COPIES)
def test_of_copies_the_one_that_was_not_there_is_named(case: str) -> None:
    before, now, said = COPIES[case]
    assert difference([Piece(*piece) for piece in before], [Piece(*piece) for piece in now]) == said


def test_a_run_that_has_not_trained_and_a_corpus_of_ones_own(tmp_path: Path) -> None:
    data = write(tmp_path / "texts", "text", LINES)
    config = trained(tmp_path / "run", data)
    (tmp_path / "run" / "checkpoints" / "5").rename(tmp_path / "run" / "checkpoints" / "0")
    (tmp_path / "texts" / "a.txt").write_text("other " * 99)
    assert not compare_data(tmp_path / "run", config, load_corpus(data, 256)).changed
    mine = load_corpus(data, 256)
    mine = mine._replace(train=replace(mine.train, files=()), val=None)
    (piece,) = identify(mine)
    flipped = np.array(mine.train.tokens)
    flipped[3] ^= 1
    (other,) = identify(mine._replace(train=replace(mine.train, tokens=flipped)))
    assert piece.length == other.length and piece.hash != other.hash


def test_an_experiment_that_has_its_data_is_handed_on_as_it_is(tmp_path: Path) -> None:
    """Its shapes, its optimizer and the entropy of its text are not worked out a second time."""
    config = Config(data=write(tmp_path / "texts", "text", LINES), mesh=MeshSpec(data=8))
    loaded, corpus = with_run_data(make_experiment(config), tmp_path / "run", print)
    again, same = with_run_data(loaded, tmp_path / "run", print)
    assert again is loaded and same is corpus is loaded.corpus


def test_long_files_are_known_by_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_module, "_WHOLE", 1000)
    monkeypatch.setattr(identity_module, "_PIECE", 10)
    ids = np.resize(np.arange(256), 4000).astype("<u2")
    found = []
    for place in (None, 0, 3999, 6):
        if place is not None:
            ids[place] = (ids[place] + 1) % 256
        ids.tofile(tmp_path / "a.bin")
        data = DataConfig(
            source="tokens", path=str(tmp_path / "a.bin"), seq_len=16, val_fraction=0.0
        )
        found.append(identify(load_corpus(data, 256))[0].hash)
    assert len(set(found[:3])) == 3 and found[3] == found[2]  # between two samples


@pytest.mark.slow
def test_a_stream_that_breaks_off_goes_on_over_the_mended_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("jaxpar.data.documents.tokenized.SAMPLE", 1000)
    rows = [json.dumps({"text": f"{i} " + "lorem ipsum " * 10}) for i in range(60)]
    (tmp_path / "texts").mkdir()
    for number in range(2):
        (tmp_path / "texts" / f"{number}.jsonl").write_text("\n".join(rows))
    broken = tmp_path / "texts" / "1.jsonl"
    broken.write_text("\n".join([*rows[:9], '{"text": "cut', *rows[9:]]))
    sizes = {
        "vocab_size": 256,
        "layers": 1,
        "embed": 16,
        "heads": 2,
        "mlp": 16,
        "max_seq_len": 64,
    }
    config = override(
        Config(model=ModelConfig(**sizes), mesh=MeshSpec(platform="cpu")),
        {
            "data.source": "hf",
            "data.path": str(tmp_path / "texts"),
            "data.streaming": True,
            "data.seq_len": 64,
            "train.batch": 16,
            "train.steps": 20,
            "train.warmup_steps": 1,
            "train.eval_every": 0,
            "checkpoint.every": 0,
            "metrics.log_every": 1,
        },
    )
    with pytest.raises(UserError, match=r"1\.jsonl, line 10 is not valid JSON"):
        loop.run(config, tmp_path / "run")
    reached = max(row["step"] for row in read_metrics(tmp_path / "run"))
    assert reached > 2 and "which is saved" in capsys.readouterr().out
    broken.write_text("\n".join(rows))
    assert loop.run(config, tmp_path / "run").step == 20
    assert "the run goes on over it, as it had stopped over its data" in capsys.readouterr().out
    steps = [row["step"] for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert steps[-1] == 20 and len(set(steps)) == len(steps)


@pytest.mark.parametrize(
    "change",
    [
        {"broken": None},
        {"broken": 3},
        {"files": None},
        {"files": "x"},
        {"files": [1]},
        {"files": [["a", 5]]},
        {"files": [["a", "5", "x"]]},
        {"files": [["a", 5, None]]},
        {"files": [[None, 5, "x"]]},
        {"files": [{"a": 1}]},
        {"files": [["a", True, "x"]]},
    ],
)
def test_a_damaged_note_of_the_data_is_a_line_and_is_not_taken_for_another(
    change: dict, tmp_path: Path
) -> None:
    data = write(tmp_path / "texts", "text", LINES)
    config = trained(tmp_path / "run", data)
    file = tmp_path / "run" / "data.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=r"data\.json.*: delete it"):
        compare_data(tmp_path / "run", config, load_corpus(data, 256))


def test_how_often_a_run_reads_its_text_is_said() -> None:
    config = override(Config(), {"train.batch": 8, "data.seq_len": 32, "train.steps": 20})
    assert how_often_read(config, 2_560) == "20 steps of 256 tokens read the text 2 times"
    assert how_often_read(config, 256).endswith("read the text 20 times")
    assert "A STEP IS MORE THAN ALL OF IT" in how_often_read(config, 255)
