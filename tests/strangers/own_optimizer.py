"""A stranger's optimizer, by a name of the config: the sign of a momentum (Signum, Bernstein et al.
2018, arXiv:1802.04434), with decoupled weight decay.
"""

from __future__ import annotations

from dataclasses import dataclass

import optax

from jaxpar import train


@dataclass(frozen=True)
class Signum(train.OptimizerSettings):
    beta: float = 0.9
    weight_decay: float = 0.1


@train.register_optimizer("signum", Signum, first_moments=("trace",), by_layer=True)
def signum(settings, rate, axes):
    return optax.chain(
        optax.trace(settings.beta),
        optax.scale_by_sign(),
        optax.add_decayed_weights(settings.weight_decay, train.decay_mask(axes)),
        optax.scale_by_learning_rate(rate),
    )
