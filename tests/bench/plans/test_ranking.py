"""Measured plans are read, refused where they are none, and ranked."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxpar.base.errors import UserError
from jaxpar.bench.plans.ranking import as_json, candidate_of_row, rank_plans, summary_rows
from jaxpar.bench.plans.rows import MeasuredPlan, by_group, measured_plans, parse_plans
from jaxpar.cli.main import main

HEAD = ",".join(MeasuredPlan._fields)
ROW = "12,1024,16,64,4096,50257,1024,16,4,4,1,1,2,2,0.2"


def test_the_measured_plans_are_in_the_package():
    rows = measured_plans()
    groups = by_group(rows)
    assert (len(rows), len(groups)) == (842, 77)
    assert all(len({row.chips for row in members}) == 1 for members in groups.values())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no rows"),
        (f"{HEAD.replace('chips', 'chip')}\n{ROW}", "has no column chips"),
        (f"{HEAD}\n{ROW.replace('0.2', 'nan')}", "step_seconds is"),
        (f"{HEAD}\n{ROW.replace('0.2', '')}", "step_seconds is"),
        (f"{HEAD}\n{ROW.replace('12,1024', '12.5,1024')}", "layers is"),
        (f"{HEAD}\n{ROW.replace('16,4,4', '16,4,2')}", "dp x tp x pp"),
        (f"{HEAD}\n{ROW.replace('1024,16,4,4', '1024,32,4,4')}", "dp x microbatch"),
        (f"{HEAD}\n{ROW.replace('4,4,1,1,2,2', '52,4,1,13,2,2')}", "16 heads and 12"),
    ],
)
def test_what_is_no_plan_is_refused(text, said):
    with pytest.raises(UserError, match=said):
        parse_plans(text, "plans.csv")


def test_microbatches_of_a_pipeline_are_in_it_together():
    (row,) = parse_plans(f"{HEAD}\n{ROW}", "plans.csv")
    assert candidate_of_row(row).accumulation == 2
    staged = candidate_of_row(row._replace(dp=2, pp=2))
    assert (staged.accumulation, staged.microbatches, staged.size("stage")) == (1, 2, 2)


def test_small_groups_are_ranked():
    """The groups of one model."""
    rows = [row for row in measured_plans() if (row.layers, row.embed) == (12, 2048)]
    groups = rank_plans(rows)
    (line, *_) = summary_rows(groups)
    assert line["plans"] == len(rows)
    assert line["median Spearman"] >= 0.95
    assert line["worst"] <= 15
    json.dumps(as_json(groups))


@pytest.mark.slow
def test_all_groups_are_ranked_as_well_as_docs_say(capsys, tmp_path):
    """The goals of docs/plan_board.md."""
    file = tmp_path / "plans.json"
    assert main(["bench", "plans", "--json", str(file), "--picture", str(tmp_path / "a.png")]) == 0
    assert "all: 77" in capsys.readouterr().out
    groups = json.loads(file.read_text())
    for fitted in (True, False):
        some = [one["regret"] for one in groups if one["fitted"] is fitted]
        ranks = [one["spearman"] for one in groups if one["fitted"] is fitted]
        assert np.median(ranks) >= 0.95
        assert np.median(some) == 0
        assert np.percentile(some, 90) <= 0.10
        assert max(some) <= 0.15
