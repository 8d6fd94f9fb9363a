"""Greedy generation gives the tokens of PyTorch's transformers, on one device and on eight.

Runs where the parity extra is installed: `pip install "jaxpar[parity]"`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar.base.layout.plan import Plan
from jaxpar.models import Model
from jaxpar.models.hf import import_hf, model_config_from_hf
from jaxpar.train.generation import Generator, decode_plan
from jaxpar.train.generation.sampling import Sampling, filter_scores

pytestmark = pytest.mark.slow

torch = pytest.importorskip(
    "torch", reason="parity with PyTorch is NOT tested: install the parity extra"
)
transformers = pytest.importorskip(
    "transformers", reason="parity with PyTorch is NOT tested: install the parity extra"
)

NEW = 64
PROMPTS = (7, 1, 23)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
WINDOW = {"sliding_window": 8}  # much smaller than the texts
GEMMA = LLAMA | WINDOW | {"head_dim": 16, "query_pre_attn_scalar": 24, "num_hidden_layers": 3}
CASES = {
    "gpt2": {"vocab_size": 101, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "llama": LLAMA | {"rope_parameters": LLAMA3},
    "mixtral": LLAMA | {"num_local_experts": 4},
    "mistral": LLAMA | WINDOW | {"head_dim": 8},
    "qwen2": LLAMA,
    "qwen3": LLAMA | {"head_dim": 16},
    "gemma2": GEMMA | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 4.0},
    "gemma3_text": GEMMA | {"sliding_window_pattern": 3},
}


@pytest.mark.parametrize("family", CASES)
def test_tokens_equal(family: str, tmp_path: Path, plan_of: Callable[..., Plan]) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        family, **CASES[family], eos_token_id=None, bos_token_id=None
    )
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in module.named_parameters():  # large, so that the scores lie well apart
            mean = float(weight.ndim == 1 and name.endswith("weight"))
            std = 0.1 if "embed_tokens" in name else 0.3
            torch.nn.init.normal_(weight, mean=mean, std=std)
    module.save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, config.vocab_size, length).tolist() for length in PROMPTS]
    expected = []
    margins = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        expected.append(out.sequences[0, len(prompt) :].tolist())
        best = torch.topk(torch.cat(out.scores), 2).values
        margins.append((best[:, 0] - best[:, 1]).min().item())
    assert min(margins) > 1e-4  # float32 rounding is 6e-6
    assert len(np.unique(expected)) > 30
    model = Model(model_config_from_hf(tmp_path))
    for sizes in ({}, {"data": 2, "tensor": 4})[family != "llama" :]:  # eight do all that one does
        # on eight, more devices along tensor than kv heads
        plan = decode_plan(plan_of(**sizes), model.config)
        assert (
            Generator(model, import_hf(tmp_path, model, plan), plan).generate(prompts, NEW)
            == expected
        )


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (0.7, 5, 0.8),
        (1.5, 0, 0.9),
        (1.0, 40, 1.0),
        (0.9, 1, 0.3),
    ],
)
def test_the_same_tokens_may_be_drawn(temperature: float, top_k: int, top_p: float) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = np.random.default_rng(1).normal(size=(4, 60)).astype(np.float32) * 2
    expected = TemperatureLogitsWarper(temperature)(None, torch.tensor(scores))
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    expected = TopPLogitsWarper(top_p)(None, expected).numpy()
    found = filter_scores(jax.numpy.asarray(scores), Sampling(temperature, top_k, top_p))
    np.testing.assert_allclose(found, expected, rtol=1e-6)  # one float32 division
