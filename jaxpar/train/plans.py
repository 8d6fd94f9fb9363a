"""Makes the plan of a config (its mesh, rules and choices) and checks it against the model and the
batch.
"""

from __future__ import annotations

from dataclasses import replace

import jax

from jaxpar.base.compiler import option_notes, step_options
from jaxpar.base.config import Config
from jaxpar.base.errors import UserError
from jaxpar.base.mesh import make_mesh
from jaxpar.base.plan import Plan
from jaxpar.base.sharding import fit_rules
from jaxpar.models import Model
from jaxpar.models.masks import layer_masks
from jaxpar.parallel import choose_attention
from jaxpar.parallel.collectives import further_split
from jaxpar.parallel.context import check_split
from jaxpar.parallel.host_memory import check_offload
from jaxpar.parallel.linear import ATTENDED, GATHERED, STORED
from jaxpar.parallel.ops import overlap_notes, split_of
from jaxpar.parallel.pipeline import check_stages, microbatches, pipeline_notes
from jaxpar.train.memory import check_names, microbatches_of
from jaxpar.train.step import gradient_axes, param_shapes


def make_plan(config: Config, devices: list[jax.Device] | None = None) -> Plan:
    """Make the plan of a config on these devices (None = all), and check it against the model and
    the batch.

    The rules are the config's, except where there are more devices than heads (see `fit_rules`).
    `plan_notes` says what was changed.

    Raises:
      UserError: the mesh does not fit the devices, mesh axes do not divide a dim or the batch, the
        optimizer state is split neither as its parameters nor further, XLA does not know an option,
        or `context.check_split` refuses the plan.
    """
    mesh = make_mesh(config.mesh, devices)
    rules, _ = fit_rules(
        config.rules,
        config.model.heads,
        config.model.kv_head_count,
        mesh.shape,
    )
    memory = config.memory
    precision = config.precision
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
    check_parameters(config, plan)
    check_batch(config, plan)
    check_names(config, plan)
    if config.compiler.options:
        step_options(mesh, config.compiler.options)
    if asked := offload_asked(plan):
        check_offload(asked, mesh.devices.flat[0], memory.offload_anyway)
    return plan


def check_parameters(config: Config, plan: Plan) -> None:
    """Refuse parameters and optimizer states that the mesh does not divide, and layouts that no op
    converts between.
    """
    model = Model(config.model)
    shapes = param_shapes(model, plan)
    plan.sharding(model.axes, shapes)
    plan.sharding(gradient_axes(model), model.trained(shapes))
    further_split(("state_embed",), ("embed",), plan)
    for stored, used in ((STORED, GATHERED), (STORED, ATTENDED), (ATTENDED, GATHERED)):
        further_split(stored, used, plan)
    plan.sharding((*ATTENDED[:2], "heads", "head_dim"), name="attention")


def check_batch(config: Config, plan: Plan) -> None:
    """Refuse a batch or a sequence that the mesh does not divide."""
    train = config.train
    sizes = config.model
    seq_len = config.data.seq_len
    shards = plan.size("batch")
    microbatch = train.batch // train.accumulation // microbatches_of(plan)
    if microbatch % shards:
        fitting = -(-microbatch // shards) * shards * train.accumulation
        raise UserError(
            f"train.batch={train.batch} / accumulation={train.accumulation} is a microbatch of "
            f"{microbatch} sequences, "
            f"which {shards} data-parallel shards do not divide: try train.batch={fitting}"
        )
    if plan.overlap.domino == "on" and microbatch // shards % 2:
        raise UserError(
            f"overlap.domino cuts a device's microbatch of {microbatch // shards} sequences in "
            "two halves: "
            f"try train.batch={2 * train.batch}, or leave domino out"
        )
    activation = (microbatch, seq_len, sizes.embed)
    plan.sharding(("batch", "seq", None), activation, "activations")
    plan.sharding(("batch", "residual_seq", None), activation, "residual stream")
    check_split(
        plan, plan.context.strategy, seq_len, sizes.heads, sizes.kv_head_count, sizes.dropout
    )


def plan_notes(config: Config, plan: Plan) -> list[str]:
    """Return what a plan does differently from what its config asks for, a line for each in the
    log.
    """
    asked = offload_asked(plan)
    useless = asked and plan.mesh.devices.flat[0].platform == "cpu"
    if useless:
        offload = [
            f"{asked}: on CPU host memory is the device's own, nothing is saved by moving it"
        ]
    else:
        offload = []
    fitted = fit_rules(
        config.rules, config.model.heads, config.model.kv_head_count, plan.mesh.shape
    )[1]
    options = option_notes(plan.mesh, config.compiler.options)
    notes = [
        *fitted,
        *overlap_notes(plan),
        *pipeline_notes(config, plan),
        *offload,
        *kernel_notes(config, plan),
    ]
    return notes + options


def kernel_notes(config: Config, plan: Plan, training: bool = True) -> list[str]:
    """Say why attention in training, or in evaluation, uses no kernel although the devices have
    some.
    """
    model = config.model
    data = config.data
    train = config.train
    parts = plan.size("batch") * (
        train.accumulation * max(plan.pipeline.microbatches, 1) if training else 1
    )
    if plan.attention != "auto":
        return []
    found = (
        choose_attention(
            split_of(plan, model.attention_softcap),
            mask,
            data.seq_len,
            model.head_size,
            dropping=training and model.dropout > 0,
            packed=data.pack,
            batch=max(train.batch // parts, 1),
        )
        for mask in layer_masks(model)
    )
    slow = dict.fromkeys(why for name, why in found if name == "chunked" and why)
    return [f"attention by plain XLA, in tiles, and no kernel ({why})" for why in slow]


def offload_asked(plan: Plan) -> str:
    """Name the settings that ask for host memory; empty if none does."""
    names = [f"keep.{name}" for name in plan.offloads]
    names += [name for name in ("optimizer", "parameters") if getattr(plan, name) == "offload"]
    return ", ".join(f"memory.{name} = offload" for name in names)
