"""Goodput: the share of a run's time in which it does work that is kept, and what the rest went on.

`clock` measures one process by cause, `account` adds up the processes of a run and keeps them in
its folder, and `measured` says what checkpoints and faults have cost it until now. `intervals` says
what to expect of an interval between checkpoints where machines fail.
"""

from jaxpar.train.goodput.account import GOODPUT, Account, Life, Totals, add_up, read_lives
from jaxpar.train.goodput.clock import CAUSES, Cause, Clock, DeviceClock
from jaxpar.train.goodput.intervals import (
    Costs,
    Simulated,
    best_interval,
    daly_interval,
    expected_goodput,
    longest_interval,
    simulate_goodput,
    young_interval,
)

__all__ = [
    "CAUSES",
    "GOODPUT",
    "Account",
    "Cause",
    "Clock",
    "Costs",
    "DeviceClock",
    "Life",
    "Simulated",
    "Totals",
    "add_up",
    "best_interval",
    "daly_interval",
    "expected_goodput",
    "longest_interval",
    "read_lives",
    "simulate_goodput",
    "young_interval",
]
