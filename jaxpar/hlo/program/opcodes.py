"""Sets of opcodes and custom-call targets, by what they mean for a schedule."""

from __future__ import annotations

from jaxpar.hlo.program.module import Instruction, Module
from jaxpar.hlo.program.tasks import CollectiveKind


def words(text: str) -> frozenset[str]:
    """Return the set of the words in a text."""
    return frozenset(text.split())


COLLECTIVES: dict[str, CollectiveKind] = {
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "ppermute",
    "send": "ppermute",
    "recv": "ppermute",
}
CALLERS = ("fusion", "call", "async")
"""Opcodes that run the computation that they call once, as their own work."""
FREE = words(
    "tuple get-tuple-element bitcast parameter constant after-all partition-id replica-id "
    "optimization-barrier"
    " add-dependency domain get-dimension-size set-dimension-size"
)
"""Opcodes that take no time, since they only name what is already there."""
MOVES = words("copy transpose reshape slice dynamic-slice dynamic-update-slice concatenate reverse")
"""Opcodes that move data and compute nothing."""
SLICES = words("dynamic-slice slice gather")
"""Opcodes that read as much of their first operand as they return."""
ELEMENTWISE = words(
    "abs add and atan2 bitcast bitcast-convert broadcast ceil clamp compare complex convert "
    "copy cosine divide erf"
    " exponential exponential-minus-one floor imag is-finite log log-plus-one logistic maximum "
    "minimum multiply negate"
    " not or pad popcnt power real reduce-precision remainder reshape reverse round-nearest-afz "
    "round-nearest-even"
    " rsqrt select shift-left shift-right-arithmetic shift-right-logical sign sine sqrt "
    "subtract tan tanh transpose"
    " tuple xor cbrt concatenate"
)
"""Opcodes for which an element of the result needs one element of each operand."""

GEMM_TARGETS = ("__cublas$gemm", "__cublas$lt$matmul", "__onednn$matmul", "__triton$gemm")
_FREE_TARGETS = words(
    "AllocateBuffer AssumeGatherIndicesInBound Sharding SPMDFullToShardShape SPMDShardToFullShape"
    " annotate_device_placement PinToDeviceSram CreateBuffer Pin Unpin LayoutConstraint "
    "ConcatBitcast"
)
ASYNC_START = "AsyncCollectiveStart"
ASYNC_DONE = "AsyncCollectiveDone"
"""The targets `ASYNC_START` and `ASYNC_DONE`, in the fusions in which the TPU compiler starts and
ends a collective that runs beside other work.
"""


def is_done(module: Module, instruction: Instruction) -> bool:
    """Return whether an instruction is the `-done` half of an asynchronous pair, also inside a
    fusion.
    """
    return instruction.opcode.endswith("-done") or _fused_target(module, instruction) == ASYNC_DONE


def is_start(module: Module, instruction: Instruction) -> bool:
    """Return whether an instruction begins an asynchronous pair: a `-start`, a send or recv, or a
    fusion with a start inside.
    """
    opcode = instruction.opcode
    return (
        opcode.endswith("-start")
        or opcode in ("send", "recv")
        or _fused_target(module, instruction) == ASYNC_START
    )


def owns_collective(module: Module, instruction: Instruction) -> bool:
    """Return whether the collective inside a fusion is its own, not one that goes on while the
    fusion computes.

    A collective that goes on has its start and its done in other fusions, and is among this
    fusion's results. The answer is True for anything but a fusion.
    """
    if instruction.opcode != "fusion" or _fused_target(module, instruction) == ASYNC_START:
        return True
    inner = module.computations[instruction.called[0]]
    root = inner.result
    if root.opcode == "tuple":
        results = [result.opcode for result in inner.operands(root)]
    else:
        results = []
    return "parameter" not in results or not any(opcode in COLLECTIVES for opcode in results)


def _fused_target(module: Module, instruction: Instruction) -> str:
    """Return which of `ASYNC_START` and `ASYNC_DONE` is inside a fusion; empty if neither is."""
    if instruction.opcode == "fusion":
        inner = module.called(instruction)
    else:
        inner = []
    targets = (
        called.target for computation in inner for called in computation.instructions.values()
    )
    return next((target for target in targets if target in (ASYNC_START, ASYNC_DONE)), "")


def is_free(instruction: Instruction) -> bool:
    """Return whether an instruction takes no time: a name, the middle of an asynchronous pair, or a
    hint.
    """
    opcode = instruction.opcode
    return opcode in FREE or opcode.endswith("-update") or instruction.target in _FREE_TARGETS
