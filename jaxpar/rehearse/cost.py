"""The cost of a task is its seconds, and the lanes of the device that it holds meanwhile.

The compiler's own cycles decide where it gives them; otherwise the longer of arithmetic and memory
traffic does (the roofline of Williams, Waterman and Patterson, CACM 52(4), 2009). A function prices
the collectives, since only a target knows its links.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxpar.base.hardware import Hardware, PeakFlops
from jaxpar.base.kernel_work import AttentionWork
from jaxpar.hlo.program.tasks import (
    Collective,
    Loop,
    Node,
    Path,
    Program,
    Task,
    executions,
    walk_paths,
)
from jaxpar.rehearse.link_costs import CollectiveTime

COMPUTE = "compute"
DMA = "dma"
SIDE = "side"
HOST = "host"
HOST_COMPUTE = "host compute"
"""The lanes of every device: `side` is for asynchronous work that is not a copy, `host` for the
link to the host, `host compute` for what the host computes for this device. The network model names
the lanes of the links: `ici:x`, `nvlink`, `dcn`."""

_FIELD_OF_DTYPE = {
    "bf16": "bfloat16",
    "f16": "bfloat16",
    "f32": "float32",
    "s8": "int8",
    "u8": "int8",
}


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one execution of a task."""

    seconds: float
    lanes: tuple[str, ...]
    """The lanes that the task holds from start to finish. A synchronous collective holds compute as
    well as its links.
    """
    launch: float = 0.0
    """The part of `seconds` before its work begins."""
    slows: float = 0.0
    """The seconds that compute loses to an asynchronous task beside it."""


Costs = dict[Path, Cost]
"""The cost of every task of one program."""


def price(
    program: Program, hardware: Hardware, collective_time: Callable[[Collective], CollectiveTime]
) -> tuple[Costs, tuple[str, ...]]:
    """Price every task in seconds and lanes: by the compiler's cycles, or else by the roofline.

    Args:
      collective_time: gives the seconds and lanes of one execution of a collective.

    Returns:
      The cost of one execution of every task, by its path; and the assumptions that were made, each
      listed once: `no peak for f64: bytes only`.

    Raises:
      UserError: `collective_time` refuses a collective.
    """
    notes: Counter[str] = Counter()
    costs = {
        path: _cost(task, hardware, collective_time, notes)
        for path, task, _ in walk_paths(program.nodes)
    }
    return costs, tuple(
        f"{note} ({count} x)" if count > 1 else note for note, count in notes.items()
    )


def each_time(nodes: Sequence[Node], costs: Costs, times: int = 1, path: Path = ()) -> Costs:
    """Return what each task costs, in the mean, each time that its list of nodes runs: less than
    one execution where it is in a branch that is taken more rarely.

    Args:
      nodes: the nodes of a program, or of a loop's body.
      costs: the cost of one execution of each task.
      times: how often these nodes run in one step.
      path: where these nodes stand in the program.
    """
    found = dict(costs) if not path else Costs()
    for i, node in enumerate(nodes):
        here = (*path, i)
        if isinstance(node, Loop):
            found |= each_time(node.body, costs, times * node.trips, here)
        elif isinstance(node, Task) and node.share != 1:
            share = executions(node, times) / max(times, 1)
            cost = costs[here]
            found[here] = replace(
                cost,
                seconds=share * cost.seconds,
                launch=share * cost.launch,
                slows=share * cost.slows,
            )
    return found


def _cost(
    task: Task,
    hardware: Hardware,
    collective_time: Callable[[Collective], CollectiveTime],
    notes: Counter[str],
) -> Cost:
    """Find the cost of one task, and count in `notes` what had to be assumed."""
    compute = () if task.asynchronous else (COMPUTE,)
    if task.collective is not None:
        on_links = collective_time(task.collective)
        slows = hardware.prices.hidden * on_links.seconds if task.asynchronous else 0.0
        return Cost(on_links.seconds, (*compute, *on_links.resources), slows=slows)
    if task.kind == "host_copy":
        if task.bytes and not hardware.host_link_bandwidth:
            notes["no figure for the host link: its copies are taken to cost nothing"] += 1
        seconds = hardware.host_link_latency + task.bytes / _host_link(hardware)
        return Cost(seconds, (*compute, HOST))
    if task.kind == "host_compute":
        return _host_compute(task, hardware, compute, notes)
    lanes = compute or ((DMA,) if task.kind == "copy" else (SIDE,))
    if task.cycles is not None and hardware.clock_hz:
        return Cost(hardware.prices.compute * _by_cycles(task, task.cycles, hardware), lanes)
    if task.kind == "control" and not task.flops and not task.bytes:
        return Cost(0.0, compute)
    seconds = hardware.prices.compute * _roofline(task, hardware, notes)
    if task.asynchronous:
        # a GPU has kernels beside others, which take their share of its cores and its memory
        return Cost(seconds, lanes, slows=seconds if hardware.launch_overhead else 0.0)
    return Cost(seconds + hardware.launch_overhead, lanes, hardware.launch_overhead)


def _by_cycles(task: Task, cycles: int, hardware: Hardware) -> float:
    """Return the seconds of a task by the compiler's cycles.

    Those of copies and of fusions without a matmul are no times: a copy that waits for nothing but
    the memory may be given a quarter of its bandwidth. What the memory takes is the most that
    counts of them.
    """
    seconds = cycles / hardware.clock_hz
    if task.kind in ("copy", "fusion") and task.bytes and hardware.hbm_bandwidth:
        return min(seconds, task.bytes / _bandwidth(task, hardware))
    return seconds


def _bandwidth(task: Task, hardware: Hardware) -> float:
    """Return the bytes a second that a task gets of the device's memory."""
    share = hardware.prices.copies if task.kind == "copy" else hardware.prices.memory
    return share * hardware.hbm_bandwidth or math.inf


def _host_link(hardware: Hardware) -> float:
    """Return the bytes a second that copies to and from the host get."""
    return hardware.prices.host_link * hardware.host_link_bandwidth or math.inf


def _host_compute(
    task: Task, hardware: Hardware, compute: tuple[str, ...], notes: Counter[str]
) -> Cost:
    """Price what the host computes: one pass over its arrays, and the host link for those on the
    device.
    """
    link = _host_link(hardware)
    memory = hardware.host_memory_bandwidth
    if not memory:
        notes["no figure for the host's memory: it is taken to be as fast as the host link"] += 1
        memory = link
    seconds = max(task.bytes / memory, task.flops / (hardware.host_flops or math.inf))
    lanes = (*compute, HOST_COMPUTE)
    if task.link_bytes:
        seconds += hardware.host_link_latency + task.link_bytes / link
        lanes = (*lanes, HOST)
    return Cost(seconds, lanes)


def _roofline(task: Task, hardware: Hardware, notes: Counter[str]) -> float:
    """Return the longer of arithmetic and traffic in seconds, at the shares of the peak and of the
    memory's bandwidth that programs reach.
    """
    arithmetic = 0.0
    if task.flops:
        peak = _peak(hardware.peak_flops, task.dtype)
        if not peak:
            notes[
                f"no peak for {task.dtype or 'an unknown dtype'}: its arithmetic is taken to "
                "cost nothing"
            ] += 1
        arithmetic = _seconds_at(peak or math.inf, task, hardware)
    if task.bytes and not hardware.hbm_bandwidth:
        notes["no figure for the memory's bandwidth: traffic is taken to cost nothing"] += 1
    if not task.flops and not task.bytes:
        notes[f"{task.opcode} says nothing of its work: taken to cost a launch"] += 1
    return max(arithmetic, task.bytes / _bandwidth(task, hardware))


def _seconds_at(peak: float, task: Task, hardware: Hardware) -> float:
    """Return the seconds that a task's matmuls take on a chip of this peak."""
    prices = hardware.prices
    if task.attention is None:
        known = prices.matmul_float32 if peak_name(task.dtype) == "float32" else prices.matmul
        return task.flops / (peak * known)
    attention = task.attention
    row = prices.attention_share(
        attention.stands_for or attention.kernel, attention.head_dim, attention.keys
    )
    if row is not None:
        share = row.backward if attention.backward else row.forward
        return attention.needed_flops / (peak * share)
    return task.flops / (peak * _filled(attention, hardware))


def _filled(attention: AttentionWork, hardware: Hardware) -> float:
    """Return the share of a TPU's matrix unit that a head fills: of its columns in the sum of the
    values, and of its rows in the scores.
    """
    if not hardware.matrix_unit:
        return 1.0
    return min(1.0, attention.head_dim / hardware.matrix_unit)


def peak_name(dtype: str) -> str:
    """Return the field of `PeakFlops` for a dtype as HLO writes it; empty where there is none."""
    if dtype.startswith("f8"):
        return "float8"
    return _FIELD_OF_DTYPE.get(dtype, "")


def _peak(peaks: PeakFlops, dtype: str) -> float:
    """Return the peak FLOP/s of matmuls of this dtype, as HLO writes it; 0 where there is no
    figure.

    Where float32 has no figure, as on TPUs, XLA multiplies in bfloat16 passes: one pass at jax's
    default precision.
    """
    name = peak_name(dtype)
    return getattr(peaks, name, 0.0) or (peaks.bfloat16 if name == "float32" else 0.0)
