"""The examples that stand in the docstrings of `hlo.live`, `hlo.origin` and `hlo.read` are true."""

from __future__ import annotations

import pytest

from jaxpar.hlo.collective_order import find_unordered
from jaxpar.hlo.live import live_arrays
from jaxpar.hlo.live.in_place import _is_read_in_place, replaceable
from jaxpar.hlo.origin import decode, inherit, origin_of, source_line
from jaxpar.hlo.program.aliases import leaf, pairs
from jaxpar.hlo.program.module import Frame
from jaxpar.hlo.program.parse import parse_module, parse_shape
from jaxpar.hlo.program.tasks import Collective, Loop, Needs, Origin, Task, Wait
from jaxpar.hlo.read import read_program
from jaxpar.hlo.read.reader import _Reader
from jaxpar.hlo.read.values import Nodes, Value
from jaxpar.hlo.work.collectives import devices_of


def text(entry: str, computations: str = "") -> str:
    header = "HloModule test, is_scheduled=true, num_partitions=2"
    return f"{header}\n\n{computations}\nENTRY %main () -> f32[] {{\n{entry}\n}}\n"


def test_arrays_in_memory():
    found = live_arrays(
        parse_module(
            text("""
  %x = f32[1024] parameter(0)
  %a = f32[1024] reverse(%x), dimensions={0}
  %b = f32[1024] negate(%a)
  %c = f32[2048] concatenate(%b, %x), dimensions={0}
  ROOT %r = f32[1024] slice(%c), slice={[0:1024]}""")
        )
    )
    assert [(one.makers, one.begin, one.end, one.bytes) for one in found.arrays] == [
        (["x"], 0, 3, 4096),
        (["a", "b"], 0, 2, 4096),
        (["c"], 2, 3, 8192),
        (["r"], 3, 3, 4096),
    ]


def test_operands_in_whose_slots_a_result_may_lie():
    module = parse_module(
        text("""
  %a = f32[8] parameter(0)
  %b = f32[8] parameter(1)
  %i = s32[] parameter(2)
  %sum = f32[8] add(%a, %b)
  %part = f32[8] dynamic-update-slice(%a, %b, %i)
  ROOT %t = f32[8] transpose(%a), dimensions={0}""")
    )
    entry = module.computations[module.entry].instructions
    assert replaceable(module, entry["sum"]) == ([0, 1], [])
    assert replaceable(module, entry["part"]) == ([], [0])
    assert replaceable(module, entry["t"]) == ([], [])


def test_aliases():
    assert list(pairs("{0}: (1, {}), {1}: (0, {2})")) == [((0,), 1, ()), ((1,), 0, (2,))]
    assert leaf(parse_shape("(f32[8], (f32[4], f32[2]), s32[])"), (1, 1)) == 2


@pytest.mark.parametrize(
    "path, scope, phase",
    [
        ("jit(step)/jvp(block)/mlp/dot_general", "block/mlp", "forward"),
        ("jit(step)/transpose(jvp(block))/mlp/dot_general", "block/mlp", "backward"),
        (
            "jit(step)/transpose(jvp())/checkpoint/rematted_computation/block/mlp/dot_general",
            "block/mlp",
            "recomputed",
        ),
        ("jit(step)/update/add", "update", "update"),
        ("jit(step)/reduce_sum", "", "other"),
        ("block/(mlp/mul:attention/dot_general)", "block", "forward"),
        ("jit(step)/backward_tick/jvp(block)/mlp/dot_general", "block/mlp", "recomputed"),
        ("jit(step)/jvp(block)/core/splash/splash/pallas_call", "block/core", "forward"),
    ],
)
def test_scopes_and_phases(path, scope, phase):
    assert decode(path) == (scope, phase)


def test_the_line_that_calls_a_linear():
    dirs = (("/src/jaxpar/models", "models"), ("/src/jaxpar/jaxpar", "jaxpar"))
    frames = [
        Frame("/src/jaxpar/jaxpar/parallel/linear/ring_matmul.py", 88, 0),
        Frame("/src/jaxpar/models/linears.py", 40, 0),
        Frame("/src/jaxpar/models/transformer.py", 72, 0),
    ]
    assert source_line(frames, dirs) == "models/transformer.py:72"


def test_a_fusion_around_a_matmul():
    module = parse_module(
        text(
            """
  %x = f32[8,8] parameter(0)
  ROOT %f = f32[8,8] fusion(%x), kind=kOutput, calls=%inner, metadata={op_name="jit(step)/jvp(block)/mlp/add"}""",
            """
%inner (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8] parameter(0)
  %d = f32[8,8] dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/jvp(block)/attention/dot_general"}
  ROOT %s = f32[8,8] add(%d, %p), metadata={op_name="jit(step)/jvp(block)/mlp/add"}
}
""",
        )
    )
    fusion = module.computations[module.entry].instructions["f"]
    assert origin_of(module, fusion, ()).scope == "block/attention"


def test_the_origin_of_neighbours():
    there = Origin("block/attention", "", "forward", told=True)
    total = Collective("all-reduce", ((0, 1),), 4, "f32")
    found = inherit(
        [
            Task("q", "copy", "copy"),
            Task("d", "dot", "matmul", there, depends=(0,)),
            Task("s", "all-reduce", "collective", depends=(1,), collective=total),
        ],
        Origin(),
    )
    assert [one.origin.scope for one in found if isinstance(one, Task)] == ["block/attention"] * 3


def test_the_work_of_a_matmul():
    dims = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    (task,) = read_program(
        text(f"""
  %a = f32[8,16] parameter(0)
  %b = f32[16,32] parameter(1)
  ROOT %d = f32[8,32] dot(%a, %b), {dims}""")
    ).nodes
    assert isinstance(task, Task) and (task.kind, task.flops) == ("matmul", 8192)
    assert task.bytes == 4 * (8 * 16 + 16 * 32 + 8 * 32)


def test_what_a_result_depends_on():
    module = parse_module(
        text("""
  %x = f32[8] parameter(0)
  %s = (f32[8], f32[16]) all-gather-start(%x), dimensions={0}, replica_groups={{0,1}}
  %f = f32[8] exponential(%x)
  %d = f32[16] all-gather-done(%s)
  %t = (f32[8], f32[16]) tuple(%f, %d)
  %g = f32[8] get-tuple-element(%t), index=0
  %h = f32[8] negate(%g)
  ROOT %all = (f32[8], f32[8], (f32[8], f32[16])) tuple(%x, %h, %t)""")
    )
    into = Nodes()
    reader = _Reader(module, (), devices_of(module, None))
    x, h, t = reader.read(module.computations[module.entry], {}, [Value()], into).parts
    one = frozenset({1})
    done = Value(tasks=frozenset({0}))
    assert x == Value() and h == Value(tasks=frozenset({3}))
    assert t == Value(tasks=frozenset({0, 1}), parts=(Value(tasks=one), done))
    assert [type(node) for node in into.nodes] == [Task, Task, Wait, Task]
    assert into.nodes[3].depends == (1,)


def test_a_loop():
    first, loop = read_program(
        text(
            """
  %x0 = f32[8] parameter(0)
  %zero = s32[] constant(0)
  %a = f32[8] negate(%x0)
  %s = (s32[], f32[8]) tuple(%zero, %a)
  %w = (s32[], f32[8]) while(%s), condition=%cond, body=%body
  ROOT %r = f32[8] get-tuple-element(%w), index=1""",
            """
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8] get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  %y = f32[8] exponential(%x)
  ROOT %q = (s32[], f32[8]) tuple(%j, %y)
}

%cond (c: (s32[], f32[8])) -> pred[] {
  %c = (s32[], f32[8]) parameter(0)
  %k = s32[] get-tuple-element(%c), index=0
  %four = s32[] constant(4)
  ROOT %less = pred[] compare(%k, %four), direction=LT
}
""",
        )
    ).nodes
    assert first.name == "a" and isinstance(loop, Loop)
    assert (loop.trips, loop.depends) == (4, (0,))
    assert loop.starts == (Needs(), Needs(tasks=(0,)))
    assert loop.ends == (Needs(tasks=(0,)), Needs(tasks=(1,)))
    assert [(one.name, one.needs.states) for one in loop.body] == [("j", (0,)), ("y", (1,))]


def loop_text(body: str, state: str, first: str) -> str:
    return text(
        f"""
  %x0 = f32[8] parameter(0)
  %zero = s32[] constant(0)
{first}
  ROOT %w = {state} while(%s0), condition=%cond, body=%body""",
        f"""
%body (p: {state}) -> {state} {{
  %p = {state} parameter(0)
{body}
}}

%cond (c: {state}) -> pred[] {{
  %c = {state} parameter(0)
  %k = s32[] get-tuple-element(%c), index=0
  %four = s32[] constant(4)
  ROOT %less = pred[] compare(%k, %four), direction=LT
}}
""",
    )


def test_a_wait_for_the_trip_before():
    gather = "dimensions={0}, replica_groups={{0,1}}"
    program = read_program(
        loop_text(
            f"""
  %i = s32[] get-tuple-element(%p), index=0
  %g = (f32[8], f32[16]) get-tuple-element(%p), index=1
  %x = f32[8] get-tuple-element(%p), index=2
  %d = f32[16] all-gather-done(%g)
  %s = (f32[8], f32[16]) all-gather-start(%x), {gather}
  ROOT %q = (s32[], (f32[8], f32[16]), f32[8]) tuple(%i, %s, %x)""",
            "(s32[], (f32[8], f32[16]), f32[8])",
            f"""
  %s1 = (f32[8], f32[16]) all-gather-start(%x0), {gather}
  %s0 = (s32[], (f32[8], f32[16]), f32[8]) tuple(%zero, %s1, %x0)""",
        )
    )
    loop = program.nodes[-1]
    assert isinstance(loop, Loop)
    assert loop.body[0] == Wait("d", 1, previous_trip=True)
    assert isinstance(loop.body[1], Task) and loop.body[1].name == "s"


def test_uses_of_elements():
    def found(last: str) -> bool:
        module = parse_module(
            text(f"""
  %p = f32[8] parameter(0)
  %e = f32[8] exponential(%p)
  ROOT %n = f32[8] {last}""")
        )
        return _is_read_in_place(module.computations[module.entry], "p")

    assert found("negate(%e)")
    assert not found("reverse(%e), dimensions={0}")


def test_what_is_asynchronous_in_memory():
    gather = "dimensions={0}, replica_groups={{0,1}}"
    arrays = live_arrays(
        parse_module(
            text(f"""
  %x = f32[8] parameter(0)
  %s = (f32[8], f32[16]) all-gather-start(%x), {gather}
  %c = (f32[8], f32[8], u32[]) copy-start(%x)
  ROOT %d = f32[16] all-gather-done(%s)""")
        )
    ).arrays
    assert [(one.makers, one.bytes) for one in arrays if one.whole] == [
        (["x", "s", "c"], 32),
        (["s"], 64),
    ]


def test_collectives_without_an_order():
    groups = "replica_groups={{0,1}}, to_apply=%sum"
    body = f"""
  %i = s32[] get-tuple-element(%p), index=0
  %v = f32[8] get-tuple-element(%p), index=1
  %r = f32[8] all-reduce(%v), {groups}
  ROOT %q = (s32[], f32[8]) tuple(%i, %r)"""
    first = """
  %s0 = (s32[], f32[8]) tuple(%zero, %x0)"""

    def pairs_of(operand: str) -> list[tuple[str, str]]:
        whole = loop_text(body, "(s32[], f32[8])", first).replace(
            "ROOT %w = (s32[], f32[8]) while(%s0), condition=%cond, body=%body",
            "%w = (s32[], f32[8]) while(%s0), condition=%cond, body=%body\n"
            "  %y = f32[8] get-tuple-element(%w), index=1\n"
            f"  ROOT %a = f32[8] all-reduce({operand}), {groups}",
        )
        return [(one.name, other.name) for one, other in find_unordered(whole)]

    assert pairs_of("%x0") == [("w", "a")]
    assert pairs_of("%y") == []
