"""The measurements of this machine's processors, which take some ten seconds, once.

Small programs are compiled and timed: matmuls of several sizes, copies, exponentials, transposes,
calls with few and with many arguments, and sums over all devices. Each figure is a median.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.errors import Say
from jaxpar.rehearse.here.figures import (
    CpuFigures,
    Rates,
    cores_here,
    figures_file,
    keep_figures,
    read_figures,
)

_TURNS = 5
_TURN_SECONDS = 0.02
"""Each figure is the median of so many turns, and each turn is at least so long."""
_TRIPS = 8
_MATMULS = ((32, 32), (128, 64), (256, 128), (1024, 128), (768, 512), (1024, 1024))
"""The rows of the left operand, and the rows and columns of the right one."""
_ARRAYS = (2**12, 2**14, 2**16, 2**18, 2**20, 2**22)
"""The elements of the float32 arrays that are copied."""
_CHAIN = 16
_MANY = 200
"""The arguments of a call with many."""

_KNOWN: dict[int, CpuFigures] = {}
"""The figures of this process, by the number of devices."""


def cpu_figures(devices: Sequence[jax.Device], say: Say = lambda line: None) -> CpuFigures:
    """Find the figures of this machine: those that are kept, or else measured now and kept.

    Args:
      devices: the CPU devices of this process that a program is to run on.
      say: is called with a line before anything is measured.
    """
    count = len(devices)
    if count in _KNOWN:
        return _KNOWN[count]
    file = figures_file(count)
    found = read_figures(file)
    if found is None:
        say(f"measuring what this machine does, once ({file} keeps it)")
        found = measure_cpu(devices)
        keep_figures(file, found)
    _KNOWN[count] = found
    return found


def measure_cpu(devices: Sequence[jax.Device]) -> CpuFigures:
    """Measure this machine's processors, on the first of these devices, and collectives between
    all of them.
    """
    with jax.default_device(devices[0]):
        vector = _array(2**16)
        square = _array(256, 256)
        nothing = _seconds(jax.jit(jnp.negative), _array(8))
        found = CpuFigures(
            cores=cores_here(),
            matmul_float32=_matmul_rates(jnp.float32),
            matmul_bfloat16=_matmul_rates(jnp.bfloat16),
            memory=_memory_rates(),
            simple=2 * _CHAIN * vector.size / _trip_seconds(_additions, vector),
            costly=_CHAIN * vector.size / _trip_seconds(_exponentials, vector),
            strided=square.size / _trip_seconds(lambda x: x.T + 1.0, square),
            task=_trip_seconds(_dots, _array(8, 8)) / _CHAIN,
            call=nothing,
            argument=_argument_seconds(devices, nothing),
        )
    if len(devices) == 1:
        return found
    return _with_collectives(found, devices)


def _trip_seconds(body: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Measure one trip of a loop that puts what a function returns in the place of its argument:
    so the time of a call does not count, nor is memory allocated.
    """
    looped = jax.jit(lambda x: jax.lax.fori_loop(0, _TRIPS, lambda _, x: body(x), x))
    return _seconds(looped, x) / _TRIPS


def _seconds(function: Callable[..., object], *arguments: jax.Array) -> float:
    """Measure the median seconds of a call, after a first one that compiles."""
    for _ in range(2):
        began = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        once = time.perf_counter() - began
    calls = max(1, min(200, int(_TURN_SECONDS / max(once, 1e-6))))
    turns = []
    for _ in range(_TURNS):
        began = time.perf_counter()
        last = None
        for _ in range(calls):
            last = function(*arguments)
        jax.block_until_ready(last)
        turns.append((time.perf_counter() - began) / calls)
    return statistics.median(turns)


def _array(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape, dtype=np.float32))


def _matmul_rates(dtype: jnp.dtype) -> Rates:
    """Measure matmuls, the smallest first."""
    rates = []
    for rows, inner in _MATMULS:
        x_MK = _array(rows, inner).astype(dtype)
        w_KK = (_array(inner, inner) / inner**0.5).astype(dtype)
        flops = 2.0 * rows * inner * inner
        rates.append((flops, flops / _trip_seconds(lambda x_MK, w_KK=w_KK: x_MK @ w_KK, x_MK)))
    return tuple(rates)


def _memory_rates() -> Rates:
    """Measure what is read and written a second, by the bytes of both."""
    rates = []
    for size in _ARRAYS:
        seconds = _trip_seconds(lambda x: x * 0.5 + 1.0, _array(size))
        rates.append((8.0 * size, 8.0 * size / seconds))
    return tuple(rates)


def _dots(x: jax.Array) -> jax.Array:
    """A chain of matmuls that take no time, each a task of its own."""
    y = x
    for _ in range(_CHAIN):
        y = y @ x
    return y * 1e-3


def _additions(x: jax.Array) -> jax.Array:
    for _ in range(_CHAIN):
        x = x * 1.0001 + 0.5
    return x


def _exponentials(x: jax.Array) -> jax.Array:
    for _ in range(_CHAIN):
        x = jnp.exp(-jnp.abs(x))
    return x


def _argument_seconds(devices: Sequence[jax.Device], nothing: float) -> float:
    """Measure what each further array of a call takes on each device."""
    mesh = Mesh(np.array(devices), ("all",))
    small = jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, P()))
    few = jax.jit(lambda *arrays: [x + 1 for x in arrays])
    seconds = _seconds(few, *[small] * _MANY) - nothing
    return max(seconds, 0.0) / _MANY / len(devices)


def _with_collectives(found: CpuFigures, devices: Sequence[jax.Device]) -> CpuFigures:
    """Measure sums over all devices, of next to nothing and of a megabyte on each."""
    mesh = Mesh(np.array(devices), ("all",))
    sharding = NamedSharding(mesh, P("all"))

    def add(x: jax.Array) -> jax.Array:
        for _ in range(8):
            x = jax.lax.psum(x, "all") * 0.1
        return x

    added = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=P("all"), out_specs=P("all")))
    count = len(devices)
    times = []
    sizes = (8, 2**18)
    for size in sizes:
        array = jax.device_put(np.zeros(size * count, np.float32), sharding)
        times.append(_seconds(added, array) / 8)
    start = times[0]
    moved = 4.0 * (sizes[1] - sizes[0]) * 2 * (count - 1) / count
    seconds = max(times[1] - start, 1e-6)
    return replace(
        found,
        devices=count,
        collective_start=start,
        collective_bandwidth=moved / seconds,
    )
