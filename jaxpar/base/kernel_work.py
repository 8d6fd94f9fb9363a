"""The work of a kernel that a compiled program calls and whose matmuls it does not show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

FORWARD_MATMULS = 2
"""The scores, and the sum of the values."""
BACKWARD_MATMULS = 5
"""The scores again, the gradient of the weights, and those of queries, keys and values: what the
backward of attention needs at the least (FlashAttention-2, arXiv:2307.08691, section 2.3)."""
SPLIT_MATMULS = 7
"""The backward in two kernels, one for the queries and one for keys and values, each of which
computes the scores and the gradient of the weights."""


class AttentionWork(NamedTuple):
    """The part of attention that one call of a kernel computes."""

    kernel: str
    """The kernel, as the prices of a chip name it: `cudnn`, `pallas_gpu`."""
    head_dim: int
    keys: int
    """The most keys that a query sees."""
    flops: float
    """The FLOPs of the scores that the mask shows, whatever the kernel's tiles compute beside
    them."""
    matmuls: int = FORWARD_MATMULS
    """The matmuls that `flops` are of: 2 in a forward, 5 in a backward, and 3 and 4 in the halves
    of a backward in two kernels."""
    stands_for: str = ""
    """The kernel that the target runs in place of this one; empty = this one."""

    @property
    def backward(self) -> bool:
        """Whether it computes gradients."""
        return self.matmuls > FORWARD_MATMULS

    @property
    def needed_flops(self) -> float:
        """The FLOPs that count: in the halves of a backward, five parts of the seven."""
        if self.matmuls in (FORWARD_MATMULS, BACKWARD_MATMULS):
            return self.flops
        return self.flops * BACKWARD_MATMULS / SPLIT_MATMULS


class KernelWork(NamedTuple):
    """The matmuls of one call of a kernel."""

    flops: float
    attention: AttentionWork | None = None


KernelCost = Callable[[str, str, list[tuple[int, ...]], Mapping[str, Any]], KernelWork | None]
"""A function (instruction name, its path in jax, its operands' shapes, the cost that the kernel
states) -> the work of a kernel; None if nothing is known of it.
"""
