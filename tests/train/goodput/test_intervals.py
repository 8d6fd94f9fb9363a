"""The goodput to expect of an interval between checkpoints: a formula, a simulation, the best."""

import math

import pytest

from jaxpar.base.errors import UserError
from jaxpar.train.goodput.intervals import (
    Costs,
    best_interval,
    daly_interval,
    expected_goodput,
    longest_interval,
    simulate_goodput,
    young_interval,
)

HOUR = 3600.0


@pytest.mark.parametrize(
    "costs",
    [
        Costs(save=30, recover=300),
        Costs(save=2, write=120, recover=200, down=600),
        Costs(save=5, write=900, recover=60),  # a save that the next one waits for
        Costs(recover=20_000),  # faults come while it recovers
    ],
)
@pytest.mark.parametrize("mtbf", [2 * HOUR, 20 * HOUR])
def test_the_formula_is_the_mean_of_the_simulation(costs, mtbf):
    interval = 0.1 * mtbf
    found = simulate_goodput(interval, mtbf, costs, faults=4000)
    assert found.error < 0.015
    # 4 standard errors: one draw in 16,000 is further away, and the seed is fixed
    assert abs(found.goodput - expected_goodput(interval, mtbf, costs)) < 4 * found.error


def test_without_a_background_it_is_dalys_model():
    """His wall time of a work of T: M e^(R/M) (e^((t + d)/M) - 1) T/t."""
    interval, mtbf, save, recover = 1200.0, 5 * HOUR, 45.0, 400.0
    wall = mtbf * math.exp(recover / mtbf) * math.expm1((interval + save) / mtbf) / interval
    found = expected_goodput(interval, mtbf, Costs(save=save, recover=recover))
    assert found == pytest.approx(1 / wall, rel=1e-12)


def test_with_rare_faults_only_saves_cost_something():
    assert expected_goodput(90, 1e12, Costs(save=10, recover=100)) == pytest.approx(0.9, abs=1e-6)


@pytest.mark.parametrize("mtbf", [0.5 * HOUR, 3 * HOUR, 100 * HOUR])
@pytest.mark.parametrize("save", [1.0, 30.0, 120.0])
def test_the_best_interval_is_dalys_and_near_youngs(mtbf, save):
    best = best_interval(mtbf, Costs(save=save, recover=300))
    # where saves take up to a fifteenth of the MTBF, the series is within a thousandth
    assert daly_interval(mtbf, save) == pytest.approx(best, rel=1e-3)
    # Young leaves out the save itself and what is of its order
    assert abs(young_interval(mtbf, save) - best) < 1.1 * save
    at_best = expected_goodput(best, mtbf, Costs(save=save, recover=300))
    for other in (0.8 * best, 1.25 * best):
        assert expected_goodput(other, mtbf, Costs(save=save, recover=300)) < at_best


def test_the_best_interval_waits_for_no_save_in_the_background():
    costs = Costs(save=0.5, write=600, recover=300)
    assert best_interval(3 * HOUR, costs) == pytest.approx(600, rel=1e-3)


def test_the_longest_interval_just_reaches_its_goal():
    costs = Costs(save=20, recover=300)
    found = longest_interval(0.9, 10 * HOUR, costs)
    assert found is not None
    assert found > best_interval(10 * HOUR, costs)
    assert expected_goodput(found, 10 * HOUR, costs) == pytest.approx(0.9, abs=1e-9)
    assert longest_interval(0.99, 10 * HOUR, costs) is None


def test_an_interval_that_no_run_survives_has_no_goodput():
    assert expected_goodput(1e6 * HOUR, HOUR, Costs(save=1)) == 0.0
    assert daly_interval(10.0, 20.0) == 10.0


@pytest.mark.parametrize(
    ("interval", "mtbf", "costs", "named"),
    [
        (0.0, 1.0, Costs(), "interval=0"),
        (1.0, math.nan, Costs(), "mtbf=nan"),
        (1.0, 1.0, Costs(save=-1.0), "save=-1"),
        (1.0, 1.0, Costs(down=math.inf), "down=inf"),
    ],
)
def test_what_is_no_time_is_refused(interval, mtbf, costs, named):
    with pytest.raises(UserError, match=named):
        expected_goodput(interval, mtbf, costs)
    with pytest.raises(UserError, match=named):
        simulate_goodput(interval, mtbf, costs)
    with pytest.raises(UserError, match="faults=1"):
        simulate_goodput(1.0, 1.0, Costs(), faults=1)
