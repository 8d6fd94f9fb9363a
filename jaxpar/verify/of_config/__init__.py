"""Verifies the plan of a config: its model is shrunk, and its gradients are compared with plain ops
on one device.

This is the one part of `verify` that knows configs and models. `setup` decides what is run (with
`shrink`), and `checks` runs it (with `losses_and_gradients`) and explains what differs.
"""

from jaxpar.verify.of_config.checks import FLOAT32, Verification, require, run, verify
from jaxpar.verify.of_config.setup import Setup, prepare

__all__ = ["FLOAT32", "Setup", "Verification", "prepare", "require", "run", "verify"]
