"""This package chooses the forms of overlap and what to keep, offload and recompute, and says what all of it takes.

`resolve` settles a config's `overlap = auto` and its `memory.budget`, for the devices at hand or for a target.
"""

from jaxpar.plan._resolve import resolve, resolve_and_compile

__all__ = ["resolve", "resolve_and_compile"]
