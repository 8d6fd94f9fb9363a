"""Device memory by the compiler's account, divided into what a user knows: parameters, optimizer, activations."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jaxpar.hlo.parse import Computation, Instruction, Module
from jaxpar.rehearse.report.schema import Memory
from jaxpar.train.state_bytes import by_memory, local_bytes


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


def allocated(stats: Any, platform: str) -> int:
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
            same = _unchanged(module, loop)
            shapes = [
                computation.instructions[name].shape
                for at, name in enumerate(names) if at not in same and _empty(computation, name)
            ]  # fmt: skip
            total += sum(shape.bytes for shape in shapes if shape.dims[:1] == (layers,) and not shape.space)
    return total


def _unchanged(module: Module, loop: Instruction) -> set[int]:
    """Which of a loop's arrays leave its body as they came, by number."""
    body = module.computations[loop.attributes["body"].lstrip("%")]
    root = body.instructions[body.root]
    found = set[int]()
    for at, name in enumerate(root.operands if root.opcode == "tuple" else ()):
        one = body.instructions[name]
        while one.opcode in ("copy", "bitcast"):
            one = body.instructions[one.operands[0]]
        if one.opcode == "get-tuple-element" and one.operands[0] in body.parameters and one.numbers("index") == (at,):
            found.add(at)
    return found


def _empty(computation: Computation, name: str) -> bool:
    """Whether a loop's array starts out with nothing in it."""
    made = computation.instructions.get(name)
    while made is not None and made.opcode in ("copy", "bitcast", "get-tuple-element"):
        made = computation.instructions.get(made.operands[0])
    if made is None:
        return False
    blank = made.opcode in ("broadcast", "constant") or (made.opcode == "fusion" and "broadcast" in made.name)
    return blank or "AllocateBuffer" in made.attributes.get("custom_call_target", "")


def of_arguments(stats: Any, arguments: dict[str, Any], hbm_bytes: int) -> Memory:
    """The report's memory of a function of which only the arguments are known.

    Args:
      stats: `compiled.memory_analysis()`.
      arguments: by name, ShapeDtypeStructs with shardings, or pytrees of such.
      hbm_bytes: what a device has; 0 = no figure.
    """
    compiled = CompiledBytes.of(stats)
    placed = {name: [leaf for leaf in jax.tree.leaves(tree) if _placed(leaf)] for name, tree in arguments.items()}
    sizes = {name: local_bytes(leaves) for name, leaves in placed.items() if leaves}
    if sum(sizes.values()) > compiled.arguments:  # an argument that is not used is left out of the program
        sizes = {}
    left = compiled.arguments - sum(sizes.values())
    parts = sizes | {"padding" if sizes else "arguments": left, "temporaries": compiled.temporaries}
    return _memory(stats, compiled, parts | {"program": compiled.program}, hbm_bytes)


def _placed(leaf: Any) -> bool:
    return getattr(leaf, "sharding", None) is not None


def account(
    stats: Any,
    state: Any,
    batch: Any,
    module: Module,
    layers: int,
    hbm_bytes: int,
    host: Any = None,
    summed: int | None = None,
) -> Memory:
    """The report's memory.

    Args:
      stats: `compiled.memory_analysis()`.
      state: the TrainState, as ShapeDtypeStructs with shardings.
      batch: likewise.
      module: the compiled program.
      layers: of the model.
      hbm_bytes: what a device has; 0 = no figure.
      host: as for `by_memory`.
      summed: bytes of gradients; None = as many as of the parameters.
    """
    compiled, temporaries = CompiledBytes.of(stats), stats.temp_size_in_bytes
    (parameters, optimizer), _ = by_memory(state, host)
    rows = local_bytes(batch)
    saved = min(saved_bytes(module, layers), temporaries)
    # Gradients lie as float32 moments do, two a parameter.
    gradients = min(parameters, optimizer // 2) if summed is None else summed
    gradients = min(gradients, temporaries - saved)
    categories = {
        "parameters": parameters,
        "optimizer": optimizer,
        "batch": rows,
        "activations": saved,
        "gradients": gradients,
        "temporaries": compiled.temporaries - saved - gradients,
        "program": compiled.program,
        "padding": compiled.arguments - parameters - optimizer - rows,
    }
    return _memory(stats, compiled, categories, hbm_bytes)


def _memory(stats: Any, compiled: CompiledBytes, categories: dict[str, int], hbm_bytes: int) -> Memory:
    on_host = {
        "arguments": stats.host_argument_size_in_bytes,
        "temporaries": stats.host_temp_size_in_bytes,
    }
    return {
        "hbm_bytes": hbm_bytes,
        "total": compiled.total,
        "fits": not hbm_bytes or compiled.total <= hbm_bytes,
        "categories": categories,
        "host": {name: size for name, size in on_host.items() if size},
        "advice": [],
    }
