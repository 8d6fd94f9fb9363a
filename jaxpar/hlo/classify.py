"""One instruction becomes one task, which says of what kind it is and how much work it does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from jaxpar.hlo import opcodes
from jaxpar.hlo.collectives import collective_of
from jaxpar.hlo.flops import Multiplied, backend_config, work_of
from jaxpar.hlo.groups import Devices
from jaxpar.hlo.parse import Computation, Instruction, Module, Shape
from jaxpar.hlo.tasks import Kind, Place, Task
from jaxpar.hlo.traffic import HOST, result_of, traffic

KernelCost = Callable[[str, str, list[tuple[int, ...]]], float | None]
"""A function (instruction name, its path in jax, its operands' shapes) -> FLOPs of a kernel; None if it is unknown."""

_NO_ARITHMETIC = opcodes.MOVES | opcodes.FREE
_HOST_TRANSFERS = ("infeed", "outfeed", "send", "recv")  # sends between devices are collectives
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def task_of(
    module: Module, devices: Devices, computation: Computation, instruction: Instruction, place: Place,
    kernel_cost: KernelCost | None = None,
) -> Task:  # fmt: skip
    """Make the task of an instruction that takes time, without its dependencies.

    Raises:
      IndexError, KeyError, ValueError: an attribute has an unknown form.
    """
    collective = collective_of(module, devices, computation, instruction)
    if collective and not opcodes.owns_collective(module, instruction):
        collective = None
    work, bytes_ = work_of(module, computation, instruction), traffic(module, computation, instruction)
    if instruction.target and not work.flops:
        work, bytes_ = _kernel_work(computation, instruction, bytes_, kernel_cost)
    kind = "collective" if collective else _kind(module, computation, instruction, work)
    result = next(result_of(instruction).leaves(), instruction.shape)
    return Task(
        instruction.name,
        instruction.opcode,
        kind,
        place,
        flops=work.flops,
        bytes=_copied_bytes(module, computation, instruction) if kind == "host_copy" else bytes_,
        cycles=cycles(instruction),
        dtype=work.dtype or result.dtype,
        shape=_shape_text(result_of(instruction)),
        collective=collective,
        asynchronous=opcodes.is_start(module, instruction),
    )


def _shape_text(shape: Shape) -> str:
    """Write a shape for people to read; a long tuple is described by its largest array."""
    if len(shape.parts) <= 2:
        return str(shape)
    largest = max(shape.leaves(), key=lambda leaf: leaf.bytes)
    return f"{largest} and {len(list(shape.leaves())) - 1} more"


def _kind(module: Module, computation: Computation, instruction: Instruction, work: Multiplied) -> Kind:
    if instruction.target:
        return "matmul" if instruction.target.startswith(opcodes.GEMM_TARGETS) else "kernel"
    if work.flops:
        return "matmul"
    if is_control(computation, instruction):
        return "control"
    moves = _only_moves(module, instruction)
    shapes = [operand.shape for operand in computation.operands(instruction)]
    on_host = any(leaf.space == HOST for shape in (*shapes, instruction.shape) for leaf in shape.leaves())
    if (moves and on_host) or instruction.opcode in _HOST_TRANSFERS:
        return "host_copy"
    return "copy" if moves else "fusion"


def is_control(computation: Computation, instruction: Instruction) -> bool:
    """Return whether this is bookkeeping on scalars, such as loop counters and offsets of slices."""
    shapes = [operand.shape for operand in computation.operands(instruction)]
    if instruction.opcode in ("dynamic-slice", "slice"):
        shapes = []
    return all(leaf.elements <= 1 for shape in (*shapes, instruction.shape) for leaf in shape.leaves())


def _only_moves(module: Module, instruction: Instruction) -> bool:
    """Return whether nothing is computed: a copy, a change of layout, a slice, or a fusion of these and offsets."""
    if instruction.base not in opcodes.CALLERS:
        return instruction.base in opcodes.MOVES
    inner = module.called(instruction)
    called = [i for computation in inner for i in computation.instructions.values() if i.shape.elements > 1]
    return bool(called) and all(i.opcode in _NO_ARITHMETIC or _only_moves(module, i) for i in called)


def _copied_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Count the bytes that cross the host link: the result's, or the update's where an array is updated in place."""
    where = next(iter(module.called(instruction)), None)
    root, where = (where.instructions[where.root], where) if where else (instruction, computation)
    if root.base == "dynamic-update-slice":
        return where.instructions[root.operands[1]].shape.bytes
    return result_of(root).bytes


def cycles(instruction: Instruction) -> int | None:
    """Return the TPU compiler's estimate of one execution, in core clock cycles; None where it made none."""
    found = _CYCLES.search(instruction.tail)
    return int(found[1]) if found and 0 < int(found[1]) < 2**60 else None


def _kernel_work(
    computation: Computation, call: Instruction, bytes_: int, kernel_cost: KernelCost | None
) -> tuple[Multiplied, int]:
    """Find a kernel's work as its author stated it; otherwise `kernel_cost` gives its FLOPs, and `bytes_` its bytes.

    Its matmuls have the dtype of its largest operand, since the other operands are tables.
    """
    shapes = [operand.shape for operand in computation.operands(call)]
    stated = _stated_cost(call)
    flops = float(stated.get("flops", 0))
    if not flops and kernel_cost:
        flops = kernel_cost(call.name, call.op_name, [shape.dims for shape in shapes]) or 0.0
    dtype = max(shapes, key=lambda shape: shape.bytes).dtype if shapes and flops else ""
    return Multiplied(flops, dtype), int(stated.get("bytes_accessed", bytes_))


def _stated_cost(call: Instruction) -> dict[str, Any]:
    """Return the cost estimate of a Pallas kernel, as JSON; empty where its author gave none."""
    # Triton's lowering has no place for a cost, so the `metadata` of the call carries it.
    if noted := re.search(r'serialized_metadata = "([^"]*)"', call.attributes.get("backend_config", "")):
        return json.loads(noted[1].replace("\\22", '"'))
    estimate: Any = backend_config(call)
    for key in ("custom_call_config", "cost_estimate"):
        estimate = estimate.get(key, {}) if isinstance(estimate, dict) else {}
    return estimate
