"""What watches a training: steps that are not finite and loss that leaps (`policy`, `failures`),
what in such a step was the first to go wrong (`nonfinite`), copies that differ (`replicas`), steps
that never end (`watchdog`) and time that runs out (`time_limit`).
"""

from jaxpar.train.guard.policy import (
    Guard,
    spike_limit,
)

__all__ = [
    "Guard",
    "spike_limit",
]
