"""What the closed form is made of: moves of arrays between layouts, in bytes, and the rows that they become.

The functions that give moves follow `jaxpar.parallel.collectives` and `jaxpar.parallel.ring_matmul` step by step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from jaxpar.base.mesh import MeshAxis
from jaxpar.base.plan import Form, Plan
from jaxpar.base.sharding import LogicalAxis, state_axes
from jaxpar.hlo.tasks import CollectiveKind, sent_bytes
from jaxpar.parallel.collectives import further_split, split_over
from jaxpar.parallel.linear import GATHERED, STORED, used_axes

Phase = Literal["forward", "recomputed", "backward", "update"]
Gradients = Literal["input", "weight", "both"]
"""Of a part of the model: its input's, its weights'."""

FLOAT32 = 4  # bytes


class Site(NamedTuple):
    """One move of arrays between devices, as often as a step makes it.

    Attributes:
      scope: of the model, as `jax.named_scope` has it: `block/attention`.
      what: what moves: `q, k, v weights`.
      phase: of the step.
      kind: of collective.
      axes: mesh axes of more than one device.
      devices: along them.
      bytes: of one group's whole array, as `hlo.tasks.Collective.bytes`; of a ppermute, one message.
      times: how often in a step.
      asked: written by an op of this library, rather than left to XLA, whose bytes are then an estimate.
      each: how many of them make one such move: the hops of a ring, the chunks of the loss.
    """

    scope: str
    what: str
    phase: Phase
    kind: CollectiveKind
    axes: frozenset[MeshAxis]
    devices: int
    bytes: int
    times: int
    asked: bool = True
    each: int = 1

    @property
    def sent(self) -> float:
        """Bytes one device sends in a step, by a bandwidth-optimal algorithm."""
        return self.times * sent_bytes(self.kind, self.bytes, self.devices)

    @property
    def sent_once(self) -> float:
        """The same for one such move: of one layer, of one microbatch."""
        return self.each * sent_bytes(self.kind, self.bytes, self.devices)


class Array(NamedTuple):
    """A global array: its shape, and one logical axis or None for each dim."""

    shape: tuple[int, ...]
    axes: tuple[LogicalAxis | None, ...]

    def entries(self, plan: Plan) -> int:
        """On one device."""
        return math.prod(self.shape) // plan.pieces(split_over(self.axes, plan))


class Move(NamedTuple):
    kind: CollectiveKind
    axes: tuple[MeshAxis, ...]
    bytes: int
    times: int = 1


class Runs(NamedTuple):
    """How often a step runs a part of the model on one device.

    Attributes:
      forward: the part itself.
      backward: the gradients of its input, and of its weights where these do not wait.
      again: its forward once more before the backward, by a stage that kept its input only.
      weight: the gradients of its weights, where they wait for ticks of their own; None = they do not.
    """

    forward: int
    backward: int
    again: int = 0
    weight: int | None = None

    def times(self, number: int) -> Runs:
        """So many times as often."""
        weight = None if self.weight is None else self.weight * number
        return Runs(self.forward * number, self.backward * number, self.again * number, weight)

    def gradients(self, of: Gradients) -> int:
        """How often the backward does what these gradients need."""
        if self.weight is None:
            return self.backward
        return {"input": self.backward, "weight": self.weight, "both": self.backward + self.weight}[of]


class PartRun(NamedTuple):
    """What the rows of a part of the model are made from.

    Attributes:
      plan: mesh, rules and the rest.
      stream: shape [B, S, D] of the residual stream that it is run on.
      runs: how often.
      apart: forward and backward of a block share no gathers: they stand in two loops, or the forward is recomputed.
    """

    plan: Plan
    stream: tuple[int, int, int]
    runs: Runs
    apart: bool

    @property
    def width(self) -> int:
        """Bytes of an entry in the compute dtype."""
        return self.plan.dtype.itemsize

    def tokens(self, used: Sequence[LogicalAxis | None] = GATHERED) -> tuple[MeshAxis, ...]:
        """The mesh axes over which a sum over tokens in this layout is partial."""
        return split_over(used[:2], self.plan)

    @property
    def of_a_part(self) -> PartRun:
        """The step of what a block does for each part of its batch, of which Domino makes two."""
        parts, (rows, *rest) = self.plan.overlap.parts, self.stream
        return self._replace(stream=(rows // parts, *rest), runs=self.runs.times(parts))

    def forward(
        self, scope: str, what: str, moves: Iterable[Move], again: bool = True, recomputed: bool = False,
        asked: bool = True,
    ) -> Iterator[Site]:  # fmt: skip
        """Rows of the forward.

        Args:
          scope, what: as in `Site`.
          moves: of one run.
          again: a stage that runs its forward once more needs them.
          recomputed: a block that is recomputed needs them.
          asked: as in `Site`.
        """
        moves = list(moves)
        yield from rows_of(self.plan, scope, what, "forward", moves, self.runs.forward, asked)
        times = again * self.runs.again + recomputed * self.runs.backward
        yield from rows_of(self.plan, scope, what, "recomputed", moves, times, asked)

    def backward(
        self, scope: str, what: str, of: Gradients, moves: Iterable[Move], asked: bool = True
    ) -> Iterator[Site]:
        """Rows of the backward, by which gradients need them; an op that makes both stands in the ticks of either."""
        return rows_of(self.plan, scope, what, "backward", moves, self.runs.gradients(of), asked)


def rows_of(
    plan: Plan, scope: str, what: str, phase: Phase, moves: Iterable[Move], times: int = 1, asked: bool = True
) -> Iterator[Site]:
    """Rows of moves, those of one kind over the same mesh axes together; none of what is never run."""
    together: dict[tuple[CollectiveKind, tuple[MeshAxis, ...], int], int] = defaultdict(int)
    for move in moves:
        together[move.kind, move.axes, move.times] += move.bytes
    for (kind, axes, count), size in together.items() if times else ():
        yield Site(scope, what, phase, kind, frozenset(axes), plan.pieces(axes), size, times * count, asked, count)


def gather_moves(array: Array, used: Sequence[LogicalAxis | None], width: int, plan: Plan) -> Iterator[Move]:
    """As `collectives.gather`."""
    size = array.entries(plan) * width
    for _, moved in further_split(array.axes, used, plan):
        size *= plan.pieces(moved)
        yield Move("all-gather", moved, size)


def stream_gather(
    shape: tuple[int, ...], stored: Sequence[LogicalAxis | None], used: Sequence[LogicalAxis | None], step: PartRun
) -> Iterator[Move]:
    return gather_moves(Array(shape, tuple(stored)), used, step.width, step.plan)


def weight_gathers(weights: Iterable[Array], step: PartRun) -> list[Move]:
    """Weights as they are multiplied, gathered in the compute dtype."""
    return [move for w in weights for move in gather_moves(w, used_axes(w.axes), step.width, step.plan)]


def sum_moves(
    shape: tuple[int, ...], partial: Sequence[MeshAxis], used: Sequence[LogicalAxis | None],
    stored: Sequence[LogicalAxis | None], width: int, plan: Plan,
) -> Iterator[Move]:  # fmt: skip
    """As `collectives.reduce`."""
    size, left = Array(shape, tuple(used)).entries(plan) * width, set(partial)
    for _, moved in further_split(stored, used, plan):
        for summed, run in groupby(moved, left.__contains__):
            mesh_axes = tuple(run)
            if summed:
                yield Move("reduce-scatter", mesh_axes, size)
            size //= plan.pieces(mesh_axes)
        left.difference_update(moved)
    if left:
        yield Move("all-reduce", tuple(axis for axis in plan.mesh.axis_names if axis in left), size)


def gradient_sums(weights: Iterable[Array], over: Sequence[MeshAxis], step: PartRun) -> list[Move]:
    """Float32 sums over mesh axes, left where the optimizer's state lies."""
    return [
        move
        for w in weights
        for move in sum_moves(w.shape, over, used_axes(w.axes), state_axes(w.axes), FLOAT32, step.plan)
    ]


def ring_axes(used: Sequence[LogicalAxis | None], plan: Plan) -> tuple[MeshAxis, ...]:
    """The mesh axes around which the residual stream's sequence may go; none where another dim moves as well."""
    moves = further_split(STORED, used, plan)
    return moves[0][1] if [dim for dim, _ in moves] == [1] else ()


def in_form(moves: list[Move], used: Sequence[LogicalAxis | None], form: Form, step: PartRun) -> list[Move]:
    """A gather or scatter of the residual stream in the plan's form: a ring hands on a device's chunk each hop."""
    axes = ring_axes(used, step.plan)
    if form == "xla" or not axes:
        return moves
    hops = step.plan.pieces(axes) - 1
    return [Move("ppermute", axes, Array(step.stream, STORED).entries(step.plan) * step.width, hops)]
