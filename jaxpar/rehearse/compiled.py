"""A jitted function compiled by the compiler of hardware that is absent."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxpar.base.compiled_for import compiling_for
from jaxpar.base.errors import UserError
from jaxpar.base.jax_compat import ClosedJaxpr, Option, Options, options_of
from jaxpar.base.layout.sharding import PyTree
from jaxpar.parallel.host_memory import compile_absent, lower_for
from jaxpar.rehearse.report import memory
from jaxpar.rehearse.targets import Target


class Compiled(NamedTuple):
    """A jitted function compiled for a target, with the mesh of its arguments and its jaxpr."""

    target: Target
    mesh: Mesh
    jaxpr: ClosedJaxpr
    program: jax.stages.Compiled
    text: str
    """The scheduled HLO."""
    stats: Any
    """The result of `program.memory_analysis()`."""
    seconds: float
    """The seconds that the compiler took."""
    options: Options
    """The options that the compiler was given."""


def compile_for(
    jitted: jax.stages.Wrapped,
    arguments: tuple[PyTree, ...],
    mesh: Mesh,
    target: Target,
    program: jax.stages.Compiled | None = None,
    advice: str = "",
    host: PyTree = None,
    options: Mapping[str, Option] | None = None,
    keywords: Mapping[str, PyTree] | None = None,
) -> Compiled:
    """Compile a jitted function with the target's own compiler.

    Args:
      arguments: arrays or ShapeDtypeStructs, with their shardings, in pytrees.
      mesh: the mesh of the arguments.
      program: the compiled function if it is compiled already.
      advice: what would help a step that does not fit.
      host: whether each argument lies in host memory, in a tree of their form; None = as their
        shardings say.
      options: options of the compiler beside those of the jitted function, which win.
      keywords: arguments by name; none of them lies in host memory.

    Returns:
      The compiled function with its jaxpr, text and memory, the seconds that compiling took, and
      the options that were asked for.

    Raises:
      UserError: the compiler refuses the function, or an option.
      DoesNotFit: it refuses the function because a device has too little memory.
    """
    began = time.perf_counter()
    if host is None:
        host = jax.tree.map(lambda _: False, arguments)
    try:
        with compiling_for(mesh.devices.flat[0]):
            traced, lowered = lower_for(jitted, arguments, host, target.platform, keywords)
        own = options_of(lowered)
        beside = {name: value for name, value in (options or {}).items() if name not in own}
        compiled = program or compile_absent(lowered, beside)
    except jax.errors.JaxRuntimeError as error:
        if memory.needs_and_has(str(error)):
            refused = memory.DoesNotFit
        else:
            refused = UserError
        raise refused(memory.refusal(str(error), target.name, advice)) from error
    seconds = time.perf_counter() - began
    text = compiled.as_text() or ""
    return Compiled(
        target=target,
        mesh=mesh,
        jaxpr=traced.jaxpr,
        program=compiled,
        text=text,
        stats=compiled.memory_analysis(),
        seconds=seconds,
        options=beside | own,
    )
