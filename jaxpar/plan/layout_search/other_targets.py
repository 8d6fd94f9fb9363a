"""Searches over several targets: the smallest that holds a config, and a plan for each number of
chips that an elastic run may have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxpar.base.config import incompatible_changes
from jaxpar.base.errors import Say, UserError, suggest
from jaxpar.base.hardware import CHIPS, load_chip
from jaxpar.base.toml import presets
from jaxpar.plan.layout_search.answer import Answer
from jaxpar.rehearse.targets import Target, load_target

_SIZES = tuple(2**power for power in range(14))
_FURTHER = 3
"""The number of sizes beyond the smallest that are looked at for the cheapest."""

Search = Callable[[Target], Answer]
"""Searches on a target."""


class Fitting(NamedTuple):
    """What was found for the sizes of a chip.

    Attributes:
      smallest: the answer on the smallest target that holds the config.
      cheapest: the one with the most tokens for a second of a chip.
      looked_at: all answers, the smallest target first.
    """

    smallest: Answer
    cheapest: Answer
    looked_at: tuple[Answer, ...]


def sized_target(chip: str, count: int) -> Target:
    """Return the target of so many of a chip.

    Raises:
      UserError: the chip is not known, or there is no such target.
    """
    known = presets(CHIPS)
    if chip not in known:
        raise UserError(f"no chip {chip!r}{suggest(chip, known)}: there are {', '.join(known)}")
    mark = "-" if load_chip(chip).slices.name else "x"
    return load_target(f"{chip}{mark}{count}")


def smallest_fit(chip: str, search: Search, say: Say = lambda line: None) -> Fitting:
    """Find the smallest target of a chip that holds a config, and the cheapest of the next ones.

    Args:
      search: searches on a target.
      say: is called with a line for each target.

    Raises:
      UserError: the chip is not known, or no target of it holds the config.
    """
    sized_target(chip, 4)  # a chip that is not known is said at once
    found = list[Answer]()
    refusals = list[str]()
    for count in _SIZES:
        try:
            target = sized_target(chip, count)
        except UserError:
            continue  # there is no target of this size
        answer = search(target)
        if answer.best is None:
            refusals = [str(refused) for refused in answer.refused.values()]
            say(f"{target.name}: nothing fits")
            continue
        found.append(answer)
        say(f"{target.name}: {answer.best.name}, {_rate(answer):,.0f} tokens/s a chip")
        if len(found) > _FURTHER:
            break
    if not found:
        raise UserError(
            f"no target of {chip} holds this config: {'; '.join(refusals[:1]) or 'none was found'}"
        )
    return Fitting(found[0], max(found, key=_rate), tuple(found))


def _rate(answer: Answer) -> float:
    """Return the tokens a second of a chip."""
    return answer.tokens_per_second / answer.request.target.hardware.chips


def elastic_plans(chip: str, counts: Sequence[int], search: Search) -> list[Answer]:
    """Search a plan for each number of chips that a run may have.

    The global batch is one for all, and so is the order of the data, which follows from it. A
    checkpoint of one is restored on another: nothing that a run keeps differs.

    Args:
      search: searches on a target.

    Raises:
      UserError: nothing fits one of them, or a run could not go on from one to another.
    """
    answers = [search(sized_target(chip, count)) for count in counts]
    for answer in answers:
        if answer.config is None:
            why = "; ".join(str(one) for one in answer.refused.values())
            raise UserError(f"--elastic: nothing fits {answer.request.target.name}: {why}")
    first = answers[0].config
    for answer in answers[1:]:
        assert first is not None and answer.config is not None
        if differs := incompatible_changes(first, answer.config):
            raise UserError(
                f"--elastic: a run of {answers[0].request.target.name} could not go on on "
                f"{answer.request.target.name}: {', '.join(differs)}"
            )
    return answers
