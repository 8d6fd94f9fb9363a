"""The ops of a model, bound to a plan: here the plan's choices become the ops' keyword options.

Shapes: B batch, S sequence, D embed, r rank, V vocab, I hidden dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import jax
from jax import Array

from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import Axes, LogicalAxis, output_axis
from jaxpar.kernels.masks import Segments, follows_documents
from jaxpar.parallel import _attention, _lookup, cross_entropy, linear
from jaxpar.parallel.collectives import further_split
from jaxpar.parallel.context import Split
from jaxpar.parallel.cross_entropy import LossSums
from jaxpar.parallel.cross_entropy.top_k import TopK, linear_top_k
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.experts import layer as experts
from jaxpar.parallel.linear import ATTENDED, GATHERED, STORED
from jaxpar.parallel.linear.ring_matmul import ring_forms
from jaxpar.parallel.ops import AttentionCall, ExpertsCall, LogitsCall, LossCall, Ops


@dataclass(frozen=True)
class MeshOps(Ops):
    """The ops of a model under a plan, on any mesh: each is the function of `jaxpar.parallel` of
    its name, which says what it refuses.
    """

    plan: Plan

    def column_linear(
        self,
        x_BSD: Array,
        weights: Any,
        axes: Any,
        biases: Any = None,
        seq: LogicalAxis | Sequence[LogicalAxis] = "seq",
    ) -> Any:
        several = isinstance(weights, list | tuple)
        of_first = axes[0] if several else axes
        forms = self.plan.overlap.forms(output_axis(of_first[0], self.plan))
        return linear.column_linear(
            x_BSD, weights, axes, self.plan, biases=biases, seq=seq, overlap=forms
        )

    def row_linear(
        self,
        h_BSI: Any,
        weight: Any,
        axes: Any,
        bias: Any = None,
        seq: LogicalAxis | Sequence[LogicalAxis] = "seq",
        to: LogicalAxis = "embed",
    ) -> Array:
        of_first = axes[0] if isinstance(h_BSI, list | tuple) else axes
        forms = self.plan.overlap.forms(of_first[0])
        return linear.row_linear(
            h_BSI, weight, axes, self.plan, bias=bias, seq=seq, to=to, overlap=forms
        )

    def rank_linear(
        self, u_BSr: Array, weight: Array, axes: Axes, seq: LogicalAxis = "seq"
    ) -> Array:
        return linear.rank_linear(u_BSr, weight, axes, self.plan, seq=seq)

    def lookup(self, table_VD: Array, ids_BS: Array, axis: LogicalAxis | None) -> Array:
        return _lookup.lookup(table_VD, ids_BS, axis, self.plan)

    def attention(self, call: AttentionCall) -> Array:
        """Attend, within documents where there are any.

        Raises:
          UserError: there are documents, and the map of a `BlockSparse` is of the whole sequence,
            or a mask of one's own may be.
        """
        plan = self.plan
        mask = call.mask
        if call.segments_BT is not None:
            if not follows_documents(mask):
                raise UserError(
                    f"packed documents begin anywhere in a sequence, and the map of {mask} "
                    "begins where that does: give BlockSparse per_document=True if it is to begin "
                    "with each document, and derive a mask of your own from OfDistance if it "
                    "looks at nothing but the distance"
                )
            mask = mask & Segments(call.segments_BT, call.segments_BT)
        return _attention.attention(
            call.q_BSHh,
            call.k_BTKh,
            call.v_BTKh,
            mask,
            plan,
            context=plan.context.strategy,
            implementation=plan.attention,
            dropout_rate=call.dropout_rate,
            key=call.key,
            softcap=call.softcap,
            q_start=call.q_start,
        )

    def expert_mlp(self, call: ExpertsCall) -> tuple[Array, RouterSums]:
        return experts.expert_mlp(
            call.x_BSD,
            call.router_DE,
            call.gate_EDF,
            call.up_EDF,
            call.down_EFD,
            self.plan,
            experts_per_token=call.experts_per_token,
            text_BS=call.text_BS,
            router=call.router,
        )

    def linear_cross_entropy(self, call: LossCall) -> LossSums:
        scores = call.scores
        return cross_entropy.linear_cross_entropy(
            scores.x_BSD,
            scores.head_VD,
            call.labels_BS,
            self.plan,
            bias_V=scores.bias_V,
            vocab_size=scores.vocab_size,
            z_loss=call.z_loss,
            softcap=scores.softcap,
            label_smoothing=call.label_smoothing,
            soft=call.soft,
            alpha=call.alpha,
            temperature=call.temperature,
            loss_mib=self.plan.loss_mib,
        )

    def linear_top_k(self, call: LogitsCall, k: int) -> TopK:
        """Find the largest log-probabilities.

        Raises:
          UserError: the scores have a bias, which is not taken here.
        """
        if call.bias_V is not None:
            raise UserError("linear_top_k takes no bias of the vocabulary: leave bias_V out")
        return linear_top_k(
            call.x_BSD,
            call.head_VD,
            k,
            self.plan,
            vocab_size=call.vocab_size,
            softcap=call.softcap,
            loss_mib=self.plan.loss_mib,
        )

    def logits(self, call: LogitsCall) -> Array:
        return linear.logits(
            call.x_BSD,
            call.head_VD,
            self.plan,
            bias_V=call.bias_V,
            vocab_size=call.vocab_size,
            softcap=call.softcap,
            overlap=self.plan.overlap.forms("vocab"),
        )


def ops_without_plan(compute: str = "float32") -> MeshOps:
    """The ops of a module that is called by itself: plain mathematics on one device.

    Args:
      compute: the dtype of matmuls, activations and their sums: float32 or bfloat16.

    Returns:
      The ops, on the first device of JAX.

    Raises:
      UserError: it is another dtype.
    """
    mesh = make_mesh(MeshSpec(), jax.devices()[:1])
    return MeshOps(Plan(mesh, compute=cast(Literal["float32", "bfloat16"], compute)))


def split_of(plan: Plan, softcap: float = 0.0) -> Split:
    """How attention runs under a plan."""
    return Split(plan, plan.context.strategy, plan.attention, softcap)


def attention_calls(plan: Plan, seq_len: int, softcap: float = 0.0) -> list[tuple[Split, int]]:
    """List how attention runs in a layer, with the number of its keys: once, or for the halves of
    each sequence.

    Args:
      plan: the plan.
      seq_len: the length of the whole sequence, in tokens.
      softcap: that of the scores.

    Returns:
      Pairs of a split and the keys' length, as `choose_attention` takes them.
    """
    whole = split_of(plan, softcap)
    if not plan.overlap.cuts_sequence:
        return [(whole, seq_len)]
    half = seq_len // 2
    return [(whole, half), (whole._replace(q_start=half), seq_len)]


def overlap_notes(plan: Plan) -> list[str]:
    """Say for the log where a collective replaces a ring that the plan asks for.

    Args:
      plan: the plan, whose overlap is chosen.

    Returns:
      A line for each such case.
    """
    rings = ring_forms()
    asked = [name for name, form in vars(plan.overlap).items() if form in rings]
    if not asked:
        return []
    flags = " and ".join(f"overlap.{name}" for name in asked)
    moves = further_split(STORED, GATHERED, plan)
    if not moves:
        why = "rules.residual_seq splits the sequence no further than rules.seq on this mesh"
        return [f"{flags}: no ring, since {why}"]
    attention = further_split(STORED, ATTENDED, plan)
    notes = []
    if attention != moves:
        if attention:
            ring = f"the ring is {' x '.join(attention[0][1])}"
        else:
            ring = "no ring"
        over = " x ".join(plan.mesh_axes("attention_seq"))
        notes.append(
            f"{flags}: {ring} at attention, whose sequence is split over {over} "
            "(rules.attention_seq)"
        )
    sums = {output_axis("kv_heads", plan): attention, "heads": attention, "mlp": moves}
    for axis, moved in sums.items() if any("scatter" in name for name in asked) else ():
        split = plan.mesh_axes(axis)
        ring = moved[0][1] if moved else ()
        if split and ring and set(split) != set(ring):
            over = " x ".join(split)
            around = " x ".join(ring)
            notes.append(
                f"overlap.scatter: sums over {over} (rules.{axis}) take a collective, the ring "
                f"is {around}"
            )
    return notes
