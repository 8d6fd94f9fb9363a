"""The choices that are tried on the best plans alone: what becomes of single activations, the bytes
of the loss, the forms of overlap, the dtype of moments, and whether layers run in a loop.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.base.layout.activation_names import NAMES, PRESETS
from jaxpar.plan.candidate import Candidate, Choices
from jaxpar.plan.choose_remat import fastest_actions
from jaxpar.plan.engine import Price, Priced, priced
from jaxpar.plan.layout_search.request import Request

_LOSSES = (256, 1024, 4096)
_FORMS: tuple[Choices, ...] = (
    (),
    (("gather", "ring"), ("scatter", "ring")),
    (("gather", "bidirectional"), ("scatter", "bidirectional")),
    (("domino", "on"),),
)
_WORTH = 0.998
"""The share of a plan's time below which another choice is taken: less is no gain."""


def refine(plan: Priced, request: Request, price: Price, room: float, may_offload: bool) -> Priced:
    """Try the further choices of a plan one by one, and keep those that are faster and fit.

    Args:
      room: the bytes of a device.
      may_offload: whether the target's host memory may be used.
    """
    best = plan
    for candidate in _variants(plan.candidate, request):
        best = _better(best, candidate, request, price, room)
    offload = may_offload and "offload" not in request.forbidden
    return keep_by_name(best, request, price, room, offload) or best


def _better(best: Priced, candidate: Candidate, request: Request, price: Price, room: float):
    """Return the faster of a plan and of a candidate that is allowed and fits."""
    if not request.allows(candidate):
        return best
    found = priced(candidate, price)
    fits = found.bytes <= room
    return found if fits and found.seconds < _WORTH * best.seconds else best


def _variants(candidate: Candidate, request: Request) -> Iterator[Candidate]:
    """Yield a plan with other forms of overlap, bytes of the loss, moments and layers."""
    if candidate.size("tensor") > 1 and not _fixes_overlap(request):
        for forms in _FORMS:
            yield candidate._replace(overlap=forms)
    for loss in request.options("memory.loss_mib", _LOSSES):
        yield candidate._replace(loss_mib=loss)
    if "moments" in request.may:
        yield candidate._replace(moments="bfloat16")
    if "unrolled" in request.may and "model.scan_layers" not in request.fixed:
        yield candidate._replace(scan=False)


def _fixes_overlap(request: Request) -> bool:
    return any(key.startswith("overlap.") for key in request.fixed)


def keep_by_name(
    plan: Priced, request: Request, price: Price, room: float, offload: bool
) -> Priced | None:
    """Return a plan that treats each activation by its name, where this is faster than the plan's
    policy.
    """
    start = plan.candidate
    if start.policy == "none" or "memory.policy" in request.fixed or start.keep:
        return None
    found = fastest_actions(start, tuple(NAMES), price, room, offload)
    if found is None or found.seconds >= _WORTH * plan.seconds:
        return None
    candidate = _in_few_words(found.candidate)
    return Priced(candidate, found.estimate) if request.allows(candidate) else None


def _in_few_words(candidate: Candidate) -> Candidate:
    """Return a plan that makes again what it does not name, under a policy that says the same where
    there is one.
    """
    saved = {name for name, action in candidate.keep if action == "save"}
    if len(saved) < len(candidate.keep):
        return candidate
    for policy, names in PRESETS.items():
        if names == saved | {"block_input"}:
            return candidate._replace(policy=policy, keep=())
    return candidate
