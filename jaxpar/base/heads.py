"""What is done where there are more devices than heads: the rules change, or kv heads are copied."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from jaxpar.base.mesh import MeshAxis, describe
from jaxpar.base.sharding import Layout, LogicalAxis, ShardingRules, drop_axes, first_axes


def fit_rules(
    rules: ShardingRules, heads: int, kv_heads: int, sizes: Mapping[MeshAxis, int]
) -> tuple[ShardingRules, list[str]]:
    """Rules that fit more devices than heads, and a line for the log about each change.

    Heads that their mesh axes do not divide keep the first of the axes that do, and attention splits the sequence over
    the others, as the residual stream does. Kv heads that theirs do not divide are copied: their weights are whole
    over the axes that are left out, and each device makes those of its query heads
    (`jaxpar.parallel.linear.column_linear`). Where `attention_seq` is set, or kv heads are split otherwise than by the
    first axes of heads, nothing is changed: what does not divide is refused as for any other dim.

    Args:
      rules: the rules that the user gave.
      heads: the number of query heads of the model.
      kv_heads: the number of key and value heads.
      sizes: the number of devices along each mesh axis.
    """

    def split(named: tuple[MeshAxis, ...]) -> tuple[MeshAxis, ...]:
        return tuple(axis for axis in named if sizes[axis] > 1)

    def pieces(axes: tuple[MeshAxis, ...]) -> int:
        return math.prod(sizes[axis] for axis in axes)

    def words(axes: tuple[MeshAxis, ...]) -> str:
        return describe({axis: sizes[axis] for axis in axes})

    notes, wanted, residual = [], split(rules.heads), split(rules.residual_seq)
    # An axis splits heads or the sequence: where the residual stream's has it, the sequence gets all of them.
    kept = next(
        first for first in first_axes(wanted)
        if heads % pieces(first) == 0 and (first == wanted or not set(first) & set(residual))
    )  # fmt: skip
    if dropped := wanted[len(kept) :]:
        if rules.attention_seq:
            return rules, []
        rules = replace(
            rules, attention_seq=rules.residual_seq, heads=drop_axes(rules.heads, dropped),
            kv_heads=drop_axes(rules.kv_heads, dropped),
        )  # fmt: skip
        repeated = " x ".join(axis for axis in dropped if axis not in residual)
        instead = f"attention is repeated along {repeated}, which rules.residual_seq does not name"
        instead = instead if repeated else "attention is split over the sequence"
        notes.append(f"{words(wanted)} does not divide {heads} heads: {instead}")
    queries, wanted = split(rules.heads), split(rules.kv_heads)
    kept = next(first for first in first_axes(wanted) if kv_heads % pieces(first) == 0)
    if kept != wanted and wanted == queries[: len(wanted)]:
        rules = replace(rules, kv_heads=drop_axes(rules.kv_heads, wanted[len(kept) :]))
        made = math.lcm(kv_heads, pieces(queries))
        notes.append(
            f"{words(wanted)} does not divide {kv_heads} kv heads: their weights are whole, "
            f"and k and v have {made} heads, each of them {made // kv_heads} times"
        )
    return rules, notes


def kv_copy_axes(layout: Layout) -> tuple[MeshAxis, ...]:
    """The mesh axes that split heads and not kv heads.

    Along these axes k and v hold copies of kv heads, so that each device has those of its own query heads. There are
    none where the mesh axes of kv heads are not the first ones of heads.
    """
    heads, kv_heads = layout.mesh_axes("heads"), layout.mesh_axes("kv_heads")
    return heads[len(kv_heads) :] if heads[: len(kv_heads)] == kv_heads else ()


def output_axis(axis: LogicalAxis | None, layout: Layout) -> LogicalAxis | None:
    """The logical axis of a linear's output dim: kv heads that are copied lie as heads do."""
    return "heads" if axis == "kv_heads" and kv_copy_axes(layout) else axis
