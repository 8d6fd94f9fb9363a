"""How often a loop runs: its counter followed from the initial value through the condition, as integers.

The state of a loop is a tuple. Elements whose initial value is a known scalar are followed; the body says what each
becomes, the condition says when to stop. Constants may be in the condition, passed in the tuple, or come from an outer
loop that never changes them. A loop whose end depends on data has no count.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

from jaxpar.hlo.parse import Computation, Instruction, Module

Scalar = int | float | bool
State = Mapping[int, Scalar]
"""Known scalars of a loop's tuple, by index."""

_SAME = {"copy", "bitcast", "reshape", "convert", "broadcast", "optimization-barrier"}
_COMPARE = {"EQ": operator.eq, "NE": operator.ne, "LT": operator.lt}
_COMPARE |= {"LE": operator.le, "GT": operator.gt, "GE": operator.ge}
_BINARY: dict[str, Callable[[Scalar, Scalar], Scalar]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
_SIMULATED = 10_000
"""Trips tried one by one where the counter does not move in equal steps."""


def known_scalars(module: Module, computation: Computation, names: tuple[str, ...], state: State) -> dict[int, Scalar]:
    """Which of these instructions are scalars with a known value, by position, given the known state."""
    values = ((n, evaluate(module, computation, name, state)) for n, name in enumerate(names))
    return {n: value for n, value in values if value is not None}


def initial_state(module: Module, computation: Computation, loop: Instruction, state: State) -> dict[int, Scalar]:
    """Known scalars of a loop's tuple on its first trip; `state` is that of the loop around it."""
    source = computation.instructions.get(loop.operands[0])
    while source is not None and source.opcode in ("copy", "optimization-barrier", "bitcast"):
        source = computation.instructions.get(source.operands[0])
    if source is None:
        return {}
    if source.opcode != "tuple":
        value = evaluate(module, computation, source.name, state)
        return {} if value is None else {0: value}
    return known_scalars(module, computation, source.operands, state)


def invariant(module: Module, loop: Instruction, state: State) -> dict[int, Scalar]:
    """The part of a loop's known state that its body hands on unchanged: known on every trip."""
    body = module.computations[_part(loop, "body")]
    root = body.instructions[body.root]
    if root.opcode != "tuple":
        return {}
    return {n: value for n, value in state.items() if _passed_on(body, root.operands[n]) == n}


def _passed_on(body: Computation, name: str) -> int | None:
    """The index of the state that an instruction of the body hands on unchanged."""
    instruction = body.instructions.get(name)
    while instruction is not None and instruction.opcode in ("copy", "bitcast"):
        instruction = body.instructions.get(instruction.operands[0])
    if instruction is None or instruction.opcode != "get-tuple-element":
        return None
    source = body.instructions.get(instruction.operands[0])
    return int(instruction.attributes["index"]) if source is not None and source.opcode == "parameter" else None


def trip_count(module: Module, loop: Instruction, initial: State) -> int | None:
    """How often the body of a `while` runs; None where it cannot be known from the text.

    Args:
      module: the loop's module.
      loop: the `while` instruction.
      initial: from `initial_state`.
    """
    stated = _stated(loop.attributes.get("backend_config", ""))
    if stated is not None:
        return stated
    condition = module.computations.get(_part(loop, "condition"))
    body = module.computations.get(_part(loop, "body"))
    if condition is None or body is None or not body.root:
        return None

    def runs(state: State) -> bool | None:
        value = evaluate(module, condition, condition.root, state)
        return None if value is None else bool(value)

    def after(state: State) -> dict[int, Scalar]:
        root = body.instructions[body.root]
        names = root.operands if root.opcode == "tuple" else (root.name,)
        known = [n for n in state if n < len(names)]  # a root that is no tuple hands on one value
        return {n: value for n in known if (value := evaluate(module, body, names[n], state)) is not None}

    return _count(runs, after, dict(initial))


def _count(runs: Callable[[State], bool | None], after: Callable[[State], dict[int, Scalar]], state: State):
    """Trips until `runs` says no. Equal steps are jumped over by doubling, then bisected; others are walked."""
    if (going := runs(state)) is None:
        return None
    if not going:
        return 0
    second = after(state)
    third = after(second)
    steps = {n: second[n] - state[n] for n in third}
    if all(third[n] - second[n] == step for n, step in steps.items()):
        jumped = _bisect(lambda trips: runs({n: state[n] + trips * step for n, step in steps.items()}))
        if jumped is not None:
            return jumped
    for trips in range(1, _SIMULATED):
        state = after(state)
        going = runs(state)
        if not going:
            return None if going is None else trips
    return None


def _bisect(runs: Callable[[int], bool | None]) -> int | None:
    """The first trip before which `runs` is no, where it is yes up to some trip and no from there on.

    An inequality stops on one trip only (counter != 8), so every trip is tried first; a loop that is still running
    after those has its end searched for.
    """
    for trips in range(1, 4096):
        going = runs(trips)
        if going is None:
            return None
        if not going:
            return trips
    low, high = 4095, 8192
    while runs(high):
        low, high = high, 2 * high
        if high > 2**40:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return high


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
        match instruction.opcode:
            case "constant":
                return _literal(instruction.literal)
            case "parameter":
                number = int(instruction.literal)
                return arguments[number] if arguments else state.get(number)
            case "get-tuple-element":
                source = computation.instructions.get(instruction.operands[0])
                is_state = source is not None and source.opcode == "parameter" and not arguments
                return state.get(int(instruction.attributes["index"])) if is_state else None
            case "copy-done":  # its start has a tuple's shape: look through it
                start = computation.instructions.get(instruction.operands[0])
                return value(start.operands[0]) if start is not None and start.opcode == "copy-start" else None
            case opcode if opcode in _SAME or opcode in _BINARY or opcode in _OTHER:
                return _apply(module, instruction, [value(operand) for operand in instruction.operands])
            case _:
                return None

    return value(name)


_OTHER = {"compare", "select", "not", "negate", "clamp", "fusion", "call", "divide", "remainder"}


def _apply(module: Module, instruction: Instruction, values: list[Scalar | None]) -> Scalar | None:
    opcode = instruction.opcode
    if opcode in ("fusion", "call"):
        inner = module.computations.get(instruction.called[0]) if instruction.called else None
        return None if inner is None else evaluate(module, inner, inner.root, {}, tuple(values))
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    if opcode in _SAME:
        return int(known[0]) if opcode == "convert" and instruction.shape.dtype[0] in "su" else known[0]
    if opcode in _BINARY:
        return _BINARY[opcode](known[0], known[1])
    match opcode:
        case "compare":
            compare = _COMPARE.get(instruction.attributes.get("direction", ""))
            return None if compare is None else compare(known[0], known[1])
        case "select":
            return known[1] if known[0] else known[2]
        case "clamp":
            return min(max(known[1], known[0]), known[2])
        case "not":
            return not known[0]
        case "negate":
            return -known[0]
        case _:
            return _divide(opcode, known[0], known[1])


def _divide(opcode: str, a: Scalar, b: Scalar) -> Scalar | None:
    """Truncating division, as in HLO."""
    if not b:
        return None
    if isinstance(a, float) or isinstance(b, float):
        return a / b if opcode == "divide" else None
    quotient = a // b if a * b >= 0 else -(-a // b)
    return quotient if opcode == "divide" else a - b * quotient


def _literal(text: str) -> Scalar | None:
    text = text.strip("{} ")
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None


def _stated(backend_config: str) -> int | None:
    """`{"known_trip_count":{"n":"32"}}`, which the CPU and GPU compilers write."""
    _, found, rest = backend_config.partition('"known_trip_count":{"n":"')
    number = rest.partition('"')[0]
    return int(number) if found and number.isdigit() else None


def _part(loop: Instruction, key: str) -> str:
    return loop.attributes.get(key, "").lstrip("%")
