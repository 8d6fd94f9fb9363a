"""How fast this machine is, task by task: a minute of small programs, timed by JAX's own profiler.

The result is kept for this machine and this version of JAX, and lets `--target here` rehearse with measured speeds.
Written for CPUs; the programs and the profiler are the same on a GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError
from jaxpar.base.hardware import Hardware, Interconnect, PeakFlops, Protocol
from jaxpar.base.plan import Plan
from jaxpar.base.runtime import cache_folder, write_whole
from jaxpar.models import Model
from jaxpar.rehearse.cost.probes import CHAIN, Probe, chain, suite
from jaxpar.rehearse.cost.speeds import Sample, SpeedTable, sample, without_waits
from jaxpar.rehearse.cost.stopwatch import Arrays, Instruction, Lull, Ready, elapsed, fastest, prepare, warm
from jaxpar.train.plans import make_plan
from jaxpar.train.state import TrainState, init_state
from jaxpar.train.step import make_train_step, put_batch

ROUNDS = 5
"""How often the suite runs; of every task the fastest execution counts, whatever else the machine did meanwhile."""
FORMAT = 1
"""Of the stored file."""


@dataclass(frozen=True)
class Calibration:
    """What was measured on one machine."""

    machine: dict[str, str]
    """Processor, cores, versions: what `machine()` says where it was measured."""
    samples: tuple[Sample, ...]
    launch: float
    """Seconds between two tasks."""
    devices: int = 1
    """Devices that collectives were measured among."""
    collective_start: float = 0.0
    """Seconds of a collective of hardly any bytes."""
    collective_bandwidth: float = 0.0
    """Bytes/s one device sends in a collective of many; 0 = not measured, with one device."""
    spread: float = 0.0
    """Median over the tasks of (slowest round / fastest round): how quiet the machine was."""

    def speeds(self, devices: int = 1) -> SpeedTable:
        """The table for `jaxpar.rehearse.cost.cost.price`, for a program on so many devices of this machine.

        Simulated devices share the cores: each task takes as many times longer.
        """
        shared = devices if self.machine["platform"] == "cpu" else 1
        return SpeedTable(self.samples, shared)

    def hardware(self, known: Hardware) -> Hardware:
        """The figures of a device here, as far as measured, in place of those known.

        Peaks are the fastest matmul of the suite, the memory's bandwidth is that of its largest plain task.
        """

        def peak(dtype: str) -> float:
            return max((item.rate for item in self.samples if re.fullmatch(f"matmul .* {dtype}", item.sort)), default=0)

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
    """What a calibration holds for: another processor, core count, version or flag needs another."""
    device = jax.devices()[0]
    return {
        "processor": _processor(), "cores": str(os.cpu_count()), "platform": device.platform,
        "device": device.device_kind, "jax": jax.__version__, "jaxlib": version("jaxlib"),
        "flags": os.environ.get("XLA_FLAGS", ""),
    }  # fmt: skip


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def calibrate(
    rounds: int = ROUNDS, patience: float = 30.0, say: Callable[[str], None] = lambda line: None
) -> Calibration:
    """Measure this machine, about a minute. Anything else that runs meanwhile makes it look slower.

    Args:
      rounds: how often the suite runs.
      patience: seconds to wait, all in all, for moments in which nothing else runs.
      say: told what is going on, a line at a time.
    """
    probes, arrays, ready = suite(), Arrays(), list[Ready]()
    for i, probe in enumerate(probes):
        if i % 50 == 0:
            say(f"compiling small programs, {i}/{len(probes)}")
        ready.append(prepare(probe, arrays))
    for i, (name, changes) in enumerate(STEPS.items()):
        say(f"compiling training steps, {i}/{len(STEPS)}")
        ready.append(ready_step(override(Config(), changes), name))
    times: dict[Instruction, list[float]] = {}
    lull = Lull(patience)
    for i in range(rounds):
        say(f"timing, round {i + 1}/{rounds}")
        for name, seconds in fastest(ready, 0.02, lull).items():
            times.setdefault(name, []).append(seconds)
    # Beside a step's matmuls XLA:CPU runs what does not need them: only alone do they show their speed.
    timed = [
        (task, min(times[name]))
        for i, item in enumerate(ready)
        for name, task in item.tasks.items()
        if name in times and (i < len(probes) or not task.flops)
    ]
    samples = without_waits([item for item in (sample(task, seconds) for task, seconds in timed) if item])
    if not samples:
        raise UserError("JAX's profiler named no instruction that ran here: this platform cannot be calibrated")
    say("timing collectives" if len(jax.devices()) > 1 else "one device: no collectives to time")
    start, bandwidth = _collectives(lull)
    spread = float(np.median([max(row) / min(row) for row in times.values()]))
    return Calibration(machine(), samples, _launch(lull), len(jax.devices()), start, bandwidth, spread)


_SMALL = {"model.layers": 1, "model.scan_layers": False, "model.vocab_multiple": 1, "train.steps": 10,
          "train.warmup_steps": 0}  # fmt: skip
_LLAMA = {"model.family": "llama", "model.tied_head": False}


def _sized(batch: int, seq: int, embed: int, mlp: int, vocab: int, **more: Any) -> dict[str, Any]:
    return _SMALL | more | {
        "train.batch": batch, "data.seq_len": seq, "model.max_seq_len": seq, "model.embed": embed, "model.mlp": mlp,
        "model.vocab_size": vocab, "model.heads": embed // 32,
    }  # fmt: skip


STEPS: dict[str, dict[str, Any]] = {
    "gpt2_small": _sized(4, 64, 128, 512, 256),
    "gpt2_long": _sized(2, 512, 128, 512, 256),
    "gpt2_wide": _sized(8, 128, 384, 1536, 4096),
    "gpt2_scan": _sized(8, 128, 128, 512, 256, **{"model.layers": 3, "model.scan_layers": True}),
    "llama_small": _sized(4, 64, 128, 384, 256, **_LLAMA),
    "llama_wide": _sized(8, 128, 256, 768, 1024, **_LLAMA),
}
"""Training steps of one block whose tasks, matmuls apart, are timed where they stand: in a step most of what is read
comes from the main memory or from another core, and no small program has just its forms."""


def ready_step(config: Config, name: str) -> Ready:
    """A training step on one device, on random tokens, as a module of this name."""
    plan, model = make_plan(config, jax.devices()[:1]), Model(config.model)
    state, batch = init_state(model, config, plan), random_batch(config, plan)
    inner = make_train_step(model, config, plan)

    def step(state: TrainState, batch: Any) -> Any:
        return inner(state, batch)

    step.__name__ = name
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()

    def start() -> Any:
        nonlocal state
        state, metrics = compiled(state, batch)
        return metrics

    return warm(compiled, start)


def random_batch(config: Config, plan: Plan) -> dict[str, jax.Array]:
    """Random tokens of a config's shape, always the same."""
    shape = (config.train.batch, config.data.seq_len + 1)
    ids = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, dtype=np.int32)
    return put_batch({"tokens": ids[:, :-1], "labels": ids[:, 1:]}, plan)


def _launch(lull: Lull) -> float:
    """Seconds between two tasks of one program."""
    arrays: Arrays = {}
    long = prepare(Probe("chain", chain, ((32, 32), (32, 32))), arrays)
    short = prepare(Probe("link", lambda x, w: x @ w, ((32, 32), (32, 32))), arrays)
    lull.wait()
    wall = [min(elapsed(item.run) for _ in range(30)) for item in (long, short)]
    tasks = [sum(fastest([item], 0.02, lull).values()) for item in (long, short)]
    return max(0.0, (wall[0] - wall[1] - tasks[0] + tasks[1]) / (CHAIN - 1))


def _collectives(lull: Lull) -> tuple[float, float]:
    """Seconds before a collective's first byte and bytes/s after it, all devices here in one group; zeros for one."""
    devices = jax.devices()
    if len(devices) == 1:
        return 0.0, 0.0
    mesh, k = Mesh(np.array(devices), ("all",)), len(devices)
    # What each moves of its array, as in `jaxpar.rehearse.link_costs`.
    kinds = {
        "gather": (lambda x: jax.lax.all_gather(x, "all", tiled=True), (k - 1) / k * k),
        "scatter": (lambda x: jax.lax.psum_scatter(x, "all", tiled=True), (k - 1) / k),
        "reduce": (lambda x: jax.lax.psum(x, "all"), 2 * (k - 1) / k),
    }
    small, large = 1 << 8, 1 << 18
    starts, bandwidths = [], []
    for function, load in kinds.values():
        lull.wait()
        seconds = [_one_collective(function, mesh, count) for count in (small, large)]
        starts.append(seconds[0])
        bandwidths.append(load * 4 * large / max(seconds[1] - seconds[0], 1e-9))
    return float(np.median(starts)), float(np.median(bandwidths))


def _one_collective(function: Callable[[jax.Array], jax.Array], mesh: Mesh, count: int, chained: int = 5) -> float:
    """Seconds of one collective of `count` float32 a device."""

    def body(x: jax.Array) -> jax.Array:
        for _ in range(chained):
            x = jax.lax.optimization_barrier((x + 0.0 * function(x).ravel()[0],))[0]
        return x

    spec = PartitionSpec("all")
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    given = jax.device_put(jnp.ones(count * mesh.size), jax.sharding.NamedSharding(mesh, spec))
    run(given).block_until_ready()
    return min(elapsed(lambda: run(given).block_until_ready()) for _ in range(5)) / chained


# Where it is kept.


def calibrated(say: Callable[[str], None] = lambda line: None) -> Calibration:
    """The calibration of this machine: the one that was kept, else a new one, which takes a minute.

    Collectives among another number of devices than are here are timed anew.

    Raises:
      UserError: see `calibrate` and `load_calibration`.
    """
    kept, devices = load_calibration(), len(jax.devices())
    if kept is None:
        say("no calibration of this machine yet: measuring it, about a minute")
        kept = calibrate(say=say)
    elif devices in (1, kept.devices):
        return kept
    else:
        say(f"timing collectives among {devices} devices")
        start, bandwidth = _collectives(Lull(10.0))
        kept = replace(kept, devices=devices, collective_start=start, collective_bandwidth=bandwidth)
    save_calibration(kept)
    return kept


def calibration_file() -> Path:
    """Where the calibration of this machine is kept."""
    key = hashlib.sha256(json.dumps(machine(), sort_keys=True).encode()).hexdigest()[:12]
    return cache_folder() / f"calibration-{key}.json"


def save_calibration(calibration: Calibration) -> Path:
    """Keep a calibration for this machine; returns the file."""
    file = calibration_file()
    value = {"format": FORMAT, **{name: getattr(calibration, name) for name in Calibration.__dataclass_fields__}}
    write_whole(file, json.dumps(value, indent=1))
    return file


def load_calibration() -> Calibration | None:
    """What was kept for this machine, or None.

    Raises:
      UserError: the file is damaged.
    """
    file = calibration_file()
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the calibration {file} ({error}): delete it and calibrate again") from error
    if not isinstance(value, dict) or value.pop("format", None) != FORMAT:
        raise UserError(f"the calibration {file} is not of this version of jaxpar: delete it and calibrate again")
    value["samples"] = tuple(Sample(sort, tuple(sizes), rate) for sort, sizes, rate in value["samples"])
    return Calibration(**value)
