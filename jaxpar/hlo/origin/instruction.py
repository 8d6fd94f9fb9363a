"""The scope, line and phase of one instruction. A fusion or a call takes them from the instruction
inside it that tells most:

    %f = fusion(%x, %w), calls=%inner       its own path: jvp(block)/mlp/add
      %inner: %d = dot(...)                 jvp(block)/attention/dot_general
              ROOT %s = add(%d, ...)        jvp(block)/mlp/add

`origin_of` gives `block/attention` for %f, since the work of a fusion with a matmul is the matmul.
"""

from __future__ import annotations

from jaxpar.hlo.origin.line import PackageDirs, source_line
from jaxpar.hlo.origin.path import decode
from jaxpar.hlo.program.module import Instruction, Module
from jaxpar.hlo.program.tasks import Origin


def origin_of(module: Module, instruction: Instruction, dirs: PackageDirs) -> Origin:
    """Find the scope, line and phase of one instruction; they are empty where the compiler kept
    nothing.

    A fusion has the path of its last operation, but its work may be elsewhere: a fusion around a
    matmul belongs where the matmul does. A fusion without metadata takes the place of what it
    wraps.

    Args:
      module: the module, whose tables have the stack frames.
      dirs: (directory, name shown) pairs in which a stack frame counts as a source line, the most
        telling first.
    """
    instruction = _telling(module, instruction)
    scope, phase = decode(instruction.op_name)
    source = source_line(module.stack(instruction), dirs)
    return Origin(scope, source, phase, told="/" in instruction.op_name)


def _telling(module: Module, instruction: Instruction) -> Instruction:
    """Find the first matmul an instruction calls, else itself; if it has no path, the root or the
    last that has one.
    """
    if instruction.called:
        inner = module.computations.get(instruction.called[0])
    else:
        inner = None
    if inner is None or instruction.base not in ("fusion", "call", "async"):
        return instruction
    called = [_telling(module, one) for one in inner.instructions.values()]
    named = [one for one in called if "/" in one.op_name]
    matmuls = [one for one in named if one.opcode in ("dot", "convolution")]
    if matmuls or instruction.op_name:
        return next(iter(matmuls), instruction)
    return next(
        (one for one in named if one.name == inner.root), named[-1] if named else instruction
    )
