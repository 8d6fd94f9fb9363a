"""Where there are more devices than heads, the rules change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from jaxpar.base.field_marks import WholeConfig
from jaxpar.base.layout.mesh import MeshAxis, describe, total_sizes
from jaxpar.base.layout.rules import LogicalAxis, ShardingRules, named_axes


def fit_rules(
    rules: ShardingRules, heads: int, kv_heads: int, sizes: Mapping[MeshAxis, int]
) -> tuple[ShardingRules, list[str]]:
    """Fit rules to more devices than heads.

    Heads that their mesh axes do not divide keep the first of the axes that do, and attention
    splits the sequence over the others, as the residual stream does. Kv heads that theirs do not
    divide are copied: their weights are whole over the axes that are left out, and each device
    makes those of its query heads (`jaxpar.parallel.linear.column_linear`). Where `attention_seq`
    is set, or kv heads are split otherwise than by the first axes of heads, nothing is changed:
    what does not divide is refused, like any other dim.

    Args:
      heads: the number of query heads.
      kv_heads: the number of kv heads.
      sizes: the numbers of devices along the mesh axes.

    Returns:
      The rules that fit, and a line for the log about each change.
    """

    def split(named: tuple[MeshAxis, ...]) -> tuple[MeshAxis, ...]:
        return tuple(axis for axis in named if sizes[axis] > 1)

    def pieces(axes: tuple[MeshAxis, ...]) -> int:
        return math.prod(sizes[axis] for axis in axes)

    def words(axes: tuple[MeshAxis, ...]) -> str:
        return describe({axis: sizes[axis] for axis in axes})

    notes = []
    wanted = split(rules.heads)
    residual = split(rules.residual_seq)
    # An axis splits heads or the sequence: where the residual stream's has it, the sequence gets
    # all of them.
    kept = next(
        first
        for first in first_axes(wanted)
        if heads % pieces(first) == 0 and (first == wanted or not set(first) & set(residual))
    )
    if dropped := wanted[len(kept) :]:
        if rules.attention_seq:
            return rules, []
        fewer = drop_axes(rules.heads, dropped)
        kv_fewer = drop_axes(rules.kv_heads, dropped)
        rules = replace(rules, attention_seq=rules.residual_seq, heads=fewer, kv_heads=kv_fewer)
        repeated = " x ".join(axis for axis in dropped if axis not in residual)
        instead = f"attention is repeated along {repeated}, which rules.residual_seq does not name"
        if not repeated:
            instead = "attention is split over the sequence"
        notes.append(f"{words(wanted)} does not divide {heads} heads: {instead}")
    queries = split(rules.heads)
    wanted = split(rules.kv_heads)
    kept = next(first for first in first_axes(wanted) if kv_heads % pieces(first) == 0)
    if kept != wanted and wanted == queries[: len(wanted)]:
        rules = replace(rules, kv_heads=drop_axes(rules.kv_heads, wanted[len(kept) :]))
        made = math.lcm(kv_heads, pieces(queries))
        notes.append(
            f"{words(wanted)} does not divide {kv_heads} kv heads: their weights are whole, "
            f"and k and v have {made} heads, each of them {made // kv_heads} times"
        )
    return rules, notes


def first_axes(axes: tuple[MeshAxis, ...]) -> list[tuple[MeshAxis, ...]]:
    """Every prefix of some mesh axes, the longest first."""
    return [axes[:count] for count in range(len(axes), -1, -1)]


def drop_axes(
    axes: tuple[MeshAxis, ...],
    dropped: tuple[MeshAxis, ...],
) -> tuple[MeshAxis, ...]:
    """The mesh axes that are not dropped."""
    return tuple(axis for axis in axes if axis not in dropped)


def may_split(config: WholeConfig, axis: LogicalAxis, besides: LogicalAxis | None = None) -> bool:
    """Whether a logical axis is or may be (-1) split over mesh axes of a config that do not split
    the axis `besides`.
    """
    model = config.model
    sizes = total_sizes(config.mesh)
    rules, _ = fit_rules(config.rules, model.heads, model.kv_head_count, sizes)
    left = named_axes(besides, rules) if besides else ()
    return any(
        sizes[a] > 1 or getattr(config.mesh, a) == -1
        for a in named_axes(axis, rules)
        if a not in left
    )
