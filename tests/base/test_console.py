"""What a person sees, off a terminal: plain lines."""

import io
import re

import pytest
from rich.console import Console

from jaxpar.base import console as report
from jaxpar.base.console import ProgressLine, banner, console, duration_text, numbers_text
from jaxpar.base.layout.placements import Placement, placements
from jaxpar.cli.main import fail
from jaxpar.show.tables import sharding_table


def test_numbers_come_in_one_order_and_only_those_known():
    numbers = {
        "data_wait": 0.014,
        "mfu": None,
        "tokens_per_second": 12_345.6,
        "loss": 2.34567,
        "grad_norm": 0.8125,
    }
    assert numbers_text(numbers) == "loss 2.3457  grad 0.812  12.35K tok/s  data wait 1 %"
    assert numbers_text({"mfu": 0.4567, "device_memory": 3 * 2**30}) == "MFU 45.7 %  mem 3.00 GiB"
    assert numbers_text({}) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (-3, "0:00"),
        (59.4, "0:59"),
        (59.6, "1:00"),
        (123, "2:03"),
        (3723, "1:02:03"),
        (36_000, "10:00:00"),
    ],
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text


def test_progress_is_plain_lines_off_a_terminal(capsys):
    with ProgressLine(total=10, done=4) as progress:
        progress.step(5, {"loss": 1.5}, eta_seconds=61)
        progress.say("saved [bold]as is[/bold] " + "x" * 200)
    lines = ["step 5/10  loss 1.5000  ETA 1:01", "saved [bold]as is[/bold] " + "x" * 200]
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize("width", [60, 80, 120])
def test_progress_on_a_terminal_has_the_step_the_time_left_and_every_number(width, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(
        report,
        "console",
        lambda: Console(file=out, width=width, force_terminal=True, color_system=None),
    )
    numbers = {
        "loss": 1.5,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "tokens_per_second": 12345.0,
        "data_wait": 0.01,
    }
    numbers |= {"tflops_per_device": 123.0, "mfu": 0.5, "device_memory": 3 * 2**30}
    with ProgressLine(total=300_000, done=12_345) as progress:
        progress.step(12_346, numbers, eta_seconds=123)
    words = out.getvalue().split()
    for word in ("12346/300000", "2:03", *numbers_text(numbers).split()):
        assert word in words


def test_only_the_first_process_speaks(capsys):
    with ProgressLine(total=10, done=0, active=False) as progress:
        progress.step(5, {"loss": 1.5}, eta_seconds=61)
        progress.say("saved")
    assert capsys.readouterr().out == ""


def test_the_banner_names_versions_devices_mesh_and_facts(plan_of):
    lines = dict(
        line.split(maxsplit=1)
        for line in banner(
            plan_of(data=2, tensor=4),
            {"run": "runs/mine"},
        )
    )
    assert re.match(r"jaxpar \d.*, jax \d.*, orbax-checkpoint \d", lines["versions"])
    assert lines["devices"] == "8 x cpu, simulated, 1 process"
    assert lines["mesh"] == "data=2 x tensor=4"
    assert lines["run"] == "runs/mine"


@pytest.fixture
def rows(plan_of) -> list[Placement]:
    import numpy as np

    arrays = {
        "a_parameter_with_quite_a_long_name": np.zeros((256, 64), np.float32),
        "b": np.zeros(512, np.float32),
    }
    axes = {"a_parameter_with_quite_a_long_name": ("embed", "mlp"), "b": (None,)}
    return placements(arrays, axes, plan_of(fsdp=2, tensor=4))


def test_the_table_has_a_line_a_parameter_and_their_sum(rows, capsys):
    console().print(sharding_table(rows))
    _, first, second, total = capsys.readouterr().out.splitlines()
    cells = [
        "a_parameter_with_quite_a_long_name",
        "256 x 64",
        "embed, mlp",
        "P('fsdp', 'tensor')",
        "8.00 KiB",
    ]
    assert re.split(" {2,}", first.strip()) == cells
    assert second.split()[-2:] == ["2.00", "KiB"]
    assert total.split() == ["all", "10.00", "KiB"]


def test_a_narrow_terminal_folds_the_table_and_loses_nothing(rows):
    out = io.StringIO()
    Console(file=out, width=50).print(sharding_table(rows))
    assert "\u2026" not in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 50


def test_an_error_is_one_line_and_exit_code_2(capsys):
    assert fail("no such thing:\n  a cause\n  of several lines") == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "jaxpar: error: no such thing: a cause of several lines\n")


def test_a_name_is_printed_as_it_is(capsys) -> None:
    """`:train:` is no picture of a train, and `[12]` no style."""
    console().print("texts:train: 3 documents of [12]")
    assert capsys.readouterr().out == "texts:train: 3 documents of [12]\n"
