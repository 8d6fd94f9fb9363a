"""Attention by libraries: cuDNN on NVIDIA GPUs and jax's splash kernel on TPUs. They serve masks
that are bands of keys, and return no lse.

Shapes: as in `jaxpar.kernels.attention.call`.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxpar.base.compiled_for import too_old
from jaxpar.base.compiler import repeats_to_the_bit
from jaxpar.base.hardware import LANES
from jaxpar.base.jax_compat import cudnn_version, refusal_without, splash_attention
from jaxpar.base.kernel_work import FORWARD_MATMULS, AttentionWork, KernelWork
from jaxpar.kernels.attention.call import Call
from jaxpar.kernels.attention.kernel import AttentionRequest
from jaxpar.kernels.masks import (
    EMPTY,
    And,
    Causal,
    Full,
    Mask,
    Segments,
    Tiles,
    Window,
    tile_states,
    without_segments,
)

# splash's kernels state no cost: a name around them tells the share of scores they compute
_COMPUTED = "computed="
_FOR_CUDNN = "for_cudnn="  # a name around a kernel that is there because cuDNN is not: which kernel
_NO_CUDNN = "cuDNN is not installed"
_CUDNN_HEAD_DIM = 128  # at most, in the backward on every chip
_MATMULS = {"forward": FORWARD_MATMULS, "dq": 3, "dkv": 4}  # by the kernels of this library
_SPLASH_MATMULS = {"splash_mha_fwd": FORWARD_MATMULS, "splash_mha_dq": 3, "splash_mha_dkv": 4}


class _Band(NamedTuple):
    """A mask that shows the keys from `left` before the query to `right` after it, in the same
    document; None = however far.
    """

    left: int | None = None
    right: int | None = None
    segments: Segments | None = None


def refuse_splash(request: AttentionRequest, platform: str) -> str:
    """Say why `splash` cannot serve a request; empty = it can."""
    S = request.q.shape[1]
    h = request.q.shape[3]
    T = request.k.shape[1]
    if _band_of(request.mask) is None:
        return f"no mask like {request.mask}"
    reasons = [
        (h % LANES != 0, f"head_dim {h} is no multiple of {LANES}"),
        (S % LANES != 0, f"sequence length {S} is no multiple of {LANES}"),
        (T % LANES != 0, f"sequence length {T} is no multiple of {LANES}"),
        (_first_query(request.call) is None, "places that are known only at run time"),
    ]
    why = next((why for applies, why in reasons if applies), "")
    return why or refusal_without("splash")


def refuse_cudnn(request: AttentionRequest, platform: str) -> str:
    """Say why `cudnn` cannot serve a request; empty = it can."""
    if why := too_old(request.capability):
        return why
    h = request.q.shape[3]
    call = request.call
    band = _band_of(request.mask)
    if band is None:
        return f"no mask like {request.mask}"
    reasons = [
        (
            platform == "gpu" and repeats_to_the_bit(platform),
            "programs that repeat to the bit (XLA_FLAGS), of which it has failed to run some",
        ),
        (request.q.dtype == jnp.float32, "float32"),
        (band.segments is not None, "documents"),
        (call.softcap != 0, "a soft cap"),
        (
            (band.left, band.right) not in ((None, None), (band.left, 0)),
            f"no mask like {request.mask}",
        ),
        (
            _first_query(call) != 0 and band[:2] != (None, None),
            "queries that begin later than the keys",
        ),
        (
            h % 8 != 0 or h > _CUDNN_HEAD_DIM,
            f"head_dim {h} is no multiple of 8 up to {_CUDNN_HEAD_DIM}",
        ),
    ]
    why = next((why for applies, why in reasons if applies), "")
    if why:
        return why
    return "" if has_cudnn() else _NO_CUDNN


def stand_in_scope(name: str, why: str) -> contextlib.AbstractContextManager[object]:
    """Return a named scope for attention by `name` that stands in a program for want of cuDNN, if
    the reasons `why` of `dispatch.choose` say so. A program carries the scope along, and
    `stand_ins_in` finds it."""
    if f"cudnn: {_NO_CUDNN}" not in why:
        return contextlib.nullcontext()
    return jax.named_scope(f"{_FOR_CUDNN}{name}")


def stand_ins_in(text: str) -> list[str]:
    """List the implementations that stand in a compiled program for want of cuDNN, each once."""
    return list(dict.fromkeys(re.findall(rf"{_FOR_CUDNN}(\w+)", text)))


def has_cudnn() -> bool:
    """Return whether jax finds cuDNN, which it also needs to compile for absent GPUs."""
    return cudnn_version() > 0


def cudnn(
    q_BSHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    mask: Mask,
    call: Call,
) -> Array:
    """Compute the output of attention by `jax.nn.dot_product_attention`."""
    band = _band_of(mask)
    assert band is not None
    return jax.nn.dot_product_attention(
        q_BSHh,
        k_BTKh,
        v_BTKh,
        scale=call.scale_of(q_BSHh),
        is_causal=band.right == 0,
        local_window_size=None if band.left is None else (band.left, 0),
        implementation="cudnn",
    )


def splash(
    q_BSHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    mask: Mask,
    call: Call,
) -> Array:
    """Compute the output of attention by jax's own Pallas kernel for TPUs, on local arrays only:
    the compiler cannot split it.
    """
    splash_kernel, splash_mask = splash_attention()
    band = _band_of(mask)
    (S, H) = q_BSHh.shape[1:3]
    T = k_BTKh.shape[1]
    assert band is not None
    largest = _splash_block(q_BSHh, call)
    block_q = math.gcd(S, largest)
    block_k = math.gcd(T, largest)
    sizes = splash_kernel.BlockSizes(
        block_q=block_q,
        block_kv=block_k,
        block_kv_compute=block_k,
        block_q_dkv=block_q,
        block_kv_dkv=block_k,
        block_kv_dkv_compute=block_k,
        block_q_dq=block_q,
        block_kv_dq=block_k,
    )
    first = _first_query(call)
    assert first is not None
    one = splash_mask.FullMask((S, T))
    if (band.left, band.right) == (None, 0):
        one = splash_mask.CausalMask((S, T), first)
    elif (band.left, band.right) != (None, None):
        one = splash_mask.LocalMask((S, T), (band.left, band.right), first)
    kernel = splash_kernel.make_splash_mha(
        splash_mask.MultiHeadMask([one] * H),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=sizes,
        attn_logits_soft_cap=call.softcap or None,
        interpret=call.interpret,
        residual_checkpoint_name="attention_out",
    )

    def of_sequence(q_HSh: Array, k_KTh: Array, v_KTh: Array, ids: Segments | None) -> Array:
        if ids is None:
            segments = None
        else:
            segments = splash_kernel.SegmentIds(ids.q_ids, ids.kv_ids)
        # if asked, it may also give the log-sum-exp
        return cast(Array, kernel(q_HSh, k_KTh, v_KTh, segments))

    # The kernel does not scale. We scale in float32, because the scale itself may not fit the
    # dtype.
    q_BHSh = (q_BSHh.swapaxes(1, 2).astype(jnp.float32) * call.scale_of(q_BSHh)).astype(
        q_BSHh.dtype
    )
    # Splash skips the tiles that the band leaves out, but none because of documents.
    tiles = Tiles(S, T, block_q, block_k, q_start=first)
    computed = np.mean(tile_states(without_segments(mask), tiles) != EMPTY)
    with jax.named_scope(f"{_COMPUTED}{float(computed)}"):
        out_BHSh = jax.vmap(of_sequence)(
            q_BHSh, k_BTKh.swapaxes(1, 2), v_BTKh.swapaxes(1, 2), band.segments
        )
    return out_BHSh.swapaxes(1, 2)


def _first_query(call: Call) -> int | None:
    """Return the place of the first query as counted from the first key; None = it is known only at
    run time.
    """
    if isinstance(call.q_start, int) and isinstance(call.k_start, int):
        return call.q_start - call.k_start
    return None


def _splash_block(q_BSHh: Array, call: Call) -> int:
    """Choose the largest tiles whose forward and backward compile within the 16 MiB of VMEM that
    every chip allows a kernel, as tried with the compilers for v4 and v5e, with documents in a
    window."""
    row = q_BSHh.shape[-1] * q_BSHh.dtype.itemsize
    if row <= 256 and not call.softcap:
        return 1024
    if row <= 1024:
        return 512
    return 256


def _band_of(mask: Mask) -> _Band | None:
    """Read a mask as a band; None if it is no band."""
    if isinstance(mask, Full):
        return _Band()
    if isinstance(mask, Causal):
        return _Band(right=mask.offset)
    if isinstance(mask, Window):
        return _Band(mask.left, mask.right)
    if type(mask) is Segments:
        return _Band(segments=mask)
    if not isinstance(mask, And):
        return None
    bands = _band_of(mask.left), _band_of(mask.right)
    if (
        bands[0] is None
        or bands[1] is None
        or (bands[0].segments is not None and bands[1].segments is not None)
    ):
        return None
    ends = zip(
        bands[0][:2],
        bands[1][:2],
        strict=True,
    )
    left, right = ([x for x in both if x is not None] for both in ends)
    return _Band(
        min(left, default=None), min(right, default=None), bands[0].segments or bands[1].segments
    )


def kernel_cost(
    name: str, path: str, shapes: list[tuple[int, ...]], stated: Mapping[str, Any]
) -> KernelWork | None:
    """Find the work of one call of a kernel of attention, as far as a compiled program tells; None
    for any other kernel.

    In the path of the operation `splash` leaves the share of the scores that are computed; where
    something else called the kernel, the share is taken as half, as under a causal mask. The
    kernels of this library state their FLOPs, and those for GPUs more of their work.

    Args:
      name: the name of the call's instruction, such as `splash_mha_fwd_residuals.3`.
      path: jax's path of the operation.
      shapes: the shapes of the call's operands.
      stated: the cost that the kernel states itself.
    """
    ours = re.search(r"\battention_(forward|dq|dkv)\b", f"{path} {name}")
    if ours and "flops" in stated:
        return _work_of_ours(_MATMULS[ours[1]], path, shapes, stated)
    arrays = [
        shape for shape in shapes if len(shape) >= 3 and shape[-1] % LANES == 0 and shape[-2] > 8
    ]
    matmuls = next(
        (count for prefix, count in _SPLASH_MATMULS.items() if name.startswith(prefix)), None
    )
    if matmuls is None or len(arrays) < 2:
        return None
    share = re.search(rf"{_COMPUTED}([\d.e-]+)", path)
    (*batch, S, h), (*_, T, _) = arrays[:2]
    flops = matmuls * 2 * math.prod(batch) * h * S * T * (float(share[1]) if share else 0.5)
    return KernelWork(flops, AttentionWork("splash", h, T, flops, matmuls))


def _work_of_ours(
    matmuls: int, path: str, shapes: list[tuple[int, ...]], stated: Mapping[str, Any]
) -> KernelWork | None:
    """Find the work of one of this library's kernels, which states it as `triton` does."""
    queries = next((shape for shape in shapes if len(shape) == 4), None)
    if queries is None:
        return None
    flops = float(stated["flops"])
    stands_for = "cudnn" if re.search(rf"{_FOR_CUDNN}\w", path) else ""
    attention = AttentionWork(
        str(stated.get("kernel", "pallas_tpu")),
        queries[-1],
        int(stated.get("keys", 0)),
        float(stated.get("seen_flops", flops)),
        matmuls,
        stands_for,
    )
    return KernelWork(flops, attention)
