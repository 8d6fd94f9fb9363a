"""The config of an experiment: its schema, and what is asked of its values.

Read the modules in this order: `schema` has the dataclasses, with `model`, `data`, `train`,
`optimizer`, `pruning`, `sparsity`, `distill` and `hidden_pairs` for the tables that are long, and
`fitting_batch` for the batch that an error message advises. The values that a setting may have,
where it has no effect and what it contradicts stand at its field. `loading` makes a config from
TOML, changes it, and lists which changes a run may not be resumed with. `checks` refuses values
that are wrong, and `unused_settings` refuses values that have no effect.
"""

from jaxpar.base.config.data import Bos, DataConfig
from jaxpar.base.config.loading import (
    RESOLVED,
    fit_schedule,
    incompatible_changes,
    load_config,
    override,
    parse,
)
from jaxpar.base.config.model import Lora, ModelConfig
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
