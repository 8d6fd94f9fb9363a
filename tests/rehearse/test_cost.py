"""What a task costs: the compiler's cycles first, else the roofline; links, host and DMA engines on
their own lanes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from jaxpar.base.hardware import Hardware, PeakFlops
from jaxpar.base.kernel_work import AttentionWork
from jaxpar.base.prices import AttentionShare, Prices
from jaxpar.hlo.program.tasks import Collective, Loop, Program, Task, Wait
from jaxpar.rehearse.cost import Cost, Costs, price
from jaxpar.rehearse.program_report import _main_dtype
from jaxpar.rehearse.targets import load_target
from jaxpar.rehearse.timeline import TaskTime

TPU = load_target("v5p-64").hardware
GPU = Hardware(
    hbm_bandwidth=2e12,
    host_link_bandwidth=5e10,
    host_link_latency=1e-5,
    launch_overhead=1e-6,
    peak_flops=PeakFlops(float32=4e14, bfloat16=1e15, float8=2e15, int8=2e15),
)
GATHER = Task(
    "ag",
    "all-gather",
    "collective",
    bytes=1 << 20,
    collective=Collective("all-gather", ((0, 1),), 1 << 20, "bf16"),
)


class Moved(NamedTuple):
    seconds: float
    resources: tuple[str, ...]


def links(collective: Collective) -> Moved:
    return Moved(collective.bytes / 1e11, ("ici:x",))


def costs(*nodes: Task | Loop | Wait, hardware: Hardware = GPU) -> tuple[Costs, tuple[str, ...]]:
    return price(Program("test", nodes), hardware, links)  # type: ignore[arg-type]


def cost(task: Task, hardware: Hardware = GPU) -> Cost:
    return costs(task, hardware=hardware)[0][0,]


def dot(**changes: object) -> Task:
    values = {"flops": 1e12, "bytes": 1_000_000, "dtype": "bf16"} | changes
    return Task("dot", "dot", "matmul", **values)  # type: ignore[arg-type]


PRICED = replace(
    GPU,
    launch_overhead=0.0,
    prices=Prices(
        matmul=0.8,
        matmul_float32=0.5,
        memory=0.75,
        copies=0.9,
        host_link=0.8,
        attention=(AttentionShare("cudnn", 64, 1024, 0.4, 0.25),),
    ),
)


@pytest.mark.parametrize(
    ("task", "seconds"),
    [
        (dot(), 1e12 / 0.8e15),
        (dot(dtype="f32"), 1e12 / 2e14),
        (dot(flops=1e9, bytes=3 * 10**9), 2e-3),  # it waits for memory, as fusions do
        (Task("sum", "fusion", "fusion", bytes=3 * 10**9), 2e-3),
        (Task("copy", "copy", "copy", bytes=9 * 10**9), 5e-3),
        (Task("offload", "copy", "host_copy", bytes=4 * 10**9), 0.1 + 1e-5),
    ],
)
def test_a_chip_is_priced_by_what_programs_reach_of_it(task: Task, seconds: float):
    assert cost(task, PRICED).seconds == pytest.approx(seconds)


def attention(kernel: str, matmuls: int, stands_for: str = "") -> Task:
    work = AttentionWork(kernel, 64, 1024, matmuls * 1e12, matmuls, stands_for)
    flops = 1.2 * matmuls * 1e12  # its tiles compute more than the mask shows
    return Task("core", "custom-call", "kernel", flops=flops, dtype="bf16", attention=work)


def test_attention_is_priced_by_the_table_of_its_kernel():
    assert cost(attention("cudnn", 2), PRICED).seconds == pytest.approx(2e12 / 0.4e15)
    assert cost(attention("cudnn", 5), PRICED).seconds == pytest.approx(5e12 / 0.25e15)
    unknown = cost(attention("pallas_gpu", 2), PRICED).seconds
    assert unknown == pytest.approx(2.4e12 / 1e15), "without figures, all of it at the peak"


def test_a_kernel_that_stands_in_takes_the_time_of_the_one_that_runs():
    """The two halves of its backward, with seven matmuls, take together what five take."""
    forward = cost(attention("pallas_gpu", 2, "cudnn"), PRICED)
    assert forward == cost(attention("cudnn", 2), PRICED)
    halves = [cost(attention("pallas_gpu", n, "cudnn"), PRICED).seconds for n in (3, 4)]
    assert sum(halves) == pytest.approx(cost(attention("cudnn", 5), PRICED).seconds)


def test_heads_that_fill_half_of_a_matrix_unit_take_twice_as_long():
    wide = load_target("v6e-8").hardware
    assert (TPU.matrix_unit, wide.matrix_unit) == (128, 256)
    task = Task(
        "splash",
        "custom-call",
        "kernel",
        flops=918e9,
        dtype="bf16",
        attention=AttentionWork("splash", 128, 4096, 918e9),
    )
    assert cost(task, TPU).seconds == pytest.approx(2e-3)
    assert cost(task, wide).seconds == pytest.approx(2e-3)  # a peak twice as high, half of it
    unknown = replace(task, attention=None)
    assert cost(unknown, wide).seconds == pytest.approx(1e-3)


@pytest.mark.parametrize("kind", ["copy", "fusion"])
def test_cycles_of_what_waits_for_memory_are_at_most_the_memorys_time(kind):
    wait = Task("c", kind, kind, bytes=2_765_000_000, cycles=17_500_000)
    assert cost(wait, TPU).seconds == pytest.approx(1e-3 / 0.9)
    assert cost(replace(wait, cycles=1_000_000), TPU).seconds == pytest.approx(1e6 / 1.75e9)
    on_the_chip = replace(wait, bytes=0)
    assert cost(on_the_chip, TPU).seconds == pytest.approx(1e-2), "nothing of it is in memory"
    matmul = replace(wait, kind="matmul", flops=1.0)
    assert cost(matmul, TPU).seconds == pytest.approx(1e-2)


def test_what_runs_beside_compute_on_a_gpu_takes_from_it():
    hidden = replace(PRICED, launch_overhead=1e-6, prices=replace(PRICED.prices, hidden=0.25))
    gather = replace(GATHER, asynchronous=True)
    found = cost(gather, hidden)
    assert found.slows == pytest.approx(0.25 * (1 << 20) / 1e11)
    assert not cost(GATHER, hidden).slows, "nothing runs beside it"
    copy = Task("apart", "fusion-start", "copy", bytes=9 * 10**9, asynchronous=True)
    assert cost(copy, hidden).slows == cost(copy, hidden).seconds == pytest.approx(5e-3)
    assert not cost(replace(copy, cycles=7), TPU).slows, "a TPU has engines for it"


def test_the_compilers_cycles_come_first():
    found = cost(dot(cycles=1_750_000), TPU)
    assert found == Cost(pytest.approx(1e-3), ("compute",))


@pytest.mark.parametrize(
    ("dtypes", "hardware", "main"),
    [
        (("f32",), GPU, "float32"),
        (("f32",), TPU, "bfloat16"),  # which multiplies float32 in passes of bfloat16
        (("bf16", "f32"), GPU, "bfloat16"),
        ((), GPU, "bfloat16"),
    ],
)
def test_hfu_is_of_the_peak_of_most_flops(dtypes: tuple[str, ...], hardware: Hardware, main: str):
    rows = [
        TaskTime(
            dot(dtype=dtype, flops=1e12 / (place + 1)),
            Cost(1.0, ()),
            1,
            0.0,
        )
        for place, dtype in enumerate(dtypes)
    ]
    assert _main_dtype(rows, hardware.peak_flops) == main


@pytest.mark.parametrize(
    ("dtype", "peak"),
    [
        ("bf16", 1e15),
        ("f16", 1e15),
        ("f32", 4e14),
        ("f8e4m3fn", 2e15),
        ("s8", 2e15),
    ],
)
def test_arithmetic_at_the_peak_of_its_dtype(dtype, peak):
    assert cost(dot(dtype=dtype)) == Cost(
        pytest.approx(1e12 / peak + 1e-6), ("compute",), launch=1e-6
    )


def test_traffic_where_it_takes_longer():
    assert cost(dot(flops=1e9, bytes=10**9)) == Cost(
        pytest.approx(5e-4 + 1e-6), ("compute",), launch=1e-6
    )


def test_a_tpu_kernel_without_cycles_is_an_estimate():
    kernel = Task("attention", "custom-call", "kernel", flops=918e9, dtype="bf16")
    found, _ = costs(
        Loop("layers", 10, (dot(cycles=1_750_000), kernel)),
        hardware=TPU,
    )
    assert [found[0, i].seconds for i in (0, 1)] == [pytest.approx(0.001), pytest.approx(0.002)]


def test_float32_without_a_figure_is_multiplied_in_bfloat16():
    assert cost(dot(dtype="f32"), TPU).seconds == pytest.approx(1e12 / 459e12)


def test_collectives_are_priced_by_the_network_and_block_compute_unless_asynchronous():
    assert cost(GATHER) == Cost(
        pytest.approx((1 << 20) / 1e11),
        ("compute", "ici:x"),
    )
    started = Task(
        "ag",
        "all-gather-start",
        "collective",
        collective=GATHER.collective,
        asynchronous=True,
        cycles=7,
    )
    assert cost(started, TPU) == Cost(
        pytest.approx((1 << 20) / 1e11),
        ("ici:x",),
    )


@pytest.mark.parametrize(
    ("asynchronous", "lanes"),
    [
        (True, ("host",)),
        (False, ("compute", "host")),
    ],
)
def test_host_copies_take_the_host_link(asynchronous, lanes):
    task = Task("offload", "copy", "host_copy", bytes=5 * 10**9, asynchronous=asynchronous)
    assert cost(task) == Cost(pytest.approx(0.1 + 1e-5), lanes)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_the_host_computes_takes_its_memory_and_its_processors(asynchronous):
    """And the link, for what lies on the device; without figures it is as fast as the link."""
    known = replace(GPU, host_memory_bandwidth=1e10, host_flops=1e12)
    task = Task(
        "update",
        "custom-call",
        "host_compute",
        flops=1e12,
        bytes=2 * 10**10,
        asynchronous=asynchronous,
    )
    begin = () if asynchronous else ("compute",)
    assert cost(task, known) == Cost(pytest.approx(2.0), (*begin, "host compute"))
    busy = replace(task, flops=3e12, link_bytes=5 * 10**10)
    link = known.host_link_latency + 5e10 / known.host_link_bandwidth
    assert cost(busy, known) == Cost(pytest.approx(3.0 + link), (*begin, "host compute", "host"))
    _, notes = costs(task)
    assert notes == ("no figure for the host's memory: it is taken to be as fast as the host link",)


def test_copies_beside_compute_have_a_lane_of_their_own():
    copy = Task("prefetch", "copy-start", "copy", bytes=2 * 10**9, asynchronous=True)
    assert cost(copy) == Cost(pytest.approx(1e-3), ("dma",), slows=pytest.approx(1e-3))
    assert cost(
        Task("apart", "async-start", "fusion", bytes=2 * 10**9, asynchronous=True)
    ).lanes == ("side",)


def test_what_had_to_be_assumed_is_said_once_with_its_count():
    found, notes = costs(
        dot(dtype="f64"),
        dot(dtype="f64"),
        Task("call", "custom-call", "kernel"),
    )
    assert notes == (
        "no peak for f64: its arithmetic is taken to cost nothing (2 x)",
        "custom-call says nothing of its work: taken to cost a launch",
    )
    assert [found[i,].seconds - 1e-6 for i in range(3)] == pytest.approx(
        [1e6 / 2e12, 1e6 / 2e12, 0.0]
    )
    nothing_known, notes = costs(
        dot(), Task("out", "copy", "host_copy", bytes=8), hardware=Hardware()
    )
    assert len(notes) == 3
    assert sum(item.seconds for item in nothing_known.values()) == 0.0


def test_control_costs_nothing_and_says_nothing():
    found, notes = costs(Task("token", "after-all", "control"))
    assert found[0,].seconds == 0.0
    assert notes == ()
