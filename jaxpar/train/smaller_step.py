"""The settings with which a device's part of a step is smaller, as messages advise them."""

from __future__ import annotations

from jaxpar.train.experiment import Experiment


def more_devices(experiment: Experiment) -> str:
    """Name the setting with which more devices share the parameters.

    Returns:
      A setting such as `mesh.fsdp=8`; on a program's own mesh, the axes to make longer.
    """
    plan = experiment.plan
    spec = experiment.config.mesh
    if "fsdp" in plan.mesh.shape:
        return f"mesh.fsdp={2 * plan.mesh.shape['fsdp'] // spec.dcn.fsdp}"
    axes = plan.mesh_axes("embed") or plan.mesh.axis_names
    return f"a mesh with more devices along {' or '.join(map(str, axes))}"


def more_microbatches(experiment: Experiment) -> str:
    """Name the setting with which fewer sequences are on a device at a time.

    Returns:
      A setting such as `train.accumulation=4`, or with stages `pipeline.microbatches=8`; empty
      where the batch does not split into more microbatches.
    """
    train = experiment.config.train
    plan = experiment.plan
    if plan.size("stage") == 1:
        key = "train.accumulation"
        count = train.accumulation
        sequences = train.batch
    else:
        key = "pipeline.microbatches"
        count = plan.pipeline.microbatches
        sequences = train.batch // train.accumulation
    shards = plan.size("batch")
    more = range(2 * count, sequences + 1, count)
    fitting = next((n for n in more if sequences % (n * shards) == 0), 0)
    return f"{key}={fitting}" if fitting else ""
