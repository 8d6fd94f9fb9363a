"""The cost of a jitted function on hardware that is not here, by that hardware's compiler.

    report = rehearse.step(jax.jit(step), *shapes, target="v5p-64")
    rehearse.show(report)
    rehearse.write_trace(report, "step.json.gz")    # opens in ui.perfetto.dev
    rehearse.print_comparison(rehearse.compare(before, report))
    rehearse.failures(report, ["step+3%"], before)  # a line for each that has grown too much

`step` takes anyone's function, `config` the training step of a config, and `taken` is a scope that
says how often a branch of a function is taken.

Its rooms, in the order in which they are read: `targets` are the machines, of which `here` measures
the one that runs this and `topologies` has the compilers of others, and `named_mesh` has a mesh for
each; `argument_places` places what a function is given on one, and `compiled` compiles it. `cost`
prices what the compiler made of it (with `link_costs` for collectives, and by `cpu_cost` on a CPU),
and `timeline` plays it out. `requested_collectives` lists those that a model asked for. `how_sure`
says how far a step may be off, and `calibration` scales it by a measured one. `graph` says what
another order could reach. `report` is the form of what was found, and `program_report` fills it in.
`_step` puts these together for any function, and `of_config` for the training step of a config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxpar.base.compiler import step_options as compiler_options
from jaxpar.base.taken_share import taken
from jaxpar.rehearse._step import step
from jaxpar.rehearse.graph.report import write_graph
from jaxpar.rehearse.report.comparison import Comparison, compare
from jaxpar.rehearse.report.comparison_tables import print_comparison
from jaxpar.rehearse.report.gate import failures
from jaxpar.rehearse.report.report_tables import show
from jaxpar.rehearse.report.schema import Rehearsal
from jaxpar.rehearse.report.task_graph import TaskGraph
from jaxpar.rehearse.report.trace import write_trace
from jaxpar.rehearse.targets import Target, load_target

if TYPE_CHECKING:
    from jaxpar.rehearse.of_config import rehearse as config

__all__ = [
    "Comparison",
    "Rehearsal",
    "Target",
    "TaskGraph",
    "compare",
    "compiler_options",
    "config",
    "failures",
    "load_target",
    "print_comparison",
    "show",
    "step",
    "taken",
    "write_graph",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    """Load `config` when it is first asked for: it brings the models and the training step
    along.
    """
    if name == "config":
        from jaxpar.rehearse.of_config import rehearse

        return rehearse
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
