"""The optimizers that a config may name, each with the settings that it has: the table
`[optimizer]`.

`[optimizer] name = "lion"` takes its numbers from `[optimizer.lion]`, and an optimizer that a
program registered from `[optimizer.own]`. What they do to a step is in
`jaxpar.train.optimizer.named_optimizers`.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from jaxpar.base.errors import UserError
from jaxpar.base.field_marks import Called, Idle, Rule, WholeConfig, marks_of
from jaxpar.base.ranges import Range, require_ranges
from jaxpar.base.registry import OPTIMIZERS, RATES, OneOf
from jaxpar.base.toml import TABLE, flatten, from_dict


def _takes_away_all(config: WholeConfig) -> str:
    rate = config.train.learning_rate
    decay = config.optimizer.weight_decay
    if rate * decay < 1:
        return ""
    return (
        f"train.learning_rate={rate:g} times {config.optimizer.table}.weight_decay={decay:g} is 1 "
        "or more: a step would take away all of a matrix, try a smaller one"
    )


def _followed_by_bfloat16(config: WholeConfig) -> str:
    if config.precision.moments != "bfloat16":
        return ""
    decays = config.optimizer.settings.moment_decays.items()
    for name, decay in decays:
        if decay > 0.95:
            key = f"{config.optimizer.table}.{name}"
            return (
                f"{key}={decay:g} with precision.moments=bfloat16: a first moment would stop a "
                f"tenth or more away from where it should be, try {key}=0.95 or "
                "precision.moments=float32"
            )
    return ""


def _averages_in_place_of_decay(config: WholeConfig) -> str:
    name = config.optimizer.name
    schedule = config.train.schedule
    if not (OPTIMIZERS[name].averages_steps and RATES[schedule].decays):
        return ""
    return (
        f"train.schedule={schedule} with optimizer.name={name}, which averages parameters in place "
        "of a decay: try train.schedule=constant"
    )


def _averages_in_float32(config: WholeConfig) -> str:
    name = config.optimizer.name
    if config.precision.params != "bfloat16" or not OPTIMIZERS[name].averages_steps:
        return ""
    return (
        f"precision.params=bfloat16 with optimizer.name={name}: its average is worked out from the "
        "parameters, and would have their rounding nine times over, try precision.params=float32"
    )


_FIRST_MOMENT = Rule(_followed_by_bfloat16, also=("precision.moments",))
Decay = Annotated[float, Range(0.0, 0.99999)]
"""The share of a moving average that stays at each step."""
FirstDecay = Annotated[Decay, _FIRST_MOMENT]
"""The same of a first moment, which a bfloat16 follows only so far."""
Epsilon = Annotated[float, Range(1e-30, 1.0)]
WeightDecay = Annotated[
    float, Range(0.0, 100.0), Rule(_takes_away_all, also=("train.learning_rate",))
]


@dataclass(frozen=True)
class OptimizerSettings:
    """What is asked of every optimizer's settings: a frozen dataclass of them, with defaults."""

    @property
    def moment_decays(self) -> dict[str, float]:
        """The decays of the first moments, by their settings, that a bfloat16 limits.

        Lion has none, since only the sign of its momentum counts, which rounding leaves as it is;
        nor has Schedule-Free, which has no first moment.
        """
        rules = marks_of(type(self), Rule)
        return {key: getattr(self, key) for key in rules if _FIRST_MOMENT in rules[key]}

    @property
    def has_moments(self) -> bool:
        """Whether there are arrays as large as the parameters, as first moments are."""
        return True


@dataclass(frozen=True)
class Adam(OptimizerSettings):
    """Adam (Kingma & Ba 2014, arXiv:1412.6980), without weight decay."""

    beta1: Annotated[FirstDecay, Called("adam_beta1 adam_b1 b1 betas")] = 0.9
    beta2: Annotated[Decay, Called("adam_beta2 adam_b2 b2")] = 0.95
    eps: Annotated[Epsilon, Called("epsilon adam_eps adam_epsilon")] = 1e-8


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101)."""

    weight_decay: Annotated[WeightDecay, Called("wd adam_weight_decay decay")] = 0.1
    """Applies to matrices only: norms, biases and other per-feature vectors are left out."""


@dataclass(frozen=True)
class Lion(OptimizerSettings):
    """The sign of an interpolated momentum (Chen et al. 2023, arXiv:2302.06675).

    Its paper takes a learning rate 3 to 10 times smaller than AdamW's, and a weight decay as many
    times larger.
    """

    beta1: Decay = 0.9
    """The share of the momentum in what the sign is taken of."""
    beta2: Decay = 0.99
    """The share of the momentum that stays at each step."""
    weight_decay: WeightDecay = 0.1
    """As for AdamW."""


_NO_MOMENTUM = Idle(
    lambda c: c.optimizer.sgd.momentum <= 0,
    "optimizer.sgd.momentum is 0",
    "there is nothing to look ahead along",
)


@dataclass(frozen=True)
class Sgd(OptimizerSettings):
    """Stochastic gradient descent, with momentum."""

    momentum: FirstDecay = 0.9
    """0 = none, and then there is no state."""
    nesterov: Annotated[
        bool,
        _NO_MOMENTUM,
    ] = False
    """Look ahead along the momentum (Sutskever et al. 2013)."""
    weight_decay: WeightDecay = 0.0
    """Times a matrix, it is added to its gradient, as PyTorch's SGD does."""

    @property
    def has_moments(self) -> bool:
        """Whether it has a momentum."""
        return self.momentum > 0


@dataclass(frozen=True)
class Adafactor(OptimizerSettings):
    """Adafactor (Shazeer & Stern 2018, arXiv:1804.04235), for each layer's matrices.

    The second moment of a matrix is kept as a sum over rows and one over columns.
    """

    decay_rate: Annotated[float, Range(0.0, 1.0)] = 0.8
    """The second moments' decay is 1 - step^-decay_rate."""
    least_size_to_factor: Annotated[int, Range(1, 2**20)] = 128
    """A matrix with fewer rows or columns keeps its second moment whole."""
    clip_rms: Annotated[float, Range(1e-3, 1e6, also=(0,))] = 1.0
    """Largest root mean square of an update of a layer's matrix, before the rate; 0 = no
    clipping.
    """
    relative: bool = True
    """The rate is relative to the root mean square of each layer's matrix."""
    momentum: FirstDecay = 0.0
    """0 = none."""
    eps: Epsilon = 1e-30
    """Added to squared gradients."""
    weight_decay: WeightDecay = 0.0
    """As for AdamW."""

    @property
    def has_moments(self) -> bool:
        """Whether it has a momentum."""
        return self.momentum > 0


@dataclass(frozen=True)
class Muon(OptimizerSettings):
    """The momentum of each layer's matrices made orthogonal (Jordan et al. 2024), by Newton-Schulz.

    Embeddings, head, norms and biases are AdamW's, at the same learning rate.
    """

    momentum: FirstDecay = 0.95
    nesterov: bool = True
    iterations: Annotated[int, Range(1, 50)] = 5
    """How many times Newton-Schulz is iterated."""
    rms: Annotated[float, Range(1e-3, 1e3, also=(0,))] = 0.2
    """The root mean square of an update of a matrix. 0.2 is about AdamW's, so that both take the
    same learning rate (Liu et al. 2025, arXiv:2502.16982); 0 = sqrt(max(1, outputs / inputs)), as
    Jordan has it."""
    beta1: FirstDecay = 0.9
    """AdamW's, for what is not Muon's."""
    beta2: Decay = 0.95
    eps: Epsilon = 1e-8
    weight_decay: WeightDecay = 0.1
    """As for AdamW, of all matrices."""


@dataclass(frozen=True)
class ScheduleFree(OptimizerSettings):
    """AdamW whose parameters are averaged in place of a decay (Defazio et al. 2024,
    arXiv:2405.15682).

    Evaluation, generation and export take the average.
    """

    beta1: Annotated[float, Range(0.01, 0.99999)] = 0.9
    """The share of the average in the parameters at which gradients are taken."""
    beta2: Decay = 0.999
    eps: Epsilon = 1e-8
    weight_decay: WeightDecay = 0.1
    """As for AdamW."""
    rate_power: Annotated[float, Range(0.0, 10.0)] = 2.0
    """A step weighs as its learning rate to this power in the average."""


def _only(name: str) -> Idle:
    """Say of the table of an optimizer that it has no effect on another."""
    return Idle(
        lambda c: c.optimizer.name != name,
        f"optimizer.name is not {name}",
        f"add --optimizer.name {name}",
    )


def _own_settings(config: WholeConfig) -> str:
    _ = config.optimizer.settings  # which refuses what the optimizer has not
    return ""


_HAS_TABLE = Idle(
    lambda c: c.optimizer.name in _TABLES,
    "optimizer.name has a table of its own",
    "set its numbers there",
)


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer, and the settings of each: those of the others have no effect."""

    name: Annotated[
        str,
        OneOf(OPTIMIZERS),
        Rule(_averages_in_place_of_decay, also=("train.schedule",)),
        Rule(_averages_in_float32, also=("precision.params",)),
    ] = "adamw"
    """One of adamw, adam, lion, sgd, adafactor, muon and schedule_free, whose settings are in the
    table of its name; or one that was registered (`jaxpar.train.optimizer.named_optimizers`)."""
    adamw: Annotated[AdamW, _only("adamw")] = AdamW()
    adam: Annotated[Adam, _only("adam")] = Adam()
    lion: Annotated[Lion, _only("lion")] = Lion()
    sgd: Annotated[Sgd, _only("sgd")] = Sgd()
    adafactor: Annotated[Adafactor, _only("adafactor")] = Adafactor()
    muon: Annotated[Muon, _only("muon")] = Muon()
    schedule_free: Annotated[ScheduleFree, _only("schedule_free")] = ScheduleFree()
    own: Annotated[
        tuple[str, ...],
        _HAS_TABLE,
        Rule(_own_settings),
        Rule(_takes_away_all, also=("train.learning_rate",)),
        _FIRST_MOMENT,
    ] = field(default=(), metadata=TABLE)
    """The numbers of an optimizer that was registered: a table of names and values in a file, words
    `name=value` elsewhere."""

    @property
    def table(self) -> str:
        """The dotted key of the table that has the settings of the optimizer that is named."""
        return f"optimizer.{self.name if self.name in _TABLES else 'own'}"

    @property
    def settings(self) -> OptimizerSettings:
        """The settings of the optimizer that is named; a UserError where there is none of the name,
        or it has no setting that `own` gives.
        """
        if self.name in _TABLES:
            return getattr(self, self.name)
        return _read_own(OPTIMIZERS[self.name].settings, self.own)

    @property
    def weight_decay(self) -> float:
        """The weight decay of the optimizer that is named; 0 where it has none."""
        return getattr(self.settings, "weight_decay", 0.0)

    @property
    def rounds_first_moments(self) -> bool:
        """Whether there are first moments, which may be stored in bfloat16."""
        return bool(OPTIMIZERS[self.name].first_moments) and self.settings.has_moments


_TABLES = frozenset(one.name for one in fields(OptimizerConfig)) - {"name", "own"}
"""The optimizers whose settings have a table of the schema."""


@functools.cache
def _read_own(schema: type[OptimizerSettings], words: tuple[str, ...]) -> OptimizerSettings:
    """The settings of an optimizer that was registered, from the words of `optimizer.own`."""
    given = dict[str, Any]()
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise UserError(f"optimizer.own has {word!r}: a setting is written name=value")
        given[name] = _value(text)
    settings = from_dict(schema, given, "config", "optimizer.own.")
    require_ranges(schema, flatten(settings), table="optimizer.own.")
    return settings


def _value(text: str) -> Any:
    """A number, true or false; anything else is a text."""
    try:
        return json.loads(text.lower())
    except (ValueError, RecursionError):
        return text
