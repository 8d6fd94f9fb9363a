"""What decides: forms of overlap, what to keep, offload and recompute, and what all of it takes.

`resolve` settles a config: its `overlap = auto` and its `memory.budget`, for the devices at hand or a target.
"""

from jaxpar.plan._resolve import resolve, resolve_and_compile

__all__ = ["resolve", "resolve_and_compile"]
