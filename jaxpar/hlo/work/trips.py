"""This module counts a loop's trips: it follows the counter, as an integer, until the condition
fails.

The state of a loop is a tuple. Elements whose initial value is a known scalar are followed: the
body says what each becomes, and the condition says when to stop. A constant may stand in the
condition, be passed in the tuple, or come from an outer loop that never changes it. A loop whose
end depends on data has no count.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping

from jaxpar.base.errors import short
from jaxpar.hlo.program.module import Computation, Instruction, Module

Scalar = int  # or a bool
State = Mapping[int, Scalar]
"""The known scalars of a loop's tuple, by index."""

_STATED = re.compile(r'"known_trip_count":\{"n":"(\d+)"')  # as the CPU and GPU compilers write it
_MOST = 2**16
"""The most trips that are followed; a loop that still runs after them has no count."""
_COMPUTE: dict[str, Callable[..., Scalar]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "negate": lambda a: -a,
    "maximum": max,
    "minimum": min,
    "clamp": lambda low, value, high: min(max(value, low), high),
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": operator.not_,
    "select": lambda chosen, yes, no: yes if chosen else no,
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}
"""The functions that opcodes, and comparisons by their direction, compute of scalars."""
_COMPUTE |= dict.fromkeys(
    ("copy", "bitcast", "reshape", "convert", "broadcast", "optimization-barrier"), lambda a: a
)


def initial_state(
    module: Module, computation: Computation, loop: Instruction, state: State
) -> dict[int, Scalar]:
    """Find the known scalars of a loop's tuple on its first trip, by their index in the tuple.

    Args:
      loop: a `while`.
      state: the known scalars of the loop around it.
    """
    source = computation.behind(loop.operands[0], ("copy", "optimization-barrier", "bitcast"))
    if source is None:
        return {}
    if source.opcode == "tuple":
        names = source.operands
    else:
        names = (source.name,)
    return _scalars(module, computation, dict(enumerate(names)), state)


def invariant(module: Module, loop: Instruction, state: State) -> dict[int, Scalar]:
    """Find the scalars of a loop's known state that its body hands on unchanged, and that hold on
    every trip.

    Args:
      loop: a `while`.
      state: the known scalars on the first trip.
    """
    unchanged = module.handed_on(loop)
    return {n: value for n, value in state.items() if n in unchanged}


def _scalars(
    module: Module, computation: Computation, names: Mapping[int, str], state: State
) -> dict[int, Scalar]:
    """Evaluate some instructions, and keep those that are scalars with a known value."""
    values = {n: evaluate(module, computation, name, state) for n, name in names.items()}
    return {n: value for n, value in values.items() if value is not None}


def trip_count(module: Module, loop: Instruction, initial: State) -> int | None:
    """Count how often the body of a loop runs.

    Args:
      module: the module, in which its condition and body are found.
      loop: a `while`.
      initial: the known scalars on its first trip, as `initial_state` finds them.

    Returns:
      The number of trips; None where the text does not tell, or where the loop still runs after
      65,536 trips that were counted here.
    """
    stated = _STATED.search(loop.attributes.get("backend_config", ""))
    if stated:
        return int(stated[1])
    if len(module.called(loop)) < 2:
        return None  # the text was cut short
    condition, body = module.called(loop)
    root = body.result
    if root.opcode == "tuple":
        results = root.operands
    else:
        results = (root.name,)
    state = initial
    for trips in range(_MOST + 1):
        going = evaluate(module, condition, condition.root, state)
        if not going:
            return None if going is None else trips
        state = _scalars(
            module,
            body,
            {n: results[n] for n in state if n < len(results)},
            state,
        )
    return None


def evaluate(
    module: Module,
    computation: Computation,
    name: str,
    state: State,
    arguments: tuple[Scalar | None, ...] = (),
) -> Scalar | None:
    """Compute the scalar that an instruction makes, without wrapping integers; None where it is not
    known.

    Args:
      name: the instruction.
      state: the known elements of the computation's one tuple parameter, or the parameter itself
        under 0.
      arguments: the values of the parameters of a fusion or call; then there is no state.
    """
    memo: dict[str, Scalar | None] = {}

    def value(name: str) -> Scalar | None:
        if name not in memo:
            memo[name] = None
            instruction = computation.instructions.get(name)
            if (
                instruction is not None
                and instruction.shape.elements == 1
                and instruction.shape.dtype != "tuple"
            ):
                memo[name] = fresh(instruction)
        return memo[name]

    def fresh(instruction: Instruction) -> Scalar | None:
        source = computation.operands(instruction)[:1]
        match instruction.opcode:
            case "constant":
                return _literal(instruction.literal)
            case "parameter":
                number = int(instruction.literal)
                if arguments:
                    return arguments[number] if number < len(arguments) else None
                return state.get(number)
            case "get-tuple-element":
                is_state = source and source[0].opcode == "parameter" and not arguments
                if is_state:
                    return state.get(instruction.index)
                return None
            case "copy-done":  # look through its start, which has the shape of a tuple
                if source and source[0].opcode == "copy-start":
                    return value(source[0].operands[0])
                return None
        values = tuple(value(operand) for operand in instruction.operands)
        if instruction.opcode in ("fusion", "call"):
            inner = module.called(instruction)
            if inner:
                return evaluate(module, inner[0], inner[0].root, {}, values)
            return None
        if instruction.opcode == "compare":
            name = instruction.attributes.get("direction", "")
        else:
            name = instruction.opcode
        if None in values:
            compute = None
        else:
            compute = _COMPUTE.get(name)
        if compute is None:
            return None
        try:
            return compute(*values)
        except TypeError as error:
            raise ValueError(f"{short(instruction.name)} has {len(values)} operands") from error

    return value(name)


def _literal(text: str) -> Scalar | None:
    text = text.strip("{} ")
    if text in ("true", "false"):
        return text == "true"
    if text.lstrip("-").isdigit():
        return int(text)
    return None
