"""The start of JAX, before which its platform must be set, what is cached, and the processes of
a run.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpar.base.errors import PEER_LOST, UserError, require_local
from jaxpar.base.hardware import GPU_POOL
from jaxpar.base.layout.mesh import MeshSpec, devices_needed
from jaxpar.base.process.early_signals import pass_on_signals

T = TypeVar("T")

# JAX's default, and ours: a program of 10 ms is worth keeping (a run's first save compiles 80 of 20
# ms each), and a folder has an end.
_CACHE = {
    "jax_persistent_cache_min_compile_time_secs": (1.0, 0.01),
    "jax_compilation_cache_max_size": (-1, 2 << 30),
}
COMPILING = ("jaxpar", "jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
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

    Called after JAX has started, as in a notebook, it only checks. On GPUs JAX's pool is that of
    `wide_gpu_pool`. Compiled programs are kept: see `keep_programs`.

    Args:
      spec: the mesh, of which the platform, `distributed` and on CPUs the sizes are read.

    Returns:
      The devices: simulated ones on `cpu`, else those that are here.

    Raises:
      UserError: a TPU or GPU is asked for and absent, or JAX has already started on another
        platform or with too few CPU devices.
    """
    keep_programs()
    if spec.platform != "auto":
        jax.config.update("jax_platforms", _BACKENDS[spec.platform])
    if spec.platform in ("auto", "cpu"):
        keep_heap()
    if spec.platform == "cpu":
        count = devices_needed(spec)
        if count > _MOST_SIMULATED:
            raise UserError(
                f"the mesh asks for {count:,} simulated CPU devices: at most "
                f"{_MOST_SIMULATED:,} are made (`jaxpar "
                "rehearse --target` compiles for any number of chips)"
            )
        with contextlib.suppress(RuntimeError):  # JAX has started: the devices are counted below
            if spec.distributed:
                processes = int(os.environ.get("JAX_NUM_PROCESSES", "1"))
            else:
                processes = 1
            jax.config.update("jax_num_cpu_devices", max(devices_needed(spec) // processes, 1))
    widen_cpu_pool(jax.config.values["jax_num_cpu_devices"])
    if spec.distributed and not jax.distributed.is_initialized():
        _join(spec)
    try:
        with without_chips(), wide_gpu_pool():
            devices = jax.devices()
    except RuntimeError as error:
        reason = str(error).splitlines()[0].partition(" (set JAX_PLATFORMS")[0].rstrip(".")
        raise UserError(
            f"mesh.platform is {spec.platform!r} and JAX cannot start it ({reason}): "
            f"{_FIX[spec.platform]}, "
            "or mesh.platform=cpu to simulate the mesh here"
        ) from error
    found = devices[0].platform
    # JAX also passes over `cuda` without a word where it sees no GPU
    if spec.platform not in ("auto", found):
        raise UserError(
            f"mesh.platform is {spec.platform!r} and JAX runs on {found}: "
            f"{_FIX[spec.platform]}, or mesh.platform="
            "cpu to simulate the mesh here (a notebook must restart first: JAX stays on the "
            "platform it began with)"
        )
    if spec.platform == "cpu" and jax.process_count() == 1:
        needed = devices_needed(spec)
        if len(devices) < needed:
            raise UserError(
                f"{needed} simulated CPU devices are needed and JAX has started with "
                f"{len(devices)}: call "
                f"jax.config.update('jax_num_cpu_devices', {needed}) before anything uses JAX, "
                "or restart the notebook"
            )
        devices = devices[:needed]
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
                "each host that has "
                "some; here `jaxpar show` and `verify` simulate the mesh, and `rehearse "
                "--target` compiles for it"
            ) from error
        raise UserError(
            "mesh.distributed is true and JAX cannot join the other processes "
            f"({str(error).splitlines()[0]}): start "
            "it on a TPU pod or under Slurm, set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and "
            "JAX_PROCESS_ID, or "
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
        os.environ.setdefault(
            "PJRT_NPROC",
            str(
                max(
                    os.cpu_count() or 1,
                    min(4 * devices, devices + 64),
                )
            ),
        )


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
        flags = next(
            (line for line in lines if line.startswith(("flags", "Features"))),
            "",
        )
        known += "-" + hashlib.sha256(flags.encode()).hexdigest()[:8]
    return known


def memory_of(device: jax.Device) -> int:
    """Ask a device for the size of its memory.

    Args:
      device: the device.

    Returns:
      Bytes; 0 where it does not say, is a CPU, or is not here.
    """
    if device.platform == "cpu" or device not in jax.local_devices():
        return 0
    return (device.memory_stats() or {}).get("bytes_limit", 0)


def machine_memory() -> int:
    """The bytes of memory that this machine has, or that its container may use; 0 where that is not
    known.
    """
    limits = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):  # "max" where a container has no limit
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(limits, default=0)


def versions(packages: Sequence[str] = COMPILING) -> dict[str, str]:
    """Look up the versions of packages.

    Args:
      packages: their names; by default those that decide what a program is compiled to.

    Returns:
      The versions of those that are installed.
    """
    found = {}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that takes the name `path` once all of it is written, and is removed
    if that fails.

    Readers see the file whole or not at all, also while others write it; its folder is made.

    Args:
      path: the file.

    Yields:
      The open file.

    Raises:
      UserError: the file cannot be written, as on a disk that is full, or the path is a URL.
    """
    require_local(path)
    unfinished = path.with_name(f".{uuid.uuid4().hex}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("wb") as file:
                yield file
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the system that keeps a file from being written into a UserError.

    Args:
      path: the file that is written inside.

    Raises:
      UserError: it cannot be written.
      OSError: something else failed that was read meanwhile.
    """
    try:
        yield
    except OSError as error:
        names = {str(name) for name in (error.filename, error.filename2) if name is not None}
        elsewhere = [
            name for name in names if Path(name).parent not in (path.parent, *path.parent.parents)
        ]
        if elsewhere:  # something that is read while the file is written
            raise
        why = "look at its folder, and at the space that is left there"
        raise UserError(f"cannot write {path}: {error.strerror or error}: {why}") from error


def write_whole(path: Path, text: str | bytes) -> None:
    """Write a file by `replacing`.

    Args:
      path: the file.
      text: its content; a text is written in UTF-8.

    Raises:
      UserError: as for `replacing`.
    """
    with replacing(path) as file:
        file.write(text.encode() if isinstance(text, str) else text)


def cache_folder() -> Path:
    """The folder `jaxpar` under $XDG_CACHE_HOME, or under ~/.cache where that is not an
    absolute path.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "jaxpar"


# What goes wrong in one process of a run, or asks one to stop, reaches all of them. Otherwise the
# others would wait in the next collective for a process that has left.


def run_together(run: Callable[[], T]) -> T:
    """Call a function on all processes, and go on once it has returned on every one of them.

    All processes must call this.

    Args:
      run: the function, in which no collective may stand.

    Returns:
      Its result.

    Raises:
      UserError: it failed on another process. Where it fails, its own error is raised.
    """
    if jax.process_count() == 1:
        return run()
    result = error = None
    try:
        result = run()
    except Exception as caught:  # whatever it is, the others wait
        error = caught
    if error is None:
        said = ""
    else:
        said = str(error) or repr(error)
    rows = multihost_utils.process_allgather(
        np.frombuffer(said.encode()[:500].ljust(500), np.uint8)
    )
    failed = [
        (index, text)
        for index, row in enumerate(rows)
        if (text := bytes(row).decode(errors="ignore").strip())
    ]
    if error is None and failed:
        error = UserError(f"process {failed[0][0]} cannot go on, so none can: {failed[0][1]}")
    if error is not None:
        setattr(error, _TOGETHER, True)
        raise error
    return result  # pyright: ignore[reportReturnType]


def told_by_first(value: bool) -> bool:
    """Return on every process what the first one gives; all must call this."""
    if jax.process_count() == 1:
        return value
    return bool(multihost_utils.broadcast_one_to_all(np.int32(value)))


def number_from_first(value: int) -> int:
    """Return on every process the number that the first one gives, of 31 bits; all must call
    this.
    """
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


_TOGETHER = "raised_on_all_processes"


def raised_together(error: BaseException) -> bool:
    """Whether every process leaves with an error now, as from `run_together`, so that they can
    still save together.
    """
    return jax.process_count() == 1 or getattr(error, _TOGETHER, False)


class Batches(Generic[T]):
    """This process's batches, which end together with the other processes' where one cannot be
    read.

    A single process raises the error at once. Of several, the one that fails calls `failing`, keeps
    its error for `require` and goes on with `empty` batches until all stop. What is computed of
    those counts for nothing, so call `require` before it is used.
    """

    def __init__(
        self,
        source: Iterator[T],
        empty: T,
        failing: Callable[[], object] = lambda: None,
    ):
        self._source = source
        self._empty = empty
        self._failing = failing
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._error is None:
            try:
                return self._read()
            except Exception as error:
                if jax.process_count() == 1 or isinstance(error, StopIteration):
                    raise
                self._error = error
                self._failing()
        return self._empty

    def _read(self) -> T:
        try:
            return next(self._source)
        except OSError as error:
            raise UserError(f"the data cannot be read: {error}") from error

    @property
    def failed(self) -> bool:
        """Whether this process can read no more."""
        return self._error is not None

    def require(self) -> None:
        """Raise on every process the error that kept one from reading."""

        def check() -> None:
            if self._error is not None:
                raise self._error

        run_together(check)
