"""Measured plans beside their estimates: how well the closed forms rank the plans of a group, and
what the plan that they choose costs more than the fastest (its regret).
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxpar.base.config import load_config, override
from jaxpar.base.errors import Say
from jaxpar.bench.measure import BenchRow
from jaxpar.bench.plans.megatron import FITTED, Figures, cluster, megatron
from jaxpar.bench.plans.order import spearman
from jaxpar.bench.plans.rows import MeasuredPlan, by_group
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.closed_form import Estimate, StepShapes, Trainer, estimate, step_shapes


class RankedPlan(NamedTuple):
    """A measured plan with its estimate."""

    row: MeasuredPlan
    predicted: Estimate


class RankedGroup(NamedTuple):
    """The plans of a group, as the closed forms rank them.

    Attributes:
      name: the model, the batch and the number of GPUs.
      fitted: whether the trainer's figures were fitted on it.
      plans: its plans, in the order of the file.
    """

    name: str
    fitted: bool
    plans: tuple[RankedPlan, ...]

    @property
    def spearman(self) -> float:
        """Spearman's rank correlation of predicted with measured seconds."""
        measured = [one.row.step_seconds for one in self.plans]
        return spearman(measured, [one.predicted.seconds for one in self.plans])

    @property
    def chosen(self) -> RankedPlan:
        """The plan that the closed forms rank first."""
        return min(self.plans, key=lambda one: one.predicted.seconds)

    @property
    def fastest(self) -> RankedPlan:
        """The plan that was measured fastest."""
        return min(self.plans, key=lambda one: one.row.step_seconds)

    @property
    def regret(self) -> float:
        """How much longer the chosen plan takes than the fastest, as a share of the fastest."""
        return self.chosen.row.step_seconds / self.fastest.row.step_seconds - 1


def is_fitted(name: str) -> bool:
    """Return whether the figures of `megatron.FITTED` were fitted on a group: on half of them, by
    the parity of a checksum of its name.
    """
    return zlib.crc32(name.encode()) % 2 == 1


def rank_plans(
    rows: list[MeasuredPlan], figures: Figures = FITTED, say: Say = lambda line: None
) -> list[RankedGroup]:
    """Estimate measured plans, and rank them within their groups; a group of one plan is left out.

    Args:
      figures: what of the trainer and its cluster is in no data sheet.
      say: is called with a line for each model.
    """
    trainer = megatron(figures)
    found: list[RankedGroup] = []
    seen = set[tuple[int, ...]]()
    for name, members in by_group(rows).items():
        if len(members) == 1:
            say(f"{name}: one plan alone, which nothing is ranked beside")
            continue
        model = members[0][:7]
        if model not in seen:
            seen.add(model)
            say(f"{members[0].layers} layers of {members[0].embed}")
        plans = tuple(RankedPlan(row, _predict(row, figures, trainer)) for row in members)
        found.append(RankedGroup(name, is_fitted(name), plans))
    return found


def candidate_of_row(row: MeasuredPlan) -> Candidate:
    """Make the candidate of a measured plan: each layer is computed again, and all microbatches are
    in the pipeline together where there is one.
    """
    staged = row.pp > 1
    return Candidate(
        mesh=(row.pp, row.dp, 1, 1, 1, row.tp),
        accumulation=1 if staged else row.accumulation,
        microbatches=row.accumulation if staged else 1,
        policy="full",
    )


def _predict(row: MeasuredPlan, figures: Figures, trainer: Trainer) -> Estimate:
    shapes = _batched(row)
    return estimate(shapes, candidate_of_row(row), cluster(row.chips, figures), trainer)


@lru_cache(maxsize=1024)
def _with_batch(model: tuple[int, ...], batch: int) -> StepShapes:
    return _shapes(model).with_batch(batch)


def _batched(row: MeasuredPlan) -> StepShapes:
    return _with_batch(row[:7], row.global_batch_seqs)


@lru_cache(maxsize=64)
def _shapes(model: tuple[int, ...]) -> StepShapes:
    layers, embed, heads, head_dim, mlp, vocab, seq_len = model
    config = override(
        load_config("gpt2_124m"),
        {
            "model.layers": layers,
            "model.embed": embed,
            "model.heads": heads,
            "model.head_dim": head_dim,
            "model.mlp": mlp,
            "model.vocab_size": vocab,
            "model.vocab_multiple": _PADDING,
            "model.max_seq_len": seq_len,
            "model.dropout": 0.0,
            "data.seq_len": seq_len,
            "precision.compute": "bfloat16",
        },
    )
    return step_shapes(config)


_PADDING = 2048
"""What the stored vocabulary is a multiple of, so that any group divides it."""


def summary_rows(groups: list[RankedGroup]) -> list[BenchRow]:
    """Make the table of all groups, of those on which the figures were fitted and of the others."""
    kinds = {
        "all": groups,
        "fitted on": [one for one in groups if one.fitted],
        "kept apart": [one for one in groups if not one.fitted],
    }
    return [_summary(name, members) for name, members in kinds.items() if members]


def _summary(name: str, groups: list[RankedGroup]) -> BenchRow:
    regrets = [100 * one.regret for one in groups]
    plans = [plan for one in groups for plan in one.plans]
    errors = [abs(one.predicted.seconds / one.row.step_seconds - 1) for one in plans]
    return {
        "groups": f"{name}: {len(groups)}",
        "plans": len(plans),
        "median Spearman": float(np.median([one.spearman for one in groups])),
        "regret, median %": float(np.median(regrets)),
        "90th percentile": float(np.percentile(regrets, 90)),
        "worst": max(regrets),
        "error of seconds, median %": 100 * float(np.median(errors)),
    }


def worst_rows(groups: list[RankedGroup], count: int = 5) -> list[BenchRow]:
    """Make the table of the groups in which the chosen plan costs most."""
    ordered = sorted(groups, key=lambda one: -one.regret)[:count]
    return [
        {
            "group": one.name,
            "regret, %": 100 * one.regret,
            "Spearman": one.spearman,
            "chosen": one.chosen.row.plan,
            "fastest": one.fastest.row.plan,
        }
        for one in ordered
        if one.regret > 0
    ]


def as_json(groups: list[RankedGroup]) -> list[dict[str, object]]:
    """Return every group with its plans, measured and predicted, as JSON has it."""
    return [
        {
            "group": one.name,
            "fitted": one.fitted,
            "spearman": one.spearman,
            "regret": one.regret,
            "plans": [
                {
                    "plan": plan.row.plan,
                    "measured": plan.row.step_seconds,
                    "predicted": plan.predicted.seconds,
                }
                for plan in one.plans
            ],
        }
        for one in groups
    ]
