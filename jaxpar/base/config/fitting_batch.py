"""Batches that microbatches and devices divide: what messages advise in place of one that they do
not.
"""

from __future__ import annotations

import math

from jaxpar.base.field_marks import WholeConfig
from jaxpar.base.layout.mesh import total_sizes
from jaxpar.base.layout.rules import named_axes


def batch_shards(config: WholeConfig) -> int:
    """Count the devices that share a batch under the mesh of a config.

    Args:
      config: the config.

    Returns:
      The number; 0 where one of their mesh axes is -1, so that the devices here decide.
    """
    axes = [axis for axis in named_axes("batch", config.rules) if hasattr(config.mesh, axis)]
    if any(getattr(config.mesh, axis) == -1 for axis in axes):
        return 0
    sizes = total_sizes(config.mesh)
    return math.prod(sizes[axis] for axis in axes)


def fitting_batch(config: WholeConfig, shards: int) -> int:
    """Find the next batch, from the config's own on, that splits as the config asks.

    Args:
      config: the config, of which `train.accumulation` and `pipeline.microbatches` are read.
      shards: the number of devices that share a batch.

    Returns:
      A batch of which every microbatch has a sequence for each of them, or several.
    """
    train = config.train
    stages = total_sizes(config.mesh)["stage"] > 1 or config.mesh.stage == -1
    in_pipeline = max(config.pipeline.microbatches, 1) if stages else 1
    unit = train.accumulation * in_pipeline * shards
    return -(-train.batch // unit) * unit
