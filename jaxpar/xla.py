"""Compiler options by platform, in one place: each one's measured effect beside it.

They are options of one compilation, not environment variables: nothing depends on what was imported first, and
`rehearse` compiles with those that `train` uses. `docs/benchmarks.md` has the commands and the figures.
"""

from __future__ import annotations

from jax.sharding import Mesh

# LLaMA-3 8B, fsdp=16 x tensor=4, 64 v5p, 8k tokens (rehearsed, not run): all-gathers run beside matmuls, synchronous
# communication 140 -> 99 ms a step, compute 351 -> 355 ms, temporaries 3.35 -> 3.63 GiB.
_TPU = {
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
}


def compiler_options(mesh: Mesh) -> dict[str, str]:
    """Options for `jax.jit(..., compiler_options=...)` of a step on this mesh; none where there is nothing to overlap.

    Args:
      mesh: its devices' platform decides.
    """
    if mesh.size == 1:
        return {}
    return {"tpu": _TPU}.get(mesh.devices.flat[0].platform, {})
