"""Measured speeds: what a task is compared with, and the rate between and beyond the sizes that were timed."""

from __future__ import annotations

import pytest

from jaxpar.hlo.tasks import Kind, Task
from jaxpar.rehearse.cost.speeds import Sample, SpeedTable, sample

pytestmark = pytest.mark.quick


def dot(m: int, k: int, n: int, name: str = "dot", opcode: str = "dot") -> Task:
    return Task(name, opcode, "matmul", flops=2.0 * m * k * n, bytes=4, dtype="f32", shape=f"f32[{m},{n}]")


def fusion(size: int, name: str = "add_fusion", kind: Kind = "fusion") -> Task:
    return Task(name, "fusion", kind, bytes=size, dtype="f32", shape=f"f32[{size // 8}]")


def table(*timed: tuple[Task, float], **options: int) -> SpeedTable:
    samples = [sample(task, seconds) for task, seconds in timed]
    return SpeedTable(tuple(item for item in samples if item), **options)


def test_a_matmul_is_its_sizes_and_the_library_that_runs_it():
    task = Task("ynn_fusion.3", "fusion", "matmul", flops=2.0 * 12 * 4 * 64 * 32 * 16, dtype="f32",
                shape="f32[12,4,64,32]{3,2,1,0}")  # fmt: skip
    found = sample(task, 1.0)
    assert found is not None
    assert found.sort == "matmul ynn f32"
    assert [2**size for size in found.sizes] == [48, 64, 32, 16]
    assert sample(dot(64, 32, 16), 1.0) != sample(dot(32, 64, 16), 1.0)


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("ynn_fusion.7", "ynn"),
        ("multiply_tanh_fusion", "costly"),
        ("exponential_fusion.1", "costly"),
        ("add_fusion", "plain"),
    ],
)
def test_other_tasks_are_their_traffic_and_what_they_compute(name, made):
    assert sample(fusion(1 << 20, name), 1.0) == Sample(f"fusion {made} f32", (20.0, -1.0), 1 << 20)


def test_what_was_timed_takes_what_it_took():
    timed = [(dot(64 * i, 128, 128), 1e-4 * i) for i in (1, 4, 16)] + [(fusion(1 << 16), 3e-6), (fusion(1 << 24), 4e-3)]
    found = table(*timed)
    for task, seconds in timed:
        assert found.seconds(task) == pytest.approx(seconds, rel=0.02)


def test_between_two_sizes_the_rate_is_between_and_beyond_them_near_that_of_the_last():
    found = table((fusion(1 << 16), 2**16 / 8e10), (fusion(1 << 24), 2**24 / 1e10))
    seconds = found.seconds(fusion(1 << 20))
    assert seconds is not None
    assert 2**20 / 8e10 < seconds < 2**20 / 1e10
    assert found.seconds(fusion(1 << 30)) == pytest.approx(2**30 / 1e10, rel=0.8)


def test_devices_that_share_the_cores_take_as_many_times_longer():
    timed = (dot(64, 64, 64), 1e-4)
    assert table(timed).seconds(timed[0]) == pytest.approx(1e-4)
    assert table(timed, sharing=4).seconds(timed[0]) == pytest.approx(4e-4)


def test_a_sort_that_was_not_timed_takes_the_nearest_or_nothing():
    found = table((dot(64, 64, 64), 1e-4))
    bfloat16 = Task("dot", "dot", "matmul", flops=2.0 * 64**3, dtype="bf16", shape="bf16[64,64]")
    assert found.seconds(bfloat16) == pytest.approx(1e-4)
    assert found.seconds(dot(64, 64, 64, "ynn_fusion", "fusion")) == pytest.approx(1e-4)
    both = table((dot(64, 64, 64), 1e-4), (dot(64, 64, 64, "ynn_fusion", "fusion"), 9e-4))
    assert both.seconds(bfloat16) == pytest.approx(1e-4), "the same maker in another dtype is nearer than another maker"
    assert found.seconds(fusion(1 << 20)) is None
    assert found.seconds(Task("token", "after-all", "control")) is None


def test_nothing_is_learned_from_a_task_without_work_or_time():
    assert sample(Task("call", "custom-call", "kernel"), 1.0) is None
    assert sample(dot(8, 8, 8), 0.0) is None
    assert sample(dot(8, 8, 8), 1.0) == Sample("matmul dot f32", (0.0, 3.0, 3.0, 3.0), 1024.0)
