"""This package chooses the forms of overlap and what to keep, offload and recompute, and says what
all of it takes.

`resolve` settles a config's `overlap = auto` and its `memory.budget`, for the devices at hand or
for a target; `memory_account` predicts where the bytes of its step are.
"""

from jaxpar.plan.budget import resolve, resolve_and_compile
from jaxpar.plan.memory_account import MemoryPart, memory_account

__all__ = ["MemoryPart", "memory_account", "resolve", "resolve_and_compile"]
