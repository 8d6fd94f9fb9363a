"""This module prices each way to treat an activation, and finds the fastest assignment within some
bytes.

The choices are few and their costs are independent: every named activation is needed by some
backward, so making one again costs what its forward did, whatever becomes of the others. All
combinations are kept that no other beats in device bytes, host bytes and seconds together; the
fastest of them that fits is then exact under the cost model.

The model counts FLOPs at `EFFICIENCY` of the chip's peak, bytes of elementwise ops at its memory's
rate, what is sent again at its links' rate (`jaxpar.plan.communication`), and the host link, whose
transfers hide behind the forward on the way out and behind the backward on the way in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax

from jaxpar.base.config import MemoryConfig
from jaxpar.base.hardware import Hardware, PeakFlops
from jaxpar.base.layout.activation_names import NAMES, Action, Keep
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import output_axis
from jaxpar.models.masks import mean_keys
from jaxpar.parallel.pipeline.layers import layers_in
from jaxpar.plan.closed_form.work import MADE_BY
from jaxpar.plan.communication import recompute_bytes, step_collectives
from jaxpar.plan.memory_account import loss_cut
from jaxpar.train.activations import Activation, activations
from jaxpar.train.experiment import Experiment

_UNKNOWN = Hardware(peak_flops=PeakFlops(1e12, 1e12), hbm_bandwidth=1e11, host_link_bandwidth=1e10)
"""The figures of a device that has none, such as a CPU. They are no particular device's; a matmul
outweighs a copy.
"""
EFFICIENCY = 0.6
"""The share of the peak FLOP/s that matmuls reach."""
EXPOSED = 0.3
"""The share of the transfers of activations to host memory and back that compute waits for, until a
compiled program says: a loop over layers sends what a layer made before the next one starts."""
_PASSES = 3  # of an elementwise op over its array: it reads two and writes one


class Option(NamedTuple):
    """A way to treat an activation: on one device in one step, the bytes that are on the device at
    a time, the bytes that go to host memory and come back, and the seconds of making it again."""

    action: Action
    device: int
    host: int
    seconds: float


class Item(NamedTuple):
    """Activations that are decided together, with their choices."""

    names: tuple[str, ...]
    options: tuple[Option, ...]

    def without_offload(self) -> Item:
        """Return these activations without the choice of host memory."""
        kept = [option for option in self.options if option.action != "offload"]
        return Item(self.names, tuple(kept))


class ActionCosts(NamedTuple):
    """The costs that a solution's time consists of: the seconds of one device in one step."""

    forward: float
    backward: float
    link: float
    """The rate to host memory in bytes/s."""
    exposed: float = 0.0
    """The share of the activations' transfers that compute waits for at the least."""

    def seconds(self, host: int, again: float, moved: float = 0.0) -> float:
        """Compute the seconds of a step.

        Args:
          host: the bytes of activations that go to host memory and back.
          again: the seconds of making other activations again.
          moved: the seconds of other transfers, which nothing hides.
        """
        each = host / self.link if host else 0.0
        too_long = max(each - self.forward, 0.0) + max(each - self.backward - again, 0.0)
        return self.forward + self.backward + again + max(too_long, self.exposed * 2 * each) + moved


class Solution(NamedTuple):
    """An assignment of all items: its bytes on the device and to the host, and its seconds of
    making things again.
    """

    device: int
    host: int
    again: float
    actions: tuple[Action, ...]

    def with_option(self, option: Option) -> Solution:
        """Return this assignment with an option for the next item."""
        return Solution(
            self.device + option.device,
            self.host + option.host,
            self.again + option.seconds,
            (*self.actions, option.action),
        )

    def sends_and_makes_no_more_than(self, other: Solution) -> bool:
        """Return whether this assignment is as good as another of the same items, or better, in
        host bytes and in seconds.
        """
        return self.host <= other.host and self.again <= other.again


def frontier(items: Sequence[Item]) -> list[Solution]:
    """List every assignment that no other beats in device bytes, host bytes and seconds together,
    in order of device bytes.

    Args:
      items: the activations with their choices; an assignment has an action for each, in order.
    """
    unbeaten = [Solution(0, 0, 0.0, ())]
    for item in items:
        grown = [one.with_option(option) for one in unbeaten for option in item.options]
        unbeaten = _unbeaten(grown)
    return unbeaten


def _unbeaten(solutions: list[Solution]) -> list[Solution]:
    """Keep the solutions that no other beats, in order of device bytes."""
    unbeaten = []
    # In this order only earlier ones can beat the next, and of those it is enough to look at the
    # ones that lead in host bytes and seconds.
    leaders = list[Solution]()
    for one in sorted(solutions):
        if any(leader.sends_and_makes_no_more_than(one) for leader in leaders):
            continue
        leaders = [leader for leader in leaders if not one.sends_and_makes_no_more_than(leader)]
        leaders.append(one)
        unbeaten.append(one)
    return unbeaten


def solve(items: Sequence[Item], costs: ActionCosts, room: int) -> Solution | None:
    """Find the fastest assignment that takes at most `room` bytes of the device, or None; of
    several as fast, the one that sends the fewest bytes to the host.

    Args:
      items: the activations with their choices.
      costs: what the seconds of an assignment consist of.
    """
    fits = [one for one in frontier(items) if one.device <= room]
    return min(
        fits,
        key=lambda one: (
            costs.seconds(one.host, one.again),
            one.host,
            one.device,
        ),
        default=None,
    )


def items_of(experiment: Experiment, hardware: Hardware, offload: bool) -> list[Item]:
    """List the named activations of a model under a plan, with the cost of each choice; none for a
    whole model of one's own.

    Args:
      offload: whether host memory may be used.
    """
    config = experiment.config
    plan = experiment.plan
    listed = {one.name: one for one in activations(experiment)}
    if not listed:
        return []
    layers = layers_in(plan, config.model.layers)
    if layers is None:
        blocks = config.model.layers
    else:
        blocks = layers.places * plan.pipeline.virtual
    blocks += config.model.query_layer
    # how often a device runs a block in a step
    times = blocks * config.train.accumulation * experiment.pipeline_microbatches
    rate = _link_rate(hardware)
    sent = recompute_bytes(experiment)
    seconds = {}
    for name, one in listed.items():
        sending = sent[name] / rate if rate else 0.0
        seconds[name] = times * (_seconds_to_make(one, experiment, hardware) + sending)
    found = []
    for name, one in listed.items():
        if name == "attention_lse":  # which is decided with attention_out
            continue
        if name == "attention_out" and "attention_lse" in listed:
            names = (name, "attention_lse")
        else:
            names = (name,)
        size = sum(listed[each].bytes for each in names)
        options = [Option("save", size * one.blocks, 0, 0.0)]
        if offload:
            options.append(Option("offload", 0, size * times, 0.0))
        if name != "block_input":
            options.append(
                Option(
                    "recompute",
                    0,
                    0,
                    max(seconds[each] for each in names),
                )
            )
        found.append(Item(names, tuple(options)))
    return found


def _seconds_to_make(one: Activation, experiment: Experiment, hardware: Hardware) -> float:
    """Compute the seconds to make an activation of one block: its matmul or its pass over memory,
    whichever is longer.
    """
    if one.name == "attention_out":
        flops = _attention_flops(experiment)
    else:
        flops = _matmul_flops(one, experiment)
    passed = _PASSES * one.bytes / (hardware.hbm_bandwidth or _UNKNOWN.hbm_bandwidth)
    return max(flops / _flops_rate(hardware, experiment.plan), passed)


def _matmul_flops(one: Activation, experiment: Experiment) -> float:
    """Count the FLOPs of the matmul that makes an activation, on one device; 0 where none does.

    Where a block of one's own has no weight of the name that is known here, the matmul is taken to
    be one from the residual stream.
    """
    model = experiment.model
    plan = experiment.plan
    name = MADE_BY.get(one.name, "")
    if not name:
        return 0.0
    weight = model.shapes()["blocks"].get(name)
    if isinstance(weight, jax.ShapeDtypeStruct):
        shape = weight.shape[1:]
        axes = model.axes["blocks"][name][1:]
    else:
        shape = (model.config.embed, *one.shape[2:])
        axes = ("embed", *NAMES[one.name].axes[2:], *[None] * len(shape))[: len(shape)]
    # The rows of experts are those of their buffers, most of which have more rows than there are
    # tokens.
    rows = math.prod(one.shape[:3] if "experts" in axes else one.shape[:2])
    if one.name == "expert_out":
        seq = "residual_seq"
    else:
        seq = "seq"
    dims = [(size, axis) for size, axis in zip(shape, axes, strict=True) if axis != "experts"]
    pieces = math.prod(plan.size(output_axis(axis, plan)) for _, axis in dims if axis != "embed")
    return (
        2.0
        * rows
        * math.prod(size for size, _ in dims)
        / (plan.size("batch") * plan.size(seq) * pieces)
    )


def _attention_flops(experiment: Experiment) -> float:
    """Count the FLOPs of one block's scores and weighted values, on one device."""
    plan = experiment.plan
    model = experiment.config.model
    S = experiment.config.data.seq_len
    rows = experiment.sequences
    pieces = plan.size("batch") * plan.size("attention_seq") * plan.size("heads")
    width = model.heads * model.head_size
    keys = sum(mean_keys(word, S) for word in model.masks) / model.kinds
    return 4.0 * rows * S * keys * width / pieces


def costs_of(experiment: Experiment, hardware: Hardware) -> ActionCosts:
    """Compute the costs of a step that makes nothing again: 2 of 6 parts of its model FLOPs are
    forward, with LoRA 2 of 4.

    Args:
      hardware: the figures of its devices; what they lack is guessed.
    """
    config = experiment.config
    plan = experiment.plan
    tokens = experiment.tokens / plan.mesh.size
    flops = experiment.model.flops_per_token(config.data.seq_len) * tokens
    backward = 1 if config.model.lora.rank else 2
    forward = flops / _flops_rate(hardware, plan) / (1 + backward)
    link = hardware.host_link_bandwidth or _UNKNOWN.host_link_bandwidth
    return ActionCosts(forward, backward * forward, link, EXPOSED)


def other_seconds(experiment: Experiment, hardware: Hardware) -> float:
    """Compute the seconds that accumulation and the form of the loss add to a step: what is sent,
    as if nothing hid it, and the loss's chunks, or its scores made twice
    (`jaxpar.parallel.cross_entropy.tiling`).
    """
    config = experiment.config
    plan = experiment.plan
    if not experiment.model.has_blocks:
        return 0.0
    cut = loss_cut(experiment)
    times = config.train.accumulation * experiment.pipeline_microbatches
    if cut.tiling.slices > 1:
        again = 2.0 * cut.tokens / _flops_rate(hardware, plan)
    else:
        again = 0.0
    added = 12.0 * cut.tiling.chunks / (hardware.hbm_bandwidth or _UNKNOWN.hbm_bandwidth)
    loss = times * cut.rows * cut.embed * (again or added)
    rate = _link_rate(hardware)
    if not rate:
        return loss
    # Neither where arrays lie nor unrolling recomputed blocks changes what is sent, so one trace
    # serves them all.
    config = replace(
        config,
        memory=MemoryConfig(),
        model=replace(config.model, scan_layers=True),
    )
    plan = replace(plan, remat="full", keep=Keep(), optimizer="device", parameters="device")
    model = experiment.model.with_config(config.model)
    alike = replace(experiment, config=config, model=model, plan=plan)
    return loss + sum(one.step_bytes for one in step_collectives(alike)) / rate


def _link_rate(hardware: Hardware) -> float:
    """Return the rate of a device's links in bytes/s; 0 = not known."""
    return hardware.ici.axis_bandwidth or hardware.dcn_bandwidth


def _flops_rate(hardware: Hardware, plan: Plan) -> float:
    """Return the rate of a device's matmuls in FLOP/s."""
    known = getattr(hardware.peak_flops, plan.compute) or hardware.peak_flops.bfloat16
    return EFFICIENCY * (known or _UNKNOWN.peak_flops.float32)
