"""A candidate is the choice of those keys of a config that say how a step runs and not what it
computes: a point of the space that a search goes through.

It is small and hashable, so that a search may make a hundred thousand of them without a mesh or a
model.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple, cast

from jaxpar.base.config import Config
from jaxpar.base.layout.activation_names import Policy
from jaxpar.base.layout.mesh import MESH_AXES
from jaxpar.base.layout.sharding import LogicalAxis

ONE_DEVICE = (1,) * len(MESH_AXES)
ZERO = ("fsdp", "data")
"""The mesh axes of `rules.state_embed` under ZeRO-1."""
Choices = tuple[tuple[str, str], ...]
"""Values by name, in the order of the names."""


class Candidate(NamedTuple):
    """The keys of a config that a search may choose.

    Attributes:
      mesh: the devices along each axis of `MESH_AXES` inside a slice or a node.
      dcn: the slices or nodes that each axis spans.
      accumulation: the microbatches of a step that follow one another, `train.accumulation`.
      microbatches: those that are in the pipeline together, `pipeline.microbatches`; 1 without
        stages.
      schedule: the pipeline's schedule.
      virtual: the chunks of layers of each stage.
      policy: the memory policy.
      keep: what `memory.keep` says of single activations; only those that do not follow the policy.
      optimizer: where the optimizer's state lies, `memory.optimizer`.
      parameters: where the parameters of the layers lie, `memory.parameters`.
      zero: whether the optimizer's state is split over `data` too, which is ZeRO-1.
      moments: the dtype of first moments, `precision.moments`.
      loss_mib: the MiB that the loss may hold, `memory.loss_mib`.
      scan: whether layers run in a loop, `model.scan_layers`.
      overlap: the forms of the `overlap` table; only those that are not its defaults.
    """

    mesh: tuple[int, ...] = ONE_DEVICE
    dcn: tuple[int, ...] = ONE_DEVICE
    accumulation: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    policy: Policy = "none"
    keep: Choices = ()
    optimizer: str = "device"
    parameters: str = "device"
    zero: bool = False
    moments: str = "float32"
    loss_mib: int = 4096
    scan: bool = True
    overlap: Choices = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The devices along each axis of `MESH_AXES`, over all slices or nodes."""
        return _sizes(self.mesh, self.dcn)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.sizes)

    def size(self, axis: LogicalAxis) -> int:
        """Return the number of devices along a mesh axis."""
        return self.sizes[_PLACE[axis]]


@lru_cache(maxsize=65536)
def _sizes(mesh: tuple[int, ...], dcn: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(inside * across for inside, across in zip(mesh, dcn, strict=True))


_PLACE = {axis: place for place, axis in enumerate(MESH_AXES)}


def candidate_of(config: Config) -> Candidate:
    """Read the candidate that a config is. An axis of -1 counts as one device, and microbatches of
    0 stay 0 until a mesh is known.
    """
    mesh = config.mesh
    pipeline = config.pipeline
    memory = config.memory
    rules = config.rules
    keep = [(name, choice) for name, choice in vars(memory.keep).items() if choice != "policy"]
    defaults = vars(type(config.overlap)())
    overlap = [item for item in vars(config.overlap).items() if item[1] != defaults[item[0]]]
    stages = max(mesh.stage, 1) * mesh.dcn.stage
    return Candidate(
        mesh=tuple(max(getattr(mesh, axis), 1) for axis in MESH_AXES),
        dcn=tuple(getattr(mesh.dcn, axis) for axis in MESH_AXES),
        accumulation=config.train.accumulation,
        microbatches=pipeline.microbatches if stages > 1 else 1,
        schedule=pipeline.schedule,
        virtual=pipeline.virtual if stages > 1 else 1,
        policy=memory.policy,
        keep=tuple(sorted(keep)),
        optimizer=memory.optimizer,
        parameters=memory.parameters,
        zero="data" in rules.state_embed and "data" not in rules.embed,
        moments=config.precision.moments,
        loss_mib=memory.loss_mib,
        scan=config.model.scan_layers,
        overlap=tuple(sorted(cast("list[tuple[str, str]]", overlap))),
    )


def changes(candidate: Candidate) -> dict[str, Any]:
    """List the keys of a config that make it this candidate, for `jaxpar.base.config.override`.

    A rule of `state_embed` is written only for ZeRO-1, since a config may have one of its own. What
    has no effect without stages is not written.
    """
    made: dict[str, Any] = {}
    for axis, inside, across in zip(MESH_AXES, candidate.mesh, candidate.dcn, strict=True):
        made[f"mesh.{axis}"] = inside
        made[f"mesh.dcn.{axis}"] = across
    made["train.accumulation"] = candidate.accumulation
    if candidate.size("stage") > 1:
        made["pipeline.microbatches"] = candidate.microbatches
        made["pipeline.schedule"] = candidate.schedule
        made["pipeline.virtual"] = candidate.virtual
    made["memory.policy"] = candidate.policy
    made |= {f"memory.keep.{name}": action for name, action in candidate.keep}
    made["memory.optimizer"] = candidate.optimizer
    made["memory.parameters"] = candidate.parameters
    made["memory.loss_mib"] = candidate.loss_mib
    made["precision.moments"] = candidate.moments
    made["model.scan_layers"] = candidate.scan
    made |= {f"overlap.{name}": form for name, form in candidate.overlap}
    if candidate.zero:
        made["rules.state_embed"] = list(ZERO)
    return made


def mesh_text(candidate: Candidate) -> str:
    """Write the mesh of a plan: `data=8 (across nodes) x fsdp=8`."""
    parts = []
    for axis, inside, across in zip(MESH_AXES, candidate.mesh, candidate.dcn, strict=True):
        if inside * across == 1:
            continue
        if across == 1:
            parts.append(f"{axis}={inside}")
        elif inside == 1:
            parts.append(f"{axis}={across} across")
        else:
            parts.append(f"{axis}={inside * across} ({across} across)")
    return " x ".join(parts) or "1 device"


def plan_text(candidate: Candidate) -> str:
    """Write a plan in a few words: `fsdp=64, dots, 4 microbatches`."""
    parts = [mesh_text(candidate)]
    if candidate.size("stage") > 1:
        virtual = f" x {candidate.virtual}" if candidate.virtual > 1 else ""
        parts.append(f"{candidate.schedule}{virtual}, {candidate.microbatches} in the pipeline")
    if candidate.accumulation > 1:
        parts.append(f"{candidate.accumulation} microbatches")
    if candidate.zero:
        parts.append("ZeRO-1")
    parts.append("keeps all" if candidate.policy == "none" else candidate.policy)
    parts += [f"{name} {_ACTIONS[action]}" for name, action in candidate.keep]
    if candidate.optimizer != "device":
        parts.append(f"optimizer {_PLACES[candidate.optimizer]}")
    if candidate.parameters != "device":
        parts.append("parameters in host memory")
    if candidate.moments != "float32":
        parts.append(f"{candidate.moments} moments")
    parts += [f"{name} {form}" for name, form in candidate.overlap]
    if not candidate.scan:
        parts.append("unrolled")
    return ", ".join(parts)


_ACTIONS = {"save": "kept", "offload": "in host memory", "recompute": "made again"}
_PLACES = {"offload": "in host memory", "host": "updated by the host"}
