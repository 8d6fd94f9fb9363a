"""The origin of tasks that the compiler made itself, taken from a neighbour, by what feeds what.

    position   task                      its own path    what `inherit` gives
    0          %q = copy(%p)             none            block/attention, as it feeds %d
    1          %d = dot(%q, %w)          ...attention/   block/attention, its own
    2          %s = all-reduce(%d)       none            block/attention, as %d feeds it

A copy looks first at what it feeds, a sum over devices and a matmul at what feeds them
(`_follows_makers`). The first pass goes from the last task to the first, so that a copy of a copy
finds the origin of what the second feeds; the second pass goes forward, for all that is left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from jaxpar.hlo.program.tasks import Loop, Node, Origin, Task, Wait

_MADE = ("copy", "control", "host_copy")
"""Kinds of tasks that the compiler makes itself; such a task may bear another instruction's line.
"""


def inherit(nodes: list[Node], around: Origin) -> list[Node]:
    """Give an origin to those nodes of a list that the compiler made itself, since they have none.

    A copy or slice belongs to what it feeds, else to what feeds it: the nearest such task whose
    origin is known. A sum over devices belongs to the latest of its summands: what it feeds may be
    the loop's own collection of gradients, which is no part of the model. A matmul belongs to the
    neighbour in the innermost scope, and among several to the latest of its operands, which in a
    backward is the gradient, not what was saved. What is left belongs to the loop that it feeds or
    depends on, else to the loop `around` it. A line of its own is kept. A task whose origin the
    program states keeps it: where that is in no scope, it takes none of a neighbour's.

    Args:
      nodes: the nodes of one list, a program or the body of a loop.
      around: the origin of the loop around them.

    Returns:
      The nodes in their order, with an origin for every task.
    """
    origins = [_known_origin(node) for node in nodes]
    users: dict[int, list[int]] = defaultdict(list)
    for position, node in enumerate(nodes):
        for maker in () if isinstance(node, Wait) else node.depends:
            users[maker].append(position)

    def known(neighbours: Iterable[int]) -> list[Origin]:
        """Return the origins of neighbours that have one, except scalars' bookkeeping and loops."""
        found = []
        for at in neighbours:
            node = nodes[at]
            origin = origins[at]
            if isinstance(node, Task) and node.kind != "control" and origin is not None:
                found.append(origin)
        return found

    open_tasks = {
        position: node
        for position, node in enumerate(nodes)
        if isinstance(node, Task) and origins[position] is None
    }
    for position in reversed(open_tasks):
        task = open_tasks[position]
        near = known(users[position])
        if near and not _follows_makers(task):
            origins[position] = _beside(near[0], task.origin)
    found = list(nodes)
    for position, task in open_tasks.items():
        origin = origins[position]
        makers = task.depends
        if _follows_makers(task):
            makers = task.depends[::-1]
        if origin is None:
            near = known(makers) + known(users[position])
            if task.kind == "matmul":
                near.sort(key=lambda origin: -origin.scope.count("/"))
            beside = [nodes[at] for at in (*users[position], *makers)]
            loops = [node.origin for node in beside if isinstance(node, Loop)]
            origin = _beside([*near, *loops, around][0], task.origin)
            # a neighbour's place is handed on, but a loop's is everyone's
            origins[position] = origin if near else None
        found[position] = replace(task, origin=origin)
    return found


def _follows_makers(task: Task) -> bool:
    """Return whether a task that the compiler made belongs to what feeds it."""
    collective = task.collective
    sums = collective is not None and collective.kind in ("reduce-scatter", "all-reduce")
    return sums or task.kind == "matmul"


def _known_origin(node: Node) -> Origin | None:
    """Return the origin of a task that needs none of a neighbour's; None for others.

    The compiler may give a copy of its own the line of another instruction, and nothing else.
    """
    if not isinstance(node, Task):
        return None
    origin = node.origin
    told = origin.told or origin.scope or (origin.source and node.kind not in _MADE)
    return origin if told else None


def _beside(other: Origin, own: Origin) -> Origin:
    """Return a neighbour's origin, with the task's own line where it has one."""
    return Origin(other.scope, own.source or other.source, other.phase)
