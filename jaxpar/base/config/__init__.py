"""The config of an experiment: its schema, and what is asked of its values.

Its rooms, in the order in which they are read: `schema` has the dataclasses, with `optimizer`,
`pruning`, `sparsity`, `distill` and `hidden_pairs` for the tables that are long; `loading` makes
one of them from TOML and changes it; `resuming` says which changes a run may go on with. `checks`
refuses values that are wrong, with `fitting_batch` for a batch that would be right,
`training_rules` what contradicts itself in a training, and `unused_settings` finds the settings
that have no effect.
"""

from jaxpar.base.config.loading import RESOLVED, fit_schedule, load_config, override, parse
from jaxpar.base.config.resuming import incompatible_changes
from jaxpar.base.config.schema import (
    Bos,
    CheckpointConfig,
    CompilerConfig,
    Config,
    DataConfig,
    KernelsConfig,
    Lora,
    MemoryConfig,
    MetricsConfig,
    ModelConfig,
    PrecisionConfig,
    TrainConfig,
    rules_of,
)

__all__ = [
    "RESOLVED",
    "Bos",
    "CheckpointConfig",
    "CompilerConfig",
    "Config",
    "DataConfig",
    "KernelsConfig",
    "Lora",
    "MemoryConfig",
    "MetricsConfig",
    "ModelConfig",
    "PrecisionConfig",
    "TrainConfig",
    "fit_schedule",
    "incompatible_changes",
    "load_config",
    "override",
    "parse",
    "rules_of",
]
