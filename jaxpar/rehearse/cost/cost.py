"""The cost of a task is its seconds, and the lanes of the device that it holds meanwhile.

The compiler's own cycles decide where it gives them; otherwise the longer of arithmetic and memory traffic does (the
roofline of Williams, Waterman and Patterson, CACM 52(4), 2009). A function prices the collectives, since only a target
knows its links.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from jaxpar.base.hardware import Hardware, PeakFlops
from jaxpar.hlo.tasks import Collective, Loop, Node, Program, Task
from jaxpar.rehearse.link_costs import CollectiveTime

COMPUTE, DMA, SIDE, HOST = "compute", "dma", "side", "host"
"""The lanes of every device; `side` is for asynchronous work that is not a copy. The network model names the lanes of
the links: `ici:x`, `nvlink`, `dcn`."""

Path = tuple[int, ...]
"""Where a node stands: its position in the program, then in the loop's body, and so on."""

Basis = Literal["cycles", "flops", "bytes", "link", "host link", "none"]
"""What a duration is based on; `none` = the task does not state its work, and is assumed to cost nothing."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one execution of a task."""

    seconds: float
    lanes: tuple[str, ...]
    """The lanes it holds from start to finish. A synchronous collective holds compute as well as its links."""
    basis: Basis
    launch: float = 0.0
    """The part of `seconds` before its work begins."""


@dataclass(frozen=True)
class Costs:
    """The cost of every task of one program."""

    of: dict[Path, Cost]
    notes: tuple[str, ...] = ()
    """The assumptions that were made, each listed once: `no peak for f64: bytes only`."""


def price(program: Program, hardware: Hardware, collective_time: Callable[[Collective], CollectiveTime]) -> Costs:
    """Find the seconds and lanes of every task, by its path: the compiler's cycles come first, then the roofline."""
    notes: Counter[str] = Counter()
    of = {path: _cost(task, hardware, collective_time, notes) for path, task, _ in tasks(program.nodes)}
    return Costs(of, tuple(f"{note} ({count} x)" if count > 1 else note for note, count in notes.items()))


def tasks(nodes: tuple[Node, ...], times: int = 1, path: Path = ()) -> Iterator[tuple[Path, Task, int]]:
    """Yield every task with its path and how often it runs in one step."""
    for i, node in enumerate(nodes):
        if isinstance(node, Loop):
            yield from tasks(node.body, times * node.trips, (*path, i))
        elif isinstance(node, Task):
            yield (*path, i), node, times


def _cost(
    task: Task, hardware: Hardware, collective_time: Callable[[Collective], CollectiveTime], notes: Counter[str]
) -> Cost:
    """Find the cost of one task, and count in `notes` what had to be assumed."""
    if task.collective is not None:
        on_links = collective_time(task.collective)
        return Cost(on_links.seconds, _lanes(task, *on_links.resources), "link")
    if task.kind == "host_copy":
        if task.bytes and not hardware.host_link_bandwidth:
            notes["no figure for the host link: its copies are taken to cost nothing"] += 1
        seconds = hardware.host_link_latency + task.bytes / (hardware.host_link_bandwidth or math.inf)
        return Cost(seconds, _lanes(task, HOST), "host link" if seconds else "none")
    if task.cycles is not None and hardware.clock_hz:
        return Cost(task.cycles / hardware.clock_hz, _lanes(task, *_beside(task)), "cycles")
    if task.kind == "control" and not task.flops and not task.bytes:
        return Cost(0.0, _lanes(task), "none")
    return _roofline(task, hardware, notes)


def _roofline(task: Task, hardware: Hardware, notes: Counter[str]) -> Cost:
    """Take the longer of arithmetic at its peak and traffic at the memory's bandwidth, and add a launch."""
    arithmetic = 0.0
    if task.flops:
        peak = _peak(hardware.peak_flops, task.dtype)
        if not peak:
            notes[f"no peak for {task.dtype or 'an unknown dtype'}: its arithmetic is taken to cost nothing"] += 1
        arithmetic = task.flops / (peak or math.inf)
    if task.bytes and not hardware.hbm_bandwidth:
        notes["no figure for the memory's bandwidth: traffic is taken to cost nothing"] += 1
    traffic = task.bytes / (hardware.hbm_bandwidth or math.inf)
    if not task.flops and not task.bytes:
        notes[f"{task.opcode} says nothing of its work: taken to cost a launch"] += 1
    basis: Basis = "flops" if arithmetic > traffic else "bytes" if traffic else "none"
    launch = 0.0 if task.asynchronous else hardware.launch_overhead
    return Cost(max(arithmetic, traffic) + launch, _lanes(task, *_beside(task)), basis, launch)


def _lanes(task: Task, *lanes: str) -> tuple[str, ...]:
    """Return the lanes of a task: an asynchronous one holds only its own, any other holds compute as well."""
    return tuple(lanes) if task.asynchronous else (COMPUTE, *lanes)


def _beside(task: Task) -> tuple[str, ...]:
    """Return the lane of an asynchronous task that is no collective: copies use the DMA engines, all else `side`."""
    return () if not task.asynchronous else (DMA,) if task.kind == "copy" else (SIDE,)


_FIELD_OF_DTYPE = {"bf16": "bfloat16", "f16": "bfloat16", "bfloat16": "bfloat16", "float16": "bfloat16",
                   "f32": "float32", "float32": "float32", "s8": "int8", "u8": "int8", "int8": "int8"}  # fmt: skip


def _peak(peaks: PeakFlops, dtype: str) -> float:
    """Return the peak FLOP/s of matmuls of this dtype (as HLO or JAX writes it); 0 where there is no figure.

    Where float32 has no figure, as on TPUs, XLA multiplies in bfloat16 passes: one pass at jax's default precision.
    """
    name = "float8" if dtype.startswith(("f8", "float8")) else _FIELD_OF_DTYPE.get(dtype, "")
    peak = getattr(peaks, name, 0.0)
    return peak or (peaks.bfloat16 if name == "float32" else 0.0)
