"""XLA:CPU may run some collectives at once, although it can tell them apart only by their order;
this finds them.

XLA:CPU starts the collectives of a computation in the order of its schedule. A single collective
blocks until it is done. But a loop or a branch with collectives counts as started as soon as its
first op has started, and it goes on beside what follows, unless that reads what the loop writes.
All collectives of a `shard_map` share one channel, so two that run at once are confused if devices
reach them in different orders: they get each other's data, or wait for ever. On GPU the host runs a
loop to its end before the next op of the stream, and TPU programs have one schedule.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax

from jaxpar.base.errors import UserError
from jaxpar.hlo.program.module import Computation, Instruction, Module
from jaxpar.hlo.program.opcodes import COLLECTIVES
from jaxpar.hlo.program.parse import parse_module

_NESTED = ("while", "conditional", "call")

_Made = frozenset[str] | tuple["_Made", ...]
"""The loops and branches with collectives that an instruction's result depends on; a tuple has one
entry for each part of the result.
"""


def find_unordered(text: str) -> list[tuple[Instruction, Instruction]]:
    """Find loops and branches with collectives, each with the next collective where that one does
    not depend on the loop's or branch's result.

    It is enough to look at neighbours: what is started after the second comes after the first as
    well.

        %w = while(%s), body=%body          with an all-reduce in its body
        %a = all-reduce(%x)                 %x does not depend on %w: the pair is found
        %a = all-reduce(%y)                 %y is computed of a part that %w makes: none is found

    Args:
      text: the text of a scheduled module, `compiled.as_text()`.

    Returns:
      Pairs of the loop or branch and the collective after it; empty where none can be confused.

    Raises:
      UserError: this is not the text of a compiled module.
    """
    module = parse_module(text)
    bearing: dict[str, bool] = {}
    # a computation stands before those that call it
    for name, computation in module.computations.items():
        bearing[name] = any(_bears(i, bearing) for i in computation.instructions.values())
    found = [
        _in(module, module.computations[name], bearing) for name, bears in bearing.items() if bears
    ]
    return [pair for pairs in found for pair in pairs]


def require_order(compiled: jax.stages.Compiled, devices: Iterable[jax.Device]) -> None:
    """Refuse a program for these CPUs whose collectives may be confused, since its numbers could be
    wrong.

    Args:
      devices: the devices that it runs on. Nothing is checked for a single device, or where the
        first is no CPU.

    Raises:
      UserError: the program has such collectives; the message names the first two. Or its text
        cannot be read.
    """
    devices = list(devices)
    if len(devices) < 2 or devices[0].platform != "cpu":
        return
    for loop, after in find_unordered(compiled.as_text() or ""):
        raise UserError(
            f"XLA:CPU may run {loop.op_name or loop.name} and {after.op_name or after.name} at "
            "once and mix up their collectives, since neither needs the other's result: numbers "
            "could be wrong. In a run, try another train.accumulation. Where these are your own "
            "loops, have the second use something of the first. Other devices than CPUs keep them "
            "in order"
        )


def _bears(instruction: Instruction, bearing: dict[str, bool]) -> bool:
    if instruction.opcode in _NESTED:
        return any(bearing.get(name, False) for name in instruction.called)
    return instruction.opcode in COLLECTIVES


def _in(
    module: Module, computation: Computation, bearing: dict[str, bool]
) -> list[tuple[Instruction, Instruction]]:
    found: list[tuple[Instruction, Instruction]] = []
    made: dict[str, _Made] = {}
    last: Instruction | None = None
    for instruction in computation.instructions.values():
        operands = tuple(made.get(name, frozenset()) for name in instruction.operands)
        if instruction.opcode == "tuple":
            made[instruction.name] = operands
            continue
        if instruction.opcode == "get-tuple-element":
            made[instruction.name] = (
                operands[0][instruction.index] if isinstance(operands[0], tuple) else operands[0]
            )
            continue
        all_of = _flat(operands)
        if _bears(instruction, bearing):
            if last is not None and last.opcode in _NESTED and last.name not in all_of:
                found.append((last, instruction))
            last = instruction
            all_of = all_of | {instruction.name}
        made[instruction.name] = all_of
        if instruction.opcode == "while" and isinstance(state := operands[0], tuple):
            # A reader of a part that the loop hands on as it is need not wait for it; but a copy is
            # made by the loop.
            untouched = module.handed_on(instruction, through=())
            made[instruction.name] = tuple(
                part if k in untouched else all_of for k, part in enumerate(state)
            )
    return found


def _flat(made: _Made) -> frozenset[str]:
    if isinstance(made, tuple):
        return frozenset[str]().union(*map(_flat, made))
    return made
