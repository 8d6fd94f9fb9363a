"""The ops of a model, bound to a plan: here the plan's choices become the ops' keyword options.

A model calls these and knows no plan. Whoever calls it chooses these or others like them
(`verify.reference_ops`).

Shapes: B batch, S sequence, D embed, H heads, K kv heads, h head_dim, F mlp, V vocab, E experts.
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
from jaxpar.kernels.masks import Mask, Segments, follows_documents
from jaxpar.parallel import _attention, _lookup, cross_entropy, linear
from jaxpar.parallel.collectives import further_split
from jaxpar.parallel.context import Split
from jaxpar.parallel.cross_entropy import LossSums, SoftTargets
from jaxpar.parallel.cross_entropy.top_k import TopK, linear_top_k
from jaxpar.parallel.experts import RouterSums
from jaxpar.parallel.experts import layer as experts
from jaxpar.parallel.linear import ATTENDED, GATHERED, STORED
from jaxpar.parallel.linear.ring_matmul import ring_forms
from jaxpar.parallel.linear.weight_view import Weight


@dataclass(frozen=True)
class Ops:
    """What a model calls for a matmul, a lookup, attention, experts and a loss: each is the
    function of its name.
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
        """See `jaxpar.parallel.column_linear`: one weight, or several that share a gather."""
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
        """See `jaxpar.parallel.row_linear`: one input, or several whose products are summed."""
        of_first = axes[0] if isinstance(h_BSI, list | tuple) else axes
        forms = self.plan.overlap.forms(of_first[0])
        return linear.row_linear(
            h_BSI, weight, axes, self.plan, bias=bias, seq=seq, to=to, overlap=forms
        )

    def rank_linear(
        self, u_BSr: Array, weight: Array, axes: Axes, seq: LogicalAxis = "seq"
    ) -> Array:
        """See `jaxpar.parallel.rank_linear`."""
        return linear.rank_linear(u_BSr, weight, axes, self.plan, seq=seq)

    def lookup(self, table_VD: Array, ids_BS: Array, axis: LogicalAxis | None) -> Array:
        """See `jaxpar.parallel.lookup`."""
        return _lookup.lookup(table_VD, ids_BS, axis, self.plan)

    def attention(
        self,
        q_BSHh: Array,
        k_BSKh: Array,
        v_BSKh: Array,
        mask: Mask,
        segments_BS: Array | None = None,
        dropout_rate: float = 0.0,
        key: Array | None = None,
        softcap: float = 0.0,
        q_start: int = 0,
    ) -> Array:
        """See `jaxpar.parallel.attention`; documents are those of the keys. A token sees what the
        mask shows it of its own document of `segments_BS`, as if that were alone.

        Raises:
          UserError: as there; or there are documents, and the map of a `BlockSparse` is of the
            whole sequence, or a mask of one's own may be.
        """
        plan = self.plan
        if segments_BS is not None:
            if not follows_documents(mask):
                raise UserError(
                    f"packed documents begin anywhere in a sequence, and the map of {mask} "
                    "begins where that does: give BlockSparse per_document=True if it is to begin "
                    "with each document, and derive a mask of your own from OfDistance if it "
                    "looks at nothing but the distance"
                )
            mask = mask & Segments(segments_BS, segments_BS)
        return _attention.attention(
            q_BSHh,
            k_BSKh,
            v_BSKh,
            mask,
            plan,
            context=plan.context.strategy,
            implementation=plan.attention,
            dropout_rate=dropout_rate,
            key=key,
            softcap=softcap,
            q_start=q_start,
        )

    def expert_mlp(
        self,
        x_BSD: Array,
        router_DE: Array,
        gate_EDF: Weight,
        up_EDF: Weight,
        down_EFD: Weight,
        experts_per_token: int,
        text_BS: Array | None = None,
        router: experts.RouterName = "token_choice",
    ) -> tuple[Array, RouterSums]:
        """See `jaxpar.parallel.expert_mlp`."""
        weights = router_DE, gate_EDF, up_EDF, down_EFD
        return experts.expert_mlp(
            x_BSD,
            *weights,
            self.plan,
            experts_per_token=experts_per_token,
            text_BS=text_BS,
            router=router,
        )

    def linear_cross_entropy(
        self,
        x_BSD: Array,
        head_VD: Array,
        labels_BS: Array,
        vocab_size: int,
        z_loss: float = 0.0,
        softcap: float = 0.0,
        bias_V: Array | None = None,
        label_smoothing: float = 0.0,
        soft: SoftTargets | None = None,
        alpha: float = 1.0,
        temperature: float = 1.0,
    ) -> LossSums:
        """See `jaxpar.parallel.linear_cross_entropy`."""
        return cross_entropy.linear_cross_entropy(
            x_BSD,
            head_VD,
            labels_BS,
            self.plan,
            bias_V=bias_V,
            vocab_size=vocab_size,
            z_loss=z_loss,
            softcap=softcap,
            label_smoothing=label_smoothing,
            soft=soft,
            alpha=alpha,
            temperature=temperature,
            loss_mib=self.plan.loss_mib,
        )

    def linear_top_k(
        self,
        x_BSD: Array,
        head_VD: Array,
        k: int,
        vocab_size: int,
        softcap: float = 0.0,
    ) -> TopK:
        """See `jaxpar.parallel.linear_top_k`."""
        return linear_top_k(
            x_BSD,
            head_VD,
            k,
            self.plan,
            vocab_size=vocab_size,
            softcap=softcap,
            loss_mib=self.plan.loss_mib,
        )

    def logits(
        self,
        x_BSD: Array,
        head_VD: Array,
        vocab_size: int,
        softcap: float = 0.0,
        bias_V: Array | None = None,
    ) -> Array:
        """See `jaxpar.parallel.logits`."""
        forms = self.plan.overlap.forms("vocab")
        return linear.logits(
            x_BSD,
            head_VD,
            self.plan,
            bias_V=bias_V,
            vocab_size=vocab_size,
            softcap=softcap,
            overlap=forms,
        )


def ops_without_plan(compute: str = "float32") -> Ops:
    """The ops of a module that is called by itself: plain mathematics on one device.

    Args:
      compute: the dtype of matmuls, activations and their sums: float32 or bfloat16.

    Returns:
      The ops, on the first device of JAX.

    Raises:
      UserError: it is another dtype.
    """
    mesh = make_mesh(MeshSpec(), jax.devices()[:1])
    return Ops(Plan(mesh, compute=cast(Literal["float32", "bfloat16"], compute)))


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
