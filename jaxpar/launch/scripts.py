"""A script or manifest that trains a config on a target, for what is there to start it: a template,
filled in.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import textwrap
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from jaxpar.base.config import Config, check, load_config
from jaxpar.base.errors import UserError
from jaxpar.base.hardware import Cloud, load_chip
from jaxpar.base.toml import find_toml, flatten, presets
from jaxpar.rehearse.targets import Target, check_mesh, load_target


@dataclass(frozen=True)
class Placement:
    """Where a run goes, and what it may cost."""

    target: str = ""
    """The hardware, v5p-64 or h100x64: docs/targets.md lists the names."""
    run: str = ""
    """Run folder, on storage that all hosts share; empty = runs/NAME under Slurm, and
    /mnt/jaxpar/NAME elsewhere, where the storage is mounted at the folder that it is in."""
    max_failures: int = 3
    """How often all processes start again after a crash."""
    spot: bool = False
    """Take machines that may be taken back (not under Slurm)."""
    image: str = ""
    """GKE: the container image, with jaxpar in it."""
    claim: str = ""
    """GKE: the PersistentVolumeClaim of the storage, which many pods write."""
    ray: bool = False
    """GKE: a RayJob for KubeRay, which runs `jaxpar launch ray` in the cluster, in place of a
    JobSet.
    """


TEMPLATES = {
    "slurm": "slurm.sh",
    "gke": "jobset.yaml",
    "tpu-vm": "tpu_vm.sh",
    "skypilot": "skypilot.yaml",
}
"""What starts the processes, and its file in `templates/`."""
_VENV = "/tmp/jaxpar"


def script(kind: str, source: str, config: Config, where: Placement) -> str:
    """Return the text of a script or manifest of a kind that `TEMPLATES` has.

    `source` is the config's name or path, as given, and `config` that config with the settings of
    the command line.

    Raises:
      UserError: the mesh does not fit the target, this kind cannot start on it, or something is
        missing or without effect.
    """
    if not where.target:
        raise UserError(
            f"jaxpar launch {kind} needs --target, such as "
            f"{'h100x64' if kind == 'slurm' else 'v5p-64'}"
        )
    target = load_target(where.target)
    gpu = target.platform == "cuda"
    hosts = target.hosts
    chips = math.prod(target.host_shape)
    cloud = load_chip(target.chip).cloud
    _require_place(kind, where, target, cloud)
    mesh = replace(config.mesh, platform="gpu" if gpu else "tpu", distributed=hosts > 1)
    config = check(replace(config, mesh=mesh))
    check_mesh(mesh, target)
    file = "" if source in presets("jaxpar.configs") else source
    if file and Path(file).is_dir():
        file = str(Path(file) / "config.toml")
    stem = Path(source).stem
    run = where.run or (f"runs/{stem}" if kind == "slurm" else f"/mnt/jaxpar/{stem}")
    # Where the hosts find a config that is no preset.
    if file:
        there = {"slurm": file, "gke": "/etc/jaxpar/config.toml"}.get(kind, f"{_VENV}.toml")
    else:
        there = source
    command = ["jaxpar" if kind in ("slurm", "gke") else f"{_VENV}/bin/jaxpar", "train", there]
    if where.ray:
        command[1:] = [
            "launch",
            "ray",
            there,
            f"--target={target.name}",
            f"--max-failures={where.max_failures}",
        ]
    command += [f"--run={run}", *_settings(load_config(source), config)]
    values = {
        "config": source,
        "target": target.name,
        "slice": target.vendor_name,
        "runtime": cloud.runtime,
        "name": re.sub(r"[^a-z0-9]+", "-", f"jaxpar-{stem}".lower())[:40].strip("-"),
        "hosts": hosts,
        "chips": chips,
        "devices": ",".join(map(str, range(chips))),
        "storage": Path(run).parent,
        "max_failures": where.max_failures,
        "spot": "--spot" if where.spot else "",
        "command": shlex.join(command),
        "quoted_command": shlex.quote(shlex.join(command)),
        "command_list": json.dumps(command),
        "entrypoint": json.dumps(shlex.join(command)),
        "copy_config": f"send_to_hosts {shlex.quote(file)} {there}" if file else "",
        "setup": "python3 -m pip install --quiet uv && python3 -m uv venv --quiet --clear "
        f"--python 3.12 {_VENV} && "
        f"python3 -m uv pip install --quiet --python {_VENV} "
        f"'jaxpar[{'cuda' if gpu else 'tpu'}] @ git+https://github.com/jaxpar/jaxpar'",
    }
    if kind == "skypilot":
        values |= {
            # SkyPilot takes a slice for one node, and runs on all its hosts
            "nodes": hosts if gpu else 1,
            "accelerators": f"{cloud.skypilot}:{chips}" if gpu else f"tpu-{target.vendor_name}",
            "accelerator_args": ""
            if gpu
            else f"accelerator_args: {{runtime_version: {cloud.runtime}}}",
            "spot": "use_spot: true" if where.spot else "",
            "mount_config": f"{there}: {file}" if file else "",
            "join": """export JAX_COORDINATOR_ADDRESS="${SKYPILOT_NODE_IPS%%$'\\n'*}:8476"
export JAX_NUM_PROCESSES="$SKYPILOT_NUM_NODES" JAX_PROCESS_ID="$SKYPILOT_NODE_RANK\""""
            if gpu and hosts > 1
            else "",
        }
    if kind == "gke":
        values |= _kubernetes(where, target, cloud, file, values)
    template = "rayjob.yaml" if where.ray else TEMPLATES[kind]
    return _fill(
        resources.files("jaxpar.launch").joinpath("templates", template).read_text("utf-8"), values
    )


def _require_place(kind: str, where: Placement, target: Target, cloud: Cloud) -> None:
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
    if kind == "gke" and not (where.image and where.claim):
        raise UserError(
            "jaxpar launch gke needs --image, a container with jaxpar, and --claim, for the run "
            "folder"
        )
    unused = {"gke": (), "slurm": ("spot", "image", "claim", "ray")}.get(
        kind, ("image", "claim", "ray")
    )
    if found := [f"--{name}" for name in unused if getattr(where, name)]:
        raise UserError(
            f"{' and '.join(found)} has no effect: jaxpar launch {kind} does not use it"
        )


def _settings(base: Config, config: Config) -> list[str]:
    """The settings that make `config` of `base`, as words of a command line."""
    old = flatten(base)
    words = []
    for key, value in flatten(config).items():
        if isinstance(value, tuple):
            text = f"[{','.join(map(str, value))}]"
        else:
            text = value
        words += [f"{key}={text}"] if value != old[key] else []
    return words


def _kubernetes(
    where: Placement, target: Target, cloud: Cloud, file: str, values: dict[str, Any]
) -> dict[str, Any]:
    """What the manifests name: a job for each slice, and a pod for each host."""
    name = values["name"]
    gpu = target.platform == "cuda"
    if not gpu:
        jobs = target.slices
    elif where.ray:
        jobs = target.hosts
    else:
        jobs = 1
    volumes = {"runs": (values["storage"], f"persistentVolumeClaim: {{claimName: {where.claim}}}")}
    if file:
        volumes["config"] = ("/etc/jaxpar", f"configMap: {{name: {name}}}")
    if gpu:
        volumes["shm"] = ("/dev/shm", "emptyDir: {medium: Memory}")
    if file:
        text = textwrap.indent(find_toml(file, "jaxpar.configs")[0].strip(), "    ")
    else:
        text = ""
    key = "cloud.google.com/gke-tpu"
    tpu = f"{key}-accelerator: {cloud.gke}\n{key}-topology: {target.topology}"
    if gpu:
        node = f"cloud.google.com/gke-accelerator: {cloud.gke}"
    else:
        node = tpu
    spot = '[{key: cloud.google.com/gke-spot, operator: Equal, value: "true", effect: NoSchedule}]'
    return {
        "image": where.image,
        "jobs": jobs,
        "pods": target.hosts // jobs,
        "grace": 25 if where.spot else 120,
        "resource": "nvidia.com/gpu" if gpu else "google.com/tpu",
        "node": node + ('\ncloud.google.com/gke-spot: "true"' if where.spot else ""),
        "tolerations": f"tolerations: {spot}" if where.spot else "",
        "annotations": ""
        if gpu
        else (
            "annotations: {alpha.jobset.sigs.k8s.io/exclusive-topology: "
            "cloud.google.com/gke-nodepool}"
        ),
        "env": _cluster_env(name, target) if gpu and target.hosts > 1 else "",
        "mounts": "\n".join(
            f"- {{name: {key}, mountPath: {path}}}" for key, (path, _) in volumes.items()
        ),
        "volumes": "\n".join(f"- {{name: {key}, {what}}}" for key, (_, what) in volumes.items()),
        "config_map": f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}}}\ndata:\n  "
        f"config.toml: |\n{text}"
        "\n---"
        if file
        else "",
    }


def _fill(template: str, values: dict[str, Any]) -> str:
    """The template with its `{{names}}`; several lines keep the indent of the first, and a line of
    none goes.
    """
    lines = []
    for line in template.splitlines():
        filled = re.sub(r"\{\{(\w+)\}\}", lambda found: str(values[found[1]]), line)
        if filled.strip() or not line.strip():
            lines.append(
                filled.rstrip().replace(
                    "\n",
                    "\n" + " " * (len(line) - len(line.lstrip())),
                )
            )
    return "\n".join(lines) + "\n"


def _cluster_env(name: str, target: Target) -> str:
    """The variables by which the pods of a job set find each other."""
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return f"""env:
- {{name: JAX_COORDINATOR_ADDRESS, value: "{name}-workers-0-0.{name}:8476"}}
- {{name: JAX_NUM_PROCESSES, value: "{target.hosts}"}}
- name: JAX_PROCESS_ID
  valueFrom: {{fieldRef: {{fieldPath: "{index}"}}}}"""
