"""The config of an experiment: its schema, and what is asked of its values.

`schema` has the dataclasses, which are loaded from TOML, changed and compared; the sections of the
optimizer, of pruning, of sparsity and of distillation have rooms of their own. `checks` refuses
values that are wrong, `training_rules` and `hidden_pairs` what does not go together, and
`unused_settings` finds the settings that have no effect.
"""

from jaxpar.base.config.schema import (
    RESOLVED,
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
    fit_schedule,
    incompatible_changes,
    load_config,
    override,
    parse,
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
