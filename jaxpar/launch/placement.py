"""Where a run goes that a script starts, and what each way to start one needs and refuses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from jaxpar.base.errors import UserError, is_url
from jaxpar.base.field_marks import Trait
from jaxpar.base.hardware import Cloud
from jaxpar.rehearse.targets import Target

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
