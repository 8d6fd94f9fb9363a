"""The compiler's account of device memory, divided into parts that a user knows, such as parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxpar.hlo.parse import Computation, Module
from jaxpar.rehearse.report.schema import Memory


class CompiledBytes(NamedTuple):
    """The bytes of one device that a program takes, as the compiler says."""

    arguments: int
    temporaries: int
    """The bytes of temporaries, and of results that do not reuse an argument's memory."""
    program: int
    host: int

    @property
    def total(self) -> int:
        """The bytes on the device, without those in host memory."""
        return self.arguments + self.temporaries + self.program

    @staticmethod
    def of(stats: Any) -> CompiledBytes:
        """Read them from `compiled.memory_analysis()`."""
        grown = max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0)
        return CompiledBytes(
            stats.argument_size_in_bytes, stats.temp_size_in_bytes + grown, stats.generated_code_size_in_bytes,
            stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes,
        )  # fmt: skip


_FRAGMENTED = 1.05
"""A TPU's heap over the peak of what is alive: measured heaps were 3.6 and 4.3 % larger (docs/memory.md)."""


def allocated_bytes(stats: Any, platform: str) -> int:
    """The bytes of a device that a program allocates.

    On a TPU `temp_size_in_bytes` is more than buffer assignment lays out, by half where a loop over microbatches
    contains loops over layers. The result for a TPU is the peak of what is alive plus what gaps between arrays add.

    Args:
      stats: the result of `compiled.memory_analysis()`.
      platform: the platform that the program is compiled for.
    """
    total, peak = CompiledBytes.of(stats).total, getattr(stats, "peak_memory_in_bytes", 0)
    known = platform == "tpu" and peak > stats.argument_size_in_bytes
    return min(total, int(_FRAGMENTED * peak) + stats.generated_code_size_in_bytes) if known else total


def saved_bytes(module: Module, layers: int) -> int:
    """The bytes that the forward pass keeps for the backward: its loops fill stacks with one slice a layer."""
    total = 0
    for computation in module.computations.values():
        for loop in computation.instructions.values():
            if loop.opcode != "while" or "transpose(" in loop.op_name or "jvp()" not in loop.op_name:
                continue
            state = computation.instructions.get(loop.operands[0])
            names = state.operands if state is not None and state.opcode == "tuple" else ()
            same = module.handed_on(loop)
            shapes = [
                computation.instructions[name].shape
                for at, name in enumerate(names) if at not in same and _empty(computation, name)
            ]  # fmt: skip
            total += sum(shape.bytes for shape in shapes if shape.dims[:1] == (layers,) and not shape.space)
    return total


def _empty(computation: Computation, name: str) -> bool:
    """Whether a loop's array starts out empty."""
    made = computation.behind(name, ("copy", "bitcast", "get-tuple-element"))
    if made is None:
        return False
    blank = made.opcode in ("broadcast", "constant") or (made.opcode == "fusion" and "broadcast" in made.name)
    return blank or "AllocateBuffer" in made.target


def account(
    stats: Any, arguments: Mapping[str, int], hbm_bytes: int, activations: int = 0,
    gradients: int = 0,
) -> Memory:  # fmt: skip
    """Make the report's account of memory.

    Args:
      stats: the result of `compiled.memory_analysis()`.
      arguments: the bytes of one device's part of each argument, by name.
      hbm_bytes: the bytes of a device's memory; 0 = no figure.
      activations: the bytes of the temporaries that are kept from forward to backward, from `saved_bytes`.
      gradients: the bytes of the temporaries that are gradients.
    """
    compiled, temporaries = CompiledBytes.of(stats), stats.temp_size_in_bytes
    if sum(arguments.values()) > compiled.arguments:  # the program leaves out unused arguments
        arguments = {}
    left = compiled.arguments - sum(arguments.values())
    activations = min(activations, temporaries)
    gradients = min(gradients, temporaries - activations)
    known = {"activations": activations, "gradients": gradients} if activations or gradients else {}
    on_host = {
        "arguments": stats.host_argument_size_in_bytes,
        "temporaries": stats.host_temp_size_in_bytes,
    }
    return {
        "hbm_bytes": hbm_bytes,
        "total": compiled.total,
        "fits": not hbm_bytes or compiled.total <= hbm_bytes,
        "categories": {
            **arguments,
            **known,
            "temporaries": compiled.temporaries - activations - gradients,
            "program": compiled.program,
            "padding" if arguments else "arguments": left,
        },
        "host": {name: size for name, size in on_host.items() if size},
        "advice": [],
    }
