"""Opcodes and custom-call targets, sorted by what they mean for a schedule."""

from __future__ import annotations

from jaxpar.hlo.parse import Instruction, Module, words
from jaxpar.hlo.tasks import CollectiveKind

COLLECTIVES: dict[str, CollectiveKind] = {
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "ppermute",
    "collective-broadcast": "ppermute",
    "send": "ppermute",
    "recv": "ppermute",
}
CALLERS = ("fusion", "call", "async")
"""They run the computation that they call once, as their own work."""
FREE = words(
    "tuple get-tuple-element bitcast parameter constant after-all partition-id replica-id optimization-barrier"
    " add-dependency domain get-dimension-size set-dimension-size"
)
"""They take no time: names for what is already there."""
MOVES = words("copy transpose reshape slice dynamic-slice dynamic-update-slice concatenate reverse")
"""They move data and compute nothing."""
SLICES = words("dynamic-slice slice gather")
"""They read of their first operand as much as they return."""
ELEMENTWISE = words(
    "abs add and atan2 bitcast bitcast-convert broadcast ceil clamp compare complex convert copy cosine divide erf"
    " exponential exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum multiply negate"
    " not or pad popcnt power real reduce-precision remainder reshape reverse round-nearest-afz round-nearest-even"
    " rsqrt select shift-left shift-right-arithmetic shift-right-logical sign sine sqrt subtract tan tanh transpose"
    " tuple xor cbrt concatenate"
)
"""An element of the result needs one element of each operand."""
_OTHERS = words(
    "batch-norm-grad batch-norm-inference batch-norm-training cholesky clz convolution count-leading-zeros dot"
    " dynamic-reshape fft fusion infeed iota map outfeed ragged-dot reduce reduce-window rng rng-bit-generator"
    " rng-get-and-update-state scatter select-and-scatter sort topk triangular-solve async stochastic-convert"
)
_KNOWN = MOVES | SLICES | ELEMENTWISE | _OTHERS | COLLECTIVES.keys()

GEMM_TARGETS = ("__cublas$gemm", "__cublas$lt$matmul", "__onednn$matmul", "__triton$gemm")
PALLAS_TARGETS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu", "triton_kernel_call", "__custom_kernel")
_KNOWN_TARGETS = (*GEMM_TARGETS, *PALLAS_TARGETS, "__cudnn$", "TopK", "__cub$", "__cusolver$", "__cufft")
_FREE_TARGETS = words(
    "AllocateBuffer AssumeGatherIndicesInBound Sharding SPMDFullToShardShape SPMDShardToFullShape"
    " annotate_device_placement PinToDeviceSram CreateBuffer Pin Unpin LayoutConstraint ConcatBitcast"
)
ASYNC_START, ASYNC_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
"""Targets inside the fusions in which the TPU compiler starts and ends a collective that goes on during others."""


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
    results = [result.opcode for result in inner.operands(root)] if root.opcode == "tuple" else []
    return "parameter" not in results or not any(opcode in COLLECTIVES for opcode in results)


def _fused_target(module: Module, instruction: Instruction) -> str:
    """Which of the two targets a fusion has inside; empty when none."""
    inner = module.called(instruction) if instruction.opcode == "fusion" else []
    targets = (called.target for computation in inner for called in computation.instructions.values())
    return next((target for target in targets if target in (ASYNC_START, ASYNC_DONE)), "")


def is_free(instruction: Instruction) -> bool:
    """Whether it takes no time: a name for what is there, the middle of an asynchronous pair, advice."""
    opcode = instruction.opcode
    return opcode in FREE or opcode.endswith("-update") or instruction.target in _FREE_TARGETS


def unknown_name(instruction: Instruction) -> str:
    """What to list an instruction under when nobody here knows it; empty when somebody does."""
    if instruction.opcode == "custom-call":
        target = instruction.target
        return "" if target.startswith(_KNOWN_TARGETS) else f"custom-call {target}"
    return "" if instruction.base in _KNOWN else instruction.opcode
