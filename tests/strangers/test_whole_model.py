"""A whole model of a stranger's through verify, train, checkpoints, resume and memory."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import whole_model
from flax import nnx
from whole_model import VOCAB, Mixer, config_on, mixer

import jaxpar
from jaxpar import plan, train, verify
from jaxpar.base.config import override
from jaxpar.base.errors import UserError
from jaxpar.base.layout.placements import local_bytes
from jaxpar.models import OwnModel, nnx_model
from jaxpar.train.batch import put_batch
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import plan_notes
from jaxpar.train.optimizer import decay_mask
from jaxpar.train.restore import load_run
from jaxpar.train.step import init_state, make_train_step

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.slow
def test_its_gradients_are_those_of_one_device() -> None:
    experiment = jaxpar.make_experiment(config_on(**MESH), model=mixer())
    found = verify.config(experiment, jax.devices())
    assert found.equal, str(found)
    assert {row.name for row in found.checks[0].rows} >= {"embed.embedding", "layers.1.up.kernel"}


def test_a_wrong_collective_of_its_own_is_found() -> None:
    good = mixer()

    def halved(params, batch, layout, key):
        nll, tokens = good.loss_of(params, batch, layout, key)
        return nll * (0.5 if layout.size("mlp") > 1 else 1.0), tokens

    wrong = OwnModel("Halved", good.init_params, halved, good.axes, 256, 64)
    found = verify.config(jaxpar.make_experiment(config_on(**MESH), model=wrong), jax.devices())
    assert not found.equal


def test_a_logical_axis_of_its_own_is_known_where_it_is_verified() -> None:
    good = mixer()

    def apart(params, batch, layout, key):
        table = layout.constrain(params["embed"]["embedding"], ("ways", None))
        embed = {**params["embed"], "embedding": table}
        return good.loss_of({**params, "embed": embed}, batch, layout, key)

    model = OwnModel("Apart", good.init_params, apart, good.axes, 256, 64)
    config = override(config_on(**MESH), {"rules.own": ("ways=fsdp,tensor",)})
    assert verify.config(jaxpar.make_experiment(config, model=model), jax.devices()).equal


def test_given_parameters_are_cast_to_the_dtype_that_is_stored() -> None:
    config = override(config_on(), {"precision.params": "bfloat16"})
    experiment = jaxpar.make_experiment(config, jax.devices()[:1], model=mixer())
    model = experiment.model
    given = model.init(jax.random.key(0))
    made = init_state(Experiment(experiment.config, model, experiment.plan), given).params
    wanted = jax.tree.map(lambda leaf: leaf.dtype, experiment.state.params)
    assert jax.tree.map(lambda leaf: leaf.dtype, made) == wanted
    assert jnp.bfloat16 in jax.tree.leaves(wanted)


def test_it_is_laid_out_by_its_names() -> None:
    experiment = jaxpar.make_experiment(config_on(**MESH), model=mixer())
    params = experiment.state.params
    up = params["layers"]["0"]["up"]["kernel"]
    assert tuple(up.sharding.spec) == ("fsdp", "tensor") and up.shape == (32, 48)
    assert params["layers"]["0"]["norm"]["scale"].sharding.is_fully_replicated
    parts = {part.name: part.device for part in plan.memory_account(experiment, "tpu")}
    assert parts["parameters"] == local_bytes(params)
    assert experiment.config.model.family == "Mixer"


def _stack() -> OwnModel:
    """A list of blocks by the name that our stacked layers have."""

    def init(key: jax.Array) -> dict:
        return {
            "table": 0.1 * jax.random.normal(key, (256, 8)),
            "blocks": {
                "0": {"w": 0.1 * jax.random.normal(key, (8, 16))},
                "1": {"w": 0.1 * jax.random.normal(key, (16, 256))},
            },
        }

    def loss_of(params, batch, layout, key):
        x = params["table"][batch["tokens"]] @ params["blocks"]["0"]["w"]
        log_probs = jax.nn.log_softmax(x @ params["blocks"]["1"]["w"])
        picked = jnp.take_along_axis(log_probs, batch["labels"][..., None], axis=-1)
        return -jnp.sum(picked), jnp.float32(batch["labels"].size)

    pair = {"w": (None, "mlp")}
    axes = {"table": ("vocab", None), "blocks": {"0": pair, "1": pair}}
    return OwnModel("Stack", init, loss_of, axes, 256, 64)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_list_of_blocks_is_not_updated_as_stacked_layers(name: str) -> None:
    """With the state in host memory, which for the library's blocks goes layer by layer."""
    changes = {"optimizer.name": name, "train.learning_rate": 1e-2}
    ids = np.random.default_rng(0).integers(0, 256, (16, 33), np.int32)
    batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:]}
    after = []
    for place in ("device", "offload"):
        config = jaxpar.override(config_on(), changes | {"memory.optimizer": place})
        one = jaxpar.make_experiment(config, jax.devices()[:1], model=_stack())
        state = init_state(one)
        step = make_train_step(one)
        after.append(step(state, put_batch(batch, one.plan))[0].params)
    # The same numbers up to rounding, of entries of 0.1 that a step moves by up to 5e-3.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), *after)


@pytest.mark.slow
def test_it_trains_and_goes_on_on_another_mesh(tmp_path: Path) -> None:
    whole = config_on(**MESH)
    first = jaxpar.override(whole, {"train.stop_at": 4})
    train.run(jaxpar.make_experiment(first, model=mixer()), tmp_path / "moved")
    other = config_on(fsdp=4, tensor=2)
    train.run(jaxpar.make_experiment(other, model=mixer()), tmp_path / "moved")
    straight = train.run(jaxpar.make_experiment(whole, model=mixer()), tmp_path / "straight")
    losses = {
        run: [
            json.loads(line)["loss"]
            for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()
            if "loss" in json.loads(line)
        ]
        for run in ("moved", "straight")
    }
    # Another mesh adds in another order: a few ulps of a loss of 5, over four steps.
    np.testing.assert_allclose(losses["moved"], losses["straight"], rtol=1e-5)
    assert straight.loss is not None and losses["straight"][-1] < losses["straight"][0]
    experiment = jaxpar.make_experiment(other, model=mixer())
    step, params = load_run(tmp_path / "moved", 8, experiment)
    assert step == 8 and tuple(params["embed"]["embedding"].sharding.spec) == ("tensor", "fsdp")
    with pytest.raises(UserError, match=r"no model family 'Mixer'.* make_experiment.config, model"):
        train.open_trained(tmp_path / "moved")
    ours = config_on(fsdp=4, tensor=2)
    with pytest.raises(UserError, match=r"run of Mixer, .*give make_experiment"):
        train.run(ours, tmp_path / "moved")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mesh.stage": 2, "mesh.data": 4}, "mesh.stage: Mixer"),
        ({"memory.policy": "full"}, "memory.policy: Mixer"),
        ({"train.z_loss": 1e-4}, "train.z_loss: Mixer"),
        ({"mesh.tensor": 8, "mesh.data": 1, "data.seq_len": 65}, "65"),
    ],
)
def test_what_it_has_not_is_refused(changes: dict[str, object], said: str) -> None:
    config = jaxpar.override(config_on(data=8), changes)
    with pytest.raises(UserError, match=said):
        jaxpar.make_experiment(config, model=mixer())


def _returning(found: object) -> OwnModel:
    good = mixer()
    return OwnModel("Mine", good.init_params, lambda *_: found, good.axes, 256, 64)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (jnp.float32(1), r"and returned an array of shape \(\)"),
        ((jnp.ones(3), jnp.float32(1)), r"2 values: an array of shape \(3,\), an array of shape"),
        ((jnp.float32(1), 2, 3), "3 values"),
        (None, "returned None"),
    ],
)
def test_a_loss_returns_a_sum_and_a_count(found: object, said: str) -> None:
    layout = jaxpar.Layout(jaxpar.make_mesh(devices=jax.devices()[:1]))
    with pytest.raises(UserError, match=f"Mine: loss returns.*{said}"):
        _returning(found).loss({}, {}, layout)  # pyright: ignore[reportArgumentType]


def test_functions_that_take_other_arguments_are_refused() -> None:
    good = mixer()
    with pytest.raises(
        UserError,
        match=r"loss is called as loss\(module, batch, layout, key\), .* takes \(module, batch, key\)",
    ):
        nnx_model(Mixer, lambda module, batch, key: (0.0, 0), vocab_size=256, max_seq_len=64)
    with pytest.raises(UserError, match=r"make\(rngs\), by position, .* takes \(\)"):
        nnx_model(lambda: None, whole_model.loss, vocab_size=256, max_seq_len=64)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        UserError, match=r"loss_of\(params, batch, layout, key\), .* takes \(p, b\)"
    ):
        OwnModel("Mine", good.init_params, lambda p, b: (0.0, 0), good.axes, 256, 64)  # pyright: ignore[reportArgumentType]
    # one that takes any arguments, or whose last has a default, is called as any other
    OwnModel("Mine", good.init_params, lambda p, b, *rest: (0.0, 0), good.axes, 256, 64)


def test_parameters_in_another_dtype_are_refused() -> None:
    """They would be trained in that of the config, by a step that was compiled for theirs."""

    def half(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Linear(8, 8, param_dtype=jnp.bfloat16, rngs=rngs)

    said = r"is bfloat16: declare it in float32 .param_dtype.; precision.params=bfloat16 keeps"
    with pytest.raises(UserError, match=rf"Linear.(bias|kernel) {said}"):
        nnx_model(half, whole_model.loss, vocab_size=256, max_seq_len=64)

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"w": jnp.zeros((8, 8), jnp.bfloat16)}

    with pytest.raises(UserError, match=f"Mine: w {said}"):
        OwnModel("Mine", init, lambda p, b, *rest: (0.0, 0), {"w": (None, None)}, 256, 64)  # pyright: ignore[reportArgumentType]


def _stacked(named: bool = True) -> OwnModel:
    """Blocks that `nnx.vmap` stacks, of which one kernel has names, or nothing has."""

    def make(rngs: nnx.Rngs) -> nnx.Module:
        @nnx.split_rngs(splits=3)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def blocks(rngs: nnx.Rngs) -> nnx.Module:
            kernel = nnx.initializers.lecun_normal()
            if named:
                kernel = nnx.with_partitioning(kernel, ("embed", "mlp"))
            up = nnx.Linear(8, 16, kernel_init=kernel, rngs=rngs)
            return nnx.Dict(norm=nnx.RMSNorm(8, rngs=rngs), up=up, out=nnx.Linear(8, 3, rngs=rngs))

        table = nnx.with_partitioning(nnx.initializers.normal(0.5), ("vocab", "embed"))
        embed = nnx.Embed(VOCAB, 8, embedding_init=table, rngs=rngs)
        return nnx.Dict(embed=embed, blocks=blocks(rngs), norm=nnx.RMSNorm(8, rngs=rngs))

    return nnx_model(make, whole_model.loss, vocab_size=VOCAB, max_seq_len=64, name="Stacked")


def test_vectors_that_vmap_stacks_do_not_decay() -> None:
    """Flax names the stack of what has names only; what has none was stacked beside it."""
    blocks = _stacked().axes["blocks"]
    assert blocks["up"] == {"kernel": ("layers", "embed", "mlp"), "bias": ("layers", None)}
    assert blocks["norm"]["scale"] == ("layers", None)
    assert blocks["out"] == {"kernel": ("layers", None, None), "bias": ("layers", None)}
    decayed = decay_mask(_stacked().axes)
    assert decayed["embed"]["embedding"] and not decayed["norm"]["scale"]
    assert decayed["blocks"] == {
        "norm": {"scale": False},
        "up": {"kernel": True, "bias": False},
        "out": {"kernel": True, "bias": False},
    }


def test_it_is_said_what_decays_without_names() -> None:
    """Where nothing says which dim is the stack."""
    notes = []
    for named in (True, False):
        model = _stacked(named)
        experiment = jaxpar.make_experiment(config_on(), jax.devices()[:1], model=model)
        notes.append([note for note in plan_notes(experiment) if "weight_decay" in note])
    assert notes[0] == [] and len(notes[1]) == 1
    assert (
        "optimizer.adamw.weight_decay=0.1 takes blocks.norm.scale, blocks.out.bias, "
        "blocks.up.bias for matrices" in notes[1][0]
    )
    no_decay = jaxpar.override(config_on(), {"optimizer.adamw.weight_decay": 0.0})
    experiment = jaxpar.make_experiment(no_decay, jax.devices()[:1], model=_stacked(False))
    assert not any("weight_decay" in note for note in plan_notes(experiment))


def test_a_count_of_a_loss_in_16_bits_is_not_rounded() -> None:
    layout = jaxpar.Layout(jaxpar.make_mesh(devices=jax.devices()[:1]))
    model = _returning((jnp.bfloat16(2.5), jnp.int32(100_001)))
    sums = model.loss({}, {}, layout)  # pyright: ignore[reportArgumentType]
    assert (float(sums.loss), float(sums.tokens)) == (2.5, 100_001)


def test_axes_are_held_against_the_parameters() -> None:
    good = mixer()
    axes = {**good.axes, "more": (None,)}
    with pytest.raises(UserError, match="axes of more"):
        OwnModel("Mixer", good.init_params, good.loss_of, axes, 256, 64)
    with pytest.raises(UserError, match=r"embed.embedding of shape \(256, 32\) has the axes None"):
        OwnModel("Mixer", good.init_params, good.loss_of, {}, 256, 64)
