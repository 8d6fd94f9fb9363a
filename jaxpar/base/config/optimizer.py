"""The optimizers that a config may name, each with the settings that it has.

`[optimizer] name = "lion"` takes its numbers from `[optimizer.lion]`. What they do to a step is in
`jaxpar.train.optimizer.named_optimizers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxpar.base.ranges import Range

Decay = Annotated[float, Range(0.0, 0.99999)]
"""The share of a moving average that stays at each step."""
Epsilon = Annotated[float, Range(1e-30, 1.0)]
WeightDecay = Annotated[float, Range(0.0, 100.0)]
OptimizerName = Literal["adamw", "adam", "lion", "sgd", "adafactor", "muon", "schedule_free"]


class _Settings:
    """What is asked of every optimizer's settings."""

    @property
    def moment_decays(self) -> dict[str, float]:
        """The decays of the first moments, by their settings, that a bfloat16 limits.

        Lion has none, since only the sign of its momentum counts, which rounding leaves as it is;
        nor has Schedule-Free, which has no first moment.
        """
        return {}

    @property
    def has_moments(self) -> bool:
        """Whether there are arrays as large as the parameters, as first moments are."""
        return True

    @property
    def rounds_first_moments(self) -> bool:
        """Whether there are first moments, which may be stored in bfloat16.

        They are those that `jaxpar.train.optimizer.named_optimizers` names. An optimizer that says
        nothing has none, so that a config which asks for them in bfloat16 is refused.
        """
        return False


@dataclass(frozen=True)
class Adam(_Settings):
    """Adam (Kingma & Ba 2014, arXiv:1412.6980), without weight decay."""

    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: Epsilon = 1e-8

    @property
    def moment_decays(self) -> dict[str, float]:
        """The decays of the first moments, by their settings, that a bfloat16 limits."""
        return {"beta1": self.beta1}

    @property
    def rounds_first_moments(self) -> bool:
        """Whether there are first moments, which may be stored in bfloat16."""
        return True


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101)."""

    weight_decay: WeightDecay = 0.1
    """Applies to matrices only: norms, biases and other per-feature vectors are left out."""


@dataclass(frozen=True)
class Lion(_Settings):
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

    @property
    def rounds_first_moments(self) -> bool:
        """Whether there are first moments, which may be stored in bfloat16."""
        return True


@dataclass(frozen=True)
class Sgd(_Settings):
    """Stochastic gradient descent, with momentum."""

    momentum: Decay = 0.9
    """0 = none, and then there is no state."""
    nesterov: bool = False
    """Look ahead along the momentum (Sutskever et al. 2013)."""
    weight_decay: WeightDecay = 0.0
    """Times a matrix, it is added to its gradient, as PyTorch's SGD does."""

    @property
    def moment_decays(self) -> dict[str, float]:
        """That of its momentum, if it has one."""
        return {"momentum": self.momentum} if self.momentum else {}

    @property
    def has_moments(self) -> bool:
        """Whether it has a momentum."""
        return self.momentum > 0

    @property
    def rounds_first_moments(self) -> bool:
        """Whether it has a momentum, which may be stored in bfloat16."""
        return self.momentum > 0


@dataclass(frozen=True)
class Adafactor(_Settings):
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
    momentum: Decay = 0.0
    """0 = none."""
    eps: Epsilon = 1e-30
    """Added to squared gradients."""
    weight_decay: WeightDecay = 0.0
    """As for AdamW."""

    @property
    def moment_decays(self) -> dict[str, float]:
        """That of its momentum, if it has one."""
        return {"momentum": self.momentum} if self.momentum else {}

    @property
    def has_moments(self) -> bool:
        """Whether it has a momentum."""
        return self.momentum > 0

    @property
    def rounds_first_moments(self) -> bool:
        """Whether it has a momentum, which may be stored in bfloat16."""
        return self.momentum > 0


@dataclass(frozen=True)
class Muon(_Settings):
    """The momentum of each layer's matrices made orthogonal (Jordan et al. 2024), by Newton-Schulz.

    Embeddings, head, norms and biases are AdamW's, at the same learning rate.
    """

    momentum: Decay = 0.95
    nesterov: bool = True
    iterations: Annotated[int, Range(1, 50)] = 5
    """How many times Newton-Schulz is iterated."""
    rms: Annotated[float, Range(1e-3, 1e3, also=(0,))] = 0.2
    """The root mean square of an update of a matrix. 0.2 is about AdamW's, so that both take the
    same learning rate (Liu et al. 2025, arXiv:2502.16982); 0 = sqrt(max(1, outputs / inputs)), as
    Jordan has it."""
    beta1: Decay = 0.9
    """AdamW's, for what is not Muon's."""
    beta2: Decay = 0.95
    eps: Epsilon = 1e-8
    weight_decay: WeightDecay = 0.1
    """As for AdamW, of all matrices."""

    @property
    def moment_decays(self) -> dict[str, float]:
        """The decays of the first moments, by their settings, that a bfloat16 limits."""
        return {"momentum": self.momentum, "beta1": self.beta1}

    @property
    def rounds_first_moments(self) -> bool:
        """Whether there are first moments, which may be stored in bfloat16."""
        return True


@dataclass(frozen=True)
class ScheduleFree(_Settings):
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


OptimizerSettings = Adam | Lion | Sgd | Adafactor | Muon | ScheduleFree


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer, and the settings of each: those of the others have no effect."""

    name: OptimizerName = "adamw"
    """One of adamw, adam, lion, sgd, adafactor, muon and schedule_free, whose settings are in the
    table of its name."""
    adamw: AdamW = AdamW()
    adam: Adam = Adam()
    lion: Lion = Lion()
    sgd: Sgd = Sgd()
    adafactor: Adafactor = Adafactor()
    muon: Muon = Muon()
    schedule_free: ScheduleFree = ScheduleFree()

    @property
    def settings(self) -> OptimizerSettings:
        """The settings of the optimizer that is named."""
        return getattr(self, self.name)

    @property
    def weight_decay(self) -> float:
        """The weight decay of the optimizer that is named; 0 where it has none."""
        return getattr(self.settings, "weight_decay", 0.0)

    @property
    def rounds_first_moments(self) -> bool:
        """Whether there are first moments, which may be stored in bfloat16."""
        return self.settings.rounds_first_moments
