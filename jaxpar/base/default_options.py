"""The one door for options that the library sets by itself: the compiler at hand is asked which of
them it takes.

A version of XLA renames options and takes them away, and refuses some on some chips. So a program
of one line is compiled with them, once for each kind of device and version of its compiler. The
answer is kept in `compilers` of `cache_folder()`, so that the next process reads it in
milliseconds. What is left out is said in a line of the log.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.errors import UserError
from jaxpar.base.hardware import lowering_platform
from jaxpar.base.jax_compat import (
    DefaultOption,
    Option,
    Options,
    compiler_message,
    option_message,
)
from jaxpar.base.machine import cache_folder, versions

log = logging.getLogger(__name__)


class Asked(NamedTuple):
    """What a compiler said of some options."""

    options: Options
    """Those that it takes, in the spelling that it takes."""
    left_out: tuple[str, ...]
    """A line for each that it does not take, and what that one was for."""


def ask_compiler(wanted: Sequence[DefaultOption], device: jax.Device) -> Options:
    """Ask the compiler of a device which options it takes.

    Args:
      wanted: the options.
      device: the device, which may be absent.

    Returns:
      Those that it takes. The log says once which it does not.
    """
    if not wanted:
        return {}
    asked = _ask_once(tuple(wanted), device)
    for line in asked.left_out:
        _say_once(line)
    return dict(asked.options)


def compile_nothing(device: jax.Device, options: Mapping[str, Option]) -> None:
    """Compile a program of one line with some options.

    Args:
      device: the device, which may be absent.

    Raises:
      JaxRuntimeError: the compiler does not take one of them.
    """
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
    traced = jax.jit(lambda x: x + 1, compiler_options=dict(options)).trace(number)
    lowered = traced.lower(lowering_platforms=(lowering_platform(device),))
    with warnings.catch_warnings():  # JAX keeps no programs of absent GPUs, and says so
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
        lowered.compile()


@lru_cache(maxsize=64)
def _ask_once(wanted: tuple[DefaultOption, ...], device: jax.Device) -> Asked:
    """Read the answer, or ask for it and write it down."""
    file = _file_of(wanted, device)
    if kept := _read(file):
        return kept
    try:
        asked = _ask(wanted, device)
    except jax.errors.JaxRuntimeError as error:  # it compiles nothing, whatever the options are
        log.warning(
            "the compiler of %s could not be asked for its options (%s): all are taken for known",
            device.device_kind,
            compiler_message(str(error)),
        )
        return Asked({name: value for one in wanted for name, value in one.spellings[0]}, ())
    try:
        write_whole(file, json.dumps(asked._asdict(), indent=1))
    except UserError as error:
        log.info("%s: every process asks again", error)
    return asked


def _ask(wanted: tuple[DefaultOption, ...], device: jax.Device) -> Asked:
    """Compile with all at once, and where that is refused with one more after the other.

    Raises:
      JaxRuntimeError: the compiler refuses the program without any options too.
    """
    all_of_them = {name: value for one in wanted for name, value in one.spellings[0]}
    if not _refusal(device, all_of_them):
        return Asked(all_of_them, ())
    compile_nothing(device, {})
    taken: Options = {}
    left_out = list[str]()
    for one in wanted:
        refusals = list[str]()
        for spelling in one.spellings:
            why = _refusal(device, taken | dict(spelling))
            if not why:
                taken |= dict(spelling)
                break
            refusals.append(why)
        else:
            left_out.append(
                f"{one.name} is left out, an option that {one.purpose}: the compiler of "
                f"{device.device_kind} does not take it ({refusals[0]})"
            )
    return Asked(taken, tuple(left_out))


def _refusal(device: jax.Device, options: Options) -> str:
    """Why the compiler does not take these options; empty = it does."""
    try:
        compile_nothing(device, options)
    except jax.errors.JaxRuntimeError as error:
        return option_message(str(error)) or compiler_message(str(error))
    return ""


def _file_of(wanted: tuple[DefaultOption, ...], device: jax.Device) -> Path:
    """The file of an answer: another for each compiler, kind of device and list of options."""
    compiler = getattr(getattr(device, "client", None), "platform_version", "")
    asked = [device.platform, device.device_kind, compiler, versions(), wanted]
    name = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
    return cache_folder() / "compilers" / f"{device.platform}-{name}.json"


def _read(file: Path) -> Asked | None:
    """The answer that a file has; None where there is none, or it cannot be read."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return Asked(dict(kept["options"]), tuple(map(str, kept["left_out"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@lru_cache(maxsize=64)
def _say_once(line: str) -> None:
    log.warning(line)
