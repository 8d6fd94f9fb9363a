"""The loss of the output layer, and its most likely entries, without all of the logits: only some
of the scores exist at a time (`in_pieces`, `top_k`). `loss_terms` has what one token's scores add
to the loss.
"""

from jaxpar.parallel.cross_entropy.in_pieces import (
    Tiling,
    linear_cross_entropy,
    tiling,
)
from jaxpar.parallel.cross_entropy.loss_terms import (
    LIKELIHOOD,
    LossSums,
    LossWeights,
    SoftTargets,
    teacher_targets,
)

__all__ = [
    "LIKELIHOOD",
    "LossSums",
    "LossWeights",
    "SoftTargets",
    "Tiling",
    "linear_cross_entropy",
    "teacher_targets",
    "tiling",
]
