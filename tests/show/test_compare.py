"""Several runs beside each other: their settings that differ, and their losses in one picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxpar.base.config import Config, override
from jaxpar.base.toml import to_toml
from jaxpar.cli.main import main
from jaxpar.data.vocabulary.tokenizer import BytesTokenizer, CharsTokenizer
from jaxpar.show.compare import comparison_figure, differing, read_runs

BYTES = BytesTokenizer()


def make(
    folder: Path,
    losses: dict[int, float],
    tokenizer: BytesTokenizer | CharsTokenizer = BYTES,
    **changes: object,
) -> Path:
    """A run that has logged a loss at some steps, and a validation loss at the last of them."""
    folder.mkdir(parents=True)
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    (folder / "config.toml").write_text(to_toml(override(Config(), settings)))
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    rows = [{"step": step, "loss": loss} for step, loss in losses.items()]
    rows += [{"step": max(losses), "val_loss": losses[max(losses)] + 0.1}] if losses else []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    falling = {step: 2 + 3 / step for step in range(1, 20)}
    make(tmp_path / "runs" / "a", falling, train__learning_rate=1e-3)
    make(tmp_path / "runs" / "b", falling, train__learning_rate=2e-3, optimizer__name="lion")
    return tmp_path / "runs"


def test_the_settings_that_differ_and_no_others(runs: Path) -> None:
    found = differing(read_runs({"runs": runs}))
    assert found == {"train.learning_rate": [1e-3, 2e-3], "optimizer.name": ["adamw", "lion"]}


def test_the_table_and_the_picture(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "both.svg"
    assert main(["compare", str(runs / "a"), str(runs / "b"), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "train.learning_rate" in printed and "lion" in printed
    assert "2.1579" in printed and "2.2579" in printed and "note" not in printed
    picture = out.read_text()
    assert str(runs / "a") in picture and ">step<" in picture


def test_steps_of_other_sizes_are_drawn_by_tokens(runs: Path, tmp_path: Path) -> None:
    make(runs / "c", {1: 3.0, 2: 2.0}, train__batch=64, data__seq_len=32)
    found = read_runs({"runs": runs})
    (axes,) = comparison_figure(found).axes
    assert axes.get_xlabel() == "tokens"
    last = [line.get_xdata()[-1] for line in axes.lines if not line.get_label().startswith("_")]
    assert last == [run.tokens(run.last("step") or 0) for run in found]


def test_losses_of_other_tokens_are_said_to_be_others(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(runs / "c", {1: 3.0}, CharsTokenizer("ab"))  # a token file brings its own
    monkeypatch.chdir(runs.parent)
    assert main(["compare", "runs"]) == 0
    assert "note: the tokenizers differ" in capsys.readouterr().out
    assert (runs.parent / "compare.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "usage: jaxpar compare"),
        (["runs/a"], "takes two runs or more, and runs/a is one"),
        (["runs/a", "runs/a/"], "takes two runs or more"),
        (["runs", "nowhere"], "no run folder, and has none in it"),
        (["runs", "--out", "no/such/x.png"], "no/such"),
    ],
)
def test_what_cannot_be_compared(
    words: list[str],
    said: str,
    runs: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(runs.parent)
    assert main(["compare", *words]) == 2
    assert said in capsys.readouterr().err


def test_runs_without_a_loss_make_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "a", {})
    make(tmp_path / "b", {}, train__batch=8)
    assert main(["compare", "a", "b"]) == 2
    assert "no run has a loss" in capsys.readouterr().err
    assert not (tmp_path / "compare.png").exists()
