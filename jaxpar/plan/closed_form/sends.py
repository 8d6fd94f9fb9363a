"""What one device sends in a step under a candidate, by shape alone.

`jaxpar.plan.communication` reads the same from a traced step, which takes seconds; the tests hold
the two beside each other. What XLA sends by itself for norms and biases is left out in both.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from jaxpar.base.layout.activation_names import Keep, actions
from jaxpar.base.layout.mesh import MeshAxis
from jaxpar.hlo.program.tasks import CollectiveKind
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.closed_form.shapes import StepShapes
from jaxpar.plan.closed_form.split import Split, Weight, in_mesh_order, split_of, weights_of
from jaxpar.plan.closed_form.ticks import layers_a_tick, ticks_of

What = Literal["weights", "stream", "gradients", "keys", "experts", "stages"]
Pass = Literal["forward", "backward", "once"]


class Send(NamedTuple):
    """A collective.

    Attributes:
      what: what is sent: gathered weights, the residual stream, gradients, keys and values of a
        split sequence, rows for experts, or what stages hand on.
      during: the pass in which it is sent; `once` is once a step.
      kind: the kind of collective.
      axes: its mesh axes, in the order of the mesh.
      bytes: the bytes of one group's whole array, or of one message of a ppermute.
      times: how often it is sent.
    """

    what: What
    during: Pass
    kind: CollectiveKind
    axes: tuple[MeshAxis, ...]
    bytes: float
    times: float = 1.0


class Local(NamedTuple):
    """The tokens of one device in one microbatch.

    Attributes:
      rows: the sequences.
      tokens: the tokens where heads or mlp are split.
      stream: the tokens of the residual stream.
      attention: the tokens of queries.
    """

    rows: float
    tokens: float
    stream: float
    attention: float


def local_tokens(shapes: StepShapes, candidate: Candidate, split: Split) -> Local:
    """Count the tokens that one device works on in a microbatch."""
    parts = candidate.accumulation * max(candidate.microbatches, 1)
    rows = shapes.batch / parts / split.size("batch")
    tokens = rows * shapes.seq_len
    return Local(
        rows,
        tokens / split.size("seq"),
        tokens / split.size("residual_seq"),
        tokens / split.size("attention_seq"),
    )


def block_sends(shapes: StepShapes, candidate: Candidate) -> tuple[Send, ...]:
    """List what a device sends of activations for one block in one microbatch: forward, again, and
    backward.
    """
    split = split_of(shapes, candidate.sizes, candidate.zero)
    local = local_tokens(shapes, candidate, split)
    found = [
        *_stream_sends(shapes, candidate, split, local),
        *_key_sends(shapes, candidate, split, local),
        *_expert_sends(shapes, candidate, split, local),
    ]
    if runs_stages_again(shapes, candidate):
        found += [one._replace(during="backward") for one in found if one.during == "forward"]
    return tuple(found)


def weight_sends(shapes: StepShapes, candidate: Candidate) -> tuple[Send, ...]:
    """List what a device sends of the weights of one block and their gradients in one
    microbatch.
    """
    split = split_of(shapes, candidate.sizes, candidate.zero)
    found: list[Send] = []
    for weight in weights_of(shapes, candidate.sizes, candidate.zero):
        if weight.parameter.part == "blocks" and weight.parameter.matrix:
            found += _weight_sends(weight, shapes, candidate, split)
    return tuple(found)


def _weight_sends(
    weight: Weight, shapes: StepShapes, candidate: Candidate, split: Split
) -> list[Send]:
    found: list[Send] = []
    if weight.gathered_over:
        axes = weight.gathered_over
        size = weight.used * shapes.dtype_bytes
        again = 2.0 if runs_stages_again(shapes, candidate) else 1.0
        found.append(Send("weights", "forward", "all-gather", axes, size))
        found.append(Send("weights", "backward", "all-gather", axes, size, again))
    if weight.parameter.sums_width and not _is_deferred(shapes, candidate):
        found += gradient_sends(weight, "backward", weight.summed_over)
    elif weight.parameter.sums_width:
        found += gradient_sends(weight, "backward", _not_deferred(weight, split))
    return found


def gradient_sends(weight: Weight, during: Pass, summed: tuple[MeshAxis, ...]) -> list[Send]:
    """List the sums of a weight's gradient, in float32."""
    found: list[Send] = []
    if weight.scattered_over:
        axes = weight.scattered_over
        found.append(Send("gradients", during, "reduce-scatter", axes, 4.0 * weight.used))
    if summed:
        axes = summed
        found.append(Send("gradients", during, "all-reduce", axes, 4.0 * weight.state))
    return found


def runs_stages_again(shapes: StepShapes, candidate: Candidate) -> bool:
    """Whether a pipeline runs the forward of a whole stage once more, before the backward of its
    last block.
    """
    recomputes = candidate.policy != "none" or bool(candidate.keep)
    return shapes.stash_of_stage and candidate.size("stage") > 1 and recomputes


def _is_deferred(shapes: StepShapes, candidate: Candidate) -> bool:
    """Whether gradients are summed over data after the last microbatch
    (`jaxpar.train.step.accumulate.deferred_sum_axes`).
    """
    one_program = candidate.size("stage") == 1 and candidate.accumulation > 1
    return one_program and not candidate.zero and not shapes.experts


def _deferred_axes(split: Split) -> tuple[MeshAxis, ...]:
    """Find the outermost mesh axes that split the batch and nothing else."""
    others = {mesh for axis, named in split.axes.items() if axis != "batch" for mesh in named}
    found: list[MeshAxis] = []
    for axis in split.along("batch"):
        if axis in others:
            break
        found.append(axis)
    return tuple(found)


def _not_deferred(weight: Weight, split: Split) -> tuple[MeshAxis, ...]:
    later = _deferred_axes(split)
    return tuple(axis for axis in weight.summed_over if axis not in later)


def kept_names(candidate: Candidate) -> set[str]:
    """Return the names of activations that are not computed again."""
    keep = Keep(**dict(candidate.keep))  # pyright: ignore[reportArgumentType]
    found = actions(candidate.policy, keep)
    return {name for name, action in found.items() if action != "recompute"}


def _stream_sends(
    shapes: StepShapes, candidate: Candidate, split: Split, local: Local
) -> list[Send]:
    """List the moves of the residual stream, which linears gather and scatter where it is split
    further than they are.
    """
    axes = stream_axes(split)
    if not axes:
        return []
    size = local.tokens * shapes.embed * shapes.dtype_bytes
    kept = kept_names(candidate)
    made = {one.name for one in shapes.named}
    found: list[Send] = []
    if not set(axes) & set(split.along("attention_seq")):
        again = bool(made & {"mlp_input", "attention_proj"} - kept)
        found += _sublayer_sends(axes, size, 1.0 + again)
    again = bool(made & {"mlp_out", "expert_out"} - kept)
    if shapes.experts:
        found += _sublayer_sends(axes, size * expert_rows(shapes, split), 1.0 + again)
    elif not (found and shapes.parallel_sublayers):
        found += _sublayer_sends(axes, size, 1.0 + again)
    return found


def _sublayer_sends(axes: tuple[MeshAxis, ...], size: float, scattered: float) -> list[Send]:
    """List the moves of the stream for the linears of attention, or for those of the MLP.

    Args:
      scattered: how often their output or its gradient is scattered in the backward.
    """
    return [
        Send("stream", "forward", "all-gather", axes, size),
        Send("stream", "forward", "reduce-scatter", axes, size),
        Send("stream", "backward", "all-gather", axes, size, 2.0),
        Send("stream", "backward", "reduce-scatter", axes, size, scattered),
    ]


def stream_axes(split: Split) -> tuple[MeshAxis, ...]:
    """Return the mesh axes over which linears gather and scatter the residual stream."""
    return tuple(one for one in split.along("residual_seq") if one not in split.along("seq"))


def _key_sends(shapes: StepShapes, candidate: Candidate, split: Split, local: Local) -> list[Send]:
    """List what attention sends of keys and values where the sequence is split."""
    axes = split.along("attention_seq")
    parts = split.devices(axes)
    if parts == 1:
        return []
    again = 0 if "attention_out" in kept_names(candidate) else 1
    heads = shapes.heads / split.size("heads")
    kv_heads = max(shapes.kv_heads / split.size("kv_heads"), 1.0)
    if shapes.strategy == "ulysses":
        one = local.attention * shapes.head_dim * shapes.dtype_bytes
        there = one * (2 * heads + 2 * kv_heads)
        back = one * (3 * heads + 4 * kv_heads) + 4 * local.attention * heads
        return [
            Send("keys", "forward", "all-to-all", axes, there),
            Send("keys", "backward", "all-to-all", axes, there * again + back),
        ]
    keys = 2 * local.attention * kv_heads * shapes.head_dim
    sums = 4.0 * keys
    size = keys * shapes.dtype_bytes
    hops = parts - 1
    return [
        Send("keys", "forward", "ppermute", axes, size, hops),
        Send("keys", "backward", "ppermute", axes, size, hops * (1 + again)),
        Send("keys", "backward", "ppermute", axes, sums, hops),
    ]


def _expert_sends(
    shapes: StepShapes, candidate: Candidate, split: Split, local: Local
) -> list[Send]:
    """List the exchanges of rows with the devices that have the experts."""
    axes = split.along("experts")
    parts = split.devices(axes)
    if parts == 1 or not shapes.experts:
        return []
    size = expert_rows(shapes, split) * local.stream * shapes.embed * shapes.dtype_bytes
    kept = kept_names(candidate)
    again = sum(name not in kept for name in ("expert_input", "expert_out"))
    return [
        Send("experts", "forward", "all-to-all", axes, size, 2.0),
        Send("experts", "backward", "all-to-all", axes, size, 2.0 + again),
    ]


def expert_rows(shapes: StepShapes, split: Split) -> float:
    """Count the rows of the experts' buffers for each token of a device
    (`jaxpar.parallel.experts`).
    """
    parts = split.size("experts")
    return parts * min(shapes.experts_per_token, shapes.experts / parts)


def lookup_sends(shapes: StepShapes, candidate: Candidate) -> tuple[Send, ...]:
    """List what a device sends to look up the tokens of one microbatch."""
    split = split_of(shapes, candidate.sizes, candidate.zero)
    local = local_tokens(shapes, candidate, split)
    found: list[Send] = []
    for weight in looked_up(weights_of(shapes, candidate.sizes, candidate.zero)):
        if weight.parameter.matrix:
            found += _table_weight_sends(weight, shapes, candidate, split)
    axes = stream_axes(split)
    if axes:
        size = local.tokens * shapes.embed * shapes.dtype_bytes
        found.append(Send("stream", "forward", "reduce-scatter", axes, size))
        found.append(Send("stream", "backward", "all-gather", axes, size))
    return tuple(found)


def loss_sends(shapes: StepShapes, candidate: Candidate) -> tuple[Send, ...]:
    """List what a device sends for the loss of one microbatch, which makes its gradient on the way.
    In a pipeline each stage has the loss of a part of the tokens.
    """
    split = split_of(shapes, candidate.sizes, candidate.zero)
    local = local_tokens(shapes, candidate, split)
    stages = candidate.size("stage")
    found: list[Send] = []
    for weight in scored(weights_of(shapes, candidate.sizes, candidate.zero)):
        sends = _table_weight_sends(weight, shapes, candidate, split)
        tied = weight.parameter.part == "embed" and stages == 1  # the lookup has gathered it
        found += [one for one in sends if not (tied and one.what == "weights")]
    axes = stream_axes(split)
    if axes:
        size = local.tokens * shapes.embed * shapes.dtype_bytes / stages
        found.append(Send("stream", "forward", "all-gather", axes, size))
        found.append(Send("stream", "backward", "reduce-scatter", axes, size))
    vocab = split.along("vocab")
    if vocab:
        scores = 4.0 * local.tokens / stages
        found.append(Send("stream", "forward", "all-reduce", vocab, scores, 3.0))
    if summed := loss_axes(shapes, candidate, split):
        found.append(Send("stream", "forward", "all-reduce", summed, 4.0, 2.0))
    return tuple(found)


def loss_axes(shapes: StepShapes, candidate: Candidate, split: Split) -> tuple[MeshAxis, ...]:
    """Return the mesh axes over which the sums of a microbatch's loss and tokens are added up."""
    axes = split.of_tokens()
    if _is_deferred(shapes, candidate):
        later = _deferred_axes(split)
        axes = tuple(axis for axis in axes if axis not in later)
    return in_mesh_order(axes)


def _table_weight_sends(
    weight: Weight, shapes: StepShapes, candidate: Candidate, split: Split
) -> list[Send]:
    found: list[Send] = []
    if weight.gathered_over:
        axes = weight.gathered_over
        found.append(
            Send("weights", "forward", "all-gather", axes, weight.used * shapes.dtype_bytes)
        )
    if not weight.parameter.sums_width:
        return found
    if _is_deferred(shapes, candidate):
        summed = _not_deferred(weight, split)
    else:
        summed = weight.summed_over
    return found + gradient_sends(weight, "backward", summed)


def looked_up(weights: tuple[Weight, ...]) -> list[Weight]:
    """Return the tables that tokens are looked up in."""
    return [one for one in weights if one.parameter.part == "embed"]


def scored(weights: tuple[Weight, ...]) -> list[Weight]:
    """Return the table that the loss multiplies with: the head's, or the lookup's where they are
    tied.
    """
    tables = [one for one in weights if "vocab" in one.parameter.axes and one.parameter.matrix]
    own = [one for one in tables if one.parameter.part == "head"]
    return (own or tables)[:1]


def step_sends(shapes: StepShapes, candidate: Candidate) -> tuple[Send, ...]:
    """List what a device sends once a step: gradients that are summed after the last microbatch,
    those of tables that all stages have, and parameters that ZeRO-1 gathers.
    """
    split = split_of(shapes, candidate.sizes, candidate.zero)
    weights = weights_of(shapes, candidate.sizes, candidate.zero)
    stages = candidate.size("stage")
    found: list[Send] = []
    for weight in weights:
        parameter = weight.parameter
        layers = max(parameter.layers, 1) / (stages if parameter.layers else 1)
        if not parameter.sums_width:
            continue
        if _is_deferred(shapes, candidate):
            later = _deferred_axes(split)
            if later:
                size = weight.state * parameter.sums_width * layers
                found.append(Send("gradients", "once", "all-reduce", later, size))
        if stages > 1 and not parameter.layers:
            found.append(
                Send("gradients", "once", "all-reduce", split.along("stage"), 4.0 * weight.state)
            )
        if weight.state < weight.stored:
            axes = tuple(
                one for one in split.along("state_embed") if one not in split.along("embed")
            )
            size = weight.stored * parameter.width * layers
            found.append(Send("weights", "once", "all-gather", axes, size))
    return tuple(found)


def stage_sends(shapes: StepShapes, candidate: Candidate) -> tuple[Send, ...]:
    """List what a device sends to other stages: in each tick, and for each microbatch's loss."""
    split = split_of(shapes, candidate.sizes, candidate.zero)
    axes = split.along("stage")
    if not axes:
        return ()
    local = local_tokens(shapes, candidate, split)
    size = local.stream * shapes.embed * shapes.dtype_bytes
    return (
        Send("stages", "forward", "ppermute", axes, size),
        Send("stages", "backward", "ppermute", axes, size),
        Send("stages", "once", "reduce-scatter", axes, size),
        Send("stages", "once", "all-gather", axes, size),
    )


def sends_of_step(shapes: StepShapes, candidate: Candidate) -> list[Send]:
    """List all that a device sends in a step, with how often. In a pipeline all stages run all
    ticks, so that what is sent for a layer is sent in the bubble as well.
    """
    ticks = ticks_of(candidate)
    runs = candidate.accumulation * layers_a_tick(shapes, candidate)
    by_pass = {"forward": ticks.forward, "backward": ticks.backward}
    found: list[Send] = []
    of_block = (*weight_sends(shapes, candidate), *block_sends(shapes, candidate))
    for one in of_block:
        found.append(_times(one, runs * by_pass[one.during]))
    for one in lookup_sends(shapes, candidate):
        found.append(_times(one, candidate.accumulation * by_pass[one.during]))
    for one in loss_sends(shapes, candidate):
        found.append(_times(one, candidate.accumulation * candidate.microbatches))
    for one in stage_sends(shapes, candidate):
        count = by_pass.get(one.during, candidate.microbatches)
        found.append(_times(one, candidate.accumulation * count))
    return [*found, *step_sends(shapes, candidate)]


def _times(one: Send, times: float) -> Send:
    return one._replace(times=one.times * times)
