"""Private names of JAX, and modules that it may take away. What is not there is said once, in a
line of the log, and every function here has a fallback.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import traceback
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import jax

from jaxpar.base.errors import UserError

log = logging.getLogger(__name__)


class _Private(NamedTuple):
    """A name of JAX's that no version has promised to keep."""

    module: str
    name: str
    """Empty = the module itself."""
    without: str
    """What becomes of the library where it is not there."""

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


_PALLAS = "jax.experimental.pallas"
PRIVATE = {
    "cudnn": _Private(
        "jax._src.lib", "cuda_versions", "cuDNN counts as not installed, and attention takes others"
    ),
    "distributed": _Private(
        "jax._src.distributed",
        "global_state",
        "processes of a run do not say which one is late, and only JAX_NUM_PROCESSES, Slurm and "
        "Open MPI say how many share the simulated devices",
    ),
    "compute_on": _Private(
        "jax.experimental.compute_on", "compute_on", "memory.optimizer=host is refused"
    ),
    "topologies": _Private(
        "jax.experimental.topologies", "get_topology_desc", "nothing is compiled for absent chips"
    ),
    "pallas_gpu": _Private(f"{_PALLAS}.triton", "", "GPUs have no Pallas kernels of ours"),
    "pallas_tpu": _Private(f"{_PALLAS}.tpu", "", "TPUs have no Pallas kernels of ours"),
    "splash": _Private(
        f"{_PALLAS}.ops.tpu.splash_attention",
        "splash_attention_kernel",
        "TPUs have our own attention kernel in its place",
    ),
}
"""By what the library calls it. What tests and `doctor` look through."""


_GONE = object()


def find_private(what: str) -> Any:
    """Import one of `PRIVATE`.

    Args:
      what: its key.

    Returns:
      The object; None where this jax does not have it, which the log says once.
    """
    found = _look(PRIVATE[what])
    if found is _GONE:
        _say_once(_line(PRIVATE[what]))
        return None
    return found


def refusal_without(what: str) -> str:
    """Why something cannot serve that needs one of `PRIVATE`; empty = it is there.

    Args:
      what: its key.
    """
    if _look(PRIVATE[what]) is _GONE:
        return f"jax {jax.__version__} has no {PRIVATE[what].path}"
    return ""


def missing() -> list[str]:
    """What this jax does not have of `PRIVATE`, a line each, with what is lost."""
    return [_line(of) for of in PRIVATE.values() if _look(of) is _GONE]


def _look(of: _Private) -> Any:
    try:
        found = importlib.import_module(of.module)
        return getattr(found, of.name) if of.name else found
    except (ImportError, AttributeError):
        return _GONE


def _line(of: _Private) -> str:
    return f"jax {jax.__version__} has no {of.path}: {of.without}"


@lru_cache(maxsize=64)
def _say_once(line: str) -> None:
    log.warning(line)


# The compilers of GPUs.


def cudnn_version() -> int:
    """The version of cuDNN, which compiling for absent GPUs needs too; 0 = none, or jax has moved
    the answer.
    """
    versions = find_private("cudnn")  # None without the plugin too
    try:
        return versions.cudnn_get_version() if versions is not None else 0
    except (AttributeError, RuntimeError):
        return 0


_CUDA_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
"""The modules of jax's CUDA plugins, which are registered when JAX starts."""
_NO_CUDA_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
"""A variable of the environment: the plugin looks for no libraries that only running needs."""


def register_gpu_compiler() -> bool:
    """Register jax's CUDA plugin in a process that has started without it, and return whether there
    is one.

    JAX registers its plugins once, when it starts. Where it starts on a machine without the
    libraries that only running needs, and was told no platform, it leaves the plugin out, compiler
    and all: `jax.devices()` in a user's script does that. Here the plugin is told to do without
    them. The backends that have started stay what they are.

    Raises:
      RuntimeError: the plugin does not start.
    """
    for name in _CUDA_PLUGINS:
        if find_spec(name.partition(".")[0]) and find_spec(name):
            before = os.environ.get(_NO_CUDA_CHECK)
            os.environ[_NO_CUDA_CHECK] = "1"
            try:
                importlib.import_module(name).initialize()
            finally:
                if before is None:
                    del os.environ[_NO_CUDA_CHECK]
                else:
                    os.environ[_NO_CUDA_CHECK] = before
            return True
    return False


def options_of(lowered: jax.stages.Lowered) -> dict[str, Any]:
    """The compiler options that `jax.jit(function, compiler_options=...)` was given; none where jax
    has moved them.
    """
    given = getattr(getattr(lowered, "_lowering", None), "_compiler_options_kvs", None)
    if given is None:
        _say_once(
            f"jax {jax.__version__} does not say which compiler options jax.jit was given: those "
            "of the library take the place of your own of the same names in a rehearsal"
        )
        return {}
    return dict(given)


# Devices that are not here.


def absent_device(device: jax.Device) -> contextlib.AbstractContextManager[object]:
    """A context in which functions are traced for a GPU that is not here.

    From jax 0.12 on Pallas asks the mesh of the trace for the kind of its device, and without a
    `shard_map` there is none. Where a mesh is set already, or jax knows no such thing, nothing is
    done.
    """
    make = getattr(jax.sharding, "AbstractDevice", None)
    if make is None or device.platform not in ("gpu", "cuda") or device in jax.devices():
        return contextlib.nullcontext()
    try:
        if not jax.sharding.get_abstract_mesh().empty:
            return contextlib.nullcontext()
        there = make(device_kind=device.device_kind, num_cores=None, platform="gpu")
        mesh = jax.sharding.AbstractMesh((), (), abstract_device=there)
        return jax.sharding.use_abstract_mesh(mesh)
    except (TypeError, AttributeError):  # jax 0.10 has an AbstractDevice of another form, unasked
        return contextlib.nullcontext()


_LOWERING = re.compile(r"jax\._src\.pallas\..*(lowering|registration)")
"""The modules that turn a Pallas kernel into a program of a platform."""


def kernel_that_failed(error: BaseException) -> str:
    """The name of the Pallas kernel that was lowered when an error was raised; empty = none was."""
    name = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if _LOWERING.match(frame.f_globals.get("__name__", "")):
            debug_info = getattr(frame.f_locals.get("jaxpr"), "debug_info", None)
            name = name or getattr(debug_info, "func_name", "of Pallas")
    return name


def splash_attention() -> tuple[ModuleType, ModuleType]:
    """The modules of jax's splash attention: its kernels and its masks.

    Raises:
      ImportError: this jax has none; `refusal_without("splash")` says so before.
    """
    path = PRIVATE["splash"].module
    return (
        importlib.import_module(f"{path}.splash_attention_kernel"),
        importlib.import_module(f"{path}.splash_attention_mask"),
    )


# Computing in host memory.


def compute_in_host_memory(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function whose arguments lie in host memory, and have its host compute it there.

    On CPU, where host memory is the device's own, it is computed as any other function.

    Args:
      function: a function of pytrees of arrays, which holds no other traced arrays.
      arguments: its arguments, traced, all in host memory.

    Returns:
      What it returns, in host memory.

    Raises:
      UserError: this jax cannot.
    """
    if why := refusal_without("compute_on"):
        raise UserError(f"memory.optimizer=host: {why}: try memory.optimizer=offload or device")
    of_jax = importlib.import_module(PRIVATE["compute_on"].module)
    # its name until jax 0.11, where the older function of the name `compute_on` is gone
    compute_on: Any = getattr(of_jax, "compute_on2", of_jax.compute_on)
    results = jax.eval_shape(function, *arguments)
    there = jax.tree.map(lambda _: jax.memory.Space.Host, results)
    on_the_host = compute_on(function, compute_type="device_host", out_memory_spaces=there)
    return on_the_host(*arguments)


# What JAX knows of the machine before it starts.

_CPU_DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
"""The option of XLA that JAX goes by where its own setting is not set."""


def cpu_devices_told() -> int:
    """How many CPU devices this process simulates by what JAX was told: by its setting
    `jax_num_cpu_devices`, or else by XLA_FLAGS; 0 = it was told nothing.
    """
    told = jax.config.values.get("jax_num_cpu_devices", -1)
    if told >= 0:
        return told
    found = _CPU_DEVICES.findall(os.environ.get("XLA_FLAGS", ""))
    return int(found[-1]) if found else 0


_PROCESS_COUNTS = ("JAX_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")
"""Variables of the environment that say how many processes there are."""


def joined_processes() -> int:
    """How many processes a run has that this one has joined, which JAX itself only says once it has
    started; 1 = it has joined none.
    """
    if not jax.distributed.is_initialized():
        return 1
    count = getattr(find_private("distributed"), "num_processes", None)
    if isinstance(count, int):
        return count
    _say_once(_line(PRIVATE["distributed"]))
    return int(next(filter(None, map(os.environ.get, _PROCESS_COUNTS)), "1"))


# What processes of a run tell each other outside of programs.

_TOLD = (
    "key_value_set_bytes",
    "blocking_key_value_get_bytes",
    "key_value_try_get_bytes",
    "key_value_dir_get_bytes",
    "key_value_delete",
)
"""What is called of the client, all by position but `allow_overwrite`."""


def coordination_client() -> Any:
    """The client of JAX's coordination service, through which the processes of a run have met.

    Returns:
      The client; None where this process has joined no others, or jax has moved the client.
    """
    client = getattr(find_private("distributed"), "client", None)
    if all(hasattr(client, name) for name in _TOLD):
        return client
    if client is not None:
        _say_once(_line(PRIVATE["distributed"]))
    return None
