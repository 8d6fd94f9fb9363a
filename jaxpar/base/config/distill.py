"""The teacher of a training: what a config says of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from jaxpar.base.field_marks import Idle, Rule, Trait, WholeConfig
from jaxpar.base.layout.mesh import MeshSpec, Size
from jaxpar.base.ranges import MOST_STEPS, Range

_NO_TEACHER = Idle(
    lambda c: not c.distill.teacher,
    "there is no teacher",
    "add --distill.teacher with the folder of a run",
)
_NO_SHARE = Idle(
    lambda c: c.distill.alpha <= 0 and not c.distill.hidden,
    "distill.alpha is 0, so that the teacher has no share in the loss",
    "raise it",
)
_NO_HIDDEN_STATES = Idle(
    lambda c: not (c.distill.teacher and c.distill.hidden),
    "no hidden states of a teacher are learned",
    "add --distill.hidden last",
)


def _next_tokens(config: WholeConfig) -> str:
    objective = config.data.objective
    if not config.distill.teacher or objective == "next":
        return ""
    return (
        f"data.objective={objective} with distill.teacher: a teacher predicts the next token, "
        "try data.objective=next"
    )


def _within_vocabulary(config: WholeConfig) -> str:
    words = config.model.vocab_size
    if not config.distill.teacher or config.distill.top_k <= words:
        return ""
    return (
        f"distill.top_k={config.distill.top_k} is more than model.vocab_size={words}: try "
        f"distill.top_k={min(words, 32)}"
    )


def _learned_states(config: WholeConfig) -> str:
    """`distill.hidden` as messages write it; empty where no hidden states are learned."""
    distill = config.distill
    learned = distill.teacher and distill.hidden
    return f"distill.hidden={', '.join(distill.hidden)}" if learned else ""


def _width_of_teacher(config: WholeConfig) -> str:
    learned = _learned_states(config)
    if not learned or config.distill.hidden_width != 0:
        return ""
    return (
        f"{learned} is learned through projections to the teacher's width: set "
        "distill.hidden_width to its model.embed"
    )


def _weight_of_hidden(config: WholeConfig) -> str:
    learned = _learned_states(config)
    if not learned or config.distill.hidden_weight != 0:
        return ""
    return (
        f"{learned} with distill.hidden_weight=0: nothing of it is in the loss, raise the weight "
        "or leave out distill.hidden"
    )


def _hidden_beside_lora(config: WholeConfig) -> str:
    learned = _learned_states(config)
    rank = config.model.lora.rank
    if not learned or rank <= 0:
        return ""
    return (
        f"{learned} with model.lora.rank={rank}: beside LoRA nothing else is trained, and "
        "projections are: leave one of them out"
    )


def _hidden_beside_stages(config: WholeConfig) -> str:
    learned = _learned_states(config)
    if not learned or config.mesh.stage * config.mesh.dcn.stage <= 1:
        return ""
    return (
        f"{learned} with mesh.stage={config.mesh.stage}: a pipeline hands no layer's states to "
        "the loss, use other axes of the mesh, or leave out distill.hidden"
    )


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


_NO_ANSWERS = Idle(
    lambda c: c.distill.alpha <= 0,
    "distill.alpha is 0, so that the teacher's answers have no share in the loss",
    "raise it",
)


@dataclass(frozen=True)
class DistillConfig:
    """A teacher, whose most likely entries of the vocabulary the model learns beside the labels
    (Hinton et al. 2015, arXiv:1503.02531): see docs/distil.md."""

    teacher: Annotated[
        str, Rule(_next_tokens, also=("data.objective",)), Trait.PATH, Trait.MAY_BE_URL
    ] = ""
    """A run folder or a Hugging Face folder, which runs beside the training, or a folder that
    `jaxpar eval RUN --top-k K --out FOLDER` wrote; empty = no teacher."""
    step: Annotated[int, Range(0, MOST_STEPS), _NO_TEACHER, _NO_SHARE] = 0
    """The checkpoint of a teacher that runs beside; 0 = the best, or the newest where none was
    evaluated.
    """
    alpha: Annotated[float, Range(0.0, 1.0), _NO_TEACHER] = 0.5
    """The teacher's share of the loss; the labels have the rest."""
    temperature: Annotated[
        float,
        Range(0.01, 1000.0),
        _NO_TEACHER,
        _NO_ANSWERS,
    ] = 1.0
    """What scores are divided by, the teacher's and the model's, before they are compared. The
    teacher's part of the loss is multiplied with its square."""
    top_k: Annotated[
        int,
        Range(1, 65_536),
        _NO_TEACHER,
        _NO_SHARE,
        Rule(_within_vocabulary, also=("model.vocab_size",)),
    ] = 32
    """How many entries of a token are learned; what the others have is left out, and the teacher's
    distribution is scaled to these."""
    hidden: Annotated[
        tuple[str, ...],
        _NO_TEACHER,
        Rule(_width_of_teacher, also=("distill.hidden_width",)),
        Rule(_weight_of_hidden, also=("distill.hidden_weight",)),
        Rule(_hidden_beside_lora, also=("model.lora.rank",)),
        Rule(_hidden_beside_stages, also=("mesh.stage",)),
    ] = ()
    """Pairs of layers of which the first learns the hidden states of the second, through a linear
    projection: 2:4 for those after the model's second layer and its teacher's fourth, or last for
    those after the last of both. The teacher runs beside."""
    hidden_width: Annotated[int, Range(0, 2**20), _NO_HIDDEN_STATES] = 0
    """The teacher's model.embed, which the projections lead to."""
    hidden_weight: Annotated[float, Range(0.0, 1e6), _NO_HIDDEN_STATES] = 1.0
    """What the distance of the hidden states is multiplied with in the loss."""
    mesh: Annotated[TeacherMesh, _NO_TEACHER, _NO_SHARE, Trait.MAY_CHANGE] = field(
        default_factory=TeacherMesh
    )
