"""Checkpoints in a second tier, on the disks of the machines. To be read in this order: when each
training of a run started, by which a checkpoint on another disk is known as one that the run has
come through (`starts`), and the tier itself (`tier`).
"""

from jaxpar.train.runs.local_tier.tier import LocalTier

__all__ = ["LocalTier"]
