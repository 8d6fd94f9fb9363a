"""The teacher of a training: what a config says of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from jaxpar.base.layout.mesh import MeshSpec, Size
from jaxpar.base.ranges import MOST_STEPS, Range


@dataclass(frozen=True)
class TeacherMesh:
    """How the devices of a training lie where a teacher runs beside on them: as in `[mesh]`, with
    no stages and no slices. One size may be -1, which takes what is left."""

    data: Size = 1
    fsdp: Size = -1
    context: Size = 1
    expert: Size = 1
    tensor: Size = 1

    @property
    def spec(self) -> MeshSpec:
        """The mesh."""
        return MeshSpec(**vars(self))


@dataclass(frozen=True)
class DistillConfig:
    """A teacher, whose most likely entries of the vocabulary the model learns beside the labels
    (Hinton et al. 2015, arXiv:1503.02531): see docs/distil.md."""

    teacher: str = ""
    """A run folder or a Hugging Face folder, which runs beside the training, or a folder that
    `jaxpar eval RUN --top-k K --out FOLDER` wrote; empty = no teacher."""
    step: Annotated[int, Range(0, MOST_STEPS)] = 0
    """The checkpoint of a teacher that runs beside; 0 = the best, or the newest where none was
    evaluated.
    """
    alpha: Annotated[float, Range(0.0, 1.0)] = 0.5
    """The teacher's share of the loss; the labels have the rest."""
    temperature: Annotated[float, Range(0.01, 1000.0)] = 1.0
    """What scores are divided by, the teacher's and the model's, before they are compared. The
    teacher's part of the loss is multiplied with its square."""
    top_k: Annotated[int, Range(1, 65_536)] = 32
    """How many entries of a token are learned; what the others have is left out, and the teacher's
    distribution is scaled to these."""
    hidden: tuple[str, ...] = ()
    """Pairs of layers of which the first learns the hidden states of the second, through a linear
    projection: 2:4 for those after the model's second layer and its teacher's fourth, or last for
    those after the last of both. The teacher runs beside."""
    hidden_width: Annotated[int, Range(0, 2**20)] = 0
    """The teacher's model.embed, which the projections lead to."""
    hidden_weight: Annotated[float, Range(0.0, 1e6)] = 1.0
    """What the distance of the hidden states is multiplied with in the loss."""
    mesh: TeacherMesh = field(default_factory=TeacherMesh)
