"""The optimizer. To be read in this order: where its state lies (`state_layout`), optimizers that
take a matrix as a whole (`per_matrix`), and what a training asks of any (`definition`); those that
a config names (`named_optimizers`, with `learning_rate`); an optimizer's step on some parts of a
model (`updated_part`), in host memory (`host_update`) and on all of it (`update`).

Weights are taken away by their rank in a matrix (`ranks`) or their `movement`, while it trains
(`pruning`, `sparse_decay`) or once (`one_shot`). `given_optimizer` has optimizers of one's own, and
comes last.
"""

from jaxpar.train.optimizer.definition import (
    Optimizer,
    decay_mask,
    in_host_memory_of,
    pack_moments,
    reported_rate,
    require_runnable,
)

__all__ = [
    "Optimizer",
    "decay_mask",
    "in_host_memory_of",
    "pack_moments",
    "reported_rate",
    "require_runnable",
]
