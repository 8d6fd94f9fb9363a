"""A published step as a config of ours: which settings it becomes, and which rows have none."""

from __future__ import annotations

import random
from typing import Any

import pytest
from bench.foresight.published import LLAMA, row_of
from damage import NONSENSE

from jaxpar.base.config.checks import check
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import describe, total_sizes
from jaxpar.bench.foresight.remat import POLICIES, kept_activations
from jaxpar.bench.foresight.rows import published_rows
from jaxpar.bench.foresight.translate import NotBuilt, Translation, translate


def keep_of(step: Translation) -> dict[str, str]:
    keep = vars(step.config.memory.keep)
    return {name: action for name, action in keep.items() if action != "policy"}


def mesh_of(step: Translation) -> str:
    return describe(total_sizes(step.config.mesh))


def test_a_llama_of_maxtext_is_one_of_ours() -> None:
    step = translate(row_of())
    model = step.config.model
    assert step.target.name == "v6e-8"
    assert (model.family, model.layers, model.kv_heads, model.tied_head) == ("llama", 32, 8, False)
    assert step.config.train.batch == 24 and step.config.data.seq_len == 8192
    assert step.config.precision.compute == "bfloat16"
    assert step.config.memory.policy == "full"
    assert keep_of(step) == {"block_input": "offload", "q": "save"}
    assert mesh_of(step) == "fsdp=8"


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({"model": "Llama-2-7b"}, "llama"),
        ({"model": "Mistral_7B"}, "llama"),
        ({"model": "qwen2.5-7b"}, "qwen2"),
        ({"model": "qwen3-14b"}, "qwen3"),
        ({"model": "gemma2-9b"}, "gemma2"),
        ({"model": "gemma-3-27b"}, "gemma3"),
        ({"model": "gpt3-52k", "kv_heads": 32}, "gpt2"),
        (
            {"model": "mine", "maxtext_keys": "decoder_block=mistral ici_fsdp_parallelism=8"},
            "llama",
        ),
        ({"model": "MaxText-8B"}, "llama"),  # three matrices in the MLP make 7.0B, two 5.1B
        ({"model": "MaxText-4B", "kv_heads": 32, "mlp": 8192}, "gpt2"),
    ],
)
def test_the_family_follows_from_the_name(changes: dict[str, Any], family: str) -> None:
    assert translate(row_of(**changes)).config.model.family == family


def test_experts_and_windows_come_with_the_name() -> None:
    mixtral = translate(row_of(model="mixtral-8x7b")).config.model
    assert (mixtral.experts, mixtral.experts_per_token) == (8, 2)
    assert translate(row_of(model="gemma3-12b")).config.model.masks.count("window(1024)") == 5


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": "deepseek3-671b"}, "latent attention"),
        ({"model": "llama4-17b-16e"}, "attention in chunks"),
        ({"model": "somebodys"}, "no family is known"),
        ({"chip": "v3"}, "no chip"),
        ({"quantization": "fp8"}, "matmuls in fp8"),
        ({"maxtext_keys": "int8_training=true ici_fsdp_parallelism=8"}, "matmuls in int8"),
        ({"maxtext_keys": "ici_fsdp_parallelism=8 weight_dtype=float8"}, "float32 and bfloat16"),
        ({"maxtext_keys": "model_name=llama3.1-8b"}, "mesh was not published"),
    ],
)
def test_a_row_that_has_no_step_here_says_why(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(NotBuilt) as found:
        translate(row_of(**changes))
    assert why in str(found.value)


@pytest.mark.parametrize(
    ("changes", "target", "mesh"),
    [
        (
            {"chips": 512, "slices": 2, "global_batch_seqs": 1536},
            "v6e-256x2",
            "data=2 x fsdp=256",
        ),
        (  # two JAX devices a chip, and less than a sequence for each
            {
                "chip": "tpu7x",
                "chips": 64,
                "per_device_batch_size": 0.125,
                "global_batch_seqs": 16,
                "maxtext_keys": "ici_fsdp_parallelism=-1 ici_context_parallelism=8",
            },
            "tpu7x-64",
            "fsdp=16 x context=8",
        ),
        (  # what is not said is filled in as MaxText does
            {
                "chip": "H100",
                "chips": 32,
                "slices": 4,
                "global_batch_seqs": 96,
                "maxtext_keys": "ici_tensor_parallelism=2",
            },
            "h100x32",
            "data=4 x fsdp=4 x tensor=2",
        ),
        (  # GPUs of several nodes whose mesh is given as one
            {
                "chip": "H100",
                "chips": 32,
                "global_batch_seqs": 96,
                "machine": "a3-highgpu-8g",
                "maxtext_keys": "",
                "ici": "ici:fsdp=16 data=2",
            },
            "h100x32@a3-highgpu-8g",
            "data=2 x fsdp=16",
        ),
        (
            {
                "chips": 16,
                "global_batch_seqs": "",
                "maxtext_keys": "ici_fsdp_parallelism=2 ici_fsdp_transpose_parallelism=-1",
            },
            "v6e-16",
            "fsdp=16",
        ),
        (
            {
                "chip": "v4",
                "chips": 512,
                "global_batch_seqs": 1536,
                "topology_shape": "v4:4x8x16",
            },
            "v4:4x8x16",
            "fsdp=512",
        ),
    ],
)
def test_the_mesh_is_that_of_the_row(changes: dict[str, Any], target: str, mesh: str) -> None:
    step = translate(row_of(**changes))
    assert step.target.name == target
    assert mesh_of(step) == mesh
    assert step.config.train.batch == (changes["global_batch_seqs"] or 48)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"maxtext_keys": "ici_fsdp_parallelism=3"}, "ici is 'fsdp=3'"),
        ({"maxtext_keys": "ici_fsdp_parallelism=-1 ici_tensor_parallelism=-1"}, "does not split"),
        ({"maxtext_keys": "ici_fsdp_parallelism=all"}, "write a whole number"),
        ({"global_batch_seqs": 25}, "global_batch_seqs is 25"),
        ({"global_batch_seqs": "", "per_device_batch_size": 0.1}, "no whole number"),
        ({"remat_policy": "some"}, "remat_policy is 'some'"),
        ({"maxtext_keys": "ici_fsdp_parallelism=8 context=keep"}, "remat_tensors, context"),
        ({"chips": 7}, "no v6e slice has 7 chips"),
        ({"slices": 3}, "does not divide"),
        ({"chip": "H100", "machine": "moon"}, "moon"),
        ({"layers": ""}, "layers is ''"),
        ({"config": "gpt2_124m train.batch"}, "config is 'train.batch'"),
        ({"config": "gpt2_125m"}, "gpt2_124m"),
    ],
)
def test_a_row_that_contradicts_itself_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as found:
        translate(row_of(**changes))
    assert said in str(found.value)


@pytest.mark.parametrize(
    ("policy", "ours", "kept"),
    [
        ("full", "full", ""),
        ("save_qkv_proj", "full", "q k v"),
        ("minimal", "full", "q k v mlp_input gate up"),
        ("minimal_flash", "attention_out", "q k v mlp_input gate up"),
        ("save_dot_except_mlp", "full", "q k v mlp_input"),
    ],
)
def test_a_policy_keeps_what_theirs_keeps(policy: str, ours: str, kept: str) -> None:
    found = kept_activations(policy, {}, normed=False, gated=True)
    assert found.pop("memory.policy") == ours
    assert found == {f"memory.keep.{name}": "save" for name in kept.split()}


def test_single_tensors_count_where_the_policy_is_custom() -> None:
    tensors = {"context": "offload", "decoder_layer_input": "device", "mlpwi": "remat"}
    found = kept_activations("custom", tensors, normed=False, gated=True)
    assert found == {"memory.policy": "attention_out", "memory.keep.attention_out": "offload"}
    assert kept_activations("full", tensors, False, True) == {"memory.policy": "full"}
    assert kept_activations("save_out_proj", {}, True, True)["memory.keep.attention_proj"] == "save"
    assert "memory.keep.gate" not in kept_activations("minimal", {}, False, gated=False)


def test_every_policy_is_accepted_by_every_family() -> None:
    for model in ("llama2-7b", "gpt3-22b", "gemma3-12b", "mixtral-8x7b"):
        for policy in POLICIES:
            changes = {"model": model, "remat_policy": policy}
            step = translate(row_of(**changes | {"kv_heads": 32}))
            assert check(step.config) == step.config


def test_what_differs_is_listed() -> None:
    keys = "ici_fsdp_transpose_parallelism=8 ici_fsdp_parallelism=1 sa_block_q=512 odd_one=7"
    step = translate(row_of(maxtext_keys=keys, attention="dot_product", remat_policy="full"))
    said = " ".join(step.differences)
    for words in ("a second axis", "scores of attention", "tiles of attention", "odd_one=7"):
        assert words in said


def test_a_row_of_ours_is_a_preset_with_changes() -> None:
    row = row_of(
        chip="H100",
        chips=1,
        config="gpt2_124m train.batch=8 train.accumulation=1 memory.policy=full",
    )
    step = translate(row)
    assert step.config.train.batch == 8 and step.config.memory.policy == "full"
    assert step.target.name == "h100x1" and step.differences == ()


def test_published_rows_have_a_step_or_a_reason() -> None:
    built = list[Translation]()
    for row in published_rows():
        try:
            built.append(translate(row))
        except NotBuilt as why:
            assert str(why)
    assert len(built) >= 43
    assert {step.target.chip for step in built} >= {"v4", "v5e", "v5p", "v6e", "tpu7x", "h100"}


def test_random_edits_of_a_row_end_in_a_step_or_in_one_line() -> None:
    random_ = random.Random(0)
    models = ("llama3.1-8b", "mixtral-8x7b", "gpt3-1b", "gemma3-12b")
    words = [
        *map(str, NONSENSE),
        "ici_fsdp_parallelism=0 ici_data_parallelism=-1",
        "ici_fsdp_parallelism=1e30",
        "dcn_pipeline_parallelism=-1",
        "num_experts=3 num_experts_per_tok=9 ici_fsdp_parallelism=8",
        "ici_fsdp_parallelism=8 capacity_factor=none",
        "ici_fsdp_parallelism=8 gradient_accumulation_steps=5",
        "mlp_activations=[] scan_layers= ici_expert_parallelism=8",
    ]
    cells = [str(value) for value in LLAMA.values()] + words
    refused = 0
    for _ in range(1000):
        changes = {
            random_.choice(list(LLAMA)): random_.choice(cells) for _ in range(random_.randint(1, 3))
        }
        try:
            translate(row_of(**{"model": random_.choice(models)} | changes))
        except UserError as why:
            refused += 1
            assert str(why)
    assert 100 < refused < 1000  # most edits are wrong, and some are not
