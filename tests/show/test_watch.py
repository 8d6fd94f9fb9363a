"""The page of a run: its numbers and curves, whether it lives, several runs, and a terminal of 80
columns.
"""

import io
import json
import os
import time

import pytest
from rich.console import Console

from jaxpar.base.config import Config, override, parse
from jaxpar.base.errors import UserError
from jaxpar.base.toml import to_toml
from jaxpar.cli.main import main
from jaxpar.show.watch import page
from jaxpar.train.goodput.account import CAUSES, Life


def make(folder, steps: int, age: float = 1.0, **more):
    """A run of 100 steps that has logged every second of these, the last of them `age` seconds
    ago.
    """
    folder.mkdir(parents=True)
    changes = {"train.steps": 100, "train.warmup_steps": 5, "mesh.fsdp": 2, "mesh.tensor": 4}
    (folder / "config.toml").write_text(to_toml(override(Config(), changes)))
    speed = {"tokens_per_second": 21500.0, "step_seconds": 0.25, "data_wait": 0.021, **more}
    rows = [{"step": step, "loss": 2 + 3 / step, **speed} for step in range(2, steps + 1, 2)]
    rows += [{"step": step, "val_loss": 2.5 - step / 1000} for step in range(20, steps + 1, 20)]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in sorted(rows, key=lambda r: r["step"]))
    )
    (folder / "checkpoints" / "40" / "state").mkdir(parents=True)
    (folder / "checkpoints" / "40.orbax-checkpoint-tmp").mkdir()
    os.utime(folder / "metrics.jsonl", (time.time() - age,) * 2)


def text(folder, width: int = 80) -> str:
    out = Console(width=width, record=True, file=io.StringIO())
    out.print(page(folder, width))
    return out.export_text()


def test_the_page_of_a_run(tmp_path):
    make(tmp_path / "run", 60, mfu=0.5, device_memory=3 * 2**30)
    found = text(tmp_path / "run")
    assert {len(line) for line in found.splitlines()} == {80}
    for part in (
        "data=1 x fsdp=2 x tensor=4" if "data=1 x" in found else "fsdp=2 x tensor=4",
        "step 60 of 100",
        "0:10 left",
        "loss 2.0500",
        "validation 2.4400",
        "tokens/s 21.5K",
        "a step 250 ms",
        "MFU 50.0 %",
        "data wait 2.1 %",
        "memory 3.00 GiB",
        "checkpoint 40, 0:0",
        "last line 0:01 ago",
        " running ",
        "3.500",
        "2.050",
        "step 60",
    ):
        assert part in found, part


def test_the_page_says_what_the_time_went_on(tmp_path):
    make(tmp_path / "run", 60)
    assert "goodput" not in text(tmp_path / "run")
    line = (
        '{"began": 0, "ended": 90, "lowest": 0, "step": 50, "saves": 1, "marks": [[40, 40.0]], '
        '"seconds": {"productive": 50, "startup": 30, "compiling": 10}}\n'
    )
    later = (
        '{"began": 100, "ended": 120, "lowest": 40, "step": 60, "saves": 0, "marks": [], '
        '"seconds": {"productive": 20}}\n'
    )
    (tmp_path / "run" / "goodput.jsonl").write_text(line + "damaged\n" + later)
    found = text(tmp_path / "run")
    assert {len(row) for row in found.splitlines()} == {80}
    words = " ".join(found.replace("│", " ").split())
    assert (
        "goodput 50.0 % of 2:00 in 2 processes: start-up 25.0 %, wasted 8.3 %, compiling 8.3 %, "
        "down 8.3 %" in words
    )


def test_the_curve_falls_from_its_highest_to_its_lowest(tmp_path):
    make(tmp_path / "run", 60)
    lines = [
        line
        for line in text(tmp_path / "run").splitlines()
        if any("\u2801" <= letter <= "\u28ff" for letter in line)
    ]
    columns = [
        [at for at, letter in enumerate(line) if "\u2801" <= letter <= "\u28ff"] for line in lines
    ]
    assert len(lines) == 8 and "3.500" in lines[0] and "2.050" in lines[-1]
    assert min(columns[0]) < 12 and max(columns[-1]) > 74 and max(columns[0]) < min(columns[-1])


@pytest.mark.parametrize(
    ("steps", "age", "state"),
    [
        (100, 5000, "done"),
        (60, 1, "running"),
        (60, 30, "running"),
        (60, 754, "silent for 12:34"),
        (0, 1, "starting"),
    ],
)
def test_whether_a_run_lives(tmp_path, steps, age, state):
    make(tmp_path / "run", steps, age)
    assert state in text(tmp_path / "run").splitlines()[-1]


@pytest.mark.parametrize(
    ("how", "state"),
    [
        ("stopped by SIGTERM after step 60, saved", "stopped by SIGTERM after step 60, saved"),
        ("", "silent for 12:34"),
    ],
)
def test_how_a_run_ended_is_said_and_one_that_was_killed_is_silent(tmp_path, how, state):
    make(tmp_path / "run", 60, 754)
    seconds = dict.fromkeys(CAUSES, 0.0)
    life = Life(0.0, 0.0, 0, 60, 1, seconds, how=how)
    (tmp_path / "run" / "goodput.jsonl").write_text(life.as_json())
    assert state in text(tmp_path / "run").splitlines()[-1]


def test_a_run_that_was_refused_has_not_begun(tmp_path):
    make(tmp_path / "run", 0)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    os.utime(tmp_path / "run" / "config.toml", (time.time() - 754,) * 2)
    assert "not begun" in text(tmp_path / "run").splitlines()[-1]


@pytest.mark.parametrize(
    ("steps", "parts"),
    [
        (40, ("stopped at train.stop_at=40", "step 40 of 100")),
        (20, ("running", "step 20 of 100", "0:05 left to 40")),
    ],
)
def test_a_run_that_stops_on_the_way_is_not_done(tmp_path, steps, parts):
    make(tmp_path / "run", steps)
    file = tmp_path / "run" / "config.toml"
    config = parse(file.read_text())
    file.write_text(to_toml(override(config, {"train.stop_at": 40})))
    found = text(tmp_path / "run")
    assert all(part in found for part in parts) and " done " not in found


def test_several_runs_are_a_table_and_one_of_another_version_does_not_hide_the_others(
    tmp_path, capsys
):
    make(tmp_path / "sweep" / "a", 60)
    make(tmp_path / "old", 100)
    (tmp_path / "old" / "config.toml").write_text("[model]\nwidth = 3\n")
    assert main(["watch", str(tmp_path), "--once"]) == 0
    said = capsys.readouterr().out
    assert "sweep/a" in said and "running" in said and "60/100" in said and "unknown key" in said


def test_what_is_no_run_is_a_line(tmp_path, capsys):
    with pytest.raises(UserError, match="is no run folder"):
        page(tmp_path, 80)
    assert main(["watch"]) == 2
    assert "usage: jaxpar watch RUN|FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 60, "loss": 2.0, "device_memory": NaN}',
        '{"step": 60, "step_seconds": Infinity}',
        '{"step": 60, "step_seconds": 1e308}',
        '{"step": 60, "loss": 1e308}',
        '{"step": 1' + "0" * 26 + ', "loss": 2.0}',
        '{"step": 60, "loss": 1' + "0" * 400 + "}",
        '{"step": 0, "loss": 2.0}',
        '{"step": -3, "loss": 2.0}',
    ],
)
def test_a_number_that_no_run_has_is_not_shown(tmp_path, line):
    make(tmp_path / "run", 60)
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text(file.read_text() + line + "\n")
    found = text(tmp_path / "run")
    assert "step 60 of 100" in found and "0000000000" not in found and "3.500" in found
    file.write_text(line + "\n")
    assert " of 100" in text(tmp_path / "run")


@pytest.mark.parametrize("loss", ["NaN", "Infinity"])
def test_a_run_that_diverged_shows_its_last_loss(tmp_path, loss):
    make(tmp_path / "run", 60)
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text(file.read_text() + f'{{"step": 61, "loss": {loss}}}\n')
    assert f"loss {float(loss)}" in text(tmp_path / "run")


@pytest.mark.parametrize("width", [1, 5, 12, 20, 40])
def test_a_terminal_of_few_columns(tmp_path, width):
    """Where a curve has no room there is none."""
    make(tmp_path / "run", 60)
    drawn = any("\u2801" <= letter <= "\u28ff" for letter in text(tmp_path / "run", width))
    assert drawn == (width == 40)
