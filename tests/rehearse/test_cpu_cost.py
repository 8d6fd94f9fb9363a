"""The cost of tasks on this machine's processors, with invented figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up_cpu import FIGURES

from jaxpar.hlo.program.parse import parse_module
from jaxpar.hlo.program.tasks import Task
from jaxpar.hlo.read import read_program
from jaxpar.hlo.work.vector_work import ALL_THREADS, VectorWork
from jaxpar.rehearse.cpu_cost import price_on_cpu, task_seconds
from jaxpar.rehearse.here import hardware_of_cpus
from jaxpar.rehearse.link_costs import CollectiveTime

MATMUL = Task("dot", "dot", "matmul", flops=1e9, dtype="f32")
FUSION = Task("fusion", "fusion", "fusion", bytes=1_000, dtype="f32")
EVERY = VectorWork(threads=ALL_THREADS)


def work_seconds(task: Task, work: VectorWork, devices: int = 1) -> float:
    """What a task takes once it has begun."""
    return task_seconds(task, work, FIGURES, devices)[1]


@pytest.mark.parametrize(("devices", "seconds"), [(1, 0.01), (2, 0.02), (8, 0.08)])
def test_devices_share_the_cores_of_a_matmul(devices, seconds):
    assert work_seconds(MATMUL, EVERY, devices) == pytest.approx(seconds)


def test_a_dtype_has_its_own_rate():
    assert work_seconds(replace(MATMUL, dtype="bf16"), EVERY) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("narrowest", "seconds"),
    [(8, 0.04), (32, 0.04), (64, 0.016), (128, 0.01), (4096, 0.01), (0, 0.01)],
)
def test_a_narrow_matmul_is_slower(narrowest, seconds):
    work = EVERY._replace(narrowest=narrowest)
    assert work_seconds(MATMUL, work) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("threads", "devices", "seconds"),
    [
        (1, 1, 0.2),  # one thread cannot use the second core
        (2, 1, 0.1),
        (64, 1, 0.1),
        (ALL_THREADS, 1, 0.1),
        (2, 2, 0.2),  # two devices, each with a core
        (1, 2, 0.2),
        (1, 8, 0.8),
    ],
)
def test_threads_of_a_fusion(threads, devices, seconds):
    work = VectorWork(simple=1e9, costly=0.1e9, threads=threads)
    assert work_seconds(FUSION, work, devices) == pytest.approx(seconds)


def test_devices_that_are_fewer_than_the_cores_have_several_each():
    four = replace(FIGURES, cores=4)
    work = VectorWork(simple=1e9, threads=4)
    _, seconds = task_seconds(FUSION, work, four, 2)
    assert seconds == pytest.approx(0.1 / 2), "two threads of each device"


def test_the_longest_of_what_a_task_needs_decides():
    moved = replace(FUSION, bytes=10**9)
    assert work_seconds(moved, VectorWork(simple=1e3)) == pytest.approx(0.05)
    assert work_seconds(moved, VectorWork(strided=1e8)) == pytest.approx(0.2)


PROGRAM = """HloModule jit_step, is_scheduled=true

ENTRY %main (x: f32[200,200], w: f32[200,200]) -> f32[200,200] {
  %x = f32[200,200]{1,0} parameter(0)
  %w = f32[200,200]{1,0} parameter(1)
  %dot = f32[200,200]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %sum = f32[200,200]{1,0} all-reduce(%dot), replica_groups={{0,1}}, to_apply=%add
}
"""


def test_a_program_has_its_call_before_the_first_task():
    program = read_program(PROGRAM)
    module = parse_module(PROGRAM)
    times = CollectiveTime(0.5, 0.1, ("nvlink",))
    costs, notes = price_on_cpu(program, module, FIGURES, 4, lambda collective: times)
    matmul, collective = costs.values()
    call = 10e-6 + 2 * 4 * 2e-6
    assert matmul.launch == pytest.approx(call + 4 / 2e6)
    assert matmul.seconds - matmul.launch == pytest.approx(16e6 / 100e9 * 4)
    assert collective.seconds == 0.5 and "compute" in collective.lanes
    assert notes == ("4 simulated devices share 2 cores",)


def test_the_hardware_of_simulated_devices():
    one = hardware_of_cpus(FIGURES, 1)
    eight = hardware_of_cpus(FIGURES, 8)
    assert one.peak_flops.float32 == 100e9 and one.peak_flops.bfloat16 == 50e9
    assert eight.peak_flops.float32 == pytest.approx(100e9 / 8)
    assert eight.hbm_bytes == one.hbm_bytes // 8
    assert eight.launch_overhead == pytest.approx(8 / 2e6)
