"""The values that the templates of scripts are filled with: for several kinds, and for Slurm, TPU
VMs and SkyPilot.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from jaxpar.base.version import jaxpar_version
from jaxpar.launch.script_run import VENV, ScriptRun
from jaxpar.launch.staging import FILES, StagedFile, exports, local_inputs


def common_values(run: ScriptRun) -> dict[str, Any]:
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


def slurm_values(run: ScriptRun) -> dict[str, Any]:
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


def tpu_vm_values(run: ScriptRun) -> dict[str, Any]:
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


def skypilot_values(run: ScriptRun) -> dict[str, Any]:
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
