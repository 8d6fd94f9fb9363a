"""The plan of a config: its model is shrunk, its gradients are compared with plain ops on one device.

The one part of `verify` that knows configs and models. `setup` says what is run (`shrink`), `checks` runs it
(`losses_and_gradients`), `explain` adds what is tried on a wrong gradient, `remember` keeps the outcome for `train`.
"""

from jaxpar.verify.of_config.checks import FLOAT32, Verification, run, verify
from jaxpar.verify.of_config.remember import require
from jaxpar.verify.of_config.setup import Setup, prepare, simulate_for

__all__ = ["FLOAT32", "Setup", "Verification", "prepare", "require", "run", "simulate_for", "verify"]
