"""How sure a rehearsal is: by runs on the same chip, of the same family and on as many chips."""

from __future__ import annotations

import pytest

from jaxpar.base.hardware import CHIPS
from jaxpar.base.toml import presets
from jaxpar.rehearse.how_sure import BoardRow, errors_by_one_step, interval_of, read_board
from jaxpar.rehearse.report.report_tables import interval_text


def row(model: str, measured: float, predicted: float, chips: int = 64) -> BoardRow:
    return {
        "name": f"{model} on {chips}",
        "chip": "v5p",
        "chips": chips,
        "model": model,
        "family": "llama",
        "measured": measured,
        "predicted": predicted,
    }


FEW: list[BoardRow] = [
    {**row("8b", 1.0, 1.0), "chip": "v6e"},
    {**row("70b", 1.0, 1.0), "chip": "v6e"},
]
BOARD = [row("8b", 1.0, 1.02 + 0.01 * n) for n in range(9)] + [row("70b", 2.0, 1.4)]


def test_nine_tenths_of_the_runs_are_in_the_interval():
    found = interval_of(10.0, "v5p", 64, "llama", board=BOARD)
    assert found.get("runs") == 10 and found.get("share") == pytest.approx(0.10)
    assert (found.get("low"), found.get("high")) == (pytest.approx(9.0), pytest.approx(11.0))
    assert interval_text(found) == "±10 % by 10 published runs on v5p"


def test_of_a_few_runs_the_worst_counts():
    assert interval_of(1.0, "v5p", 64, board=BOARD[-3:]).get("share") == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("chip", "chips", "family", "why"),
    [
        ("v4", 64, "llama", "published run on v4"),
        ("v5p", 64, "gpt2", "run of gpt2 on v5p"),
        ("v5p", 512, "llama", "more than 64 chips"),
        ("v6e", 64, "llama", "too few"),
    ],
)
def test_where_no_run_says_anything_the_report_says_so(
    chip: str, chips: int, family: str, why: str
):
    found = interval_of(1.0, chip, chips, family, board=BOARD + FEW)
    assert why in found.get("why", "") and "share" not in found
    assert interval_text(found).startswith("how sure is not known: ")


def test_one_measured_step_takes_away_what_all_runs_of_a_model_share():
    board = [row("8b", 1.0, 1.2), row("8b", 2.0, 2.4), row("70b", 1.0, 0.5)]
    assert errors_by_one_step(board) == pytest.approx([0.0, 0.0])
    found = interval_of(1.0, "v5p", 64, "llama", True, board)
    assert found.get("runs") == 2 and found.get("share") == pytest.approx(0.0)
    alone = interval_of(1.0, "v5p", 64, "llama", True, board[1:])
    assert "twice" in alone.get("why", "")


def test_the_board_that_is_kept_is_of_chips_that_there_are():
    for one in read_board():
        assert one["chip"] in presets(CHIPS) and one["chips"] > 0, one["name"]
        assert 0.3 < one["predicted"] / one["measured"] < 3, one["name"]
