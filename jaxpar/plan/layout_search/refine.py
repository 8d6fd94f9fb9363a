"""The choices that are tried on the best plans alone: what becomes of single activations, the bytes
of the loss, the forms of overlap, and the dtype of moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from jaxpar.base.layout.activation_names import NAMES, PRESETS, Policy
from jaxpar.plan.candidate import Candidate, Choices
from jaxpar.plan.choose_remat import Item, Option, frontier
from jaxpar.plan.layout_search.memory_choices import Price, Priced
from jaxpar.plan.layout_search.request import Request

_LOSSES = (256, 1024, 4096)
_FORMS: tuple[Choices, ...] = (
    (),
    (("gather", "ring"), ("scatter", "ring")),
    (("gather", "bidirectional"), ("scatter", "bidirectional")),
    (("domino", "on"),),
)
_TOGETHER = {"attention_out": ("attention_out", "attention_lse")}
"""Activations of which one is of no use without the other."""
_WORTH = 0.998
"""The share of a plan's time below which another choice is taken: less is no gain."""


def refine(plan: Priced, request: Request, price: Price, room: float) -> Priced:
    """Try the further choices of a plan one by one, and keep those that are faster and fit.

    Args:
      room: the bytes of a device.
    """
    best = plan
    for candidate in _variants(plan.candidate, request):
        best = _better(best, candidate, request, price, room)
    kept = keep_more(best, request, price, room)
    return kept or best


def _better(best: Priced, candidate: Candidate, request: Request, price: Price, room: float):
    """Return the faster of a plan and of a candidate that is allowed and fits."""
    if not request.allows(candidate):
        return best
    found = Priced(candidate, price(candidate))
    fits = found.bytes <= room
    return found if fits and found.seconds < _WORTH * best.seconds else best


def _variants(candidate: Candidate, request: Request) -> Iterator[Candidate]:
    """Yield a plan with other forms of overlap, bytes of the loss and moments."""
    if candidate.size("tensor") > 1 and not _fixes_overlap(request):
        for forms in _FORMS:
            yield candidate._replace(overlap=forms)
    for loss in request.options("memory.loss_mib", _LOSSES):
        yield candidate._replace(loss_mib=loss)
    if "moments" in request.may:
        yield candidate._replace(moments="bfloat16")


def _fixes_overlap(request: Request) -> bool:
    return any(key.startswith("overlap.") for key in request.fixed)


def keep_more(plan: Priced, request: Request, price: Price, room: float) -> Priced | None:
    """Find the activations to keep beyond what a policy keeps, for the fastest step that fits.

    Each is priced alone, and all combinations that no other beats are looked at
    (`jaxpar.plan.choose_remat.frontier`); the fastest that fits is priced once more as a whole.

    Args:
      room: the bytes of a device.

    Returns:
      The plan; None = nothing is gained.
    """
    start = plan.candidate
    if start.policy == "none" or "memory.policy" in request.fixed or start.keep:
        return None
    base = Priced(start._replace(policy="full"), price(start._replace(policy="full")))
    items = list[Item]()
    for name in NAMES:
        if name in ("block_input", "attention_lse"):
            continue
        saved = base.candidate._replace(keep=_saved((name,)))
        cost = Priced(saved, price(saved))
        bytes_more = round(cost.bytes - base.bytes)
        faster = base.seconds - cost.seconds
        if bytes_more <= 0 or faster <= 0:
            continue
        save = Option("save", bytes_more, 0, 0.0)
        again = Option("recompute", 0, 0, faster)
        items.append(Item((name,), (save, again)))
    left = room - base.bytes
    for solution in sorted(frontier(items), key=lambda one: one.again):
        if solution.device > left:
            continue
        actions = zip(items, solution.actions, strict=True)
        names = tuple(item.names[0] for item, action in actions if action == "save")
        candidate = _named(base.candidate, names)
        found = Priced(candidate, price(candidate))
        if found.bytes <= room and request.allows(candidate):
            return found if found.seconds < _WORTH * plan.seconds else None
    return None


def _saved(names: tuple[str, ...]) -> Choices:
    """Return the choices of `memory.keep` that save some activations."""
    whole = [other for name in names for other in _TOGETHER.get(name, (name,))]
    return tuple(sorted((name, "save") for name in whole))


def _named(candidate: Candidate, names: tuple[str, ...]) -> Candidate:
    """Return a plan that keeps some activations, under the policy that says so in fewest words."""
    wanted = {name for name, _ in _saved(names)} | {"block_input"}
    near = min(PRESETS, key=lambda policy: len(PRESETS[policy] ^ wanted))
    if PRESETS[near] == wanted:
        return candidate._replace(policy=cast(Policy, near), keep=())
    return candidate._replace(policy="full", keep=_saved(names))
