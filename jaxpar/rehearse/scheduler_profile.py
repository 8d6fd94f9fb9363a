"""The times of a compiled program's instructions, in the form that XLA's latency-hiding scheduler
reads.

That scheduler orders a program by the list schedule of its own estimates. With a profile it goes by
these prices instead, and by what a target's links take among them. The form is the text of XLA's
`ProfiledInstructionsProto`.
"""

from __future__ import annotations

from jaxpar.hlo.program.tasks import Program, walk_paths
from jaxpar.rehearse.cost import Costs

_LEAST = 1e-3
"""The least microseconds: an instruction of no time is none that was measured."""


def scheduler_profile(program: Program, costs: Costs) -> str:
    """Write the prices of a program's tasks.

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
