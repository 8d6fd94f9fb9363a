"""The cost of the tasks of a program of XLA:CPU, by the figures of the machine that runs it.

A task takes the longest of what its matmuls, its vector operations and its memory take, and the
time from one task to the next. The compiler splits a large fusion over threads, and libraries split
matmuls; anything else is one thread's. A call takes some time for each of its arrays on each
device.

Simulated devices share the processors. Where 8 devices run on 2 cores, all at the same task, each
has a quarter of a core, whatever threads it has. Where 2 run on 16, each has 8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from jaxpar.hlo.program.module import Module
from jaxpar.hlo.program.tasks import Collective, Program, Task, walk_paths
from jaxpar.hlo.work.vector_work import ALL_THREADS, VectorWork, vector_work
from jaxpar.rehearse.cost import COMPUTE, Cost, Costs
from jaxpar.rehearse.here import CpuFigures, rate_at
from jaxpar.rehearse.link_costs import CollectiveTime


def price_on_cpu(
    program: Program,
    module: Module,
    figures: CpuFigures,
    devices: int,
    collective_time: Callable[[Collective], CollectiveTime],
) -> tuple[Costs, tuple[str, ...]]:
    """Price every task of a program that runs on the processors of this machine.

    Args:
      module: the module that the program was read from.
      figures: what the processors do.
      devices: the simulated devices that the program runs on, all at once.
      collective_time: gives the seconds and lanes of one execution of a collective.

    Returns:
      The cost of one execution of every task, by its path; and notes on what was assumed.
    """
    share = figures.cores / devices
    work = vector_work(module)
    given = len(module.computations[module.entry].parameters)
    call = figures.call + figures.argument * given * devices
    notes: Counter[str] = Counter()
    if devices > figures.cores:
        notes[f"{devices} simulated devices share {figures.cores} cores"] += 1
    costs: Costs = {}
    for path, task, _ in walk_paths(program.nodes):
        if task.collective is not None:
            on_links = collective_time(task.collective)
            costs[path] = Cost(on_links.seconds, (COMPUTE, *on_links.resources))
            continue
        launch = figures.task / min(1.0, share)
        seconds = task_seconds(task, work.get(task.name, VectorWork()), figures, share)
        launch += call  # before the first task
        call = 0.0
        costs[path] = Cost(launch + seconds, (COMPUTE,), launch)
    return costs, tuple(notes)


def task_seconds(task: Task, work: VectorWork, figures: CpuFigures, share: float) -> float:
    """Return what one execution of a task takes, without the time that it waits to begin.

    Args:
      share: the cores that the device has for itself; below 1 where devices share a core.
    """
    threads = figures.cores if work.threads == ALL_THREADS else min(work.threads, figures.cores)
    used = min(float(threads), share)
    whole = figures.cores
    matmul = 0.0
    if task.flops:
        rates = figures.matmul_bfloat16 if task.dtype == "bf16" else figures.matmul_float32
        matmul = task.flops * whole / (rate_at(rates, task.flops) * min(share, whole))
    vector = work.simple / figures.simple + work.costly / figures.costly
    vector += work.strided / figures.strided
    moved = 0.0
    if task.bytes:
        moved = task.bytes * whole / (rate_at(figures.memory, task.bytes) * min(share, whole))
    return max(matmul, vector / used, moved)
