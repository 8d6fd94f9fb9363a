"""Programs as task graphs: order, dependencies, waits, loops, branches, what nobody knows."""

from __future__ import annotations

import random
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import jax
import pytest

from jaxpar.base.errors import UserError
from jaxpar.base.taken_share import taken
from jaxpar.hlo.program.tasks import Collective, Loop, Node, Program, Task, Wait, walk
from jaxpar.hlo.read import read_program, reader

DIRS = (("/repo/models", "models"), ("/repo/jaxpar", "jaxpar"))


def program(body: str, computations: str = "") -> Program:
    header = "HloModule test, is_scheduled=true, num_partitions=2"
    return read_program(f"{header}\n{computations}\nENTRY %main () -> f32[] {{\n{body}\n}}\n", DIRS)


def position(nodes: tuple[Node, ...], name: str) -> int:
    return next(n for n, node in enumerate(nodes) if node.name == name)


def task(nodes: tuple[Node, ...], name: str) -> Task:
    found = nodes[position(nodes, name)]
    assert isinstance(found, Task)
    return found


def loop_of(nodes: tuple[Node, ...]) -> Loop:
    (found,) = (node for node in nodes if isinstance(node, Loop))
    return found


def test_dependencies_go_through_what_costs_nothing() -> None:
    nodes = program("""
  %a = f32[64]{0} parameter(0)
  %x = f32[64]{0} negate(%a)
  %y = f32[64]{0} exponential(%a)
  %t = (f32[64], f32[64]) tuple(%x, %y)
  %g = f32[64]{0} get-tuple-element(%t), index=1
  %b = f32[8,8]{1,0} bitcast(%g)
  ROOT %z = f32[8,8]{1,0} negate(%b)""").nodes
    assert [node.name for node in nodes] == ["x", "y", "z"]
    assert task(nodes, "z").depends == (1,)  # of y alone: the tuple's parts are told apart


def test_kinds() -> None:
    nodes = program("""
  %a = f32[64,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %h = f32[64,64]{1,0:S(5)} parameter(2)
  %dot = f32[64,64]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %add = f32[64,64]{1,0} add(%dot, %a)
  %transpose = f32[64,64]{1,0} transpose(%add), dimensions={1,0}
  %next = s32[] add(%i, %i)
  %reduce = f32[64,64]{1,0} all-reduce(%a), replica_groups={{0,1}}, to_apply=%sum
  %fetched = f32[64,64]{1,0} copy(%h)
  %gemm = f32[64,64]{1,0} custom-call(%a, %a), custom_call_target="__cublas$gemm"
  %pallas = f32[64,64]{1,0} custom-call(%a), custom_call_target="tpu_custom_call"
  ROOT %buffer = f32[64,64]{1,0} custom-call(), custom_call_target="AllocateBuffer\"""").nodes
    assert {node.name: node.kind for node in nodes if isinstance(node, Task)} == {
        "dot": "matmul",
        "add": "fusion",
        "transpose": "copy",
        "next": "control",
        "reduce": "collective",
        "fetched": "host_copy",
        "gemm": "matmul",
        "pallas": "kernel",
    }


def test_a_task_says_what_it_costs() -> None:
    (found,) = program(
        """
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,16]{1,0} parameter(1)
  ROOT %d = f32[64,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, """
        """backend_config={"window_config":{"estimated_cycles":"1234"}}"""
    ).nodes
    assert isinstance(found, Task)
    assert (found.flops, found.bytes, found.cycles) == (
        2 * 64 * 32 * 16,
        64 * 32 * 2 + 32 * 16 * 2 + 64 * 16 * 4,
        1234,
    )
    assert (found.dtype, found.shape, found.opcode) == ("bf16", "f32[64,16]", "dot")


@pytest.mark.parametrize("cycles", ["0", "-1", "9223372036854775807", ""])
def test_cycles_that_are_none(cycles: str) -> None:
    (found,) = program(
        "  %a = f32[64]{0} parameter(0)\n"
        f'  ROOT %x = f32[64]{{0}} negate(%a), backend_config={{"estimated_cycles":"{cycles}"}}'
    ).nodes
    assert isinstance(found, Task) and found.cycles is None


def test_an_asynchronous_pair() -> None:
    nodes = program("""
  %a = f32[64]{0} parameter(0)
  %s = (f32[64], f32[128]) all-gather-start(%a), replica_groups={{0,1}}, dimensions={0}
  %x = f32[64]{0} negate(%a)
  %d = f32[128]{0} all-gather-done(%s)
  ROOT %y = f32[128]{0} negate(%d)""").nodes
    assert [node.name for node in nodes] == ["s", "x", "d", "y"]
    start = task(nodes, "s")
    assert start.asynchronous and start.collective == Collective(
        "all-gather", ((0, 1),), 512, "f32"
    )
    assert nodes[2] == Wait("d", 0)
    assert task(nodes, "y").depends == (0,)  # the start makes the result, the done waits for it
    assert not task(nodes, "x").asynchronous and task(nodes, "x").depends == ()


def test_a_generic_pair_around_a_computation() -> None:
    nodes = program(
        """
  %a = f32[64]{0} parameter(0)
  %s = ((f32[64]), f32[32], s32[]) async-start(%a), calls=%inner
  %u = ((f32[64]), f32[32], s32[]) async-update(%s)
  ROOT %d = f32[32]{0} async-done(%u)""",
        """
%inner (a: f32[64]) -> f32[32] {
  %a = f32[64]{0} parameter(0)
  ROOT %r = f32[32]{0} reduce-scatter(%a), replica_groups={{0,1}}, dimensions={0}, to_apply=%sum
}
""",
    ).nodes
    start = task(nodes, "s")
    assert start.kind == "collective" and start.asynchronous and nodes[1] == Wait("d", 0)


LOOP = """
%body (p: (s32[], f32[64], f32[64], f32[64])) -> (s32[], f32[64], f32[64], f32[64]) {
  %p = (s32[], f32[64], f32[64], f32[64]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[64]{0} get-tuple-element(%p), index=1
  %w = f32[64]{0} get-tuple-element(%p), index=2
  %old = f32[64]{0} get-tuple-element(%p), index=3
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %m = f32[64]{0} multiply(%x, %w)
  %n = f32[64]{0} negate(%m)
  ROOT %t = (s32[], f32[64], f32[64], f32[64]) tuple(%next, %n, %w, %x)
}

%cond (p: (s32[], f32[64], f32[64], f32[64])) -> pred[] {
  %p = (s32[], f32[64], f32[64], f32[64]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(5)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}
"""


def test_a_loop_and_what_it_needs() -> None:
    nodes = program(
        """
  %a = f32[64]{0} parameter(0)
  %z = s32[] constant(0)
  %x = f32[64]{0} negate(%a)
  %w = f32[64]{0} exponential(%a)
  %unused = f32[64]{0} cosine(%a)
  %init = (s32[], f32[64], f32[64], f32[64]) tuple(%z, %x, %w, %a)
  %loop = (s32[], f32[64], f32[64], f32[64]) while(%init), condition=%cond, body=%body
  %y = f32[64]{0} get-tuple-element(%loop), index=1
  ROOT %r = f32[64]{0} negate(%y)""",
        LOOP,
    ).nodes
    loop = loop_of(nodes)
    assert (loop.trips, loop.depends) == (5, (0, 1))
    assert [node.name for node in loop.body] == ["next", "m", "n"]
    assert task(loop.body, "m").depends == () and task(loop.body, "n").depends == (1,)
    assert task(nodes, "r").depends == (position(nodes, "loop"),)
    assert sum(count for found, count in walk(nodes) if found.name == "m") == 5


def test_a_loop_without_a_known_end_runs_once_and_says_so() -> None:
    found = program(
        """
  %a = f32[64]{0} parameter(0)
  %z = s32[] parameter(1)
  %init = (s32[], f32[64], f32[64], f32[64]) tuple(%z, %a, %a, %a)
  ROOT %loop = (s32[], f32[64], f32[64], f32[64]) while(%init), condition=%cond, body=%body""",
        LOOP,
    )
    assert loop_of(found.nodes).trips == 1
    assert found.notes == ("loop: no trip count in the text, taken as 1",)


def test_a_transfer_started_in_one_trip_and_waited_for_in_the_next() -> None:
    """A double-buffered loop: the done stands before the start, and both belong to one task."""
    state = "(s32[], f32[64], (f32[64], f32[128]))"
    nodes = program(
        f"""
  %a = f32[64]{{0}} parameter(0)
  %z = s32[] constant(0)
  %s = (f32[64], f32[128]) all-gather-start(%a), replica_groups={{{{0,1}}}}, dimensions={{0}}
  %init = {state} tuple(%z, %a, %s)
  %loop = {state} while(%init), condition=%cond, body=%body
  %last = (f32[64], f32[128]) get-tuple-element(%loop), index=2
  %d = f32[128]{{0}} all-gather-done(%last)
  ROOT %r = f32[128]{{0}} negate(%d)""",
        f"""
%body (p: {state}) -> {state} {{
  %p = {state} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[64]{{0}} get-tuple-element(%p), index=1
  %going = (f32[64], f32[128]) get-tuple-element(%p), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %d = f32[128]{{0}} all-gather-done(%going)
  %half = f32[64]{{0}} slice(%d), slice={{[0:64]}}
  %s = (f32[64], f32[128]) all-gather-start(%half), replica_groups={{{{0,1}}}}, dimensions={{0}}
  %n = f32[64]{{0}} negate(%x)
  ROOT %t = {state} tuple(%next, %n, %s)
}}

%cond (p: {state}) -> pred[] {{
  %p = {state} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(5)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}}
""",
    ).nodes
    loop = loop_of(nodes)
    start = position(loop.body, "s")
    assert loop.body[position(loop.body, "d")] == Wait("d", start, previous_trip=True)
    assert task(loop.body, "half").depends == ()  # the wait is what it rests on
    assert loop.depends == ()  # what is still going on does not hold the loop up
    assert nodes[position(nodes, "d")] == Wait("d", position(nodes, "loop"))


BRANCHES = """
%cheap (a: f32[64,64]) -> f32[64,64] {
  %a = f32[64,64]{1,0} parameter(0)
  ROOT %n = f32[64,64]{1,0} negate(%a)
}

%dear (a: f32[64,64]) -> f32[64,64] {
  %a = f32[64,64]{1,0} parameter(0)
  ROOT %d = f32[64,64]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_of_a_conditional_the_dear_branch_and_a_note() -> None:
    found = program(
        """
  %p = pred[] parameter(0)
  %a = f32[64,64]{1,0} parameter(1)
  %x = f32[64,64]{1,0} negate(%a)
  %y = f32[64,64]{1,0} exponential(%a)
  ROOT %c = f32[64,64]{1,0} conditional(%p, %x, %y), true_computation=%cheap, false_computation=%dear""",
        BRANCHES,
    )
    assert [node.name for node in found.nodes] == ["x", "y", "d"]
    assert task(found.nodes, "d").depends == (1,)
    assert found.notes == ("c: of 2 branches the most expensive, dear, is taken",)


def test_a_branch_runs_as_often_as_a_scope_says() -> None:
    found = program(
        """
  %p = pred[] parameter(0)
  %a = f32[64,64]{1,0} parameter(1)
  ROOT %c = f32[64,64]{1,0} conditional(%p, %a, %a), true_computation=%cheap, false_computation=%dear, metadata={op_name="jit(f)/taken_1_of_4/cond"}""",
        BRANCHES,
    )
    assert task(found.nodes, "d").share == 0.25
    assert found.notes == ()


def test_a_call_is_inlined() -> None:
    nodes = program(
        """
  %a = f32[64,64]{1,0} parameter(0)
  %x = f32[64,64]{1,0} negate(%a)
  %c = f32[64,64]{1,0} call(%x), to_apply=%dear
  ROOT %y = f32[64,64]{1,0} negate(%c)""",
        BRANCHES,
    ).nodes
    assert [node.name for node in nodes] == ["x", "d", "y"]
    assert task(nodes, "d").depends == (0,) and task(nodes, "y").depends == (1,)


def test_what_nobody_knows_is_kept_and_a_kernel_without_a_cost_is_told() -> None:
    found = program("""
  %a = f32[64]{0} parameter(0)
  %x = f32[64]{0} frobnicate(%a)
  %y = f32[64]{0} frobnicate(%x)
  ROOT %z = f32[64]{0} custom-call(%y), custom_call_target="mystery\"""")
    assert found.notes == (
        "z (mystery): a kernel without a cost estimate, its FLOPs are not counted",
    )
    assert [node.name for node in found.nodes] == ["x", "y", "z"]


def test_what_is_known_in_a_form_that_is_not_is_listed_and_kept() -> None:
    found = program("""
  %a = f32[64,64]{1,0} parameter(0)
  %d = f32[64,64]{1,0} dot(%a, %a), lhs_contracting_dims={7}
  ROOT %c = f32[64,64]{1,0} convolution(%d, %a), labels=bf_io->bf""")
    said = "in an unknown form, its work is not counted"
    assert found.notes == (f"d: dot {said}", f"c: convolution {said}")
    assert [node.name for node in found.nodes] == ["d", "c"] and task(found.nodes, "c").depends == (
        0,
    )


def test_a_module_that_is_not_scheduled_is_said_to_be() -> None:
    found = read_program(
        "HloModule m\n\nENTRY %main () -> f32[] {\n  ROOT %a = f32[] parameter(0)\n}\n", DIRS
    )
    assert found.notes == ("the module is not scheduled: its tasks are in the order of the text",)
    assert found.nodes == ()


STORED = sorted((Path(__file__).parents[1] / "data" / "hlo").glob("*.txt"))


def damage_line(text: str, draw: random.Random) -> str:
    """Take a line out, cut one, put another in its place, or change a word of one."""
    lines = text.split("\n")
    at = draw.randrange(len(lines))
    words = list(re.finditer(r"\d+|%[\w.\-]+|\w+", lines[at]))
    how = draw.randrange(4)
    if how == 0:
        del lines[at]
    elif how == 1:
        lines[at] = lines[at][: draw.randrange(len(lines[at]) + 1)]
    elif how == 2:
        lines[at] = draw.choice(lines)
    elif words:
        word = draw.choice(words)
        new = draw.choice(("", "7", "%x.1", "-1", "99999", "foo"))
        lines[at] = lines[at][: word.start()] + new + lines[at][word.end() :]
    return "\n".join(lines)


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.stem)
def test_a_damaged_program_is_read_or_refused(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    draw = random.Random(file.stem)
    refused = 0
    for _ in range(40):
        try:
            read_program(damage_line(text, draw), DIRS)
        except UserError:
            refused += 1
    assert refused < 40


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("  ROOT %g = f32[] get-tuple-element(%a)", "has no index"),
        ("  ROOT %g = f32[] get-tuple-element(), index=0", "has 0 operands"),
        ("  ROOT %w = (f32[]) while(%a), condition=%c, body=%gone", "gone.* is called and does"),
        ("  ROOT %c = f32[] conditional(%p, %a), branch_computations={%gone}", "does not stand"),
    ],
)
def test_what_a_cut_text_lacks_is_named(body: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        program("  %a = f32[] parameter(0)\n" + body)


@pytest.mark.parametrize("ours", [TypeError, AttributeError, KeyError, IndexError])
def test_a_mistake_of_our_own_is_no_damage_of_the_text(
    monkeypatch: pytest.MonkeyPatch, ours: type[Exception]
) -> None:
    def fails(*given: object, **more: object) -> None:
        raise ours("ours")

    monkeypatch.setattr(reader, "inherit", fails)
    with pytest.raises(ours, match="ours"):
        program("  %a = f32[] parameter(0)\n  ROOT %x = f32[] negate(%a)")


@pytest.mark.parametrize(("said", "matmuls"), [(nullcontext(), 8), (taken(2, 8), 2)])
def test_a_compiled_branch_runs_as_often_as_a_scope_says(
    said: AbstractContextManager[object], matmuls: int
) -> None:
    def body(x: jax.Array, is_due: jax.Array) -> tuple[jax.Array, None]:
        with said:
            return jax.lax.cond(is_due, lambda x: x @ x, lambda x: x, x), None

    def scanned(x: jax.Array, due: jax.Array) -> jax.Array:
        return jax.lax.scan(body, x, due)[0]

    given = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((8,), "bool")
    found = read_program(jax.jit(scanned).lower(*given).compile().as_text())
    assert sum(task.flops * count for task, count in walk(found.nodes)) == matmuls * 2 * 64**3
