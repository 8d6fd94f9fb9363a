"""The smallest model and batch that keep what a plan can get wrong; `verify` runs them in place of
the config's.

Family, rules, remat, precision, packing and mesh axes stay. Layers are few and dims are narrow.
Each dim is a multiple of the pieces it is split into, and an odd one where possible, so that no
shard is a power of two by accident. `shrink_rules` says what becomes of each setting, and why.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxpar.base.config import CheckpointConfig, Config, DataConfig, MetricsConfig, TrainConfig
from jaxpar.base.layout.mesh import MeshSpec, total_sizes
from jaxpar.base.toml import flatten
from jaxpar.verify.of_config.shrink_rules import LEAST, MOST_ACCUMULATION, RULES, Least, Whole
from jaxpar.verify.of_config.sizes import pieces

_SAID = ("model.", "data.seq_len", "train.accumulation", "overlap.", "pipeline.")
"""The settings whose changes are told to the user."""


def shrink(
    config: Config,
    mesh: MeshSpec,
    least: Least = LEAST[0],
) -> tuple[Config, str]:
    """Make the model and batch of a config small, by `RULES`.

    Steps, learning rate, data source and everything else that does not affect a gradient are reset
    to their defaults.

    Args:
      config: the config as it was written.
      mesh: the mesh on which it is verified, without -1.
      least: the smallest sequence and head that still choose the same ops.

    Returns:
      The config with a small model and batch on `mesh`, and a note of the changes.

    Raises:
      UserError: no small model has its heads there as the config's own lie on the whole mesh.
    """
    kept = {
        name: getattr(config.train, name)
        for name in ("seed", "z_loss", "balance_loss", "router_z_loss", "label_smoothing")
    }
    small = replace(
        config,
        data=DataConfig(pack=config.data.pack),
        train=TrainConfig(**kept),
        mesh=mesh,
        checkpoint=CheckpointConfig(),
        metrics=MetricsConfig(),
    )
    whole = Whole(config, mesh, least)
    for rule in RULES:
        small = _with_setting(small, rule.setting, rule.becomes(whole, small))
    return small, _note(config, small)


def _with_setting(table: Any, setting: str, value: Any) -> Any:
    """Return a dataclass of dataclasses with one setting changed, by its dotted key."""
    name, _, inside = setting.partition(".")
    if inside:
        value = _with_setting(getattr(table, name), inside, value)
    return replace(table, **{name: value})


def few_rows(config: Config, mesh: MeshSpec) -> Config:
    """Return a config on `mesh` whose batch is small, for a model that cannot be shrunk.

    Each shard has two sequences, because a single one would hide a wrong order inside a shard.

    Args:
      config: the config as it was written.
      mesh: the mesh on which it is verified, without -1.

    Returns:
      The config with the same model and sequence length. Steps, data source, checkpoints and
      metrics are reset to their defaults.
    """
    accumulation = min(config.train.accumulation, MOST_ACCUMULATION)
    rows = 2 * pieces("batch", config.rules, total_sizes(mesh))
    return replace(
        config,
        data=DataConfig(seq_len=config.data.seq_len, pack=config.data.pack),
        train=TrainConfig(
            batch=rows * accumulation, accumulation=accumulation, seed=config.train.seed
        ),
        mesh=mesh,
        checkpoint=CheckpointConfig(),
        metrics=MetricsConfig(),
    )


def _note(config: Config, small: Config) -> str:
    """Say which settings of the model, and of what is done with it, the small config has
    otherwise.
    """
    after = flatten(small)
    changed = [
        f"{key} {old} -> {after[key]}"
        for key, old in flatten(config).items()
        if key.startswith(_SAID) and old != after[key]
    ]
    return f"model shrunk: {', '.join(changed)}"
