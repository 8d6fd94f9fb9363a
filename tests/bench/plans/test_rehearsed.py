"""Rehearsed plans are written, read, and refused where they are none."""

from __future__ import annotations

import csv
import io

import pytest

from jaxpar.base.errors import UserError
from jaxpar.bench.plans.pairs import PAIRS
from jaxpar.bench.plans.rehearsed import (
    RehearsedPlan,
    by_pair,
    parse_rehearsed,
    rehearsed_plans,
    write_row,
)
from jaxpar.plan.candidate import Candidate

PAIR = PAIRS[0].name
KEPT = Candidate(
    mesh=(1, 1, 4, 1, 1, 2),
    dcn=(1, 2, 1, 1, 1, 1),
    accumulation=4,
    policy="full",
    keep=(("attention_out", "save"), ("up", "save")),
    zero=True,
    moments="bfloat16",
    scan=False,
    loss_mib=256,
    overlap=(("gather", "ring"), ("scatter", "ring")),
)
PIPED = Candidate(mesh=(2, 4, 1, 1, 1, 1), microbatches=8, schedule="interleaved", virtual=2)
ROWS = [
    RehearsedPlan(PAIR, "first", KEPT, 0.125, 0.01, 2**30),
    RehearsedPlan(PAIR, "spread", PIPED, 0.25, 0.0, 2**31),
    RehearsedPlan(PAIR, "brim", Candidate(mesh=(1, 8, 1, 1, 1, 1)), refused="memory: 2 GiB, or so"),
]


def written(tmp_path) -> str:
    file = tmp_path / "rows.csv"
    for row in ROWS:
        write_row(file, row)
    return file.read_text()


def test_what_was_written_is_read_again(tmp_path):
    assert parse_rehearsed(written(tmp_path), "rows.csv") == ROWS


@pytest.mark.parametrize(
    ("column", "cell", "said"),
    [
        ("pair", "gpt2 on a toaster", "no pair is called"),
        ("mesh", "fdsp=8", "is no mesh axis"),
        ("mesh", "fsdp=1.5", "a whole number"),
        ("policy", "most", "policy is"),
        ("keep", "up", "is no setting"),
        ("step_seconds", "nan", "step_seconds is"),
        ("memory_bytes", "", "memory_bytes is"),
        ("accumulation", "0", "accumulation is"),
    ],
)
def test_what_is_no_rehearsed_plan_is_refused(column, cell, said, tmp_path):
    table = list(csv.DictReader(io.StringIO(written(tmp_path))))
    table[0][column] = cell
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]))
    writer.writeheader()
    writer.writerows(table)
    with pytest.raises(UserError, match=said):
        parse_rehearsed(text.getvalue(), "rows.csv")


def test_a_file_without_rows_or_columns_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no rows"):
        parse_rehearsed("", "rows.csv")
    with pytest.raises(UserError, match="has no column mesh"):
        parse_rehearsed(written(tmp_path).replace("mesh", "grid", 1), "rows.csv")


def test_the_rehearsed_plans_in_the_package_are_each_of_their_targets_devices():
    devices = {"h100x8": 8, "h100x16": 16, "a100x16": 16, "h100x64": 64, "v5p-16": 16}
    targets = {pair.name: pair.target.partition("@")[0] for pair in PAIRS}
    groups = by_pair(rehearsed_plans())
    assert groups
    for name, rows in groups.items():
        assert {row.candidate.devices for row in rows} == {devices[targets[name]]}
        assert len({row.candidate for row in rows}) == len(rows)
