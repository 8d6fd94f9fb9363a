"""Checks that refuse parts of an experiment that do not go together: parameters, batch and
sequences with the mesh, settings with a model that has nothing for them, masks with rows that are
filled up.
"""

from __future__ import annotations

from jaxpar.base.config import Config
from jaxpar.base.config.fitting_batch import fitting_batch
from jaxpar.base.config.sparsity import MATRICES
from jaxpar.base.errors import UserError
from jaxpar.base.layout.activation_names import Keep
from jaxpar.base.registry import SOURCES
from jaxpar.models.masks import layer_masks, words_that_look_ahead
from jaxpar.models.sparsity import require_whole_groups
from jaxpar.parallel.collectives import further_split
from jaxpar.parallel.context import check_split
from jaxpar.parallel.linear import ATTENDED, GATHERED, STORED
from jaxpar.parallel.sequence_halves import require_no_later_keys
from jaxpar.parallel.zigzag import check_halves
from jaxpar.train.experiment import Experiment
from jaxpar.train.state import param_shapes
from jaxpar.train.step import gradient_axes


def check_parameters(experiment: Experiment) -> None:
    """Refuse parameters and optimizer states that the mesh does not divide, and layouts that no op
    converts between.

    Raises:
      UserError: a dim of a parameter is not divided by its mesh axes, or no op converts
        between two layouts.
    """
    model = experiment.model
    plan = experiment.plan
    shapes = param_shapes(model, plan)
    plan.sharding(model.axes, shapes)
    plan.sharding(gradient_axes(model), model.trained(shapes))
    further_split(("state_embed",), ("embed",), plan)
    if not model.has_blocks:
        return
    blocks = (model.axes["blocks"], shapes["blocks"])
    require_whole_groups(model.config, *blocks, plan)
    for stored, used in ((STORED, GATHERED), (STORED, ATTENDED), (ATTENDED, GATHERED)):
        further_split(stored, used, plan)
    plan.sharding((*ATTENDED[:2], "heads", "head_dim"), name="attention")


def check_batch(experiment: Experiment) -> None:
    """Refuse a batch or a sequence that the mesh does not divide.

    Raises:
      UserError: the data-parallel shards do not divide a microbatch, or the mesh or Domino does not
        divide the sequence.
    """
    plan = experiment.plan
    config = experiment.config
    train = config.train
    sizes = config.model
    seq_len = config.data.seq_len
    shards = plan.size("batch")
    microbatch = experiment.sequences
    if train.batch % train.accumulation:
        raise UserError(
            f"train.batch={train.batch} does not split into train.accumulation="
            f"{train.accumulation} microbatches: try train.batch={fitting_batch(config, shards)}"
        )
    if microbatch % shards:
        fitting = fitting_batch(config, shards)
        raise UserError(
            f"train.batch={train.batch} / accumulation={train.accumulation} is a microbatch of "
            f"{microbatch} sequences, "
            f"which {shards} data-parallel shards do not divide: try train.batch={fitting}"
        )
    if not experiment.model.has_blocks:
        return
    if plan.overlap.cuts_sequence:
        require_halves(experiment)
    activation = (microbatch, seq_len, sizes.embed)
    plan.sharding(("batch", "seq", None), activation, "activations")
    plan.sharding(("batch", "residual_seq", None), activation, "residual stream")
    check_split(
        plan, plan.context.strategy, seq_len, sizes.heads, sizes.kv_head_count, sizes.dropout
    )


def sequences_have_halves(experiment: Experiment) -> bool:
    """Return whether blocks can run on the halves of each sequence."""
    try:
        require_halves(experiment)
    except UserError:
        return False
    return True


def require_halves(experiment: Experiment) -> None:
    """Refuse blocks and masks that do not run on the halves of each sequence, and lengths that
    cannot be cut in halves.
    """
    if "blocks" in experiment.model.own_parts():
        block = experiment.model.own_parts()["blocks"]
        raise UserError(
            f"overlap.domino cuts each sequence in two, and {block} may look at other tokens than "
            "by ops.attention: give each device an even number of sequences and domino=on, or "
            "leave domino out"
        )
    sizes = experiment.config.model
    if sizes.experts:
        raise UserError(
            f"overlap.domino cuts each sequence in two, and the balance of "
            f"model.experts={sizes.experts} is that of whole sequences: give each device an even "
            "number of sequences and domino=on, or leave domino out"
        )
    for mask in layer_masks(sizes):
        require_no_later_keys(mask)
    check_halves(experiment.plan, experiment.config.data.seq_len)


def require_pruned(experiment: Experiment) -> None:
    """Refuse to prune matrices, or layers, that the model does not have.

    Raises:
      UserError: a target is no parameter of a block, or there are shares by depth and no stacked
        layers.
    """
    pruning = experiment.config.pruning
    if pruning.method == "none":
        return
    if pruning.sparsity_by_depth and not experiment.model.has_blocks:
        raise UserError(
            "pruning.sparsity_by_depth is about blocks that are stacked over layers, and a whole "
            "model of one's own has none: set pruning.sparsity"
        )
    there = set(experiment.model.axes.get("blocks", ()))
    wanted = pruning.targets or MATRICES
    missing = [name for name in wanted if name not in there]
    if (pruning.targets and missing) or len(missing) == len(wanted):
        raise UserError(
            f"pruning.method={pruning.method}: the blocks of {experiment.config.model.family} have "
            f"no matrix {missing[0]!r}: pruning.targets are some of "
            f"{', '.join(name for name in MATRICES if name in there) or 'none'}"
        )


def check_own_model(config: Config) -> None:
    """Refuse settings of parts that a whole model of a program's own does not have.

    Raises:
      UserError: such a setting is given, or sequences are longer than the model takes.
    """
    train = config.train
    memory = config.memory
    name = config.model.family
    if config.data.seq_len > config.model.max_seq_len:
        raise UserError(
            f"data.seq_len={config.data.seq_len}: {name} takes sequences of at most "
            f"{config.model.max_seq_len} tokens"
        )
    idle = {
        "mesh.stage": config.mesh.stage * config.mesh.dcn.stage > 1,
        "memory.policy": memory.policy != "none",
        "memory.keep": memory.keep != Keep(),
        "memory.parameters": memory.parameters == "offload",
        "overlap.domino": config.overlap.domino in ("on", "sequence"),
        "train.z_loss": train.z_loss > 0,
        "train.label_smoothing": train.label_smoothing > 0,
        "train.balance_loss": train.balance_loss > 0,
        "train.router_z_loss": train.router_z_loss > 0,
        "train.init": bool(train.init),
    }
    idle["distill.teacher"] = bool(config.distill.teacher)
    if asked := [key for key, is_set in idle.items() if is_set]:
        raise UserError(
            f"{asked[0]}: {name} is a whole model of your own, whose loss the library does not "
            "take apart: leave it at its default"
        )


def check_padding(config: Config) -> None:
    """Refuse rows that are filled up with padding, where tokens would see the padding.

    Args:
      config: a config whose model has layers or masks of the library.

    Raises:
      UserError: a mask looks ahead, and the rows of the data may end in padding that is no document
        of its own.
    """
    ahead = words_that_look_ahead(config.model)
    windows = "stride" in SOURCES[config.data.source].reads
    if ahead and not windows and not config.data.pack:
        raise UserError(
            f"model.masks={ahead[0]} lets tokens see those after them, and with "
            f"data.source={config.data.source} a row may end in padding, which they would see: set "
            "data.pack=true, which makes the padding a document of its own"
        )
