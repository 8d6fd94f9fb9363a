"""What a device computes in a step: matmuls, attention and passes over memory, of one block, of the
lookup and the loss, and of the update.

Shapes: M, K, N are a matmul's rows, inner dim and columns.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from jaxpar.parallel.cross_entropy.choose_tiling import Tiling, tiling_of
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.closed_form.rates import Rates
from jaxpar.plan.closed_form.sends import (
    expert_rows,
    kept_names,
    local_tokens,
    runs_stages_again,
    scored,
)
from jaxpar.plan.closed_form.shapes import StepShapes
from jaxpar.plan.closed_form.split import Split, Weight, split_of, weights_of

MADE_BY = {
    "q": "q",
    "k": "k",
    "v": "v",
    "attention_proj": "out",
    "mlp_input": "out",
    "gate": "gate",
    "up": "up",
    "shared_gate": "shared_gate",
    "shared_up": "shared_up",
    "mlp_out": "down",
    "expert_out": "down",
}
"""The weight that an activation is a product with."""


class Matmul(NamedTuple):
    """A matmul of one device; `groups` = the matrices that its rows are shared out among."""

    name: str
    rows: float
    inner: float
    columns: float
    groups: float = 1.0

    @property
    def flops(self) -> float:
        """Its FLOPs."""
        return 2.0 * self.rows * self.inner * self.columns

    def seconds(self, rates: Rates, width: int) -> float:
        """Return its seconds."""
        each = rates.matmul_seconds(self.rows / self.groups, self.inner, self.columns, width)
        return self.groups * each


class Passes(NamedTuple):
    """The seconds of the passes of one block in one microbatch, and their kernels."""

    forward: float
    again: float
    backward: float
    kernels: float


class Moved(NamedTuple):
    """The bytes of passes over memory beside matmuls and attention, of one block."""

    forward: float
    again: float
    backward: float


def block_matmuls(shapes: StepShapes, candidate: Candidate) -> tuple[Matmul, ...]:
    """List the matmuls of one block's forward in one microbatch; its backward has two of each."""
    split = split_of(shapes, candidate.sizes, candidate.zero)
    local = local_tokens(shapes, candidate, split)
    found: list[Matmul] = []
    for weight in weights_of(shapes, candidate.sizes, candidate.zero):
        parameter = weight.parameter
        if parameter.part != "blocks" or not parameter.matrix:
            continue
        inner, columns = _sides(weight, shapes, split)
        groups = 1.0
        rows = local.tokens
        if {"heads", "kv_heads"} & set(parameter.axes):
            rows = local.attention
        if "experts" in parameter.axes:
            groups = shapes.experts / split.size("experts")
            rows *= shapes.experts_per_token
        elif shapes.experts and parameter.name == "router":
            rows = local.stream
        found.append(Matmul(parameter.name, rows, inner, columns, groups))
    return tuple(found)


def _sides(weight: Weight, shapes: StepShapes, split: Split) -> tuple[float, float]:
    """Return the inner dim and the columns of a device's part of a weight."""
    axes = weight.parameter.axes
    sizes = dict(zip(axes, weight.parameter.shape, strict=True))
    hidden = 1.0
    for axis, size in sizes.items():
        if axis not in ("embed", "experts"):
            hidden *= size / split.size(axis)
    if "kv_heads" in sizes:  # where kv heads are copied, a device has those of its query heads
        copied = max(shapes.kv_heads / split.size("heads"), 1.0)
        hidden = copied * shapes.head_dim
    embed = float(sizes.get("embed", 1))
    if axes[-1] == "embed":
        return hidden, embed
    return embed, hidden


def attention_flops(shapes: StepShapes, candidate: Candidate) -> float:
    """Count the FLOPs of one block's scores and mixed values in one microbatch, forward."""
    split = split_of(shapes, candidate.sizes, candidate.zero)
    local = local_tokens(shapes, candidate, split)
    heads = shapes.heads / split.size("heads")
    return 4.0 * local.attention * shapes.keys * heads * shapes.head_dim


_KERNELS = 60.0
"""The kernels of a block beside its matmuls, forward and backward."""
_RING_KERNELS = (9.5, 13.0)
"""The kernels of each hop of a ring, forward and backward: of attention, the sums over hops, and
copies, as rehearsed with 2 and 8 devices.
"""


def block_passes(shapes: StepShapes, candidate: Candidate, rates: Rates) -> Passes:
    """Price the passes of one block in one microbatch."""
    parts = candidate.accumulation * candidate.microbatches
    whole = _ANY._replace(
        mesh=candidate.mesh, dcn=candidate.dcn, zero=candidate.zero, accumulation=parts
    )
    ops = _block_ops(shapes, whole, rates)
    forward = ops.attention_forward + ops.moved.forward
    backward = ops.attention_backward + ops.moved.backward
    hops = ring_entries(shapes, whole).hops
    kernels = _KERNELS + hops * sum(_RING_KERNELS)
    for _, seconds in ops.matmuls:
        forward += seconds
        backward += 2 * seconds
        kernels += 3
    if candidate.policy == "none" and not candidate.keep:
        return Passes(forward, 0.0, backward, kernels)
    kept = kept_names(candidate)
    made = {one.name for one in shapes.named}
    again = ops.moved.again - sum(seconds for name, seconds in ops.spared if name in kept)
    if "attention_out" not in kept:
        again += ops.attention_forward
        kernels += hops * _RING_KERNELS[0]
    for name, seconds in ops.matmuls:
        if _is_made_again(name, made, kept):
            again += seconds
            kernels += 1
    if runs_stages_again(shapes, candidate):
        again += forward
        kernels += _KERNELS
    return Passes(forward, again, backward, kernels)


_ANY = Candidate()


class _Ops(NamedTuple):
    """The seconds of what one block computes in one microbatch, whatever is kept."""

    matmuls: tuple[tuple[str, float], ...]
    attention_forward: float
    attention_backward: float
    moved: Moved
    spared: tuple[tuple[str, float], ...]
    """What is not made again of that where an activation is kept, by its name."""


@lru_cache(maxsize=65536)
def _block_ops(shapes: StepShapes, candidate: Candidate, rates: Rates) -> _Ops:
    flops = attention_flops(shapes, candidate)
    moved = elementwise_bytes(shapes, candidate)
    of_ring = ring_bytes(shapes, candidate)
    forward, backward = rates.ring if any(of_ring) else rates.attention
    return _Ops(
        matmuls=tuple(
            (one.name, one.seconds(rates, shapes.dtype_bytes))
            for one in block_matmuls(shapes, candidate)
        ),
        attention_forward=flops / forward + of_ring.forward / rates.memory,
        attention_backward=2.5 * flops / backward + of_ring.backward / rates.memory,
        moved=Moved(*(size / rates.memory for size in moved)),
        spared=tuple(
            (name, size / rates.memory) for name, size in spared_bytes(shapes, candidate).items()
        ),
    )


def _is_made_again(weight: str, made: set[str], kept: set[str]) -> bool:
    """Whether the backward needs a product with a weight that is not kept."""
    products = [name for name, of in MADE_BY.items() if of == weight and name in made]
    if weight == "down":
        return any(name not in kept for name in products)
    if not products:
        return True
    return any(name not in kept for name in products)


def elementwise_bytes(shapes: StepShapes, candidate: Candidate) -> Moved:
    """Count the bytes of norms, residual sums, rotations and activation functions, and of casting
    weights, of one block in one microbatch.

    A residual sum and the norm after it are one pass that reads two arrays and writes two; their
    gradient reads and writes three and one more. An activation function reads what the MLP's
    matmuls made and writes their product's input; its gradient reads these and a gradient, and
    writes one for each.
    """
    split = split_of(shapes, candidate.sizes, candidate.zero)
    local = local_tokens(shapes, candidate, split)
    stream = local.stream * shapes.embed * shapes.dtype_bytes
    sizes = {one.name: local_bytes(one.name, shapes, candidate) for one in shapes.named}
    hidden = sum(sizes.get(name, 0.0) for name in ("gate", "up", "shared_gate", "shared_up"))
    product = sizes.get("mlp_hidden", 0.0) + sizes.get("shared_mlp_hidden", 0.0)
    rotated = sum(sizes.get(name, 0.0) for name in ("q", "k"))
    rows = sizes.get("expert_input", 0.0)
    cast = 0.0
    for weight in weights_of(shapes, candidate.sizes, candidate.zero):
        if weight.parameter.part == "blocks" and weight.parameter.width > shapes.dtype_bytes:
            cast += weight.stored * (weight.parameter.width + shapes.dtype_bytes)
    forward = 8 * stream + 2 * rotated + hidden + product + 4 * rows
    backward = 12 * stream + 2 * rotated + 2 * hidden + 2 * product + 4 * rows
    return Moved(forward + cast, forward, backward + cast)


def spared_bytes(shapes: StepShapes, candidate: Candidate) -> dict[str, float]:
    """Count, of the passes over memory that make a block again, those that each activation spares
    where it is kept: the pass of a norm, of the rows that go to experts, and of the activation
    function.
    """
    sizes = named_bytes(shapes, candidate)
    made_of = {
        "attention_norm": ("attention_norm",),
        "mlp_norm": ("mlp_norm",),
        "expert_input": ("expert_input",),
        "mlp_hidden": ("gate", "up"),
        "shared_mlp_hidden": ("shared_gate", "shared_up"),
    }
    return {
        name: sizes[name] + sum(sizes.get(one, 0.0) for one in read)
        for name, read in made_of.items()
        if name in sizes
    }


class RingEntries(NamedTuple):
    """The hops of a ring, and a device's entries of queries and of keys in one block; 0 without."""

    hops: int
    queries: float
    keys: float


def ring_entries(shapes: StepShapes, candidate: Candidate) -> RingEntries:
    """Count what goes round a ring in one block of one microbatch."""
    split = split_of(shapes, candidate.sizes, candidate.zero)
    hops = split.devices(split.along("attention_seq"))
    if hops == 1 or shapes.strategy == "ulysses":
        return RingEntries(0, 0.0, 0.0)
    rows = local_tokens(shapes, candidate, split).attention * shapes.head_dim
    heads = shapes.heads / split.size("heads")
    kv_heads = max(shapes.kv_heads / split.size("kv_heads"), 1.0)
    return RingEntries(hops, rows * heads, rows * kv_heads)


_RING_BYTES = ((12.0, 13.0), (10.0, 50.0))
"""The bytes of passes in each hop of a ring over an entry of queries and one of keys: forward,
where the result is added to the sum of the hops before it, in float32, and backward, where the
gradients of keys and values are."""


def ring_bytes(shapes: StepShapes, candidate: Candidate) -> Moved:
    """Count the bytes of passes over memory beside the kernels of a ring, of one block in one
    microbatch; 0 where there is none.
    """
    ring = ring_entries(shapes, candidate)
    forward, backward = (
        ring.hops * (of_query * ring.queries + of_key * ring.keys)
        for of_query, of_key in _RING_BYTES
    )
    return Moved(forward, forward, backward)


def local_bytes(name: str, shapes: StepShapes, candidate: Candidate) -> float:
    """Count the bytes of a device's part of a named activation of one block in one microbatch."""
    return named_bytes(shapes, candidate)[name]


@lru_cache(maxsize=65536)
def _named_bytes(
    shapes: StepShapes, sizes: tuple[int, ...], zero: bool, parts: int
) -> dict[str, float]:
    split = split_of(shapes, sizes, zero)
    tokens = shapes.tokens / parts
    found: dict[str, float] = {}
    for one in shapes.named:
        size = one.token_bytes * tokens
        if one.of_experts:
            size *= expert_rows(shapes, split) / shapes.experts_per_token
        pieces = 1
        for axis in one.axes:
            if axis == "kv_heads":
                axis = _heads_axis(split, shapes)
                pieces *= min(split.size(axis), shapes.kv_heads)
            else:
                pieces *= split.size(axis)
        found[one.name] = size / pieces
    return found


def _heads_axis(split: Split, shapes: StepShapes) -> str:
    return "heads" if split.size("heads") > split.size("kv_heads") else "kv_heads"


def named_bytes(shapes: StepShapes, candidate: Candidate) -> dict[str, float]:
    """Count the bytes of a device's part of each named activation of one block in one
    microbatch.
    """
    parts = candidate.accumulation * max(candidate.microbatches, 1)
    return _named_bytes(shapes, candidate.sizes, candidate.zero, parts)


_SCORE_BYTES = 18.0
"""The bytes of passes over a score and its gradient beside the matmuls: as float32 it is read for
the largest, for the sum and for the gradient, and in two dtypes written again."""
_SLICED_SCORE_BYTES = 21.0
"""Those where slices of the vocabulary make scores twice."""


class LossWork(NamedTuple):
    """The loss of one microbatch on a device.

    Attributes:
      matmul: the matmul of its tokens with its rows of the vocabulary.
      times: how many matmuls of this size there are.
      added: the bytes of the sums to which one of these matmuls adds piece by piece: the gradient
        of the matrix over chunks of tokens, or of the tokens over slices of the vocabulary.
      moved: the bytes of passes over memory.
      tiling: the pieces in which it works.
      held: the bytes that it holds: scores, the gathered matrix and its gradient.
    """

    matmul: Matmul
    times: int
    added: float
    moved: float
    tiling: Tiling
    held: float

    def seconds(self, rates: Rates, width: int) -> float:
        """Return the seconds of its matmuls, of which one waits for its sums where these take
        longer.
        """
        each = self.matmul.seconds(rates, width)
        return (self.times - 1) * each + max(each, self.added / rates.memory)


def loss_work(shapes: StepShapes, candidate: Candidate) -> LossWork:
    """Count what the loss of one microbatch computes on a device: of a part of its tokens where
    stages share them.
    """
    split = split_of(shapes, candidate.sizes, candidate.zero)
    local = local_tokens(shapes, candidate, split)
    tokens = max(local.tokens / candidate.size("stage"), 1.0)
    rows = shapes.vocab / split.size("vocab")
    width = shapes.dtype_bytes
    moved = any(
        one.gathered_over or one.scattered_over
        for one in scored(weights_of(shapes, candidate.sizes, candidate.zero))
    )
    of_row = shapes.embed * (width + 4) if moved else 0
    tiling, _ = tiling_of(math.ceil(tokens), math.ceil(rows), of_row, candidate.loss_mib)
    times = 3 if tiling.slices == 1 else 4
    scores = tokens * rows
    matrix = rows * shapes.embed
    bytes_moved = scores * (_SCORE_BYTES if tiling.slices == 1 else _SLICED_SCORE_BYTES)
    added = 8.0 * (matrix * tiling.chunks + tokens * shapes.embed * (tiling.slices - 1))
    held = scores / tiling.chunks / tiling.slices * (4 + width) + rows / tiling.slices * of_row
    matmul = Matmul("loss", tokens, shapes.embed, rows)
    return LossWork(matmul, times, added, bytes_moved, tiling, held)


def update_bytes(shapes: StepShapes, candidate: Candidate, gradient_passes: float) -> float:
    """Count the bytes that the optimizer's step reads and writes: parameters and state both ways,
    and gradients so many times.
    """
    stages = candidate.size("stage")
    total = 0.0
    for weight in weights_of(shapes, candidate.sizes, candidate.zero):
        parameter = weight.parameter
        if not parameter.sums_width:
            continue
        entries = weight.state * _layers_here(parameter.layers, stages)
        state = dict(parameter.state_width)[candidate.moments]
        gradients = gradient_passes * parameter.sums_width
        total += entries * (2 * parameter.width + gradients + 2 * state)
    return total


def gradient_bytes_added(shapes: StepShapes, candidate: Candidate) -> float:
    """Count the bytes that a device reads and writes to add a microbatch's gradients to their
    sums.
    """
    stages = candidate.size("stage")
    if candidate.accumulation == 1 and stages == 1:
        return 0.0
    return sum(
        weight.state
        * _layers_here(weight.parameter.layers, stages)
        * (4 + 2 * weight.parameter.sums_width)
        for weight in weights_of(shapes, candidate.sizes, candidate.zero)
        if weight.parameter.sums_width
    )


def _layers_here(layers: int, stages: int) -> float:
    """Return how many of a stacked parameter's layers a device has; 1 of one that is not
    stacked.
    """
    return math.ceil(layers / stages) if layers else 1.0
