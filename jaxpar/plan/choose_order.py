"""The orders of a step that XLA's settings can bring about, of which the fastest is kept.

XLA orders a program by its own estimates. The step is compiled with other settings of the scheduler
(`jax_compat.ORDER_SETTINGS`), and where the compiler reads a profile, once more in each of them
with the prices of the rehearsal for one. Every candidate is the whole step, played for the target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
from rich.console import RenderableType

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.compiler import option_words, order_options, profile_option
from jaxpar.base.errors import Say, UserError
from jaxpar.base.jax_compat import Options
from jaxpar.rehearse.of_config import compile_step, fits
from jaxpar.rehearse.report.report_tables import seconds_text, titled_table
from jaxpar.rehearse.scheduler_profile import scheduler_profile
from jaxpar.rehearse.targets import Target
from jaxpar.rehearse.timeline import read_and_price, replay
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import with_config

AS_IT_IS = "as train has it"
"""The name of the order without further options."""


@dataclass(frozen=True)
class TriedOrder:
    """A step that was compiled with some settings of XLA's scheduler."""

    name: str
    experiment: Experiment
    program: jax.stages.Compiled
    seconds: float
    """The seconds of a step, as the rehearsal plays it."""
    exposed: float
    """The seconds in which compute waits for collectives."""
    fits: bool
    prices: str
    """The profile of the prices of its own tasks."""
    profile: str = ""
    """The profile that it was compiled with; empty = none."""


def choose_order(
    experiment: Experiment, target: Target, file: Path, say: Say = lambda line: None
) -> list[TriedOrder]:
    """Try the orders that a target's compiler can be brought to, and list them.

    Args:
      experiment: a settled experiment on the target's devices.
      file: gets the profile if the fastest order has one. It must be there when the step is
        compiled again, and its name ends in `.pbtxt`.
      say: is called with a line for each order that was tried.

    Returns:
      The orders, the fastest that fits first. Its config has the options that bring it about, for
      `train` and a rehearsal alike.

    Raises:
      UserError: the file has another ending, the target's compiler has no settings for this, or it
        refuses the step as it is.
    """
    if file.suffix != ".pbtxt":
        raise UserError(f"the file of an order is read as text by its ending: {file} -> .pbtxt")
    mesh = experiment.plan.mesh
    settings = order_options(mesh)
    reads_profile = profile_option(mesh)
    if not settings and not reads_profile:
        raise UserError(
            f"the compiler for {target.name} has no setting that changes the order of a step: "
            "docs/task_graph.md has those that were tried"
        )
    tried = [_try(experiment, target, AS_IT_IS, {})]
    _tell(tried[0], say)
    for name, options in settings.items():
        tried += _attempt(experiment, target, name, options, say)
    if reads_profile:
        tried += _priced(tried, target, reads_profile, say)
    tried.sort(key=lambda one: (not one.fits, one.seconds))
    best = tried[0]
    if best.profile:
        write_whole(file, best.profile)
        written: Options = {reads_profile: str(file)}
        tried[0] = replace(best, experiment=_with_options(best.experiment, written))
    return tried


def _priced(
    tried: list[TriedOrder], target: Target, reads_profile: str, say: Say
) -> list[TriedOrder]:
    """Try each order once more, with the prices of its own tasks for a profile."""
    found: list[TriedOrder] = []
    with TemporaryDirectory() as folder:
        for number, like in enumerate(tried):
            file = Path(folder) / f"{number}.pbtxt"
            file.write_text(like.prices, encoding="utf-8")
            options: Options = {reads_profile: str(file)}
            again = _attempt(like.experiment, target, f"{like.name}, priced", options, say)
            found += [replace(one, profile=like.prices) for one in again]
    return found


def order_parts(tried: list[TriedOrder]) -> list[RenderableType]:
    """Make the table of the orders that `choose_order` tried, the fastest first, and the words with
    which to train so.
    """
    best = tried[0]
    rows = [
        [
            seconds_text(one.seconds),
            seconds_text(one.exposed),
            one.name,
            "" if one.fits else "does not fit",
        ]
        for one in tried
    ]
    words = " ".join(best.experiment.config.compiler.options)
    if best.name == AS_IT_IS:
        told = "no order was faster"
    else:
        told = f"train in this order with --compiler.options {words}"
    columns = ["step", "exposed", "order", ""]
    return [*titled_table("orders that were tried", columns, rows, 2, len(rows)), told]


def _attempt(
    experiment: Experiment, target: Target, name: str, options: Options, say: Say
) -> list[TriedOrder]:
    """Try one order; the list is empty where the compiler refuses the step so."""
    try:
        one = _try(experiment, target, name, options)
    except UserError as refused:
        say(f"order: {name}: refused: {refused}")
        return []
    _tell(one, say)
    return [one]


def _try(experiment: Experiment, target: Target, name: str, options: Options) -> TriedOrder:
    """Compile the step with further options, and play it."""
    formed = _with_options(experiment, options)
    step = compile_step(formed, target)
    compiled = step.compiled
    priced = read_and_price(compiled.text, compiled.mesh, target)
    played = replay(priced.program, priced.costs)
    return TriedOrder(
        name,
        formed,
        compiled.program,
        played.seconds,
        played.exposed_communication,
        fits(step),
        scheduler_profile(priced.program, priced.costs),
    )


def _with_options(experiment: Experiment, options: Options) -> Experiment:
    """Return the experiment whose config has further options of the compiler, which win."""
    config = experiment.config
    kept = [word for word in config.compiler.options if word.partition("=")[0] not in options]
    compiler = replace(config.compiler, options=(*kept, *option_words(options)))
    return with_config(experiment, replace(config, compiler=compiler), experiment.devices)


def _tell(one: TriedOrder, say: Say) -> None:
    room = "" if one.fits else ", does not fit"
    say(
        f"order: {one.name}: {seconds_text(one.seconds)} a step, "
        f"{seconds_text(one.exposed)} exposed{room}"
    )
