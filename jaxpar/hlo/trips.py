"""How often a loop runs: its counter followed from the initial value through the condition, as integers.

The state of a loop is a tuple. Elements whose initial value is a known scalar are followed; the body says what each
becomes, the condition says when to stop. Constants may be in the condition, passed in the tuple, or come from an outer
loop that never changes them. A loop whose end depends on data has no count.
"""

from __future__ import annotations

import operator
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import suppress

from jaxpar.hlo.parse import Computation, Instruction, Module

Scalar = int | float | bool
State = Mapping[int, Scalar]
"""Known scalars of a loop's tuple, by index."""

_STATED = re.compile(r'"known_trip_count":\{"n":"(\d+)"')  # as the CPU and GPU compilers write it
_MOST_TRIPS = 10_000
"""Of a loop whose counter does not move in equal steps: its trips are tried one by one."""
_ENDLESS = 2**40


def _divide(a: Scalar, b: Scalar) -> Scalar | None:
    """Truncating division, as in HLO; None by zero."""
    if not b:
        return None
    if isinstance(a, float) or isinstance(b, float):
        return a / b
    return a // b if a * b >= 0 else -(-a // b)


def _remainder(a: Scalar, b: Scalar) -> Scalar | None:
    quotient = _divide(a, b)
    return a - b * quotient if isinstance(quotient, int) else None


_SAME = ("copy", "bitcast", "reshape", "convert", "broadcast", "optimization-barrier")
_COMPARE = {"EQ": operator.eq, "NE": operator.ne, "LT": operator.lt}
_COMPARE |= {"LE": operator.le, "GT": operator.gt, "GE": operator.ge}
_ARITHMETIC: dict[str, Callable[..., Scalar | None]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": _divide,
    "remainder": _remainder,
    "negate": lambda a: -a,
    "maximum": max,
    "minimum": min,
    "clamp": lambda low, value, high: min(max(value, low), high),
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": operator.not_,
    "select": lambda chosen, yes, no: yes if chosen else no,
}


def initial_state(module: Module, computation: Computation, loop: Instruction, state: State) -> dict[int, Scalar]:
    """Known scalars of a loop's tuple on its first trip; `state` is that of the loop around it."""
    source = computation.behind(loop.operands[0], ("copy", "optimization-barrier", "bitcast"))
    if source is None:
        return {}
    names = source.operands if source.opcode == "tuple" else (source.name,)
    return _known(module, computation, dict(enumerate(names)), state)


def invariant(module: Module, loop: Instruction, state: State) -> dict[int, Scalar]:
    """The part of a loop's known state that its body hands on unchanged: known on every trip."""
    unchanged = module.handed_on(loop)
    return {n: value for n, value in state.items() if n in unchanged}


def _known(module: Module, computation: Computation, names: Mapping[int, str], state: State) -> dict[int, Scalar]:
    """Those of some instructions that are scalars with a known value."""
    values = {n: evaluate(module, computation, name, state) for n, name in names.items()}
    return {n: value for n, value in values.items() if value is not None}


def trip_count(module: Module, loop: Instruction, initial: State) -> int | None:
    """How often the body of a `while` runs; None where it cannot be known from the text.

    Args:
      module: the loop's module.
      loop: the `while` instruction.
      initial: from `initial_state`.
    """
    stated = _STATED.search(loop.attributes.get("backend_config", ""))
    if stated:
        return int(stated[1])
    if len(module.called(loop)) < 2:
        return None  # a text cut short
    condition, body = module.called(loop)
    root = body.instructions[body.root]
    results = root.operands if root.opcode == "tuple" else (root.name,)

    def runs(state: State) -> bool | None:
        value = evaluate(module, condition, condition.root, state)
        return None if value is None else bool(value)

    def after(state: State) -> dict[int, Scalar]:
        return _known(module, body, {n: results[n] for n in state if n < len(results)}, state)

    return _count(runs, after, initial)


def _count(
    runs: Callable[[State], bool | None], after: Callable[[State], dict[int, Scalar]], state: State
) -> int | None:
    """Trips until `runs` says no. Where the state moves in equal steps its end is searched, else trips are walked."""
    going = runs(state)
    if not going:
        return None if going is None else 0
    second = after(state)
    third = after(second)
    steps = {n: second[n] - state[n] for n in third}
    if all(third[n] - second[n] == step for n, step in steps.items()):
        return _first_stop(lambda trips: runs({n: state[n] + trips * step for n, step in steps.items()}))
    for trips in range(1, _MOST_TRIPS):
        state = after(state)
        going = runs(state)
        if not going:
            return None if going is None else trips
    return None


def _first_stop(runs: Callable[[int], bool | None]) -> int | None:
    """The first trip before which `runs` is no.

    Where the condition is an inequality (counter != 8) it is no on one trip only, so the first trips are tried one by
    one; a loop that is still running after those is taken to be yes up to its end and no from there on.
    """
    tried = 4096
    for trips in range(1, tried):
        going = runs(trips)
        if not going:
            return None if going is None else trips
    high = 2 * tried
    while runs(high):
        high *= 2
        if high > _ENDLESS:
            return None
    return bisect_left(range(high), True, lo=tried, key=lambda trips: not runs(trips))


def evaluate(
    module: Module, computation: Computation, name: str, state: State, arguments: tuple[Scalar | None, ...] = ()
) -> Scalar | None:
    """A scalar's value as the hardware would compute it (integers without wrapping); None where it is not known.

    Args:
      module: where called computations are found.
      computation: where `name` stands.
      name: an instruction.
      state: known elements of the computation's one tuple parameter, or of the parameter itself under 0.
      arguments: values of the parameters of a fusion or call; then there is no state.
    """
    memo: dict[str, Scalar | None] = {}

    def value(name: str) -> Scalar | None:
        if name not in memo:
            memo[name] = None
            instruction = computation.instructions.get(name)
            if instruction is not None and instruction.shape.elements == 1 and instruction.shape.dtype != "tuple":
                memo[name] = fresh(instruction)
        return memo[name]

    def fresh(instruction: Instruction) -> Scalar | None:
        source = computation.operands(instruction)[:1]
        match instruction.opcode:
            case "constant":
                return _literal(instruction.literal)
            case "parameter":
                number = int(instruction.literal)
                return arguments[number] if arguments else state.get(number)
            case "get-tuple-element":
                is_state = source and source[0].opcode == "parameter" and not arguments
                return state.get(instruction.index) if is_state else None
            case "copy-done":  # its start has a tuple's shape: look through it
                return value(source[0].operands[0]) if source and source[0].opcode == "copy-start" else None
        values = tuple(value(operand) for operand in instruction.operands)
        if instruction.opcode in ("fusion", "call"):
            inner = module.called(instruction)
            return evaluate(module, inner[0], inner[0].root, {}, values) if inner else None
        known = [value for value in values if value is not None]
        return _apply(instruction, known) if len(known) == len(values) else None

    return value(name)


def _apply(instruction: Instruction, values: list[Scalar]) -> Scalar | None:
    """What an instruction makes of scalars; None where nobody here knows."""
    opcode = instruction.opcode
    if opcode in _SAME:
        return int(values[0]) if opcode == "convert" and instruction.shape.dtype[0] in "su" else values[0]
    if opcode == "compare":
        compare = _COMPARE.get(instruction.attributes.get("direction", ""))
        return compare(*values) if compare else None
    return _ARITHMETIC[opcode](*values) if opcode in _ARITHMETIC else None


def _literal(text: str) -> Scalar | None:
    text = text.strip("{} ")
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return None
