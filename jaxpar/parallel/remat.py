"""A policy of `jax.checkpoint` by the names of activations, which says what a block keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import Offloadable, Recompute, Saveable, checkpoint_name
from jaxtyping import Array

from jaxpar.base.jax_compat import CUDNN_ATTENTION, NAME
from jaxpar.base.layout.activation_names import NAMES
from jaxpar.base.layout.plan import Plan
from jaxpar.parallel.host_memory import HOST

# cuDNN's attention gives its backward more than its output, and these other arrays have no name.
_MADE_BY = {CUDNN_ATTENTION: "attention_out"}


def named(x: Array, name: str) -> Array:
    """Give an activation the name by which the plan knows it, one of
    `jaxpar.base.layout.activation_names.NAMES`.
    """
    assert name in NAMES, f"activation_names.NAMES has no {name}"
    return checkpoint_name(x, name)


def remat(
    block: Callable[..., Any],
    plan: Plan,
    looped: bool = True,
) -> Callable[..., Any]:
    """Wrap a block in `jax.checkpoint`, so that of the activations that it names it keeps those
    that the plan says, and computes the rest again.

    The loop around a block keeps the block's input. So that the input can lie in host memory
    instead, the block gives it a name before anything else, and the loop keeps the named array.

    Args:
      block: a function of arrays that names its activations by `named`.
      plan: says which names are kept, offloaded or recomputed.
      looped: whether the block is the body of a `lax.scan` over layers, or of its unrolled form.

    Returns:
      A function of the same arguments and results; the block itself where nothing is recomputed.
    """
    if not plan.recomputes:
        return block

    def policy(primitive: Any, *_: Any, **params: Any) -> Any:
        if primitive.name == NAME:
            name = params["name"]
        else:
            name = _MADE_BY.get(primitive.name)
        if name in NAMES:
            action = plan.action(name)
        else:
            action = "recompute"
        if action == "offload":
            return Offloadable(src="device", dst=HOST)
        # The block's input is kept anyway, as its argument; by its name it would be kept a second
        # time.
        if action == "save" and name != "block_input":
            return Saveable
        return Recompute

    # Inside a scan the loop itself keeps XLA from merging the recomputation with the forward pass;
    # unrolled, XLA:TPU would merge the two and keep everything after all.
    return jax.checkpoint(block, policy=policy, prevent_cse=not looped)
