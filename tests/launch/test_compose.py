"""Rehearsals of many configs: what is remembered, what is written, and the small form that is
trained.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from jaxpar.base.config import Config, load_config, override
from jaxpar.base.errors import UserError
from jaxpar.cli import compose as cli
from jaxpar.cli.main import main
from jaxpar.data.masking import make_masking
from jaxpar.data.vocabulary.tokenizer import BytesTokenizer
from jaxpar.launch import compose, small_loss
from jaxpar.launch.small_loss import small_form
from jaxpar.plan import rehearsal_cache
from jaxpar.plan.figures import Figures
from jaxpar.plan.rehearsal_cache import rehearse_point
from jaxpar.plan.settings import SETTINGS
from jaxpar.rehearse.report.memory import DoesNotFit
from jaxpar.rehearse.targets import Target
from jaxpar.train.loop import Result

FIGURES = Figures(0.5, 2000.0, 0.1, 0.0, 0.4, 2**30, 2**34, True, 3.0)
WITH = {name: SETTINGS[name] for name in ("bigbird", "bf16-moments")}


class Compiler:
    """Stands for the settling and compiling of a config, and counts its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses: bool = False):
        self.calls = 0
        self.refuses = refuses
        monkeypatch.setattr(rehearsal_cache, "on_target", lambda config, target: config)
        monkeypatch.setattr(
            rehearsal_cache, "resolve_and_compile", lambda config, *_: (config, None)
        )
        monkeypatch.setattr(Target, "devices", lambda target: [])
        monkeypatch.setattr(rehearsal_cache, "rehearse", self.rehearse)
        monkeypatch.setattr(rehearsal_cache.Figures, "of", lambda report: report)

    def rehearse(self, config: Config, target: Target, program: object) -> Figures:
        self.calls += 1
        if self.refuses:
            raise DoesNotFit("20 GiB of 16 GiB")
        return FIGURES


@pytest.fixture(scope="module")
def target() -> Target:
    from jaxpar.rehearse.targets import load_target

    return load_target("h100x8")


def test_a_point_is_rehearsed_once(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(monkeypatch)
    config = load_config("gpt2_124m")
    assert rehearse_point(config, target, tmp_path) == FIGURES
    assert rehearse_point(config, target, tmp_path) == FIGURES and compiler.calls == 1
    rehearse_point(override(config, {"train.batch": 240}), target, tmp_path)
    assert compiler.calls == 2


def test_that_a_step_does_not_fit_is_remembered(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(monkeypatch, refuses=True)
    for _ in range(2):
        with pytest.raises(DoesNotFit, match="20 GiB of 16 GiB"):
            rehearse_point(load_config("gpt2_124m"), target, tmp_path)
    assert compiler.calls == 1


def test_a_study_leaves_tables_and_a_picture(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Compiler(monkeypatch)
    trained = list[int]()
    monkeypatch.setattr(compose, "loss_after", lambda one, steps, *_: trained.append(steps) or 2.5)
    config = load_config("gpt2_124m")
    study = compose.compose_config(config, WITH, target, tmp_path, train_steps=7, command="here")
    assert trained == [7] * 4
    with open(tmp_path / "results.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["settings"] for row in rows] == [point.name for point in study.points]
    assert rows[0]["step"] == "0.5" and rows[0]["loss"] == "2.5"
    whole = json.loads((tmp_path / "results.json").read_text())
    assert whole["command"] == "here" and whole["pairs"][0]["verdict"] == "add up"
    assert whole["settings"]["bigbird"] == {"model.masks": ["bigbird"]}
    assert (tmp_path / "results.png").stat().st_size > 10_000


def test_a_limit_of_the_loss_needs_a_training(target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing is trained"):
        compose.compose_config(Config(), WITH, target, tmp_path, loss_within=0.1)


def test_a_sweep_has_the_reasons_of_what_is_refused(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Compiler(monkeypatch)
    trials = {"mesh.tensor=2": load_config("gpt2_124m"), "mesh.tensor=5": UserError("too odd")}
    found = compose.rehearse_trials(trials, target, tmp_path)
    assert found[0].figures == FIGURES and found[1].why_not == "too odd"
    text = (tmp_path / "results.csv").read_text()
    assert "mesh.tensor=2,0.5" in text and "too odd" in text
    assert (tmp_path / "results.png").stat().st_size > 5_000


def test_a_sweep_without_its_compiler_is_refused_once(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_here(self: Target) -> None:
        raise UserError("target v5e-8 needs libtpu")

    monkeypatch.setattr(Target, "devices", none_here)
    trials = {"mesh.tensor=2": load_config("gpt2_124m"), "mesh.tensor=4": load_config("tiny")}
    with pytest.raises(UserError, match="needs libtpu"):
        compose.rehearse_trials(trials, target, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_sweep_of_nothing_but_refusals_has_no_picture(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Compiler(monkeypatch)
    said = list[str]()
    compose.rehearse_trials({"mesh.tensor=5": UserError("too odd")}, target, tmp_path, said.append)
    assert said[-1] == "no combination could be rehearsed, so there is no picture"
    assert [file.name for file in tmp_path.iterdir()] == ["results.csv"]


def test_the_small_form_keeps_what_is_computed() -> None:
    base = load_config("llama32_1b")
    changes = {"model.masks": ["bigbird", "causal"], "precision.moments": "bfloat16"}
    small = small_form(override(base, {**changes, "model.sparsity.form": "2:4"}), 30)
    assert small.model.masks == (
        "bigbird(window=3, globals=2, random=3, block=2, seed=0)",
        "causal",
    )
    assert small.precision.moments == "bfloat16" and small.model.sparsity.form == "2:4"
    assert small.model.heads == 4 * small.model.kv_heads
    assert small.model.layers == 2 and small.train.steps == 30 and small.data.source == "stdlib"


def test_the_small_form_of_a_config_that_needs_its_own_schedule_experts_or_objective() -> None:
    averaged = {"optimizer.name": "schedule_free", "train.schedule": "constant"}
    assert small_form(override(Config(), averaged), 30).train.schedule == "constant"
    experts = {"model.experts": 64, "model.experts_per_token": 6, "train.label_smoothing": 0.1}
    small = small_form(override(Config(), experts), 30)
    assert (small.model.experts, small.model.experts_per_token) == (12, 6)
    assert small.train.label_smoothing == 0.1
    masked = {"data.objective": "masked", "data.mask_rate": 0.3, "model.vocab_size": 30_522}
    small = small_form(override(load_config("bert_base"), masked), 30)
    assert make_masking(small.data, small.model.vocab_size, BytesTokenizer()) is not None
    assert small.data.mask_rate == 0.3


def test_the_layout_does_not_change_the_small_form() -> None:
    base = load_config("llama32_1b")
    layout = {"mesh.tensor": 2, "overlap.domino": "on", "memory.policy": "dots"}
    assert small_form(override(base, layout), 30) == small_form(base, 30)
    assert small_form(override(base, {"model.masks": ["bigbird"]}), 30) != small_form(base, 30)


@pytest.mark.slow
def test_the_loss_of_the_small_form_falls_and_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = load_config("gpt2_124m")
    first = small_loss.loss_after(base, 30, tmp_path)
    assert 1.0 < first < 3.3, "the entropy of the text's single bytes is 3.09 nats"
    monkeypatch.setattr(small_loss, "run", None)
    assert small_loss.loss_after(base, 30, tmp_path) == first


def test_an_interrupted_training_ends_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = Result(3, 2.0, None, 3.1, interrupted=True)
    monkeypatch.setattr(small_loss, "run", lambda *_: stopped)
    with pytest.raises(KeyboardInterrupt):
        small_loss.loss_after(load_config("gpt2_124m"), 30, tmp_path)


def test_words_of_the_command_are_settings() -> None:
    assert cli.split_names(("remat,model.masks=[window(8),bigbird(3, 1)]", "domino")) == [
        "remat",
        "model.masks=[window(8),bigbird(3, 1)]",
        "domino",
    ]
    own = cli.own_setting("train.learning_rate=1e+3+mesh.tensor=2")
    assert own.changes == {"train.learning_rate": 1000.0, "mesh.tensor": 2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("compose gpt2_124m --with remat", "compose needs --target"),
        ("compose gpt2_124m --target h100x8", "which settings? --with takes some of remat"),
        ("compose gpt2_124m --target h100x8 --with remta", "did you mean 'remat'?"),
        ("compose gpt2_124m --target h100x8 --with memory.polcy=full", "memory.polcy"),
        ("sweep gpt2_124m --over mesh.tensor=2 --target h100x8 --per-trial 2", "has no effect"),
    ],
)
def test_wrong_words_are_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*words.split(), "--run", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
