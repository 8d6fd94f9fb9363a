"""The program of docs/scaling.md computes one layer on any number of workers, and simulates what it
says.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

SMALL = {"embed": 32, "mlp": 64, "heads": 4, "batch": 2, "seq": 32}


@pytest.fixture(scope="module")
def study() -> ModuleType:
    file = Path(__file__).parents[1] / "docs" / "scaling_study.py"
    spec = importlib.util.spec_from_file_location("scaling_study", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_layer_is_the_same_on_any_number_of_workers(study: ModuleType) -> None:
    """Four heads on one worker, on two, and on eight, which split the queries; and the part that a
    worker has is the whole layer where it is alone. Float32 sums in another order.
    """
    sizes = study.Sizes(**SMALL)
    run, params, x = study.programs(sizes, 2, 1)["forward"]
    want = np.asarray(run(params, x))
    for workers in (2, 8):
        run, laid, rows = study.programs(sizes, 2, workers)["forward"]
        order = study.order_of(study.layout_of(workers, sizes.heads), sizes.seq)
        assert (workers > sizes.heads) == (list(order) != list(range(sizes.seq)))
        np.testing.assert_allclose(np.asarray(run(laid, rows)), want[:, order], atol=1e-5)
    alone = study.passes(partial(study.part_of_layer, study.ALONE))["forward"]
    np.testing.assert_allclose(jax.jit(alone)(params, x), want, atol=1e-5)


def test_messages_are_read_from_the_program(study: ModuleType) -> None:
    """Of one layer forward: two gathers and two scatters of the stream, by two workers."""
    sizes = study.Sizes(**SMALL)
    stream = 4 * sizes.batch * sizes.seq * sizes.embed
    assert study.message_seconds(sizes, 2, "forward", study.Link(1.0, 0.0)) == 4
    assert study.message_seconds(sizes, 2, "forward", study.Link(0.0, 1.0)) == 4 * stream / 2


def test_without_messages_a_pipeline_has_the_speedup_of_the_formula(study: ModuleType) -> None:
    shares = {}
    for workers in study.WORKERS:
        layers = -(-24 // workers)
        shares[f"forward of stage/{workers}"] = 1.0 * layers
        shares[f"training of stage/{workers}"] = 3.0 * layers
    found = study.simulated_stack(study.Sizes(), shares, study.Link(0.0, 0.0))
    for workers in (1, 2, 4, 8):
        wanted = pytest.approx(10 * workers / (10 + workers - 1))
        assert found["forward"][workers] == wanted and found["training"][workers] == wanted
    # 16 stages have two layers each at most, as many as 12 stages would
    assert found["forward"][16] == pytest.approx(24 * 10 / (2 * 25))
    slower = study.simulated_stack(study.Sizes(), shares, study.Link(0.5, 0.0))
    assert slower["forward"][8] < found["forward"][8]
    assert slower["forward"][1] == found["forward"][1]


def test_a_link_is_fitted_to_two_messages(study: ModuleType) -> None:
    messages = {"large": 5.0, "large bytes": 80.0, "small": 2.0, "small bytes": 20.0}
    link = study.link_of(messages)
    assert link.seconds(40.0) == pytest.approx(5.0) and link.seconds(10.0) == pytest.approx(2.0)
