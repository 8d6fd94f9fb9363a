"""The cost of the tasks of a program of XLA:CPU, by the figures of the machine that runs it.

A task takes the longest of what its matmuls, its vector operations and its memory take, and the
time from one task to the next. The compiler splits a large fusion over threads, and libraries split
matmuls; anything else is one thread's. A call takes some time for each of its arrays on each
device.

Simulated devices share the processors. As many as there are cores, or more, have the rates that
were measured with all of them at the same work, and each its share of these: of 8 devices on 2
cores, each an eighth. One device alone splits its larger tasks over all cores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from jaxpar.hlo.program.module import Module
from jaxpar.hlo.program.tasks import Collective, Program, Task, walk_paths
from jaxpar.hlo.work.vector_work import ALL_THREADS, VectorWork, vector_work
from jaxpar.rehearse.cost import COMPUTE, Cost, Costs
from jaxpar.rehearse.here import WIDE, CpuFigures, rate_at
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
        found = task_seconds(task, work.get(task.name, VectorWork()), figures, devices)
        launch, seconds = found
        launch += call  # before the first task
        call = 0.0
        costs[path] = Cost(launch + seconds, (COMPUTE,), launch)
    return costs, tuple(notes)


def task_seconds(
    task: Task, work: VectorWork, figures: CpuFigures, devices: int
) -> tuple[float, float]:
    """Return how long a task takes to begin, and what one execution takes then.

    Args:
      work: its elementwise work.
      devices: the devices that do the same at once.
    """
    if devices < figures.cores:
        rates = figures.alone
        threads = figures.cores if work.threads == ALL_THREADS else work.threads
        # a device has a part of the cores, and its threads run on no more than these
        vector_threads = min(threads, figures.cores / devices)
        tasks = rates.tasks
    else:
        rates = figures.together
        vector_threads = 1 / devices
        tasks = rates.tasks / devices
    matmul = 0.0
    if task.flops:
        rate = rates.matmul(task.dtype, task.flops, work.narrowest or WIDE)
        matmul = devices * task.flops / rate
    moved = 0.0
    if task.bytes:
        moved = devices * task.bytes / rate_at(rates.memory, task.bytes)
    vector = work.simple / rates.simple + work.costly / rates.costly
    if work.strided:
        vector += work.strided / rate_at(rates.strided, work.strided)
    return 1 / tasks, max(matmul, vector / vector_threads, moved)
