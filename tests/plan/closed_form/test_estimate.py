"""What an estimate says of plans whose order is known, and how long it takes."""

from __future__ import annotations

import itertools
import time
from functools import lru_cache

import pytest

from jaxpar.base.config import load_config
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.closed_form import Estimate, StepShapes, estimate, step_shapes
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
