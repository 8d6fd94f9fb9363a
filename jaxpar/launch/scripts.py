"""Scripts and manifests that train a config on a target, for what is there to start it: templates,
and the values that they are filled with.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from jaxpar.base.config import Config
from jaxpar.base.config.checks import check
from jaxpar.base.errors import UserError
from jaxpar.base.hardware import load_chip
from jaxpar.base.toml import find_toml
from jaxpar.base.version import jaxpar_version
from jaxpar.launch.script_run import VENV, Placement, ScriptRun, require_place, run_of
from jaxpar.launch.staging import (
    FILES,
    StagedFile,
    exports,
    local_inputs,
    require_environment,
    require_seen,
)
from jaxpar.rehearse.targets import Target, check_mesh, load_target

TEMPLATES = {
    "slurm": "slurm.sh",
    "gke": "jobset.yaml",
    "tpu-vm": "tpu_vm.sh",
    "skypilot": "skypilot.yaml",
}
"""The kinds of script, by what starts the processes, each with its file in `templates/`."""


def script(kind: str, source: str, config: Config, where: Placement) -> str:
    """Return the text of a script or manifest of a kind that `TEMPLATES` has.

    Args:
      kind: a key of `TEMPLATES`.
      source: the config's name or path, as given.
      config: that config with the settings of the command line.
      where: the target, and what else the kind needs to know.

    Raises:
      UserError: the mesh does not fit the target, this kind cannot start on it, or something is
        missing or without effect.
    """
    if not where.target:
        example = "h100x64" if kind == "slurm" else "v5p-64"
        raise UserError(f"jaxpar launch {kind} needs --target, such as {example}")
    require_environment(where.env, where.secrets)
    target = load_target(where.target)
    require_place(kind, where, target, load_chip(target.chip).cloud)
    if target.platform == "cuda":
        platform = "gpu"
    else:
        platform = "tpu"
    mesh = replace(config.mesh, platform=platform, distributed=target.hosts > 1)
    config = check(replace(config, mesh=mesh))
    check_mesh(mesh, target)
    run = run_of(kind, source, config, where, target)
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


def _fill(template: str, values: dict[str, Any]) -> str:
    """Fill in the `{{names}}` of a template; several lines keep the indent of the first, and a line
    of none goes.
    """
    lines = []
    for line in template.splitlines():
        filled = re.sub(r"\{\{(\w+)\}\}", lambda found: str(values[found[1]]), line)
        indent = " " * (len(line) - len(line.lstrip()))
        if filled.strip() or not line.strip():
            lines.append(filled.rstrip().replace("\n", "\n" + indent))
    return "\n".join(lines) + "\n"


def _common_values(run: ScriptRun) -> dict[str, Any]:
    """Collect the values that templates of several kinds name."""
    stem = Path(run.source).stem
    words = shlex.join(run.command)
    requirement = shlex.quote(run.package.requirement)
    setup = [
        "python3 -m pip install --quiet uv",
        f"python3 -m uv venv --quiet --clear --python 3.12 {VENV}",
        f"python3 -m uv pip install --quiet --python {VENV} {requirement}",
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


def _slurm_values(run: ScriptRun) -> dict[str, Any]:
    """Collect the further values of a batch script, whose nodes share a file system."""
    container = []
    if run.where.image:
        container = [
            f"--container-image={run.where.image}",
            "--container-workdir=$PWD",
            "--container-mounts=$PWD:$PWD",
        ]
    wanted = f"jaxpar {jaxpar_version()}"
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


def _tpu_vm_values(run: ScriptRun) -> dict[str, Any]:
    """Collect the further values of the script for TPU VMs, whose hosts read secrets from Secret
    Manager.
    """
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


def _skypilot_values(run: ScriptRun) -> dict[str, Any]:
    """Collect the values of SkyPilot's task, which takes a TPU slice for one node, and runs on all
    its hosts.
    """
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


def _kubernetes_values(run: ScriptRun, name: str) -> dict[str, Any]:
    """Collect the values that the manifests name: a job for each slice, and a pod for each host."""
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


def _pod_env(run: ScriptRun, name: str) -> list[str]:
    """Write the environment of a pod: what is set, and what it reads from a Secret of the
    cluster.
    """
    split = [pair.partition("=") for pair in run.env]
    plain = [f"- {{name: {key}, value: {json.dumps(value)}}}" for key, _, value in split]
    hidden = [
        f"- {{name: {key}, valueFrom: {{secretKeyRef: {{name: {name}-env, key: {key}}}}}}}"
        for key in run.where.secrets
    ]
    return [*plain, *hidden]


def _secret_note(run: ScriptRun, name: str) -> str:
    """Write the command that makes the Secret that the pods read."""
    if not run.where.secrets:
        return ""
    given = " ".join(f'--from-literal={key}="${key}"' for key in run.where.secrets)
    return f"#   kubectl create secret generic {name}-env {given}"


def _volumes(run: ScriptRun, name: str) -> dict[str, str]:
    """Write the volumes of a pod: the run folder's, the config's, and on GPUs shared memory."""
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
    """Write a manifest with the text of a config, which is mounted as a file."""
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


def _cluster_env(name: str, target: Target) -> list[str]:
    """Write the variables by which the pods of a job set find each other."""
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return [
        f'- {{name: JAX_COORDINATOR_ADDRESS, value: "{name}-workers-0-0.{name}:8476"}}',
        f'- {{name: JAX_NUM_PROCESSES, value: "{target.hosts}"}}',
        "- name: JAX_PROCESS_ID",
        f'  valueFrom: {{fieldRef: {{fieldPath: "{index}"}}}}',
    ]
