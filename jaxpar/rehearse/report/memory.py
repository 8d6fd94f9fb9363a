"""The compiler's account of device memory, in parts that a user knows, and its refusal where memory
is too small.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxpar.base.console import bytes_text
from jaxpar.base.errors import UserError
from jaxpar.base.hardware import GPU_POOL, usable_bytes
from jaxpar.base.jax_compat import compiler_message, option_message
from jaxpar.hlo.program.module import Computation, Instruction, Module
from jaxpar.rehearse.report.schema import Memory


class CompiledBytes(NamedTuple):
    """The bytes of one device that a program takes, as the compiler says."""

    arguments: int
    temporaries: int
    """The bytes of temporaries, and of results that do not reuse an argument's memory; on a TPU
    those alive at the peak."""
    program: int
    host: int

    @property
    def total(self) -> int:
        """The bytes on the device, without those in host memory."""
        return self.arguments + self.temporaries + self.program

    @staticmethod
    def of(stats: Any, platform: str) -> CompiledBytes:
        """Read the bytes of one device from the compiler's account of a program.

        On a TPU `temp_size_in_bytes` is more than buffer assignment lays out, by half where a loop
        over microbatches contains loops over layers; the peak of what is alive is what has to fit.
        Elsewhere the temporaries are one block, which is allocated whole.

        Args:
          stats: the result of `compiled.memory_analysis()`.
          platform: the platform that was compiled for, `tpu` or `cuda`.
        """
        arguments = stats.argument_size_in_bytes
        grown = max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0)
        temporaries = stats.temp_size_in_bytes + grown
        peak = getattr(stats, "peak_memory_in_bytes", 0)
        if platform == "tpu" and peak > arguments:  # a compiler that names no peak says 0
            temporaries = min(temporaries, peak - arguments)
        on_host = stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes
        return CompiledBytes(arguments, temporaries, stats.generated_code_size_in_bytes, on_host)


BASIS = {
    "tpu": "the peak of what is alive, by the compiler, which refuses a step that does not fit",
    "cuda": f"arguments, temporaries and code, by the compiler, within the {GPU_POOL:.0%} of a "
    "GPU's memory that train "
    "lets JAX take (by itself JAX takes 75 %: XLA_CLIENT_MEM_FRACTION); what the runtime, NCCL "
    "and the "
    "libraries keep for themselves is not in it",
    "cpu": "arguments, temporaries and code, by the compiler, of this machine's memory, of which "
    "each simulated device has an equal share",
}
"""The basis of a device's bytes, by platform."""
_FRAGMENTED = 1.05
"""A TPU's heap over the peak of what is alive: measured heaps were 3.6 and 4.3 % larger
(docs/memory.md).
"""


def allocated_bytes(stats: Any, platform: str) -> int:
    """Count the bytes of a device that a program allocates, without those in host memory.

    For a TPU what gaps between arrays add is on top of the peak of what is alive, and no more than
    the plain sum.

    Args:
      stats: the result of `compiled.memory_analysis()`.
      platform: the platform that was compiled for, `tpu` or `cuda`.
    """
    taken = CompiledBytes.of(stats, platform)
    plain = CompiledBytes.of(stats, "")
    if taken == plain:
        return plain.total
    return min(
        plain.total, int(_FRAGMENTED * (taken.arguments + taken.temporaries)) + taken.program
    )


def saved_bytes(module: Module, layers: int) -> int:
    """Count the bytes of one device's main memory that the forward pass keeps for the backward: its
    loops fill stacks with one slice a layer. 0 where the layers are not in a loop.

    Args:
      module: the compiled training step.
      layers: the number of layers of the model, the first dim of such a stack.
    """
    total = 0
    for computation in module.computations.values():
        for loop in computation.instructions.values():
            if loop.opcode != "while" or not _is_forward(module, loop):
                continue
            state = computation.instructions.get(loop.operands[0])
            if state is not None and state.opcode == "tuple":
                names = state.operands
            else:
                names = ()
            same = module.handed_on(loop)
            filled = [
                name
                for at, name in enumerate(names)
                if at not in same and _is_empty(module, computation, name)
            ]
            shapes = [computation.instructions[name].shape for name in filled]
            total += sum(
                shape.bytes for shape in shapes if shape.dims[:1] == (layers,) and not shape.space
            )
    return total


def _is_forward(module: Module, loop: Instruction) -> bool:
    """Return whether a loop belongs to the forward pass. Where jaxlib 0.12 for GPUs takes trips off
    a loop, it leaves no name on it, and the names in its body tell.
    """
    names = [loop.op_name]
    if not loop.op_name:
        names = [one.op_name for one in module.body(loop).instructions.values()]
    return any("jvp()" in name for name in names) and not any("transpose(" in one for one in names)


def _is_empty(module: Module, computation: Computation, name: str) -> bool:
    """Return whether a loop's array starts out empty, or with no more than the slices of trips that
    were taken off it.
    """
    made = computation.behind(name, ("copy", "bitcast", "get-tuple-element"))
    if made is None:
        return False
    blank = made.opcode in ("broadcast", "constant") or (
        made.opcode == "fusion" and "broadcast" in made.name
    )
    if blank or "AllocateBuffer" in made.target:
        return True
    if made.opcode != "fusion" or not (inner := module.called(made)):
        return False
    if inner[0].result.opcode != "dynamic-update-slice":
        return False
    whole = made.shape.bytes
    filled = [one.name for one in computation.operands(made) if one.shape.bytes == whole]
    return any(_is_empty(module, computation, one) for one in filled)


def account(
    stats: Any,
    platform: str,
    arguments: Mapping[str, int],
    hbm_bytes: int,
    activations: int = 0,
    gradients: int = 0,
) -> Memory:
    """Make the report's account of one device's memory, without advice.

    Args:
      stats: the result of `compiled.memory_analysis()`.
      platform: the platform that was compiled for.
      arguments: the bytes of one device's part of each argument, by name.
      hbm_bytes: the bytes of a device's memory; 0 = no figure.
      activations: the bytes of the temporaries that are kept from forward to backward, from
        `saved_bytes`.
      gradients: the bytes of the temporaries that are gradients.
    """
    compiled = CompiledBytes.of(stats, platform)
    temporaries = min(compiled.temporaries, stats.temp_size_in_bytes)
    if sum(arguments.values()) > compiled.arguments:  # the program leaves out unused arguments
        arguments = {}
    activations = min(activations, temporaries)
    gradients = min(gradients, temporaries - activations)
    if activations or gradients:
        known = {"activations": activations, "gradients": gradients}
    else:
        known = {}
    usable = usable_bytes(hbm_bytes, platform)
    on_host = {
        "arguments": stats.host_argument_size_in_bytes,
        "temporaries": stats.host_temp_size_in_bytes,
    }
    return {
        "hbm_bytes": hbm_bytes,
        "usable_bytes": usable,
        "total": compiled.total,
        "fits": not hbm_bytes or compiled.total <= usable,
        "categories": {
            **arguments,
            **known,
            "temporaries": compiled.temporaries - activations - gradients,
            "program": compiled.program,
            "padding" if arguments else "arguments": compiled.arguments - sum(arguments.values()),
        },
        "host": {name: size for name, size in on_host.items() if size},
        "advice": [],
        "basis": BASIS.get(platform, BASIS["cuda"]),
    }


_SIZE = r"([\d.]+)([KMGT]?)"
# XLA:TPU has one message for when it sees before scheduling that nothing will help (its
# "temporaries" count the arguments too), and another for when it has tried.
_MESSAGES = (
    rf"required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)",
    rf"Used {_SIZE} of {_SIZE} hbm",
)
_UNITS = {
    "": 1,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}


def needs_and_has(message: str) -> tuple[int, int] | None:
    """Read from a compiler's refusal the bytes that a step takes and those that a device has; None
    if it names none.
    """
    for pattern in _MESSAGES:
        if match := re.search(pattern, message):
            return round(float(match[1]) * _UNITS[match[2]]), round(
                float(match[3]) * _UNITS[match[4]]
            )
    return None


class DoesNotFit(UserError):
    """A refusal by the compiler because a device has too little memory for the step."""


def refusal(message: str, target: str, advice: str = "") -> str:
    """Tell the user of a compiler's refusal in one line, with the bytes where the step does not
    fit, or else what the compiler said.

    Args:
      target: the name of the target.
      advice: what would help a step that does not fit; empty = nothing is said of it.
    """
    found = needs_and_has(message)
    if found is None:
        if said := option_message(message):
            return f"the compiler for {target} refuses an option: {said}"
        return f"the compiler for {target} refuses this step: {compiler_message(message)}"
    needs, has = found
    over = (
        f"it needs {bytes_text(needs)} a device, {bytes_text(needs - has)} more than its "
        f"{bytes_text(has)}"
    )
    return f"this step does not fit {target}: {over}" + (f"; {advice}" if advice else "")
