"""The command `jaxpar goodput`, which says what the time of a run went on, and how often to save
where machines fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from jaxpar.base.console import console
from jaxpar.base.ranges import Range
from jaxpar.cli.arguments import parse_words, positional

_UNSET = -1.0
_Cost = Annotated[float, Range(0.0, 1e7, also=(_UNSET,))]


@dataclass(frozen=True)
class GoodputArgs:
    """Show what the time of a run went on, and the goodput to expect of an interval between
    checkpoints on many machines, with the costs that the run has measured.
    """

    nodes: tuple[Annotated[int, Range(1, 1_000_000)], ...] = (16, 128, 1024, 4096)
    """Numbers of machines; a run ends where any of its machines fails."""
    target: str = ""
    """The machines of this system instead: docs/targets.md lists the names."""
    node_mtbf_days: Annotated[float, Range(0.001, 1e6)] = 264.0
    """The mean days between two faults of one machine. Llama 3 met 419 in 54 days on 2,048 machines
    of 8 GPUs (arXiv:2407.21783, section 3.3.4).
    """
    save: _Cost = _UNSET
    """Seconds for which a checkpoint keeps steps waiting; -1 = as measured."""
    write: _Cost = _UNSET
    """Seconds for which a checkpoint is then written in the background; -1 = as measured."""
    recover: _Cost = _UNSET
    """Seconds from the start of a process to its first step; -1 = as measured."""
    down: _Cost = _UNSET
    """Seconds until there is a machine again; -1 = as measured."""


def goodput_command(words: list[str]) -> int:
    """jaxpar goodput RUN [--nodes N ...|--target T] [--node-mtbf-days D]
    [--save|--write|--recover|--down SECONDS]
    """
    from jaxpar.base.errors import UserError
    from jaxpar.rehearse.targets import load_target
    from jaxpar.show.goodput import DAY, causes_table, interval_table
    from jaxpar.train.goodput import Costs
    from jaxpar.train.goodput.measured import measure_run
    from jaxpar.train.runs.bucket import folder_here

    (name,) = positional(goodput_command.__doc__, GoodputArgs(), words, 1, urls=True)
    args = parse_words(goodput_command.__doc__, GoodputArgs(), words[1:])
    nodes = args.nodes
    if args.target:
        if args.nodes != GoodputArgs().nodes:
            raise UserError("--nodes has no effect beside --target, which has its own number")
        nodes = (load_target(args.target).hosts,)
    found = measure_run(folder_here(name))
    given = Costs(args.save, args.write, args.recover, args.down)
    taken = [
        measured if asked == _UNSET else asked
        for asked, measured in zip(given, found.costs, strict=True)
    ]
    costs = Costs(*taken)
    say = console().print
    if found.damaged:
        say(f"warning: {found.damaged} damaged lines of goodput.jsonl are left out, as down")
    say(found.totals.summary())
    say(causes_table(found.totals))
    texts = [f"{name} {seconds:.3g} s" for name, seconds in costs._asdict().items()]
    fails = f"a machine fails every {args.node_mtbf_days:g} days"
    say(f"goodput to expect where {fails}, with {', '.join(texts)}:")
    say(interval_table(costs, nodes, args.node_mtbf_days * DAY, found.step_seconds))
    return 0
