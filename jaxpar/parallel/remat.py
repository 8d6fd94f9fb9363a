"""What a block keeps for its backward pass, by name: a policy over `jax.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import Offloadable, Recompute, Saveable, checkpoint_name
from jaxtyping import Array

from jaxpar.base.activation_names import NAMES
from jaxpar.base.jax_compat import CUDNN_ATTENTION, NAME
from jaxpar.base.plan import Plan
from jaxpar.parallel.host_memory import HOST

# cuDNN's attention gives its backward more than its output, and what that is has no name.
_MADE_BY = {CUDNN_ATTENTION: "attention_out"}


def named(x: Array, name: str) -> Array:
    """`x`, known to the plan by this name: one of `jaxpar.base.activation_names.NAMES`."""
    assert name in NAMES, f"activations.NAMES has no {name}"
    return checkpoint_name(x, name)


def remat(block: Callable[..., Any], plan: Plan, looped: bool = True) -> Callable[..., Any]:
    """`block`, which keeps of what it names what the plan says, and makes the rest again in the backward pass.

    A block's input is kept by the loop around it. To have it in host memory instead, it has a name as the first thing
    inside the block, and the loop keeps that.

    Args:
      block: the body of a `lax.scan` over layers, or of its unrolled form.
      plan: what it keeps of each name: see `jaxpar.base.activation_names`.
      looped: the block is the body of a scan.
    """
    if not plan.recomputes:
        return block

    def policy(primitive: Any, *_: Any, **params: Any) -> Any:
        name = params["name"] if primitive.name == NAME else _MADE_BY.get(primitive.name)
        action = plan.action(name) if name in NAMES else "recompute"
        if action == "offload":
            return Offloadable(src="device", dst=HOST)
        # The block's input is there anyway, as what the block is given; by its name it would be kept a second time.
        return Saveable if action == "save" and name != "block_input" else Recompute

    # Inside a scan the loop itself keeps XLA from merging the recomputation with the forward pass; unrolled, XLA:TPU
    # would merge the two and keep everything after all.
    return jax.checkpoint(block, policy=policy, prevent_cse=not looped)
