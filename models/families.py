"""The differences between the families of models, a line of a table for each;
`jaxpar.models.transformer` is the block that they share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError, suggest


@dataclass(frozen=True)
class Family:
    """A family of models; `ModelConfig` has the sizes of one model.

    Attributes:
      norm: the norm that is used before attention, before the MLP and before the head;
        `layer_scale` is `layer` without a bias.
      positions: `learned` adds a row of a table to the embedding; `rotary` turns q and k (RoPE).
      biases: the linears of a block that add a bias, and of a head: `transform` and `vocab`.
      gated: the MLP is a gated linear unit (arXiv:2002.05202).
      activation: the activation of the MLP; gelu is computed by tanh, gelu_exact by erf.
      experts: the MLP may be split into experts.
      grouped: several query heads may share a kv head (arXiv:2305.13245).
      qk_norm: queries and keys are normed over head_dim before the rotation.
      post_norms: the outputs of attention and the MLP are normed before they are added to the
        residual stream.
      scaled_embedding: token embeddings are multiplied by sqrt(embed).
      norm_after: the residual stream is normed after attention and the MLP are added to it, and
        their inputs are not normed (the transformer of arXiv:1706.03762).
      first_norm: the first block norms the input of attention. If not, the embedding's norm is
        enough, and the first block's own norm is not used.
      token_types: tokens have types, with an embedding of their own (`model.token_types`).
      embedding_norm: the sum of the embeddings is normed.
      final_norm: the output of the last block is normed.
      transforms: the head has a linear, the activation and a norm before the vocabulary matrix.
    """

    norm: Literal["layer", "layer_scale", "rms"]
    positions: Literal["learned", "rotary"]
    biases: tuple[str, ...] = ()
    gated: bool = True
    activation: Literal["silu", "gelu", "gelu_exact"] = "silu"
    experts: bool = False
    grouped: bool = True
    qk_norm: bool = False
    post_norms: bool = False
    scaled_embedding: bool = False
    norm_after: bool = False
    first_norm: bool = True
    token_types: bool = False
    embedding_norm: bool = False
    final_norm: bool = True
    transforms: bool = False


FAMILIES: dict[str, Family] = {
    # Radford et al. 2019, "Language models are unsupervised multitask learners".
    "gpt2": Family(
        norm="layer",
        positions="learned",
        biases=("q", "k", "v", "out", "up", "down"),
        gated=False,
        activation="gelu",
        grouped=False,
    ),
    # LLaMA 2 and 3 (arXiv:2307.09288, arXiv:2407.21783); with windows Mistral (arXiv:2310.06825),
    # with experts Mixtral (arXiv:2401.04088).
    "llama": Family(norm="rms", positions="rotary", experts=True),
    # Qwen 2 and 2.5 (arXiv:2407.10671, arXiv:2412.15115), and Qwen 3 (arXiv:2505.09388).
    "qwen2": Family(norm="rms", positions="rotary", biases=("q", "k", "v")),
    "qwen3": Family(norm="rms", positions="rotary", qk_norm=True),
    # Gemma 2 and 3 (arXiv:2408.00118, arXiv:2503.19786), of which 3 is its text part.
    "gemma2": Family(
        norm="rms", positions="rotary", activation="gelu", post_norms=True, scaled_embedding=True
    ),
    "gemma3": Family(
        norm="rms",
        positions="rotary",
        activation="gelu",
        qk_norm=True,
        post_norms=True,
        scaled_embedding=True,
    ),
    # Devlin et al. 2019, arXiv:1810.04805; its masks are ["full"].
    "bert": Family(
        norm="layer",
        positions="learned",
        biases=("q", "k", "v", "out", "up", "down", "transform", "vocab"),
        gated=False,
        activation="gelu_exact",
        grouped=False,
        norm_after=True,
        token_types=True,
        embedding_norm=True,
        final_norm=False,
        transforms=True,
    ),
    # Warner et al. 2024, arXiv:2412.13663; its masks are ["full", "local(64)", "local(64)"].
    "modernbert": Family(
        norm="layer_scale",
        positions="rotary",
        biases=("vocab",),
        activation="gelu_exact",
        grouped=False,
        first_norm=False,
        embedding_norm=True,
        transforms=True,
    ),
}


def family_of(config: ModelConfig) -> Family:
    """Look up the family of `config.family`, and refuse sizes that it has no use for.

    Raises:
      UserError: there is no such family, it has no experts, grouped kv heads, types of tokens or
        RoPE and the config asks for them, heads that RoPE turns have an odd size, its sublayers
        cannot be parallel, or it cannot have a query layer.
    """
    name = config.family
    standard = ModelConfig()
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        alike = suggest(name, FAMILIES)
        whole = "; a whole model of one's own is given from Python: make_experiment(config, model=)"
        raise UserError(
            f"no model family {name!r}{alike}: model.family is one of {known}"
            + ("" if alike else whole)
        )
    family = FAMILIES[name]
    if config.experts and not family.experts:
        raise UserError(f"{name} has no experts, found model.experts={config.experts}: set it to 0")
    normed = family.post_norms or family.norm_after
    if config.sublayers == "parallel" and (config.experts or normed):
        if config.experts:
            why = f"model.experts={config.experts}, which are sent their tokens after attention"
        else:
            why = f"{name} norms what each sublayer adds"
        raise UserError(
            f"model.sublayers=parallel: {why}: set it to serial, or take a family without"
        )
    if config.query_layer:
        _require_query_layer(config, family)
    if config.experts and config.activation not in ("family", family.activation):
        raise UserError(
            f"model.activation={config.activation}: experts have that of their family, "
            f"{family.activation}: leave it alone, or set model.experts=0"
        )
    if not family.grouped and config.kv_heads not in (0, config.heads):
        raise UserError(
            f"{name} has no grouped kv heads, found model.kv_heads={config.kv_heads}: set it to 0"
        )
    if config.token_types and not family.token_types:
        raise UserError(
            f"the tokens of {name} have no types, found model.token_types={config.token_types}: "
            "set it to 0"
        )
    rotary = [field for field in vars(config) if "rope" in field or field == "query_scale"]
    rope = [field for field in rotary if getattr(config, field) != getattr(standard, field)]
    if family.positions != "rotary" and rope:
        raise UserError(
            f"{name} has no RoPE: leave {' and '.join(f'model.{field}' for field in rope)} alone"
        )
    if family.positions == "rotary" and config.head_size % 2:
        raise UserError(
            f"RoPE turns pairs of features, found heads of size {config.head_size}: set "
            "model.head_dim"
        )
    return family


def _require_query_layer(config: ModelConfig, family: Family) -> None:
    """Refuse a query layer where positions have no table, or attention is not between a norm and
    the stream.
    """
    if family.positions != "learned":
        why = f"{config.family} turns queries by their positions, and has no table of them"
    elif family.norm_after:
        why = f"{config.family} norms the stream after attention is added to it"
    elif config.sublayers == "parallel":
        why = "model.sublayers=parallel reads queries and the MLP's input at once"
    else:
        return
    raise UserError(f"model.query_layer=true: {why}: set it to false, or take gpt2, serial")
