"""Opcodes and custom-call targets, sorted by what they mean for a schedule."""

from __future__ import annotations

from jaxpar.hlo.collectives import KINDS
from jaxpar.hlo.flops import GEMM_TARGETS
from jaxpar.hlo.parse import Instruction, Module, words

FREE = words(
    "tuple get-tuple-element bitcast parameter constant after-all partition-id replica-id optimization-barrier"
    " add-dependency domain get-dimension-size set-dimension-size"
)
"""They take no time: names for what is already there."""

_WORK = words(
    "abs add all-gather all-reduce all-to-all and atan2 batch-norm-grad batch-norm-inference batch-norm-training"
    " bitcast-convert broadcast cbrt ceil cholesky clamp clz collective-broadcast collective-permute compare complex"
    " concatenate convert convolution copy cosine count-leading-zeros divide dot dynamic-reshape"
    " dynamic-slice dynamic-update-slice erf exponential exponential-minus-one fft floor fusion gather imag infeed iota"
    " is-finite log log-plus-one logistic map maximum minimum multiply negate not or outfeed pad popcnt power"
    " ragged-all-to-all ragged-dot real recv reduce reduce-precision reduce-scatter reduce-window remainder reshape"
    " reverse rng rng-bit-generator rng-get-and-update-state round-nearest-afz round-nearest-even rsqrt scatter select"
    " select-and-scatter send shift-left shift-right-arithmetic shift-right-logical sign sine slice sort sqrt subtract"
    " tan tanh topk transpose triangular-solve xor async stochastic-convert"
)
_FREE_TARGETS = words(
    "AllocateBuffer AssumeGatherIndicesInBound Sharding SPMDFullToShardShape SPMDShardToFullShape"
    " annotate_device_placement PinToDeviceSram CreateBuffer Pin Unpin LayoutConstraint ConcatBitcast"
)
PALLAS_TARGETS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu", "triton_kernel_call", "__custom_kernel")
_KNOWN_TARGETS = (*GEMM_TARGETS, *PALLAS_TARGETS, "__cudnn$", "TopK", "__cub$", "__cusolver$", "__cufft")
ASYNC_START, ASYNC_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
"""Targets inside the fusions in which the TPU compiler starts and ends a collective that goes on during others."""


def target(instruction: Instruction) -> str:
    """The target of a custom call; empty for any other opcode."""
    return (
        instruction.attributes.get("custom_call_target", "").strip('"') if instruction.opcode == "custom-call" else ""
    )


def is_done(module: Module, instruction: Instruction) -> bool:
    """Whether it ends an asynchronous pair."""
    return instruction.opcode.endswith("-done") or _fused_target(module, instruction) == ASYNC_DONE


def is_start(module: Module, instruction: Instruction) -> bool:
    """Whether it begins an asynchronous pair."""
    opcode = instruction.opcode
    return opcode.endswith("-start") or opcode in ("send", "recv") or _fused_target(module, instruction) == ASYNC_START


def owns_collective(module: Module, instruction: Instruction) -> bool:
    """Whether a collective inside a fusion is that fusion's own, not one that goes on while it computes.

    One that goes on has its start and its done in other fusions, and stands among this one's results.
    """
    if instruction.opcode != "fusion" or _fused_target(module, instruction) == ASYNC_START:
        return True
    inner = module.computations[instruction.called[0]]
    root = inner.instructions[inner.root]
    handed_on = [inner.instructions[name].opcode for name in root.operands] if root.opcode == "tuple" else []
    return not (handed_on.count("parameter") and any(opcode in KINDS for opcode in handed_on))


def _fused_target(module: Module, instruction: Instruction) -> str:
    """Which of the two targets a fusion has inside; empty when none."""
    if instruction.opcode != "fusion" or not instruction.called or instruction.called[0] not in module.computations:
        return ""
    inner = module.computations[instruction.called[0]].instructions.values()
    return next((target(called) for called in inner if target(called) in (ASYNC_START, ASYNC_DONE)), "")


def is_free(instruction: Instruction) -> bool:
    """Whether it takes no time: a name for what is there, the middle of an asynchronous pair, advice."""
    opcode = instruction.opcode
    return opcode in FREE or opcode.endswith("-update") or target(instruction) in _FREE_TARGETS


def unknown_name(instruction: Instruction) -> str:
    """What to list an instruction under when nobody here knows it; empty when somebody does."""
    if instruction.opcode == "custom-call":
        name = target(instruction)
        return "" if name.startswith(_KNOWN_TARGETS) else f"custom-call {name}"
    return "" if instruction.base in _WORK or instruction.base in KINDS else instruction.opcode
