"""The rehearsal of any jitted function: it is compiled for hardware that is absent, and its program
is read and played out.

What only a config knows (which parameters, which tokens, which collectives were asked for) is not
in the report of another function; `jaxpar.rehearse.of_config` adds it for a config's step.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import jax

from jaxpar.base.compiler import step_options
from jaxpar.base.errors import Say, UserError, short
from jaxpar.base.jax_compat import Option
from jaxpar.base.layout.sharding import PyTree
from jaxpar.base.number_checks import require_number, require_whole
from jaxpar.hlo.origin import OWN, default_dirs
from jaxpar.rehearse.argument_places import argument_bytes, devices_of_call, place_arguments
from jaxpar.rehearse.compiled import compile_for
from jaxpar.rehearse.program_report import report_of
from jaxpar.rehearse.report import memory
from jaxpar.rehearse.report.schema import Rehearsal
from jaxpar.rehearse.targets import HERE, Target, load_target, target_here


def step(
    jitted: jax.stages.Wrapped,
    *arguments: PyTree,
    target: Target | str,
    name: str = "",
    tokens: int = 0,
    model_flops: float = 0.0,
    say: Say = lambda line: None,
    compiler_options: Mapping[str, Option] | None = None,
    keywords: Mapping[str, PyTree] | None = None,
    graph: bool = False,
) -> Rehearsal:
    """Rehearse a call of a jitted function on a target: whether it fits, how long it takes, what
    waits and where.

    Args:
      jitted: the result of `jax.jit(function)` for any function.
      arguments: its arguments as ShapeDtypeStructs or arrays (or pytrees of them), with
        NamedShardings on a mesh of the target's devices: `jaxpar.make_mesh(data=8,
        devices=jaxpar.load_target("v5e-8").devices())`. Without any sharding, on arguments or
        inside the function, all is on one device of the target; beside others, an array without one
        lies on their mesh as the compiler chooses. The report's notes say either.
      target: a name such as `v5p-64` or `h100x8` (docs/targets.md), or the result of `load_target`;
        `here` = this machine, of which the devices that the arguments lie on count.
      name: the name that the report shows.
      tokens: the tokens of one call, all devices together; 0 = not known, and the report has no
        tokens a second.
      model_flops: the FLOPs of one call without recomputation, all devices together; 0 = not known,
        and no MFU.
      say: is called with a line at the start of each stage.
      compiler_options: options of XLA beside those of `jax.jit(..., compiler_options=...)`, which
        win; None = the options of `train` on this chip, which `rehearse.compiler_options(mesh)`
        gives to any program.
      keywords: arguments that the function takes by name, of the form of the others.
      graph: whether the report has the task graph too, under `graph`.

    Returns:
      A report of the form in `jaxpar.rehearse.report.schema`, a dict that is JSON as it stands.
      `rehearse.show` prints it, and `rehearse.write_trace` writes its timeline.

    Raises:
      UserError: an argument is of another kind, the arguments lie on other devices than the
        target's, a compiler is missing, or the compiler refuses the function.
    """
    _require_jitted(jitted)
    _require_options(compiler_options)
    require_whole("rehearse.step", "tokens", tokens, least=0)
    require_number("rehearse.step", "model_flops", model_flops, least=0)
    if target == HERE:
        # a program has as much of this machine as it asks for, and without a mesh one device
        devices = devices_of_call(jitted, arguments, keywords or {}) or jax.devices()[:1]
        target = target_here(devices, say)
    elif not isinstance(target, Target):
        target = load_target(target)
    names = _names(jitted, len(arguments))
    placed = place_arguments(jitted, names, arguments, keywords or {}, target)
    if compiler_options is None:
        options = step_options(placed.mesh)
    else:
        options = compiler_options
    say(f"compiling for {target.name}")
    if placed.note:
        say(placed.note)
    compiled = compile_for(
        jitted,
        placed.arguments,
        placed.mesh,
        target,
        options=options,
        keywords=placed.keywords,
    )
    given = dict(zip(names, placed.arguments, strict=True)) | placed.keywords
    known = argument_bytes(given, compiled.program)
    taken = memory.account(compiled.stats, target.platform, known, target.hardware.hbm_bytes)
    report = report_of(
        compiled,
        taken,
        say,
        package_dirs=(OWN, *default_dirs()),
        name=name,
        tokens=tokens,
        model_flops=model_flops,
        graph=graph,
    )
    if placed.note:
        report["notes"].insert(0, placed.note)
    return report


def _require_jitted(jitted: object) -> None:
    if not isinstance(jitted, jax.stages.Wrapped):
        raise UserError(
            f"rehearse.step takes a jitted function, and was given {short(jitted)}: write "
            "jax.jit(step)"
        )


def _require_options(options: object) -> None:
    if not isinstance(options, Mapping | None):
        raise UserError(
            "rehearse.step takes compiler_options by name, and was given "
            f'{short(options)}: write {{"xla_...": True}}'
        )


def _names(jitted: jax.stages.Wrapped, count: int) -> list[str]:
    """List the names that the function gives its arguments."""
    try:
        names = list(inspect.signature(jitted).parameters)[:count]
    except (TypeError, ValueError):
        names = []
    if len(names) == count:
        return names
    return [f"argument {index}" for index in range(count)]
