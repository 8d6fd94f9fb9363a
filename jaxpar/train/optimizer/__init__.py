"""The optimizer. Read the modules in this order: the layout of its state (`state_layout`),
optimizers that take a matrix as a whole (`per_matrix`), and what a training asks of any
(`definition`); the optimizers that a config names (`named_optimizers`, with `learning_rate`); an
optimizer's step on some parts of a model (`updated_part`), in host memory (`host_update`) and on
all of it (`update`).

Weights are taken away by their rank in a matrix (`ranks`) or their `movement`, while the model
trains (`pruning`, `sparse_decay`) or once (`one_shot`). `given_optimizer` has optimizers of a
program's own, and comes last.
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
