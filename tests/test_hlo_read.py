"""Programs as task graphs: order, dependencies, waits, loops, branches; excerpts of what the compilers really write."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpar.hlo.read import read_program
from jaxpar.hlo.tasks import Collective, Loop, Node, Program, Task, Wait, walk

pytestmark = pytest.mark.quick

DATA = Path(__file__).parent / "data" / "hlo"
DIRS = (("/repo/models", "models"), ("/repo/jaxpar", "jaxpar"))


def program(body: str, computations: str = "") -> Program:
    header = "HloModule test, is_scheduled=true, num_partitions=2"
    return read_program(f"{header}\n{computations}\nENTRY %main () -> f32[] {{\n{body}\n}}\n", DIRS)


def excerpt(name: str, **options) -> Program:
    return read_program((DATA / f"{name}.txt").read_text(), DIRS, **options)


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
        "dot": "matmul", "add": "fusion", "transpose": "copy", "next": "control", "reduce": "collective",
        "fetched": "host_copy", "gemm": "matmul", "pallas": "kernel",
    }  # fmt: skip


def test_a_task_says_what_it_costs() -> None:
    (found,) = program("""
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,16]{1,0} parameter(1)
  ROOT %d = f32[64,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, """
        """backend_config={"window_config":{"estimated_cycles":"1234"}}""").nodes  # fmt: skip
    assert isinstance(found, Task)
    assert (found.flops, found.bytes, found.cycles) == (2 * 64 * 32 * 16, 64 * 32 * 2 + 32 * 16 * 2 + 64 * 16 * 4, 1234)
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
    assert start.asynchronous and start.collective == Collective("all-gather", ((0, 1),), 512, "f32")
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


def test_a_loop_with_what_it_carries_and_what_it_needs() -> None:
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
    assert loop.carried == ((0, 0), (1, 2))  # the counter needs itself, m needs n of the trip before
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
    assert (position(loop.body, "half"), start) in loop.carried
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


def test_what_nobody_knows_is_listed_and_kept() -> None:
    found = program("""
  %a = f32[64]{0} parameter(0)
  %x = f32[64]{0} frobnicate(%a)
  %y = f32[64]{0} frobnicate(%x)
  ROOT %z = f32[64]{0} custom-call(%y), custom_call_target="mystery\"""")
    assert found.unknown == {"custom-call mystery": 1, "frobnicate": 2}
    assert [node.name for node in found.nodes] == ["x", "y", "z"]


def test_what_is_known_in_a_form_that_is_not_is_listed_and_kept() -> None:
    found = program("""
  %a = f32[64,64]{1,0} parameter(0)
  %d = f32[64,64]{1,0} dot(%a, %a), lhs_contracting_dims={7}
  ROOT %c = f32[64,64]{1,0} convolution(%d, %a), labels=bf_io->bf""")
    assert found.unknown == {"convolution in an unknown form": 1, "dot in an unknown form": 1}
    assert [node.name for node in found.nodes] == ["d", "c"] and task(found.nodes, "c").depends == (0,)


def test_a_module_that_is_not_scheduled_is_said_to_be() -> None:
    found = read_program("HloModule m\n\nENTRY %main () -> f32[] {\n  ROOT %a = f32[] parameter(0)\n}\n", DIRS)
    assert found.notes == ("the module is not scheduled: its tasks are in the order of the text",)
    assert found.nodes == ()


# Excerpts of compiled programs.


def test_the_tpu_compilers_loop_around_a_matmul() -> None:
    """Matmul and reduce-scatter over 8 devices, in both directions of the ring: transfers beside matmuls."""
    found = excerpt("tpu_windowed_loop")
    loop = loop_of(found.nodes)
    assert loop.trips == 2 and not found.unknown
    transfers = [node for node in loop.body if isinstance(node, Task) and node.collective]
    assert len(transfers) == 4 and all(node.asynchronous for node in transfers)
    first = transfers[0].collective
    assert first is not None and first.kind == "ppermute" and first.bytes == 1024 * 4096 * 2
    assert len(first.groups) == 8 and {source for source, _ in first.groups} == set(range(8))
    matmul = task(loop.body, "fusion.37")
    assert (matmul.kind, matmul.flops, matmul.cycles) == ("matmul", 2 * 2 * 1024 * 4096 * 2048, 272304)
    done = position(loop.body, "collective-permute-done")
    assert loop.body[done] == Wait("collective-permute-done", position(loop.body, "collective-permute-start"))
    assert position(loop.body, "collective-permute-start") < position(loop.body, "fusion.37") < done
    assert loop.carried  # the partial sums


def test_a_tpu_gather_that_goes_on_during_other_fusions() -> None:
    nodes = excerpt("tpu_async_fusion").nodes
    start, during, done = task(nodes, "async-collective-start.8"), task(nodes, "fusion.551"), nodes[-1]
    assert start.asynchronous and start.collective is not None
    assert (start.collective.kind, start.collective.bytes) == ("all-gather", 512 * 2 * 128 * 2)
    assert start.collective.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert during.kind == "matmul" and during.collective is None and during.depends == ()
    assert done == Wait("async-collective-done.8", 0)
    assert start.place.scope == during.place.scope == "block/attention"
    assert during.place.source == "models/llama.py:66"


def test_prefetches_into_the_chips_memory_are_asynchronous_copies() -> None:
    found = excerpt("tpu_slices_of_weights")
    starts = [node for node in found.nodes if isinstance(node, Task) and node.asynchronous]
    assert [node.kind for node in starts] == ["copy"] * 3 and not found.unknown
    assert [node.bytes for node in starts] == [128 * 1024 * 4] * 3
    convert = task(found.nodes, "convert.181")
    assert convert.depends == (0, 1, 2) and convert.bytes == 0  # from VMEM to VMEM


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        ("tpu_host_copy", ["dynamic-update-slice-start.1", "dynamic-slice-start.1"]),
        ("gpu_host_copy", ["dynamic-update-slice-start.1"]),
    ],
)
def test_copies_to_and_from_the_host_move_one_layer(name: str, starts: list[str]) -> None:
    nodes = excerpt(name).nodes
    copies = [node for node in nodes if isinstance(node, Task) and node.kind == "host_copy"]
    assert [copy.name for copy in copies] == starts
    assert all(copy.asynchronous and copy.bytes == 1024 * 2048 * 2 for copy in copies)


def test_gathers_that_a_gpu_compiler_made_one() -> None:
    found = excerpt("gpu_all_gather")
    start = task(found.nodes, "all-gather-start.6")
    assert start.collective is not None
    assert (start.collective.dtype, start.collective.groups) == ("bf16", ((0, 2, 4, 6), (1, 3, 5, 7)))
    weights = 4 * (2 * 128 * 128 + 2 * 128 * 256 + 3 * 128 * 1024) * 2
    assert start.collective.bytes == weights + 2 * 512 * 4  # and two norms
    assert start.place.scope == "block"  # all that the parts share


def test_a_ring_on_a_gpu() -> None:
    loop = loop_of(excerpt("gpu_ring").nodes)
    permute = task(loop.body, "collective-permute-start")
    assert loop.trips == 4 and permute.asynchronous and permute.collective is not None
    assert permute.collective.bytes == 1024 * 256 * 4 and len(permute.collective.groups) == 8
    assert sum(node.flops for node in loop.body if isinstance(node, Task)) == 2 * 2 * 1024 * 1024 * 256


def test_kernels_with_and_without_a_cost_estimate() -> None:
    with_cost = excerpt("tpu_kernel_cost")
    (kernel,) = with_cost.nodes
    assert isinstance(kernel, Task) and kernel.kind == "kernel" and not with_cost.notes
    assert (kernel.flops, kernel.bytes, kernel.dtype) == (2 * 256**3, 123456, "bf16")
    without = excerpt("tpu_kernel")
    splash = task(without.nodes, "splash_mha_fwd_residuals.1")
    assert splash.kind == "kernel" and splash.flops == 0 and splash.bytes > 3 * 2 * 4 * 1024 * 128 * 2
    assert without.notes == ("splash_mha_fwd_residuals.1: a kernel without a cost estimate, its FLOPs are not counted",)


def test_a_kernel_priced_by_who_knows_it() -> None:
    asked: list[tuple[str, int]] = []

    def cost(name: str, shapes: list[tuple[int, ...]]) -> float | None:
        asked.append((name, len(shapes)))
        return 123.0 if name.startswith("splash") else None

    found = excerpt("tpu_kernel", kernel_cost=cost)
    splash = task(found.nodes, "splash_mha_fwd_residuals.1")
    assert asked == [("splash_mha_fwd_residuals.1", 6)]
    assert (splash.flops, splash.dtype, found.notes) == (123.0, "bf16", ())
    stated = excerpt("tpu_kernel_cost", kernel_cost=cost).nodes[0]
    assert isinstance(stated, Task) and stated.flops == 2 * 256**3, "its own estimate stands"


def test_attention_by_cudnn_is_a_kernel_with_flops() -> None:
    forward, backward = excerpt("gpu_attention").nodes
    assert isinstance(forward, Task) and isinstance(backward, Task)
    assert forward.kind == backward.kind == "kernel" and backward.flops == 2.5 * forward.flops > 0
    assert (forward.place.phase, backward.place.phase) == ("forward", "backward")
    assert backward.depends == (0,)


@pytest.mark.parametrize(("slice_of", "group"), [(None, (0, 4)), ([s % 4 for s in range(16)], (0, 1))])
def test_between_tpu_slices(slice_of: list[int] | None, group: tuple[int, int]) -> None:
    """Partition 0 of slices 1 and 2: positions 0 and 4 slice after slice, 0 and 1 where the slices take turns."""
    found = excerpt("tpu_between_slices", slice_of=slice_of)
    send = task(found.nodes, "send")
    assert send.asynchronous and send.collective is not None and send.collective.groups[0] == group
    wait = found.nodes[position(found.nodes, "recv-done")]
    assert wait == Wait("recv-done", position(found.nodes, "send"))
    assert task(found.nodes, "all-gather.1").depends
    assert not any(node.name in ("recv", "send-done") for node in found.nodes)


@pytest.mark.parametrize("name", ["cpu_loops", "gpu_loops", "tpu_loops"])
def test_loops_and_a_branch_of_each_compiler(name: str) -> None:
    """18 trips and one (unknown) of two matmuls of 256 cubed, and the branch that has them too."""
    found = excerpt(name)
    assert sum(task.flops * count for task, count in walk(found.nodes)) == (18 + 1 + 1) * 2 * 2 * 256**3
    assert len(found.notes) == 2 and not found.unknown
