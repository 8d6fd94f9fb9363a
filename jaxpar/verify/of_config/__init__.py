"""The verification of a config's plan: its model is shrunk, and its gradients are compared with
plain ops on one device.

This is the one part of `verify` that knows configs and models. Its rooms, in the order in which
they are read: `shrink` makes a config small, by `shrink_rules` (which need `sizes`, `few_heads` and
`few_layers`); `setup` decides what is run; `losses_and_gradients` runs it on `random_inputs`, and
`updates` one step of the optimizer; `checks` puts it together, and explains what differs.
"""

from jaxpar.verify.of_config.checks import FLOAT32, Verification, require, run, verify
from jaxpar.verify.of_config.setup import Setup, prepare

__all__ = ["FLOAT32", "Setup", "Verification", "prepare", "require", "run", "verify"]
