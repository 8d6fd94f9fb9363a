"""The optimizer: what a training asks of it (`definition`), those that a config names
(`named_optimizers`, `per_matrix`) and those that are given (`given_optimizer`).

`state_layout` says where its state lies, `update` applies it, and `host_update` does so in host
memory. `pruning`, `movement` and `one_shot` take weights away while it trains, or once.
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
