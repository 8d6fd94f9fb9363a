"""`train --verify`: a plan is verified before it trains, once for each jax, platform and state of the library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib import resources
from importlib.metadata import version
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import jax

from jaxpar.base.config import Config, to_toml
from jaxpar.base.errors import UserError
from jaxpar.base.mesh import total_sizes
from jaxpar.base.runtime import cache_folder, compiler_flags, write_whole
from jaxpar.verify.of_config import Setup, prepare, run
from jaxpar.verify.report import verdict


def require(config: Config, devices: list[jax.Device], say: Callable[[str], None]) -> None:
    """Verify a plan on this process's devices, unless just this was verified before.

    Args:
      config: what is about to train.
      devices: the devices of the run; those of other processes are left to them.
      say: called with a line or more about the outcome.

    Raises:
      UserError: the plan differs from one device, or cannot be verified here.
    """
    setup = prepare(config, [device for device in devices if device.process_index == jax.process_index()])
    facts = facts_of(setup)
    path = (
        cache_folder()
        / "verify"
        / f"{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]}.json"
    )
    before = _read(path, facts, say)
    if before is not None:
        say(f"verified before: {before}")
        return
    for note in setup.notes:
        say(f"verify: {note}")
    found = run(setup)
    if not found.equal:
        raise UserError(f"--verify refuses to train this plan: {verdict(found)}; `jaxpar verify` shows the whole table")
    say(f"verified: {verdict(found)}")
    _write(path, {"facts": facts, "verdict": verdict(found)}, say)


def facts_of(setup: Setup) -> dict[str, Any]:
    """All that the outcome hangs on: versions, platform, compiler flags, the library's source, the shrunk config."""
    device = setup.devices[0]
    return {
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "platform": device.platform,
        "platform_version": device.client.platform_version,
        "device_kind": device.device_kind,
        "devices": len(setup.devices),
        "flags": compiler_flags(),
        "mesh_asked": total_sizes(setup.asked),
        "source": source_hash(),
        "config": to_toml(setup.config),
    }


def source_hash() -> str:
    """SHA-256 over the Python files of the library and its models."""
    digest = hashlib.sha256()

    def add(folder: Traversable) -> None:
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
            if entry.is_dir():
                add(entry)
            elif entry.name.endswith(".py"):
                digest.update(entry.name.encode() + b"\0" + entry.read_bytes() + b"\0")

    for package in ("jaxpar", "jaxpar.models"):
        add(resources.files(package))
    return digest.hexdigest()


def _read(path: Path, facts: dict[str, Any], say: Callable[[str], None]) -> str | None:
    """The verdict that is remembered for these facts; None, with a line, where the file cannot be used."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["facts"] == facts and kept["verdict"].startswith("EQUAL"):
            return kept["verdict"]
        reason = "it is about something else"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"it is damaged ({type(error).__name__})"
    say(f"what {path} remembers is not used, {reason}: verifying again")
    return None


def _write(path: Path, kept: dict[str, Any], say: Callable[[str], None]) -> None:
    """Remember a verdict; where that cannot be done say so, the plan is verified all the same."""
    try:
        write_whole(path, json.dumps(kept, indent=2) + "\n")
    except OSError as error:
        say(f"cannot remember this in {path} ({error.strerror}): it will be verified again next time")
