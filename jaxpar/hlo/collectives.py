"""A collective says what moves between which devices in one execution of an instruction."""

from __future__ import annotations

from collections import Counter

from jaxpar.hlo.groups import TRANSFERS, Devices, Groups, megascale, replica_groups, source_target_pairs
from jaxpar.hlo.opcodes import CALLERS, COLLECTIVES
from jaxpar.hlo.parse import Computation, Instruction, Module
from jaxpar.hlo.tasks import Collective, CollectiveKind


def collective_of(
    module: Module, devices: Devices, computation: Computation, instruction: Instruction
) -> Collective | None:
    """Find the collective that an instruction is or wraps (in a fusion, call or async-start); None if there is none.

    A transfer to or from the host (`send` with is_host_transfer) does not count, unless it is traffic between slices.
    Groups are empty where the text has them in an unknown form.
    """
    if instruction.attributes.get("is_host_transfer") == "true":
        said = megascale(instruction)
        kind = TRANSFERS.get(said.get("_xla_megascale_transfer_type", ""), "ppermute") if said else None
        groups = devices.between(said["_xla_megascale_target"]) if "_xla_megascale_target" in said else ()
        return _collective(computation, instruction, kind, groups) if kind else None
    kind = COLLECTIVES.get(instruction.base)
    if kind is not None:
        groups = devices.everywhere(_groups(module, instruction, kind))
        return _collective(computation, instruction, kind, groups)
    for inner in module.called(instruction) if instruction.base in CALLERS else ():
        for called in inner.instructions.values():
            if (found := collective_of(module, devices, inner, called)) is not None:
                return _reduce_scatter_of(instruction, found)
    return None


def _reduce_scatter_of(instruction: Instruction, found: Collective) -> Collective:
    """Turn an all-reduce wrapped with a slice of its result into a reduce-scatter, which the TPU compiler writes so."""
    results = [leaf for leaf in instruction.shape.leaves() if leaf.dtype == found.dtype]
    if found.kind == "all-reduce" and sum(leaf.bytes for leaf in results) < found.bytes:
        return Collective("reduce-scatter", found.groups, found.bytes, found.dtype)
    return found


def _collective(computation: Computation, instruction: Instruction, kind: CollectiveKind, groups: Groups) -> Collective:
    operands = [operand.shape for operand in computation.operands(instruction)]
    if instruction.opcode == "recv":  # its send is not in this computation
        operands = [next(instruction.shape.leaves())]
    elif instruction.base in ("send", "ragged-all-to-all"):
        operands = operands[:1]  # the others are offsets, sizes and tokens
    leaves = [leaf for operand in operands for leaf in operand.leaves() if leaf.bytes]
    bytes_ = sum(leaf.bytes for leaf in leaves)
    if kind == "all-gather":
        bytes_ *= len(groups[0]) if groups else 1
    by_dtype: Counter[str] = Counter()
    for leaf in leaves:
        by_dtype[leaf.dtype] += leaf.bytes
    return Collective(kind, groups, bytes_, max(by_dtype, key=by_dtype.__getitem__, default=""))


def _groups(module: Module, instruction: Instruction, kind: CollectiveKind) -> Groups:
    if kind == "ppermute":
        return source_target_pairs(instruction)
    try:
        return replica_groups(instruction, module.devices)
    except ValueError:
        return ()
