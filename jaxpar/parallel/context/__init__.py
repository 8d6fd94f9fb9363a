"""Context parallelism: attention over a sequence that is split over devices. To be read in this
order: the arguments of a strategy (`task`); the two strategies, the ring (`ring`) and Ulysses'
trade of the sequence for heads (`ulysses`); and the op that runs them (`split`).
"""

from jaxpar.parallel.context.split import (
    Split,
    check_split,
    kernel_for,
    split_attention,
)

__all__ = [
    "Split",
    "check_split",
    "kernel_for",
    "split_attention",
]
