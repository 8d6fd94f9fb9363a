"""The measurements of this machine's processors, which take some ten seconds, once.

Small programs are compiled and timed: matmuls of several sizes, copies, exponentials, transposes,
calls with few and with many arguments, and sums over all devices. Each figure is a median.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.errors import Say
from jaxpar.hlo.program.parse import parse_module
from jaxpar.hlo.work.vector_work import ALL_THREADS, VectorWork, vector_work
from jaxpar.rehearse.here.figures import (
    NARROW,
    CpuFigures,
    CpuRates,
    cores_here,
    figures_file,
    keep_figures,
    read_figures,
)

_TURNS = 5
_TURN_SECONDS = 0.02
"""Each figure is the median of so many turns, and each turn is at least so long."""
_ALL = "all"
_TRIPS = 8
_MATMULS = ((32, 32), (128, 64), (256, 128), (1024, 128), (768, 512))
"""The rows of the left operand, and the rows and columns of the right one."""
_LENGTHS = (32, 128, 512)
"""The positions of the heads' matmuls."""
_ARRAYS = (2**12, 2**14, 2**16, 2**18, 2**20, 2**22)
"""The elements of the float32 arrays that are scaled."""
_SQUARES = (64, 256, 1024)
"""The sides of the matrices that are transposed."""
_CHAIN = 16
_MANY = 200
"""The arguments of a call with many."""

_KNOWN: dict[int, CpuFigures] = {}
"""The figures of this process, by the number of devices."""


def cpu_figures(
    devices: Sequence[jax.Device],
    say: Say = lambda line: None,
    anew: bool = False,
    rates: CpuFigures | None = None,
) -> CpuFigures:
    """Find the figures of this machine: those that are kept, or else measured now and kept.

    Args:
      devices: the CPU devices of this process that a program is to run on.
      say: is called with a line before anything is measured.
      anew: whether to measure even where figures are kept.
      rates: figures of other devices of this machine, whose rates are taken: then only calls and
        collectives are measured, and nothing is kept.
    """
    count = len(devices)
    if rates is not None:
        return _with_calls(rates.cores, rates.alone, rates.together, devices)
    file = figures_file(count)
    found = None if anew else _KNOWN.get(count) or read_figures(file)
    if found is None:
        several = f" as {count} devices" if count > 1 else ""
        say(f"measuring what this machine does{several}, some ten seconds")
        found = measure_cpu(devices)
        keep_figures(file, found)
    _KNOWN[count] = found
    return found


def measure_cpu(devices: Sequence[jax.Device]) -> CpuFigures:
    """Measure this machine's processors: with one device, with all of these at once, and
    collectives between them.
    """
    one = Mesh(np.array(devices[:1]), (_ALL,))
    if len(devices) == 1:
        (alone,) = _measure_rates([one])
        return _with_calls(cores_here(), alone, alone, devices)
    alone, together = _measure_rates([one, Mesh(np.array(devices), (_ALL,))])
    return _with_calls(cores_here(), alone, together, devices)


def _with_calls(
    cores: int, alone: CpuRates, together: CpuRates, devices: Sequence[jax.Device]
) -> CpuFigures:
    """Measure calls and collectives, and join them to rates."""
    mesh = Mesh(np.array(devices), (_ALL,))
    with jax.default_device(devices[0]):
        nothing = _seconds(jax.jit(jnp.negative), _array(8))
    found = CpuFigures(
        cores=cores,
        alone=alone,
        together=together,
        call=nothing,
        argument=_argument_seconds(mesh, nothing),
    )
    return found if mesh.size == 1 else _with_collectives(found, mesh)


def _measure_rates(meshes: Sequence[Mesh]) -> list[CpuRates]:
    """Measure each rate on each of some meshes, right after each other."""
    rates: list[dict[str, Any]] = [{} for _ in meshes]
    for found, mesh in zip(rates, meshes, strict=True):
        found["tasks"] = _CHAIN * mesh.size / _trip(_dots, _array(8, 8), mesh).seconds
    tables = {
        "matmul_float32": (_multiply, _wide_matmuls(jnp.float32)),
        "narrow_float32": (_multiply_heads, _narrow_matmuls(jnp.float32)),
        "matmul_bfloat16": (_multiply, _wide_matmuls(jnp.bfloat16)),
        "narrow_bfloat16": (_multiply_heads, _narrow_matmuls(jnp.bfloat16)),
        "memory": (_scale, [(8.0 * size, _array(size)) for size in _ARRAYS]),
        "strided": (_transpose, [(float(side**2), _array(side, side)) for side in _SQUARES]),
    }
    for name, (body, sizes) in tables.items():
        each = 2 if body is _multiply_heads else 1  # it has two matmuls
        of_a_thread = name == "strided"
        rows = [_rates_of(body, size, each, x, meshes, of_a_thread) for size, x in sizes]
        for number, found in enumerate(rates):
            found[name] = tuple(row[number] for row in rows)
    scores = _array(16, 128, 128)
    for name, body in (("simple", _mask), ("costly", _exponentials)):
        for found, mesh in zip(rates, meshes, strict=True):
            trip = _trip(body, scores, mesh)
            work = trip.work.costly if name == "costly" else trip.work.simple
            found[name] = work * mesh.size / trip.seconds / _threads(trip, mesh)
    return [CpuRates(**found) for found in rates]


def _rates_of(
    body: Callable[[jax.Array], jax.Array],
    size: float,
    each: int,
    x: jax.Array,
    meshes: Sequence[Mesh],
    of_a_thread: bool,
) -> list[tuple[float, float]]:
    """Measure the rate of one size on each mesh.

    Args:
      size: the size of one task, in what the rate counts.
      each: the tasks of that size in a trip.
      of_a_thread: whether the rate of a device that is alone is that of one thread.
    """
    found = []
    for mesh in meshes:
        trip = _trip(body, x, mesh)
        threads = _threads(trip, mesh) if of_a_thread else 1
        found.append((size, each * size * mesh.size / trip.seconds / threads))
    return found


class _Trip(NamedTuple):
    """One trip of a loop: its seconds, and its elementwise work as the compiled program has it."""

    seconds: float
    work: VectorWork


def _threads(trip: _Trip, mesh: Mesh) -> int:
    """Count the threads that a device used that is alone; several devices have no more than they
    are.
    """
    if mesh.size > 1 or trip.work.threads == ALL_THREADS:
        return 1
    return min(trip.work.threads, cores_here())


def _trip(body: Callable[[jax.Array], jax.Array], x: jax.Array, mesh: Mesh) -> _Trip:
    """Measure one trip of a loop that puts what a function returns in the place of its argument,
    on all devices of a mesh at once: so the time of a call does not count, nor is memory
    allocated.
    """

    def trips(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _TRIPS, lambda _, x: body(x), x)

    shared = jax.jit(jax.shard_map(trips, mesh=mesh, in_specs=P(_ALL), out_specs=P(_ALL)))
    whole = jnp.tile(x, (mesh.size,) + (1,) * (x.ndim - 1))
    placed = jax.device_put(whole, NamedSharding(mesh, P(_ALL)))
    program = shared.lower(placed).compile()
    works = vector_work(parse_module(program.as_text() or "")).values()
    largest = max(works, key=lambda work: work.simple + work.costly + work.strided)
    seconds = _seconds(program, placed) / _TRIPS
    return _Trip(seconds, largest)


def _seconds(function: Callable[..., object], *arguments: jax.Array) -> float:
    """Measure the median seconds of a call, after a first one that compiles."""
    jax.block_until_ready(function(*arguments))
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


# What is measured: each replaces an array by one of its form.


def _wide_matmuls(dtype: Any) -> list[tuple[float, jax.Array]]:
    """List matmuls by their FLOPs: the left operand, above its square right one."""
    found = []
    for rows, inner in _MATMULS:
        both = _array(rows + inner, inner) / inner**0.5
        found.append((2.0 * rows * inner * inner, both.astype(dtype)))
    return found


def _multiply(both: jax.Array) -> jax.Array:
    inner = both.shape[1]
    x_MK = both[:-inner]
    w_KK = both[-inner:]
    return jax.lax.dynamic_update_slice(both, x_MK @ w_KK, (0, 0))


def _narrow_matmuls(dtype: Any) -> list[tuple[float, jax.Array]]:
    """List attention's matmuls by the FLOPs of each: rows of `NARROW` for 16 heads."""
    found = []
    for length in _LENGTHS:
        x_HSh = _array(16, length, NARROW) / length
        found.append((2.0 * 16 * length * length * NARROW, x_HSh.astype(dtype)))
    return found


def _multiply_heads(x_HSh: jax.Array) -> jax.Array:
    """Two matmuls of as many FLOPs, scores and what is read by them."""
    scores_HST = jnp.einsum("hsd,htd->hst", x_HSh, x_HSh)
    return jnp.einsum("hst,htd->hsd", scores_HST, x_HSh)


def _scale(x: jax.Array) -> jax.Array:
    return x * 0.5 + 1.0


def _transpose(x: jax.Array) -> jax.Array:
    return x.T + 1.0


def _mask(scores_HST: jax.Array) -> jax.Array:
    """What attention does to scores, without the exponential."""
    _, length, _ = scores_HST.shape
    places = jnp.arange(length)
    seen_ST = places[:, None] >= places[None, :]
    return jnp.where(seen_ST, scores_HST * 0.5, -1.0) + scores_HST


def _exponentials(x: jax.Array) -> jax.Array:
    for _ in range(4):
        x = jnp.exp(-jnp.abs(x))
    return x


def _dots(x: jax.Array) -> jax.Array:
    """A chain of matmuls that take no time, each a task of its own."""
    y = x
    for _ in range(_CHAIN):
        y = y @ x
    return y * 1e-3


# What surrounds a program.


def _argument_seconds(mesh: Mesh, nothing: float) -> float:
    """Measure what each further array of a call takes on each device."""
    small = jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, P()))
    many = jax.jit(lambda *arrays: [x + 1 for x in arrays])
    seconds = _seconds(many, *[small] * _MANY) - nothing
    return max(seconds, 0.0) / _MANY / mesh.size


def _with_collectives(found: CpuFigures, mesh: Mesh) -> CpuFigures:
    """Measure sums over all devices, of next to nothing and of a megabyte on each."""

    def add(x: jax.Array) -> jax.Array:
        for _ in range(_TRIPS):
            x = jax.lax.psum(x, _ALL) * 0.1
        return x

    added = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=P(_ALL), out_specs=P(_ALL)))
    times = []
    sizes = (8, 2**18)
    for size in sizes:
        array = np.zeros(size * mesh.size, np.float32)
        placed = jax.device_put(array, NamedSharding(mesh, P(_ALL)))
        times.append(_seconds(added, placed) / _TRIPS)
    start, larger = times
    moved = 4.0 * (sizes[1] - sizes[0]) * 2 * (mesh.size - 1) / mesh.size
    return replace(
        found,
        devices=mesh.size,
        collective_start=start,
        collective_bandwidth=moved / max(larger - start, 1e-6),
    )
