"""The figures of the devices of this machine, in the form in which a target has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax

from jaxpar.base.errors import UserError
from jaxpar.base.hardware import Hardware, Interconnect, PeakFlops, Protocol, chip_of
from jaxpar.base.machine import machine_memory
from jaxpar.rehearse.here.figures import CpuFigures

_LINK = "memory"


def hardware_of_cpus(figures: CpuFigures, count: int) -> Hardware:
    """Give each of some simulated devices its share of the processors and of the memory.

    Args:
      figures: what the processors do, all together.
      count: the devices that run at once.
    """
    rates = figures.alone if count == 1 else figures.together
    share = 1 / count
    bandwidth = share * rates.memory[-1][1]  # of arrays beyond every cache
    return Hardware(
        chip="CPU",
        device_kinds=("cpu",),
        chips=count,
        chips_per_host=count,
        hbm_bytes=machine_memory() // count,
        hbm_bandwidth=bandwidth,
        host_link_bandwidth=bandwidth,
        host_memory_bandwidth=bandwidth,
        host_flops=share * rates.simple,
        launch_overhead=count / rates.tasks,
        peak_flops=PeakFlops(
            float32=share * rates.best("matmul_float32"),
            bfloat16=share * rates.best("matmul_bfloat16"),
        ),
        ici=Interconnect(
            kind="switch",
            shape=(count,),
            wraps=(True,),
            links=1,
            link_bandwidth=figures.collective_bandwidth,
        ),
        protocols=(Protocol(_LINK, start=figures.collective_start),),
    )


def chip_here(devices: Sequence[jax.Device]) -> tuple[str, Hardware]:
    """Find the name and the figures of the GPUs of this machine.

    Raises:
      UserError: the devices are TPUs, whose slice has a name, or a GPU without a file in
        `jaxpar.meshes.chips`.
    """
    kind = devices[0].device_kind
    if devices[0].platform != "gpu":
        raise UserError(
            f"target here: {kind} is no CPU or GPU: name its slice, as in v5e-8 (docs/targets.md)"
        )
    chip = chip_of(kind)
    if chip is None:
        raise UserError(
            f"target here: there are no figures of {kind}: a file in meshes/chips has them"
        )
    count = len(devices)
    ici = replace(chip.hardware.ici, shape=(count,), wraps=(True,))
    return chip.hardware.chip, replace(chip.hardware, chips=count, ici=ici)
