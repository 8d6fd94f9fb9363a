"""The best assignment of activations: as good as trying all, and its costs those of the model."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import pytest
from experiments import experiment_of
from hypothesis import given
from hypothesis import strategies as st
from traced_steps import config_of, staged

from jaxpar.base.config import override
from jaxpar.base.hardware import Hardware
from jaxpar.plan.choose_remat import (
    ActionCosts,
    Item,
    Option,
    Solution,
    _attention_flops,
    costs_of,
    frontier,
    items_of,
    solve,
)
from jaxpar.rehearse.targets import load_target
from jaxpar.train.activations import activations
from jaxpar.train.experiments import make_plan

options = st.tuples(
    st.sampled_from(["save", "offload", "recompute"]),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 9),
).map(
    lambda row: Option(
        row[0],
        row[1],
        row[2],
        float(row[3]),
    )
)
items = st.lists(st.lists(options, min_size=1, max_size=3).map(tuple), min_size=1, max_size=5).map(
    lambda rows: [Item((f"a{n}",), row) for n, row in enumerate(rows)]
)


def every(found: list[Item]) -> list[Solution]:
    """All assignments, one by one."""
    return [
        Solution(
            sum(c.device for c in row),
            sum(c.host for c in row),
            sum(c.seconds for c in row),
            tuple(c.action for c in row),
        )
        for row in itertools.product(*(item.options for item in found))
    ]


@given(
    items, st.integers(0, 45), st.floats(0, 5), st.floats(0, 5), st.floats(0.1, 10), st.floats(0, 1)
)
def test_the_best_is_that_of_trying_all(found, room, forward, backward, link, exposed):
    costs = ActionCosts(forward, backward, link, exposed)
    best = solve(found, costs, room)
    fits = [one for one in every(found) if one.device <= room]
    assert (best is None) == (not fits)
    if best is not None:
        assert best.device <= room
        assert costs.seconds(best.host, best.again) == min(
            costs.seconds(one.host, one.again) for one in fits
        )


@given(items)
def test_nothing_on_the_frontier_is_beaten(found):
    left = frontier(found)
    for one in every(found):
        assert any(
            a.device <= one.device and a.host <= one.host and a.again <= one.again for a in left
        )


def test_transfers_hide_behind_compute_and_no_further():
    costs = ActionCosts(forward=2.0, backward=4.0, link=10.0)
    assert costs.seconds(20, 0.0) == 6.0  # 2 s out behind 2 s, 2 s in behind 4 s
    assert costs.seconds(50, 0.0) == 6.0 + 3.0 + 1.0
    assert costs.seconds(50, 1.0) == 6.0 + 1.0 + 3.0  # what is made again hides a transfer too
    assert costs.seconds(0, 0.0, moved=1.5) == 7.5
    exposed = costs._replace(exposed=0.25)
    assert exposed.seconds(20, 0.0) == 6.0 + 1.0  # a quarter of 2 s out and 2 s in
    assert exposed.seconds(50, 0.0) == costs.seconds(50, 0.0)  # more than that is waited for anyway


def test_what_is_made_again_costs_its_matmul():
    """LLaMA's up projection on fsdp=4 x tensor=2: B=16, S=64, D=64, F=256, two layers; and what it
    gathers again.
    """
    config = override(
        config_of("llama", fsdp=4, tensor=2), {"precision.compute": "bfloat16", "train.batch": 64}
    )
    plan = make_plan(config, jax.devices())
    peak = Hardware(hbm_bandwidth=1e30, host_link_bandwidth=1.0)
    found = {
        item.names[0]: item
        for item in items_of(
            experiment_of(config, plan),
            peak,
            offload=True,
        )
    }
    up = {option.action: option for option in found["up"].options}
    size = 64 * 64 * 256 * 2 // 8
    assert up["save"] == Option("save", 2 * size, 0, 0.0)
    assert up["offload"] == Option("offload", 0, 2 * size, 0.0)
    flops = 2 * (2 * 64 * 64 * 64 * 256) / 8
    assert up["recompute"].seconds == pytest.approx(flops / (0.6 * 1e12), rel=1e-9)
    assert {option.action for option in found["block_input"].options} == {"save", "offload"}
    assert found["attention_out"].names == ("attention_out", "attention_lse")
    assert all(len(item.options) == 2 or item.names[0] != "block_input" for item in found.values())


@pytest.mark.parametrize(
    ("family", "masks", "seen"),
    [
        ("bert", "full", 64),
        ("modernbert", "local(8)", 17),
        ("llama", "causal", 32),
        ("llama", "window(16)", 16 * (1 - 16 / 128)),
    ],
)
def test_attention_made_again_costs_what_its_mask_shows(
    family: str, masks: str, seen: float
) -> None:
    """4 FLOPs for each query, key that it sees and entry of the heads; the sequence has 64."""
    config = override(config_of(family), {"model.masks": (masks,), "data.seq_len": 64})
    experiment = experiment_of(config, make_plan(config, jax.devices()[:1]))
    sizes = config.model
    width = sizes.heads * sizes.head_size
    assert _attention_flops(experiment) == 4 * experiment.sequences * 64 * seen * width


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config_of("gpt2", data=2, context=2), marks=pytest.mark.slow),
        staged(config_of("llama", stage=2, fsdp=2), "1f1b", 4),
        override(
            config_of("llama", expert=2, tensor=2),
            {"model.experts": 4, "model.experts_per_token": 2},
        ),
    ],
    ids=["gpt2", "stages", "experts"],
)
def test_every_activation_of_a_plan_is_decided(config: Any) -> None:
    sizes = vars(config.mesh)
    count = (
        sizes["data"]
        * sizes["context"]
        * sizes["stage"]
        * sizes["fsdp"]
        * sizes["expert"]
        * sizes["tensor"]
    )
    plan = make_plan(config, jax.devices()[:count])
    hardware = load_target("v5p-8").hardware
    found = items_of(experiment_of(config, plan), hardware, offload=False)
    assert sorted(name for item in found for name in item.names) == sorted(
        one.name for one in activations(experiment_of(config, plan))
    )
    assert {option.action for item in found for option in item.options} == {"save", "recompute"}
    for item in found:
        for option in item.options:
            assert option.seconds > 0 if option.action == "recompute" else option.seconds == 0
    costs = costs_of(experiment_of(config, plan), hardware)
    assert costs.backward == 2 * costs.forward > 0 and 0 < costs.exposed < 1
