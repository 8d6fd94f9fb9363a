"""What the library uses of JAX and XLA that is not public, and that a new version may move or rename.

These are private imports, names of primitives, and flags and messages of the compilers, all seen on jax 0.10.2. On
another jax, run `tests/base/test_jax_compat.py` first: it has a test of each.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

from jax.extend import core
from jax.sharding import Mesh

# jax 0.12.0.1 has one type of traced functions, `Jaxpr`, and `ClosedJaxpr` as an unexported name of it.
ClosedJaxpr: TypeAlias = core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]

# Private modules. Each import stands in a function, so that one that is gone breaks only what needs it.


def cudnn_version() -> int:
    """The version of cuDNN, which compiling for absent GPUs needs too; 0 = none, or jax has moved the answer."""
    try:
        from jax._src.lib import cuda_versions  # None without the plugin

        return cuda_versions.cudnn_get_version() if cuda_versions is not None else 0
    except (ImportError, RuntimeError):
        return 0


# Names of primitives, in traced functions.

COLLECTIVES: dict[str, Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ppermute"]] = {
    "all_gather": "all-gather", "all_gather_invariant": "all-gather", "all_gather_reduced": "all-gather",
    "reduce_scatter": "reduce-scatter", "unreduced_reduce_scatter": "reduce-scatter",
    "psum": "all-reduce", "psum_invariant": "all-reduce", "unreduced_psum": "all-reduce",
    "pmax": "all-reduce", "pmin": "all-reduce", "all_to_all": "all-to-all", "ppermute": "ppermute",
}  # fmt: skip
STILL = ("axis_index", "pvary", "pcast", "preduced", "vary_unreduced_cast")
"""The beginnings of the names of primitives that name mesh axes and send nothing."""
SCAN, WHILE, COND, SHARD_MAP = "scan", "while", "cond", "shard_map"
NAME = "name"
"""The primitive of `checkpoint_name`."""
CUDNN_ATTENTION = "dot_product_attention_fwd_wrapper"

# Compiler options by platform, each with its measured effect. They are options of one compilation, not environment
# variables: nothing depends on what was imported first, and `rehearse` compiles with those that `train` uses.
# `docs/benchmarks.md` has the commands and the figures.

NO_CUDA_GRAPHS = "xla_gpu_enable_command_buffer"
"""An option that is set to nothing, so that there are no CUDA graphs: their kernels bear no instruction's name."""

# Values that are only ever read as bfloat16 are rewritten to be bfloat16, and this reaches back through the loop over
# layers to the float32 parameters: a bfloat16 copy of them all for the whole step. Without it LLaMA-3 8B below takes
# 0.16 GiB less, and its step 0.1 % less time.
_TPU = {"xla_jf_bf16_propagation": "false"}

# LLaMA-3 8B, fsdp=16 x tensor=4, 64 v5p, 8k tokens (rehearsed, not run): all-gathers run beside matmuls, synchronous
# communication 140 -> 99 ms a step, compute 351 -> 355 ms, temporaries 3.35 -> 3.63 GiB.
_TPU_OVERLAP = {
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
}


def compiler_options(mesh: Mesh) -> dict[str, str]:
    """Options for `jax.jit(..., compiler_options=...)` of a step, by the platform and the size of its mesh."""
    if mesh.devices.flat[0].platform != "tpu":
        return {}
    return _TPU | _TPU_OVERLAP if mesh.size > 1 else dict(_TPU)


def once_options(mesh: Mesh) -> dict[str, str]:
    """Options of a program that runs once, such as the initializers: on CPU, less of LLVM's optimisation.

    The initializers of the Shakespeare recipe then take 1.7 s of processor time in place of 5.6, to the same bits.
    """
    return {"xla_backend_optimization_level": "1"} if mesh.devices.flat[0].platform == "cpu" else {}


# What compilers say.

# XLA:TPU where a kernel's own memory is too small, on v5e and on v4. It says "RESOURCE_EXHAUSTED" of both, as of a
# device that is full.
_KERNELS_MEMORY = (
    r"memory space (?P<space>[vs]mem) while allocating on stack for %(?P<kernel>[\w.-]+)"
    r".*?Scoped allocation with size (?P<needs>[\d.]+\w?) and limit (?P<has>[\d.]+\w?)",
    r"Used (?P<needs>[\d.]+\w?) of (?P<has>[\d.]+\w?) (?P<space>[vs]mem)"
    r".*?XLA label: (?:[^\n]*HLO :: )?(?P<kernel>[\w.-]+)",
)


def kernel_memory_message(message: str) -> str:
    """What a compiler's message says about a kernel whose memory is too small: which kernel, what it asks for, what it
    may have, and what to try. The empty string for any other message."""
    for pattern in _KERNELS_MEMORY:
        if found := re.search(pattern, message, re.DOTALL):
            return (
                f"the kernel {found['kernel']} asks for {found['needs']} of {found['space']} and may have "
                f"{found['has']}; for attention, kernels.attention=chunked needs none"
            )
    return ""


def compiler_message(message: str) -> str:
    """A message of a compiler or a runtime in one line of at most 300 characters.

    It is what `kernel_memory_message` says, or else the first line with those that a heading announces.
    """
    if found := kernel_memory_message(message):
        return found[:300]
    words = []
    for line in filter(None, map(str.strip, message.splitlines())):
        words.append(line)
        if not line.endswith(":"):
            break
    return " ".join(words)[:300]
