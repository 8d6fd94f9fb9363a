"""The orders of a step that XLA's settings can bring about, of which the fastest is kept.

XLA orders a program by its own estimates. The step is compiled with other settings of the scheduler
(`jax_compat.ORDER_SETTINGS`), and where the compiler reads a profile, once more in each of them
with the prices of the rehearsal for one. Every candidate is the whole step, played for the target.

XLA's latency-hiding scheduler orders a program by the list schedule of its own estimates. With a
profile it goes by these prices instead, and by what a target's links take among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
from rich.console import RenderableType

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.compiler import option_words, order_options, profile_option
from jaxpar.base.errors import Say, UserError
from jaxpar.base.jax_compat import Options
from jaxpar.hlo.program.tasks import Program, walk_paths
from jaxpar.plan.engine import one_by_one, try_rounds
from jaxpar.rehearse.cost import Costs
from jaxpar.rehearse.of_config import compile_step, fits
from jaxpar.rehearse.report.report_tables import seconds_text, titled_table
from jaxpar.rehearse.targets import Target
from jaxpar.rehearse.timeline import read_and_price, replay
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import with_config

AS_IT_IS = "as train has it"
"""The name of the order without further options."""
_PRICED = ", priced"
_LEAST = 1e-3
"""The least microseconds: an instruction of no time is none that was measured."""


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
    known: dict[str, TriedOrder | None] = {}
    with TemporaryDirectory() as folder:

        def rounds() -> Iterator[list[str]]:
            yield [AS_IT_IS, *settings]
            if reads_profile:
                yield [f"{name}{_PRICED}" for name, one in known.items() if one is not None]

        def attempt(name: str) -> TriedOrder | None:
            like = known.get(name.removesuffix(_PRICED))
            if like is None:
                return _attempt(experiment, target, name, settings.get(name, {}), say)
            # once more, with the prices of its own tasks for a profile
            prices = Path(folder) / f"{len(known)}.pbtxt"
            prices.write_text(like.prices, encoding="utf-8")
            options: Options = {reads_profile: str(prices)}
            again = _attempt(like.experiment, target, name, options, say)
            return None if again is None else replace(again, profile=like.prices)

        try_rounds(rounds(), one_by_one(attempt), known)
    tried = [one for one in known.values() if one is not None]
    tried.sort(key=lambda one: (not one.fits, one.seconds))
    best = tried[0]
    if best.profile:
        write_whole(file, best.profile)
        written: Options = {reads_profile: str(file)}
        tried[0] = replace(best, experiment=_with_options(best.experiment, written))
    return tried


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
) -> TriedOrder | None:
    """Try one order; None = the compiler refuses the step so, which it takes as it is."""
    try:
        one = _try(experiment, target, name, options)
    except UserError as refused:
        if name == AS_IT_IS:
            raise
        say(f"order: {name}: refused: {refused}")
        return None
    room = "" if one.fits else ", does not fit"
    say(
        f"order: {name}: {seconds_text(one.seconds)} a step, "
        f"{seconds_text(one.exposed)} exposed{room}"
    )
    return one


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


def scheduler_profile(program: Program, costs: Costs) -> str:
    """Write the prices of a program's tasks in the form that XLA's scheduler reads, the text of its
    `ProfiledInstructionsProto`.

    Args:
      costs: the cost of one run of each task.

    Returns:
      A line for each task, with its instruction's name and its microseconds. A task that is in two
      places, such as a branch, has the first one's.
    """
    lines: dict[str, str] = {}
    for path, task, _ in walk_paths(program.nodes):
        took = max(_LEAST, 1e6 * costs[path].seconds)
        lines.setdefault(task.name, f'costs {{ name: "{task.name}" cost_us: {took:.6g} }}')
    return "\n".join(lines.values()) + "\n"


def _with_options(experiment: Experiment, options: Options) -> Experiment:
    """Return the experiment whose config has further options of the compiler, which win."""
    config = experiment.config
    kept = [word for word in config.compiler.options if word.partition("=")[0] not in options]
    compiler = replace(config.compiler, options=(*kept, *option_words(options)))
    return with_config(experiment, replace(config, compiler=compiler), experiment.devices)
