"""What a block keeps for its backward pass: named policies over `jax.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax


def remat(block: Callable[..., Any], policy: Literal["none", "full"], looped: bool = True) -> Callable[..., Any]:
    """`block`, recomputed in the backward pass as the policy says.

    Args:
      block: the body of a `lax.scan` over layers, or of its unrolled form.
      policy: `none` saves every activation; `full` saves only the block's input (Chen et al. 2016, arXiv:1604.06174).
      looped: the block is the body of a scan.
    """
    if policy == "none":
        return block
    # Inside a scan the loop itself keeps XLA from merging the recomputation with the forward pass; unrolled, XLA:TPU
    # would merge the two and keep everything after all.
    return jax.checkpoint(block, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=not looped)
