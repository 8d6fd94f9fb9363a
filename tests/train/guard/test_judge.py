"""What the guard decides after a step, by its numbers alone."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from traced_steps import config_of

from jaxpar.base.config import TrainConfig, override
from jaxpar.models import Model
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_plan
from jaxpar.train.guard import Guard, spike_limit
from jaxpar.train.guard.failures import StepNumbers
from jaxpar.train.step import make_train_step, step_shapes


def row(step: int, loss: float = 2.0, norm: float = 1.0, overflows: int = 0) -> StepNumbers:
    return StepNumbers(step, np.float32(loss), np.float32(norm), np.int32(overflows))


def decisions(guard: Guard, *rows: StepNumbers) -> list[str]:
    return [guard.judge(one).decision for one in rows]


def test_without_a_policy_the_first_bad_step_stops_and_no_step_is_read_apart() -> None:
    guard = Guard(TrainConfig())
    assert not guard.reads_each_step and guard.saved() == {}
    assert decisions(guard, row(1), row(2, norm=np.inf)) == ["go on", "stop"]


def test_bad_steps_are_bounded_in_a_row_and_in_all() -> None:
    train = TrainConfig(on_nonfinite="skip", max_bad_in_a_row=2, max_bad_steps=4)
    bad = [row(step, loss=np.nan) for step in range(1, 10)]
    guard = Guard(train)
    assert decisions(guard, *bad[:3]) == ["skip", "skip", "stop"]
    guard = Guard(train)
    assert decisions(guard, bad[0], bad[1], row(3), bad[3], bad[4], row(6)) == [
        *("skip", "skip", "go on", "skip", "skip", "go on")
    ]
    assert guard.bad_steps == 4
    resumed = Guard(train)
    assert decisions(resumed, *bad[:2]) == ["skip", "skip"]
    again = Guard(train, resumed.saved())
    assert decisions(again, bad[2]) == ["stop"], "a resumed run counts those in a row too"
    judged = Guard(train, guard.saved()).judge(bad[6])
    assert judged.decision == "stop" and "train.max_bad_steps=4 has been reached" in judged.why


def test_steps_before_the_bad_one_do_not_count_as_progress() -> None:
    """Of a run that goes back again and again."""
    guard = Guard(TrainConfig(on_nonfinite="rollback", max_bad_in_a_row=2))
    bad = row(6, loss=np.nan)
    assert decisions(guard, bad, row(5), bad, row(5), bad) == [
        *("rollback", "go on", "rollback", "go on", "stop")
    ]


def test_a_step_that_was_made_in_part_is_not_skipped() -> None:
    part = row(3, overflows=7)
    assert decisions(Guard(TrainConfig(on_nonfinite="skip")), part) == ["stop"]
    assert decisions(Guard(TrainConfig(on_nonfinite="rollback")), part) == ["rollback"]


def test_a_spike_is_told_by_median_and_deviation_of_the_steps_before_it() -> None:
    train = TrainConfig(on_spike="rollback", spike_window=16, spike_deviations=5.0)
    rng = np.random.default_rng(0)
    usual = [row(step, 2 + 0.01 * rng.normal(), 1 + 0.1 * rng.normal()) for step in range(1, 60)]
    guard = Guard(train)
    assert set(decisions(guard, *usual)) == {"go on"}
    assert guard.judge(row(60, loss=2.2)).decision == "rollback"
    leapt = guard.judge(row(60, norm=2.0))
    assert leapt.decision == "rollback" and "gradient norm 2 at step 60 is a spike" in leapt.why
    # a spike is none of the numbers that the next is held against, nor after a resume
    assert Guard(train, guard.saved()).judge(row(60, loss=2.2)).decision == "rollback"
    assert decisions(Guard(train), *usual[:15], row(16, loss=100.0))[-1] == "go on"
    guard.roll_back(50)
    assert max(step for step, _, _ in guard.saved()["window"]) == 50


def test_a_deviation_is_that_of_a_normal_distribution_and_never_nothing() -> None:
    numbers = np.random.default_rng(0).normal(3.0, 0.5, 20_001)
    assert spike_limit(list(numbers), 4.0) == pytest.approx(3.0 + 4 * 0.5, rel=0.02)
    assert spike_limit([2.0] * 9, 10.0) == pytest.approx(2.2)


def test_no_setting_of_the_guard_changes_the_program_of_the_step() -> None:
    settings = {
        "train.on_nonfinite": "skip",
        "train.on_spike": "rollback",
        "train.check_replicas": 2,
        "train.hang_seconds": 60.0,
    }
    programs = set()
    for changes in ({}, settings):
        config = override(config_of("gpt2", embed=32), changes)
        plan = make_plan(config, jax.devices()[:1])
        model = Model(config.model)
        experiment = Experiment(config, model, plan)
        step = make_train_step(experiment)
        programs.add(str(step.trace(*step_shapes(experiment)).jaxpr))
    assert len(programs) == 1
