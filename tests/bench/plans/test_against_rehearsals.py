"""Plans are drawn from the planner's space, and ranked beside their rehearsals."""

from __future__ import annotations

import json
from functools import lru_cache

import pytest

from jaxpar.base.errors import UserError
from jaxpar.bench.plans import rehearse_pairs as making
from jaxpar.bench.plans.against_rehearsals import (
    RankedPair,
    as_json,
    choice_rows,
    pair_rows,
    rank_rehearsed,
)
from jaxpar.bench.plans.pairs import PAIRS, Drawn, Pair, Space, draw_plans, pairs_of, space_of
from jaxpar.bench.plans.rehearsed import rehearsed_plans
from jaxpar.cli.main import main
from jaxpar.plan.engine import Outcome
from jaxpar.plan.figures import Figures
from jaxpar.rehearse.targets import Target
from jaxpar.show.rehearsed_plans import rehearsed_plans_figure

REACHED = {
    "gpt2_124m on h100x8": (0.98, 0.01),
    "llama32_1b on h100x8": (0.95, 0.03),
    "llama3_8b on h100x16": (0.8, 0.01),
    "gpt2_1558m on a100x16": (0.85, 0.01),
    "llama3_70b on h100x64": (0.85, 0.01),
    "mixtral_8x7b on h100x64": (0.85, 0.01),
}
"""Kendall's tau at least, and regret at most, of each pair."""
SMALL = Pair("small", "tiny", "h100x8", 64)


@lru_cache
def small() -> Space:
    return space_of(SMALL)


@lru_cache
def published() -> list[RankedPair]:
    return rank_rehearsed(rehearsed_plans())


@lru_cache
def drawn() -> list[Drawn]:
    return draw_plans(small(), 24)


def test_drawn_plans_fit_and_are_not_slow():
    estimates = [small().price(one.candidate) for one in drawn()]
    fastest = min(estimate.seconds for estimate in estimates)
    assert len({one.candidate for one in drawn()}) == 24
    assert [one.drawn for one in drawn()[:8]] == ["first"] * 8
    assert all(one.bytes.total <= small().request.budget for one in estimates)
    assert all(one.seconds <= 3 * fastest for one in estimates)


def test_drawn_plans_are_of_many_kinds():
    assert len({tuple(size > 1 for size in one.candidate.sizes) for one in drawn()}) >= 6


def test_the_same_plans_are_drawn_each_time():
    assert draw_plans(small(), 12)[8:] == [one for one in drawn() if one.drawn == "spread"][:4]


def test_a_pair_that_nobody_knows_is_refused():
    assert pairs_of(()) == list(PAIRS)
    assert {pair.config for pair in pairs_of(["gpt2"])} == {"gpt2_124m", "gpt2_1558m"}
    with pytest.raises(UserError, match="no pair's name begins"):
        pairs_of(["gpt5"])


def test_rehearsing_goes_on_where_it_broke_off(monkeypatch, tmp_path):
    """A row is written as each rehearsal ends; a refusal is a row too."""
    asked = []

    def rehearse(configs, target, folder, workers):
        asked.append(configs[0])
        if len(asked) == 3:
            raise KeyboardInterrupt
        if len(asked) == 2:
            return [Outcome(refused="2 GiB too much", too_large=True)]
        return [Outcome(Figures(0.1, 1.0, 0.0, 0.0, None, 2**30, 2**36, True, 1.0))]

    monkeypatch.setattr(making, "rehearse_all", rehearse)
    monkeypatch.setattr(Target, "devices", lambda self: [])  # no compiler is asked here
    monkeypatch.setattr(making, "space_of", lambda pair: small())
    monkeypatch.setattr(making, "draw_plans", lambda space: drawn()[:8])
    pair = PAIRS[0]
    with pytest.raises(KeyboardInterrupt):
        making.rehearse_pairs([pair], tmp_path)
    rows = making.rehearse_pairs([pair], tmp_path)
    assert len(rows) == 8
    assert len(asked) == 9  # the third twice
    assert [row.refused for row in rows[:3]] == ["", "memory: 2 GiB too much", ""]


def test_the_committed_plans_are_ranked_as_docs_say():
    """The table of docs/plan_board.md."""
    for pair in published():
        tau, regret = REACHED[pair.name]
        assert not pair.falsely_fitting
        assert pair.regret <= regret
        assert pair.regret_after <= 0.03
        assert pair.rehearsals <= 6
        assert pair.kendall >= tau


def test_the_tables_and_the_picture_are_of_every_pair():
    pairs = published()
    assert [row["pair"] for row in pair_rows(pairs)] == [pair.name for pair in pairs]
    assert len(choice_rows(pairs)) == sum(pair.regret > 0 for pair in pairs)
    found = json.loads(json.dumps(as_json(pairs), allow_nan=False))
    drawn = [axis for axis in rehearsed_plans_figure(found).axes if axis.get_title()]
    assert len(drawn) == len(pairs)


def test_a_plan_that_is_said_to_fit_and_refused_is_counted():
    rows = rehearsed_plans()
    name = rows[0].pair
    some = [row for row in rows if row.pair == name]
    refused = some[0]._replace(seconds=0.0, memory=0, refused="memory: too large")
    (pair,) = rank_rehearsed([refused, *some[1:]])
    assert [one.row for one in pair.falsely_fitting] == [refused]
    assert len(pair.fitting) == len(some) - 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--anew"], "give --rehearsed too"),
        (["--rehearsed", "--anew", "--rows", "a.csv"], "leave one out"),
        (["--rehearsed", "--out", "runs/a"], "the folder of --anew"),
    ],
)
def test_flags_without_effect_are_refused(words, said, capsys):
    assert main(["bench", "plans", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
