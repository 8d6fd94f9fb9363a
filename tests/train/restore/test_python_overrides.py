"""What a program gave a run is said by commands, which count what the config has in its place."""

import json

import pytest

from jaxpar.base.config import load_config
from jaxpar.base.toml import to_toml
from jaxpar.cli.main import main
from jaxpar.train.restore import given_notes


@pytest.fixture
def run_of(tmp_path):
    """`run_of(beside)`: a run folder of `tiny` with a checkpoint that has this beside its state."""

    def make(beside: dict[str, object]):
        folder = tmp_path / "run"
        data = folder / "checkpoints" / "20" / "data"
        data.mkdir(parents=True)
        (data / "metadata").write_text(json.dumps(beside))
        (data.parent / "state").mkdir()
        (folder / "config.toml").write_text(to_toml(load_config("tiny")))
        return folder

    return make


@pytest.mark.parametrize("word", ["", pytest.param("config.toml", marks=pytest.mark.slow)])
def test_a_command_says_that_it_does_not_count_the_optimizer_that_was_given(
    run_of, word, tmp_path, capsys
):
    """The picture and the table counted AdamW's two moments, and nothing said so."""
    folder = run_of({"optimizer": "given", "parts": {}})
    assert main(["show", str(folder / word), "--out", str(tmp_path / "a.png")]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"jaxpar: note: {folder} was trained with an optimizer that a program")
    assert "optimizer.name=adamw" in line and "make_experiment" in line


def test_parts_of_a_model_are_named(run_of):
    (note,) = given_notes(run_of({"optimizer": "lion", "parts": {"blocks": "Mine"}}))
    assert "(blocks=Mine)" in note and "model.family=gpt2" in note


@pytest.mark.parametrize("beside", [{"optimizer": "adamw", "parts": {}}, {"iterator": None}])
def test_nothing_is_said_of_what_is_the_configs(run_of, beside):
    """Nor of a checkpoint of an earlier version, which does not say."""
    assert given_notes(run_of(beside)) == []


def test_nothing_is_said_of_a_preset_whose_run_lies_here(run_of, tmp_path, capsys, monkeypatch):
    """`show tiny` is of the preset, also where `runs/tiny` is another's run."""
    folder = run_of({"optimizer": "given"})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    folder.rename(tmp_path / "runs" / "tiny")
    assert main(["show", "tiny"]) == 0
    assert capsys.readouterr().err == ""
