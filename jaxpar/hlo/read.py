"""Scheduled HLO as a task graph: `read_program(compiled.as_text())`.

Every instruction of the schedule that takes time becomes a task, in order; those that cost nothing (tuples, bitcasts,
parameters) vanish and dependencies go through them. Loops keep their bodies and get trip counts, calls are inlined,
and of a conditional the most expensive branch is taken. The rest of this folder knows the details: `trips` loops,
`flops` matmuls, `traffic` bytes, `collectives` and `groups` communication, `origin` where a task comes from.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxpar.hlo import opcodes
from jaxpar.hlo.classify import task_of
from jaxpar.hlo.line_of_origin import borrow_lines, inherit
from jaxpar.hlo.origin import PackageDirs, default_dirs, place_of
from jaxpar.hlo.parse import Computation, Instruction, Module, parse
from jaxpar.hlo.slices import Devices, devices_of, paired_send
from jaxpar.hlo.tasks import Loop, Node, Place, Program, Task, Wait, walk
from jaxpar.hlo.trips import Scalar, initial_state, invariant, trip_count

KernelCost = Callable[[str, str, list[tuple[int, ...]]], float | None]
"""(instruction name, jax's path of it, shapes of its operands) -> FLOPs of a kernel; None for one that is not known."""


@dataclass(frozen=True, slots=True)
class Value:
    """What an instruction's result hangs on.

    Attributes:
      tasks: positions, in the list being read, of the tasks that make it.
      state: indices of the loop state it comes from, made before this trip.
      start: position of the asynchronous task whose result it will be; None for a finished result.
      parts: of a tuple.
      made_in: places of the tasks inside a loop that made it.
    """

    tasks: frozenset[int] = frozenset()
    state: frozenset[int] = frozenset()
    start: int | None = None
    parts: tuple[Value, ...] = ()
    made_in: tuple[Place, ...] = ()

    def part(self, index: int) -> Value:
        """Element of a tuple; the whole where its parts are not told apart."""
        return self.parts[index] if index < len(self.parts) else self


_NOTHING = Value()


@dataclass(slots=True)
class _Nodes:
    """A list of nodes being read.

    Attributes:
      nodes: so far.
      uses: (position, index) pairs: the node needs that element of the loop state.
      fed: for a position, places of the tasks inside loops that use its result.
      made: for a position, places of the tasks inside loops that made its operands.
      waits: (position, index) pairs: a wait for what the loop state holds under that index.
      sent: position of each send to another device, under what it shares with its recv.
    """

    nodes: list[Node] = field(default_factory=list)
    uses: set[tuple[int, int]] = field(default_factory=set)
    fed: dict[int, list[Place]] = field(default_factory=dict)
    made: dict[int, list[Place]] = field(default_factory=dict)
    waits: list[tuple[int, int]] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)

    def add(self, node: Node, operands: Value) -> int:
        """Append a node that needs these operands; its position."""
        position = len(self.nodes)
        self.nodes.append(node)
        self.uses.update((position, index) for index in operands.state)
        if operands.made_in:
            self.made.setdefault(position, []).extend(operands.made_in)
        return position


@dataclass(slots=True)
class _Reader:
    module: Module
    dirs: PackageDirs
    devices: Devices
    kernel_cost: KernelCost | None = None
    unknown: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


def read_program(
    text: str,
    package_dirs: PackageDirs | None = None,
    slice_of: Sequence[int] | None = None,
    kernel_cost: KernelCost | None = None,
) -> Program:
    """The task graph of a compiled module.

    Args:
      text: `compiled.as_text()`, a scheduled module.
      package_dirs: (directory, name shown) pairs in which a stack frame counts as a source line, the most telling
        first; None = those of `jaxpar.models` and `jaxpar` as installed here.
      slice_of: the slice of each device of the assignment, where there are several TPU slices; None = slice after
        slice.
      kernel_cost: FLOPs of a Pallas kernel that does not say them itself.

    Raises:
      UserError: not the text of a compiled module.
    """
    module = parse(text)
    devices, note = devices_of(module, slice_of)
    reader = _Reader(module, default_dirs() if package_dirs is None else package_dirs, devices, kernel_cost)
    reader.notes += [note] if note else []
    if "is_scheduled=true" not in module.header:
        reader.notes.append("the module is not scheduled: its tasks are in the order of the text")
    entry = module.computations[module.entry]
    into = _Nodes()
    _read(reader, entry, {}, [_NOTHING] * len(entry.parameters), into)
    nodes = borrow_lines(tuple(inherit(into.nodes, into.fed, into.made, Place())), reader.dirs)
    unknown = dict(sorted(reader.unknown.items()))
    return Program(module.name, nodes, unknown, tuple(dict.fromkeys(reader.notes)))


def _read(
    reader: _Reader, computation: Computation, known: Mapping[int, Scalar], arguments: list[Value], into: _Nodes
) -> Value:
    """Append the tasks of a computation; what its result hangs on.

    `known` are scalars of its one tuple parameter that never change (a loop's), for the trip counts of loops inside.
    """
    values: dict[str, Value] = {}
    for instruction in computation.instructions.values():
        operands = [values.get(name, _NOTHING) for name in instruction.operands]
        opcode = instruction.opcode
        if opcode == "parameter":
            value = arguments[int(instruction.literal)] if int(instruction.literal) < len(arguments) else _NOTHING
        elif opcode == "tuple":
            value = replace(_merged(operands), parts=tuple(operands))
        elif opcode == "get-tuple-element":
            value = operands[0].part(int(instruction.attributes["index"]))
        elif opcode == "while":
            value = _read_loop(reader, computation, instruction, known, operands[0], into)
        elif opcode == "conditional":
            value = _read_branch(reader, instruction, known, operands, into)
        elif opcode == "call" and instruction.called:
            value = _read(reader, reader.module.computations[instruction.called[0]], {}, operands, into)
        elif opcode in _PAIRED and (pair := paired_send(computation, instruction)):
            value = _read_paired(instruction, pair, operands[0], into)
        elif opcodes.is_done(reader.module, instruction):
            value = _read_done(instruction, _merged(operands), into)
        elif opcodes.is_free(instruction):
            value = operands[0] if len(operands) == 1 else _merged(operands)
        else:
            value = _read_task(reader, computation, instruction, operands, into)
        values[instruction.name] = value
    return values.get(computation.root, _NOTHING)


def _merged(values: list[Value]) -> Value:
    return Value(
        frozenset().union(*(value.tasks for value in values)),
        frozenset().union(*(value.state for value in values)),
        next((value.start for value in values if value.start is not None), None),
        made_in=tuple(dict.fromkeys(place for value in values for place in value.made_in)),
    )


def _read_task(
    reader: _Reader, computation: Computation, instruction: Instruction, operands: list[Value], into: _Nodes
) -> Value:
    going_on = [operand for operand in operands if operand.start is not None]
    merged = _merged([operand for operand in operands if operand.start is None])
    place = place_of(reader.module, instruction, reader.dirs)
    name = opcodes.unknown_name(instruction)
    try:
        task = task_of(reader.module, reader.devices, computation, instruction, place)
    except (IndexError, KeyError, ValueError):  # attributes in a form that is not known: kept, and listed
        task = Task(instruction.name, instruction.opcode, "fusion", place, shape=str(instruction.shape))
        name = f"{instruction.opcode} in an unknown form"
    if name:
        reader.unknown[name] += 1
    if task.collective and not task.collective.groups:
        reader.notes.append(f"{task.name}: between which devices, the text does not say")
    if task.kind == "kernel" and not task.flops and reader.kernel_cost:
        task = _priced(task, reader.kernel_cost, instruction.op_name, computation.operands(instruction))
    if task.kind == "kernel" and not task.flops and opcodes.target(instruction).startswith(opcodes.PALLAS_TARGETS):
        reader.notes.append(f"{task.name}: a kernel without a cost estimate, its FLOPs are not counted")
    position = into.add(replace(task, depends=tuple(sorted(merged.tasks))), merged)
    if instruction.opcode == "send":
        into.sent[instruction.name] = position
    if task.asynchronous:
        return Value(frozenset({position}), start=position)
    made = Value(frozenset({position}))
    aliases = _aliases(instruction) if going_on else {}
    if not aliases:
        return made
    # Results that are operands handed on: of a collective that goes on during this fusion.
    parts = (aliases.get(index) for index in range(len(instruction.shape.parts)))
    return Value(made.tasks, parts=tuple(made if part is None else operands[part] for part in parts))


def _priced(task: Task, kernel_cost: KernelCost, path: str, operands: list[Instruction]) -> Task:
    flops = kernel_cost(task.name, path, [operand.shape.dims for operand in operands])
    if flops is None:
        return task
    largest = max((operand.shape for operand in operands), key=lambda shape: shape.bytes)
    return replace(task, flops=flops, dtype=largest.dtype)


def _aliases(instruction: Instruction) -> dict[int, int]:
    """Which result of a fusion is which operand, from `output_to_operand_aliasing={{1}: (0, {}), ...}`."""
    pairs = re.findall(r"\{(\d+)\}: \((\d+),", instruction.attributes.get("output_to_operand_aliasing", ""))
    return {int(result): int(operand) for result, operand in pairs}


def _read_done(instruction: Instruction, operand: Value, into: _Nodes) -> Value:
    """A wait, where the operand is a started task; else nothing (the task was no asynchronous one)."""
    if operand.start is not None:
        into.add(Wait(instruction.name, operand.start), _NOTHING)
    elif operand.state:
        position = into.add(Wait(instruction.name, -1, previous_trip=True), _NOTHING)
        into.waits += [(position, index) for index in operand.state]
    return Value(operand.tasks, operand.state, None, (), operand.made_in)


_PAIRED = ("recv", "recv-done", "send-done")


def _read_paired(instruction: Instruction, send: str, operand: Value, into: _Nodes) -> Value:
    """The receiving half of a transfer whose task is the send: its end is waited for where the data is wanted."""
    position = into.sent.get(send)
    if instruction.opcode != "recv-done" or position is None:
        return Value(state=operand.state)
    into.add(Wait(instruction.name, position), _NOTHING)
    return Value(frozenset({position}))


def _read_branch(
    reader: _Reader, instruction: Instruction, known: Mapping[int, Scalar], operands: list[Value], into: _Nodes
) -> Value:
    """The most expensive branch (by FLOPs, then bytes), inlined."""
    best, most = "", (-1.0, -1)
    for name in instruction.called:
        trial = _Nodes()
        _read(_silent(reader), reader.module.computations[name], {}, [_NOTHING], trial)
        tasks = list(walk(tuple(trial.nodes)))
        cost = sum(task.flops * count for task, count in tasks), sum(task.bytes * count for task, count in tasks)
        if cost > most:
            best, most = name, cost
    reader.notes.append(
        f"{instruction.name}: of {len(instruction.called)} branches the most expensive, {best}, is taken"
    )
    number = instruction.called.index(best)
    inner = reader.module.computations[best]
    return _read(reader, inner, {}, [operands[number + 1]] if number + 1 < len(operands) else [], into)


def _silent(reader: _Reader) -> _Reader:
    """A reader whose notes go nowhere."""
    return _Reader(reader.module, reader.dirs, reader.devices, reader.kernel_cost)


def _read_loop(
    reader: _Reader,
    computation: Computation,
    instruction: Instruction,
    known: Mapping[int, Scalar],
    operand: Value,
    into: _Nodes,
) -> Value:
    module = reader.module
    state = initial_state(module, computation, instruction, known)
    trips = trip_count(module, instruction, state)
    if trips is None:
        reader.notes.append(f"{instruction.name}: no trip count in the text, taken as 1")
    body = module.computations[instruction.attributes["body"].lstrip("%")]
    width = max(1, len(instruction.shape.parts))
    argument = Value(
        state=frozenset(range(width)), parts=tuple(Value(state=frozenset({index})) for index in range(width))
    )
    inside = _Nodes()
    root = _read(reader, body, invariant(module, instruction, state), [argument], inside)
    ends = [root.part(index) for index in range(width)]
    _close_waits(reader, inside, ends)
    carried = {(user, maker) for user, index in inside.uses for maker in ends[index].tasks}
    place = place_of(module, instruction, reader.dirs)
    nodes = inherit(inside.nodes, inside.fed, inside.made, place)
    users: dict[int, list[Place]] = {}
    for position, index in sorted(inside.uses):
        users.setdefault(index, []).append(_place(nodes[position]))
    starts = operand.parts or (operand,)
    depends = frozenset().union(*(start.tasks for start in starts if start.start is None))
    merged = replace(_merged(list(starts)), made_in=())
    loop = Loop(instruction.name, 1 if trips is None else trips, tuple(nodes), tuple(sorted(depends)))
    position = into.add(replace(loop, carried=tuple(sorted(carried)), place=place), merged)
    for index, start in enumerate(starts):
        for maker in start.tasks:
            into.fed.setdefault(maker, []).extend(users.get(index, ()))
    here = frozenset({position})
    parts = []
    for end in ends:
        made = tuple(dict.fromkeys(_place(nodes[maker]) for maker in sorted(end.tasks)))
        parts.append(Value(here, start=None if end.start is None else position, made_in=made))
    return Value(here, parts=tuple(parts))


def _close_waits(reader: _Reader, inside: _Nodes, ends: list[Value]) -> None:
    """Point waits for loop state at the task of the previous trip; those for a task before the loop become control."""
    for position, index in inside.waits:
        start, wait = ends[index].start, inside.nodes[position]
        assert isinstance(wait, Wait)
        if start is not None:
            inside.nodes[position] = replace(wait, task=start)
    for position, node in enumerate(inside.nodes):
        if isinstance(node, Wait) and node.task < 0:
            reader.notes.append(f"{node.name}: waits for a task that was started before its loop; not waited for")
            inside.nodes[position] = Task(node.name, "wait", "control")


def _place(node: Node) -> Place:
    return Place() if isinstance(node, Wait) else node.place
