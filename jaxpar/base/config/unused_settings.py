"""Settings that a user gave and that can have no effect are refused, with what would make them
matter. Where a setting has none is said at its field (`Idle`).

Only the user's own flags and file are checked. Presets and the config.toml of a run hold keys for
other layouts, `--on` brings another mesh, and a program that calls `override` knows what it does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from jaxpar.base.config.loading import RESOLVED, parse
from jaxpar.base.config.schema import Config
from jaxpar.base.errors import UserError
from jaxpar.base.field_marks import Idle, marks_of
from jaxpar.base.toml import find_toml, flatten, presets


def require_effects(name: str, config: Config, flags: Collection[str]) -> None:
    """Refuse a setting that the user gave, that differs from its default and that can have no
    effect.

    Args:
      name: the config's preset, whose keys are not checked, or its file or run folder; empty = it
        is from no file.
      config: the config with the flags, on the mesh that is asked for.
      flags: the keys that were given on the command line.

    Raises:
      UserError: such a setting was given or is in the file, or the file cannot be read.
    """
    for key, because in idle_keys(config):
        if key in flags:
            raise UserError(f"{key} has no effect: {because}")
    if not name or name in presets("jaxpar.configs"):
        return
    text, origin = find_toml(name, "jaxpar.configs")
    if text.startswith(f"# {RESOLVED}"):
        return
    # A key of the file that only a flag has switched off is not the file's mistake.
    alone = dict(idle_keys(parse(text, origin)))
    for key, because in idle_keys(config):
        if key in alone:
            raise UserError(f"{origin}: {key} has no effect: {because}")


def idle_keys(config: Config) -> Iterator[tuple[str, str]]:
    """Find the settings that differ from their defaults and have no effect.

    Args:
      config: the config.

    Yields:
      The dotted key, and the reason.
    """
    values = flatten(config)
    defaults = flatten(Config())
    for key, marks in marks_of(Config, Idle).items():
        if values[key] != defaults[key]:
            yield from ((key, mark.because) for mark in marks if mark.when(config))
