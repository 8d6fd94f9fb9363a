"""`train --verify` verifies a plan before it trains, once for each jax, platform and state of the library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import jax

from jaxpar.base.config import Config
from jaxpar.base.errors import UserError
from jaxpar.base.mesh import total_sizes
from jaxpar.base.runtime import cache_folder, compiler_flags, versions, write_whole
from jaxpar.base.toml import to_toml
from jaxpar.verify.of_config.checks import run
from jaxpar.verify.of_config.setup import Setup, prepare


def require(config: Config, devices: list[jax.Device], say: Callable[[str], None]) -> None:
    """Verify a plan on this process's share of `devices`, unless exactly this was verified before.

    Raises:
      UserError: the plan differs from one device, or it cannot be verified here.
    """
    setup = prepare(config, [device for device in devices if device.process_index == jax.process_index()])
    facts = json.dumps(facts_of(setup), indent=2, sort_keys=True)
    path = cache_folder() / "verify" / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.txt"
    try:
        before = path.read_text(encoding="utf-8").partition("\n")[0]
    except (OSError, ValueError):  # there is no such file, or it is damaged
        before = ""
    if before.startswith("EQUAL: "):
        say(f"verified before: {before}")
        return
    for note in setup.notes:
        say(f"verify: {note}")
    found = run(setup)
    if not found.equal:
        raise UserError(f"--verify refuses to train this plan: {found}; `jaxpar verify` shows the whole table")
    say(f"verified: {found}")
    try:
        write_whole(path, f"{found}\n{facts}\n")
    except OSError as error:
        say(f"cannot remember this in {path} ({error.strerror}): it will be verified again next time")


def facts_of(setup: Setup) -> dict[str, object]:
    """Return all that the outcome depends on: versions, platform, compiler flags, source code and shrunk config."""
    device = setup.devices[0]
    return {
        "versions": versions(),
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
    """Return the SHA-256 of the Python files of the library and its models."""
    digest = hashlib.sha256()
    for package in ("jaxpar", "jaxpar.models"):
        for file in sorted(Path(str(resources.files(package))).rglob("*.py")):
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
