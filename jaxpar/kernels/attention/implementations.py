"""Our implementations of attention, in the order in which `auto` tries them, each registered as a
program registers one of its own.

The libraries' kernels come before ours: of ours `pallas_gpu` was measured on one chip, an H100,
where cuDNN is faster, and `pallas_tpu` was interpreted and compiled for absent ones. A module of
Pallas is imported only when it is asked for, since that takes long.

Shapes: as in `jaxpar.kernels.attention.call`.
"""

from __future__ import annotations

from jaxtyping import Array

from jaxpar.base.compiled_for import too_old
from jaxpar.base.jax_compat import refusal_without
from jaxpar.kernels.attention import chunked, libraries
from jaxpar.kernels.attention.call import Call
from jaxpar.kernels.attention.call import reference as by_definition
from jaxpar.kernels.attention.chunked import Dropout
from jaxpar.kernels.attention.kernel import AttentionRequest, register_kernel
from jaxpar.kernels.masks import Mask

Pair = tuple[Array, Array]
"""The output and the log-sum-exp."""


@register_kernel("cudnn", refusal=libraries.refuse_cudnn, platforms=("gpu",))
def cudnn(q_BSHh: Array, k_BTKh: Array, v_BTKh: Array, mask: Mask, call: Call) -> Array:
    """Attention of cuDNN."""
    return libraries.cudnn(q_BSHh, k_BTKh, v_BTKh, mask, call)


def _refuse_pallas_gpu(request: AttentionRequest, platform: str) -> str:
    if why := too_old(request.capability) or refusal_without("pallas_gpu"):
        return why
    from jaxpar.kernels.attention import triton

    shapes = request.q.shape, request.k.shape
    return triton.refusal(*shapes, request.q.dtype, request.mask, request.call)


def _pallas_gpu_backward(*arguments):
    from jaxpar.kernels.attention import triton

    return triton.backward(*arguments)


@register_kernel(
    "pallas_gpu",
    backward=_pallas_gpu_backward,
    refusal=_refuse_pallas_gpu,
    platforms=("gpu",),
)
def pallas_gpu(q_BSHh: Array, k_BTKh: Array, v_BTKh: Array, mask: Mask, call: Call) -> Pair:
    """Our attention for NVIDIA GPUs, by Triton."""
    from jaxpar.kernels.attention import triton

    return triton.forward(q_BSHh, k_BTKh, v_BTKh, mask, call)


@register_kernel("splash", refusal=libraries.refuse_splash, platforms=("tpu",))
def splash(q_BSHh: Array, k_BTKh: Array, v_BTKh: Array, mask: Mask, call: Call) -> Array:
    """JAX's own attention for TPUs."""
    return libraries.splash(q_BSHh, k_BTKh, v_BTKh, mask, call)


def _refuse_pallas_tpu(request: AttentionRequest, platform: str) -> str:
    if why := refusal_without("pallas_tpu"):
        return why
    from jaxpar.kernels.attention import tpu

    shapes = request.q.shape, request.k.shape
    return tpu.refusal(*shapes, request.q.dtype, request.mask, request.call)


def _pallas_tpu_backward(*arguments):
    from jaxpar.kernels.attention import tpu

    return tpu.backward(*arguments)


@register_kernel(
    "pallas_tpu",
    backward=_pallas_tpu_backward,
    refusal=_refuse_pallas_tpu,
    platforms=("tpu",),
)
def pallas_tpu(q_BSHh: Array, k_BTKh: Array, v_BTKh: Array, mask: Mask, call: Call) -> Pair:
    """Our attention for TPUs."""
    from jaxpar.kernels.attention import tpu

    return tpu.forward(q_BSHh, k_BTKh, v_BTKh, mask, call)


@register_kernel("chunked", backward=chunked.backward, plain=True)
def tiles(
    q_BSHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    mask: Mask,
    call: Call,
    dropout: Dropout | None = None,
) -> Pair:
    """Plain XLA, some tiles of the scores at a time."""
    return chunked.forward(q_BSHh, k_BTKh, v_BTKh, mask, call, dropout)


@register_kernel("reference", plain=True)
def reference(
    q_BSHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    mask: Mask,
    call: Call,
    dropout: Dropout | None = None,
) -> Pair:
    """The definition, all scores at once."""
    rate, key = dropout or (0.0, None)
    return by_definition(q_BSHh, k_BTKh, v_BTKh, mask, call, rate, key)
