"""Which of our families a published model belongs to, by its name or the settings of its run, and
what its columns do not say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpar.base.errors import UserError


@dataclass(frozen=True)
class Known:
    """A line of the table of models.

    Attributes:
      name: what the name begins with, without the signs between letters and figures.
      family: one of ours; empty = there is none.
      changes: further keys of a config.
      differences: where our model is another.
      lacking: what our families lack; empty unless `family` is.
    """

    name: str
    family: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    differences: tuple[str, ...] = ()
    lacking: str = ""


_TIED = {"model.tied_head": True}
_GEMMA2 = _TIED | {
    "model.masks": ["window(4096)", "causal"],
    "model.attention_softcap": 50.0,
    "model.logit_softcap": 30.0,
}
_GEMMA3_1B = _TIED | {"model.masks": ["window(512)"] * 5 + ["causal"]}
_GEMMA3 = _TIED | {"model.masks": ["window(1024)"] * 5 + ["causal"]}
_MIXTRAL = {"model.experts": 8, "model.experts_per_token": 2}
_QWEN3_MOE = {"model.experts": 128, "model.experts_per_token": 8}
_QWEN3_CODER = {"model.experts": 160, "model.experts_per_token": 8}
_NO_QK_NORM = ("queries and keys have no norm here: none of our families has it beside experts",)

KNOWN = (
    Known("llama4", lacking="attention in chunks, and layers with and without experts in turn"),
    Known("llama", "llama"),
    Known("mixtral", "llama", _MIXTRAL),
    Known("mistral", "llama"),
    Known("qwen330ba3b", "llama", _QWEN3_MOE, _NO_QK_NORM),
    Known("qwen3235ba22b", "llama", _QWEN3_MOE, _NO_QK_NORM),
    Known("qwen3coder480b", "llama", _QWEN3_CODER, _NO_QK_NORM),
    Known("qwen3next", lacking="linear attention"),
    Known("qwen3", "qwen3"),
    Known("qwen25", "qwen2"),
    Known("qwen2", "qwen2"),
    Known("gemma4", lacking="heads of two sizes, and values that are the keys in global layers"),
    Known("gemma3n", lacking="embeddings by layer"),
    Known("gemma31b", "gemma3", _GEMMA3_1B),
    Known("gemma3", "gemma3", _GEMMA3),
    Known("gemma2b", "llama", _TIED | {"model.activation": "gelu"}),
    Known("gemma2", "gemma2", _GEMMA2),
    Known("gemma", "llama", _TIED | {"model.activation": "gelu"}),
    Known("gpt2", "gpt2", _TIED),
    Known("gptoss", lacking="attention with sinks, and biases of experts"),
    Known("gpt", "gpt2", _TIED),
    Known("deepseek", lacking="multi-head latent attention (MLA)"),
    Known("kimi", lacking="multi-head latent attention (MLA)"),
    Known("bert", lacking="a published run of it that masks tokens as ours does"),
)
"""The models, the first that fits counts: longer names stand before shorter ones."""
DECODER_BLOCKS = {
    "llama2": "llama",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gpt3": "gpt3",
    "deepseek": "deepseek",
    "llama4": "llama4",
    "gpt_oss": "gptoss",
}
"""The name in `KNOWN` for each `decoder_block` of MaxText, whose `default` is a model without a
name.
"""


class NoFamily(UserError):
    """A refusal of a model that none of our families can be."""


def known_model(model: str, keys: Mapping[str, str], sizes: Mapping[str, int]) -> Known:
    """Find the family of a published model.

    Args:
      model: its name, such as `llama3.1-8b`.
      keys: the settings of its run: `decoder_block` and `mlp_activations` count.
      sizes: the sizes of the model by column.

    Raises:
      NoFamily: none of ours can be it, or its name is not known.
    """
    plain = re.sub(r"[^a-z0-9]", "", model.lower())
    block = keys.get("decoder_block", "")
    if not plain.startswith("maxtext"):
        found = next((one for one in KNOWN if plain.startswith(one.name)), None)
        found = found or next((one for one in KNOWN if DECODER_BLOCKS.get(block) == one.name), None)
    elif block in DECODER_BLOCKS:
        found = next(one for one in KNOWN if DECODER_BLOCKS[block] == one.name)
    else:
        found = _default_block(plain, keys, sizes)
    if found is None:
        raise NoFamily(f"no family is known for the model {model!r}")
    if not found.family:
        raise NoFamily(f"no family of ours has {found.lacking}, as {model} has")
    return found


def _default_block(plain: str, keys: Mapping[str, str], sizes: Mapping[str, int]) -> Known:
    """Choose for MaxText's own default block, whose MLP had two matrices in early versions, and
    three later: which of them it was shows in the size that the name has.
    """
    activations = keys.get("mlp_activations", "").strip("[]").split(",")
    stated = re.search(r"(\d+)b", plain)
    if activations != [""]:
        gated = len(activations) > 1
    elif stated is None:
        gated = True
    else:
        two, three = (_parameters(sizes, matrices) for matrices in (2, 3))
        wanted = 1e9 * int(stated[1])
        gated = abs(three - wanted) < abs(two - wanted)
    if gated:
        return Known("maxtext", "llama")
    return Known(
        "maxtext",
        "gpt2",
        differences=(
            "the MLP has two matrices there, as GPT-2's has, which learns its positions, adds "
            "biases and norms with a mean",
        ),
    )


def _parameters(sizes: Mapping[str, int], matrices: int) -> int:
    width = sizes["head_dim"] or sizes["embed"] // max(sizes["heads"], 1)
    kv = sizes["kv_heads"] or sizes["heads"]
    attention = 2 * sizes["embed"] * width * (sizes["heads"] + kv)
    mlp = matrices * sizes["embed"] * sizes["mlp"]
    return sizes["layers"] * (attention + mlp)
