"""The loop of every search that tries candidates: a round is chosen by what the earlier ones came
to, and no candidate is tried twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

Candidate = TypeVar("Candidate", bound=Hashable)
Result = TypeVar("Result")


def try_rounds(
    rounds: Iterable[Sequence[Candidate]],
    attempt: Callable[[Sequence[Candidate]], Sequence[Result]],
    tried: dict[Candidate, Result],
    at_once: int = 1,
) -> dict[Candidate, Result]:
    """Try the candidates of some rounds, each once.

    Args:
      rounds: the rounds. One that depends on earlier ones looks into `tried`.
      attempt: tries candidates.
      tried: gets the results as soon as they are known.
      at_once: the most candidates that are tried at once.

    Returns:
      `tried`, in the order of the attempts.
    """
    for chosen in rounds:
        new = [one for one in dict.fromkeys(chosen) if one not in tried]
        while new:
            now, new = new[:at_once], new[at_once:]
            tried.update(zip(now, attempt(now), strict=True))
    return tried


def one_by_one(
    attempt: Callable[[Candidate], Result],
) -> Callable[[Sequence[Candidate]], list[Result]]:
    """Return what tries the candidates of a round one after another."""
    return lambda chosen: [attempt(one) for one in chosen]
