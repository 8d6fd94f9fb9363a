"""What people type who come from another trainer, and which key of a config means it.

The words are those of nanoGPT, of Hugging Face's Trainer, of MaxText, torchtitan and Megatron-LM,
and what one would guess. docs/coming_from.md has them with what differs; here they only make a
mistyped key name the right one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from jaxpar.base.errors import suggest

_WORDS = {
    "train.learning_rate": "lr learning_rate lrate max_lr peak_lr base_lr",
    "train.min_learning_rate_ratio": "min_lr lr_min final_lr lr_end min_lr_ratio min_lr_factor "
    "min_learning_rate "
    "learning_rate_final_fraction",
    "train.steps": "epoch epochs num_epochs n_epochs max_epochs num_train_epochs iters "
    "max_iters train_iters "
    "iterations num_steps max_steps total_steps training_steps train_steps num_train_steps "
    "n_steps train_samples",
    "train.batch": "batch_size bs global_batch_size train_batch_size "
    "per_device_train_batch_size per_device_batch_size "
    "micro_batch_size local_batch_size device_batch_size",
    "train.accumulation": "gradient_accumulation_steps gradient_accumulation grad_accum "
    "grad_accumulation "
    "grad_accum_steps accumulate_grad_batches accum accumulation_steps",
    "train.warmup_steps": "warmup warmup_iters warmup_ratio num_warmup_steps lr_warmup_iters "
    "lr_warmup_steps "
    "warmup_steps_fraction lr_warmup",
    "train.schedule": (
        "lr_scheduler lr_scheduler_type scheduler lr_schedule lr_schedule_type "
        "lr_decay_style decay_lr"
    ),
    "train.decay_steps": "lr_decay_iters lr_wsd_decay_iters decay_ratio decay_iters lr_decay_steps",
    "optimizer.adamw.beta1": "adam_beta1 adam_b1 b1 betas",
    "optimizer.adamw.beta2": "adam_beta2 adam_b2 b2",
    "optimizer.adamw.eps": "epsilon adam_eps adam_epsilon",
    "optimizer.adamw.weight_decay": "wd adam_weight_decay decay",
    "train.clip_norm": "clip grad_clip clip_grad max_grad_norm gradient_clip gradient_clip_val "
    "max_norm grad_norm "
    "gradient_clipping gradient_clipping_threshold",
    "train.eval_every": (
        "eval_interval eval_steps eval_freq eval_frequency validate_every val_check_interval"
    ),
    "train.eval_batches": "eval_iters eval_batch",
    "train.seed": "random_seed manual_seed",
    "train.init": "init_from resume resume_from_checkpoint load_checkpoint load "
    "model_name_or_path pretrained "
    "load_parameters_path from_pretrained finetune",
    "data.seq_len": "seq_length sequence_length block_size max_length context_length "
    "context_len ctx_len seqlen "
    "max_target_length max_seq_length",
    "data.path": "dataset data dataset_path data_path train_file dataset_name train_data data_dir",
    "data.tokenizer": (
        "tokenizer_path tokenizer_name tokenizer_model tokenizer_type vocab_file hf_assets_path"
    ),
    "data.pack": "packing",
    "model.layers": (
        "n_layer n_layers num_layers num_hidden_layers depth num_decoder_layers "
        "base_num_decoder_layers"
    ),
    "model.heads": (
        "n_head n_heads num_heads num_attention_heads num_query_heads base_num_query_heads"
    ),
    "model.kv_heads": (
        "n_kv_heads num_kv_heads num_key_value_heads num_query_groups base_num_kv_heads n_kv_head"
    ),
    "model.embed": "n_embd n_embed hidden_size d_model dim embed_dim emb_dim base_emb_dim width",
    "model.mlp": "intermediate_size ffn_hidden_size d_ff mlp_dim hidden_dim ffn_dim base_mlp_dim",
    "model.query_layer": "top_query_layer use_top_query_attention query_embedding",
    "model.experts": "num_experts n_experts num_local_experts moe_num_experts",
    "model.shared_experts": "n_shared_experts num_shared_experts moe_shared_experts",
    "model.experts_per_token": "num_experts_per_tok moe_router_topk topk experts_per_tok",
    "model.max_seq_len": "max_position_embeddings n_positions",
    "model.dropout": "attention_dropout hidden_dropout resid_pdrop",
    "model.vocab_size": "vocab n_vocab",
    "model.lora.rank": "lora_rank lora_r lora",
    "model.lora.alpha": "lora_alpha",
    "model.lora.targets": "target_modules lora_targets lora_target_modules",
    "model.sparsity.form": "sparsity nm_sparsity sparse_24 sparsity_pattern mask_structure",
    "model.sparsity.decay": "srste_decay sr_ste_lambda srste",
    "pruning.method": "prune pruner pruning_method sparse_training",
    "pruning.sparsity": "target_sparsity final_sparsity prune_ratio sparsity_ratio",
    "precision.compute": "dtype precision bf16 fp16 mixed_precision compute_dtype amp half",
    "precision.params": "weight_dtype param_dtype params_dtype",
    "precision.gradients": "grad_dtype main_grads_dtype",
    "precision.moments": "mu_dtype exp_avg_dtype optim_dtype",
    "metrics.sinks": "wandb use_wandb wandb_log enable_wandb report_to tensorboard "
    "enable_tensorboard mlflow logger "
    "wandb_project logging",
    "metrics.log_every": "log_interval logging_steps log_freq log_period log_steps",
    "metrics.profile": "profile profiler enable_profiling profile_steps",
    "checkpoint.every": "save_steps save_interval save_every checkpoint_period "
    "checkpoint_interval ckpt_interval "
    "save_freq checkpoint_every",
    "checkpoint.keep": "save_total_limit keep_latest_k max_to_keep",
    "run": (
        "output_dir out_dir output out save_dir save checkpoint_dir run_name "
        "base_output_directory logdir log_dir"
    ),
    "mesh.tensor": "tp tensor_parallel tensor_parallel_size tensor_model_parallel_size "
    "tensor_parallel_degree tp_size "
    "mp ici_tensor_parallelism model_parallel model",
    "mesh.data": "dp data_parallel data_parallel_size data_parallel_replicate_degree "
    "ici_data_parallelism ddp devices replica replicas "
    "gpus num_gpus n_gpus num_devices nproc_per_node",
    "mesh.fsdp": (
        "zero zero_stage data_parallel_shard_degree ici_fsdp_parallelism fsdp_size sharding shard "
        "dp_shard"
    ),
    "mesh.stage": "pp pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size "
    "pipeline_parallel_degree "
    "ici_pipeline_parallelism stages num_stages pipe pipeline pipe_parallel pipe_parallel_size",
    "mesh.context": "cp sp context_parallel context_parallel_size context_parallel_degree "
    "sequence_parallel seq sequence "
    "ici_context_parallelism",
    "mesh.expert": (
        "ep expert_parallel expert_model_parallel_size expert_parallel_degree "
        "ici_expert_parallelism"
    ),
    "mesh.platform": "device platform accelerator backend hardware use_cpu",
    "memory.policy": "gradient_checkpointing remat remat_policy activation_checkpointing "
    "activation_checkpoint "
    "recompute_granularity checkpoint_activations",
    "memory.optimizer": "cpu_offload offload optimizer_offload offload_optimizer",
    "kernels.attention": (
        "attn_implementation flash_attention flash_attn use_flash_attn attn attention"
    ),
}
_MEANS = {word: key for key, words in _WORDS.items() for word in words.split()}
_PRESETS = {
    "gpt2small": "gpt2_124m",
    "gpt2medium": "gpt2_355m",
    "gpt2large": "gpt2_774m",
    "gpt2xl": "gpt2_1558m",
}


def suggest_key(typed: str, known: Iterable[str]) -> str:
    """` (did you mean 'train.learning_rate'?)`: the key that means what was typed, or the nearest
    by its letters.

    Args:
      typed: a dotted key that is not known, or its last word alone: `train.lr`, `lr`.
      known: the dotted keys that could have been meant.

    Returns:
      The hint; empty where nothing is near.
    """
    known = list(known)
    word = typed.rpartition(".")[2].lower()
    meant = _MEANS.get(word, "")
    if meant in known:
        return f" (did you mean {meant!r}?)"
    same = [key for key in known if key.rpartition(".")[2] == word]
    if same:
        return f" (did you mean {same[0]!r}?)"
    table = typed.rpartition(".")[0]
    within = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == table}
    if not table or not within:
        return suggest(typed, known)
    # a table that is known is as long in all its keys, and would make any two of them alike
    near = difflib.get_close_matches(word, within, n=1, cutoff=0.5)
    if near:
        return f" (did you mean {within[near[0]]!r}?)"
    return suggest(typed, known, alike=0.75)


def suggest_axis(typed: str, axes: Iterable[str]) -> str:
    """Suggest a mesh axis: ` (did you mean 'stage'?)`.

    Args:
      typed: what was written, such as `pipe`.
      axes: the mesh axes that there are.

    Returns:
      A hint at the axis that means the same to another trainer, or the nearest by its letters;
      empty where there is none.
    """
    axes = list(axes)
    table, _, axis = meaning(typed).rpartition(".")
    if table == "mesh" and axis in axes:
        return f" (did you mean {axis!r}?)"
    return suggest(typed, axes)


def meaning(typed: str) -> str:
    """The dotted key of a config that a word of another trainer means; empty = none is known."""
    return _MEANS.get(typed.rpartition(".")[2].lower(), "")


def suggest_preset(name: str, known: Iterable[str]) -> str:
    """Suggest a preset: ` (did you mean 'gpt2_124m'?)`.

    Args:
      name: what was written.
      known: the names of the presets.

    Returns:
      A hint at the preset whose name is the same but for signs, the smallest that begins with it,
      or the nearest by its letters; empty where there is none.
    """
    known = list(known)
    plain = _plain(name)
    if not plain:
        return suggest(name, known)
    by_plain = {_plain(preset): preset for preset in known} | _PRESETS
    if by_plain.get(plain) in known:
        return f" (did you mean {by_plain[plain]!r}?)"
    parts = [preset for preset in known if _plain(preset.partition("_")[0]) == plain]
    longer = parts or [preset for preset in known if _plain(preset).startswith(plain)]
    if longer:
        return f" (did you mean {min(longer, key=_size)!r}?)"
    return suggest(name, known)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _size(preset: str) -> tuple[float, str]:
    """The parameters that a preset's name has, in millions, and the name; those without any
    come last.
    """
    found = re.search(r"_(\d+)([mb])(?:_|$)", preset)
    return float("inf") if found is None else int(found[1]) * (
        1000 if found[2] == "b" else 1
    ), preset
