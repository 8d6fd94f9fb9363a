"""The FLOPs of an instruction's matmuls.

They are counted for dots, convolutions (which is how the TPU compiler writes dots) and libraries'
matmuls. A multiply-add counts as 2. Elementwise work is not counted, nor are positions of a
convolution that fall into its padding or the holes of a dilated operand: XLA turns batch dims into
windows over padding, which no hardware computes.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from math import gcd, prod
from typing import Any, NamedTuple

from jaxpar.base.kernel_work import (
    BACKWARD_MATMULS,
    FORWARD_MATMULS,
    AttentionWork,
    KernelCost,
)
from jaxpar.hlo.program.module import Computation, Instruction, Module, Shape
from jaxpar.hlo.program.opcodes import CALLERS, GEMM_TARGETS
from jaxpar.hlo.program.text import words_of

_ATTENTION = "__cudnn$fmha"


class Multiplied(NamedTuple):
    """The FLOPs of a task's matmuls, and the operand dtype of the largest (empty when there is
    none).
    """

    flops: float = 0.0
    dtype: str = ""
    attention: AttentionWork | None = None
    """What a kernel of attention computes, where the task is one."""


def work_of(module: Module, computation: Computation, instruction: Instruction) -> Multiplied:
    """Count the FLOPs of one execution, on one device, of an instruction and of the computations
    that it calls, without loops (`jaxpar.hlo.read` makes tasks of what is in them).
    """
    shapes = [operand.shape for operand in computation.operands(instruction)]
    if len(shapes) < len(instruction.operands):
        return Multiplied()  # the text was cut short
    if instruction.base in CALLERS:
        inner = module.called(instruction)
        parts = [
            work_of(module, called, one) for called in inner for one in called.instructions.values()
        ]
        largest = max(parts, key=lambda part: part.flops, default=Multiplied())
        return Multiplied(sum(part.flops for part in parts), largest.dtype)
    match instruction.base:
        case "dot" | "ragged-dot":
            contracted = instruction.numbers("lhs_contracting_dims")
            flops = (
                2.0 * instruction.shape.elements * prod(shapes[0].dims[dim] for dim in contracted)
            )
        case "convolution":
            flops = _convolution_flops(
                instruction, shapes[0], shapes[1], next(instruction.shape.leaves())
            )
        case "custom-call" if instruction.target.startswith(_ATTENTION):
            attention = _cudnn_work(instruction, shapes)
            flops = attention.flops if attention else 0.0
            return Multiplied(flops, shapes[0].dtype if flops else "", attention)
        case "custom-call":
            flops = _gemm_flops(instruction, shapes)
        case _:
            flops = 0.0
    if flops:
        return Multiplied(flops, shapes[0].dtype)
    return Multiplied()


def _convolution_flops(convolution: Instruction, lhs: Shape, rhs: Shape, out: Shape) -> float:
    """Count the FLOPs of a convolution without positions in padding; `dim_labels=b01f_01io->b01f`
    names the dims.
    """
    lhs_labels, rhs_labels, out_labels = re.split(
        r"_|->", convolution.attributes.get("dim_labels", "")
    )
    groups = int(convolution.attributes.get("batch_group_count", 1))
    inputs = rhs.dims[rhs_labels.index("i")]
    outputs = rhs.dims[rhs_labels.index("o")]
    batch = lhs.dims[lhs_labels.index("b")] // groups
    window = words_of(convolution.attributes.get("window", ""))
    dims = sum(label.isdigit() for label in out_labels)

    def extents(key: str, otherwise: int) -> list[int]:
        """Read one number for each spatial dim from `3x3`; of a padding `1_1x0_2` the part before
        each dim.
        """
        if key in window:
            return [int(one.split("_")[0]) for one in window[key].split("x")]
        return [otherwise] * dims

    keys = {"size": 1, "stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}
    positions = 1
    for dim, extent in enumerate(
        zip(
            *(extents(key, otherwise) for key, otherwise in keys.items()),
            strict=True,
        )
    ):
        sizes = lhs.dims[lhs_labels.index(str(dim))], out.dims[out_labels.index(str(dim))]
        positions *= _positions(*sizes, *extent)
    return 2.0 * inputs * outputs * batch * positions


@lru_cache(maxsize=10_000)
def _positions(
    lhs: int, out: int, size: int, stride: int, before: int, lhs_dilation: int, rhs_dilation: int
) -> int:
    """Count the (output, window) pairs of positions in one spatial dim that meet an element of the
    left operand.

    Output o and window w meet position `o * stride + w * rhs_dilation - before` of the dilated
    operand, which has an element there when that is a multiple of lhs_dilation in range.
    """
    last = (lhs - 1) * lhs_dilation
    period = lhs_dilation // gcd(lhs_dilation, stride)
    total = 0
    for w in range(size):
        offset = w * rhs_dilation - before
        low = max(0, -(offset // stride))  # the first o at or past position 0
        high = min(out - 1, (last - offset) // stride)
        first = next(
            (o for o in range(low, low + period) if (o * stride + offset) % lhs_dilation == 0), None
        )
        if first is not None and first <= high:
            total += (high - first) // period + 1
    return total


def _gemm_flops(call: Instruction, shapes: list[Shape]) -> float:
    """Count the FLOPs of a library's matmul; 0 for any other custom call."""
    result = next(call.shape.leaves(), None)
    if result is None or not shapes or not call.target.startswith(GEMM_TARGETS):
        return 0.0  # the first part of a tuple is the result, the others are workspace
    numbers = _find(backend_config(call), "dot_dimension_numbers") or {}
    contracted = [int(dim) for dim in numbers.get("lhs_contracting_dimensions", ())] or [-1]
    return 2.0 * result.elements * prod(shapes[0].dims[dim] for dim in contracted)


def _cudnn_work(call: Instruction, shapes: list[Shape]) -> AttentionWork | None:
    """Read what attention by cuDNN computes; None where the call has an unknown form.

    It takes 4 B H S T h FLOPs forward and 10 backward, half of it where it is causal, and less
    where a window slides, since tiles that are wholly masked are skipped.
    """
    config = backend_config(call)
    if [len(shape.dims) for shape in shapes[:2]] != [4, 4]:
        return None
    q = shapes[0].dims
    k = shapes[1].dims
    # With [B, S, H, h] or [B, H, S, h], multiply q's dims by the keys' length, which is k's dim
    # that is not the batch, the heads or head_dim. The shape of the scores gives it where the
    # configuration states that shape.
    scores = _find(config, "intermediate_tensor_shape") or {}
    dims = [int(dim) for dim in scores.get("dimensions", ())]
    keys = dims[-1] if dims else k[1]
    causal = "CAUSAL" in str(_find(config, "mask_type") or "")
    # keys up to the query itself; 0 = all
    window = int(_find(config, "sliding_window_length") or 0)
    seen = keys * 0.5 if causal else keys
    if causal and 0 < window < keys:
        seen = window * (1 - window / (2 * keys))
    matmuls = BACKWARD_MATMULS if "Backward" in call.target else FORWARD_MATMULS
    return AttentionWork(
        "cudnn", q[-1], min(window or keys, keys), 2.0 * matmuls * prod(q) * seen, matmuls
    )


def kernel_work(
    computation: Computation, call: Instruction, bytes_: int, kernel_cost: KernelCost | None
) -> tuple[Multiplied, int]:
    """Return a kernel's FLOPs, their dtype and its bytes, as its author stated them, or else
    estimated.

    Its matmuls have the dtype of its largest operand, since the other operands are tables.

    Args:
      bytes_: the bytes to take where none are stated.
      kernel_cost: gives the FLOPs, where none are stated, and what is known of attention; None =
        nothing is known.
    """
    shapes = [operand.shape for operand in computation.operands(call)]
    stated = _stated_cost(call)
    known = None
    if kernel_cost:
        known = kernel_cost(call.name, call.op_name, [shape.dims for shape in shapes], stated)
    flops = float(stated.get("flops", 0)) or (known.flops if known else 0.0)
    if shapes and flops:
        dtype = max(shapes, key=lambda shape: shape.bytes).dtype
    else:
        dtype = ""
    attention = known.attention if known else None
    return Multiplied(flops, dtype, attention), int(stated.get("bytes_accessed", bytes_))


def _stated_cost(call: Instruction) -> dict[str, Any]:
    """Read the cost estimate of a Pallas kernel, as JSON; empty where its author gave none."""
    # Triton's lowering has no place for a cost, so the `metadata` of the call carries it.
    if noted := re.search(
        r'serialized_metadata = "([^"]*)"', call.attributes.get("backend_config", "")
    ):
        return json.loads(noted[1].replace("\\22", '"'))
    estimate: Any = backend_config(call)
    for key in ("custom_call_config", "cost_estimate"):
        if isinstance(estimate, dict):
            estimate = estimate.get(key, {})
        else:
            estimate = {}
    return estimate


def backend_config(instruction: Instruction) -> Any:
    """Read the backend's own notes as JSON; {} when there are none or they are not JSON."""
    try:
        return json.loads(instruction.attributes.get("backend_config", "{}"))
    except json.JSONDecodeError:
        return {}


def _find(config: Any, key: str) -> Any:
    """Find the first value under a key, at any depth."""
    if isinstance(config, dict):
        if key in config:
            return config[key]
        config = list(config.values())
    values = config if isinstance(config, list) else []
    return next(
        (found for value in values if (found := _find(value, key)) is not None),
        None,
    )
