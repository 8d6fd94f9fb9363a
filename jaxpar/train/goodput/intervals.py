"""How often to save where machines fail: the goodput to expect of an interval between checkpoints.

Faults come at random with a mean time between them (an exponential distribution). A fault costs the
work since the last checkpoint that was whole, and the time until steps run again; each checkpoint
costs the time in which it keeps steps waiting. `expected_goodput` is the mean of this in closed
form, `simulate_goodput` plays it through. All times are in seconds.

References: Young, "A first order approximation to the optimum checkpoint interval" (1974); Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps" (2006), whose model is
that of `expected_goodput` where nothing is written in the background.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from jaxpar.base.errors import UserError

_HALVINGS = 200
"""Steps of a search, each of which leaves 0.62 of where to look: more than a float can tell."""
_GOLDEN = (math.sqrt(5) - 1) / 2
_LARGEST_EXPONENT = 700.0
"""`math.exp` of more overflows."""


class Costs(NamedTuple):
    """What checkpoints and faults cost, in seconds.

    Attributes:
      save: how long a checkpoint keeps the steps waiting.
      write: how long it is then written in the background until it is whole. The next one waits for
        it.
      recover: from the start of a process to its first step: imports, devices, restoring,
        compiling. A fault may come in this time too.
      down: from a fault to that start, in which nothing runs that could fail.
    """

    save: float = 0.0
    write: float = 0.0
    recover: float = 0.0
    down: float = 0.0


class Simulated(NamedTuple):
    """The goodput of a simulation, and its standard error; both are shares of 1."""

    goodput: float
    error: float


def expected_goodput(interval: float, mtbf: float, costs: Costs) -> float:
    """Return the share of time that is work which is kept, in the mean over many faults.

    Between two faults, of which the second comes after a time X, the checkpoints are kept that were
    whole by then: the first is at `recover + interval + save + write`, and each after it one cycle
    later. The mean of their number is a geometric series.

    Args:
      interval: seconds of work between two checkpoints.
      mtbf: the mean seconds between two faults of the whole run.

    Returns:
      A share of 1.

    Raises:
      UserError: a number is negative, or the interval or the MTBF is 0.
    """
    _require_times(interval, mtbf, costs)
    cycle = max(interval, costs.write) + costs.save
    first = costs.recover + interval + costs.save + costs.write
    if first / mtbf > _LARGEST_EXPONENT:
        return 0.0
    kept = math.exp(-first / mtbf) / -math.expm1(-cycle / mtbf)
    return interval * kept / (mtbf + costs.down)


def simulate_goodput(
    interval: float,
    mtbf: float,
    costs: Costs,
    faults: int = 10_000,
    seed: int = 0,
) -> Simulated:
    """Play a run through, from fault to fault.

    Args:
      interval: seconds of work between two checkpoints.
      mtbf: the mean seconds between two faults of the whole run.
      faults: how many faults it meets, at least 2.
      seed: of the times at which they come.

    Returns:
      Its goodput, and how far that may be from the mean of longer simulations.

    Raises:
      UserError: a number is negative, or the interval or the MTBF is 0, or there are too few
        faults.
    """
    _require_times(interval, mtbf, costs)
    if faults < 2:
        raise UserError(f"faults={faults} says nothing of the spread: try faults=10000")
    draw = random.Random(seed)
    works = list[float]()
    walls = list[float]()
    for _ in range(faults):
        fault = draw.expovariate(1 / mtbf)
        works.append(interval * _whole_checkpoints(fault, interval, costs))
        walls.append(fault + costs.down)
    goodput = sum(works) / sum(walls)
    # the standard error of a ratio of two means
    apart = [work - goodput * wall for work, wall in zip(works, walls, strict=True)]
    variance = sum(value * value for value in apart) / (faults - 1)
    return Simulated(goodput, math.sqrt(variance / faults) / (sum(walls) / faults))


def _whole_checkpoints(fault: float, interval: float, costs: Costs) -> int:
    """How many checkpoints are whole when the fault comes, by the clock of one process."""
    count = 0
    now = costs.recover
    whole_at = 0.0
    while True:
        now += interval
        now = max(now, whole_at)  # one save waits for the one before
        now += costs.save
        whole_at = now + costs.write
        if whole_at > fault:
            return count
        count += 1


def young_interval(mtbf: float, save: float) -> float:
    """Return the best interval to first order: the square root of 2 x save x MTBF (Young 1974).

    Args:
      mtbf: the mean seconds between two faults.
      save: how long a checkpoint keeps the steps waiting, in seconds.
    """
    return math.sqrt(2 * save * mtbf)


def daly_interval(mtbf: float, save: float) -> float:
    """Return the best interval to higher order, which is good for long saves too (Daly 2006).

    Args:
      mtbf: the mean seconds between two faults.
      save: how long a checkpoint keeps the steps waiting, in seconds.
    """
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return young_interval(mtbf, save) * series - save


def best_interval(mtbf: float, costs: Costs) -> float:
    """Return the interval of the largest `expected_goodput`, in seconds.

    Where saves keep nothing waiting and nothing is written in the background, it is the shortest
    that is looked at, a millionth of the MTBF.

    Args:
      mtbf: the mean seconds between two faults of the whole run.

    Raises:
      UserError: a cost is negative, or the MTBF is 0.
    """
    _require_times(mtbf, mtbf, costs)
    # The goodput has one maximum, and is looked at by the logarithm of the interval.
    low = math.log(mtbf * 1e-6)
    high = math.log(mtbf)
    for _ in range(_HALVINGS):
        left = high - _GOLDEN * (high - low)
        right = low + _GOLDEN * (high - low)
        if expected_goodput(math.exp(left), mtbf, costs) < expected_goodput(
            math.exp(right), mtbf, costs
        ):
            low = left
        else:
            high = right
    return math.exp((low + high) / 2)


def longest_interval(goal: float, mtbf: float, costs: Costs) -> float | None:
    """Return the longest interval, in seconds, that reaches a goodput; None = none does.

    Args:
      goal: the goodput to reach, a share of 1.
      mtbf: the mean seconds between two faults of the whole run.

    Raises:
      UserError: a cost is negative, or the MTBF is 0.
    """
    best = best_interval(mtbf, costs)
    if expected_goodput(best, mtbf, costs) < goal:
        return None
    # from the best on, the goodput falls
    low = best
    high = _LARGEST_EXPONENT * mtbf
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if expected_goodput(middle, mtbf, costs) < goal:
            high = middle
        else:
            low = middle
    return low


def _require_times(interval: float, mtbf: float, costs: Costs) -> None:
    for name, value in {"interval": interval, "mtbf": mtbf}.items():
        if not 0 < value < math.inf:
            raise UserError(f"{name}={value} is no time of more than 0 seconds")
    for name, value in costs._asdict().items():
        if not 0 <= value < math.inf:
            raise UserError(f"{name}={value} is no time: give seconds, 0 or more")
