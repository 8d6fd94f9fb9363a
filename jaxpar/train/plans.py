"""Makes an experiment of a config: its model and its plan (mesh, rules and choices), which are
checked against each other and the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh

from jaxpar.base.compiler import option_notes, step_options
from jaxpar.base.config import Config
from jaxpar.base.config.checks import check
from jaxpar.base.config.hidden_pairs import read_pairs
from jaxpar.base.config.sparsity import MATRICES
from jaxpar.base.errors import UserError
from jaxpar.base.layout.activation_names import Keep
from jaxpar.base.layout.mesh import make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.base.process.runtime import start
from jaxpar.base.registry import SOURCES
from jaxpar.models import AnyModel, Model
from jaxpar.models.hidden import Projections
from jaxpar.models.masks import layer_masks, words_that_look_ahead
from jaxpar.models.sparsity import require_whole_groups
from jaxpar.parallel import choose_attention
from jaxpar.parallel.collectives import further_split
from jaxpar.parallel.context import check_split
from jaxpar.parallel.host_memory import check_offload
from jaxpar.parallel.linear import ATTENDED, GATHERED, STORED
from jaxpar.parallel.ops import attention_calls, overlap_notes
from jaxpar.parallel.pipeline import check_stages, microbatches, pipeline_notes
from jaxpar.parallel.sequence_halves import require_no_later_keys
from jaxpar.parallel.token_order import check_halves
from jaxpar.train.activations import check_names, policy_notes
from jaxpar.train.experiment import Experiment, pipelined_microbatches
from jaxpar.train.optimizer import require_runnable
from jaxpar.train.optimizer.given_optimizer import AnyOptimizer
from jaxpar.train.optimizer.named_optimizers import decay_note
from jaxpar.train.optimizer.state_layout import replicated_note
from jaxpar.train.step import gradient_axes, param_shapes

if TYPE_CHECKING:  # it needs grain, which a program without data need not have
    from jaxpar.data.corpus import Corpus


def make_experiment(
    config: Config,
    devices: list[jax.Device] | None = None,
    model: AnyModel | None = None,
    optimizer: AnyOptimizer = None,
    corpus: Corpus | None = None,
    training: bool = True,
) -> Experiment:
    """Make what a config needs to run on these devices, and check it as a whole.

    The rules are the config's, except where there are more devices than heads (see `fit_rules`).
    `plan_notes` says what was changed.

    Args:
      config: every setting.
      devices: the devices of the mesh, which may be those of a target; None = those that the
        commands take, of `jaxpar.start(config.mesh)`: simulated ones where `mesh.platform` is cpu,
        those of all processes where `mesh.distributed` is set, else all that are here.
      model: the model, perhaps with parts of one's own, or a whole `jaxpar.models.OwnModel`, for
        which `config.model` means nothing; None = that of `config.model`.
      optimizer: any optax transformation, or an `Optimizer`; None = that of `config.optimizer`.
      corpus: the data, where they are loaded already; None = `config.data` says where they are.
      training: whether it is to be trained. Otherwise what only training reads may have any value
        of its type, as a run of an earlier version may.

    Returns:
      The experiment, whose `config` is the one given, but for the model's own sizes.

    Raises:
      UserError: `check` refuses a setting, the devices cannot be had (see `jaxpar.start`), the mesh
        does not fit them, mesh axes do not divide a dim or the batch, the optimizer state is split
        neither as its parameters nor further, XLA does not know an option, the devices' host memory
        cannot be used as it is asked for, `context.check_split` refuses the plan, documents are
        packed and the blocks would mix them, or the optimizer cannot be run with it (see
        `require_runnable`).
    """
    if model is not None and not model.has_blocks:
        config = replace(config, model=model.config)
    check(config, training)
    if model is None:
        model = Model(config.model)
    if devices is None:
        devices = start(config.mesh)
    return _assemble(config, devices, model, optimizer, corpus)


def with_config(
    experiment: Experiment,
    config: Config,
    devices: list[jax.Device] | None = None,
) -> Experiment:
    """Make an experiment anew with other settings, and with the same model where its own are the
    same.

    What was settled for an experiment is held against its model, mesh and batch again; the values
    of the single settings are not (`make_experiment` has done so).

    Args:
      experiment: the experiment whose parts are used again.
      config: the other settings.
      devices: other devices; None = those of the experiment.

    Returns:
      The other experiment.

    Raises:
      UserError: as of `make_experiment`, but for `check` and `jaxpar.start`.
    """
    return _assemble(
        config,
        devices or experiment.devices,
        experiment.model.with_config(config.model),
        experiment.own_optimizer,
        experiment.corpus,
    )


def _assemble(
    config: Config,
    devices: list[jax.Device],
    model: AnyModel,
    optimizer: AnyOptimizer,
    corpus: Corpus | None,
) -> Experiment:
    """An experiment of these parts, which are held against each other."""
    if not model.has_blocks:
        check_own_model(config)
    elif model.config != config.model:
        raise UserError("the model has other sizes than the config: make it of config.model")
    model = with_projections(model, config)
    mesh = make_mesh(config.mesh, devices)
    experiment = Experiment(config, model, _plan_on(mesh, config, model), optimizer, corpus)
    require_runnable(experiment.optimizer, experiment.plan)
    require_pruned(experiment)
    check_parameters(experiment)
    check_batch(experiment)
    if config.data.pack and isinstance(model, Model):
        model.require_documents()
    if model.has_blocks:
        check_padding(config)
    check_names(experiment)
    if config.compiler.options:
        step_options(mesh, config.compiler.options)
    if asked := offload_asked(experiment.plan):
        check_offload(asked, mesh.devices.flat[0], config.memory.offload_anyway)
    return experiment


def with_projections(model: AnyModel, config: Config) -> AnyModel:
    """Return a model with the projections through which it learns a teacher's hidden states.

    Args:
      model: the model, with any projections or none.
      config: every setting.

    Returns:
      The model; a whole one of one's own as it is, which learns of no teacher.

    Raises:
      UserError: `distill.hidden` has a word that is no pair of layers.
    """
    distill = config.distill
    if not isinstance(model, Model):
        return model
    if not distill.teacher or not distill.hidden:
        return model.with_projections(None)
    return model.with_projections(Projections(read_pairs(distill.hidden), distill.hidden_width))


def make_plan(config: Config, devices: list[jax.Device] | None = None) -> Plan:
    """Make the plan of a config: that of `make_experiment`.

    Args:
      config: every setting.
      devices: the devices of the mesh; None = as in `make_experiment`.

    Returns:
      The plan.

    Raises:
      UserError: as of `make_experiment`.
    """
    return make_experiment(config, devices).plan


def _plan_on(mesh: Mesh, config: Config, model: AnyModel) -> Plan:
    """The plan of a config on a mesh, before it is held against the model and the batch."""
    memory = config.memory
    precision = config.precision
    rules, _ = model.fit_rules(config.rules, mesh.shape)
    plan = Plan(
        mesh,
        rules,
        compute=precision.compute,
        params=precision.params,
        gradients=precision.gradients,
        moments=precision.moments,
        overlap=config.overlap,
        context=config.context,
        attention=config.kernels.attention,
        pipeline=config.pipeline,
        remat=memory.policy,
        keep=memory.keep,
        loss_mib=memory.loss_mib,
        parameters=memory.parameters,
        optimizer=memory.optimizer,
    )
    if plan.size("stage") > 1:
        count = microbatches(config, mesh.shape)
        check_stages(plan, config.model.layers, count, config.model.kinds)
        plan = replace(plan, pipeline=replace(config.pipeline, microbatches=count))
    sequences = config.train.batch // config.train.accumulation // pipelined_microbatches(plan)
    rows = sequences // plan.size("batch")
    return replace(plan, overlap=config.overlap.for_rows(rows))


def check_parameters(experiment: Experiment) -> None:
    """Refuse parameters and optimizer states that the mesh does not divide, and layouts that no op
    converts between.

    Args:
      experiment: the experiment.

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


def require_pruned(experiment: Experiment) -> None:
    """Refuse a pruning of matrices, or of layers, that the model has not.

    Args:
      experiment: the experiment.

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
    """Refuse settings of what a whole model of one's own has not.

    Args:
      config: a config whose model is the whole model.

    Raises:
      UserError: one is set, or sequences are longer than the model takes.
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
    """Refuse rows that are filled up, where tokens would see what fills them.

    Args:
      config: a config whose model has layers of ours, or of their masks.

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


def check_batch(experiment: Experiment) -> None:
    """Refuse a batch or a sequence that the mesh does not divide.

    Args:
      experiment: the experiment.

    Raises:
      UserError: the data-parallel shards do not divide a microbatch, the sequence is not divided,
        or Domino does not cut it.
    """
    plan = experiment.plan
    train = experiment.config.train
    sizes = experiment.config.model
    seq_len = experiment.config.data.seq_len
    shards = plan.size("batch")
    microbatch = experiment.sequences
    if microbatch % shards:
        fitting = -(-microbatch // shards) * shards * train.accumulation
        raise UserError(
            f"train.batch={train.batch} / accumulation={train.accumulation} is a microbatch of "
            f"{microbatch} sequences, "
            f"which {shards} data-parallel shards do not divide: try train.batch={fitting}"
        )
    if not experiment.model.has_blocks:
        return
    if plan.overlap.cuts_sequence:
        _check_sequence_halves(experiment)
    activation = (microbatch, seq_len, sizes.embed)
    plan.sharding(("batch", "seq", None), activation, "activations")
    plan.sharding(("batch", "residual_seq", None), activation, "residual stream")
    check_split(
        plan, plan.context.strategy, seq_len, sizes.heads, sizes.kv_head_count, sizes.dropout
    )


def sequences_have_halves(experiment: Experiment) -> bool:
    """Whether blocks can run on the halves of each sequence."""
    try:
        _check_sequence_halves(experiment)
    except UserError:
        return False
    return True


def _check_sequence_halves(experiment: Experiment) -> None:
    """Refuse blocks and masks that do not run on the halves of each sequence, and lengths that are
    not cut so.
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


def plan_notes(experiment: Experiment) -> list[str]:
    """Return what a plan does differently from what its config asks for, a line for each in the
    log.

    Args:
      experiment: the experiment, whose overlap is settled.

    Returns:
      The lines; empty = nothing.
    """
    config = experiment.config
    plan = experiment.plan
    asked = offload_asked(plan)
    useless = asked and plan.mesh.devices.flat[0].platform == "cpu"
    if useless:
        offload = [
            f"{asked}: on CPU host memory is the device's own, nothing is saved by moving it"
        ]
    else:
        offload = []
    _, fitted = experiment.model.fit_rules(config.rules, plan.mesh.shape)
    options = option_notes(plan.mesh, config.compiler.options)
    notes = [
        *fitted,
        *overlap_notes(plan),
        *_halves_notes(experiment),
        *policy_notes(experiment),
        *pipeline_notes(config, plan),
        *offload,
        *kernel_notes(experiment),
        *mask_notes(experiment),
    ]
    if replicated := replicated_note(experiment.state.opt_state):
        notes.append(replicated)
    decayed = decay_note(config, experiment.model.trained(experiment.model.axes))
    if decayed and experiment.own_optimizer is None:
        notes.append(decayed)
    return notes + options


def _halves_notes(experiment: Experiment) -> list[str]:
    """Say that Domino cuts sequences where their number is odd."""
    plan = experiment.plan
    if experiment.config.overlap.domino == plan.overlap.domino:
        return []
    rows = experiment.sequences // plan.size("batch")
    return [
        f"overlap.domino=on: a device has {rows} sequence{'s' if rows > 1 else ''} of a "
        "microbatch, so a block runs on the two halves of each"
    ]


def kernel_notes(experiment: Experiment, training: bool = True) -> list[str]:
    """Say why attention in training, or in evaluation, uses no kernel although the devices have
    some.

    Args:
      experiment: the experiment.
      training: whether it is trained, and no evaluation.

    Returns:
      A line for each reason; empty = a kernel serves, or none was asked for.
    """
    plan = experiment.plan
    config = experiment.config
    model = config.model
    data = config.data
    train = config.train
    parts = plan.size("batch") * (
        train.accumulation * max(plan.pipeline.microbatches, 1) if training else 1
    )
    if plan.attention != "auto" or not experiment.model.has_blocks:
        return []
    found = (
        choose_attention(
            split,
            mask,
            seq_len,
            model.head_size,
            dropping=training and model.dropout > 0,
            packed=data.pack,
            batch=max(train.batch // parts, 1),
            heads=max(model.heads // plan.size("heads"), 1),
        )
        for split, seq_len in attention_calls(plan, data.seq_len, model.attention_softcap)
        for mask in layer_masks(model)
    )
    slow = dict.fromkeys(why for name, why in found if name == "chunked" and why)
    return [f"attention by plain XLA, in tiles, and no kernel ({why})" for why in slow]


def mask_notes(experiment: Experiment) -> list[str]:
    """Say where the loss asks for what a mask or a router shows.

    Args:
      experiment: the experiment.

    Returns:
      A line, or none.
    """
    if not experiment.model.has_blocks or experiment.config.data.objective == "masked":
        return []
    model = experiment.config.model
    notes = [
        f"model.masks={word} lets tokens see those after them, one of which is the answer that the "
        "loss asks for: it falls without the model learning to write text"
        for word in words_that_look_ahead(model)[:1]
    ]
    if model.experts and model.router == "expert_choice":
        notes.append(
            "model.router=expert_choice: whether an expert takes a token depends on those after "
            "it, so the loss of a causal model knows something of its answers, and the model "
            "cannot generate"
        )
    return notes


def offload_asked(plan: Plan) -> str:
    """Name the settings that ask for host memory; empty if none does.

    Args:
      plan: the plan.

    Returns:
      `memory.keep.block_input = offload, memory.optimizer = offload`, or an empty text.
    """
    asked = [f"memory.keep.{name} = offload" for name in plan.offloads]
    if plan.optimizer != "device":
        asked.append(f"memory.optimizer = {plan.optimizer}")
    if plan.parameters == "offload":
        asked.append("memory.parameters = offload")
    return ", ".join(asked)
