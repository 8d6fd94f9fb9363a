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
from jaxpar.base.layout.mesh import devices_needed
from jaxpar.plan.budget_space import Question, question_of
from jaxpar.plan.choose_remat import (
    ActionCosts,
    Item,
    Option,
    Solution,
    costs_of,
    fastest_actions,
    frontier,
    items_of,
    solve,
)
from jaxpar.plan.closed_form import step_shapes
from jaxpar.plan.closed_form.rates import rates_of
from jaxpar.plan.closed_form.work import block_matmuls
from jaxpar.rehearse.targets import load_target
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
    best = solve(frontier(found), costs, room)
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
    costs = ActionCosts(forward=2.0, backward=4.0, link=10.0, exposed=0.0)
    assert costs.seconds(20, 0.0) == 6.0  # 2 s out behind 2 s, 2 s in behind 4 s
    assert costs.seconds(50, 0.0) == 6.0 + 3.0 + 1.0
    assert costs.seconds(50, 1.0) == 6.0 + 1.0 + 3.0  # what is made again hides a transfer too
    exposed = costs._replace(exposed=0.25)
    assert exposed.seconds(20, 0.0) == 6.0 + 1.0  # a quarter of 2 s out and 2 s in
    assert exposed.seconds(50, 0.0) == costs.seconds(50, 0.0)  # more than that is waited for anyway


def test_what_is_made_again_costs_its_matmul():
    """LLaMA's up projection on fsdp=4 x tensor=2: B=16, S=64, D=64, F=256, two layers."""
    config = override(
        config_of("llama", fsdp=4, tensor=2), {"precision.compute": "bfloat16", "train.batch": 64}
    )
    target = load_target("v5p-8")
    question = asked(config, target)
    found = {item.names[0]: item for item in _items(question, offload=True)}
    up = {option.action: option for option in found["up"].options}
    size = 64 * 64 * 256 * 2 // 8
    assert up["save"] == Option("save", 2 * size, 0, 0.0)
    assert up["offload"] == Option("offload", 0, 2 * size, 0.0)
    shapes = step_shapes(config)
    (matmul,) = (one for one in block_matmuls(shapes, question.base) if one.name == "up")
    assert matmul.flops == 2 * (64 * 64 * 64 * 256) / 8
    rates = rates_of(target, "bfloat16", shapes.head_dim, shapes.keys)
    assert up["recompute"].seconds == pytest.approx(2 * matmul.seconds(rates, 2), rel=1e-6)
    assert {option.action for option in found["block_input"].options} == {"save", "offload"}
    assert found["attention_out"].names == ("attention_out", "attention_lse")
    assert all(len(item.options) == 2 or item.names[0] != "block_input" for item in found.values())


def asked(config: Any, target: Any) -> Question:
    """What a budget asks of a config on as many simulated devices as its mesh has."""
    devices = jax.devices()[: devices_needed(config.mesh)]
    experiment = experiment_of(config, make_plan(config, devices))
    return question_of(experiment, target.platform, target.hardware, target)


def _items(question: Question, offload: bool) -> list[Item]:
    return list(items_of(question.base, question.names, question.price, offload))


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
    question = asked(config, load_target("v5p-8"))
    found = _items(question, offload=False)
    names = [name for item in found for name in item.names]
    assert sorted(names) == sorted(question.names)
    assert {option.action for item in found for option in item.options} == {"save", "recompute"}
    for item in found:
        for option in item.options:
            assert option.seconds > 0 if option.action == "recompute" else option.seconds == 0
    costs = costs_of(question.base, found, question.price)
    assert costs.backward == 2 * costs.forward > 0 and 0 < costs.exposed < 1


def test_the_fastest_actions_fit_and_none_that_fits_is_faster() -> None:
    """By the closed forms as a whole, beside every policy."""
    question = asked(config_of("llama", fsdp=4), load_target("v5p-8"))
    whole = question.price(question.base._replace(policy="none")).bytes.total
    least = question.price(question.base).bytes.total
    for share in (0.2, 0.5, 0.9, 1.5):
        room = least + share * (whole - least)
        found = fastest_actions(question.base, question.names, question.price, room, False)
        assert found is not None and found.bytes <= room
        for policy in ("dots", "attention_out", "selective", "full"):
            other = question.price(question.base._replace(policy=policy))
            assert other.bytes.total > room or other.seconds >= (1 - 1e-9) * found.seconds
    assert (
        fastest_actions(question.base, question.names, question.price, 0.9 * least, False) is None
    )
