"""The run that a script starts: where it goes, what each way to start one needs and refuses, and
the config, files, folder and command that its hosts have.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jaxpar.base.config import Config, load_config
from jaxpar.base.errors import UserError, is_url
from jaxpar.base.field_marks import Trait
from jaxpar.base.hardware import Cloud, load_chip
from jaxpar.base.toml import flatten, presets
from jaxpar.launch.staging import Package, StagedFile, named_inputs, package_for, stage_inputs
from jaxpar.rehearse.targets import Target

VENV = "/tmp/jaxpar"
"""The folder in which TPU VMs and SkyPilot's machines have the environment of a run."""
_UNUSED = {"gke": ("package",), "slurm": ("spot", "claim", "ray", "package")}
"""The flags that a kind of script has no use for; TPU VMs and SkyPilot have none for what pods
need.
"""


@dataclass(frozen=True)
class Placement:
    """Where a run goes, and what it may cost."""

    target: str = ""
    """The hardware, v5p-64 or h100x64: docs/targets.md lists the names."""
    run: Annotated[str, Trait.MAY_BE_URL] = ""
    """Run folder, a URL (gs://, s3://) or on storage that all hosts share; empty = runs/NAME under
    Slurm, and /mnt/jaxpar/NAME elsewhere, where the storage is mounted at the folder that it is
    in."""
    max_failures: int = 3
    """How often all processes start again after a crash."""
    spot: bool = False
    """Take machines that may be taken back (not under Slurm)."""
    image: Annotated[str, Trait.MAY_BE_URL] = ""
    """GKE and Slurm: the container image, with jaxpar in it and its tag; the repository's
    Dockerfile makes one. Under Slurm it needs Pyxis; empty = none there."""
    package: str = ""
    """TPU VMs and SkyPilot: what pip installs on the hosts, a wheel, jaxpar[tpu]==0.1.0 or
    git+URL@COMMIT; empty = the commit or the version that prints the script."""
    env: tuple[str, ...] = ()
    """Variables that the script sets, each NAME=value."""
    secrets: tuple[str, ...] = ()
    """Names of variables whose values the script hands on and does not contain, HF_TOKEN
    WANDB_API_KEY."""
    claim: str = ""
    """GKE: the PersistentVolumeClaim of the storage, which many pods write."""
    ray: bool = False
    """GKE: a RayJob for KubeRay, which runs `jaxpar launch ray` in the cluster, in place of a
    JobSet.
    """


def require_place(kind: str, where: Placement, target: Target, cloud: Cloud) -> None:
    """Require that a kind of script can start a run on a target, and uses all that was given.

    Args:
      kind: what starts it: slurm, gke, tpu-vm or skypilot.
      where: where the run goes.
      target: the hardware that it names.
      cloud: what clouds call its chip.

    Raises:
      UserError: this kind cannot start on the target, or something is missing or without effect.
    """
    _require_kind(kind, target, cloud)
    if kind == "gke":
        _require_pods(where)
    unused = _UNUSED.get(kind, ("image", "claim", "ray"))
    found = [f"--{name}" for name in unused if getattr(where, name)]
    if found:
        raise UserError(
            f"{' and '.join(found)} has no effect: jaxpar launch {kind} does not use it"
        )


def _require_kind(kind: str, target: Target, cloud: Cloud) -> None:
    """Require that a kind of script can start on a target."""
    tpu = target.platform == "tpu"
    if kind == "slurm" and tpu:
        raise UserError(
            f"{target.name} is not run by Slurm: try `jaxpar launch gke`, `tpu-vm` or `skypilot`"
        )
    if (kind == "tpu-vm" and not tpu) or (
        kind in ("tpu-vm", "skypilot") and tpu and not cloud.runtime
    ):
        raise UserError(f"{target.name} is not to be had by {kind}: try `jaxpar launch gke`")
    if kind in ("tpu-vm", "skypilot") and tpu and target.slices > 1:
        raise UserError(
            f"{target.name} is {target.slices} slices, which start together on GKE: `jaxpar "
            "launch gke`"
        )


def _require_pods(where: Placement) -> None:
    """Require what pods need: an image, and a folder that all of them reach."""
    if where.ray and is_url(where.run):
        raise UserError(
            f"--run={where.run} is a URL, and Ray's processes share a folder: give --claim and a "
            "folder on it, or leave out --ray"
        )
    if where.claim and is_url(where.run):
        raise UserError(f"--claim has no effect: --run={where.run} is in a bucket")
    if not (where.image and (where.claim or is_url(where.run))):
        raise UserError(
            "jaxpar launch gke needs --image, a container with jaxpar, and for the run folder "
            "--claim, or --run=gs://bucket/folder"
        )
    if not re.search(r":(?!latest$)[\w.-]+$|@sha256:", where.image):
        raise UserError(
            f"--image={where.image} does not say which version it is, and each pod would take what "
            "it finds: give its tag, such as my-registry/jaxpar:1, or its digest"
        )


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
    folder = where.run
    if not folder:
        storage = "runs" if kind == "slurm" else "/mnt/jaxpar"
        folder = f"{storage}/{Path(source).stem}"
    there = source
    if file and kind == "gke":
        there = "/etc/jaxpar/config.toml"
    elif file and kind == "slurm":  # its nodes share a file system with us
        there = file
    elif file:
        there = f"{VENV}.toml"
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
