"""How a run begins and goes on: what may still be changed before it has trained, and what a refused
call leaves.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import jaxpar.train.loop as loop
from jaxpar.base.config import Config, ModelConfig, load_config, override
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.base.toml import to_toml
from jaxpar.cli.arguments import config_args
from jaxpar.cli.commands import TrainArgs
from jaxpar.train.runs.folder.run_folder import compare_run, keep_config, read_run_config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    np.random.default_rng(0).integers(0, 64, 2000).astype("<u2").tofile(tmp_path / "ids.bin")
    sizes = {
        "vocab_size": 64,
        "layers": 1,
        "embed": 16,
        "heads": 2,
        "mlp": 16,
        "max_seq_len": 16,
    }
    return override(
        Config(model=ModelConfig(**sizes), mesh=MeshSpec(platform="cpu")),
        {
            "data.source": "tokens",
            "data.path": str(tmp_path / "ids.bin"),
            "data.seq_len": 16,
            "train.steps": 40,
            "train.batch": 4,
            "train.warmup_steps": 10,
            "train.eval_every": 0,
        },
    )


def has_trained(folder: Path, config: Config, step: int) -> None:
    """A run folder with a checkpoint, as far as a start looks at it."""
    keep_config(folder, config)
    (folder / "checkpoints" / str(step) / "state").mkdir(parents=True)


def train_words(*words: str) -> Config:
    """The config that `jaxpar train` makes of some words."""
    return config_args("jaxpar train", TrainArgs, list(words), training=True)[1].config


def test_a_folder_that_has_trained_nothing_takes_any_config(config: Config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    keep_config(run, override(config, {"train.init": "nothere"}))
    mended = override(
        config, {"train.init": "there", "train.learning_rate": 1e-4, "model.embed": 32}
    )
    compare_run(run, mended)
    keep_config(run, mended)
    assert read_run_config(run) == mended
    (run / "checkpoints" / "5" / "state").mkdir(parents=True)
    with pytest.raises(UserError, match=r"another config \(model\.embed: 32 -> 16"):
        compare_run(run, config)


def test_what_the_advice_of_a_step_without_memory_changes_is_no_other_run(
    config: Config, tmp_path: Path
) -> None:
    has_trained(tmp_path / "run", config, 5)
    for key, value in {"train.accumulation": 2, "memory.policy": "full", "mesh.fsdp": 2}.items():
        assert compare_run(tmp_path / "run", override(config, {key: value})) == config


def test_weights_that_are_not_there_lock_no_folder(config: Config, tmp_path: Path) -> None:
    lost = override(config, {"train.init": str(tmp_path / "nothere")})
    with pytest.raises(UserError, match="nothere"):
        loop.run(lost, tmp_path / "run")
    assert compare_run(tmp_path / "run", config) == lost


def test_a_run_keeps_its_schedule_whatever_the_file_has(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "mine.toml"
    run = tmp_path / "run"
    file.write_text(to_toml(config))
    words = (str(file), "--run", str(run))
    first = train_words(*words, "--train.steps", "6")
    assert first.train.warmup_steps == 0
    has_trained(run, first, 6)
    capsys.readouterr()
    longer = train_words(*words, "--train.steps", "20")
    assert longer.train.warmup_steps == 0 and longer.train.steps == 20
    assert f"the run in {run} keeps its train.warmup_steps=0" in capsys.readouterr().err
    compare_run(run, longer)
    compare_run(run, train_words(str(run), "--train.steps", "20"))
    with pytest.raises(UserError, match=r"another config \(train\.warmup_steps: 0 -> 3"):
        compare_run(run, train_words(*words, "--train.warmup-steps", "3"))


def test_steps_that_leave_no_room_for_a_run_s_schedule_get_advice_that_is_taken(
    config: Config, tmp_path: Path
) -> None:
    has_trained(tmp_path / "run", config, 3)
    run = str(tmp_path / "run")
    with pytest.raises(
        UserError, match=r"takes 11 .*try train\.steps=11 or more, or train\.stop_at=8 to stop"
    ):
        train_words(run, "--train.steps", "8")
    compare_run(Path(run), train_words(run, "--train.steps", "11"))
    assert compare_run(Path(run), train_words(run, "--train.stop-at", "8")) == config


def test_an_import_takes_steps_alone(config: Config, tmp_path: Path) -> None:
    has_trained(tmp_path / "import", override(config, {"train.warmup_steps": 30}), 0)
    found = train_words(str(tmp_path / "import"), "--train.steps", "20")
    assert (found.train.steps, found.train.warmup_steps) == (20, 2)
    compare_run(tmp_path / "import", found)


def test_a_preset_is_a_preset_also_where_a_run_has_its_name(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder beside is not the run of the preset, which is in runs/."""
    monkeypatch.chdir(tmp_path)
    has_trained(Path("tiny"), config, 5)
    found = train_words("tiny", "--train.steps", "20")
    assert found == override(load_config("tiny"), {"train.steps": 20, "train.warmup_steps": 2})
    has_trained(Path("runs/tiny"), found, 5)
    assert train_words("tiny", "--train.steps", "20") == found


def test_a_refused_call_leaves_the_config_as_it_was(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    short = override(config, {"train.steps": 4, "train.warmup_steps": 0})
    loop.run(short, run)
    kept = (run / "config.toml").read_text()
    longer = override(short, {"train.steps": 6})
    monkeypatch.setitem(sys.modules, "wandb", None)
    for changes, message in (
        ({"metrics.profile": "2:4"}, r"goes on after step 4, try 6:6"),
        ({"metrics.sinks": ["wandb"]}, r"metrics\.sinks=wandb needs the extra"),
    ):
        with pytest.raises(UserError, match=message):
            loop.run(override(longer, changes), run)
        assert (run / "config.toml").read_text() == kept
    loop.run(override(short, {"train.steps": 2}), run)
    assert (run / "config.toml").read_text() == kept, "nothing was trained"
