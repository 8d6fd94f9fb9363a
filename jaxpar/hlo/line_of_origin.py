"""Places for tasks that the compiler made itself, or whose line of the model was lost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from jaxpar.hlo.origin import PackageDirs, most_telling
from jaxpar.hlo.tasks import Loop, Node, Place, Task, Wait


def inherit(
    nodes: list[Node], fed: Mapping[int, list[Place]], made: Mapping[int, list[Place]], around: Place
) -> list[Node]:
    """Nodes of one list, with places for the tasks that have none of their own.

    A copy or slice without a scope belongs to what it feeds, else to what feeds it: the nearest such task with a scope,
    inside a loop too. A matmul belongs to the neighbour in the innermost scope, and among several to the latest of its
    operands, which in a backward is the gradient, not what was saved. What is left belongs to the loop around it. A
    phase or line of its own is kept.

    Args:
      nodes: one list of a program.
      fed: for a position, places of the tasks inside loops that use its result.
      made: for a position, places of the tasks inside loops that made its operands.
      around: place of the loop that the list is the body of.
    """
    places = [Place() if isinstance(node, Wait) else node.place for node in nodes]
    users: dict[int, list[int]] = defaultdict(list)
    for position, node in enumerate(nodes):
        for maker in () if isinstance(node, Wait) else node.depends:
            users[maker].append(position)

    def used_by(position: int) -> list[Place]:
        return [places[user] for user in users[position] if _gives(nodes[user])] + fed.get(position, [])

    def made_by(position: int, makers: tuple[int, ...]) -> list[Place]:
        return [places[maker] for maker in makers if _gives(nodes[maker])] + made.get(position, [])

    tasks = {position: node for position, node in enumerate(nodes) if isinstance(node, Task)}
    for position in reversed(tasks):
        if tasks[position].kind != "matmul":
            places[position] = _from(places[position], used_by(position))
    for position, task in tasks.items():
        near = made_by(position, task.depends) + used_by(position)
        if task.kind == "matmul":
            near = made_by(position, task.depends[::-1]) + used_by(position)
            near.sort(key=lambda place: -place.scope.count("/"))
        places[position] = _from(places[position], near)
    return [
        node if isinstance(node, Wait) else replace(node, place=_from(place, [around], anything=True))
        for node, place in zip(nodes, places, strict=True)
    ]


def _gives(node: Node) -> bool:
    """Whether neighbours may take its place: not from bookkeeping on scalars, nor from a whole loop."""
    return isinstance(node, Task) and node.kind != "control"


def _from(place: Place, near: Iterable[Place], anything: bool = False) -> Place:
    """`place`, or where it has no scope that of the first neighbour that has one (or, with `anything`, any)."""
    if place.scope or (place.phase == "other" and place.source):
        return place
    near = [other for other in near if other.scope or anything]
    alike = [other for other in near if place.phase in ("other", other.phase)]
    other = next(iter(alike or near), place)
    phase = other.phase if place.phase == "other" or other.phase == "update" else place.phase
    return Place(other.scope, place.source or other.source, phase)


def borrow_lines(nodes: tuple[Node, ...], dirs: PackageDirs) -> tuple[Node, ...]:
    """Tasks of a backward whose stack has no line of a model get that of the forward tasks of their scope, if unique.

    (The backward of a custom_vjp may be traced without the frames of its caller.)
    """
    lines: dict[str, Counter[str]] = defaultdict(Counter)
    for task in _tasks(nodes):
        if task.place.phase in ("forward", "recomputed") and most_telling(task.place.source, dirs) and task.flops:
            lines[task.place.scope][task.place.source] += 1

    def mended(node: Node) -> Node:
        if isinstance(node, Loop):
            return replace(node, body=tuple(mended(inner) for inner in node.body))
        if isinstance(node, Wait) or most_telling(node.place.source, dirs) or not node.place.scope:
            return node
        candidates = lines[node.place.scope]
        if len(candidates) != 1 or node.place.phase not in ("backward", "recomputed"):
            return node
        return replace(node, place=replace(node.place, source=next(iter(candidates))))

    return tuple(mended(node) for node in nodes)


def _tasks(nodes: tuple[Node, ...]) -> Iterable[Task]:
    for node in nodes:
        if isinstance(node, Loop):
            yield from _tasks(node.body)
        elif isinstance(node, Task):
            yield node
