"""A Gemma-shaped checkpoint reads texts that begin as it has seen them, and has the perplexity of
`transformers`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpar.base.config import Bos, Config, override
from jaxpar.train.evaluate import evaluate_folder
from jaxpar.train.generation.trained import read_config

tokenizers = pytest.importorskip("tokenizers")

SIZES: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "vocab_size": 260,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
TEXT = "The owl saw a bee, and the bee saw the owl; who was the first to fly?"
"""69 characters, each a token."""


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 2 with weights of a fixed seed, and a byte-level tokenizer that puts <bos> before a
    text.
    """
    folder = tmp_path_factory.mktemp("gemma")
    rng = np.random.default_rng(0)
    words = [*SPECIAL, *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=[],
        )
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 2)]
    )
    made.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "config.json").write_text(json.dumps(SIZES))

    def random(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.4, shape).astype(np.float32)

    tensors = {"model.embed_tokens.weight": random(260, 16), "model.norm.weight": random(16)}
    for layer in ("model.layers.0.", "model.layers.1."):
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            tensors[f"{layer}{norm}_layernorm.weight"] = random(16)
        for name, rows, columns in (("q", 16, 16), ("k", 8, 16), ("v", 8, 16), ("o", 16, 16)):
            tensors[f"{layer}self_attn.{name}_proj.weight"] = random(rows, columns)
        for name, rows, columns in (("gate", 32, 16), ("up", 32, 16), ("down", 16, 32)):
            tensors[f"{layer}mlp.{name}_proj.weight"] = random(rows, columns)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def evaluation(folder: Path, text: Path, seq_len: int, bos: Bos = "auto") -> Config:
    changes = {
        "data.val_path": str(text),
        "data.seq_len": seq_len,
        "data.bos": bos,
        "train.batch": 8,
    }
    return override(read_config(folder), changes | {"mesh.platform": "cpu"})


# Of transformers 5.24 and torch 2.13, in float32; the next test computes them again.
ONE_WINDOW = 1983.55762
THREE_WINDOWS = 1722.34402
WITHOUT = 1910.66629
SAME = 2e-5  # relative, float32: sums of some tens of logits up to 30, in another order


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "seq_len", "bos", "expected"),
    [
        (40, 40, "auto", ONE_WINDOW),
        (69, 23, "auto", THREE_WINDOWS),
        (41, 40, False, WITHOUT),
    ],
)
def test_a_folder_has_the_perplexity_of_transformers(
    length: int, seq_len: int, bos: Bos, expected: float, gemma: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text(TEXT[:length])
    found = evaluate_folder(evaluation(gemma, tmp_path / "text.txt", seq_len, bos), gemma)
    assert found.perplexity == pytest.approx(expected, rel=SAME)


@pytest.mark.slow
def test_the_numbers_are_those_of_transformers(gemma: Path) -> None:
    reason = "the stored perplexities are NOT computed again: install the extra parity"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(gemma)
    module = transformers.Gemma2ForCausalLM.from_pretrained(
        gemma, attn_implementation="eager"
    ).eval()

    def nll(ids: list[int]) -> list[float]:
        """Of each token after the first."""
        with torch.no_grad():
            scores = module(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        return [-float(scores[i, id]) for i, id in enumerate(ids[1:])]

    def perplexity(parts: list[list[int]]) -> float:
        return math.exp(float(np.mean([value for part in parts for value in nll(part)])))

    ids = tokenizer(TEXT[:40])["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert perplexity([ids]) == pytest.approx(ONE_WINDOW, rel=SAME)
    # A window reads on from <bos>, which stands in place of its first token.
    ids = tokenizer(TEXT)["input_ids"]
    windows = [
        ids[0:24],
        [tokenizer.bos_token_id, *ids[24:47]],
        [tokenizer.bos_token_id, *ids[47:70]],
    ]
    assert perplexity(windows) == pytest.approx(THREE_WINDOWS, rel=SAME)
    ids = tokenizer(TEXT[:41], add_special_tokens=False)["input_ids"]
    assert perplexity([ids]) == pytest.approx(WITHOUT, rel=SAME)
