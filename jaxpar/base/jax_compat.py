"""What the library uses of JAX and XLA that is not public, and that a new version may move or
rename.

These are private imports, names of primitives, and flags and messages of the compilers, all seen on
jax 0.10.2. On another jax, run `tests/base/test_jax_compat.py` first: it has a test of each.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias

import jax
from jax.extend import core
from jax.sharding import Mesh

# jax 0.12.0.1 has one type of traced functions, `Jaxpr`, and `ClosedJaxpr` as an unexported name of
# it.
ClosedJaxpr: TypeAlias = core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]

# Private modules. Each import stands in a function, so that one that is gone breaks only what needs
# it.


def cudnn_version() -> int:
    """The version of cuDNN, which compiling for absent GPUs needs too; 0 = none, or jax has moved
    the answer.
    """
    try:
        from jax._src.lib import cuda_versions  # None without the plugin

        if cuda_versions is not None:
            return cuda_versions.cudnn_get_version()
        return 0
    except (ImportError, RuntimeError):
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
    lowering = getattr(lowered, "_lowering", None)
    return dict(getattr(lowering, "_compiler_options_kvs", ()))


# Names of primitives, in traced functions.

COLLECTIVES: dict[
    str, Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ppermute"]
] = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_gather_reduced": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "unreduced_reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "unreduced_psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_to_all": "all-to-all",
    "ppermute": "ppermute",
}
STILL = ("axis_index", "pvary", "pcast", "preduced", "vary_unreduced_cast")
"""The beginnings of the names of primitives that name mesh axes and send nothing."""
SCAN = "scan"
WHILE = "while"
COND = "cond"
SHARD_MAP = "shard_map"
NAME = "name"
"""The primitive of `checkpoint_name`."""
CUDNN_ATTENTION = "dot_product_attention_fwd_wrapper"
_CALLED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
"""Primitives that call a function as it is, and the parameter that has it."""


def called_function(equation: core.JaxprEqn) -> ClosedJaxpr | None:
    """Return the traced function that an equation calls, once and with its own operands; None where
    it calls none, or is a loop, a branch or a `shard_map`.
    """
    parameter = _CALLED.get(equation.primitive.name)
    if parameter is None:
        return None
    called = equation.params.get(parameter)
    return called if isinstance(called, ClosedJaxpr) else None


def run_equation(equation: core.JaxprEqn, operands: list[Any]) -> list[Any]:
    """Run one equation of a traced function, in the context in which it was traced.

    Args:
      equation: the equation.
      operands: the values of what it reads.

    Returns:
      The values of what it makes.
    """
    primitive: Any = equation.primitive
    given = primitive.get_bind_params(equation.params)
    if isinstance(given, tuple):  # jax before 0.10: functions apart, which come first
        functions, parameters = given
    else:
        functions, parameters = (), given
    with equation.ctx.manager:
        made = primitive.bind(*functions, *operands, **parameters)
    return list(made) if primitive.multiple_results else [made]


# Compiler options, each with its measured effect. They are options of one compilation, not
# environment variables: nothing depends on what was imported first, and `rehearse` compiles with
# those that `train` uses. Values are Python's booleans and numbers: XLA refuses the text "true" for
# an option of a GPU. `docs/benchmarks.md` has the commands and the figures. Seen with jax 0.10.2,
# libtpu 0.0.42.1 and jax-cuda12-plugin 0.10.2.

Option = bool | int | float | str
Options = dict[str, Option]

NO_CUDA_GRAPHS = "xla_gpu_enable_command_buffer"
"""An option that is set to nothing, so that there are no CUDA graphs: their kernels bear no
instruction's name.
"""
SCOPED_VMEM = "xla_tpu_scoped_vmem_limit_kib"
"""KiB of a TPU's vector memory that one fusion or kernel may use; a chip's file in `meshes/chips`
has the value.
"""

# Values that are only ever read as bfloat16 are rewritten to be bfloat16, and this reaches back
# through the loop over layers to the float32 parameters: a bfloat16 copy of them all for the whole
# step. Without it LLaMA-3 8B below takes 0.16 GiB less, and its step 0.1 % less time.
_TPU: Options = {"xla_jf_bf16_propagation": False}

# LLaMA-3 8B, fsdp=16 x tensor=4, 64 v5p, 8k tokens (rehearsed, not run): all-gathers run beside
# matmuls, synchronous communication 140 -> 99 ms a step, compute 351 -> 355 ms, temporaries 3.35 ->
# 3.63 GiB.
_TPU_OVERLAP: Options = {
    "xla_enable_async_all_gather": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
}

# Without these a data-parallel sum is started and waited for at once. They put collectives beside
# compute, take the sums of a layer into the next turn of the loop over layers, and let turns
# alternate between two sets of buffers, which saves copies. LLaMA-3 8B over fsdp=8 on 8 H100 then
# waits 36 ms a step for collectives in place of 50 and takes 675 ms in place of 702; GPT-2 124M
# over data=8 waits 0.8 in place of 2.6 and takes 28.8 in place of 30.7 (rehearsed, not run).
# Smaller thresholds of combining are no better beside these. To pipeline the all-gathers too holds
# another layer's weights: 666 ms here, but XLA then computes more again where memory is nearly
# full.
_GPU_OVERLAP: Options = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
    "xla_gpu_enable_while_loop_double_buffering": True,
}

SCHEDULER_PROFILE = "xla_gpu_pgle_profile_file_or_directory_path"
"""A file of what each instruction takes, by which the GPU's latency-hiding scheduler goes; one that
is not there it passes over in silence."""
_ORDERS: dict[str, dict[str, Options]] = {
    "gpu": {
        "gathers pipelined": {"xla_gpu_enable_pipelined_all_gather": True},
        "one set of buffers": {"xla_gpu_enable_while_loop_double_buffering": False},
        "two collectives at once": {"xla_gpu_experimental_parallel_collective_overlap_limit": 2},
    },
    "tpu": {},
}
"""Settings that change a program's order, by name. `docs/task_graph.md` has what each gains, and
those that change nothing."""
_DISABLED_PASSES = "xla_disable_hlo_passes"
_FUSION_PASSES = {"tpu": "tpu_fusion,tpu_multi_output_fusion", "gpu": "fusion", "cpu": "fusion"}
"""The names of the passes that fuse, which each platform's compiler honours in its own form: on a
GPU `fusion` is a pipeline, and what is left is one operation a kernel."""

KNOWN_OPTIONS = (*_TPU, *_TPU_OVERLAP, *_GPU_OVERLAP, SCOPED_VMEM)
"""The names that a misspelt one is compared with: XLA does not list its own."""


def compiler_options(mesh: Mesh) -> Options:
    """Choose options for `jax.jit(..., compiler_options=...)` of a program, by the platform and the
    size of its mesh.

    Args:
      mesh: the mesh, whose devices may be absent.

    Returns:
      The options by their names.
    """
    platform = mesh.devices.flat[0].platform
    several = mesh.size > 1
    if platform == "tpu":
        return {**_TPU, **(_TPU_OVERLAP if several else {})}
    if platform in ("gpu", "cuda") and several:
        return dict(_GPU_OVERLAP)
    return {}


def without_fusion(mesh: Mesh) -> Options:
    """The options with which a platform's compiler fuses nothing, to be counted and not to be run.

    Args:
      mesh: the mesh, whose devices may be absent.

    Returns:
      The options by their names.
    """
    platform = mesh.devices.flat[0].platform
    return {_DISABLED_PASSES: _FUSION_PASSES["gpu" if platform == "cuda" else platform]}


def order_options(mesh: Mesh) -> dict[str, Options]:
    """Settings of the scheduler of a mesh's platform that change the order of a program.

    Args:
      mesh: the mesh, whose devices may be absent.

    Returns:
      The options of each, by name; none for a platform without such settings.
    """
    platform = mesh.devices.flat[0].platform
    return _ORDERS.get("gpu" if platform == "cuda" else platform, {})


def profile_option(mesh: Mesh) -> str:
    """The option by which a platform's scheduler is given what instructions take; empty = none."""
    return SCHEDULER_PROFILE if mesh.devices.flat[0].platform in ("gpu", "cuda") else ""


def once_options(mesh: Mesh) -> Options:
    """Options of a program that runs once, such as the initializers: on CPU, less of LLVM's
    optimisation.

    The initializers of the Shakespeare recipe then take 1.7 s of processor time in place of 5.6, to
    the same bits.
    """
    if mesh.devices.flat[0].platform == "cpu":
        return {"xla_backend_optimization_level": 1}
    return {}


TPU_FLAGS = (
    "xla_tpu_",
    "xla_jf_",
    "xla_sc_",
    "xla_mosaic_",
    "xla_enable_async_",
    "xla_latency_hiding_scheduler_",
    "xla_lhs_",
    "xla_should_",
    "xla_max_concurrent_",
)
"""The beginnings of the names of options that the TPU's compiler has alone. The others know each
other's options: XLA:CPU takes `xla_gpu_...`, and none takes a name that is no option."""
_UNKNOWN_OPTION = re.compile(r"No such compile option: '(\w*)'")
_WRONG_VALUE = re.compile(r"While setting option (\w+), '(.*)' is not a valid (\w+) value")
_UNREADABLE = re.compile(r"Failed to parse '(.*)' into flag (\w+)")


def option_message(message: str) -> str:
    """What a compiler's message says about an option that it refuses; the empty string for any
    other message.
    """
    if found := _UNKNOWN_OPTION.search(message):
        return f"XLA knows no option {found[1]}"
    if found := _WRONG_VALUE.search(message):
        return f"{found[1]} takes a value of type {found[3]}, found {found[2]}"
    if found := _UNREADABLE.search(message):
        return f"{found[2]} takes no value {found[1]}"
    return ""


def is_unknown_option(message: str) -> bool:
    """Whether a compiler's message says that it has no option of a name."""
    return _UNKNOWN_OPTION.search(message) is not None


# What compilers say.

# XLA:TPU where a kernel's own memory is too small, on v5e and on v4. It says "RESOURCE_EXHAUSTED"
# of both, as of a device that is full.
_KERNELS_MEMORY = (
    r"memory space (?P<space>[vs]mem) while allocating on stack for %(?P<kernel>[\w.-]+)"
    r".*?Scoped allocation with size (?P<needs>[\d.]+\w?) and limit (?P<has>[\d.]+\w?)",
    r"Used (?P<needs>[\d.]+\w?) of (?P<has>[\d.]+\w?) (?P<space>[vs]mem)"
    r".*?XLA label: (?:[^\n]*HLO :: )?(?P<kernel>[\w.-]+)",
)


def kernel_memory_message(message: str) -> str:
    """What a compiler's message says about a kernel whose memory is too small: which kernel, what
    it asks for, what it may have, and what to try. The empty string for any other message."""
    for pattern in _KERNELS_MEMORY:
        if found := re.search(pattern, message, re.DOTALL):
            return (
                f"the kernel {found['kernel']} asks for {found['needs']} of {found['space']} "
                "and may have "
                f"{found['has']}; for attention, kernels.attention=chunked needs none"
            )
    return ""


# Gloo, between processes on CPUs (seen); JAX's coordination service; NCCL, by its documentation.
_LOST_PEER = re.compile(
    r"Connection (?:reset|closed) by peer|heartbeat timeout"
    r"|remote process exited or there was a network error"
)


def says_peer_is_lost(message: str) -> bool:
    """Whether an error of the runtime says that another process does not answer any more."""
    return _LOST_PEER.search(message) is not None


def compiler_message(message: str) -> str:
    """Shorten a message of a compiler or a runtime.

    Args:
      message: the message.

    Returns:
      One line of at most 300 characters: what `kernel_memory_message` says, or else the first line
      with those that a heading announces.
    """
    if found := kernel_memory_message(message):
        return found[:300]
    words = []
    for line in filter(None, map(str.strip, message.splitlines())):
        words.append(line)
        if not line.endswith(":"):
            break
    return " ".join(words)[:300]


# Computing in host memory.

_CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
MIXES_ENTRIES = frozenset((*_CUMULATIVE, "dot_general", "gather", "rev", "scatter", "sort"))
"""Primitives whose results may have the shape of their operands, and of which an entry depends on
other entries than that one of the operands."""


def compute_in_host_memory(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function whose arguments lie in host memory, and have its host compute it there.

    On CPU, where host memory is the device's own, it is computed as any other function.

    Args:
      function: a function of pytrees of arrays, which holds no other traced arrays.
      arguments: its arguments, traced, all in host memory.

    Returns:
      What it returns, in host memory.
    """
    from jax.experimental import compute_on as of_jax

    # its name until jax 0.11, where the older function of the name `compute_on` is gone
    compute_on: Any = getattr(of_jax, "compute_on2", of_jax.compute_on)
    results = jax.eval_shape(function, *arguments)
    there = jax.tree.map(lambda _: jax.memory.Space.Host, results)
    on_the_host = compute_on(function, compute_type="device_host", out_memory_spaces=there)
    return on_the_host(*arguments)


# What processes of a run tell each other outside of programs.


def coordination_client() -> Any:
    """The client of JAX's coordination service, through which the processes of a run have met.

    Returns:
      The client; None where this process has joined no others, or jax has moved the client.
    """
    try:
        from jax._src.distributed import global_state

        client = global_state.client
    except (ImportError, AttributeError):
        return None
    if all(hasattr(client, name) for name in _TOLD):
        return client
    return None


_TOLD = (
    "key_value_set_bytes",
    "blocking_key_value_get_bytes",
    "key_value_try_get_bytes",
    "key_value_dir_get_bytes",
    "key_value_delete",
)
"""What is called of the client, all by position but `allow_overwrite`."""
