"""What a search answers: the plan, what it costs, and why it is this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from jaxpar.base.config import Config
from jaxpar.base.toml import flatten
from jaxpar.plan.candidate import Candidate, plan_text
from jaxpar.plan.engine.correct import Rehearsed
from jaxpar.plan.engine.priced import Priced
from jaxpar.plan.figures import Figures
from jaxpar.plan.layout_search.infeasible import Refusals
from jaxpar.plan.layout_search.processes import Verified
from jaxpar.plan.layout_search.request import Request
from jaxpar.rehearse.how_sure import interval_of
from jaxpar.rehearse.report.schema import Interval, NoInterval

SCHEMA = 1
"""The version of `Answer.to_json`, which goes up when a key is renamed, removed or changes its
meaning.
"""
_DAY = 86_400


class Found(NamedTuple):
    """A plan with what is known of its step.

    Attributes:
      candidate: the plan.
      seconds: the seconds of a step: those of the rehearsal, or else by the corrected closed forms.
      bytes: the bytes of a device, likewise.
      estimate: what the closed forms say of both, part by part.
      figures: the figures of the rehearsal; None = it was not rehearsed.
    """

    candidate: Candidate
    seconds: float
    bytes: float
    estimate: Priced
    figures: Figures | None = None

    @property
    def name(self) -> str:
        """The plan in a few words."""
        return plan_text(self.candidate)


class Lost(NamedTuple):
    """Plans that lost for one reason.

    Attributes:
      what: what they have and the best plan has not.
      why: what takes their time.
      plans: how many plans there are.
      times: the time of the fastest of them over that of the best plan.
      best: the fastest of them.
    """

    what: str
    why: str
    plans: int
    times: float
    best: Candidate

    def __str__(self) -> str:
        """Write the group in one line."""
        return f"{self.plans:,} plans with {self.what}: {self.why}, best {self.times:.2f}x"


class Changed(NamedTuple):
    """What the search would find for another request.

    Attributes:
      what: how the request differs.
      plan: what it would find; None = nothing fits.
      rate: its tokens a second over those of the answer, both by the closed forms.
      other: whether it is another plan.
    """

    what: str
    plan: Candidate | None
    rate: float = 0.0
    other: bool = False

    def __str__(self) -> str:
        """Write the change in one line."""
        if self.plan is None:
            return f"{self.what}: nothing fits"
        same = "" if self.other else "the same plan, "
        name = f"{plan_text(self.plan)}, " if self.other else ""
        return f"{self.what}: {same}{name}{self.rate:.2f}x the tokens a second"


@dataclass(frozen=True)
class Answer:
    """The answer of a search.

    Attributes:
      request: what was asked.
      rehearsed: all plans that were rehearsed, in order.
      refused: why plans cannot run, by kind.
      points: time and memory of the plans that fit, for a picture.
      count: the number of plans in the space.
      priced: the number of plans that were priced one by one.
      ranked_in: the seconds that this took.
      took: the seconds of the whole search.
      best: the best plan; None = nothing fits.
      config: its config, which `jaxpar train` takes; None = nothing fits.
      runners_up: the next plans on other meshes, the fastest first.
      lost: why the others lost.
      changed: what would change the choice.
      verified: the verdict of `verify`; None = it was not asked.
      chip_hour: the price of a chip for an hour; 0 = not given.
      notes: what else is to be said.
    """

    request: Request
    rehearsed: tuple[Rehearsed, ...]
    refused: Mapping[str, Refusals]
    points: tuple[tuple[float, float], ...]
    count: int
    priced: int
    ranked_in: float
    took: float
    best: Found | None = None
    config: Config | None = None
    runners_up: tuple[Found, ...] = ()
    lost: tuple[Lost, ...] = ()
    changed: tuple[Changed, ...] = ()
    verified: Verified | None = None
    chip_hour: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def interval(self) -> Interval | NoInterval:
        """How far a measured step may be from the best plan's, by published runs."""
        assert self.best is not None
        target = self.request.target
        family = self.request.config.model.family
        return interval_of(self.best.seconds, target.chip, target.hardware.chips, family)

    @property
    def tokens_per_second(self) -> float:
        """The tokens a second of the best plan, on all devices together; 0 = nothing fits."""
        return self.request.tokens / self.best.seconds if self.best else 0.0

    @property
    def days(self) -> float:
        """The days of `train.steps` steps."""
        seconds = self.best.seconds if self.best else 0.0
        return self.request.config.train.steps * seconds / _DAY

    @property
    def cost(self) -> float:
        """What these days cost; 0 = no price is given."""
        return 24 * self.days * self.request.target.hardware.chips * self.chip_hour

    def to_json(self) -> dict[str, Any]:
        """Write the answer as an object of JSON."""
        request = self.request
        return {
            "schema": SCHEMA,
            "target": request.target.name,
            "sequences": request.sequences,
            "tokens": request.tokens,
            "budget": request.budget,
            "fixed": dict(request.fixed),
            "forbidden": sorted(request.forbidden),
            "best": None if self.best is None else _found_json(self.best),
            "interval": None if self.best is None else self.interval,
            "tokens_per_second": self.tokens_per_second,
            "days": self.days,
            "cost": self.cost,
            "config": None if self.config is None else flatten(self.config),
            "verified": None if self.verified is None else self.verified._asdict(),
            "runners_up": [_found_json(one) for one in self.runners_up],
            "rehearsed": [_rehearsed_json(one) for one in self.rehearsed],
            "lost": [one._asdict() | {"best": plan_text(one.best)} for one in self.lost],
            "refused": {
                kind: {"plans": one.plans, "nearest": one.nearest._asdict()}
                for kind, one in self.refused.items()
            },
            "changed": [
                one._asdict() | {"plan": None if one.plan is None else plan_text(one.plan)}
                for one in self.changed
            ],
            "space": {"plans": self.count, "priced": self.priced, "seconds": self.ranked_in},
            "seconds": self.took,
            "notes": list(self.notes),
        }


def _found_json(found: Found) -> dict[str, Any]:
    estimate = found.estimate.estimate
    return {
        "plan": found.name,
        "candidate": found.candidate._asdict(),
        "seconds": found.seconds,
        "bytes": found.bytes,
        "estimate": estimate._asdict() | {"bytes": estimate.bytes._asdict()},
        "figures": None if found.figures is None else asdict(found.figures),
    }


def _rehearsed_json(one: Rehearsed) -> dict[str, Any]:
    return {
        "plan": plan_text(one.plan.candidate),
        "estimated_seconds": one.plan.seconds,
        "estimated_bytes": one.plan.bytes,
        "figures": None if one.figures is None else asdict(one.figures),
        "refused": one.refused,
    }
