"""`read_program(compiled.as_text())` turns scheduled HLO into a task graph.

Every instruction of the schedule that takes time becomes a task, in order. Those that cost nothing
(tuples, bitcasts, parameters) vanish, and dependencies go through them. Loops keep their bodies and
get trip counts, calls are inlined, and the most expensive branch of a conditional is taken. Other
modules know the details: `trips` counts those of loops, `flops` and `memory_traffic` count work,
`collectives` reads communication, `origin` finds where a task comes from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxpar.base.errors import UserError, short
from jaxpar.hlo.origin import PackageDirs, default_dirs, inherit, origin_of
from jaxpar.hlo.program import opcodes
from jaxpar.hlo.program.module import Computation, Instruction, Module
from jaxpar.hlo.program.parse import parse_module
from jaxpar.hlo.program.tasks import Loop, Needs, Node, Origin, Program, Task, Wait, walk
from jaxpar.hlo.work.collectives import Devices, collective_of, devices_of, paired_send
from jaxpar.hlo.work.flops import KernelCost, kernel_work, work_of
from jaxpar.hlo.work.host_compute import host_work, is_host_call
from jaxpar.hlo.work.kinds import kind_of, shape_text
from jaxpar.hlo.work.memory_traffic import copied_bytes, result_of, traffic
from jaxpar.hlo.work.trips import Scalar, initial_state, invariant, trip_count

_PAIRED = ("recv", "recv-done", "send-done")
_ALIAS = re.compile(r"\{(\d+)\}: \((\d+),")
"""This finds in `output_to_operand_aliasing={{1}: (0, {}), ...}` which result of a fusion is which
operand.
"""
# as the TPU compiler writes its estimate of one execution
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def read_program(
    text: str,
    package_dirs: PackageDirs | None = None,
    slice_of: Sequence[int] | None = None,
    kernel_cost: KernelCost | None = None,
) -> Program:
    """Read the task graph of a compiled module.

    Args:
      text: the text of a scheduled module, `compiled.as_text()`.
      package_dirs: (directory, name shown) pairs in which a stack frame counts as a source line,
        the most telling first; None = those of `jaxpar.models` and `jaxpar` as installed here.
      slice_of: the slice of each device of the assignment, where there are several TPU slices.
      kernel_cost: a function that gives the FLOPs of a Pallas kernel that does not state them
        itself.

    Returns:
      The tasks, loops and waits in the order of the schedule, with notes on what was assumed.

    Raises:
      UserError: this is not the text of a compiled module, or it is damaged.
    """
    try:
        return _read(text, package_dirs, slice_of, kernel_cost)
    except (
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        name = text.lstrip()[:80].partition(",")[0]
        why = f"{type(error).__name__}: {short(str(error))}"
        raise UserError(
            f"{name} cannot be read ({why}): it is damaged, cut short, or in an unknown form"
        ) from error


def _read(
    text: str,
    package_dirs: PackageDirs | None,
    slice_of: Sequence[int] | None,
    kernel_cost: KernelCost | None,
) -> Program:
    module = parse_module(text)
    if package_dirs is None:
        dirs = default_dirs()
    else:
        dirs = package_dirs
    reader = _Reader(module, dirs, devices_of(module, slice_of), kernel_cost)
    if module.header.get("is_scheduled") != "true":
        reader.notes.append("the module is not scheduled: its tasks are in the order of the text")
    entry = module.computations[module.entry]
    into = _Nodes()
    reader.read(entry, {}, [_NOTHING] * len(entry.parameters), into)
    nodes = tuple(inherit(into.nodes, Origin()))
    return Program(module.name, nodes, tuple(dict.fromkeys(reader.notes)))


@dataclass(frozen=True, slots=True)
class _Value:
    """What an instruction's result depends on."""

    tasks: frozenset[int] = frozenset()
    """The positions, in the list being read, of the tasks that make it."""
    state: int | None = None
    """The index of the part of the loop's state that it is, made before this trip; None if it
    is none.
    """
    start: int | None = None
    """The position of the asynchronous task whose result it will be; None for a finished result."""
    parts: tuple[_Value, ...] = ()
    """The values of a tuple's parts."""
    results: frozenset[tuple[int, int]] = frozenset()
    """The loops among `tasks`, each with the part of its result that is meant."""
    states: frozenset[int] = frozenset()
    """All parts of the loop's state that it is made of, as they were before this trip."""
    awaited: frozenset[int] = frozenset()
    """Those of them that an asynchronous task of the previous trip makes, which was waited for."""

    def part(self, index: int) -> _Value:
        """Return an element of a tuple, or the whole where its parts are not known separately."""
        if index < len(self.parts):
            return self.parts[index]
        return self


_NOTHING = _Value()


def _merge(values: Sequence[_Value]) -> _Value:
    """Make the value that depends on all of these."""
    tasks = frozenset[int]().union(*(value.tasks for value in values))
    state = next((value.state for value in values if value.state is not None), None)
    start = next((value.start for value in values if value.start is not None), None)
    return _Value(
        tasks,
        state,
        start,
        results=frozenset[tuple[int, int]]().union(*(value.results for value in values)),
        states=frozenset[int]().union(*(value.states for value in values)),
        awaited=frozenset[int]().union(*(value.awaited for value in values)),
    )


def _needs(value: _Value) -> Needs:
    """What a value is made by, as the nodes of its list have it."""
    loops = {position for position, _ in value.results}
    return Needs(
        tuple(sorted(value.tasks - loops)),
        tuple(sorted(value.results)),
        tuple(sorted(value.states | value.awaited)),
    )


@dataclass(slots=True)
class _Nodes:
    """A list of nodes that is being read."""

    nodes: list[Node] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)
    """(position, index) pairs: the node there waits for what the loop state holds under that
    index.
    """
    sent: dict[str, int] = field(default_factory=dict)
    """The position of each send to another device, by its name."""
    awaited: dict[int, frozenset[int]] = field(default_factory=dict)
    """`_Value.awaited` of what each task needs, by the task's position."""

    def add(self, node: Node) -> int:
        """Append a node and return its position."""
        self.nodes.append(node)
        return len(self.nodes) - 1


@dataclass(slots=True)
class _Reader:
    module: Module
    dirs: PackageDirs
    devices: Devices
    kernel_cost: KernelCost | None = None
    notes: list[str] = field(default_factory=list)

    def read(
        self,
        computation: Computation,
        known: Mapping[int, Scalar],
        arguments: list[_Value],
        into: _Nodes,
    ) -> _Value:
        """Append the tasks of a computation to a list of nodes.

        Args:
          computation: the computation.
          known: the scalars of its one tuple parameter (a loop's state) that never change, by
            index, for the trip counts of loops inside.
          arguments: what each of its parameters depends on.
          into: the list of nodes, which grows.

        Returns:
          What the computation's result depends on.
        """
        values: dict[str, _Value] = {}
        for instruction in computation.instructions.values():
            operands = [values.get(name, _NOTHING) for name in instruction.operands]
            opcode = instruction.opcode
            if opcode == "parameter":
                number = int(instruction.literal)
                if number < len(arguments):
                    value = arguments[number]
                else:
                    value = _NOTHING
            elif opcode == "tuple":
                value = replace(_merge(operands), parts=tuple(operands))
            elif opcode == "get-tuple-element":
                value = operands[0].part(instruction.index)
            elif opcode == "while":
                value = self._loop(computation, instruction, known, operands[0], into)
            elif opcode == "conditional":
                value = self._branch(instruction, operands, into)
            elif opcode == "call" and instruction.called:
                value = self.read(
                    self.module.computations[instruction.called[0]], {}, operands, into
                )
            elif opcode in _PAIRED and (send := paired_send(computation, instruction)):
                value = _receive(instruction, into.sent.get(send), into)
            elif opcodes.is_done(self.module, instruction):
                value = _finish(instruction, operands, into)
            elif opcodes.is_free(instruction):
                if len(operands) == 1:
                    value = operands[0]
                else:
                    value = _merge(operands)
            else:
                value = self._task(computation, instruction, operands, into)
            values[instruction.name] = value
        return values.get(computation.root, _NOTHING)

    def _task(
        self,
        computation: Computation,
        instruction: Instruction,
        operands: list[_Value],
        into: _Nodes,
    ) -> _Value:
        origin = origin_of(self.module, instruction, self.dirs)
        try:
            task = self._classify(computation, instruction, origin)
        except (IndexError, KeyError, ValueError):  # unknown attributes
            task = Task(
                instruction.name, instruction.opcode, "fusion", origin, shape=str(instruction.shape)
            )
            self.notes.append(
                f"{task.name}: {task.opcode} in an unknown form, its work is not counted"
            )
        if task.collective and not task.collective.groups:
            self.notes.append(f"{task.name}: between which devices, the text does not say")
        if task.kind == "kernel" and not task.flops:
            kernel = f"{task.name} ({instruction.target})"
            self.notes.append(
                f"{kernel}: a kernel without a cost estimate, its FLOPs are not counted"
            )
        finished = [operand for operand in operands if operand.start is None]
        made_of = _merge(finished)
        position = into.add(
            replace(task, depends=tuple(sorted(made_of.tasks)), needs=_needs(made_of))
        )
        into.awaited[position] = made_of.awaited
        made = _Value(frozenset({position}))
        if instruction.opcode == "send":
            into.sent[instruction.name] = position
        if task.asynchronous:
            return replace(made, start=position)
        if len(finished) == len(operands):
            return made
        # Some results are operands handed on: they belong to a collective that goes on during this
        # fusion.
        pairs = _ALIAS.findall(instruction.attributes.get("output_to_operand_aliasing", ""))
        handed_on = {int(result): operands[int(operand)] for result, operand in pairs}
        parts = tuple(handed_on.get(index, made) for index in range(len(instruction.shape.parts)))
        return replace(made, parts=parts if handed_on else ())

    def _classify(self, computation: Computation, instruction: Instruction, origin: Origin) -> Task:
        """Make a task, without its dependencies, which says of what kind it is and how much work it
        does.

        Raises:
          IndexError, KeyError, ValueError: an attribute has an unknown form.
        """
        module = self.module
        collective = collective_of(module, self.devices, computation, instruction)
        if collective and not opcodes.owns_collective(module, instruction):
            collective = None
        cycles = _CYCLES.search(instruction.tail)
        work = work_of(module, computation, instruction)
        bytes_ = traffic(module, computation, instruction)
        link_bytes = 0
        if instruction.target and not work.flops:
            work, bytes_ = kernel_work(computation, instruction, bytes_, self.kernel_cost)
        if is_host_call(instruction):
            kind = "host_compute"
            flops, bytes_, link_bytes = host_work(module, computation, instruction)
            work = work._replace(flops=flops)
        elif collective:
            kind = "collective"
        else:
            kind = kind_of(module, computation, instruction, work)
        shape = result_of(instruction)
        return Task(
            instruction.name,
            instruction.opcode,
            kind,
            origin,
            flops=work.flops,
            bytes=copied_bytes(module, computation, instruction) if kind == "host_copy" else bytes_,
            link_bytes=link_bytes,
            cycles=int(cycles[1]) if cycles and 0 < int(cycles[1]) < 2**60 else None,
            dtype=work.dtype or next(shape.leaves(), instruction.shape).dtype,
            shape=shape_text(shape),
            collective=collective,
            asynchronous=opcodes.is_start(module, instruction),
        )

    def _branch(self, instruction: Instruction, operands: list[_Value], into: _Nodes) -> _Value:
        """Inline the most expensive branch (by FLOPs, then by bytes)."""

        def cost(name: str) -> tuple[float, float]:
            silent = replace(self, notes=[])
            trial = _Nodes()
            silent.read(self.module.computations[name], {}, [], trial)
            tasks = list(walk(tuple(trial.nodes)))
            return sum(task.flops * count for task, count in tasks), sum(
                task.bytes * count for task, count in tasks
            )

        best = max(instruction.called, key=cost)
        count = len(instruction.called)
        self.notes.append(
            f"{instruction.name}: of {count} branches the most expensive, {best}, is taken"
        )
        # the first operand selects the branch
        operand = operands[1 + instruction.called.index(best) :][:1]
        return self.read(self.module.computations[best], {}, operand, into)

    def _loop(
        self,
        computation: Computation,
        instruction: Instruction,
        known: Mapping[int, Scalar],
        operand: _Value,
        into: _Nodes,
    ) -> _Value:
        state = initial_state(self.module, computation, instruction, known)
        trips = trip_count(self.module, instruction, state)
        if trips is None:
            self.notes.append(f"{instruction.name}: no trip count in the text, taken as 1")
        width = len(instruction.shape.parts)
        if width:
            argument = _Value(parts=tuple(map(_state, range(width))))
        else:
            argument = _state(0)
        inside = _Nodes()
        unchanged = invariant(self.module, instruction, state)
        root = self.read(self.module.body(instruction), unchanged, [argument], inside)
        ends = [root.part(index) for index in range(max(1, width))]
        self._close_waits(inside, ends)
        _hand_on(inside, {index for index, end in enumerate(ends) if end.start is not None})
        origin = origin_of(self.module, instruction, self.dirs)
        depends = sorted(
            _merge([start for start in operand.parts or (operand,) if start.start is None]).tasks
        )
        nodes = tuple(inherit(inside.nodes, origin))
        position = into.add(
            Loop(
                instruction.name,
                1 if trips is None else trips,
                nodes,
                tuple(depends),
                origin,
                starts=tuple(_needs(operand.part(index)) for index in range(len(ends))),
                ends=tuple(map(_needs, ends)),
            )
        )
        made = _Value(
            frozenset({position}),
            results=frozenset((position, index) for index in range(len(ends))),
        )
        parts = tuple(
            replace(
                made,
                start=None if end.start is None else position,
                results=frozenset({(position, index)}),
            )
            for index, end in enumerate(ends)
        )
        return replace(made, parts=parts)

    def _close_waits(self, inside: _Nodes, ends: list[_Value]) -> None:
        """Point waits for loop state at the previous trip's task; a task from before the loop is
        not waited for.
        """
        for position, index in inside.waits:
            name = inside.nodes[position].name
            start = ends[index].start
            if start is None:
                self.notes.append(
                    f"{name}: waits for a task that was started before its loop; not waited for"
                )
            if start is None:
                wait = Task(name, "wait", "control")
            else:
                wait = Wait(name, start, previous_trip=True)
            inside.nodes[position] = wait


def _state(index: int) -> _Value:
    """The value of a part of a loop's state before a trip."""
    return _Value(state=index, states=frozenset({index}))


def _hand_on(inside: _Nodes, running: set[int]) -> None:
    """Let no task of a loop's body need what still runs when a trip begins, unless it was waited
    for: a fusion beside which a collective goes on only hands it on.
    """
    for position, node in enumerate(inside.nodes):
        if isinstance(node, Task) and not running.isdisjoint(node.needs.states):
            waited = inside.awaited.get(position, frozenset())
            states = [
                state for state in node.needs.states if state not in running or state in waited
            ]
            needs = replace(node.needs, states=tuple(states))
            inside.nodes[position] = replace(node, needs=needs)


def _finish(instruction: Instruction, operands: list[_Value], into: _Nodes) -> _Value:
    """Add a wait if the operand is a started task; otherwise add nothing, since the task was not
    asynchronous.
    """
    if len(operands) == 1:
        operand = operands[0]
    else:
        operand = _merge(operands)
    if operand.start is not None:
        into.add(Wait(instruction.name, operand.start))
    elif operand.state is not None:
        position = into.add(Wait(instruction.name, -1, previous_trip=True))
        into.waits.append((position, operand.state))
    return _Value(
        operand.tasks,
        operand.state,
        results=operand.results,
        states=operand.states,
        awaited=operand.states,
    )


def _receive(instruction: Instruction, sent: int | None, into: _Nodes) -> _Value:
    """Read the receiving half of a transfer whose task is the send, and wait for its end where the
    data is needed.
    """
    if instruction.opcode != "recv-done" or sent is None:
        return _NOTHING
    into.add(Wait(instruction.name, sent))
    return _Value(frozenset({sent}))
