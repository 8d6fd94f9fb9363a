"""The composition of settings: each alone, all pairs, and the best combination that was found.

A pair is held against its parts. Speeds multiply and bytes, seconds and losses add up, where two
settings have nothing to do with each other; what differs from that is what they do to one another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxpar.base.config import Config
from jaxpar.base.console import bytes_text, count_text
from jaxpar.base.errors import Say, UserError
from jaxpar.plan.engine import one_by_one, try_rounds
from jaxpar.plan.figures import Figures, Point, find_same
from jaxpar.plan.settings import NoEffect, Setting, apply_settings

MOST_SUBSETS = 32
"""The most combinations of three and more settings that are all rehearsed."""
BREADTH = 3
"""The number of settings that are tried on top of a combination: those that the pairs speak for
most.
"""
ALIKE = 0.01
"""The share within which a pair's speed equals its parts' product, so that it adds up. A rehearsal
repeats exactly, so this is no noise: it is what is too little to matter.
"""
ADD_UP = "add up"
"""The verdict on a pair that adds up."""

Names = tuple[str, ...]
"""The names of settings that are put into the base, in the order of the settings."""
Measure = Callable[[Config], Figures]
Loss = Callable[[Config], float]


class Gain(NamedTuple):
    """The gain of two settings together, beside the sum of their gains apart.

    Speeds are shares of the base's (1.2 = a fifth more tokens a second), and multiply. The others
    are differences to the base, and are added up: bytes, seconds, and nats a token. None = not
    known.
    """

    pair: Point
    speed: float | None = None
    speed_of_parts: float | None = None
    memory: float | None = None
    memory_of_parts: float | None = None
    exposed: float | None = None
    exposed_of_parts: float | None = None
    loss: float | None = None
    loss_of_parts: float | None = None

    @property
    def verdict(self) -> str:
        """The verdict: `add up`, `gain more together`, `cancel` in part; empty = not known."""
        if self.speed is None or self.speed_of_parts is None:
            return ""
        share = self.speed / self.speed_of_parts
        if abs(share - 1) <= ALIKE:
            return ADD_UP
        return "gain more together" if share > 1 else "cancel"


@dataclass(frozen=True)
class Study:
    """The rehearsals of some settings.

    Attributes:
      base: the config as it is.
      alone: the base with each setting.
      pairs: the base with every two settings.
      larger: combinations of three and more that the search tried.
      best: the fastest point that fits (and, where there is a limit, whose loss is within it); None
        = nothing fits.
      search: how it was looked for, in a sentence.
    """

    base: Point
    alone: tuple[Point, ...]
    pairs: tuple[Point, ...]
    larger: tuple[Point, ...]
    best: Point | None
    search: str

    @property
    def points(self) -> tuple[Point, ...]:
        """All points, the base first."""
        return (self.base, *self.alone, *self.pairs, *self.larger)

    def speed(self, point: Point) -> float | None:
        """Return the tokens a second of a point as a share of the base's; 1 where it changes
        nothing, None where it is not known.
        """
        if point.figures is None or self.base.figures is None:
            return 1.0 if point.idle else None
        return point.figures.tokens_per_second / self.base.figures.tokens_per_second

    def gains(self) -> list[Gain]:
        """Compare every pair with its parts."""
        alone = {point.settings[0]: point for point in self.alone}
        return [self._gain(pair, [alone[name] for name in pair.settings]) for pair in self.pairs]

    def _gain(self, pair: Point, parts: Sequence[Point]) -> Gain:
        if pair.figures is None:
            return Gain(pair)
        speeds = [self.speed(part) for part in parts]
        memory = [self._more(part, "memory") for part in parts]
        exposed = [self._more(part, "exposed") for part in parts]
        losses = [self._more_loss(part) for part in parts]
        return Gain(
            pair,
            speed=self.speed(pair),
            speed_of_parts=_combine(speeds, math.prod),
            memory=self._more(pair, "memory"),
            memory_of_parts=_combine(memory, sum),
            exposed=self._more(pair, "exposed"),
            exposed_of_parts=_combine(exposed, sum),
            loss=self._more_loss(pair),
            loss_of_parts=_combine(losses, sum),
        )

    def _more(self, point: Point, name: str) -> float | None:
        """Return by how much a figure is above the base's."""
        if point.figures is None or self.base.figures is None:
            return 0 if point.idle else None
        return getattr(point.figures, name) - getattr(self.base.figures, name)

    def _more_loss(self, point: Point) -> float | None:
        if point.loss is None or self.base.loss is None:
            return 0.0 if point.idle and self.base.loss is not None else None
        return point.loss - self.base.loss


def _combine(parts: Sequence[float | None], by: Callable[[Sequence[float]], float]) -> float | None:
    """Add or multiply what is known of all parts; None where a part is not known."""
    known = [part for part in parts if part is not None]
    return by(known) if len(known) == len(parts) else None


def compose(
    base: Config,
    settings: Mapping[str, Setting],
    measure: Measure,
    loss: Loss | None = None,
    loss_within: float = math.inf,
    say: Say = lambda line: None,
) -> Study:
    """Rehearse a config as it is, with each of some settings, with all pairs, and with larger
    combinations on the way to the fastest that fits.

    Args:
      measure: rehearses a config; it may raise a UserError.
      loss: trains a config and returns its loss in nats a token; None = nothing is trained.
      loss_within: by how many nats a token the loss of the best may be above the base's.
      say: is called with a line for each point.

    Raises:
      UserError: the base itself is refused.
    """
    known = dict[Names, Point]()
    pairs = math.comb(len(settings), 2)
    expected = 1 + len(settings) + pairs
    count = 2 ** len(settings) - expected
    is_small = count <= MOST_SUBSETS

    def attempt(names: Names) -> Point:
        point = measured(names)
        at = len(known) + 1
        place = f"{at}/{expected}" if at <= expected else f"{at}, searching"
        say(f"[{place}] {point_line(point)}")
        return point

    def measured(names: Names) -> Point:
        chosen = {name: settings[name] for name in names}
        point = try_point(names, lambda: measure(apply_settings(base, chosen)), known.values())
        if loss is None or point.figures is None:
            return point
        try:
            return replace(point, loss=loss(apply_settings(base, chosen)))
        except UserError as error:
            return replace(point, refused=f"it was rehearsed, but not trained: {error}")

    rounds = _rounds(list(settings), known, loss_within, is_small)
    try_rounds(rounds, one_by_one(attempt), known)
    if is_small:
        search = f"all {count} combinations of three and more were tried"
    else:
        search = (
            f"greedy from the best pair or single setting: the {BREADTH} further settings that the "
            "pairs speak for most are tried on top of it, the fastest that fits is kept, and so on "
            "until none is faster; a better combination may exist"
        )
    return _study(known, loss_within, search)


def _rounds(
    settings: Sequence[str], known: Mapping[Names, Point], within: float, is_small: bool
) -> Iterator[Sequence[Names]]:
    """Yield the combinations to try.

    Args:
      known: what was tried, by which the larger ones are chosen.
      is_small: whether all of them are tried.
    """
    yield [()]
    base = known[()]
    if base.figures is None:
        raise UserError(f"the config as it is cannot be rehearsed: {base.why_not}")
    yield [(name,) for name in settings]
    yield list(itertools.combinations(settings, 2))
    if not is_small:
        yield from _greedy(settings, known, within)
        return
    for size in range(3, len(settings) + 1):
        yield list(itertools.combinations(settings, size))


def _study(known: Mapping[Names, Point], loss_within: float, search: str = "") -> Study:
    """Put what was tried in order."""
    base = known[()]
    points = list(known.values())
    return Study(
        base,
        tuple(point for point in points if len(point.settings) == 1),
        tuple(point for point in points if len(point.settings) == 2),
        tuple(point for point in points if len(point.settings) > 2),
        _fastest(points, _limit(base, loss_within)),
        search,
    )


def try_point(names: Names, rehearsal: Callable[[], Figures], known: Iterable[Point]) -> Point:
    """Rehearse a config, and say what became of it.

    Args:
      names: what was put into the base.
      rehearsal: rehearses the config; it may raise a UserError.
      known: the points that were rehearsed before.
    """
    try:
        figures = rehearsal()
    except NoEffect as error:
        return Point(names, idle=str(error))
    except UserError as error:
        return Point(names, refused=str(error))
    return Point(names, figures, same_as=find_same(known, figures))


def point_line(point: Point) -> str:
    """Write a point in one line: what a step takes, or why there is none."""
    figures = point.figures
    if figures is None:
        return f"{point.name}: {point.why_not}"
    parts = [
        f"{1e3 * figures.step:,.1f} ms",
        f"{count_text(figures.tokens_per_second)} tok/s",
        f"{1e3 * figures.exposed:,.1f} ms exposed",
        bytes_text(figures.memory),
    ]
    if point.loss is not None:
        parts.append(f"loss {point.loss:.4f}")
    if point.refused:
        parts.append(point.refused)
    elif point.same_as:
        parts.append(f"changed nothing: the program of {point.same_as}")
    if not figures.fits:
        parts.append(f"does not fit in {bytes_text(figures.usable)}")
    return f"{point.name}: {', '.join(parts)}"


def _limit(base: Point, within: float) -> float:
    """Return the highest loss that the best may have."""
    return math.inf if base.loss is None else base.loss + within


def _fastest(points: Sequence[Point], limit: float) -> Point | None:
    """Find the point with the most tokens a second that fits, and whose loss is known to be at most
    the limit where there is one.
    """
    right = [
        point
        for point in points
        if point.fits and (math.isinf(limit) or (point.loss is not None and point.loss <= limit))
    ]
    return max(right, key=_rate, default=None)


def _rate(point: Point) -> float:
    assert point.figures is not None
    return point.figures.tokens_per_second


def _greedy(
    settings: Sequence[str], known: Mapping[Names, Point], within: float
) -> Iterator[list[Names]]:
    """Yield the combinations on the way up from the best pair or single setting.

    Args:
      known: what was tried: at first each setting alone, and all pairs.
    """
    study = _study(known, within)
    limit = _limit(study.base, within)
    expect = _Expected(study)
    best = study.best
    while best is not None:
        larger = [
            tuple(name for name in settings if name in (*best.settings, more))
            for more in settings
            if more not in best.settings
        ]
        likely = [
            names for names in larger if len(names) > 2 and expect.log_speed(names) is not None
        ]
        likely.sort(key=lambda names: -(expect.log_speed(names) or 0.0))
        yield likely[:BREADTH]
        better = _fastest(list(known.values()), limit)
        if better is best:
            return
        best = better


class _Expected:
    """The speed that single settings and pairs let one expect of a larger combination: the product
    of the settings' speeds, times each pair's speed over its parts' product.
    """

    def __init__(self, study: Study):
        self._alone = {point.settings[0]: study.speed(point) for point in study.alone}
        self._pairs = {frozenset(pair.settings): study.speed(pair) for pair in study.pairs}
        self._idle_pairs = {frozenset(pair.settings) for pair in study.pairs if pair.idle}

    def log_speed(self, names: Sequence[str]) -> float | None:
        """Return the logarithm of the expected speed; None = a part of it was refused, or changes
        nothing.
        """
        total = 0.0
        for name in names:
            speed = self._alone[name]
            if speed is None:
                return None
            total += math.log(speed)
        for pair in itertools.combinations(names, 2):
            together = self._pairs[frozenset(pair)]
            if together is None or frozenset(pair) in self._idle_pairs:
                return None
            apart = [self._alone[name] for name in pair]
            total += math.log(together) - sum(math.log(one) for one in apart if one is not None)
        return total
