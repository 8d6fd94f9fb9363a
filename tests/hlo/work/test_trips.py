"""Trip counts from loop conditions: against counting, in every direction, nested, and of real
compiled loops.
"""

from __future__ import annotations

import operator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.hlo.program.module import Computation, Instruction, Module
from jaxpar.hlo.program.parse import parse_module
from jaxpar.hlo.work import trips as subject
from jaxpar.hlo.work.trips import evaluate, initial_state, invariant, trip_count

DATA = Path(__file__).parents[1] / "data" / "hlo"
DIRECTIONS = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "NE": operator.ne,
}


def counting(start: int, step: str, direction: str, limit: int) -> Module:
    """A loop over `(counter, x)`; `step` is the counter's update as one HLO instruction of %i
    and %k.
    """
    return parse_module(f"""HloModule test, is_scheduled=true

%fused_step (a: s32[], b: s32[]) -> s32[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  %double = s32[] add(%b, %b)
  ROOT %sum = s32[] add(%a, %double)
}}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %p = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4] get-tuple-element(%p), index=1
  %k = s32[] constant(3)
  %next = s32[] {step}
  ROOT %t = (s32[], f32[4]) tuple(%next, %x)
}}

%cond (p: (s32[], f32[4])) -> pred[] {{
  %p = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %limit = s32[] constant({limit})
  ROOT %compare = pred[] compare(%i, %limit), direction={direction}
}}

ENTRY %main (x: f32[4]) -> (s32[], f32[4]) {{
  %x = f32[4] parameter(0)
  %start = s32[] constant({start})
  %first = s32[] copy(%start)
  %init = (s32[], f32[4]) tuple(%first, %x)
  ROOT %loop = (s32[], f32[4]) while(%init), condition=%cond, body=%body
}}
""")


def count(module: Module, computation: str = "", name: str = "loop") -> int | None:
    where = module.computations[computation or module.entry]
    loop = where.instructions[name]
    return trip_count(module, loop, initial_state(module, where, loop, {}))


def counted(
    start: int,
    step: int,
    direction: str,
    limit: int,
    most: int = 3000,
) -> int | None:
    trips = 0
    while DIRECTIONS[direction](start, limit):
        start = start + step
        trips = trips + 1
        if trips > most:
            return None
    return trips


@given(
    st.integers(-20, 20),
    st.integers(-4, 4),
    st.sampled_from(sorted(DIRECTIONS)),
    st.integers(-40, 40),
)
def test_a_counter_is_followed(start: int, step: int, direction: str, limit: int) -> None:
    module = counting(start, "add(%i, %k)", direction, limit)
    text_step = module.computations["body"].instructions["k"]
    module.computations["body"].instructions["k"] = Instruction(
        "k", "constant", text_step.shape, (), str(step), ""
    )
    expected = counted(start, step, direction, limit)
    if expected is not None:
        assert count(module) == expected


@pytest.mark.parametrize(
    ("step", "start", "direction", "limit", "trips"),
    [
        ("add(%i, %k)", 0, "LT", 32, 11),
        ("subtract(%i, %k)", 31, "GE", 0, 11),
        ("multiply(%i, %k)", 1, "LT", 100, 5),
        ("fusion(%i, %k), kind=kLoop, calls=%fused_step", 0, "LT", 60, 10),
        ("add(%i, %k)", 0, "LE", 12_288, 4_097),
        ("add(%i, %k)", 5, "LT", 5, 0),
    ],
)
def test_steps_of_all_kinds(
    step: str,
    start: int,
    direction: str,
    limit: int,
    trips: int,
) -> None:
    assert count(counting(start, step, direction, limit)) == trips


def test_an_end_that_depends_on_data_is_not_known() -> None:
    assert count(counting(0, "rng(%i, %k)", "LT", 8)) is None
    assert count(counting(0, "add(%i, %k)", "EQ", 0)) == 1


def test_a_loop_that_never_ends_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_MOST", 100)
    assert count(counting(0, "subtract(%i, %k)", "LT", 8)) is None


def test_a_loop_of_as_many_trips_as_are_counted_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_MOST", 11)
    assert count(counting(0, "add(%i, %k)", "LT", 32)) == 11


def test_the_compilers_own_count_is_believed() -> None:
    module = counting(0, "rng(%i, %k)", "LT", 8)
    entry = module.computations["main"]
    loop = entry.instructions["loop"]
    told = Instruction(
        loop.name,
        loop.opcode,
        loop.shape,
        loop.operands,
        "",
        loop.tail
        + ', backend_config={"known_trip_count":{"n":"12"},"known_init_step":{"init":"0","step":"1"}}',
    )
    assert trip_count(module, told, {}) == 12


NESTED = """HloModule nested, is_scheduled=true

%inner_body (p: (s32[], s32[])) -> (s32[], s32[]) {
  %p = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], s32[]) tuple(%next, %n)
}

%less (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %c = pred[] compare(%a, %b), direction=LT
}

%inner_cond (p: (s32[], s32[])) -> pred[] {
  %p = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  ROOT %f = pred[] fusion(%i, %n), kind=kLoop, calls=%less
}

%outer_body (p: (s32[], s32[])) -> (s32[], s32[]) {
  %p = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%p), index=0
  %m = s32[] get-tuple-element(%p), index=1
  %zero = s32[] constant(0)
  %init = (s32[], s32[]) tuple(%zero, %m)
  %loop = (s32[], s32[]) while(%init), condition=%inner_cond, body=%inner_body
  %two = s32[] constant(2)
  %next = s32[] add(%j, %two)
  ROOT %t = (s32[], s32[]) tuple(%next, %m)
}

%outer_cond (p: (s32[], s32[])) -> pred[] {
  %p = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(10)
  ROOT %c = pred[] compare(%j, %n), direction=NE
}

ENTRY %main () -> (s32[], s32[]) {
  %zero = s32[] constant(0)
  %seven = s32[] constant(7)
  %start = (s32[], token[]) copy-start(%seven)
  %limit = s32[] copy-done(%start)
  %init = (s32[], s32[]) tuple(%zero, %limit)
  ROOT %outer = (s32[], s32[]) while(%init), condition=%outer_cond, body=%outer_body
}
"""


def test_a_limit_that_an_outer_loop_hands_on() -> None:
    module = parse_module(NESTED)
    entry = module.computations["main"]
    body = module.computations["outer_body"]
    outer = entry.instructions["outer"]
    inner = body.instructions["loop"]
    state = initial_state(module, entry, outer, {})
    assert state == {0: 0, 1: 7}
    assert trip_count(module, outer, state) == 5
    known = invariant(module, outer, state)
    assert known == {1: 7}  # the counter moves
    assert trip_count(module, inner, initial_state(module, body, inner, known)) == 7
    assert trip_count(module, inner, initial_state(module, body, inner, {})) is None


@pytest.mark.parametrize("name", ["cpu_loops", "gpu_loops", "tpu_loops"])
def test_real_loops(name: str) -> None:
    """`fori_loop(3, 21)`, and a while whose end is an argument."""
    module = parse_module((DATA / f"{name}.txt").read_text())
    entry = module.computations[module.entry]
    loops = [i for i in entry.instructions.values() if i.opcode == "while"]
    assert sorted(str(count(module, module.entry, loop.name)) for loop in loops) == ["18", "None"]


def test_the_compilers_loop_around_a_matmul_counts_by_two() -> None:
    module = parse_module((DATA / "tpu_windowed_loop.txt").read_text())
    entry = module.computations[module.entry]
    (loop,) = (i for i in entry.instructions.values() if i.opcode == "while")
    assert "windowed_dot_general_body" in loop.attributes["body"]
    # 8 shards, in two directions, unrolled by two
    assert count(module, module.entry, loop.name) == 2


def value_of(lines: str, state: dict[int, int] | None = None) -> object:
    module = parse_module(f"HloModule m\n\nENTRY %main () -> s32[] {{\n{lines}\n}}\n")
    computation: Computation = module.computations["main"]
    return evaluate(module, computation, computation.root, state or {})


@pytest.mark.parametrize(
    ("operation", "value"),
    [
        ("negate(%a)", 7),
        ("clamp(%b, %a, %b)", 3),
        ("select(%yes, %a, %b)", -7),
        ("minimum(%a, %b)", -7),
        ("maximum(%a, %b)", 3),
        ("exponential(%a)", None),
        ("and(%b, %b)", 3),
        ("convert(%yes)", 1),
        ("convert(%half)", None),
    ],
)
def test_scalars(operation: str, value: int | None) -> None:
    found = value_of(
        "  %a = s32[] constant(-7)\n  %b = s32[] constant(3)\n  %yes = pred[] constant(true)\n"
        f"  %half = f32[] constant(2.5)\n  ROOT %r = s32[] {operation}"
    )
    assert found == value


def test_arrays_have_no_value() -> None:
    assert (
        value_of("  %a = s32[4]{0} constant({1, 2, 3, 4})\n  ROOT %r = s32[4]{0} negate(%a)")
        is None
    )
