"""A rehearsal on a terminal."""

import io
import re

import pytest
from fake_rehearsal import fake_rehearsal
from rich.console import Console

from jaxpar.base.console import console
from jaxpar.rehearse.report.report_tables import (
    collectives_table,
    finding_lines,
    lines_table,
    note_lines,
    report_parts,
    seconds_text,
    summary,
)


@pytest.fixture
def report():
    return fake_rehearsal(layers=4)


def printed(*parts, width: int = 400) -> list[str]:
    """What a console of this width makes of them."""
    out = Console(
        file=io.StringIO(),
        width=width,
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    for part in parts:
        out.print(part)
    return [line.rstrip() for line in out.file.getvalue().splitlines()]


def cells(line: str) -> list[str]:
    return re.split(" {2,}", line.strip())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0"),
        (12.34, "12.3 s"),
        (0.99996, "1.00 s"),
        (0.437, "437 ms"),
        (0.0999, "99.9 ms"),
        (1.5e-3, "1.50 ms"),
        (8e-4, "800 us"),
        (-3e-6, "-3.00 us"),
        (4e-9, "4 ns"),
    ],
)
def test_seconds_keep_three_digits(seconds, text):
    assert seconds_text(seconds) == text


def test_the_summary_says_what_fits_and_how_long_a_step_takes(report):
    lines = dict(summary(report))
    assert lines["target"].startswith("v5p-64: 64 x TPU v5p, 4x4x4 (64 chips; ")
    assert lines["mesh"] == "fsdp=16 x tensor=4"
    assert lines["memory"] == "fits, 90.11 GiB to spare: 4.89 GiB of 95.00 GiB a device"
    assert re.fullmatch(
        r"[\d.]+ ms a step: compute .* ms, exposed communication .* ms, waits .* us", lines["time"]
    )
    assert lines["throughput"].endswith("tokens/s, MFU 44.3 %, HFU 57.8 %")


def test_the_summary_of_what_does_not_fit_has_the_advice_and_no_figure_that_is_not_known(report):
    report["memory"].update(
        fits=False,
        hbm_bytes=4 * 2**30,
        usable_bytes=4 * 2**30,
        advice=["mesh.fsdp=32 saves 0.94 GiB"],
    )
    report["time"].update(mfu=None, hfu=None)
    lines = summary(report)
    at = next(i for i, (name, _) in enumerate(lines) if name == "memory")
    assert "does not fit: 915.00 MiB too much: 4.89 GiB of 4.00 GiB" in lines[at][1]
    assert lines[at + 1] == ("", "mesh.fsdp=32 saves 0.94 GiB")
    assert not any("MFU" in text or "HFU" in text for _, text in lines)


def test_lines_come_the_most_exposed_first_and_the_rest_is_counted(report):
    _, *rows, rest = printed(*lines_table(report, most=5)[2:])
    exposed = sorted((row["exposed"] for row in report["lines"]), reverse=True)
    assert [cells(row)[0] for row in rows] == [seconds_text(value) for value in exposed[:5]]
    assert rest.strip() == f"and {len(report['lines']) - 5} more"


def test_unplanned_collectives_come_first(report):
    _, first, second, *_ = printed(*collectives_table(report, most=20)[2:])
    assert cells(first)[-5:] == [
        "all-reduce",
        "tensor",
        "UNPLANNED",
        "forward",
        "models/llama.py:133",
    ]
    assert "planned" in cells(second)


def test_findings_read_as_a_compilers_do(report):
    first, second, third = finding_lines(report["findings"])
    assert first.startswith(
        "models/llama.py:133: error: unplanned-collective: all-reduce over tensor of the logits"
    )
    assert first.endswith("(310 us, 125.00 MiB)")
    assert ": warning: large-copy: " in second
    assert third.startswith("warning: replicated-activation: ")
    assert (
        report_parts({**report, "findings": [], "notes": []})[-2]
        == "the linter found nothing to report"
    )


def test_notes_say_what_was_assumed(report):
    assert note_lines(report)[0] == "note: while.7: no trip count, taken as 1"
    report.update(notes=[])
    assert note_lines(report) == [
        "note: 21.0 % of the compute time is a roofline estimate, not the compiler's own"
    ]
    report["time"]["estimated_without_cycles"] = 0.0
    assert note_lines(report) == []


def test_the_report_has_every_part_and_prints_strings_as_they_are(report, capsys):
    report["lines"][0]["scope"] = "block[bold]"
    for part in report_parts(report, most=100):
        console().print(part)
    text = capsys.readouterr().out
    for title in (
        "memory of a device",
        "memory of the host",
        "one step; collectives run for ",
        "by line of the model: ",
        "collectives: 1 unplanned",
        "error: unplanned-collective",
    ):
        assert title in text
    assert "block[bold]" in text
    assert len(re.findall("UNPLANNED", text)) == 1


def test_a_narrow_terminal_folds_the_tables(report):
    lines = printed(*lines_table(report, most=20)[2:], width=84)
    assert max(map(len, lines)) <= 84
    assert not any("\u2026" in line for line in lines)
