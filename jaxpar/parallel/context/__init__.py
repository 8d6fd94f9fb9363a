"""Context parallelism: attention over a sequence that is split over devices. To be read in this
order: what a strategy is given (`task`), the ring (`ring`) and Ulysses' trade of the sequence for
heads (`ulysses`), which are such strategies, and the op that has them (`split`).
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
