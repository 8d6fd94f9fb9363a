"""Opcodes and custom-call targets, sorted by what they mean for a schedule."""

from __future__ import annotations

from jaxpar.hlo.collectives import KINDS
from jaxpar.hlo.flops import GEMM_TARGETS
from jaxpar.hlo.parse import Instruction, words

FREE = words(
    "tuple get-tuple-element bitcast parameter constant after-all partition-id replica-id optimization-barrier"
    " add-dependency domain get-dimension-size set-dimension-size async-update"
)
"""They take no time: names for what is already there."""

_WORK = words(
    "abs add all-gather all-reduce all-to-all and atan2 batch-norm-grad batch-norm-inference batch-norm-training"
    " bitcast-convert broadcast cbrt ceil cholesky clamp clz collective-broadcast collective-permute compare complex"
    " concatenate convert convolution copy copy-start cosine count-leading-zeros divide dot dynamic-reshape"
    " dynamic-slice dynamic-update-slice erf exponential exponential-minus-one fft floor fusion gather imag infeed iota"
    " is-finite log log-plus-one logistic map maximum minimum multiply negate not or outfeed pad popcnt power"
    " ragged-all-to-all ragged-dot real recv reduce reduce-precision reduce-scatter reduce-window remainder reshape"
    " reverse rng rng-bit-generator rng-get-and-update-state round-nearest-afz round-nearest-even rsqrt scatter select"
    " select-and-scatter send shift-left shift-right-arithmetic shift-right-logical sign sine slice sort sqrt subtract"
    " tan tanh topk transpose triangular-solve xor async-start all-gather-start all-reduce-start"
    " collective-permute-start stochastic-convert custom-call"
)
_FREE_TARGETS = words(
    "AllocateBuffer AssumeGatherIndicesInBound Sharding SPMDFullToShardShape SPMDShardToFullShape"
    " annotate_device_placement PinToDeviceSram CreateBuffer Pin Unpin LayoutConstraint"
)
PALLAS_TARGETS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu", "triton_kernel_call", "__custom_kernel")
_KNOWN_TARGETS = (*GEMM_TARGETS, *PALLAS_TARGETS, "__cudnn$", "TopK", "__cub$", "__cusolver$", "__cufft")
_DONE = ("copy-done", "send-done", "recv-done", "async-done", "all-gather-done", "all-reduce-done")


def target(instruction: Instruction) -> str:
    """The target of a custom call; empty for any other opcode."""
    return (
        instruction.attributes.get("custom_call_target", "").strip('"') if instruction.opcode == "custom-call" else ""
    )


def is_done(instruction: Instruction) -> bool:
    """Whether it ends an asynchronous pair."""
    return instruction.opcode in _DONE or instruction.opcode == "collective-permute-done"


def is_start(instruction: Instruction) -> bool:
    """Whether it begins an asynchronous pair."""
    return instruction.opcode.endswith("-start") or instruction.opcode in ("send", "recv")


def is_free_call(instruction: Instruction) -> bool:
    """Whether it is a custom call that only tells the compiler something."""
    return target(instruction) in _FREE_TARGETS


def unknown_name(instruction: Instruction) -> str:
    """What to list an instruction under when nobody here knows it; empty when somebody does."""
    if instruction.opcode == "custom-call":
        name = target(instruction)
        return "" if name.startswith(_KNOWN_TARGETS) else f"custom-call {name}"
    known = instruction.opcode in _WORK or instruction.opcode.removesuffix("-start") in KINDS
    return "" if known else instruction.opcode
