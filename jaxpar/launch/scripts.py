"""Scripts and manifests that train a config on a target, for what is there to start it: templates,
filled in.
"""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from jaxpar.base.config import Config
from jaxpar.base.config.checks import check
from jaxpar.base.errors import UserError
from jaxpar.base.hardware import load_chip
from jaxpar.launch.script_run import Placement, require_place, run_of
from jaxpar.launch.staging import require_environment, require_seen
from jaxpar.launch.template_values import (
    common_values,
    kubernetes_values,
    skypilot_values,
    slurm_values,
    tpu_vm_values,
)
from jaxpar.rehearse.targets import check_mesh, load_target

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
    values = common_values(run)
    if kind == "slurm":
        values |= slurm_values(run)
    if kind == "tpu-vm":
        values |= tpu_vm_values(run)
    if kind == "skypilot":
        values |= skypilot_values(run)
    if kind == "gke":
        values |= kubernetes_values(run, values["name"])
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
