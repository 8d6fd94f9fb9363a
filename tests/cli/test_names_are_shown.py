"""Names that a terminal would obey, or that have markup, are shown as they are: messages, tables,
pages, pictures.
"""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpar.base.config import Config, ModelConfig
from jaxpar.base.console import PlainConsole
from jaxpar.base.errors import json_line, visible
from jaxpar.base.toml import to_toml
from jaxpar.cli.main import main
from jaxpar.show.figures import loss_figure, save_figure
from jaxpar.show.watch import page

NAME = "\x1b[31mred[bold]x[/bold]:smile:\u202e\x9bm\rab"
MODEL = ModelConfig(
    "llama",
    vocab_size=256,
    layers=1,
    embed=16,
    heads=2,
    mlp=32,
    max_seq_len=32,
)
SHOWN = r"\x1b[31mred[bold]x[/bold]:smile:\u202e\x9bm\rab"


def test_what_a_terminal_would_obey_is_written_out_and_line_ends_stay() -> None:
    assert visible(NAME) == SHOWN
    assert visible("a\r\n\tb\n\u00e9\U0001f600") == "a\r\n\tb\n\u00e9\U0001f600"
    line = json_line({"text": NAME + "\ud800"})
    assert line.isascii() and json.loads(line) == {"text": NAME + "\ud800"}


def test_an_error_shows_the_name_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", NAME.replace("\r", "") + ".toml"]) == 2
    said = capsys.readouterr().err
    assert (
        said.rstrip("\n").isprintable()
        and r"\x1b[31mred[bold]x[/bold]:smile:\u202e\x9bmab.toml" in said
    )


@pytest.mark.parametrize("runs", [1, 2])
def test_the_page_of_a_run_shows_its_name(tmp_path: Path, runs: int) -> None:
    name = NAME.replace("/", "")
    for number in range(runs):
        folder = tmp_path / f"{name}{number}"
        folder.mkdir()
        (folder / "config.toml").write_text(to_toml(Config()))
    out = PlainConsole(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    out.print(page(tmp_path if runs > 1 else tmp_path / f"{name}0", 200))
    said = out.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert visible(name)[-20:] in said.replace("\n", "")
    assert not set(said) & set("\x9b\u202e\r")


def test_the_title_of_a_picture_is_no_formula_and_makes_no_broken_file(tmp_path: Path) -> None:
    for ending in ("svg", "png"):
        save_figure(loss_figure([], "runs/$\\frac{a$ \x1b[0m"), tmp_path / f"loss.{ending}")
    text = " ".join(ElementTree.parse(tmp_path / "loss.svg").getroot().itertext())
    assert r"runs/$\frac{a$ \x1b[0m" in text


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_taken_only_where_that_is_said(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float
) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = value
    save_file(tensors, file)
    words = ["convert", str(checkpoint), str(tmp_path / "run"), "--mesh.platform", "cpu"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "model.norm.weight" in said and "train.allow_nonfinite=true" in said
    assert main([*words, "--train.allow-nonfinite", "True"]) == 0


@pytest.fixture
def checkpoint(tmp_path: Path, plan_of) -> Path:
    import jax

    from jaxpar.models import Model
    from jaxpar.models.hf.export import export_hf

    model = Model(MODEL)
    plan = plan_of()
    params = jax.jit(model.init, out_shardings=plan.sharding(()))(jax.random.key(0))
    export_hf(params, model, tmp_path / "llama")
    return tmp_path / "llama"


def test_generate_checks_the_config_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = to_toml(Config()).replace("kv_heads = 0", "kv_heads = 3")
    (tmp_path / "config.toml").write_text(text)
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path) in said and "model.heads=4 is not a multiple of model.kv_heads=3" in said
