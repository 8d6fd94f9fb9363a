"""Context parallelism: attention over a sequence that is split over devices, by a ring (`ring`) or
by Ulysses' trade of the sequence for heads (`ulysses`).
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
