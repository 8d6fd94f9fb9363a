"""Numbers of a run, and the file that keeps them through crashes and resumes."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.base.config import Config
from jaxpar.base.console import bytes_text, count_text
from jaxpar.base.errors import UserError
from jaxpar.base.hardware import peak_flops
from jaxpar.base.process.preemption import Stop
from jaxpar.base.toml import to_toml
from jaxpar.train.experiments import make_experiment
from jaxpar.train.goodput import Account
from jaxpar.train.guard.failures import OutOfMemory, Running, memory_errors
from jaxpar.train.hooks.evaluations import Evaluations
from jaxpar.train.loop.rows import StepRows
from jaxpar.train.metrics import Meter, MetricsLog, device_memory, mfu, read_metrics
from jaxpar.train.runs.folder.own_tokenizer import carry_tokenizer
from jaxpar.train.runs.folder.run_folder import keep_config, read_run_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


def write(folder, steps, first_step=0):
    with MetricsLog(folder, first_step) as log:
        for step in steps:
            log.write(step, loss=step / 3)


@given(st.integers(0, 20), st.integers(0, 20))
def test_a_resumed_run_drops_the_rows_it_runs_again(folder, reached, saved):
    write(folder, [])
    (folder / "metrics.jsonl").unlink()
    write(folder, range(1, reached + 1))
    write(folder, range(saved + 1, 23), first_step=saved)
    steps = [row["step"] for row in read_metrics(folder)]
    assert steps == [
        *range(1, min(reached, saved) + 1),
        *range(saved + 1, 23),
    ]


@given(st.data())
def test_a_last_line_cut_short_is_left_out(folder, data):
    path = folder / "metrics.jsonl"
    path.unlink(missing_ok=True)
    write(folder, [1, 2, 3])
    whole = path.read_bytes()
    rows = read_metrics(folder)
    keep = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:keep])
    assert read_metrics(folder) == rows[: (whole[:keep] + whole[keep : keep + 1]).count(b"\n")]
    write(folder, [4], first_step=3)
    assert read_metrics(folder)[-1]["step"] == 4


@given(st.data())
def test_a_flipped_bit_costs_one_row_at_most_and_the_damaged_line_is_kept_aside(folder, data):
    """It may fall into a number, which cannot be seen, or into the end of a line, after which no
    row is lost.
    """
    path = folder / "metrics.jsonl"
    aside = folder / "metrics_damaged.jsonl"
    said = []
    for file in (path, aside):
        file.unlink(missing_ok=True)
    write(folder, range(1, 9))
    whole = path.read_bytes()
    rows = read_metrics(folder)
    at = data.draw(st.integers(0, len(whole) - 2))
    bit = data.draw(st.integers(0, 7))
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
    found = read_metrics(folder)
    assert len(found) >= 7 and sum(row in found for row in rows) >= (
        8 if whole[at] == ord("\n") else 7
    )
    MetricsLog(folder, first_step=10**9, say=said.append).__exit__(None)
    assert read_metrics(folder) == [row for row in found if row["step"] <= 10**9]
    assert len(said) == aside.exists() == (len(found) == 7 or whole[at] == ord("\n"))
    if said:
        assert (
            "metrics_damaged.jsonl: 1, the last is" in said[0]
            and aside.read_bytes().count(b"\n") >= 1
        )


def test_what_is_damaged_twice_is_kept_twice(tmp_path):
    for step in (1, 2):
        write(tmp_path, [step], first_step=step - 1)
        with (tmp_path / "metrics.jsonl").open("ab") as file:
            file.write(b"\xff\xfe no row\n")
    write(tmp_path, [3], first_step=2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    assert (tmp_path / "metrics_damaged.jsonl").read_bytes() == 2 * b"\xff\xfe no row\n"


def test_a_link_out_of_the_run_folder_is_replaced_and_not_written_through(tmp_path):
    mine = tmp_path / "mine.txt"
    run = tmp_path / "run"
    mine.write_text("do not touch")
    config = Config()
    keep_config(run, config)
    for name in ("metrics.jsonl", "config.toml", "tokenizer.json"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(mine)
    write(run, [1])
    carried = tmp_path / "source"
    carried.mkdir()
    (carried / "tokenizer.json").write_text("{}")
    carry_tokenizer(carried, run)
    (run / "config.toml").unlink()
    (run / "config.toml").symlink_to(tmp_path / "config.toml")
    (tmp_path / "config.toml").write_text(to_toml(config))
    keep_config(run, replace(config, train=replace(config.train, steps=5)))
    assert (tmp_path / "config.toml").read_text() == to_toml(config) and read_run_config(
        run
    ).train.steps == 5
    assert mine.read_text() == "do not touch" and not any(
        path.is_symlink() for path in run.iterdir()
    )


def test_a_line_is_there_as_soon_as_it_is_written_without_what_is_unknown(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write(1, loss=2.5, mfu=None)
        assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 2.5}


def test_only_the_first_process_writes(tmp_path):
    rows = []
    with MetricsLog(tmp_path, active=False, report=lambda *row: rows.append(row)) as log:
        log.write(1, loss=2.5, mfu=None)
    assert rows == [(1, {"loss": 2.5})], "a report is made on every process"
    assert list(tmp_path.iterdir()) == []
    assert read_metrics(tmp_path) == []


def test_mfu_is_the_share_of_the_chips_peak():
    chips = [SimpleNamespace(platform="tpu", device_kind="TPU v5p")] * 4
    peak = peak_flops("TPU v5p", "bfloat16")
    assert mfu(1000.0, 0.4 * peak / 1000, chips, "bfloat16") == pytest.approx(0.1)


def test_mfu_is_not_made_up():
    assert mfu(1e6, 1e9, jax.devices(), "float32") is None
    assert (
        mfu(1e6, 1e9, [SimpleNamespace(platform="tpu", device_kind="TPU v99")], "bfloat16") is None
    )


def test_a_meter_leaves_out_what_is_aside_and_knows_what_waited(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    meter = Meter(4, 1e9, jax.devices(), "float32")

    def spend(seconds):
        clock.now += seconds

    with meter.timed("waiting"):
        spend(1)
    spend(3)
    with meter.timed("aside"):
        spend(50)
    speed = meter.read(6, tokens=100)
    assert (speed["tokens_per_second"], speed["step_seconds"], speed["data_wait"]) == (50, 2, 0.25)
    assert speed["mfu"] is speed["tflops_per_device"] is None, "of a CPU nothing is known"
    assert speed["devices"] == jax.device_count()
    spend(1)
    assert meter.read(7, tokens=100)["data_wait"] == 0 and meter.trained == 5


def test_the_speed_of_a_run_is_that_of_the_tokens_it_computes():
    """On chat data few labels count, and the devices compute all tokens of a batch."""
    run = MagicMock(
        experiment=SimpleNamespace(tokens=8 * 16),
        corpus=SimpleNamespace(train=SimpleNamespace(skipped=None), val=None),
        first=0,
        last=2,
    )
    log = MagicMock()
    meter = Meter(0, 1e9, jax.devices(), "float32")
    measured = {"loss": 2.0, "grad_norm": 1.0, "tokens": 13.0, "overflows": 0.0}
    timing = SimpleNamespace(meter=meter, account=Account())
    StepRows(run, log, MagicMock(), timing).write(1, measured, bad_steps=0)
    row = log.write.call_args.kwargs
    assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(8 * 16)
    assert row["labels"] == 13 and "tokens" not in row


def test_an_evaluation_that_runs_out_of_memory_says_so():
    """What the backward pass keeps, which other advice would change, is no part of it."""

    def exhausted():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room")

    running = Running()
    run = MagicMock(experiment=make_experiment(Config(), jax.devices()[:1]))
    beside = MagicMock(submit=lambda *_: SimpleNamespace(result=exhausted, done=lambda: True))
    evaluations = Evaluations(run, MagicMock(), running, Stop(), beside)
    state = MagicMock(opt_state=())
    evaluations.on_begin(MagicMock(), state)
    said = "out of memory .*no room.* train.accumulation"
    with pytest.raises(OutOfMemory, match=said), memory_errors(run.experiment, running):
        evaluations.on_step(1, state)


def test_device_memory_is_the_largest_peak_of_this_process():
    def device(process, stats):
        return SimpleNamespace(process_index=process, memory_stats=lambda: stats)

    here = [
        device(0, {"peak_bytes_in_use": 3}),
        device(0, {"peak_bytes_in_use": 7}),
        device(0, None),
        device(0, {}),
    ]
    assert device_memory([*here, device(1, {"peak_bytes_in_use": 9})]) == 7
    assert device_memory(jax.devices()) is None


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1.41 * 2**30, "1.41 GiB"),
        (3 * 2**50, "3072.00 TiB"),
    ],
)
def test_bytes_text(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (124_439_808, "124.4M"),
        (8_030_261_248, "8.03B"),
        (2e15, "2000T"),
    ],
)
def test_count_text(count, text):
    assert count_text(count) == text


def test_a_row_that_a_full_disk_does_not_take_is_a_line(tmp_path):
    """The first error is told, also where closing the file fails too."""
    with (
        pytest.raises(UserError, match=r"metrics\.jsonl: No space left"),
        MetricsLog(tmp_path) as log,
    ):
        assert log._file is not None
        log._file.close()
        log._file = Path("/dev/full").open("a")  # noqa: SIM115 (the log closes it)
        log.write(1, loss=1.0)


def test_of_writes_that_fail_together_the_others_are_not_logged(caplog):
    logging.getLogger("asyncio").error(
        "Future exception was never retrieved\nfuture: <Future finished>"
    )
    logging.getLogger("asyncio").error("something else")
    assert caplog.messages == ["something else"]
