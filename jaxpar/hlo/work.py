"""The work of an instruction is the FLOPs of its matmuls, and the bytes that it really reads and
writes.

FLOPs are counted for dots, convolutions (which is how the TPU compiler writes dots) and libraries'
matmuls. A multiply-add counts as 2. Elementwise work is not counted, nor are positions of a
convolution that fall into its padding or the holes of a dilated operand: XLA turns batch dims into
windows over padding, which no hardware computes.

A fusion that slices one layer out of stacked weights reads one layer, and one that updates a slice
in place writes one slice, whatever the sizes of its operand and result. Arrays that the compiler
put on the chip or the host do not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from math import gcd, prod
from typing import Any, NamedTuple

from jaxpar.hlo.opcodes import CALLERS, COLLECTIVES, ELEMENTWISE, GEMM_TARGETS, SLICES
from jaxpar.hlo.parse import Computation, Instruction, Module, Shape, words_of

KernelCost = Callable[[str, str, list[tuple[int, ...]]], float | None]
"""A function (instruction name, its path in jax, its operands' shapes) -> FLOPs of a kernel; None
if it is unknown.
"""
_ATTENTION = "__cudnn$fmha"
HOST = 5
"""The memory space of the host, on every platform that has one."""
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}
"""The operand that is the update of the first operand."""


class Multiplied(NamedTuple):
    """The FLOPs of a task's matmuls, and the operand dtype of the largest (empty when there is
    none).
    """

    flops: float = 0.0
    dtype: str = ""


def work_of(module: Module, computation: Computation, instruction: Instruction) -> Multiplied:
    """Count the matmuls of one instruction and of the computations that it calls.

    Args:
      module: the module, in which called computations are found.
      computation: the computation in which the instruction stands.
      instruction: the instruction.

    Returns:
      The FLOPs of one execution on one device, in which a loop inside counts once, and the dtype of
      the operands.
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
        case "custom-call":
            flops = _library_flops(instruction, shapes)
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
        """Read one number for each spatial dim from `3x3`; of a padding `1_1x0_2` read the part
        before each dim.
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


def _library_flops(call: Instruction, shapes: list[Shape]) -> float:
    """Count the FLOPs of a custom call that is a known library's matmul or attention; 0 for any
    other.

    Attention by cuDNN takes 4 B H S T h forward and 10 backward, half of it where it is causal, and
    less where a window slides, since tiles that are wholly masked are skipped.
    """
    target = call.target
    config = backend_config(call)
    result = next(call.shape.leaves(), None)
    if result is None or not shapes:
        return 0.0  # the first part of a tuple is the result, the others are workspace
    if target.startswith(GEMM_TARGETS):
        numbers = _find(config, "dot_dimension_numbers") or {}
        contracted = [int(dim) for dim in numbers.get("lhs_contracting_dimensions", ())] or [-1]
        return 2.0 * result.elements * prod(shapes[0].dims[dim] for dim in contracted)
    if not target.startswith(_ATTENTION) or [len(shape.dims) for shape in shapes[:2]] != [4, 4]:
        return 0.0
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
    return (10.0 if "Backward" in target else 4.0) * prod(q) * seen


def kernel_work(
    computation: Computation, call: Instruction, bytes_: int, kernel_cost: KernelCost | None
) -> tuple[Multiplied, int]:
    """Find a kernel's work as its author stated it, or else as it can be estimated.

    Its matmuls have the dtype of its largest operand, since the other operands are tables.

    Args:
      computation: the computation in which the call stands.
      call: the custom call of the kernel.
      bytes_: the bytes to take where none are stated.
      kernel_cost: gives the FLOPs, where none are stated, of the call's name, its path and the dims
        of its operands; None = they are not known.

    Returns:
      The FLOPs and the dtype, and the bytes, of one execution.
    """
    shapes = [operand.shape for operand in computation.operands(call)]
    stated = _stated_cost(call)
    flops = float(stated.get("flops", 0))
    if not flops and kernel_cost:
        flops = kernel_cost(call.name, call.op_name, [shape.dims for shape in shapes]) or 0.0
    if shapes and flops:
        dtype = max(shapes, key=lambda shape: shape.bytes).dtype
    else:
        dtype = ""
    return Multiplied(flops, dtype), int(stated.get("bytes_accessed", bytes_))


def _stated_cost(call: Instruction) -> dict[str, Any]:
    """Return the cost estimate of a Pallas kernel, as JSON; empty where its author gave none."""
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
    """Return the backend's own notes as JSON; {} when there are none or they are not JSON."""
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


def in_memory(module: Module, shape: Shape) -> bool:
    """Return whether an array lies in device memory (HBM), not on the chip or on the host.

    On a TPU only space 0 is device memory; elsewhere every space but the host's is (S(1) on a GPU
    is memory set aside for collectives).
    """
    if module.tiled:
        return shape.space == 0
    return shape.space != HOST


def memory_bytes(module: Module, shape: Shape) -> int:
    """Count the bytes of the arrays of a shape that lie in device memory."""
    return sum(leaf.bytes for leaf in shape.leaves() if in_memory(module, leaf))


def result_of(instruction: Instruction) -> Shape:
    """Return what an instruction makes; for the start of an asynchronous pair, what its done will
    return.

    The tuple of a start has the operands first, then the result, then flags; but that of copy-start
    has the result first, and those of send and recv have the data first.

    Args:
      instruction: the instruction.

    Returns:
      The shape, without the operands and flags that the tuple of a start has beside it.
    """
    shape = instruction.shape
    if instruction.opcode in ("send", "recv"):
        return shape.parts[0]
    if (
        not instruction.opcode.endswith("-start")
        or len(shape.parts) < 2
        or instruction.opcode == "all-reduce-start"
    ):
        return shape
    return shape.parts[0 if instruction.opcode == "copy-start" else 1]


def traffic(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Count the bytes that one execution of an instruction reads and writes in device memory.

    Args:
      module: the module, in which called computations are found.
      computation: the computation in which the instruction stands.
      instruction: the instruction.

    Returns:
      The bytes. Of an array that is sliced or updated in place only the part counts.
    """
    shapes = [operand.shape for operand in computation.operands(instruction)]
    result = result_of(instruction)
    if instruction.base in CALLERS:
        inner = module.called(instruction)
    else:
        inner = []
    if inner:
        return _fusion_traffic(module, inner[0], result, shapes)
    written = memory_bytes(module, result)
    match instruction.base:
        case "dynamic-slice" | "slice" | "gather":
            if in_memory(module, shapes[0]):
                read = result.bytes
            else:
                read = 0
            return written + read + sum(memory_bytes(module, shape) for shape in shapes[1:])
        case "dynamic-update-slice":
            return _share(module, shapes[0], shapes[1].bytes) + memory_bytes(module, shapes[1])
        case "scatter":
            updates = shapes[len(shapes) // 2 + 1 :]
            changed = sum(2 * _share(module, shapes[0], update.bytes) for update in updates)
            return changed + sum(
                memory_bytes(module, shape) for shape in shapes[len(shapes) // 2 :]
            )
        case _:
            return written + sum(memory_bytes(module, shape) for shape in shapes)


def _share(module: Module, whole: Shape, part: int) -> int:
    if in_memory(module, next(whole.leaves(), whole)):
        return part
    return 0


def _fusion_traffic(
    module: Module, inner: Computation, result: Shape, operands: list[Shape]
) -> int:
    need = element_shares(module, inner)
    given = zip(inner.parameters, operands, strict=False)
    read = sum(need.get(name, 1.0) * memory_bytes(module, shape) for name, shape in given)
    outputs = _outputs(inner)
    leaves = list(result.leaves())
    if len(outputs) != len(leaves):
        return round(read) + memory_bytes(module, result)
    written = 0
    for output, leaf in zip(outputs, leaves, strict=True):
        if _is_passed_on(inner, output):
            continue
        update = _update_in_place(inner, output)
        if update:
            part = inner.instructions[update.operands[_UPDATES[update.opcode]]].shape
        else:
            part = leaf
        written += part.bytes if in_memory(module, leaf) else 0
    return round(read) + written


def _outputs(inner: Computation) -> list[Instruction]:
    root = inner.instructions[inner.root]
    if root.opcode == "tuple":
        return inner.operands(root)
    return [root]


def _is_passed_on(inner: Computation, output: Instruction) -> bool:
    """Return whether a fusion does not write this output: an operand handed on, or a collective
    that goes on.
    """
    return output.name != inner.root and (
        output.opcode == "parameter" or output.opcode in COLLECTIVES
    )


def _update_in_place(inner: Computation, output: Instruction) -> Instruction | None:
    """Find the instruction that makes an output by updating part of one of the fusion's operands;
    None if none does.
    """
    update = inner.behind(output.name)
    if update is None or update.opcode not in _UPDATES:
        return None
    whole = inner.behind(update.operands[0])
    if whole is not None and whole.opcode == "parameter":
        return update
    return None


def element_shares(module: Module, inner: Computation) -> dict[str, float]:
    """Find for each instruction of a fused computation the share of its elements that the results
    depend on.

    A fusion computes an element only when it is needed: if an array is only sliced, only the slice
    is computed or read. Several readers are assumed to need different elements, up to the whole. A
    collective inside reads what it needs itself.

    Args:
      module: the module, in which computations called inside are found.
      inner: the fused computation.

    Returns:
      The shares from 0 to 1, by the name of the instruction.
    """
    share: dict[str, float] = {inner.root: 1.0}
    outputs = {output.name: output for output in _outputs(inner)}
    passed_on = {name for name, output in outputs.items() if _is_passed_on(inner, output)}
    updates = [_update_in_place(inner, output) for output in outputs.values()]
    in_place = {update.name for update in updates if update is not None}
    for name in reversed(inner.instructions):
        users = [
            user
            for user in inner.users[name]
            if not (user.name == inner.root and name in passed_on)
        ]
        source = inner.instructions[name]
        asked = (
            _source_share(
                module,
                source,
                user,
                share.get(user.name, 0.0),
                user.name in in_place,
            )
            for user in users
        )
        share.setdefault(name, min(1.0, sum(asked)))
    return share


def _source_share(
    module: Module, source: Instruction, user: Instruction, share: float, in_place: bool
) -> float:
    """Find the share of `source` that a user needs to make `share` of its own elements, perhaps by
    update in place.
    """
    if share == 0.0 or user.opcode in COLLECTIVES:
        return 0.0
    whole = source.shape.elements or 1
    first = user.operands[0] == source.name
    if user.opcode in SLICES and first:
        return share * user.shape.elements / whole
    if user.opcode in _UPDATES and first:
        return 0.0 if in_place else share
    if user.opcode == "fusion" and (inner := module.called(user)):
        (nested,) = inner
        need = element_shares(module, nested)
        pairs = zip(nested.parameters, user.operands, strict=False)
        return sum(need[parameter] for parameter, name in pairs if name == source.name)
    if user.opcode in ELEMENTWISE or user.opcode in SLICES:
        return share
    return 1.0


def copied_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Count the bytes that cross the host link: the result's, or the update's where an array is
    updated in place.

    Args:
      module: the module, in which called computations are found.
      computation: the computation in which the instruction stands.
      instruction: a copy from or to the host, or a fusion that is one.

    Returns:
      The bytes of one execution.
    """
    where = next(iter(module.called(instruction)), None)
    root, where = (where.instructions[where.root], where) if where else (instruction, computation)
    if root.base == "dynamic-update-slice":
        return where.instructions[root.operands[1]].shape.bytes
    return result_of(root).bytes
