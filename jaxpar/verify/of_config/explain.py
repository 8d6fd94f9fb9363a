"""Explains wrong gradients of a config's plan with mistakes that need more than any program's loss and batch.

The loss is a sum over tokens, so the gradients of row shards, or of microbatches, add up to the whole gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from jaxpar.base.plan import Plan
from jaxpar.parallel.token_order import TOKENS
from jaxpar.verify.comparison import Answer
from jaxpar.verify.explain import Alteration, Partition, explain, shards
from jaxpar.verify.of_config.losses_and_gradients import Case, OneDevice, is_stacked, one_device
from jaxpar.verify.reference_ops import ReferenceOps
from jaxpar.verify.report import GradientRow, Verdict


def explain_plan(
    case: Case, verdict: Verdict, got: Answer, want: Answer, one: OneDevice, say: Callable[[str], None]
) -> Verdict:
    """Return the verdict on `got`, under the plan, and the reference's `want`, with an explanation of wrong gradients.

    It also says which wrong gradient lies nearest to the loss. `one` runs the reference on other batches.
    """
    if not verdict.wrong:
        return verdict
    plan = case.plan("float32")
    partitions = partitions_of(case, plan)
    say(f"differs: the gradients of {sum(len(part.batches) for part in partitions)} shards and microbatches alone")

    def altered() -> Iterator[Alteration]:
        if not verdict.loss_ok:  # otherwise the forward pass is right, and so is the mask
            say("differs: the loss does too, so other attention masks are tried")
            yield from _other_masks(case, one)

    run, sizes = partial(one, case.params), _other_sizes(case, plan)
    verdict = explain(verdict, got, want, run, partitions, altered, sizes=sizes, stacked=is_stacked)
    return replace(verdict, origin=nearest_to_loss(verdict.wrong))


def partitions_of(case: Case, plan: Plan) -> list[Partition]:
    """Split the batch into row shards and into microbatches, as `step.gradients` deals them out and in other orders."""
    batch, accumulation = case.batch, case.config.train.accumulation
    piped = plan.pipeline.microbatches if plan.size("stage") > 1 else 1
    row = np.arange(len(batch["labels"]))
    dealt = {
        " of the pipeline": (piped, row // accumulation % piped),
        "": (accumulation, row % accumulation),
        " (of consecutive rows)": (accumulation, row // (len(row) // accumulation)),
    }
    return [
        *shards(batch, dict.fromkeys(batch, plan.sharding(TOKENS))),
        *(
            Partition("microbatch", of, [{key: x[owner == n] for key, x in batch.items()} for n in range(count)])
            for of, (count, owner) in dealt.items() if count > 1
        ),
    ]  # fmt: skip


def _other_sizes(case: Case, plan: Plan) -> dict[str, int]:
    """Return numbers, besides the sizes of mesh axes, that may be the factor by which a gradient is wrong."""
    model, train = case.config.model, case.config.train
    sizes = {
        "accumulation": train.accumulation,
        "microbatches": plan.pipeline.microbatches if plan.size("stage") > 1 else 1,
        "query heads per kv head": model.heads // model.kv_head_count,
        "tokens that count": int(np.sum(case.batch["labels"] >= 0)),
    }
    return {name: size for name, size in sizes.items() if size > 1}


def _other_masks(case: Case, one: OneDevice) -> Iterator[Alteration]:
    """Yield the reference's answers with documents not kept apart, and with an attention mask that is off by one."""
    if "segments" in case.batch:
        for name, what in (
            ("segments", "a token sees the documents packed before its own"),
            ("positions", "positions do not restart with each document"),
        ):
            without = {key: rows for key, rows in case.batch.items() if key != name}
            yield "documents", what, one(case.params, without).grads
    for offset, what in (
        (1, "a token sees the one after it"),
        (-1, "a token does not see itself and the first sees all"),
    ):
        ops = partial(ReferenceOps, offset=offset)
        yield "mask", what, one_device(case, "float32", exact=True, ops=ops)(case.params, case.batch).grads


def nearest_to_loss(wrong: tuple[GradientRow, ...]) -> str:
    """Name the wrong gradient that a backward pass meets first, because a mistake there is passed on to the others."""
    if not wrong:
        return ""
    parts = ("embed", "blocks", "head")
    _, layer, _, row = max(
        (parts.index(row.name.split(".")[0]), max(row.layers or [-1]), at, row) for at, row in enumerate(wrong)
    )
    return f"{row.name} of layer {layer}" if row.layers else row.name
