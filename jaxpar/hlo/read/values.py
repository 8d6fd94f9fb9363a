"""The values that say what an instruction's result depends on, while a list of nodes is read.

Instructions that cost nothing become no node, so what depends on whom cannot be read from names. A
`Value` is kept for each name instead: which nodes, by their positions, have made it.

    instruction                                node             its value
    %x = f32[8] parameter(0)                                    Value()
    %s = (...) all-gather-start(%x)            0 Task           Value(tasks={0}, start=0)
    %f = f32[8] exponential(%x)                1 Task           Value(tasks={1})
    %d = f32[16] all-gather-done(%s)           2 Wait(task=0)   Value(tasks={0})
    %t = (f32[8], f32[16]) tuple(%f, %d)                        Value(tasks={0, 1}, parts=(
                                                                    Value(tasks={1}),
                                                                    Value(tasks={0})))
    %g = f32[8] get-tuple-element(%t), 0                        Value(tasks={1})
    %h = f32[8] negate(%g)                     3 Task           Value(tasks={3})

So node 3 depends on node 1 alone. `start` stands as long as nobody has waited: whoever needs such a
value as it is (a `done`) waits for that node.

A loop's body is a list of its own, with positions of its own. There the parts of the loop's state
have no maker yet: part k is Value(state=k, states={k}), and what is computed of it has a node that
needs `states=(k,)`. Outside the loop its result k is Value(tasks={p}, results={(p, k)}), where p is
the loop's position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxpar.hlo.program.tasks import Needs, Node


@dataclass(frozen=True, slots=True)
class Value:
    """The nodes, loops' results and loop state that an instruction's result depends on."""

    tasks: frozenset[int] = frozenset()
    """The positions, in the list being read, of the tasks that make it."""
    state: int | None = None
    """The index of the part of the loop's state that the value is, made before this trip; None if
    it is none.
    """
    start: int | None = None
    """The position of the asynchronous task that is making the value; None for a finished result.
    """
    parts: tuple[Value, ...] = ()
    """The values of a tuple's parts."""
    results: frozenset[tuple[int, int]] = frozenset()
    """The loops among `tasks`, each with the part of its result that is meant."""
    states: frozenset[int] = frozenset()
    """All parts of the loop's state that the value is made of, as they were before this trip."""
    awaited: frozenset[int] = frozenset()
    """The parts of the loop's state that an asynchronous task of the previous trip makes, which was
    waited for.
    """

    def part(self, index: int) -> Value:
        """Return a part of a tuple, or the whole value where its parts are not known separately."""
        if 0 <= index < len(self.parts):
            return self.parts[index]
        return self


NOTHING = Value()


def merge(values: Sequence[Value]) -> Value:
    """Make the value that depends on all the given ones."""
    tasks = frozenset[int]().union(*(value.tasks for value in values))
    state = next((value.state for value in values if value.state is not None), None)
    start = next((value.start for value in values if value.start is not None), None)
    return Value(
        tasks,
        state,
        start,
        results=frozenset[tuple[int, int]]().union(*(value.results for value in values)),
        states=frozenset[int]().union(*(value.states for value in values)),
        awaited=frozenset[int]().union(*(value.awaited for value in values)),
    )


def needs_of(value: Value) -> Needs:
    """Convert a value into the `Needs` that the nodes of its list have."""
    loops = {position for position, _ in value.results}
    return Needs(
        tuple(sorted(value.tasks - loops)),
        tuple(sorted(value.results)),
        tuple(sorted(value.states | value.awaited)),
    )


@dataclass(slots=True)
class Nodes:
    """A list of nodes that is being read."""

    nodes: list[Node] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)
    """(position, index) pairs: the node at the position waits for what the loop state holds under
    the index.
    """
    sent: dict[str, int] = field(default_factory=dict)
    """The position of each send to another device, by its name."""
    awaited: dict[int, frozenset[int]] = field(default_factory=dict)
    """`Value.awaited` of what each task needs, by the task's position."""

    def add(self, node: Node) -> int:
        """Append a node and return its position."""
        self.nodes.append(node)
        return len(self.nodes) - 1


def part_of_state(index: int) -> Value:
    """Make the value of a part of a loop's state before a trip."""
    return Value(state=index, states=frozenset({index}))
