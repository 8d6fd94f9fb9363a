"""Device memory by the compiler's account, divided into what a user knows: parameters, optimizer, activations."""

from __future__ import annotations

import math
from typing import Any

import jax

from jaxpar.hlo.parse import Computation, Instruction, Module
from jaxpar.rehearsal.schema import Memory


def local_bytes(tree: Any) -> int:
    """Bytes of a device's part of ShapeDtypeStructs with shardings."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def saved_bytes(module: Module, layers: int) -> int:
    """Bytes that the forward pass keeps for the backward: stacks of one slice a layer that its loops fill."""
    total = 0
    for computation in module.computations.values():
        for loop in computation.instructions.values():
            if loop.opcode != "while" or "transpose(" in loop.op_name or "jvp(" not in loop.op_name:
                continue
            state = computation.instructions.get(loop.operands[0])
            names = state.operands if state is not None and state.opcode == "tuple" else ()
            filled = [made for name in names if (made := _empty(computation, name)) is not None]
            total += sum(
                made.shape.bytes for made in filled if made.shape.dims[:1] == (layers,) and not made.shape.space
            )
    return total


def _empty(computation: Computation, name: str) -> Instruction | None:
    """The instruction that makes a loop's array, if it starts out with nothing in it."""
    made = computation.instructions.get(name)
    while made is not None and made.opcode in ("copy", "bitcast"):
        made = computation.instructions.get(made.operands[0])
    if made is None:
        return None
    blank = made.opcode in ("broadcast", "constant") or (made.opcode == "fusion" and "broadcast" in made.name)
    return made if blank or "AllocateBuffer" in made.attributes.get("custom_call_target", "") else None


def account(stats: Any, state: Any, batch: Any, module: Module, layers: int, hbm_bytes: int) -> Memory:
    """The report's memory.

    Args:
      stats: `compiled.memory_analysis()`.
      state: the TrainState, as ShapeDtypeStructs with shardings.
      batch: likewise.
      module: the compiled program.
      layers: of the model.
      hbm_bytes: what a device has; 0 = no figure.
    """
    arguments, temporaries = stats.argument_size_in_bytes, stats.temp_size_in_bytes
    grown = max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0)
    code = stats.generated_code_size_in_bytes
    parameters, optimizer, rows = local_bytes(state.params), local_bytes(state.opt_state), local_bytes(batch)
    saved = min(saved_bytes(module, layers), temporaries)
    # Gradients lie as the moments do, two a parameter.
    gradients = min(parameters, optimizer // 2, temporaries - saved)
    categories = {
        "parameters": parameters,
        "optimizer": optimizer,
        "batch": rows,
        "activations": saved,
        "gradients": gradients,
        "temporaries": temporaries - saved - gradients + grown,
        "program": code,
        "padding": arguments - parameters - optimizer - rows,
    }
    total = arguments + temporaries + grown + code
    host = {
        "arguments": stats.host_argument_size_in_bytes,
        "temporaries": stats.host_temp_size_in_bytes,
    }
    return {
        "hbm_bytes": hbm_bytes,
        "total": total,
        "fits": not hbm_bytes or total <= hbm_bytes,
        "categories": categories,
        "host": {name: size for name, size in host.items() if size},
        "advice": [],
    }
