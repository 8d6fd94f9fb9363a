"""A config with all that it leaves open settled."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxpar.base.config import Config
from jaxpar.plan.budget import fit_to_budget
from jaxpar.plan.choose_overlap import choose_overlap
from jaxpar.rehearse.targets import Target


def resolve(config: Config, target: Target | None = None, say: Callable[[str], None] = lambda line: None) -> Config:
    """The config with every `overlap = auto` and its `memory.budget` replaced by what was found best.

    Args:
      config: the experiment. Its mesh must fit the target.
      target: what to settle it for, from `jaxpar.rehearse.targets.load_target`; None = the devices at hand.
      say: is called with a line for each form that is tried and for each compilation.

    Raises:
      UserError: the mesh does not fit, or the budget is below what the plan takes with the least kept.
    """
    return resolve_and_compile(config, target, say)[0]


def resolve_and_compile(
    config: Config, target: Target | None = None, say: Callable[[str], None] = lambda line: None
) -> tuple[Config, jax.stages.Compiled | None]:
    """As `resolve`, and the compiled step where a budget had it compiled; None otherwise."""
    return fit_to_budget(choose_overlap(config, target, say), target, say)
