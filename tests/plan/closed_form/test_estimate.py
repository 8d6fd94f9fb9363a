"""What an estimate says of plans whose order is known, and how long it takes."""

from __future__ import annotations

import itertools
import time
from functools import lru_cache

import pytest

from jaxpar.base.config import load_config
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.closed_form import TRAINERS, Estimate, StepShapes, estimate, step_shapes
from jaxpar.plan.closed_form.links import spans_nodes
from jaxpar.rehearse.targets import load_target

V5P = load_target("v5p-64")
H100 = load_target("h100x16")


@lru_cache
def llama() -> StepShapes:
    return step_shapes(load_config("llama3_8b")).with_batch(64)


def on_v5p(**choices: object) -> Estimate:
    mesh = {"mesh": (1, 1, 64, 1, 1, 1)}
    return estimate(llama(), Candidate(**mesh | choices), V5P)  # pyright: ignore[reportArgumentType]


def test_keeping_more_is_faster_and_takes_more_memory():
    kept = [on_v5p(policy=policy) for policy in ("full", "dots", "none")]
    assert kept[0].seconds > kept[1].seconds > kept[2].seconds
    assert kept[0].bytes.activations < kept[1].bytes.activations < kept[2].bytes.activations


def test_rehearsed_steps_of_llama_8b():
    """docs/benchmarks_log.md has them rehearsed: 489 and 419 ms, and 1.35 s of 64 sequences."""
    tensor = {"mesh": (1, 1, 16, 1, 1, 4)}
    small = llama().with_batch(16)
    full = estimate(small, Candidate(policy="full", **tensor), V5P)
    dots = estimate(small, Candidate(policy="dots", **tensor), V5P)
    assert full.seconds == pytest.approx(0.489, rel=0.06)
    assert dots.seconds == pytest.approx(0.419, rel=0.06)
    assert full.exposed == pytest.approx(0.110, rel=0.15)
    assert on_v5p(policy="dots").seconds == pytest.approx(1.35, rel=0.06)


def test_more_tensor_parallelism_waits_longer():
    exposed = [
        on_v5p(mesh=(1, 1, 64 // size, 1, 1, size), policy="full").exposed for size in (1, 2, 4, 8)
    ]
    assert exposed == sorted(exposed)


def test_a_pipeline_waits_less_with_more_microbatches():
    stages = {"mesh": (4, 1, 4, 1, 1, 1), "policy": "full"}
    waits = [
        estimate(llama(), Candidate(microbatches=count, **stages), H100).bubble
        for count in (4, 8, 16)
    ]
    assert waits[0] > waits[1] > waits[2] > 0
    interleaved = Candidate(microbatches=8, schedule="interleaved", virtual=2, **stages)
    assert estimate(llama(), interleaved, H100).bubble < waits[1]


def test_zero1_holds_less_and_small_moments_too():
    plain = Candidate(mesh=(1, 16, 1, 1, 1, 1), policy="full")
    whole = estimate(llama(), plain, H100).bytes
    zero = estimate(llama(), plain._replace(zero=True), H100).bytes
    small = estimate(llama(), plain._replace(moments="bfloat16"), H100).bytes
    assert zero.optimizer == pytest.approx(whole.optimizer / 16, rel=0.01)
    assert zero.parameters == whole.parameters
    assert small.optimizer == pytest.approx(0.75 * whole.optimizer, rel=0.01)


def test_a_scan_on_a_gpu_pays_for_what_it_stacks():
    """Keeping everything takes longer in a scan than unrolled; a TPU writes into the stack itself."""
    kept = Candidate(mesh=(1, 1, 16, 1, 1, 1), policy="none")
    small = llama().with_batch(16)

    def cost(candidate: Candidate) -> float:
        return estimate(small, candidate, H100).seconds

    stacked = cost(kept) - cost(kept._replace(scan=False))
    of_inputs = cost(kept._replace(policy="full")) - cost(kept._replace(policy="full", scan=False))
    assert stacked > 4 * of_inputs > 0
    assert on_v5p(policy="none").seconds == on_v5p(policy="none", scan=False).seconds


def test_collectives_over_the_network_hide_less_than_those_in_a_node():
    inside = Candidate(mesh=(1, 1, 8, 1, 1, 1), dcn=(1, 2, 1, 1, 1, 1))
    trainer = TRAINERS["cuda"]
    (gather, *_) = trainer.weights(llama(), inside)
    assert trainer.share(gather, across=True) > trainer.share(gather, across=False) > 0
    assert not spans_nodes(gather.axes, inside.mesh, inside.dcn, H100)
    assert spans_nodes(("data",), inside.mesh, inside.dcn, H100)
    assert spans_nodes(("fsdp",), (1, 1, 16, 1, 1, 1), (1,) * 6, H100)


def test_a_ring_on_a_gpu_has_slower_kernels_and_adds_up_its_hops():
    whole = estimate(llama(), Candidate(mesh=(1, 1, 16, 1, 1, 1), policy="full"), H100)
    ring = estimate(llama(), Candidate(mesh=(1, 1, 8, 2, 1, 1), policy="full"), H100)
    assert ring.compute > 1.05 * whole.compute


def test_a_search_is_quick():
    """0.6 ms a candidate on one core leaves 60 s for 100,000 on two; a loaded machine may take
    three times as long.
    """
    shapes = llama()
    meshes = [
        (1, data, fsdp, 1, 1, 64 // data // fsdp)
        for data, fsdp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8))
    ]
    choices = itertools.product(meshes, ("none", "dots", "full"), (1, 2, 4), (False, True))
    candidates = [
        Candidate(mesh=mesh, policy=policy, accumulation=parts, zero=zero)
        for mesh, policy, parts, zero in choices
    ]
    start = time.process_time()
    for candidate in candidates:
        estimate(shapes, candidate, V5P)
    assert (time.process_time() - start) / len(candidates) < 3 * 0.6e-3
