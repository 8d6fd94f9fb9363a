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
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxpar.base.config import Config, load_config
from jaxpar.base.config.checks import check
from jaxpar.base.errors import UserError, is_url
from jaxpar.base.hardware import Cloud, load_chip
from jaxpar.base.toml import find_toml, flatten, presets
from jaxpar.launch.staging import (
    FILES,
    Package,
    StagedFile,
    exports,
    local_inputs,
    named_inputs,
    package_for,
    require_environment,
    require_seen,
    stage_inputs,
)
from jaxpar.rehearse.targets import Target, check_mesh, load_target


@dataclass(frozen=True)
class Placement:
    """Where a run goes, and what it may cost."""

    target: str = ""
    """The hardware, v5p-64 or h100x64: docs/targets.md lists the names."""
    run: str = ""
    """Run folder, a URL (gs://, s3://) or on storage that all hosts share; empty = runs/NAME under
    Slurm, and /mnt/jaxpar/NAME elsewhere, where the storage is mounted at the folder that it is
    in."""
    max_failures: int = 3
    """How often all processes start again after a crash."""
    spot: bool = False
    """Take machines that may be taken back (not under Slurm)."""
    image: str = ""
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

    Args:
      kind: a key of `TEMPLATES`.
      source: the config's name or path, as given.
      config: that config with the settings of the command line.
      where: the target, and what else the kind needs to know.

    Returns:
      The text.

    Raises:
      UserError: the mesh does not fit the target, this kind cannot start on it, or something is
        missing or without effect.
    """
    if not where.target:
        raise UserError(
            f"jaxpar launch {kind} needs --target, such as "
            f"{'h100x64' if kind == 'slurm' else 'v5p-64'}"
        )
    require_environment(where.env, where.secrets)
    target = load_target(where.target)
    _require_place(kind, where, target, load_chip(target.chip).cloud)
    if target.platform == "cuda":
        platform = "gpu"
    else:
        platform = "tpu"
    mesh = replace(config.mesh, platform=platform, distributed=target.hosts > 1)
    config = check(replace(config, mesh=mesh))
    check_mesh(mesh, target)
    run = _run_of(kind, source, config, where, target)
    if kind == "gke":
        require_seen(run.config, None if run.in_bucket else Path(run.folder).parent)
    values = _common_values(run)
    if kind == "slurm":
        values |= _slurm_values(run)
    if kind == "tpu-vm":
        values |= _tpu_vm_values(run)
    if kind == "skypilot":
        values |= _skypilot_values(run)
    if kind == "gke":
        values |= _kubernetes_values(run, values["name"])
    if where.ray:
        template = "rayjob.yaml"
    else:
        template = TEMPLATES[kind]
    text = resources.files("jaxpar.launch").joinpath("templates", template).read_text("utf-8")
    return _fill(text, values)


@dataclass(frozen=True)
class _Run:
    """What every template is filled from."""

    source: str
    """The config's name or path, as given."""
    where: Placement
    target: Target
    file: str
    """The config's file here; empty = it is a preset."""
    there: str
    """Where the hosts find the config: a file's path there, or a preset's name."""
    folder: str
    """The run folder."""
    command: list[str]
    """What each host runs."""
    config: Config
    """What each host trains, with the paths of its files there."""
    staged: list[StagedFile]
    """The files that are sent to the hosts."""
    package: Package
    """What is installed there, where nothing is yet."""

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
        """`NAME=value` of what is set for the processes."""
        ours = [] if self.target.hosts == 1 else list(self.cloud.env)
        return [*ours, *self.where.env]

    @property
    def chips(self) -> int:
        """The chips of one host."""
        return math.prod(self.target.host_shape)


def _run_of(
    kind: str,
    source: str,
    config: Config,
    where: Placement,
    target: Target,
) -> _Run:
    stem = Path(source).stem
    staged: list[StagedFile] = []
    package = Package("")
    if kind in ("tpu-vm", "skypilot"):
        config, staged = stage_inputs(config)
        extra = "cuda" if target.platform == "cuda" else "tpu"
        if is_url(where.run) or any(map(is_url, named_inputs(config).values())):
            extra += ",cloud"
        package = package_for(where.package, extra)
    if source in presets("jaxpar.configs"):
        file = ""
    else:
        file = source
    if file and Path(file).is_dir():
        file = str(Path(file) / "config.toml")
    if not file:
        there = source
    elif kind == "slurm":
        there = file
    elif kind == "gke":
        there = "/etc/jaxpar/config.toml"
    else:
        there = f"{_VENV}.toml"
    if where.run:
        folder = where.run
    elif kind == "slurm":
        folder = f"runs/{stem}"
    else:
        folder = f"/mnt/jaxpar/{stem}"
    if where.ray:
        failures = f"--max-failures={where.max_failures}"
        command = ["jaxpar", "launch", "ray", there, f"--target={target.name}", failures]
    elif kind in ("slurm", "gke"):
        command = ["jaxpar", "train", there]
    else:
        command = [f"{_VENV}/bin/jaxpar", "train", there]
    command += [f"--run={folder}", *_settings(load_config(source), config)]
    if package.wheel is not None:
        staged.append(package.wheel)
    return _Run(source, where, target, file, there, folder, command, config, staged, package)


def _common_values(run: _Run) -> dict[str, Any]:
    """What templates of several kinds name."""
    stem = Path(run.source).stem
    words = shlex.join(run.command)
    requirement = shlex.quote(run.package.requirement)
    setup = [
        "python3 -m pip install --quiet uv",
        f"python3 -m uv venv --quiet --clear --python 3.12 {_VENV}",
        f"python3 -m uv pip install --quiet --python {_VENV} {requirement}",
    ]
    note = run.package.note
    return {
        "config": run.source,
        "target": run.target.name,
        "slice": run.target.vendor_name,
        "runtime": run.cloud.runtime,
        "name": re.sub(r"[^a-z0-9]+", "-", f"jaxpar-{stem}".lower())[:40].strip("-"),
        "hosts": run.target.hosts,
        "chips": run.chips,
        "devices": ",".join(map(str, range(run.chips))),
        "max_failures": run.where.max_failures,
        "spot": "--spot" if run.where.spot else "",
        "command": words,
        "command_list": json.dumps(run.command),
        "entrypoint": json.dumps(words),
        "exports": "\n".join(exports(run.env)),
        "package_note": f"# Note: {note}." if note else "",
        "setup": " && ".join(setup),
    }


def _slurm_values(run: _Run) -> dict[str, Any]:
    """What a batch script names besides. Its nodes share a file system."""
    container = []
    if image := run.where.image:
        container = [f"--container-image={image}", "--container-workdir=$PWD"]
        container.append("--container-mounts=$PWD:$PWD")
    wanted = f"jaxpar {version('jaxpar')}"
    check = f"""[[ $(jaxpar --version) == "{wanted}" ]] || {{
  echo "this script is for {wanted}, and here is $(jaxpar --version)" >&2
  exit 2
}}"""
    files = [run.file] if run.file else []
    files += [path for path in local_inputs(run.config).values() if path not in files]
    looks = [
        f"[[ -e {shlex.quote(path)} ]] || {{ echo {shlex.quote(f'{path} is not here')} >&2; "
        "exit 2; }"
        for path in files
    ]
    asks = [
        f': "${{{name}:?sbatch hands on the environment: export {name} before}}"'
        for name in run.where.secrets
    ]
    return {
        "container": " ".join(f'"{word}"' for word in container),
        "check_version": "" if container else check,
        "check_files": "\n".join(looks),
        "check_secrets": "\n".join(asks),
    }


def _tpu_vm_values(run: _Run) -> dict[str, Any]:
    """What the script for TPU VMs names besides. The hosts read secrets from Secret Manager."""
    files = [StagedFile(run.file, run.there)] if run.file else []
    files += run.staged
    sends = [f"send_to_hosts {shlex.quote(file.here)} {shlex.quote(file.there)}" for file in files]
    if run.staged:
        sends.insert(0, f'on_hosts all "mkdir -p {FILES}"')
    sets = exports(run.env)
    sets += [
        f'export {name}="$(gcloud secrets versions access latest --secret={name})"'
        for name in run.where.secrets
    ]
    remote = " && ".join([*sets, shlex.join(run.command)])
    values = {"send_files": "\n".join(sends), "quoted_command": shlex.quote(remote)}
    if run.in_bucket:
        note = "The run folder is in its bucket, which the hosts' service account must reach."
        return values | {"share": "", "share_needed": "", "share_note": note, "mount": ""}
    storage = Path(run.folder).parent
    mount = f"sudo mkdir -p {storage} && sudo mount -t nfs $SHARE {storage} && "
    mount += f"sudo chmod a+rwx {storage} &&\n  "
    return values | {
        "share": "SHARE=10.0.0.2:/share ",
        "share_needed": ' "${SHARE:?an NFS share, HOST:/PATH}"',
        "share_note": "SHARE is an NFS share, such as Filestore's, in the slice's network: the run "
        "folder is there, and outlives the slice.",
        "mount": mount,
    }


_JOIN_SKYPILOT = """export JAX_COORDINATOR_ADDRESS="${SKYPILOT_NODE_IPS%%$'\\n'*}:8476"
export JAX_NUM_PROCESSES="$SKYPILOT_NUM_NODES" JAX_PROCESS_ID="$SKYPILOT_NODE_RANK\""""


def _skypilot_values(run: _Run) -> dict[str, Any]:
    """What SkyPilot's task names. It takes a TPU slice for one node, and runs on all its hosts."""
    runtime = f"accelerator_args: {{runtime_version: {run.cloud.runtime}}}"
    mounts = [StagedFile(run.file, run.there)] if run.file else []
    mounts += run.staged
    mounted = [f"  {json.dumps(file.there)}: {json.dumps(file.here)}" for file in mounts]
    asked = list(run.where.secrets)
    if not run.in_bucket:
        asked.insert(0, "BUCKET")  # the run folder is there, and outlives the machines
        storage = Path(run.folder).parent
        mounted = [f"  {storage}: {{source: '${{BUCKET}}', mode: MOUNT}}", *mounted]
    envs = [f"  {name}: null" for name in asked]
    given = ["BUCKET=gs://my-bucket" if name == "BUCKET" else name for name in asked]
    values = {
        "network": "",
        "envs": "\n".join(["envs:", *envs]) if envs else "",
        "asks": "".join(f"--env {name} " for name in given),
        "mounts": "\n".join(["file_mounts:", *mounted]) if mounted else "",
        "nodes": 1,
        "accelerators": f"tpu-{run.target.vendor_name}",
        "accelerator_args": runtime,
        "spot": "use_spot: true" if run.where.spot else "",
        "join": "",
    }
    if run.on_gpu:
        values |= {
            "nodes": run.target.hosts,
            "accelerators": f"{run.cloud.skypilot}:{run.chips}",
            "accelerator_args": "",
        }
        if run.target.hosts > 1:
            values |= {"join": _JOIN_SKYPILOT, "network": "network_tier: best"}
    return values


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
    if kind == "gke" and where.ray and is_url(where.run):
        raise UserError(
            f"--run={where.run} is a URL, and Ray's processes share a folder: give --claim and a "
            "folder on it, or leave out --ray"
        )
    if kind == "gke" and where.claim and is_url(where.run):
        raise UserError(f"--claim has no effect: --run={where.run} is in a bucket")
    if kind == "gke" and not (where.image and (where.claim or is_url(where.run))):
        raise UserError(
            "jaxpar launch gke needs --image, a container with jaxpar, and for the run folder "
            "--claim, or --run=gs://bucket/folder"
        )
    if kind == "gke" and not re.search(r":(?!latest$)[\w.-]+$|@sha256:", where.image):
        raise UserError(
            f"--image={where.image} does not say which version it is, and each pod would take what "
            "it finds: give its tag, such as my-registry/jaxpar:1, or its digest"
        )
    unused = {"gke": ("package",), "slurm": ("spot", "claim", "ray", "package")}.get(
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


def _kubernetes_values(run: _Run, name: str) -> dict[str, Any]:
    """What the manifests name: a job for each slice, and a pod for each host."""
    target = run.target
    values = {
        "image": run.where.image,
        "grace": 25 if run.where.spot else 120,
        "tolerations": "",
        "config_map": _config_map(run.file, name) if run.file else "",
        **_volumes(run, name),
    }
    if run.on_gpu:
        # Ray has a worker group for each host; a job set one job
        jobs = target.hosts if run.where.ray else 1
        node = f"cloud.google.com/gke-accelerator: {run.cloud.gke}"
        values |= {"resource": "nvidia.com/gpu", "annotations": ""}
    else:
        jobs = target.slices
        key = "cloud.google.com/gke-tpu"
        node = f"{key}-accelerator: {run.cloud.gke}\n{key}-topology: {target.topology}"
        one_slice = "alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool"
        values |= {"resource": "google.com/tpu", "annotations": f"annotations: {{{one_slice}}}"}
    if run.where.spot:
        node += '\ncloud.google.com/gke-spot: "true"'
        spot = 'key: cloud.google.com/gke-spot, operator: Equal, value: "true", effect: NoSchedule'
        values["tolerations"] = f"tolerations: [{{{spot}}}]"
    env = _pod_env(run, name)
    if run.on_gpu and target.hosts > 1 and not run.where.ray:
        env = [*_cluster_env(name, target), *env]
    values["env"] = "\n".join(["env:", *env]) if env else ""
    values["secret_note"] = _secret_note(run, name)
    return values | {"jobs": jobs, "pods": target.hosts // jobs, "node": node}


def _pod_env(run: _Run, name: str) -> list[str]:
    """The environment of a pod: what is set, and what it reads from a Secret of the cluster."""
    split = [pair.partition("=") for pair in run.env]
    plain = [f"- {{name: {key}, value: {json.dumps(value)}}}" for key, _, value in split]
    hidden = [
        f"- {{name: {key}, valueFrom: {{secretKeyRef: {{name: {name}-env, key: {key}}}}}}}"
        for key in run.where.secrets
    ]
    return [*plain, *hidden]


def _secret_note(run: _Run, name: str) -> str:
    """How the Secret is made that the pods read."""
    if not run.where.secrets:
        return ""
    given = " ".join(f'--from-literal={key}="${key}"' for key in run.where.secrets)
    return f"#   kubectl create secret generic {name}-env {given}"


def _volumes(run: _Run, name: str) -> dict[str, str]:
    """The volumes of a pod: the run folder's, the config's, and on GPUs shared memory."""
    volumes = []
    if not run.in_bucket:
        claim = f"persistentVolumeClaim: {{claimName: {run.where.claim}}}"
        volumes.append(("runs", Path(run.folder).parent, claim))
    if run.file:
        volumes.append(("config", Path("/etc/jaxpar"), f"configMap: {{name: {name}}}"))
    if run.on_gpu:
        volumes.append(("shm", Path("/dev/shm"), "emptyDir: {medium: Memory}"))
    mounts = [f"- {{name: {key}, mountPath: {path}}}" for key, path, _ in volumes]
    lists = [f"- {{name: {key}, {what}}}" for key, _, what in volumes]
    return {
        "mounts": "\n".join(["volumeMounts:", *mounts]) if volumes else "",
        "volumes": "\n".join(["volumes:", *lists]) if volumes else "",
    }


def _config_map(file: str, name: str) -> str:
    """A manifest with the text of a config, which is mounted as a file."""
    text, _ = find_toml(file, "jaxpar.configs")
    lines = [
        "apiVersion: v1",
        "kind: ConfigMap",
        f"metadata: {{name: {name}}}",
        "data:",
        "  config.toml: |",
        textwrap.indent(text.strip(), "    "),
        "---",
    ]
    return "\n".join(lines)


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


def _cluster_env(name: str, target: Target) -> list[str]:
    """The variables by which the pods of a job set find each other."""
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return [
        f'- {{name: JAX_COORDINATOR_ADDRESS, value: "{name}-workers-0-0.{name}:8476"}}',
        f'- {{name: JAX_NUM_PROCESSES, value: "{target.hosts}"}}',
        "- name: JAX_PROCESS_ID",
        f'  valueFrom: {{fieldRef: {{fieldPath: "{index}"}}}}',
    ]
