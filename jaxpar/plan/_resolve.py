"""All that a config leaves open is settled here."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxpar.base.config import Config
from jaxpar.plan.budget import fit_to_budget
from jaxpar.plan.choose_overlap import choose_overlap
from jaxpar.rehearse.targets import Target


def resolve(config: Config, target: Target | None = None, say: Callable[[str], None] = lambda line: None) -> Config:
    """Replace every `overlap = auto` of a config and its `memory.budget` by what was found best.

    Args:
      config: the experiment. Its mesh must fit the target.
      target: the target to settle it for, from `jaxpar.rehearse.targets.load_target`; None = the devices at hand.
      say: is called with a line for each form that is tried and for each compilation.

    Raises:
      UserError: the mesh does not fit, or the budget is below what the plan takes with the least kept.
    """
    return resolve_and_compile(config, target, say)[0]


def resolve_and_compile(
    config: Config, target: Target | None = None, say: Callable[[str], None] = lambda line: None
) -> tuple[Config, jax.stages.Compiled | None]:
    """Do as `resolve` does, and also return the step if a budget had it compiled, or else None."""
    return fit_to_budget(choose_overlap(config, target, say), target, say)
