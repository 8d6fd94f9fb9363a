"""`jaxpar plan`: what it refuses, prints and writes, around made-up closed forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_up_prices import made_up

from jaxpar.base.config import load_config
from jaxpar.base.config.checks import check
from jaxpar.cli.main import main
from jaxpar.plan.layout_search import find

QUICK = ["--rehearsals", "0", "--no-verify"]


@pytest.fixture(autouse=True)
def made_up_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "closed_forms", made_up)


def refused(capsys: pytest.CaptureFixture[str], line: str) -> str:
    """The one line of a refused command."""
    assert main(["plan", *line.split()]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    return said.removeprefix("jaxpar: error: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tiny", "plan needs --target: v5p-64, v5e-8, h100x64, here, ...: docs/targets.md"),
        ("tiny --target v5q-8", "no target 'v5q-8'"),
        ("tiny --target v5e-8 --forbid ofload", "'ofload' (did you mean 'offload'?)"),
        ("tiny --target v5e-8 --fix tensor", "--fix takes a key with its value"),
        ("tiny --target v5e-8 --fix tensr=2", "--fix tensr (did you mean 'tensor'?)"),
        ("tiny --target v5e-8 --fix model.layers=2", "give other settings as flags"),
        ("tiny --target v5e-8 --fix memory.policy=some", "memory.policy is one of none, full"),
        ("tiny --target v5e-8 --tokens many", "--tokens 'many' is no number"),
        ("tiny --target v5e-8 --tokens 1M --global-batch 8", "leave one out"),
        ("tiny --target v5e-8 --budget lots", "--budget 'lots' is no size"),
        ("tiny --target v5e-8 --budget 64GiB", "is more than a device of v5e-8 has"),
        ("tiny --target v5e-8 --out plan.txt", "--out plan.txt is a config"),
        ("tiny --target v5e-8 --may anything", "--may 'anything'"),
        ("tiny --target v5e-8 --elastic four", "--elastic takes numbers of chips"),
        ("tiny --target v5e-8 --elastic 4 --fit", "leave one of them out"),
        ("tiny --target v5q --fit", "no chip 'v5q' (did you mean 'v5p'?)"),
        (
            "tiny --target v5e-8 --forbid recompute --fix memory.policy=full",
            "uses what is forbidden",
        ),
    ],
)
def test_a_wrong_request_is_one_line(
    capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert message in refused(capsys, words)


def test_the_files_of_an_answer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["tiny", "--target", "v5e-8", "--out", "plan.toml", "--json", "plan.json"]
    words += ["--picture", "plan.png", "--price", "2"]
    assert main(["plan", *words, *QUICK]) == 0
    said = capsys.readouterr().out
    assert "why others lost:" in said and "USD" in said
    text = Path("plan.toml").read_text(encoding="utf-8")
    assert text.startswith("# Found for v5e-8 by `jaxpar plan tiny")
    config = load_config("plan.toml")
    assert check(config) == config
    answer = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    assert answer["config"]["mesh.fsdp"] == config.mesh.fsdp
    assert Path("plan.png").stat().st_size > 10_000


def test_a_setting_of_the_layout_that_is_given_is_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["tiny", "--target", "v5e-8", "--mesh.tensor", "4", "--json", "-"]
    assert main(["plan", *words, "--fix", "memory.policy=full", *QUICK]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fixed"] == {"mesh.tensor": 4, "memory.policy": "full"}
    assert answer["config"]["mesh.tensor"] == 4
    assert answer["config"]["memory.policy"] == "full"


def test_where_nothing_fits_the_exit_code_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama3_8b", "--target", "v5e-4", "--forbid", "offload", "recompute"]
    assert main(["plan", *words, *QUICK]) == 1
    said = capsys.readouterr().out
    assert "nothing fits v5e-4" in said and "cannot run:" in said


def test_the_smallest_target_of_a_chip(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama32_1b", "--target", "v5e", "--fit", "--forbid", "offload", "recompute"]
    assert main(["plan", *words, "--global-batch", "16", *QUICK]) == 0
    said = capsys.readouterr().out
    assert "v5e-1: nothing fits" in said
    assert "the smallest that holds it is" in said


def test_a_plan_for_each_number_of_chips(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["tiny", "--target", "v5e-8", "--elastic", "8,4", "--out", "plan.toml", *QUICK]
    assert main(["plan", *words]) == 0
    assert "reads the checkpoints" in capsys.readouterr().out
    eight, four = (load_config(f"plan_{count}.toml") for count in (8, 4))
    assert eight.train.batch == four.train.batch
    assert eight.model == four.model and eight.data == four.data
