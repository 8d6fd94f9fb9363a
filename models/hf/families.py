"""The families of models at Hugging Face: a row for each, with a table of its config.json and a
table of the tensors of its checkpoint.

Shapes: V vocab, P positions, T token types, D embed, d embed after a head's transform, H heads,
K kv heads, h head_dim, F mlp, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError, suggest
from jaxpar.models.masks import read_word

REQUIRED = object()
Json = dict[str, Any]  # a config.json: another program wrote it, so its values may be anything


class Local(NamedTuple):
    """The way in which a config.json states which layers have a sliding window of `sliding_window`
    tokens.

    Attributes:
      absent: the number that an absent `sliding_window` stands for; null is no window.
      where: `(config.json, layer) -> ` whether the layer has the window, where there are no
        `layer_types`; None = all layers have it.
      extra: the keys that are written besides `sliding_window` and `layer_types`, for a model with
        windows and for one without.
      key: the name of the number in the file.
      both_sides: the number counts the tokens on both sides, which an encoder sees.
    """

    absent: int | None
    where: Callable[[Json, int], bool] | None = None
    extra: tuple[Json, Json] = ({}, {})
    key: str = "sliding_window"
    both_sides: bool = False

    def word(self, number: int) -> str:
        """Return the word of `model.masks` for a number of the file."""
        return f"local({number // 2})" if self.both_sides else f"window({number})"

    def number(self, word: str, seq_len: int) -> int:
        """Return the number of the file for a word of `model.masks`."""
        reach = read_word(word).reach(seq_len)
        return reach - 1 if self.both_sides else reach


class HfFamily(NamedTuple):
    """A family's config.json and checkpoint.

    Attributes:
      family: our name of the family.
      architecture: the transformers class that runs it.
      sizes: our field -> its key in config.json, the value that an absent key stands for, and the
        value that a null stands for, if it is another.
      fixed: keys for which our model has no field -> the values that it computes; the first is
        written, and an absent key stands for it.
      rope_theta: the value that an absent key stands for; None for a family without RoPE.
      prefix: the prefix that some checkpoints put before every name but the head's, and others
        leave out.
      ignored: endings of names that are not parameters (constants that old releases saved).
      local: how the file states windows; None = there are none.
      local_theta: the value that an absent base of RoPE in layers with a window stands for; None =
        these layers have no base of their own.
      query_scalar: the value that an absent key stands for, of the number whose inverse root is the
        query's scale; 0 = there is no such key.
      norm_offset: the number that is added to the scales of norms in the file.
      whole: the word of `model.masks` for layers without a window.
      head: the name of the vocabulary matrix of the head, which a tied model may have or not.
      renamed: (old, new) ends of names, of which old checkpoints have the first.
      theta_keys: the names of the bases of RoPE, in layers without and with a window.
      written: further keys that are written to config.json.
      first_lacks: the parameters of blocks for which the first layer has no tensor.
      tensors: name -> (dims, parameters). The dims are a parameter's, as the file orders and merges
        them: "Hh D" is a [heads * head_dim, embed] matrix. Several parameters lie side by side
        along the last dim, or the one with a star: "*Hh D". A tensor whose name has {layer} or
        {expert} holds one layer or expert of a stacked parameter.
    """

    family: str
    architecture: str
    sizes: dict[str, tuple[Any, ...]]
    fixed: dict[str, tuple[object, ...]]
    rope_theta: float | None
    prefix: str
    ignored: tuple[str, ...]
    tensors: dict[str, tuple[str, ...]]
    local: Local | None = None
    local_theta: float | None = None
    query_scalar: int = 0
    norm_offset: float = 0.0
    whole: str = "causal"
    head: str = "lm_head.weight"
    renamed: tuple[tuple[str, str], ...] = ()
    theta_keys: tuple[str, str] = ("rope_theta", "rope_local_base_freq")
    written: tuple[tuple[str, object], ...] = ()
    first_lacks: tuple[str, ...] = ()


_GPT2 = HfFamily(  # its matrices are [in, out]
    family="gpt2",
    architecture="GPT2LMHeadModel",
    rope_theta=None,
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
    sizes={
        "vocab_size": ("vocab_size", REQUIRED),
        "layers": ("n_layer", REQUIRED),
        "embed": ("n_embd", REQUIRED),
        "heads": ("n_head", REQUIRED),
        "mlp": ("n_inner", 0),
        "max_seq_len": ("n_positions", REQUIRED),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        "tied_head": ("tie_word_embeddings", True),
    },
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    tensors={
        "transformer.wte.weight": ("V D", "embed.tokens"),
        "transformer.wpe.weight": ("P D", "embed.positions"),
        "transformer.h.{layer}.ln_1.weight": ("D", "blocks.attention_norm.scale"),
        "transformer.h.{layer}.ln_1.bias": ("D", "blocks.attention_norm.bias"),
        "transformer.h.{layer}.attn.c_attn.weight": ("D Hh", "blocks.q", "blocks.k", "blocks.v"),
        "transformer.h.{layer}.attn.c_attn.bias": (
            "Hh",
            "blocks.q_bias",
            "blocks.k_bias",
            "blocks.v_bias",
        ),
        "transformer.h.{layer}.attn.c_proj.weight": ("Hh D", "blocks.out"),
        "transformer.h.{layer}.attn.c_proj.bias": ("D", "blocks.out_bias"),
        "transformer.h.{layer}.ln_2.weight": ("D", "blocks.mlp_norm.scale"),
        "transformer.h.{layer}.ln_2.bias": ("D", "blocks.mlp_norm.bias"),
        "transformer.h.{layer}.mlp.c_fc.weight": ("D F", "blocks.up"),
        "transformer.h.{layer}.mlp.c_fc.bias": ("F", "blocks.up_bias"),
        "transformer.h.{layer}.mlp.c_proj.weight": ("F D", "blocks.down"),
        "transformer.h.{layer}.mlp.c_proj.bias": ("D", "blocks.down_bias"),
        "transformer.ln_f.weight": ("D", "head.norm.scale"),
        "transformer.ln_f.bias": ("D", "head.norm.bias"),
        "lm_head.weight": ("V D", "head.table"),
    },
)

_LAYER = "model.layers.{layer}."
_LLAMA = HfFamily(  # its matrices are [out, in]
    family="llama",
    architecture="LlamaForCausalLM",
    rope_theta=10000.0,
    prefix="model.",
    ignored=(".rotary_emb.inv_freq",),
    sizes={
        "vocab_size": ("vocab_size", REQUIRED),
        "layers": ("num_hidden_layers", REQUIRED),
        "embed": ("hidden_size", REQUIRED),
        "heads": ("num_attention_heads", REQUIRED),
        "kv_heads": ("num_key_value_heads", 0),
        "head_dim": ("head_dim", 0),
        "mlp": ("intermediate_size", REQUIRED),
        "max_seq_len": ("max_position_embeddings", REQUIRED),
        "norm_eps": ("rms_norm_eps", 1e-6),
        "tied_head": ("tie_word_embeddings", False),
    },
    fixed={
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
    },
    tensors={
        "model.embed_tokens.weight": ("V D", "embed.tokens"),
        _LAYER + "input_layernorm.weight": ("D", "blocks.attention_norm.scale"),
        _LAYER + "self_attn.q_proj.weight": ("Hh D", "blocks.q"),
        _LAYER + "self_attn.k_proj.weight": ("Kh D", "blocks.k"),
        _LAYER + "self_attn.v_proj.weight": ("Kh D", "blocks.v"),
        _LAYER + "self_attn.o_proj.weight": ("D Hh", "blocks.out"),
        _LAYER + "post_attention_layernorm.weight": ("D", "blocks.mlp_norm.scale"),
        _LAYER + "mlp.gate_proj.weight": ("F D", "blocks.gate"),
        _LAYER + "mlp.up_proj.weight": ("F D", "blocks.up"),
        _LAYER + "mlp.down_proj.weight": ("D F", "blocks.down"),
        "model.norm.weight": ("D", "head.norm.scale"),
        "lm_head.weight": ("V D", "head.table"),
    },
)

_SILU: dict[str, tuple[object, ...]] = {"hidden_act": ("silu", "swish")}
_MISTRAL = _LLAMA._replace(
    architecture="MistralForCausalLM",
    fixed=_SILU,
    local=Local(absent=4096),
    sizes=_LLAMA.sizes | {"kv_heads": ("num_key_value_heads", 8, 0)},
)

_EXPERT = _LAYER + "block_sparse_moe.experts.{expert}."
_MIXTRAL = _LLAMA._replace(
    architecture="MixtralForCausalLM",
    fixed=_SILU | {"router_jitter_noise": (0.0,)},
    rope_theta=1e6,
    local=Local(absent=None),
    sizes=_LLAMA.sizes
    | {
        "kv_heads": ("num_key_value_heads", 8, 0),
        "norm_eps": ("rms_norm_eps", 1e-5),
        "experts": ("num_local_experts", 8),
        "experts_per_token": ("num_experts_per_tok", 2),
    },
    tensors={name: row for name, row in _LLAMA.tensors.items() if ".mlp." not in name}
    | {
        _LAYER + "block_sparse_moe.gate.weight": ("E D", "blocks.router"),
        _EXPERT + "w1.weight": ("F D", "blocks.gate"),
        _EXPERT + "w2.weight": ("D F", "blocks.down"),
        _EXPERT + "w3.weight": ("F D", "blocks.up"),
    },
)

_QWEN2 = _LLAMA._replace(
    family="qwen2",
    architecture="Qwen2ForCausalLM",
    fixed=_SILU,
    sizes=_LLAMA.sizes | {"kv_heads": ("num_key_value_heads", 32, 0)},
    local=Local(
        absent=4096,
        where=lambda hf, layer: (
            bool(hf.get("use_sliding_window")) and layer >= hf.get("max_window_layers", 28)
        ),
        extra=({"use_sliding_window": True, "max_window_layers": 0}, {"use_sliding_window": False}),
    ),
    tensors=_LLAMA.tensors
    | {
        _LAYER + "self_attn.q_proj.bias": ("Hh", "blocks.q_bias"),
        _LAYER + "self_attn.k_proj.bias": ("Kh", "blocks.k_bias"),
        _LAYER + "self_attn.v_proj.bias": ("Kh", "blocks.v_bias"),
    },
)
_QK_NORMS: dict[str, tuple[str, ...]] = {
    _LAYER + "self_attn.q_norm.weight": ("h", "blocks.q_norm.scale"),
    _LAYER + "self_attn.k_norm.weight": ("h", "blocks.k_norm.scale"),
}
_QWEN3 = _QWEN2._replace(
    family="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed=_SILU | {"attention_bias": (False,)},
    sizes=_QWEN2.sizes | {"head_dim": ("head_dim", 128)},
    tensors=_LLAMA.tensors | _QK_NORMS,
)

_GEMMA2 = _LLAMA._replace(
    family="gemma2",
    architecture="Gemma2ForCausalLM",
    query_scalar=256,
    norm_offset=1.0,
    local=Local(absent=4096, where=lambda hf, layer: layer % 2 == 0),
    sizes=_LLAMA.sizes
    | {
        "kv_heads": ("num_key_value_heads", 4, 0),
        "head_dim": ("head_dim", 256),
        "tied_head": ("tie_word_embeddings", True),
        "attention_softcap": ("attn_logit_softcapping", 50.0, 0.0),
        "logit_softcap": ("final_logit_softcapping", 30.0, 0.0),
    },
    fixed={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "use_bidirectional_attention": (None, False),
    },
    tensors=_LLAMA.tensors
    | {
        _LAYER + "post_attention_layernorm.weight": ("D", "blocks.attention_post_norm.scale"),
        _LAYER + "pre_feedforward_layernorm.weight": ("D", "blocks.mlp_norm.scale"),
        _LAYER + "post_feedforward_layernorm.weight": ("D", "blocks.mlp_post_norm.scale"),
    },
)
_GEMMA3 = _GEMMA2._replace(
    family="gemma3",
    architecture="Gemma3ForCausalLM",
    rope_theta=1e6,
    local_theta=1e4,
    local=Local(
        absent=4096, where=lambda hf, layer: (layer + 1) % hf.get("sliding_window_pattern", 6) > 0
    ),
    sizes={key: row for key, row in _GEMMA2.sizes.items() if key != "attention_softcap"}
    | {"logit_softcap": ("final_logit_softcapping", 0.0, 0.0)},
    fixed=_GEMMA2.fixed
    | {"attn_logit_softcapping": (None,), "use_bidirectional_attention": (False, None)},
    tensors=_GEMMA2.tensors | _QK_NORMS,
)

_BERT_TABLE = "bert.embeddings."
_BERT_LAYER = "bert.encoder.layer.{layer}."
_PREDICTIONS = "cls.predictions."
_BERT = HfFamily(  # its matrices are [out, in]
    family="bert",
    architecture="BertForMaskedLM",
    rope_theta=None,
    prefix="bert.",
    whole="full",
    head=_PREDICTIONS + "decoder.weight",
    # Beside the position ids, the head for pairs of sentences and what it reads; and the bias of
    # the vocabulary under its second name.
    ignored=(
        ".position_ids",
        "pooler.dense.weight",
        "pooler.dense.bias",
        "cls.seq_relationship.weight",
        "cls.seq_relationship.bias",
        _PREDICTIONS + "decoder.bias",
    ),
    renamed=((".LayerNorm.gamma", ".LayerNorm.weight"), (".LayerNorm.beta", ".LayerNorm.bias")),
    sizes={
        "vocab_size": ("vocab_size", REQUIRED),
        "layers": ("num_hidden_layers", REQUIRED),
        "embed": ("hidden_size", REQUIRED),
        "heads": ("num_attention_heads", REQUIRED),
        "mlp": ("intermediate_size", REQUIRED),
        "max_seq_len": ("max_position_embeddings", 512),
        "token_types": ("type_vocab_size", 2),
        "norm_eps": ("layer_norm_eps", 1e-12),
    },
    fixed={
        "tie_word_embeddings": (True,),
        "hidden_act": ("gelu",),
        "position_embedding_type": ("absolute", None),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    },
    tensors={
        _BERT_TABLE + "word_embeddings.weight": ("V D", "embed.tokens"),
        _BERT_TABLE + "position_embeddings.weight": ("P D", "embed.positions"),
        _BERT_TABLE + "token_type_embeddings.weight": ("T D", "embed.types"),
        _BERT_TABLE + "LayerNorm.weight": ("D", "embed.norm.scale"),
        _BERT_TABLE + "LayerNorm.bias": ("D", "embed.norm.bias"),
        _BERT_LAYER + "attention.self.query.weight": ("Hh D", "blocks.q"),
        _BERT_LAYER + "attention.self.query.bias": ("Hh", "blocks.q_bias"),
        _BERT_LAYER + "attention.self.key.weight": ("Hh D", "blocks.k"),
        _BERT_LAYER + "attention.self.key.bias": ("Hh", "blocks.k_bias"),
        _BERT_LAYER + "attention.self.value.weight": ("Hh D", "blocks.v"),
        _BERT_LAYER + "attention.self.value.bias": ("Hh", "blocks.v_bias"),
        _BERT_LAYER + "attention.output.dense.weight": ("D Hh", "blocks.out"),
        _BERT_LAYER + "attention.output.dense.bias": ("D", "blocks.out_bias"),
        _BERT_LAYER + "attention.output.LayerNorm.weight": ("D", "blocks.attention_norm.scale"),
        _BERT_LAYER + "attention.output.LayerNorm.bias": ("D", "blocks.attention_norm.bias"),
        _BERT_LAYER + "intermediate.dense.weight": ("F D", "blocks.up"),
        _BERT_LAYER + "intermediate.dense.bias": ("F", "blocks.up_bias"),
        _BERT_LAYER + "output.dense.weight": ("D F", "blocks.down"),
        _BERT_LAYER + "output.dense.bias": ("D", "blocks.down_bias"),
        _BERT_LAYER + "output.LayerNorm.weight": ("D", "blocks.mlp_norm.scale"),
        _BERT_LAYER + "output.LayerNorm.bias": ("D", "blocks.mlp_norm.bias"),
        _PREDICTIONS + "transform.dense.weight": ("d D", "head.transform.dense"),
        _PREDICTIONS + "transform.dense.bias": ("D", "head.transform.bias"),
        _PREDICTIONS + "transform.LayerNorm.weight": ("D", "head.transform.norm.scale"),
        _PREDICTIONS + "transform.LayerNorm.bias": ("D", "head.transform.norm.bias"),
        _PREDICTIONS + "bias": ("V", "head.bias"),
    },
)

_MODERN_LAYER = "model.layers.{layer}."
_MODERNBERT = HfFamily(  # its matrices are [out, in]
    family="modernbert",
    architecture="ModernBertForMaskedLM",
    rope_theta=160_000.0,
    local_theta=10_000.0,
    theta_keys=("global_rope_theta", "local_rope_theta"),
    prefix="model.",
    whole="full",
    head="decoder.weight",
    ignored=(".rotary_emb.inv_freq",),
    first_lacks=("blocks.attention_norm.scale",),
    written=(("pad_token_id", None), ("cls_token_id", None), ("sep_token_id", None)),
    local=Local(
        absent=128,
        where=lambda hf, layer: layer % hf.get("global_attn_every_n_layers", 3) > 0,
        key="local_attention",
        both_sides=True,
    ),
    sizes={
        "vocab_size": ("vocab_size", REQUIRED),
        "layers": ("num_hidden_layers", REQUIRED),
        "embed": ("hidden_size", REQUIRED),
        "heads": ("num_attention_heads", REQUIRED),
        "mlp": ("intermediate_size", REQUIRED),
        "max_seq_len": ("max_position_embeddings", 8192),
        "norm_eps": ("norm_eps", 1e-5),
    },
    fixed={
        "tie_word_embeddings": (True,),
        "hidden_activation": ("gelu",),
        "classifier_activation": ("gelu",),
        "norm_bias": (False,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "classifier_bias": (False,),
        "decoder_bias": (True,),
        "rope_scaling": (None,),
    },
    tensors={
        "model.embeddings.tok_embeddings.weight": ("V D", "embed.tokens"),
        "model.embeddings.norm.weight": ("D", "embed.norm.scale"),
        _MODERN_LAYER + "attn_norm.weight": ("D", "blocks.attention_norm.scale"),
        _MODERN_LAYER + "attn.Wqkv.weight": ("*Hh D", "blocks.q", "blocks.k", "blocks.v"),
        _MODERN_LAYER + "attn.Wo.weight": ("D Hh", "blocks.out"),
        _MODERN_LAYER + "mlp_norm.weight": ("D", "blocks.mlp_norm.scale"),
        _MODERN_LAYER + "mlp.Wi.weight": ("*F D", "blocks.gate", "blocks.up"),
        _MODERN_LAYER + "mlp.Wo.weight": ("D F", "blocks.down"),
        "model.final_norm.weight": ("D", "head.norm.scale"),
        "head.dense.weight": ("d D", "head.transform.dense"),
        "head.norm.weight": ("D", "head.transform.norm.scale"),
        "decoder.bias": ("V", "head.bias"),
    },
)

HF_FAMILIES = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mixtral": _MIXTRAL,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "bert": _BERT,
    "modernbert": _MODERNBERT,
}


def model_type(config: ModelConfig) -> str:
    """Name the model type of Hugging Face for a model: a LLaMA with windows is a Mistral, with
    experts a Mixtral. Where no type has the model's family, the result is the family's name.
    """
    tables = [(name, table) for name, table in HF_FAMILIES.items() if table.family == config.family]
    names = [name for name, table in tables if ("experts" in table.sizes) == bool(config.experts)]
    return (names or [config.family])[0 if set(config.masks) == {"causal"} else -1]


def hf_family(name: str, origin: str) -> HfFamily:
    """Look up the table of a model type.

    Args:
      name: the `model_type` of a config.json.
      origin: the beginning of a message, such as the file's path.

    Raises:
      UserError: there is no such type, or it reads images too.
    """
    if name in HF_FAMILIES:
        return HF_FAMILIES[name]
    known = ", ".join(HF_FAMILIES)
    if f"{name}_text" in HF_FAMILIES:
        raise UserError(
            f"{origin}: a {name} reads images too, and only its text is a model here: "
            "save that part alone, with transformers' "
            "AutoModelForImageTextToText.from_pretrained(...).model.language_model.save_pretrained(...)"
        )
    raise UserError(
        f"{origin}: model_type {name!r} is not supported{suggest(name, HF_FAMILIES)}: only {known}"
    )
