"""The check that refuses an experiment for which this machine has no memory, before any of it is
made.
"""

from __future__ import annotations

import jax

from jaxpar.base.console import bytes_text
from jaxpar.base.errors import UserError
from jaxpar.train.activations import activations
from jaxpar.train.experiment import Experiment
from jaxpar.train.state_memory import state_bytes


def require_memory(experiment: Experiment, has: int, training: bool = True) -> None:
    """Refuse an experiment whose state and kept activations alone are more than this machine's
    memory, before any is made.

    The check is for simulated and other CPU devices only, which share the machine's memory and do
    not say when it is full. Another device says so itself.

    Args:
      has: the bytes of memory that this machine has; 0 = not known.
      training: whether the experiment is trained; an evaluation keeps only the residual stream of a
        block and of the next.

    Raises:
      UserError: the experiment cannot fit.
    """
    plan = experiment.plan
    here = [
        device for device in plan.mesh.devices.flat if device.process_index == jax.process_index()
    ]
    if not has or not here or here[0].platform != "cpu":
        return
    state = state_bytes(experiment, "cpu")
    if training:
        held = state.device
        kept = sum(one.kept_bytes for one in activations(experiment))
    else:
        held = state.parameters.device + state.batch.device
        config = experiment.config
        rows = config.train.batch // config.train.accumulation // plan.size("batch")
        tokens = rows * config.data.seq_len // plan.size("residual_seq")
        kept = 2 * tokens * config.model.embed * plan.dtype.itemsize
    held = len(here) * held
    kept = len(here) * kept
    if held + kept > has:
        if training:
            what = "parameters, gradients, moments and batch"
        else:
            what = "parameters and batch"
        raise UserError(
            f"{'a step' if training else 'an evaluation'} needs {bytes_text(held + kept)} "
            f"of this machine's memory, which has {bytes_text(has)}: "
            f"{what} take {bytes_text(held)}, and activations {bytes_text(kept)}; "
            "try a smaller model or train.batch, or a higher train.accumulation"
        )
