"""The work of the host for a device: calls that XLA makes of JAX's `compute_on("device_host")`.

The called computation is not fused in the device's program, as the host's own compiler does that.
So its arrays count once each, as they would in one pass over them: a lower bound, for that compiler
may read an operand again for each result. Elementwise arithmetic counts, unlike a device's.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxpar.hlo.program.module import Computation, Instruction, Module
from jaxpar.hlo.program.opcodes import CALLERS, ELEMENTWISE, MOVES, words
from jaxpar.hlo.work.flops import work_of
from jaxpar.hlo.work.memory_traffic import HOST, result_of

_TARGET = "HostExecute"
_ARITHMETIC = ELEMENTWISE - MOVES - words("bitcast broadcast convert pad tuple select")


class HostWork(NamedTuple):
    """The work that the host does for one device in one execution.

    Attributes:
      flops: the FLOPs of matmuls and of elementwise arithmetic.
      memory_bytes: what the host reads and writes in its own memory.
      link_bytes: the bytes of operands and results in device memory, which cross the host link
        before the work begins and when it is over.
    """

    flops: float
    memory_bytes: int
    link_bytes: int


def is_host_call(instruction: Instruction) -> bool:
    """Return whether the host computes this instruction."""
    called = instruction.base == "custom-call"
    return called and instruction.attributes.get("custom_call_target") == _TARGET


def host_work(module: Module, computation: Computation, instruction: Instruction) -> HostWork:
    """Count the work that the host does in one execution of a call.

    Args:
      instruction: the call, or the start of an asynchronous one.
    """
    operands = [leaf for one in computation.operands(instruction) for leaf in one.shape.leaves()]
    arrays = [*operands, *result_of(instruction).leaves()]
    return HostWork(
        sum(_flops(module, called) for called in module.called(instruction)),
        sum(leaf.bytes for leaf in arrays),
        sum(leaf.bytes for leaf in arrays if leaf.space != HOST),
    )


def _flops(module: Module, computation: Computation) -> float:
    """Count the FLOPs of a computation and of those it calls; a loop's body counts once."""
    flops = 0.0
    for instruction in computation.instructions.values():
        if instruction.base in (*CALLERS, "while"):
            flops += sum(_flops(module, inner) for inner in module.called(instruction))
        elif instruction.opcode in _ARITHMETIC:
            flops += instruction.shape.elements
        else:
            flops += work_of(module, computation, instruction).flops
    return flops
