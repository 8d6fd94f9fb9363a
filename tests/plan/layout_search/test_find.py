"""The search as a whole, around made-up closed forms and rehearsals."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from made_up_prices import made_up, rehearsals
from tiers import MARKS, third_quick

from jaxpar.base.config import Config, load_config, override
from jaxpar.base.config.checks import check
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MESH_AXES
from jaxpar.models import OwnModel
from jaxpar.plan.candidate import Candidate, candidate_of
from jaxpar.plan.layout_search import Answer, search
from jaxpar.plan.layout_search.request import USES, Request
from jaxpar.rehearse.targets import check_mesh, load_target
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment

GIB = 2**30
EIGHT_B = load_config("llama3_8b")


def find(config: Config | Experiment = EIGHT_B, target: str = "v5p-8", **options: Any) -> Answer:
    """Search by the made-up closed forms alone, unless rehearsals are asked for."""
    usual = {"rehearsals": 0, "verify": False, "price_of": made_up, "workers": 1}
    options = usual | options
    return search(config, target, **options)


def rehearsed(**options: Any) -> tuple[Answer, list[Candidate]]:
    """Search with rehearsals that differ from the closed forms; also what was rehearsed."""
    config = override(EIGHT_B, {"train.batch": 16})
    seen = list[Candidate]()
    request = Request(config, load_target("v5p-8"), 95 * GIB)
    measure = rehearsals(lambda: request, seen=seen, **options)
    return find(config, rehearsals=6, measure=measure), seen


def test_the_config_that_is_found_is_whole_and_fits_the_target() -> None:
    answer = find(sequences=16)
    assert answer.config is not None and answer.best is not None
    check(answer.config)
    check_mesh(answer.config.mesh, answer.request.target)
    assert candidate_of(answer.config) == answer.best.candidate
    assert answer.config.train.batch == 16
    assert answer.config.model == EIGHT_B.model


def test_nothing_is_offloaded_recomputed_or_piped_where_the_run_fits_without() -> None:
    """The made-up prices make each of them slower, as the closed forms do."""
    answer = find(sequences=16)
    assert answer.best is not None
    uses = {name for name, does in USES.items() if does(answer.best.candidate)}
    assert not uses & {"offload", "recompute", "pipeline"}
    assert answer.best.bytes <= answer.request.budget


def test_less_memory_is_met_by_recomputation_before_offload() -> None:
    roomy = find(sequences=16, fixed={"fsdp": 8})
    tight = find(sequences=16, fixed={"fsdp": 8}, budget=20 * GIB)
    assert roomy.best is not None and tight.best is not None
    assert roomy.best.candidate.policy == "none"
    assert tight.best.candidate.policy != "none"
    assert tight.best.candidate.optimizer == "device"
    assert tight.best.bytes <= 18 * GIB


def test_where_nothing_fits_the_answer_says_by_how_much_and_what_would_help() -> None:
    answer = find(target="v5e-4", sequences=4, forbidden=["offload"])
    assert answer.best is None and answer.config is None
    nearest = answer.refused["memory"].nearest
    assert nearest.unit == "bytes" and nearest.by_how_much > GIB
    assert nearest.what_would_help
    json.dumps(answer.to_json(), allow_nan=False)


def test_a_batch_of_too_few_sequences_is_data_too() -> None:
    answer = find(sequences=6, fixed={"fsdp": 8})
    assert answer.best is None
    batch = answer.refused["batch"].nearest
    assert (batch.by_how_much, batch.unit) == (2, "sequences")
    assert "8 data ranks" in batch.what


FIXED = {
    "tensor": 4,
    "mesh.fsdp": 8,
    "memory.policy": "full",
    "memory.optimizer": "offload",
    "train.accumulation": 2,
    "memory.loss_mib": 512,
    "stage": 4,
    "precision.moments": "bfloat16",
    "model.scan_layers": False,
}


@pytest.mark.parametrize("key", third_quick(FIXED))
def test_a_fixed_choice_is_kept(key: str) -> None:
    value = FIXED[key]
    answer = find(sequences=16, fixed={key: value})
    assert answer.config is not None
    dotted = key if "." in key else f"mesh.{key}"
    section, _, name = dotted.rpartition(".")
    table: Any = answer.config
    for part in section.split("."):
        table = getattr(table, part)
    assert getattr(table, name) == value


@pytest.mark.parametrize(
    "name", third_quick(["tensor", "context", "fsdp", "data", "accumulation", "recompute"])
)
def test_what_is_forbidden_is_not_used(name: str) -> None:
    answer = find(sequences=16, forbidden=[name])
    assert answer.best is not None
    assert not USES[name](answer.best.candidate)


def test_slices_and_nodes_are_spanned_as_the_target_has_them() -> None:
    for target in ("v5p-4x2", "h100x16"):
        answer = find(target=target, sequences=16)
        assert answer.config is not None
        check_mesh(answer.config.mesh, answer.request.target)
        assert answer.config.mesh.distributed


def test_tokens_are_whole_sequences() -> None:
    assert find(tokens=2**20).request.sequences == 128
    with pytest.raises(UserError, match="no whole number of"):
        find(tokens=10_000)


def test_experts_are_split_where_there_are_some() -> None:
    config = load_config("mixtral_8x7b")
    answer = find(config, "v5p-32", sequences=32, fixed={"expert": 8})
    assert answer.best is not None and answer.best.candidate.size("expert") == 8
    dense = find(sequences=16)
    assert dense.best is not None and dense.best.candidate.size("expert") == 1


ONE_DEVICE = {f"mesh.{axis}": 1 for axis in MESH_AXES}


def test_an_experiment_is_planned_with_what_is_its_own() -> None:
    config = override(load_config("tiny"), ONE_DEVICE | {"train.batch": 16})
    devices = jax.devices()[:1]
    plain = make_experiment(config, devices)
    own = make_experiment(config, devices, optimizer=optax.sgd(0.1))
    of_config, of_plain, of_own = (find(one, "v5e-8") for one in (config, plain, own))
    assert of_plain.config == of_config.config and of_plain.request.experiment is None
    assert of_own.config is not None and of_own.config.memory.optimizer == "device"
    kept = of_own.request.experiment
    assert kept is not None and kept.own_optimizer is own.own_optimizer


def test_a_model_that_is_one_function_is_refused() -> None:
    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"table": jax.random.normal(key, (256, 8))}

    def loss_of(params: Any, batch: Any, layout: Any, key: Any) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(params["table"][batch["tokens"]]), jnp.float32(batch["labels"].size)

    model = OwnModel("Table", init, loss_of, {"table": ("vocab", None)}, 256, 64)
    config = override(load_config("tiny"), ONE_DEVICE | {"data.seq_len": 64})
    experiment = make_experiment(config, jax.devices()[:1], model=model)
    with pytest.raises(UserError, match="this model is one"):
        find(experiment, "v5e-8")


# What rehearsals change.


def test_the_winner_is_the_fastest_that_was_rehearsed() -> None:
    answer, seen = rehearsed(slower=lambda one: 1.5 if one.size("tensor") > 1 else 1.05)
    assert answer.best is not None and answer.best.figures is not None
    assert answer.best.candidate.size("tensor") == 1
    assert 2 <= len(seen) <= 6
    fits = [one.figures.step for one in answer.rehearsed if one.figures is not None]
    assert answer.best.seconds == min(fits)


def test_no_plan_is_rehearsed_that_is_clearly_slower() -> None:
    """With `tensor` forbidden to be fast, only plans without it are within what is unsure."""
    answer, seen = rehearsed(slower=lambda one: 2.0 if one.size("tensor") > 1 else 1.0)
    assert answer.best is not None
    assert len(seen) == len(set(seen)) <= 6
    assert sum(one.size("tensor") > 1 for one in seen) <= 2


def test_a_plan_that_turns_out_too_large_gives_way() -> None:
    answer, seen = rehearsed(larger=40 * GIB)
    assert answer.best is not None and answer.best.figures is not None
    assert answer.best.figures.memory <= answer.request.budget
    assert any(one.refused for one in answer.rehearsed) or len(seen) <= 2


# What is said.


def test_others_lost_for_a_reason_and_are_counted() -> None:
    answer = find(sequences=16, fixed={"tensor": 1, "context": 1})
    assert answer.lost and all(group.times >= 0.99 and group.why for group in answer.lost)
    assert sum(group.plans for group in answer.lost) < answer.count
    assert answer.priced < answer.count


def test_what_would_change_the_choice_is_looked_at() -> None:
    answer = find(sequences=16)
    said = {changed.what.split(",")[0] for changed in answer.changed}
    assert {"twice the batch", "half the batch", "half the memory"} <= said


def test_the_days_and_the_cost_follow_from_the_steps() -> None:
    answer = find(sequences=16, chip_hour=4.0)
    assert answer.best is not None
    seconds = answer.best.seconds * EIGHT_B.train.steps
    assert answer.days == pytest.approx(seconds / 86400)
    assert answer.cost == pytest.approx(seconds / 3600 * 8 * 4.0)


WRONG = {
    "sequences": [1, 3, 7, 64, 100, 2**20],
    "tokens": [1, 8192, 2**20, 10**9],
    "budget": [1, GIB, 16 * GIB, 10**14],
    "forbidden": [["offload"], ["tensor", "fsdp"], ["nothing"], list(USES), ["data", "data"]],
    "may": [["moments"], ["anything"]],
    "fixed": [
        {"tensor": 8},
        {"tensor": 3},
        {"tensor": 0},
        {"mesh.dcn.data": 2},
        {"mesh.dcn.data": 64},
        {"memory.policy": "full"},
        {"memory.policy": "some"},
        {"memory.loss_mib": -1},
        {"memory.optimizer": "host"},
        {"train.accumulation": 5},
        {"train.accumulation": 0},
        {"stage": 4, "pipeline.schedule": "interleaved"},
        {"stage": 4, "pipeline.microbatches": 3},
        {"pipeline.virtual": 7, "stage": 2},
        {"pipeline.schedule": "zigzag", "stage": 2},
        {"zero": True},
        {"model.layers": 4},
        {"expert": 2},
        dict.fromkeys(MESH_AXES, 2),
    ],
}
TARGETS = ["v5e-8", "v5p-16", "h100x16", "h100x1", "v5e-4x2", "v5e-1"]
PRESETS = ["tiny", "tiny_moe", "tiny_bert", "gpt2_124m", "llama32_1b"]


@pytest.mark.parametrize("count", [12, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_request_ends_in_a_traceback(count: int) -> None:
    """Each of many random requests has an answer, or a line that says what is wrong."""
    draw = random.Random(45)
    answered = 0
    for _ in range(count):
        config = load_config(draw.choice(PRESETS))
        names = draw.sample(sorted(WRONG), draw.randint(0, 3))
        options = {name: draw.choice(WRONG[name]) for name in names}
        try:
            answer = find(config, draw.choice(TARGETS), **options)
        except UserError as error:
            assert len(str(error).splitlines()) == 1
            continue
        answered += 1
        json.dumps(answer.to_json(), allow_nan=False)
        assert answer.best is not None or answer.refused
    assert answered > count / 4


def test_every_field_of_an_answer_is_written() -> None:
    answer = find(sequences=16)
    written = answer.to_json()
    for field in dataclasses.fields(Answer):
        if field.name in ("points", "request", "chip_hour", "count", "priced", "ranked_in", "took"):
            continue
        assert field.name in written


@pytest.mark.slow
@pytest.mark.parametrize("target", [pytest.param("v5e-4", marks=MARKS["tpu"])])
def test_the_winner_is_rehearsed_by_the_targets_compiler_and_verified(
    target: str, tmp_path: Path
) -> None:
    config = override(load_config("tiny"), {"train.batch": 16, "model.layers": 2})
    answer = search(config, target, rehearsals=2, folder=tmp_path)
    assert answer.best is not None and answer.best.figures is not None
    assert answer.best.figures.memory <= answer.request.budget
    assert answer.verified is not None and answer.verified.equal
    again = search(config, target, rehearsals=2, folder=tmp_path, verify=False)
    assert again.best == answer.best
