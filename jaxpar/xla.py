"""Compiler options by platform, in one place: each one's measured effect beside it; and what a compiler says.

They are options of one compilation, not environment variables: nothing depends on what was imported first, and
`rehearse` compiles with those that `train` uses. `docs/benchmarks.md` has the commands and the figures.
"""

from __future__ import annotations

import re

from jax.sharding import Mesh

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
    """Options for `jax.jit(..., compiler_options=...)` of a step on this mesh.

    Args:
      mesh: its devices' platform decides, and whether there is something to overlap.
    """
    if mesh.devices.flat[0].platform != "tpu":
        return {}
    return _TPU | _TPU_OVERLAP if mesh.size > 1 else dict(_TPU)


def once_options(mesh: Mesh) -> dict[str, str]:
    """Options of a program that runs once, such as the initializers': on CPU less of LLVM's optimisation.

    The initializers of the Shakespeare recipe then compile in 1.7 s of processor time for 5.6, to the same bits.
    """
    return {"xla_backend_optimization_level": "1"} if mesh.devices.flat[0].platform == "cpu" else {}


# XLA:TPU where a kernel's own memory is too small, on v5e and on v4. It says "RESOURCE_EXHAUSTED" of both, as of a
# device that is full.
_KERNELS_MEMORY = (
    r"memory space (?P<space>[vs]mem) while allocating on stack for %(?P<kernel>[\w.-]+)"
    r".*?Scoped allocation with size (?P<needs>[\d.]+\w?) and limit (?P<has>[\d.]+\w?)",
    r"Used (?P<needs>[\d.]+\w?) of (?P<has>[\d.]+\w?) (?P<space>[vs]mem)"
    r".*?XLA label: (?:[^\n]*HLO :: )?(?P<kernel>[\w.-]+)",
)


def kernel_too_large(message: str) -> str:
    """Of a compiler's message that a kernel's memory is too small: which kernel, what it asks for, what it may have,
    and what to try; of any other, nothing."""
    for pattern in _KERNELS_MEMORY:
        if found := re.search(pattern, message, re.DOTALL):
            return (
                f"the kernel {found['kernel']} asks for {found['needs']} of {found['space']} and may have "
                f"{found['has']}; of attention, --kernels.attention chunked needs none"
            )
    return ""


def compiler_said(message: str) -> str:
    """A compiler's or a runtime's message in a line of at most 300 characters: `kernel_too_large`, or its first line
    and those that a heading (`E1001: CompileTimeScopedVmemOom:`) announces."""
    if found := kernel_too_large(message):
        return found[:300]
    words = []
    for line in filter(None, map(str.strip, message.splitlines())):
        words.append(line)
        if not line.endswith(":"):
            break
    return " ".join(words)[:300]
