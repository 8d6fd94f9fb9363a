"""What watches a training: steps that are not finite and loss that leaps (`policy`, `judge`,
`failures`), what in such a step was the first to go wrong (`nonfinite`) and whether a device is to
blame (`run_again`), copies that differ (`replicas`), steps that never end (`watchdog`) and time
that runs out (`time_limit`).
"""

from jaxpar.train.guard.policy import (
    Guard,
    spike_limit,
)

__all__ = [
    "Guard",
    "spike_limit",
]
