"""The start of JAX on the devices of a mesh, and what must be set before it: its platform, its
pools of memory and of threads, and where compiled programs are kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import math
import os
import platform
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxpar.base.errors import PEER_LOST, UserError
from jaxpar.base.hardware import GPU_POOL
from jaxpar.base.jax_compat import cpu_devices_told, joined_processes
from jaxpar.base.layout.mesh import MeshSpec, axis_sizes, describe, devices_needed, total_sizes
from jaxpar.base.machine import cache_folder
from jaxpar.base.process.early_signals import pass_on_signals

# JAX's default, and ours: a program of 10 ms is worth keeping (a run's first save compiles 80 of 20
# ms each), and a folder has an end.
_CACHE = {
    "jax_persistent_cache_min_compile_time_secs": (1.0, 0.01),
    "jax_compilation_cache_max_size": (-1, 2 << 30),
}
_MOST_SIMULATED = 4096  # CPU devices: they start in seconds and 0.7 GB
_BACKENDS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}
_DEVICES = {"tpu": ("accel*", "vfio"), "gpu": ("nvidia*", "dxg")}  # dxg: the driver under Windows
_FIX = {
    "auto": "unset JAX_PLATFORMS",
    "tpu": "pip install 'jaxpar[tpu]' on a machine that has one",
    "gpu": "pip install 'jaxpar[cuda]' on a machine that has one",
}


def start(spec: MeshSpec) -> list[jax.Device]:
    """Start JAX for a mesh.

    Called after JAX has started, as in a notebook, it only checks. A number of CPU devices that JAX
    was told before is raised where the mesh needs more, and never lowered. On GPUs JAX's pool is
    what `wide_gpu_pool` makes it. Compiled programs are kept, as `keep_programs` says.

    Args:
      spec: the mesh, of which the platform, `distributed` and on CPUs the sizes are read.

    Returns:
      The devices. On `cpu` they are simulated ones: as many as the mesh needs, or with an axis of
      -1 as many as the other axes divide. Elsewhere they are those that are here.

    Raises:
      UserError: a TPU or GPU is asked for and absent, JAX has already started on another platform
        or with too few CPU devices, the processes cannot share the CPU devices of the mesh, or JAX
        was told more for each of several processes.
    """
    keep_programs()
    if spec.platform != "auto":
        jax.config.update("jax_platforms", _BACKENDS[spec.platform])
    if spec.platform in ("auto", "cpu"):
        keep_heap()
    if spec.platform == "cpu":
        _require_possible(devices_needed(spec))
    if spec.distributed and not jax.distributed.is_initialized():
        _join(spec)
    if spec.platform == "cpu":
        ask_for_cpus(devices_of_a_process(spec, joined_processes()))
    widen_cpu_pool(cpu_devices_told())
    devices = _open_devices(spec.platform)
    if spec.platform == "cpu":
        return _take_cpus(devices, spec)
    return devices


def _require_possible(count: int) -> None:
    """Refuse a mesh of more CPU devices than any process simulates."""
    if count > _MOST_SIMULATED:
        raise UserError(
            f"the mesh asks for {count:,} simulated CPU devices: at most {_MOST_SIMULATED:,} are "
            "made (`jaxpar rehearse --target` compiles for any number of chips)"
        )


def devices_of_a_process(spec: MeshSpec, processes: int) -> int:
    """The number of simulated CPU devices that each process of a mesh needs.

    Args:
      spec: the mesh; an axis of -1 makes a multiple of the others, and no more than that.
      processes: how many share its devices.

    Raises:
      UserError: the devices of the mesh do not divide over the processes.
    """
    needed = devices_needed(spec)
    if -1 in axis_sizes(spec).values():
        return math.lcm(needed, processes) // processes
    if needed % processes:
        raise UserError(
            f"{processes} processes do not divide mesh {describe(total_sizes(spec))}, and each "
            "simulates its share of the devices: give one axis -1, as in mesh.data=-1"
        )
    return needed // processes


def ask_for_cpus(count: int) -> None:
    """Tell JAX to simulate at least so many CPU devices in this process.

    A larger number that it was told before stands. Once JAX has started, it keeps its number.

    Args:
      count: the number that is needed.
    """
    if count > cpu_devices_told():
        with contextlib.suppress(RuntimeError):  # JAX has started: `_take_cpus` counts
            jax.config.update("jax_num_cpu_devices", count)


def _open_devices(platform: str) -> list[jax.Device]:
    """The devices of JAX, which starts here unless it has.

    Raises:
      UserError: JAX cannot start on the platform, or has started on another.
    """
    try:
        with without_chips(), wide_gpu_pool():
            devices = jax.devices()
    except RuntimeError as error:
        reason = str(error).splitlines()[0].partition(" (set JAX_PLATFORMS")[0].rstrip(".")
        raise UserError(
            f"mesh.platform is {platform!r} and JAX cannot start it ({reason}): "
            f"{_FIX[platform]}, or mesh.platform=cpu to simulate the mesh here"
        ) from error
    found = devices[0].platform
    # JAX also passes over `cuda` without a word where it sees no GPU
    if platform not in ("auto", found):
        raise UserError(
            f"mesh.platform is {platform!r} and JAX runs on {found}: {_FIX[platform]}, or "
            "mesh.platform=cpu to simulate the mesh here (a notebook must restart first: JAX "
            "stays on the platform it began with)"
        )
    return devices


def _take_cpus(devices: list[jax.Device], spec: MeshSpec) -> list[jax.Device]:
    """The first devices, as many as the mesh needs; with an axis of -1, as many as the other axes
    divide. Of several processes all, because some of JAX's own collectives are over all of them.

    Raises:
      UserError: JAX has started with fewer, or in several processes with more.
    """
    processes = jax.process_count()
    share = devices_of_a_process(spec, processes)
    is_open = -1 in axis_sizes(spec).values()
    here = min(
        sum(device.process_index == index for device in devices) for index in range(processes)
    )
    if processes > 1:
        each = f" in each of {processes} processes"
    else:
        each = ""
    if here < share:
        raise UserError(
            f"{share} simulated CPU devices are needed{each} and JAX has started with {here}: "
            f"call jax.config.update('jax_num_cpu_devices', {share}) before anything uses JAX, "
            "or restart the notebook"
        )
    if processes == 1:
        return devices[: here - here % share if is_open else share]
    if here > share and not is_open:
        raise UserError(
            f"mesh {describe(total_sizes(spec))} needs {share} simulated CPU devices{each}, and "
            f"JAX was told {here}: leave out JAX_NUM_CPU_DEVICES and what else says so, or tell "
            f"it {share}"
        )
    return devices


def _join(spec: MeshSpec) -> None:
    """Join the other processes of a run, or raise a UserError where they, or the chips of the
    platform, are not found. Where they do not come in time, the process ends.

    On TPU pods, under Slurm and under MPI JAX finds them itself. Elsewhere JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID say who they are.
    """
    platform = spec.platform
    count = os.environ.get("JAX_NUM_PROCESSES")
    index = os.environ.get("JAX_PROCESS_ID")
    # JAX aborts the process at its own deadline, which nobody can catch, so ours comes before.
    deadline = threading.Timer(spec.join_seconds, _end_alone, [spec.join_seconds])
    deadline.daemon = True
    deadline.start()
    try:
        jax.distributed.initialize(
            num_processes=None if count is None else int(count),
            process_id=None if index is None else int(index),
            initialization_timeout=spec.join_seconds + 60,
        )
        pass_on_signals()
    except (RuntimeError, ValueError) as error:
        if platform in _DEVICES and not _device_files(platform):
            raise UserError(
                f"mesh.platform is {platform!r} and no {platform.upper()} is here: start it on "
                "each host that has some; here `jaxpar show` and `verify` simulate the mesh, and "
                "`rehearse --target` compiles for it"
            ) from error
        raise UserError(
            "mesh.distributed is true and JAX cannot join the other processes "
            f"({str(error).splitlines()[0]}): start it on a TPU pod or under Slurm, set "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or "
            "mesh.distributed=False for this machine alone"
        ) from error
    finally:
        deadline.cancel()


def _end_alone(seconds: int) -> None:
    """End a process that the others of its run did not join in time, in one line."""
    count = os.environ.get("JAX_NUM_PROCESSES", "all")
    where = os.environ.get("JAX_COORDINATOR_ADDRESS", "the first process")
    print(
        f"jaxpar: error: after mesh.join_seconds={seconds} not all of the {count} processes of "
        f"this run have met at {where}: start every one of them, and look at what the others said "
        "and whether this machine reaches the first",
        file=sys.stderr,
        flush=True,
    )
    os._exit(PEER_LOST)


def _device_files(platform: str) -> bool:
    """Whether the operating system knows any chip of the platform `tpu` or `gpu`."""
    return any(any(Path("/dev").glob(name)) for name in _DEVICES[platform])


_POOL = "XLA_CLIENT_MEM_FRACTION"
_OWN_POOL = (_POOL, "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR")
"""What a user sets to choose the share of a GPU's memory that JAX takes, or another allocator."""


@contextlib.contextmanager
def wide_gpu_pool() -> Iterator[None]:
    """Let JAX's pool take `GPU_POOL` of a GPU's memory, in place of its three quarters, if it
    starts within.

    Where the user has set a share or an allocator, that stands. What was set is taken back, so that
    processes that are started later find only what the user has set.
    """
    if any(name in os.environ for name in _OWN_POOL):
        yield
        return
    os.environ[_POOL] = str(GPU_POOL)
    try:
        yield
    finally:
        os.environ.pop(_POOL, None)


@contextlib.contextmanager
def without_chips() -> Iterator[None]:
    """Set what libtpu and the CUDA plugin look for while they are loaded on a machine without their
    chips.

    Without it libtpu writes five lines of errors about the missing machine and refuses a second
    process, which only a real chip has to. The CUDA plugin wants libraries that only running needs,
    and otherwise leaves its compiler out.
    """
    if _device_files("gpu"):
        settings = {}
    else:
        settings = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    if os.environ.get("TPU_SKIP_MDS_QUERY"):  # set by JAX where it sees no TPU
        settings |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-1"}
        settings["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    missing = {key: value for key, value in settings.items() if key not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for key in missing:
            del os.environ[key]


def keep_heap() -> bool:
    """Keep freed memory in the process, and return whether that was possible: it needs glibc.

    It must come before JAX starts its threads. XLA:CPU allocates a step's temporaries anew each
    step. glibc hands blocks above 32 MiB back to the kernel when they are freed, and every page is
    then faulted in again: the step of the Shakespeare recipe took 1.3 times as long. Blocks above
    64 MiB, which is all that a thread's heap can hold, are still handed back.
    """
    if sys.platform.startswith("linux"):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    else:
        mallopt = None
    if mallopt is None:
        return False
    trim_threshold = -1
    mmap_threshold = -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    return bool(mallopt(mmap_threshold, 1 << 30) and mallopt(trim_threshold, 2**31 - 1))


def widen_cpu_pool(devices: int) -> None:
    """Give XLA:CPU more threads than simulated devices, unless PJRT_NPROC is set. It must come
    before JAX starts.

    A collective blocks a thread of this pool until its peers arrive, and a device may be inside
    several at once, of this step and of the next. With as many threads as devices, the default on a
    small machine, the last peer may find no thread free. A small LLaMA on 8 devices and 2 cores
    with 8 threads was killed by XLA's watchdog in 3 of 11 runs and did not finish in time in 4
    more; with 32 threads or more, 9 of 9 runs finished.

    Args:
      devices: the number of simulated devices; up to one changes nothing.
    """
    if devices > 1:
        threads = max(os.cpu_count() or 1, min(4 * devices, devices + 64))
        os.environ.setdefault("PJRT_NPROC", str(threads))


def keep_programs() -> None:
    """Have JAX keep compiled programs in `programs` of `cache_folder()`, so that the next process
    reads them.

    JAX's own settings come first (JAX_COMPILATION_CACHE_DIR, JAX_ENABLE_COMPILATION_CACHE), and so
    does an earlier call in this process. Once the folder is full, the programs that were used
    longest ago are removed.
    """
    values = jax.config.values
    if values["jax_compilation_cache_dir"] or not values["jax_enable_compilation_cache"]:
        return
    folder = cache_folder() / "programs" / _processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"compiled programs cannot be kept in {folder} ({error.strerror})"
        logging.getLogger(__name__).warning("%s: every start compiles anew", reason)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    for name, (default, ours) in _CACHE.items():
        if values[name] == default:  # not set by the user
            jax.config.update(name, ours)


def _processor() -> str:
    """The kind of this machine's processor: programs use its instructions, and several machines may
    share a cache.
    """
    known = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        known += "-" + hashlib.sha256(flags.encode()).hexdigest()[:8]
    return known
