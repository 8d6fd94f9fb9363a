"""The making of an experiment from a config, and its checks as a whole: `make` puts model, mesh and
plan together, `checks` refuses parts that do not go together, and `notes` says where the plan
differs from what was asked for.
"""

from jaxpar.train.experiments.checks import (
    check_batch,
    check_parameters,
    sequences_have_halves,
)
from jaxpar.train.experiments.make import (
    make_experiment,
    make_plan,
    with_config,
    with_projections,
)
from jaxpar.train.experiments.notes import (
    kernel_notes,
    mask_notes,
    offload_asked,
    plan_notes,
)

__all__ = [
    "check_batch",
    "check_parameters",
    "kernel_notes",
    "make_experiment",
    "make_plan",
    "mask_notes",
    "offload_asked",
    "plan_notes",
    "sequences_have_halves",
    "with_config",
    "with_projections",
]
