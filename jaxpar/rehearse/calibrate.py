"""Calibration measures how fast this machine is, task by task.

It runs small training steps for half a minute, timed by JAX's own profiler. The result is kept for this machine and
this version of JAX, and lets `--target here` rehearse with measured speeds. It was made for CPUs; the steps and the
profiler are the same on a GPU.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.base.errors import UserError
from jaxpar.base.hardware import Hardware, Interconnect, PeakFlops, Protocol
from jaxpar.base.runtime import cache_folder, write_whole
from jaxpar.rehearse.cost.probes import PROBES, initial, training_step
from jaxpar.rehearse.cost.speeds import Sample, SpeedTable, sample
from jaxpar.rehearse.cost.stopwatch import Instruction, Ready, fastest, ready_step, time_once, warm

ROUNDS = 8
"""How many rounds the steps run; the fastest execution of every task counts, whatever else the machine did."""
CHAIN = 200


@dataclass(frozen=True)
class Calibration:
    """The speeds that were measured on one machine."""

    machine: dict[str, str]
    """The processor, cores and versions of that machine, as `machine()` returns them there."""
    samples: tuple[Sample, ...]
    launch: float
    """The seconds between two tasks."""
    devices: int = 1
    """How many devices took part in the measured collectives."""
    collective_start: float = 0.0
    """The seconds that a collective of hardly any bytes takes."""
    collective_bandwidth: float = 0.0
    """The bytes/s that one device sends in a collective of many bytes; 0 = not measured, as there is one device."""

    def speeds(self, devices: int = 1) -> SpeedTable:
        """Return the table for `jaxpar.rehearse.cost.cost.price`, for a program on so many devices of this machine.

        Simulated devices share the cores, so each task takes `devices` times as long.
        """
        return SpeedTable(self.samples, devices if self.machine["platform"] == "cpu" else 1)

    def hardware(self, known: Hardware) -> Hardware:
        """Return the known figures of a device of this machine, with the measured ones in their place.

        A peak is the rate of the steps' fastest matmul; the memory's bandwidth is that of their largest plain fusion.
        """

        def peak(dtype: str) -> float:
            matmuls = [item for item in self.samples if re.fullmatch(f"matmul .* {dtype}", item.sort)]
            return max((item.rate for item in matmuls), default=0)

        plain = [item for item in self.samples if item.sort == "fusion plain f32"]
        bandwidth = max(plain, key=lambda item: item.sizes[0]).rate if plain else known.hbm_bandwidth
        found = replace(
            known, chip=known.chip or self.machine["processor"], hbm_bandwidth=bandwidth,
            launch_overhead=self.launch, peak_flops=PeakFlops(float32=peak("f32"), bfloat16=peak("bf16")),
        )  # fmt: skip
        if not self.collective_bandwidth or known.ici.link_bandwidth:
            return found
        links = Interconnect("none", (self.devices,), (False,), 1, self.collective_bandwidth)
        return replace(found, ici=links, protocols=(Protocol("memory", start=self.collective_start),))


def machine() -> dict[str, str]:
    """Describe what a calibration is valid for: another processor, core count, version or flag needs a new one."""
    device, processor = jax.devices()[0], None
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        processor = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text(encoding="utf-8"))
    return {
        "processor": processor[1].strip() if processor else platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()), "platform": device.platform, "device": device.device_kind,
        "jax": jax.__version__, "jaxlib": version("jaxlib"), "flags": os.environ.get("XLA_FLAGS", ""),
    }  # fmt: skip


def calibrate(rounds: int = ROUNDS, say: Callable[[str], None] = lambda line: None) -> Calibration:
    """Measure this machine, which takes about half a minute. Other programs that run meanwhile make it look slower.

    Raises:
      UserError: the profiler of this platform does not report single instructions.
    """
    ready = list[Ready]()
    for i, (name, probe) in enumerate(PROBES.items()):
        say(f"compiling small training steps, {i + 1}/{len(PROBES)}")
        ready.append(ready_step(partial(training_step, probe), *initial(probe), f"probe_{name}"))
    least: dict[Instruction, float] = {}
    for i in range(rounds):
        say(f"timing, round {i + 1}/{rounds}")
        for name, seconds in fastest(ready, 0.05).items():
            least[name] = min(seconds, least.get(name, math.inf))
    timed = [sample(task, least[name]) for item in ready for name, task in item.tasks.items() if name in least]
    samples = tuple(item for item in timed if item)
    if not samples:
        raise UserError("JAX's profiler named no instruction that ran here: this platform cannot be calibrated")
    say("timing collectives" if len(jax.devices()) > 1 else "one device: no collectives to time")
    return Calibration(machine(), samples, _launch(), len(jax.devices()), *_collectives())


def _launch() -> float:
    """Return the seconds between two tasks: the time of a chain of small unfused matmuls, less the matmuls' own."""
    x = jnp.eye(32)
    chain = jax.jit(lambda x: reduce(lambda y, _: y @ x, range(CHAIN), x)).lower(x).compile()
    item = warm(chain, lambda: chain(x))
    wall = min(time_once(item.run) for _ in range(30))
    return max(0.0, (wall - sum(fastest([item], 0.02).values())) / CHAIN)


def _collectives() -> tuple[float, float]:
    """Time sums over all devices here: seconds before the first byte, and bytes/s after it; zeros for one device."""
    devices = jax.devices()
    if len(devices) == 1:
        return 0.0, 0.0
    mesh, counts = Mesh(np.array(devices), ("all",)), (1 << 8, 1 << 18)
    start, long = (_sum_seconds(mesh, count) for count in counts)
    sent = 2 * (mesh.size - 1) / mesh.size * 4 * counts[1]  # as in `jaxpar.rehearse.link_costs`
    return start, sent / max(long - start, 1e-9)


def _sum_seconds(mesh: Mesh, count: int, chained: int = 5) -> float:
    """Return the seconds of one all-reduce of `count` float32 numbers on each device."""

    def body(x: jax.Array) -> jax.Array:
        for _ in range(chained):
            x = jax.lax.optimization_barrier((x + 0.0 * jax.lax.psum(x, "all")[0],))[0]
        return x

    spec = PartitionSpec("all")
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    given = jax.device_put(jnp.ones(count * mesh.size), NamedSharding(mesh, spec))
    run(given).block_until_ready()
    return min(time_once(lambda: run(given).block_until_ready()) for _ in range(5)) / chained


# Where a calibration is kept.


def find_calibration(say: Callable[[str], None] = lambda line: None) -> Calibration:
    """Return the calibration of this machine: the one that was kept, else a new one, which takes half a minute.

    Where the kept one timed collectives among another number of devices, they are timed again.

    Raises:
      UserError: this machine cannot be calibrated (see `calibrate`).
    """
    kept, devices = load_calibration(), len(jax.devices())
    if kept is None:
        say("no calibration of this machine yet: measuring it, about half a minute")
        kept = calibrate(say=say)
    elif devices in (1, kept.devices):
        return kept
    else:
        say(f"timing collectives among {devices} devices")
        start, bandwidth = _collectives()
        kept = replace(kept, devices=devices, collective_start=start, collective_bandwidth=bandwidth)
    save_calibration(kept)
    return kept


def calibration_file() -> Path:
    """Return the file in which the calibration of this machine is kept."""
    key = hashlib.sha256(json.dumps(machine(), sort_keys=True).encode()).hexdigest()[:12]
    return cache_folder() / f"speeds-{key}.json"


def save_calibration(calibration: Calibration) -> Path:
    """Keep a calibration for this machine and return its file."""
    write_whole(calibration_file(), json.dumps(dataclasses.asdict(calibration), indent=1))
    return calibration_file()


def load_calibration() -> Calibration | None:
    """Return the calibration kept for this machine; None where there is none, or this version cannot read it."""
    try:
        value = json.loads(calibration_file().read_text(encoding="utf-8"))
        samples = tuple(Sample(sort, tuple(sizes), rate) for sort, sizes, rate in value.pop("samples"))
        return Calibration(samples=samples, **value)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
