"""Options of a compilation: the library's own for the chips of a mesh, and a user's, which win.

A user's are words of `compiler.options` in a config, `name=value`. The names of the library's stand
in `base/jax_compat.py`, and the figures of a chip in its file of `meshes/chips`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.base.errors import UserError, short, suggest
from jaxpar.base.hardware import chip_of, lowering_platform
from jaxpar.base.jax_compat import (
    KNOWN_OPTIONS,
    SCHEDULER_PROFILE,
    SCOPED_VMEM,
    TPU_FLAGS,
    Option,
    Options,
    compiler_message,
    compiler_options,
    is_unknown_option,
    option_message,
)


def step_options(mesh: Mesh, words: Iterable[str] = ()) -> Options:
    """The options for a training step on a mesh, for `jax.jit(..., compiler_options=...)`.

    Beside those of `jax_compat.compiler_options` they have what is worth a longer compilation: on
    TPUs the vector memory that one fusion may use. A user's own win.

    Args:
      mesh: the mesh of the step, whose devices may be absent.
      words: a config's `compiler.options`. Those that only another platform's compiler has are left
        out: `option_notes` says which.

    Returns:
      The options by their names.

    Raises:
      UserError: a word is no `name=value`, or the compiler does not know the name or take the
        value, or a profile for its scheduler is not there.
    """
    found = compiler_options(mesh)
    own = read_options(words)
    chip = chip_of(mesh.devices.flat[0].device_kind)
    if chip is not None and chip.tpu_compiler.scoped_vmem_kib:
        found[SCOPED_VMEM] = chip.tpu_compiler.scoped_vmem_kib
    own = {name: value for name, value in own.items() if name not in _foreign(own, mesh)}
    profile = str(own.get(SCHEDULER_PROFILE, ""))
    if profile and not os.path.exists(profile):  # XLA would go on without it, and say nothing
        raise UserError(f"compiler.options: {SCHEDULER_PROFILE}: there is no file {profile}")
    if own:
        _require_known(tuple(own.items()), mesh)
    return found | own


REPEATING_FLAG = "xla_gpu_exclude_nondeterministic_ops"
"""XLA's flag for the same bits in every run: without it a GPU adds the rows of a gradient that come
to one place, as a token's, in any order."""
_REPEATING = re.compile(rf"--({REPEATING_FLAG}|xla_gpu_deterministic_ops)(=(true|1))?(\s|$)")


def repeats_to_the_bit(platform: str) -> bool:
    """Whether the same program on the same arrays gives the same bits each time.

    Args:
      platform: of the devices. A CPU repeats, and nothing else is known of TPUs; a GPU does where
        XLA_FLAGS ask for it.
    """
    return platform != "gpu" or bool(_REPEATING.search(os.environ.get("XLA_FLAGS", "")))


def option_notes(mesh: Mesh, words: Iterable[str]) -> list[str]:
    """Say what becomes of a user's options on a mesh other than as they say.

    A config for TPUs is shown and verified on CPUs, whose compiler does not have the TPU's options.

    Args:
      mesh: the mesh of the step.
      words: a config's `compiler.options`.

    Returns:
      A line for the log, or none.

    Raises:
      UserError: as for `read_options`.
    """
    foreign = _foreign(read_options(words), mesh)
    if foreign:
        return [f"compiler.options: {', '.join(foreign)} left out, only TPUs' compiler has it"]
    return []


def read_options(words: Iterable[str]) -> Options:
    """Read `name=value` words: true and false are booleans, digits are numbers, and anything else
    is text.

    Args:
      words: the words, such as `xla_a=true`.

    Returns:
      The values by the options' names.

    Raises:
      UserError: a word is not of this form, or a name stands there twice.
    """
    found: Options = {}
    for word in words:
        if not isinstance(word, str):
            raise UserError(
                f'compiler options are words, such as "xla_a=true", and {short(word)} was given'
            )
        name, equals, value = word.partition("=")
        name = name.strip().removeprefix("--")
        value = value.strip()
        if not equals or not name.isidentifier():
            raise UserError(
                f"compiler.options: {word!r} is no option with its value: write "
                "xla_gpu_enable_latency_hiding_scheduler=true"
            )
        if name in found:
            raise UserError(f"compiler.options names {name} twice")
        found[name] = _value(value)
    return found


def option_words(options: Mapping[str, Option]) -> list[str]:
    """Write options as words of `compiler.options`: `xla_a=true`.

    Args:
      options: the options by their names.

    Returns:
      A word for each.
    """
    return [f"{name}={_word(value)}" for name, value in options.items()]


def options_text(options: Mapping[str, Option]) -> str:
    """Write options in one line: `xla_a=true, xla_b=65536`."""
    return ", ".join(option_words(options))


# Python also reads `1_0` and digits of other scripts as numbers, which XLA and TOML's writer did
# not mean.
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def _value(text: str) -> Option:
    """The value that a word stands for. XLA takes booleans and numbers as such, and refuses their
    text.
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _WHOLE.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text):
        return float(text)
    return text


def _word(value: Option) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _platform(mesh: Mesh) -> str:
    """`cpu`, `gpu` or `tpu`, of devices that may be absent."""
    platform = mesh.devices.flat[0].platform
    return "gpu" if platform == "cuda" else platform


def _foreign(own: Options, mesh: Mesh) -> list[str]:
    """The options that only another platform's compiler has."""
    if _platform(mesh) == "tpu":
        return []
    return [name for name in own if name.startswith(TPU_FLAGS)]


@lru_cache(maxsize=64)
def _require_known(own: tuple[tuple[str, Option], ...], mesh: Mesh) -> None:
    """Compile a program of nothing with a user's options, before the step, which takes long.

    Raises:
      UserError: the compiler refuses an option.
    """
    lowered_for = lowering_platform(mesh.devices.flat[0])
    nothing = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    jitted = jax.jit(lambda x: x, compiler_options=dict(own))
    try:
        jitted.trace(nothing).lower(lowering_platforms=(lowered_for,)).compile()
    except jax.errors.JaxRuntimeError as error:
        said = option_message(str(error)) or compiler_message(str(error))
        refused = next((name for name, _ in own if name in said), "")
        if is_unknown_option(str(error)):
            hint = suggest(refused, KNOWN_OPTIONS)
        else:
            hint = ""
        raise UserError(f"compiler.options: {said}{hint}") from error
