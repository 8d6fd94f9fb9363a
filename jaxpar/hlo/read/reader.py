"""`read_program(compiled.as_text())` turns scheduled HLO into a task graph.

Every instruction of the schedule that takes time becomes a task, in order. Those that cost nothing
(tuples, bitcasts, parameters) vanish, and dependencies go through them. Loops keep their bodies and
get trip counts, calls are inlined, and the most expensive branch of a conditional is taken, each
time or as often as a scope around it says (`base.taken_share`).

A loop that takes the exponential of %a four times:

    ENTRY:  %a = f32[8] negate(%x0)
            %s = (s32[], f32[8]) tuple(%zero, %a)
            %w = (s32[], f32[8]) while(%s), condition=%cond, body=%body
    %body:  %j = s32[] add(%i, %one)        %i, %x are the parts of the parameter
            %y = f32[8] exponential(%x)
            ROOT %q = (s32[], f32[8]) tuple(%j, %y)

becomes

    0  Task a
    1  Loop w, trips=4, depends=(0,)
         starts=(Needs(), Needs(tasks=(0,)))                of each part before the first trip
         ends=(Needs(tasks=(0,)), Needs(tasks=(1,)))        and in a trip, by positions in the body
         body:  0  Task j, needs=Needs(states=(0,))         the part as it was before this trip
                1  Task y, needs=Needs(states=(1,))

An asynchronous task may be waited for in the next trip of its loop. Then the wait stands in the
body before the task that it waits for, whose position is known only at the body's end: `_finish`
notes the wait in `Nodes.waits`, and `_close_waits` fills it in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from jaxpar.base.errors import UserError, short
from jaxpar.base.kernel_work import KernelCost
from jaxpar.base.taken_share import taken_share
from jaxpar.hlo.origin import PackageDirs, default_dirs, inherit, origin_of
from jaxpar.hlo.program import opcodes
from jaxpar.hlo.program.aliases import pairs
from jaxpar.hlo.program.module import Computation, Instruction, Module
from jaxpar.hlo.program.parse import parse_module
from jaxpar.hlo.program.tasks import Loop, Node, Origin, Program, Task, Wait, walk
from jaxpar.hlo.read.one_task import make_task
from jaxpar.hlo.read.values import (
    NOTHING,
    Nodes,
    Value,
    merge,
    needs_of,
    part_of_state,
)
from jaxpar.hlo.work.collectives import Devices, devices_of, paired_send
from jaxpar.hlo.work.trips import Scalar, initial_state, invariant, trip_count

_PAIRED = ("recv", "recv-done", "send-done")


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
        the most telling first; None = the folders of `jaxpar.models` and `jaxpar` as installed
        here.
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
    except (ValueError, ArithmeticError, RecursionError) as error:
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
    into = Nodes()
    reader.read(entry, {}, [NOTHING] * len(entry.parameters), into)
    nodes = tuple(inherit(into.nodes, Origin()))
    return Program(module.name, nodes, tuple(dict.fromkeys(reader.notes)))


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
        arguments: list[Value],
        into: Nodes,
    ) -> Value:
        """Append the tasks of a computation to a list of nodes, and return what its result depends
        on.

        Args:
          known: the scalars of its one tuple parameter (a loop's state) that never change, by
            index, for the trip counts of loops inside.
          arguments: what each of its parameters depends on.
          into: the list of nodes, which grows.
        """
        values: dict[str, Value] = {}
        for instruction in computation.instructions.values():
            operands = [values.get(name, NOTHING) for name in instruction.operands]
            opcode = instruction.opcode
            if opcode == "parameter":
                number = int(instruction.literal)
                if number < len(arguments):
                    value = arguments[number]
                else:
                    value = NOTHING
            elif opcode == "tuple":
                value = replace(merge(operands), parts=tuple(operands))
            elif opcode == "get-tuple-element":
                value = operands[0].part(instruction.index)
            elif opcode == "while":
                value = self._loop(computation, instruction, known, operands[0], into)
            elif opcode == "conditional":
                value = self._branch(instruction, operands, into)
            elif opcode == "call" and instruction.called:
                value = self.read(
                    self.module.computation(instruction.called[0]), {}, operands, into
                )
            elif opcode in _PAIRED and (send := paired_send(computation, instruction)):
                value = _receive(instruction, into.sent.get(send), into)
            elif opcodes.is_done(self.module, instruction):
                value = _finish(instruction, operands, into)
            elif opcodes.is_free(instruction):
                if len(operands) == 1:
                    value = operands[0]
                else:
                    value = merge(operands)
            else:
                value = self._task(computation, instruction, operands, into)
            values[instruction.name] = value
        return values.get(computation.root, NOTHING)

    def _task(
        self,
        computation: Computation,
        instruction: Instruction,
        operands: list[Value],
        into: Nodes,
    ) -> Value:
        origin = origin_of(self.module, instruction, self.dirs)
        try:
            task = make_task(
                self.module, self.devices, self.kernel_cost, computation, instruction, origin
            )
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
        made_of = merge(finished)
        position = into.add(
            replace(task, depends=tuple(sorted(made_of.tasks)), needs=needs_of(made_of))
        )
        into.awaited[position] = made_of.awaited
        made = Value(frozenset({position}))
        if instruction.opcode == "send":
            into.sent[instruction.name] = position
        if task.asynchronous:
            return replace(made, start=position)
        if len(finished) == len(operands):
            return made
        # Some results are operands handed on: they belong to a collective that goes on during this
        # fusion. `{1}: (0, {})` says that result 1 is operand 0, so it has that operand's value.
        told = pairs(instruction.attributes.get("output_to_operand_aliasing", ""))
        handed_on = {
            result[0]: reduce(Value.part, part, operands[number])
            for result, number, part in told
            if len(result) == 1 and number < len(operands)
        }
        parts = tuple(handed_on.get(index, made) for index in range(len(instruction.shape.parts)))
        return replace(made, parts=parts if handed_on else ())

    def _branch(self, instruction: Instruction, operands: list[Value], into: Nodes) -> Value:
        """Inline the most expensive branch (by FLOPs, then by bytes)."""

        def cost(name: str) -> tuple[float, float]:
            silent = replace(self, notes=[])
            trial = Nodes()
            silent.read(self.module.computation(name), {}, [], trial)
            tasks = list(walk(tuple(trial.nodes)))
            return sum(task.flops * count for task, count in tasks), sum(
                task.bytes * count for task, count in tasks
            )

        best = max(instruction.called, key=cost)
        count = len(instruction.called)
        share = taken_share(instruction.op_name)
        if share is None:
            self.notes.append(
                f"{instruction.name}: of {count} branches the most expensive, {best}, is taken"
            )
        # the first operand selects the branch
        operand = operands[1 + instruction.called.index(best) :][:1]
        before = len(into.nodes)
        made = self.read(self.module.computation(best), {}, operand, into)
        if share is not None:
            into.nodes[before:] = [_taken_in(share, node) for node in into.nodes[before:]]
        return made

    def _loop(
        self,
        computation: Computation,
        instruction: Instruction,
        known: Mapping[int, Scalar],
        operand: Value,
        into: Nodes,
    ) -> Value:
        state = initial_state(self.module, computation, instruction, known)
        trips = trip_count(self.module, instruction, state)
        if trips is None:
            self.notes.append(f"{instruction.name}: no trip count in the text, taken as 1")
        width = len(instruction.shape.parts)
        if width:
            argument = Value(parts=tuple(map(part_of_state, range(width))))
        else:
            argument = part_of_state(0)
        inside = Nodes()
        unchanged = invariant(self.module, instruction, state)
        root = self.read(self.module.body(instruction), unchanged, [argument], inside)
        ends = [root.part(index) for index in range(max(1, width))]
        self._close_waits(inside, ends)
        _hand_on(inside, {index for index, end in enumerate(ends) if end.start is not None})
        origin = origin_of(self.module, instruction, self.dirs)
        depends = sorted(
            merge([start for start in operand.parts or (operand,) if start.start is None]).tasks
        )
        nodes = tuple(inherit(inside.nodes, origin))
        position = into.add(
            Loop(
                instruction.name,
                1 if trips is None else trips,
                nodes,
                tuple(depends),
                origin,
                starts=tuple(needs_of(operand.part(index)) for index in range(len(ends))),
                ends=tuple(map(needs_of, ends)),
            )
        )
        made = Value(
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

    def _close_waits(self, inside: Nodes, ends: list[Value]) -> None:
        """Point waits for loop state at the previous trip's task; a wait for a task from before the
        loop is dropped.

            %g = get-tuple-element(%p), index=1     %p is the body's parameter
            %d = all-gather-done(%g)                0  Wait d: inside.waits has (0, 1)
            %s = all-gather-start(%x)               1  Task s
            ROOT %q = tuple(%i, %s)                 ends[1].start is 1: node 0 is Wait(d, task=1,
                                                    previous_trip=True)
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


def _finish(instruction: Instruction, operands: list[Value], into: Nodes) -> Value:
    """Add a wait if the operand is a started task; a task that is not asynchronous needs none."""
    if len(operands) == 1:
        operand = operands[0]
    else:
        operand = merge(operands)
    if operand.start is not None:
        into.add(Wait(instruction.name, operand.start))
    elif operand.state is not None:
        position = into.add(Wait(instruction.name, -1, previous_trip=True))
        into.waits.append((position, operand.state))
    return Value(
        operand.tasks,
        operand.state,
        results=operand.results,
        states=operand.states,
        awaited=operand.states,
    )


def _taken_in(share: float, node: Node) -> Node:
    """Say of the tasks of a branch that they run in a share of the times only."""
    if isinstance(node, Loop):
        return replace(node, body=tuple(_taken_in(share, inner) for inner in node.body))
    if isinstance(node, Task):
        return replace(node, share=share * node.share)
    return node


def _receive(instruction: Instruction, sent: int | None, into: Nodes) -> Value:
    """Read the receiving half of a transfer, and wait for the send where the data is needed.

    %s = send(%x, %token)       0  Task s, asynchronous
    %r = recv(%token)           no node
    %d = recv-done(%r)          1  Wait(d, task=0)
    """
    if instruction.opcode != "recv-done" or sent is None:
        return NOTHING
    into.add(Wait(instruction.name, sent))
    return Value(frozenset({sent}))


def _hand_on(inside: Nodes, running: set[int]) -> None:
    """Take the tasks that still run when a trip begins out of the needs of a loop's body, unless
    they were waited for: a fusion beside which a collective goes on only hands it on.
    """
    for position, node in enumerate(inside.nodes):
        if isinstance(node, Task) and not running.isdisjoint(node.needs.states):
            waited = inside.awaited.get(position, frozenset())
            states = [
                state for state in node.needs.states if state not in running or state in waited
            ]
            needs = replace(node.needs, states=tuple(states))
            inside.nodes[position] = replace(node, needs=needs)
