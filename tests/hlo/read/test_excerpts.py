"""Excerpts of what the compilers really write, as task graphs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxpar.base.kernel_work import AttentionWork, KernelWork
from jaxpar.hlo.program.tasks import Loop, Node, Program, Task, Wait, walk
from jaxpar.hlo.read import read_program

DATA = Path(__file__).parents[1] / "data" / "hlo"
DIRS = (("/repo/models", "models"), ("/repo/jaxpar", "jaxpar"))


def excerpt(name: str, **options: Any) -> Program:
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


def test_the_tpu_compilers_loop_around_a_matmul() -> None:
    """Matmul and reduce-scatter over 8 devices, in both directions of the ring: transfers beside
    matmuls.
    """
    found = excerpt("tpu_windowed_loop")
    loop = loop_of(found.nodes)
    assert loop.trips == 2
    transfers = [node for node in loop.body if isinstance(node, Task) and node.collective]
    assert len(transfers) == 4 and all(node.asynchronous for node in transfers)
    first = transfers[0].collective
    assert first is not None and first.kind == "ppermute" and first.bytes == 1024 * 4096 * 2
    assert len(first.groups) == 8 and {source for source, _ in first.groups} == set(range(8))
    matmul = task(loop.body, "fusion.37")
    assert (matmul.kind, matmul.flops, matmul.cycles) == (
        "matmul",
        2 * 2 * 1024 * 4096 * 2048,
        272304,
    )
    done = position(loop.body, "collective-permute-done")
    assert loop.body[done] == Wait(
        "collective-permute-done", position(loop.body, "collective-permute-start")
    )
    assert position(loop.body, "collective-permute-start") < position(loop.body, "fusion.37") < done


def test_a_tpu_gather_that_goes_on_during_other_fusions() -> None:
    nodes = excerpt("tpu_async_fusion").nodes
    start = task(nodes, "async-collective-start.8")
    during = task(nodes, "fusion.551")
    done = nodes[-1]
    assert start.asynchronous and start.collective is not None
    assert (start.collective.kind, start.collective.bytes) == ("all-gather", 512 * 2 * 128 * 2)
    assert start.collective.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert during.kind == "matmul" and during.collective is None and during.depends == ()
    assert done == Wait("async-collective-done.8", 0)
    assert start.origin.scope == during.origin.scope == "block/attention"
    assert during.origin.source == "models/llama.py:66"


def test_prefetches_into_the_chips_memory_are_asynchronous_copies() -> None:
    found = excerpt("tpu_slices_of_weights")
    starts = [node for node in found.nodes if isinstance(node, Task) and node.asynchronous]
    assert [node.kind for node in starts] == ["copy"] * 3
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
    assert (start.collective.dtype, start.collective.groups) == (
        "bf16",
        ((0, 2, 4, 6), (1, 3, 5, 7)),
    )
    weights = 4 * (2 * 128 * 128 + 2 * 128 * 256 + 3 * 128 * 1024) * 2
    assert start.collective.bytes == weights + 2 * 512 * 4  # and two norms
    assert start.origin.scope == "block"  # all that the parts share


def test_a_ring_on_a_gpu() -> None:
    loop = loop_of(excerpt("gpu_ring").nodes)
    permute = task(loop.body, "collective-permute-start")
    assert loop.trips == 4 and permute.asynchronous and permute.collective is not None
    assert permute.collective.bytes == 1024 * 256 * 4 and len(permute.collective.groups) == 8
    assert (
        sum(node.flops for node in loop.body if isinstance(node, Task)) == 2 * 2 * 1024 * 1024 * 256
    )


def test_kernels_with_and_without_a_cost_estimate() -> None:
    with_cost = excerpt("tpu_kernel_cost")
    (kernel,) = with_cost.nodes
    assert isinstance(kernel, Task) and kernel.kind == "kernel" and not with_cost.notes
    assert (kernel.flops, kernel.bytes, kernel.dtype) == (2 * 256**3, 123456, "bf16")
    without = excerpt("tpu_kernel")
    splash = task(without.nodes, "splash_mha_fwd_residuals.1")
    assert (
        splash.kind == "kernel" and splash.flops == 0 and splash.bytes > 3 * 2 * 4 * 1024 * 128 * 2
    )
    assert without.notes == (
        "splash_mha_fwd_residuals.1 (tpu_custom_call): a kernel without a cost estimate, its "
        "FLOPs are not counted",
    )


def test_a_kernel_priced_by_who_knows_it() -> None:
    asked: list[tuple[str, str, int]] = []
    attention = AttentionWork("splash", 128, 1024, 123.0)

    def cost(
        name: str, path: str, shapes: list[tuple[int, ...]], stated: Mapping[str, object]
    ) -> KernelWork | None:
        asked.append((name, path.rpartition("/")[2], len(shapes)))
        if stated:
            return KernelWork(7.0)
        return KernelWork(123.0, attention) if name.startswith("splash") else None

    found = excerpt("tpu_kernel", kernel_cost=cost)
    splash = task(found.nodes, "splash_mha_fwd_residuals.1")
    assert asked == [("splash_mha_fwd_residuals.1", "pallas_call", 6)]
    assert (splash.flops, splash.dtype, found.notes) == (123.0, "bf16", ())
    assert splash.attention == attention
    stated = excerpt("tpu_kernel_cost", kernel_cost=cost).nodes[0]
    assert isinstance(stated, Task) and stated.flops == 2 * 256**3, "its own estimate stands"


def test_attention_by_cudnn_is_a_kernel_with_flops() -> None:
    forward, backward = excerpt("gpu_attention").nodes
    assert isinstance(forward, Task) and isinstance(backward, Task)
    assert forward.kind == backward.kind == "kernel" and backward.flops == 2.5 * forward.flops > 0
    assert (forward.origin.phase, backward.origin.phase) == ("forward", "backward")
    assert forward.attention and backward.attention
    assert (forward.attention.kernel, forward.attention.backward) == ("cudnn", False)
    assert (backward.attention.matmuls, backward.attention.flops) == (5, backward.flops)
    assert backward.depends == (0,)


@pytest.mark.parametrize(
    ("slice_of", "group"),
    [
        ([s // 4 for s in range(16)], (0, 4)),
        ([s % 4 for s in range(16)], (0, 1)),
    ],
)
def test_between_tpu_slices(slice_of: list[int], group: tuple[int, int]) -> None:
    """Partition 0 of slices 1 and 2: positions 0 and 4 slice after slice, 0 and 1 where the slices
    take turns.
    """
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
    assert (
        sum(task.flops * count for task, count in walk(found.nodes))
        == (18 + 1 + 1) * 2 * 2 * 256**3
    )
    assert len(found.notes) == 2
