"""This package says what a training step costs under a plan in closed form, without tracing it:
its seconds, and its bytes by part.

Its rooms, in the order in which they are read: `parts` has what an estimate consists of, and
`shapes` the facts of a model and its batch. `split` says what of them a device has under a mesh,
`ticks` how often a pipeline runs a layer. `sends` lists what is sent, and `links` says how long
that takes. `rates` has the speed of a device, `work` what it computes, `memory` what it holds;
`trainers` says what of a collective is hidden, and `estimate` puts them together.
"""

from jaxpar.plan.closed_form.estimate import HOST_EXPOSED, estimate, waits_for_host
from jaxpar.plan.closed_form.parts import Bytes, Estimate
from jaxpar.plan.closed_form.shapes import StepShapes, step_shapes
from jaxpar.plan.closed_form.trainers import TRAINERS, Trainer

__all__ = [
    "HOST_EXPOSED",
    "TRAINERS",
    "Bytes",
    "Estimate",
    "StepShapes",
    "Trainer",
    "estimate",
    "step_shapes",
    "waits_for_host",
]
