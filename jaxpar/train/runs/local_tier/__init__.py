"""Checkpoints in a second tier, on the disks of the machines. Read the modules in this order: the
starts of a run's trainings, by which a checkpoint on another disk is known as one that the run has
come through (`starts`), and the tier itself (`tier`).
"""

from jaxpar.train.runs.local_tier.tier import LocalTier

__all__ = ["LocalTier"]
