"""Options of a compilation: the library's own for the chips of a mesh, and a user's, which win.

A user's are words of `compiler.options` in a config, `name=value`. The names of the library's stand
in `base/jax_compat/options.py`, and the figures of a chip in its file of `meshes/chips`.
`base/default_options.py` asks the compiler at hand which of them it takes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

import jax
from jax.sharding import Mesh

from jaxpar.base.default_options import ask_compiler, compile_nothing
from jaxpar.base.errors import UserError, short, suggest
from jaxpar.base.hardware import TpuCompiler, chip_of
from jaxpar.base.jax_compat import (
    DEFAULT_OPTIONS,
    KNOWN_OPTIONS,
    ORDER_SETTINGS,
    SCHEDULER_PROFILE,
    TPU_FLAGS,
    UNSAFE_OPTIONS,
    DefaultOption,
    Option,
    Options,
    compiler_message,
    fuse_all_gathers,
    is_unknown_option,
    less_tuned,
    no_profile,
    option_message,
    scoped_vmem,
    sparse_core_all_gathers,
)


def program_options(mesh: Mesh) -> Options:
    """The options for any program on a mesh, for `jax.jit(..., compiler_options=...)`.

    Args:
      mesh: the mesh, whose devices may be absent.

    Returns:
      Those of its platform that the compiler at hand takes, by their names.
    """
    return ask_compiler(_defaults(mesh), _device_here(mesh))


def once_options(mesh: Mesh, level: int = 1) -> Options:
    """The options of a program that runs once, such as the initializers: on CPU, less of LLVM's
    optimisation.

    Args:
      mesh: the mesh, whose devices may be absent.
      level: how much of it; 0 = none, for a program whose time does not matter.

    Returns:
      Those that the compiler at hand takes, by their names.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return {}
    return ask_compiler((less_tuned(level),), _device_here(mesh))


def step_options(mesh: Mesh, words: Iterable[str] = ()) -> Options:
    """The options for a training step on a mesh, for `jax.jit(..., compiler_options=...)`.

    Beside those of `program_options` they have what is worth a longer compilation: on TPUs the
    vector memory that one fusion may use. A user's own win.

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
    device = _device_here(mesh)
    own = read_options(words)
    wanted = _defaults(mesh)
    if kib := _tpu_compiler(device).scoped_vmem_kib:
        wanted = (*wanted, scoped_vmem(kib))
    found = ask_compiler(wanted, device)
    own = {name: value for name, value in own.items() if name not in _foreign(own, mesh)}
    profile = str(own.get(SCHEDULER_PROFILE, ""))
    if profile and not os.path.exists(profile):  # XLA would go on without it, and say nothing
        raise UserError(f"compiler.options: {SCHEDULER_PROFILE}: there is no file {profile}")
    if own:
        _require_known(tuple(own.items()), device)
    return found | own


def _defaults(mesh: Mesh) -> tuple[DefaultOption, ...]:
    """What the library wants of the compiler for any program on a mesh."""
    device = mesh.devices.flat[0]
    found = [
        option
        for option in DEFAULT_OPTIONS.get(_platform(device), ())
        if mesh.size > 1 or not option.several
    ]
    says = _tpu_compiler(device)
    if mesh.size > 1 and says.fuse_all_gathers:
        found.append(fuse_all_gathers())
    if mesh.size > 1 and says.sparse_core_all_gathers:
        found.append(sparse_core_all_gathers())
    return tuple(found)


def _device_here(mesh: Mesh) -> jax.Device:
    """A device of this process on the mesh, for which it can compile alone; of an absent mesh the
    first.
    """
    devices = list(mesh.devices.flat)
    mine = (device for device in devices if device in jax.local_devices())
    return next(mine, devices[0])


def _tpu_compiler(device: jax.Device) -> TpuCompiler:
    """What a chip's file says to the TPU's compiler; the defaults of a chip without a file."""
    chip = chip_of(device.device_kind)
    return chip.tpu_compiler if chip else TpuCompiler()


def order_options(mesh: Mesh) -> dict[str, Options]:
    """Settings of the scheduler of a mesh's platform that change the order of a program.

    Args:
      mesh: the mesh, whose devices may be absent.

    Returns:
      The options of each setting that the compiler at hand takes, by its name. The log says which
      it does not take.
    """
    device = _device_here(mesh)
    settings = ORDER_SETTINGS.get(_platform(device), {})
    asked = {name: ask_compiler((option,), device) for name, option in settings.items()}
    return {name: options for name, options in asked.items() if options}


def profile_option(mesh: Mesh) -> str:
    """The option by which a platform's scheduler is given what instructions take; empty = none, or
    the compiler at hand does not take it.
    """
    device = _device_here(mesh)
    if _platform(device) != "gpu":
        return ""
    return next(iter(ask_compiler((no_profile(),), device)), "")


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
      UserError: `read_options` refuses a word.
    """
    own = read_options(words)
    device = mesh.devices.flat[0]
    notes = list[str]()
    if foreign := _foreign(own, mesh):
        notes.append(f"compiler.options: {', '.join(foreign)} left out, only TPUs' compiler has it")
    elif not _tpu_compiler(device).fuse_all_gathers:
        notes += [
            f"compiler.options: {name}: the makers of the compiler call it unsafe on "
            f"{device.device_kind} (wrong results, hangs)"
            for name in UNSAFE_OPTIONS
            if own.get(name)
        ]
    return notes


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


def _platform(device: jax.Device) -> str:
    """`cpu`, `gpu` or `tpu`, of a device that may be absent."""
    return "gpu" if device.platform == "cuda" else device.platform


def _foreign(own: Options, mesh: Mesh) -> list[str]:
    """The options that only another platform's compiler has."""
    if _platform(mesh.devices.flat[0]) == "tpu":
        return []
    return [name for name in own if name.startswith(TPU_FLAGS)]


@lru_cache(maxsize=64)
def _require_known(own: tuple[tuple[str, Option], ...], device: jax.Device) -> None:
    """Compile a program of nothing with a user's options, before the step, which takes long.

    Raises:
      UserError: the compiler refuses an option.
    """
    try:
        compile_nothing(device, dict(own))
    except jax.errors.JaxRuntimeError as error:
        said = option_message(str(error)) or compiler_message(str(error))
        refused = next((name for name, _ in own if name in said), "")
        if is_unknown_option(str(error)):
            hint = _other_name(refused) or suggest(refused, KNOWN_OPTIONS)
        else:
            hint = ""
        raise UserError(f"compiler.options: {said}{hint}") from error


def _other_name(name: str) -> str:
    """What another version of the compiler calls an option; empty where none is known to."""
    settings = [*ORDER_SETTINGS["gpu"].values(), *DEFAULT_OPTIONS["gpu"]]
    for option in settings:
        spelled = [dict(spelling) for spelling in option.spellings]
        if any(name in one for one in spelled):
            others = [options_text(one) for one in spelled if one and name not in one]
            return "".join(f": other versions of XLA call it {other}" for other in others)
    return ""
