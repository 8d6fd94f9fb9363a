"""Notes on an experiment before it runs: where its plan differs from what its config asks for, and
what in the config is likely to be a mistake.
"""

from __future__ import annotations

from jaxpar.base.compiler import option_notes
from jaxpar.base.layout.plan import Plan
from jaxpar.models.masks import layer_masks, words_that_look_ahead
from jaxpar.parallel import choose_attention
from jaxpar.parallel.mesh_ops import attention_calls, overlap_notes
from jaxpar.parallel.pipeline import pipeline_notes
from jaxpar.train.activations import policy_notes
from jaxpar.train.experiment import Experiment
from jaxpar.train.optimizer.named_optimizers import decay_note
from jaxpar.train.optimizer.state_layout import replicated_note


def plan_notes(experiment: Experiment) -> list[str]:
    """Say what a plan does differently from what its config asks for, a line for each in the log.

    Args:
      experiment: the experiment, whose overlap is settled.

    Returns:
      The lines; empty = the plan does all that the config asks for.
    """
    config = experiment.config
    plan = experiment.plan
    asked = offload_asked(plan)
    _, fitted = experiment.model.fit_rules(config.rules, plan.mesh.shape)
    notes = [
        *fitted,
        *overlap_notes(plan),
        *_halves_notes(experiment),
        *policy_notes(experiment),
        *pipeline_notes(config, plan),
    ]
    if asked and plan.mesh.devices.flat[0].platform == "cpu":
        notes.append(
            f"{asked}: on CPU host memory is the device's own, nothing is saved by moving it"
        )
    notes += kernel_notes(experiment)
    notes += mask_notes(experiment)
    if replicated := replicated_note(experiment.state.opt_state):
        notes.append(replicated)
    decayed = decay_note(config, experiment.model.trained(experiment.model.axes))
    if decayed and experiment.own_optimizer is None:
        notes.append(decayed)
    return notes + option_notes(plan.mesh, config.compiler.options)


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
      training: whether the note is on training; otherwise on an evaluation.

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
    """Say, in a line or none, where a mask or a router shows a token what the loss asks it for."""
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

    Returns:
      `memory.keep.block_input = offload, memory.optimizer = offload`, or an empty text.
    """
    asked = [f"memory.keep.{name} = offload" for name in plan.offloads]
    if plan.optimizer != "device":
        asked.append(f"memory.optimizer = {plan.optimizer}")
    if plan.parameters == "offload":
        asked.append("memory.parameters = offload")
    return ", ".join(asked)
