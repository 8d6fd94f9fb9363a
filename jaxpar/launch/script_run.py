"""The run that a script starts, as its hosts see it: its config, its files, its folder and its
command.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from jaxpar.base.config import Config, load_config
from jaxpar.base.errors import is_url
from jaxpar.base.hardware import Cloud, load_chip
from jaxpar.base.toml import flatten, presets
from jaxpar.launch.placement import Placement
from jaxpar.launch.staging import Package, StagedFile, named_inputs, package_for, stage_inputs
from jaxpar.rehearse.targets import Target

VENV = "/tmp/jaxpar"
"""The folder in which TPU VMs and SkyPilot's machines have the environment of a run."""


@dataclass(frozen=True)
class ScriptRun:
    """The run that every template is filled from."""

    source: str
    """The config's name or path, as given."""
    where: Placement
    target: Target
    file: str
    """The config's file here; empty = it is a preset."""
    there: str
    """The place where the hosts find the config: a file's path there, or a preset's name."""
    folder: str
    """The run folder."""
    command: list[str]
    """The command that each host runs."""
    config: Config
    """The config that each host trains, with the paths of its files there."""
    staged: list[StagedFile]
    """The files that are sent to the hosts."""
    package: Package
    """The package that is installed there, where nothing is yet."""

    @property
    def on_gpu(self) -> bool:
        return self.target.platform == "cuda"

    @property
    def cloud(self) -> Cloud:
        return load_chip(self.target.chip).cloud

    @property
    def in_bucket(self) -> bool:
        """Whether the run folder is a URL, so that nothing need be mounted for it."""
        return is_url(self.folder)

    @property
    def env(self) -> list[str]:
        """The pairs `NAME=value` that are set for the processes."""
        ours = [] if self.target.hosts == 1 else list(self.cloud.env)
        return [*ours, *self.where.env]

    @property
    def chips(self) -> int:
        """The chips of one host."""
        return math.prod(self.target.host_shape)


def run_of(kind: str, source: str, config: Config, where: Placement, target: Target) -> ScriptRun:
    """Make the run of a config on a target, as a kind of script starts it.

    Args:
      kind: a key of `scripts.TEMPLATES`.
      source: the config's name or path, as given.
      config: the config of `source` with the settings of the command line.

    Raises:
      UserError: what the hosts need cannot be sent to them.
    """
    staged: list[StagedFile] = []
    package = Package("")
    if kind in ("tpu-vm", "skypilot"):
        config, staged = stage_inputs(config)
        extra = "cuda" if target.platform == "cuda" else "tpu"
        if is_url(where.run) or any(map(is_url, named_inputs(config).values())):
            extra += ",cloud"
        package = package_for(where.package, extra)
    file = _file_of(source)
    there = _place_of(file, kind) if file else source
    folder = where.run or _usual_folder(source, kind)
    if where.ray:
        failures = f"--max-failures={where.max_failures}"
        command = ["jaxpar", "launch", "ray", there, f"--target={target.name}", failures]
    elif kind in ("slurm", "gke"):
        command = ["jaxpar", "train", there]
    else:
        command = [f"{VENV}/bin/jaxpar", "train", there]
    command += [f"--run={folder}", *_settings(load_config(source), config)]
    if package.wheel is not None:
        staged.append(package.wheel)
    return ScriptRun(
        source=source,
        where=where,
        target=target,
        file=file,
        there=there,
        folder=folder,
        command=command,
        config=config,
        staged=staged,
        package=package,
    )


def _file_of(source: str) -> str:
    """Return the file of a config, a run folder's config.toml for one; empty for a preset."""
    if source in presets("jaxpar.configs"):
        return ""
    if Path(source).is_dir():
        return str(Path(source) / "config.toml")
    return source


def _place_of(file: str, kind: str) -> str:
    """Return where the hosts find a config's file: nodes of Slurm share a file system with us."""
    if kind == "slurm":
        return file
    if kind == "gke":
        return "/etc/jaxpar/config.toml"
    return f"{VENV}.toml"


def _usual_folder(source: str, kind: str) -> str:
    """Return the run folder where none was named."""
    stem = Path(source).stem
    if kind == "slurm":
        return f"runs/{stem}"
    return f"/mnt/jaxpar/{stem}"


def _settings(base: Config, config: Config) -> list[str]:
    """List the settings that make `config` of `base`, as words of a command line."""
    old = flatten(base)
    words = []
    for key, value in flatten(config).items():
        if value == old[key]:
            continue
        if isinstance(value, tuple):
            text = f"[{','.join(map(str, value))}]"
        else:
            text = value
        words.append(f"{key}={text}")
    return words
