"""The config of an experiment: its schema, and what is asked of its values.

Its rooms, in the order in which they are read: `schema` has the dataclasses, with `model`, `data`,
`train`, `optimizer`, `pruning`, `sparsity`, `distill` and `hidden_pairs` for the tables that are
long, and `fitting_batch` for the batch that one advises; what a setting may be, where it has no
effect and what it contradicts stands at its field. `loading` makes a config from TOML and changes
it; `resuming` says which changes a run may go on with. `checks` refuses values that are wrong, and
`unused_settings` those that have no effect.
"""

from jaxpar.base.config.data import Bos, DataConfig
from jaxpar.base.config.loading import RESOLVED, fit_schedule, load_config, override, parse
from jaxpar.base.config.model import Lora, ModelConfig
from jaxpar.base.config.resuming import incompatible_changes
from jaxpar.base.config.schema import (
    CheckpointConfig,
    CompilerConfig,
    Config,
    KernelsConfig,
    MemoryConfig,
    MetricsConfig,
    PrecisionConfig,
    rules_of,
)
from jaxpar.base.config.train import TrainConfig

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
