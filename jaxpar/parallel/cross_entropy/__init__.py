"""The loss of the output layer, and its most likely entries, without an array of all logits: only
some of the scores exist at a time.

In the order in which to read: `loss_terms` computes what one token's scores add to the loss;
`in_pieces` goes through the scores, in as many pieces as `choose_tiling` says;
`_linear_cross_entropy` is the op that is made of them; `top_k` finds the most likely entries in the
same pieces.
"""

from jaxpar.parallel.cross_entropy._linear_cross_entropy import linear_cross_entropy
from jaxpar.parallel.cross_entropy.choose_tiling import Tiling, tiling
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
