"""The task that one instruction makes: its kind, what it computes, moves and sends.

    %d = f32[8,32] dot(f32[8,16] %a, f32[16,32] %b), lhs_contracting_dims={1}, ...

is a task of kind `matmul`, with 2 * 8 * 16 * 32 = 8192 FLOPs, which moves the bytes of %a, %b and
%d. The modules of `work` count each of these figures; here they are put into one `Task`.
"""

from __future__ import annotations

import re

from jaxpar.base.kernel_work import KernelCost
from jaxpar.hlo.program import opcodes
from jaxpar.hlo.program.module import Computation, Instruction, Module
from jaxpar.hlo.program.tasks import Origin, Task
from jaxpar.hlo.work.collectives import Devices, collective_of
from jaxpar.hlo.work.flops import kernel_work, work_of
from jaxpar.hlo.work.host_compute import host_work, is_host_call
from jaxpar.hlo.work.kinds import kind_of, shape_text
from jaxpar.hlo.work.memory_traffic import copied_bytes, result_of, traffic

# as the TPU compiler writes its estimate of one execution
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def make_task(
    module: Module,
    devices: Devices,
    kernel_cost: KernelCost | None,
    computation: Computation,
    instruction: Instruction,
    origin: Origin,
) -> Task:
    """Make the task of an instruction, with its kind and work, and without its dependencies.

    Args:
      devices: the devices of the module's assignment, which a collective names by their positions.
      kernel_cost: a function that gives the work of a Pallas kernel.
      instruction: one that takes time.
      origin: the place in the model that the instruction is from.

    Raises:
      IndexError, KeyError, ValueError: an attribute has an unknown form.
    """
    collective = collective_of(module, devices, computation, instruction)
    if collective and not opcodes.owns_collective(module, instruction):
        collective = None
    cycles = _CYCLES.search(instruction.tail)
    work = work_of(module, computation, instruction)
    bytes_ = traffic(module, computation, instruction)
    link_bytes = 0
    if instruction.target and not work.flops:
        work, bytes_ = kernel_work(computation, instruction, bytes_, kernel_cost)
    if is_host_call(instruction):
        kind = "host_compute"
        flops, bytes_, link_bytes = host_work(module, computation, instruction)
        work = work._replace(flops=flops)
    elif collective:
        kind = "collective"
    else:
        kind = kind_of(module, computation, instruction, work)
    shape = result_of(instruction)
    return Task(
        instruction.name,
        instruction.opcode,
        kind,
        origin,
        flops=work.flops,
        bytes=copied_bytes(module, computation, instruction) if kind == "host_copy" else bytes_,
        link_bytes=link_bytes,
        cycles=int(cycles[1]) if cycles and 0 < int(cycles[1]) < 2**60 else None,
        dtype=work.dtype or next(shape.leaves(), instruction.shape).dtype,
        shape=shape_text(shape),
        collective=collective,
        attention=work.attention,
        asynchronous=opcodes.is_start(module, instruction),
    )
