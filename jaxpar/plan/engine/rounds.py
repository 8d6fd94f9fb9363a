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
) -> dict[Candidate, Result]:
    """Try the candidates of some rounds, each once.

    Args:
      rounds: the rounds. One that depends on earlier ones looks into `tried`.
      attempt: tries candidates, all of one round at once.
      tried: gets the result of each candidate before the next round is asked for.

    Returns:
      `tried`, in the order of the attempts.
    """
    for chosen in rounds:
        new = [one for one in dict.fromkeys(chosen) if one not in tried]
        tried.update(zip(new, attempt(new), strict=True))
    return tried


def one_by_one(
    attempt: Callable[[Candidate], Result],
) -> Callable[[Sequence[Candidate]], list[Result]]:
    """Return what tries the candidates of a round one after another."""
    return lambda chosen: [attempt(one) for one in chosen]
