"""The composition of settings: each alone, all pairs, and the best combination that was found.

A pair is held against its parts. Speeds multiply and bytes, seconds and losses add up, where two
settings have nothing to do with each other; what differs from that is what they do to one another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpar.base.config import Config
from jaxpar.base.console import bytes_text, count_text
from jaxpar.base.errors import Say, UserError
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
    run = _Run(base, settings, measure, loss, say)
    pairs_of = list(itertools.combinations(settings, 2))
    run.expected = 1 + len(settings) + len(pairs_of)
    origin = run.point(())
    if origin.figures is None:
        raise UserError(f"the config as it is cannot be rehearsed: {origin.why_not}")
    alone = tuple(run.point((name,)) for name in settings)
    pairs = tuple(run.point(pair) for pair in pairs_of)
    study = Study(origin, alone, pairs, (), None, "")
    count = 2 ** len(settings) - 1 - len(settings) - len(pairs)
    if count <= MOST_SUBSETS:
        larger = _all_larger(run, settings)
        search = f"all {count} combinations of three and more were tried"
    else:
        larger = _greedy(run, study, loss_within)
        search = (
            f"greedy from the best pair or single setting: the {BREADTH} further settings that the "
            "pairs speak for most are tried on top of it, the fastest that fits is kept, and so on "
            "until none is faster; a better combination may exist"
        )
    found = (origin, *alone, *pairs, *larger)
    best = _fastest(found, _limit(origin, loss_within))
    return Study(origin, alone, pairs, larger, best, search)


class _Run:
    """A run that measures points one by one, each once, and says how each came out."""

    def __init__(
        self,
        base: Config,
        settings: Mapping[str, Setting],
        measure: Measure,
        loss: Loss | None,
        say: Say,
    ):
        self.base = base
        self.settings = settings
        self.measure = measure
        self.loss = loss
        self.say = say
        self.expected = 0
        self._known: dict[frozenset[str], Point] = {}

    def point(self, names: Sequence[str]) -> Point:
        """Measure the point of some settings, once."""
        key = frozenset(names)
        if key not in self._known:
            point = self._measured(tuple(names))
            self._known[key] = point
            at = len(self._known)
            place = f"{at}/{self.expected}" if at <= self.expected else f"{at}, searching"
            self.say(f"[{place}] {point_line(point)}")
        return self._known[key]

    def _measured(self, names: tuple[str, ...]) -> Point:
        try:
            config = apply_settings(self.base, {name: self.settings[name] for name in names})
            figures = self.measure(config)
        except NoEffect as error:
            return Point(names, idle=str(error))
        except UserError as error:
            return Point(names, refused=str(error))
        same = find_same(self._known.values(), figures)
        if self.loss is None:
            return Point(names, figures, same_as=same)
        try:
            return Point(names, figures, self.loss(config), same_as=same)
        except UserError as error:
            why = f"it was rehearsed, but not trained: {error}"
            return Point(names, figures, refused=why, same_as=same)


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


def _all_larger(run: _Run, settings: Mapping[str, Setting]) -> tuple[Point, ...]:
    """Measure every combination of three and more settings."""
    return tuple(
        run.point(names)
        for count in range(3, len(settings) + 1)
        for names in itertools.combinations(settings, count)
    )


def _greedy(run: _Run, study: Study, within: float) -> tuple[Point, ...]:
    """Measure the combinations on the way up from the best pair or single setting."""
    limit = _limit(study.base, within)
    best = _fastest(study.points, limit)
    tried = list[Point]()
    expect = _Expected(study)
    while best is not None:
        rest = [name for name in run.settings if name not in best.settings]
        larger = [(*best.settings, name) for name in rest]
        known = [
            names for names in larger if len(names) > 2 and expect.log_speed(names) is not None
        ]
        known.sort(key=lambda names: -(expect.log_speed(names) or 0.0))
        found = [run.point(names) for names in known[:BREADTH]]
        tried += found
        better = _fastest([best, *found], limit)
        if better is best:
            break
        best = better
    return tuple(tried)


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
