"""What a device computes by shape alone, beside the model's own count of FLOPs."""

from __future__ import annotations

from typing import Any

import pytest
from traced_steps import config_of, staged

from jaxpar.base.config import Config, override
from jaxpar.plan.candidate import Candidate, candidate_of
from jaxpar.plan.closed_form import step_shapes
from jaxpar.plan.closed_form.shapes import StepShapes
from jaxpar.plan.closed_form.ticks import layers_a_tick, ticks_of
from jaxpar.plan.closed_form.work import attention_flops, block_matmuls, loss_work

HALF: dict[str, Any] = {"compute": "bfloat16"}
WHOLE_VOCABULARY = {"model.vocab_size": 512}
FAMILIES = {
    "llama": config_of("llama", **HALF),
    "gpt2": config_of("gpt2", **HALF),
    "gemma2": config_of("gemma2", **HALF),
    "experts": override(
        config_of("llama", **HALF), {"model.experts": 4, "model.experts_per_token": 2}
    ),
}


def flops_of(shapes: StepShapes, candidate: Candidate) -> float:
    """The FLOPs of all devices in a step: each matmul has two more in the backward, and so has
    attention.
    """
    layers = layers_a_tick(shapes, candidate) * candidate.virtual
    block = sum(one.flops for one in block_matmuls(shapes, candidate))
    block += attention_flops(shapes, candidate)
    loss = loss_work(shapes, candidate).matmul.flops
    runs = candidate.accumulation * candidate.microbatches
    return 3 * candidate.devices * runs * (layers * block + loss)


def model_flops(shapes: StepShapes) -> float:
    """The model's FLOPs without those of norms and biases, which are no matmuls, and with the mean
    number of keys in place of all that a mask reaches.
    """
    vectors = sum(
        one.entries * max(one.layers, 1)
        for one in shapes.parameters
        if one.part in ("blocks", "head") and not one.matrix
    )
    reach = float(shapes.seq_len)  # a causal mask's, by the rules of `Model.flops_per_token`
    heads = shapes.heads * shapes.head_dim
    more = 12.0 * heads * (shapes.keys - reach) * shapes.layers
    return shapes.model_flops + (more - 6 * vectors) * shapes.tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mesh", [(1, 1, 1, 1, 1, 1), (1, 2, 2, 1, 1, 2), (2, 1, 2, 1, 1, 2)])
def test_all_devices_compute_what_the_model_does(family, mesh):
    config = override(FAMILIES[family], WHOLE_VOCABULARY)
    shapes = step_shapes(config)
    candidate = Candidate(mesh=mesh, microbatches=2 if mesh[0] > 1 else 1)
    assert flops_of(shapes, candidate) == pytest.approx(model_flops(shapes))


def test_copied_kv_heads_are_made_on_each_device():
    """Four devices have one query head each, and two of them the same kv head."""
    shapes = step_shapes(config_of("llama", **HALF))
    split = block_matmuls(shapes, Candidate(mesh=(1, 1, 1, 1, 1, 4)))
    columns = {one.name: one.columns for one in split}
    assert columns["q"] == columns["k"] == columns["v"] == shapes.head_dim


def test_a_long_pipelines_ticks_go_on_as_a_short_ones():
    """The ticks of many microbatches are extrapolated; they are those of the table."""
    from jaxpar.plan.closed_form.ticks import _count

    for name, virtual in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2)):
        candidate = Candidate(
            mesh=(4, 1, 1, 1, 1, 1), microbatches=36, schedule=name, virtual=virtual
        )
        assert ticks_of(candidate) == _count(name, 4, 36, virtual)


def test_the_last_layers_of_uneven_stages_count_as_places():
    config: Config = staged(config_of("llama", "full", stage=4, **HALF), "1f1b", 4)
    shapes = step_shapes(override(config, {"model.layers": 6}))
    assert layers_a_tick(shapes, candidate_of(config)) == 2


@pytest.mark.parametrize(
    ("family", "masks", "seen"),
    [
        ("bert", "full", 64),
        ("modernbert", "local(8)", 17),
        ("llama", "causal", 32),
        ("llama", "window(16)", 16 * (1 - 16 / 128)),
    ],
)
def test_attention_costs_what_its_mask_shows(family: str, masks: str, seen: float) -> None:
    """4 FLOPs for each query, key that it sees and entry of the heads; the sequence has 64."""
    config = override(config_of(family), {"model.masks": (masks,), "data.seq_len": 64})
    sizes = config.model
    width = sizes.heads * sizes.head_size
    flops = attention_flops(step_shapes(config), Candidate())
    assert flops == 4 * config.train.batch * 64 * seen * width
