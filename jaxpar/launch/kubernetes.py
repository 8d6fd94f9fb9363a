"""The values that the manifests for GKE are filled with: jobs and pods, their volumes, their
environment.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from jaxpar.base.toml import find_toml
from jaxpar.launch.script_run import ScriptRun
from jaxpar.rehearse.targets import Target


def kubernetes_values(run: ScriptRun, name: str) -> dict[str, Any]:
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
