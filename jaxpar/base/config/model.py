"""The sizes of a model: the table `[model]` with `[model.lora]`. The table of sparse matrices has a
room of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxpar.base.config.sparsity import Sparsity
from jaxpar.base.field_marks import Called, Idle, Rule, Trait, WholeConfig
from jaxpar.base.layout.rules import NO_EXPERTS
from jaxpar.base.ranges import MOST_WORDS, Range

_NO_LORA = Idle(
    lambda c: c.model.lora.rank < 1, "model.lora.rank is 0, no LoRA", "add --model.lora.rank 8"
)
_NO_SCALING = Idle(
    lambda c: c.model.rope_factor == 1,
    "model.rope_factor is 1, no scaling",
    "add --model.rope-factor 8",
)
_NO_LLAMA3 = Idle(
    lambda c: c.model.rope_factor == 1 or c.model.rope_scaling != "llama3",
    "RoPE has no scaling of the kind llama3, which alone takes it",
    "add --model.rope-factor 8 --model.rope-scaling llama3",
)
_NO_WINDOW = Idle(
    lambda c: not any("window(" in word or "local(" in word for word in c.model.masks),
    "no layer of model.masks has a window",
    "add --model.masks 'window(1024)' causal",
)


def _adapted_matrices(config: WholeConfig) -> str:
    lora = config.model.lora
    if lora.rank < 1 or lora.targets:
        return ""
    return "model.lora.targets=[] adapts nothing: name a matrix"


def _lora_beside_sparsity(config: WholeConfig) -> str:
    model = config.model
    if model.lora.rank < 1 or not model.sparsity.form:
        return ""
    return (
        f"model.lora.rank={model.lora.rank} with model.sparsity.form={model.sparsity.form}: "
        "merged into a sparse matrix, the product of a pair would make it dense: use one of them"
    )


def _size_of_a_head(config: WholeConfig) -> str:
    model = config.model
    if model.head_dim != 0 or model.embed % model.heads == 0:
        return ""
    return (
        f"model.embed={model.embed} is not a multiple of model.heads={model.heads}: set "
        "model.head_dim"
    )


def _heads_of_a_kv_head(config: WholeConfig) -> str:
    model = config.model
    if model.kv_heads <= 0 or model.heads % model.kv_heads == 0:
        return ""
    return f"model.heads={model.heads} is not a multiple of model.kv_heads={model.kv_heads}"


def _experts_of_a_token(config: WholeConfig) -> str:
    chosen = config.model.experts_per_token
    experts = config.model.experts
    if experts == 0 or 1 <= chosen <= experts:
        return ""
    return f"model.experts_per_token={chosen} is not in 1..model.experts={experts}"


def _some_mask(config: WholeConfig) -> str:
    return "" if config.model.masks else 'model.masks is empty: masks = ["causal"] is the usual one'


def _low_before_high(config: WholeConfig) -> str:
    low = config.model.rope_low_freq_factor
    high = config.model.rope_high_freq_factor
    if config.model.rope_factor == 1 or low < high:
        return ""
    return (
        f"model.rope_low_freq_factor={low:g} is not below model.rope_high_freq_factor={high:g}"
        ": between the two RoPE goes from scaled to not scaled"
    )


@dataclass(frozen=True)
class Lora:
    """Low-rank adaptation (LoRA, Hu et al. 2021, arXiv:2106.09685): all that is trained are two
    small matrices beside each matrix W that is named. The model computes x W + (alpha / rank) (x A)
    B: see docs/finetune.md."""

    rank: Annotated[
        int, Range(0, 65_536), Rule(_lora_beside_sparsity), Called("lora_rank lora_r lora")
    ] = 0
    """Columns of A and rows of B; 0 = no LoRA, all parameters are trained."""
    alpha: Annotated[float, Range(1e-3, 1e6), _NO_LORA, Called("lora_alpha")] = 16.0
    """The product is weighted with alpha / rank."""
    targets: Annotated[
        tuple[str, ...],
        _NO_LORA,
        Rule(_adapted_matrices),
        Called("target_modules lora_targets lora_target_modules"),
    ] = ("q", "v")
    """The matrices of every block that have a pair: some of q, k, v, out, gate, up, down."""


_GIVEN_WEIGHTS = Idle(
    lambda c: bool(c.train.init),
    "the weights come from train.init",
    "leave one of them out",
)


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model. A family refuses a setting that it has no use for, such as RoPE in
    GPT-2.
    """

    family: str = "gpt2"
    """Which model of `jaxpar.models`: gpt2, llama, qwen2, qwen3, gemma2, gemma3, bert or
    modernbert."""
    vocab_size: Annotated[int, Range(2, MOST_WORDS), Called("vocab n_vocab")] = 256
    vocab_multiple: Annotated[int, Range(1, 2**20)] = 128
    """The stored vocabulary is rounded up to a multiple of this, to divide over a mesh; the loss is
    the same.
    """
    layers: Annotated[
        int,
        Range(1, 10_000),
        Called(
            "n_layer n_layers num_layers num_hidden_layers depth num_decoder_layers "
            "base_num_decoder_layers"
        ),
    ] = 4
    embed: Annotated[
        int,
        Range(1, 2**20),
        Called("n_embd n_embed hidden_size d_model dim embed_dim emb_dim base_emb_dim width"),
    ] = 128
    heads: Annotated[
        int,
        Range(1, 65_536),
        Rule(_size_of_a_head),
        Called("n_head n_heads num_heads num_attention_heads num_query_heads base_num_query_heads"),
    ] = 4
    kv_heads: Annotated[
        int,
        Range(0, 65_536),
        Rule(_heads_of_a_kv_head),
        Called(
            "n_kv_heads num_kv_heads num_key_value_heads num_query_groups "
            "base_num_kv_heads n_kv_head"
        ),
    ] = 0
    """Key/value heads (grouped-query attention); 0 = as many as `heads`."""
    head_dim: Annotated[int, Range(0, 65_536)] = 0
    """Size of a head; 0 = embed / heads."""
    mlp: Annotated[
        int,
        Range(1, 2**24),
        Called("intermediate_size ffn_hidden_size d_ff mlp_dim hidden_dim ffn_dim base_mlp_dim"),
    ] = 512
    """Hidden size of the MLP, or of one expert."""
    token_types: Annotated[int, Range(0, 65_536)] = 0
    """Types of tokens, such as BERT's two for the sentences of a pair; 0 = tokens have no types."""
    query_layer: Annotated[
        bool, Called("top_query_layer use_top_query_attention query_embedding")
    ] = False
    """One more layer on top of `layers`, whose queries are made of an embedding of the next
    position in place of the residual stream (PanGu-alpha, arXiv:2104.12369, section 3.1)."""
    sublayers: Literal["serial", "parallel"] = "serial"
    """`parallel` takes attention and the MLP from one norm and adds both at once (PaLM,
    arXiv:2204.02311, section 2): one gather and one scatter a block where there are two.
    """
    activation: Literal["family", "silu", "gelu", "relu2"] = "family"
    """The activation of the MLP: the family's own, or another. `relu2` is the square of what is
    above zero (Primer, arXiv:2109.08668, section 3).
    """
    experts: Annotated[
        int, Range(0, 65_536), Called("num_experts n_experts num_local_experts moe_num_experts")
    ] = 0
    """Experts of a block, each an MLP (LLaMA: Mixtral, arXiv:2401.04088); 0 = one MLP for every
    token.
    """
    experts_per_token: Annotated[
        int,
        Range(1, 65_536),
        NO_EXPERTS,
        Rule(_experts_of_a_token),
        Called("num_experts_per_tok moe_router_topk topk experts_per_tok"),
    ] = 2
    """How many experts a token is sent to. Their weights add up to 1; that of a single one is its
    probability.
    """
    router: Annotated[Literal["token_choice", "expert_choice"], NO_EXPERTS] = "token_choice"
    """Who chooses: each token its experts, or each expert as many tokens of each sequence
    (arXiv:2202.09368), so that a token goes to `experts_per_token` in the mean. Whether an expert
    takes a token depends on those after it, so such a model is for encoders.
    """
    shared_experts: Annotated[
        int,
        Range(0, 65_536),
        NO_EXPERTS,
        Called("n_shared_experts num_shared_experts moe_shared_experts"),
    ] = 0
    """Experts that every token goes to besides, each as wide as the others: one MLP of all their
    hidden features (DeepSeekMoE, arXiv:2401.06066, section 3.2). With one, and one chosen expert
    a token, experts are the residual of an MLP (DeepSpeed-MoE, arXiv:2201.05596, section 4.1.2).
    """
    max_seq_len: Annotated[int, Range(1, 2**30), Called("max_position_embeddings n_positions")] = (
        1024
    )
    """Longest sequence: the length of GPT-2's position table, and the limit of `data.seq_len`."""
    masks: Annotated[tuple[str, ...], Rule(_some_mask)] = ("causal",)
    """What the tokens of each layer see: layer i takes word i % len(masks) of causal, window(4096),
    longformer(...), bigbird(...), and for encoders full and local(64). See docs/attention.md."""
    attention_softcap: Annotated[float, Range(1.0, 1e6, also=(0,))] = 0.0
    """Scores of attention become `cap * tanh(score / cap)` (Gemma 2, arXiv:2408.00118, section 2);
    0 = no cap.
    """
    logit_softcap: Annotated[float, Range(1.0, 1e6, also=(0,))] = 0.0
    """The same cap for the scores of the vocabulary."""
    query_scale: Annotated[float, Range(1e-6, 1e3, also=(0,))] = 0.0
    """The factor of attention's scores (Gemma); 0 = head_dim ** -0.5."""
    dropout: Annotated[
        float,
        Range(0.0, 0.99),
        Trait.TRAINING_ONLY,
        Called("attention_dropout hidden_dropout resid_pdrop"),
    ] = 0.0
    tied_head: bool = True
    """Use the embedding table as the output head."""
    norm_eps: Annotated[float, Range(1e-12, 0.1)] = 1e-5
    init_std: Annotated[
        float,
        Range(1e-6, 10.0),
        _GIVEN_WEIGHTS,
        Trait.TRAINING_ONLY,
    ] = 0.02
    rope_theta: Annotated[float, Range(1.0, 1e15)] = 10000.0
    rope_local_theta: Annotated[float, Range(1.0, 1e15, also=(0,)), _NO_WINDOW] = 0.0
    """The base of RoPE in layers with a window, which are not scaled (Gemma 3, arXiv:2503.19786); 0
    = as in others.
    """
    rope_factor: Annotated[float, Range(1e-3, 1e6)] = 1.0
    """Context extension of RoPE; 1 = no scaling."""
    rope_scaling: Annotated[Literal["llama3", "linear"], _NO_SCALING] = "llama3"
    """How RoPE is extended: llama3 divides low frequencies by the factor, linear divides all
    (arXiv:2306.15595).
    """
    rope_low_freq_factor: Annotated[float, Range(1e-3, 1e6), _NO_LLAMA3, Rule(_low_before_high)] = (
        1.0
    )
    rope_high_freq_factor: Annotated[float, Range(1e-3, 1e6), _NO_LLAMA3] = 4.0
    rope_original_seq_len: Annotated[int, Range(1, 2**30), _NO_LLAMA3] = 8192
    scan_layers: Annotated[bool, Trait.MAY_CHANGE] = True
    """Run the blocks by `lax.scan` (one block is compiled) or unrolled (longer compile, faster on
    CPU).
    """
    lora: Lora = Lora()
    sparsity: Sparsity = field(default_factory=Sparsity)

    @property
    def kv_head_count(self) -> int:
        """The number of key and value heads, which is that of the heads where `kv_heads` is 0."""
        return self.kv_heads or self.heads

    @property
    def kinds(self) -> int:
        """The number of kinds of layers: layer i is of kind i % kinds."""
        return len(self.masks)

    @property
    def head_size(self) -> int:
        """The size of a head, which is embed / heads where `head_dim` is 0."""
        return self.head_dim or self.embed // self.heads
