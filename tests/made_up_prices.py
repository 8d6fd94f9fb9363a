"""Made-up closed forms and rehearsals, for searches that need no compiler: a step whose time and
bytes behave as those of a real one, in a few lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxpar.base.config import Config
from jaxpar.models import Model
from jaxpar.plan.candidate import Candidate, candidate_of
from jaxpar.plan.closed_form import Bytes, Estimate
from jaxpar.plan.engine import Outcome, Price
from jaxpar.plan.figures import Figures
from jaxpar.plan.layout_search.request import Request

PEAK = 200e12
LINK = 1e11
KEPT = {
    "none": 34,
    "selective": 24,
    "dots": 18,
    "attention_out": 4,
    "block_inputs": 4,
    "full": 2,
}
"""Bytes of a token and an entry of the residual stream that a layer keeps."""
AGAIN = {
    "none": 0.0,
    "selective": 0.02,
    "dots": 0.05,
    "attention_out": 0.2,
    "block_inputs": 0.3,
    "full": 0.33,
}
"""The share of the compute that is done again."""


def made_up(request: Request) -> Price:
    """Price the plans of a request."""
    config = request.config
    model = config.model
    weights = Model(model).parameter_count()
    flops = 6.0 * weights * request.tokens

    def price(one: Candidate) -> Estimate:
        split = one.size("fsdp") * one.size("tensor") * one.size("stage")
        shards = one.size("data") * one.size("fsdp") * one.size("expert")
        pieces = one.size("tensor") * one.size("context")
        rows = request.sequences / (shards * one.accumulation * one.microbatches)
        tokens = rows * config.data.seq_len / pieces
        small = 1 + 256 / max(tokens, 1)
        compute = flops / (one.devices * PEAK) * (1 + AGAIN[one.policy]) * small
        times = one.accumulation * one.microbatches
        gathers = 6.0 * weights / (one.size("tensor") * one.size("stage")) / LINK * times
        passed = 16.0 * tokens * model.embed * model.layers * times / LINK
        sent = gathers * (one.size("fsdp") > 1) + passed * (pieces > 1)
        sent += 4.0 * weights / split / LINK * (one.size("data") > 1)
        stages = one.size("stage")
        bubble = compute * (stages - 1) / (one.microbatches * one.virtual)
        state = 8.0 * weights / split / (one.size("data") if one.zero else 1)
        away = one.optimizer != "device"
        host = 2 * state / 16e9 if away else 0.0
        layers = model.layers / stages
        in_flight = min(one.microbatches, 2 * stages)
        kept = KEPT[one.policy] * tokens * model.embed * layers * in_flight
        loss = min(one.loss_mib * 2**20, 4.0 * tokens * model.vocab_size)
        return Estimate(
            compute=compute,
            exposed=max(sent - 0.7 * compute, 0.05 * sent),
            bubble=bubble,
            launches=0.0,
            update=0.0,
            host=host,
            bytes=Bytes(
                4.0 * weights / split, 4.0 * weights / split, state * (not away), kept, loss
            ),
        )

    return price


def rehearsals(
    request_of: Callable[[], Request],
    slower: Callable[[Candidate], float] = lambda one: 1.0,
    larger: float = 0.0,
    seen: list[Candidate] | None = None,
) -> Callable[[Sequence[Config]], list[Outcome]]:
    """Make rehearsals that differ from the made-up closed forms.

    Args:
      request_of: returns the request of the search.
      slower: by what a plan's time differs.
      larger: the bytes by which each plan is larger.
      seen: gets the plans in the order in which they are rehearsed.
    """

    def measure(configs: Sequence[Config]) -> list[Outcome]:
        return [one(config) for config in configs]

    def one(config: Config) -> Outcome:
        request = request_of()
        candidate = candidate_of(config)
        if seen is not None:
            seen.append(candidate)
        estimate = made_up(request)(candidate)
        step = estimate.seconds * slower(candidate)
        memory = round(estimate.bytes.total + larger)
        usable = request.target.hardware.hbm_bytes
        return Outcome(
            Figures(
                step=step,
                tokens_per_second=request.tokens / step,
                exposed=estimate.exposed,
                host_stall=0.0,
                mfu=0.5,
                memory=memory,
                usable=usable,
                fits=memory <= usable,
                compile_seconds=1.0,
            )
        )

    return measure
