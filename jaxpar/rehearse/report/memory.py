"""Device memory by the compiler's account, divided into what a user knows: parameters, optimizer, activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxpar.hlo.parse import Computation, Module
from jaxpar.rehearse.report.schema import Memory


class CompiledBytes(NamedTuple):
    """What the compiler says that a program takes, bytes of one device."""

    arguments: int
    temporaries: int
    """And results that are no argument's own."""
    program: int
    host: int

    @property
    def total(self) -> int:
        """On the device."""
        return self.arguments + self.temporaries + self.program

    @staticmethod
    def of(stats: Any) -> CompiledBytes:
        """From `compiled.memory_analysis()`."""
        grown = max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0)
        return CompiledBytes(
            stats.argument_size_in_bytes, stats.temp_size_in_bytes + grown, stats.generated_code_size_in_bytes,
            stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes,
        )  # fmt: skip


_FRAGMENTED = 1.05
"""Of the peak of what is alive on a TPU: heaps were 3.6 and 4.3 % larger (docs/memory.md)."""


def allocated_bytes(stats: Any, platform: str) -> int:
    """Bytes of a device that a program allocates.

    On a TPU `temp_size_in_bytes` is more than buffer assignment lays out, by half where loops over layers stand in one
    over microbatches: there it is the peak of what is alive, and what gaps between arrays add.

    Args:
      stats: `compiled.memory_analysis()`.
      platform: compiled for.
    """
    total, peak = CompiledBytes.of(stats).total, getattr(stats, "peak_memory_in_bytes", 0)
    known = platform == "tpu" and peak > stats.argument_size_in_bytes
    return min(total, int(_FRAGMENTED * peak) + stats.generated_code_size_in_bytes) if known else total


def saved_bytes(module: Module, layers: int) -> int:
    """Bytes that the forward pass keeps for the backward: stacks of one slice a layer that its loops fill."""
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
    """Whether a loop's array starts out with nothing in it."""
    made = computation.behind(name, ("copy", "bitcast", "get-tuple-element"))
    if made is None:
        return False
    blank = made.opcode in ("broadcast", "constant") or (made.opcode == "fusion" and "broadcast" in made.name)
    return blank or "AllocateBuffer" in made.target


def account(
    stats: Any, arguments: Mapping[str, int], hbm_bytes: int, activations: int = 0,
    gradients: int = 0,
) -> Memory:  # fmt: skip
    """The report's memory.

    Args:
      stats: `compiled.memory_analysis()`.
      arguments: bytes of one device's part of each argument, by name.
      hbm_bytes: what a device has; 0 = no figure.
      activations: bytes of the temporaries that are kept from forward to backward: `saved_bytes`.
      gradients: bytes of them that are gradients.
    """
    compiled, temporaries = CompiledBytes.of(stats), stats.temp_size_in_bytes
    if sum(arguments.values()) > compiled.arguments:  # an argument that is not used is left out of the program
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
