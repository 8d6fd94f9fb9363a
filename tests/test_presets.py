"""The experiments of `jaxpar.configs`: they parse, they are what their names promise, and their
batches divide.
"""

import tomllib

import pytest

from jaxpar.base.config import Config, ModelConfig, load_config, parse
from jaxpar.base.config.checks import check
from jaxpar.base.layout.mesh import axis_sizes, devices_needed, resolve
from jaxpar.base.toml import presets, to_toml

CONFIGS = presets("jaxpar.configs")

# Of the published checkpoints on Hugging Face, tied heads counted once.
PUBLISHED = {
    "gpt2_124m": 124_439_808,
    "gpt2_355m": 354_823_168,
    "gpt2_774m": 774_030_080,
    "gpt2_1558m": 1_557_611_200,
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "llama3_8b_1m": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama32_1b": 1_235_814_400,
    "mixtral_8x7b": 46_702_792_704,
    "mistral_7b": 7_241_732_096,
    "qwen25_7b": 7_615_616_512,
    "qwen3_8b": 8_190_735_360,
    "gemma2_9b": 9_241_705_984,
    "gemma3_1b": 999_885_952,
    "bert_base": 109_514_298,
    "modernbert_base": 149_655_232 + 768,  # the first layer's norm of attention is not used
}

every_config = pytest.mark.parametrize("name", CONFIGS)


def parameters(model: ModelConfig) -> int:
    """Parameters of the published model, by arithmetic alone: the vocabulary is not padded."""
    V = model.vocab_size
    L = model.layers
    D = model.embed
    F = model.mlp
    H = model.heads
    h = model.head_dim or D // H
    K = model.kv_heads or H
    matrices = 2 * D * H * h + 2 * D * K * h  # q and out, k and v
    if model.family == "gpt2":
        biases = (H + 2 * K) * h + D + F + D
        block = matrices + 2 * D * F + biases + 4 * D  # two LayerNorms, scale and bias
        outside = model.max_seq_len * D + 2 * D
    elif model.family == "bert":
        biases = (H + 2 * K) * h + D + F + D
        block = matrices + 2 * D * F + biases + 4 * D
        head = D * D + D + 2 * D + V  # a linear, a norm and a bias of the vocabulary
        outside = (model.max_seq_len + model.token_types) * D + 2 * D + head
    elif model.family == "modernbert":
        block = matrices + 3 * D * F + 2 * D
        outside = 2 * D + D * D + D + V  # the norms of both ends, and a head as BERT's
    else:
        E = model.experts
        family = model.family
        # scale only
        norms = (4 if "gemma" in family else 2) * D + (
            2 * h if family in ("qwen3", "gemma3") else 0
        )
        biases = (H + 2 * K) * h if family == "qwen2" else 0
        block = matrices + 3 * D * F * max(E, 1) + D * E + norms + biases  # the router is [D, E]
        outside = D
    return V * D * (1 if model.tied_head else 2) + L * block + outside


def data_parallel(config: Config) -> int:
    """Ways the batch is split; an axis of -1 is resolved for one host of 8 devices."""
    free = -1 in axis_sizes(config.mesh).values()
    ici = resolve(config.mesh, 8 if free else devices_needed(config.mesh))
    dcn = config.mesh.dcn
    return ici["data"] * ici["fsdp"] * ici["expert"] * dcn.data * dcn.fsdp * dcn.expert


def test_the_published_sizes_are_all_there():
    assert set(CONFIGS) == {*PUBLISHED, "tiny", "tiny_moe", "tiny_bert", "shakespeare_char_cpu"}


@every_config
def test_parses_checks_and_round_trips(name):
    config = load_config(name)
    assert check(config) is config
    assert parse(to_toml(config)) == config


@every_config
def test_is_complete_and_opens_with_what_it_is(name):
    text = CONFIGS[name].read_text(encoding="utf-8")
    opening = text.partition("\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in opening)
    assert any(f"jaxpar train {name}" in line for line in opening)
    assert any(line.startswith("# Expected: ") for line in opening)
    sections = {"model", "data", "train", "optimizer", "mesh", "memory", "precision"}
    sections |= {"checkpoint", "metrics"}
    assert sections == set(tomllib.loads(text)) - {"rules", "context"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name):
    assert parameters(load_config(name).model) == PUBLISHED[name]


@every_config
def test_the_batch_divides(name):
    config = load_config(name)
    assert config.train.batch % (config.train.accumulation * data_parallel(config)) == 0


@every_config
def test_the_experts_divide_over_the_expert_axis(name):
    config = load_config(name)
    assert config.model.experts % config.mesh.expert == 0
    assert config.model.experts > 0 or config.mesh.expert == 1


@every_config
def test_the_model_divides_over_the_tensor_axis(name):
    config = load_config(name)
    model = config.model
    tensor = config.mesh.tensor
    for size in (model.heads, model.kv_heads or model.heads, model.mlp, config.data.seq_len):
        assert size % tensor == 0
