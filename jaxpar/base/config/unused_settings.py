"""Settings that a user gave and that can have no effect are refused, with what would make them
matter.

Only the user's own flags and file are checked. Presets and the config.toml of a run hold keys for
other layouts, `--on` brings another mesh, and a program that calls `override` knows what it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, get_args

from jaxpar.base.config.loading import RESOLVED, parse
from jaxpar.base.config.optimizer import OptimizerName
from jaxpar.base.config.pruning import Pruning
from jaxpar.base.config.schema import Config, rules_of
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import total_sizes
from jaxpar.base.layout.sharding import LogicalAxis, named_axes
from jaxpar.base.registry import RATES, SOURCES
from jaxpar.base.toml import find_toml, flatten, presets


class Effect(NamedTuple):
    """When some dotted keys matter, and why they have no effect otherwise; one that ends in a dot
    is a whole table.
    """

    keys: tuple[str, ...]
    matters: Callable[[Config], bool]
    because: str | Callable[[], str]
    """The reason, or what makes it when it is asked for, from what is registered by then."""


def _split(config: Config, axis: LogicalAxis, besides: LogicalAxis | None = None) -> bool:
    """Whether a logical axis is or may be (-1) split over mesh axes that do not split the axis
    `besides`.
    """
    sizes = total_sizes(config.mesh)
    rules = rules_of(config, sizes)
    left = named_axes(besides, rules) if besides else ()
    return any(
        sizes[a] > 1 or getattr(config.mesh, a) == -1
        for a in named_axes(axis, rules)
        if a not in left
    )


def _has_several_devices(config: Config) -> bool:
    """Whether the mesh has, or may have (-1), more than one device."""
    sizes = total_sizes(config.mesh)
    open_axes = [axis for axis in sizes if getattr(config.mesh, axis) == -1]
    return bool(open_axes) or math.prod(sizes.values()) > 1


def _holds_out(config: Config) -> bool:
    """Whether the last part of the training data may be kept for validation."""
    return SOURCES[config.data.source].holds_out and not config.data.mixture


def _streams(config: Config) -> bool:
    return SOURCES[config.data.source].streams(config.data)


def _is_read(setting: str) -> Callable[[Config], bool]:
    """Whether the source of the data reads a setting of [data] that not all sources read."""
    return lambda config: setting in SOURCES[config.data.source].reads


def _read_by(setting: str) -> Callable[[], str]:
    """The sentence about a setting of [data] that the source does not read, which lists those that
    do.
    """

    def because() -> str:
        others = [name for name, source in SOURCES.items() if setting in source.reads]
        return f"it is for data.source {', '.join(others)}"

    return because


def _has_tokenizer(config: Config) -> bool:
    return SOURCES[config.data.source].has_tokenizer


def _offloads(config: Config) -> bool:
    memory = config.memory
    in_host_memory = memory.optimizer != "device"
    offloads_arrays = "offload" in (memory.parameters, *vars(memory.keep).values())
    return bool(memory.budget) or in_host_memory or offloads_arrays


def _of_optimizer(name: OptimizerName) -> Effect:
    """The settings of one optimizer, which matter where it is the one."""
    return Effect(
        (f"optimizer.{name}.",),
        lambda c: c.optimizer.name == name,
        f"optimizer.name is not {name}: add --optimizer.name {name}",
    )


_OF_DATA = (
    Effect(
        ("data.path", "data.mixture"),
        _is_read("path"),
        "data.source is stdlib, which is read from this Python: add --data.source text, or tokens",
    ),
    Effect(
        ("data.path",),
        lambda c: not c.data.mixture,
        "data.mixture says what to read: give one of them",
    ),
    Effect(
        ("data.column",),
        _is_read("column"),
        _read_by("column"),
    ),
    Effect(("data.streaming",), _is_read("streaming"), _read_by("streaming")),
    Effect(
        ("data.shuffle_window",),
        _streams,
        "all of the data is shuffled: it is for parquet, and hf with streaming",
    ),
    Effect(
        ("data.seed",),
        lambda c: bool(c.data.shuffle_window) or not _streams(c),
        "a stream is read in order: add --data.shuffle-window 1000",
    ),
    Effect(
        ("data.loss_on", "data.template_args", "data.template_date"),
        _is_read("loss_on"),
        _read_by("loss_on"),
    ),
    Effect(
        ("data.mask_rate", "data.mask_whole_words", "data.mask_token"),
        lambda c: c.data.objective == "masked",
        "data.objective is next, which corrupts nothing: add --data.objective masked",
    ),
    Effect(
        ("data.stride",),
        _is_read("stride"),
        _read_by("stride"),
    ),
    Effect(
        ("data.max_bytes",),
        _is_read("max_bytes"),
        "it caps the stdlib corpus: add --data.source stdlib",
    ),
    Effect(
        ("data.tokenizer",),
        lambda c: not _has_tokenizer(c) or c.data.tokenizer.endswith(".json"),
        "data.source is tokens, whose file brings its own: leave it out, or add --data.source text",
    ),
    Effect(
        ("data.bos",),
        lambda c: _has_tokenizer(c) or c.data.tokenizer.endswith(".json"),
        "the tokenizer has no begin of text: add --data.tokenizer with the path of a "
        "tokenizer.json",
    ),
    Effect(
        ("data.val_fraction",),
        lambda c: not c.data.val_path,
        "data.val_path is the validation set: give one of them",
    ),
    Effect(
        ("data.val_fraction",),
        _holds_out,
        "no part of documents or of a mixture is held out: give data.val_path",
    ),
)
_OF_TRAINING = (
    Effect(
        ("train.eval_every", "train.eval_batches", "train.final_eval_batches"),
        lambda c: bool(c.data.val_path) or (c.data.val_fraction > 0 and _holds_out(c)),
        "there is no validation set: set data.val_fraction or data.val_path",
    ),
    Effect(
        ("train.min_learning_rate_ratio", "train.decay_steps"),
        lambda c: RATES[c.train.schedule].decays,
        "train.schedule has no decay: add --train.schedule cosine, or wsd",
    ),
    Effect(
        ("train.seed",),
        lambda c: not c.train.init or c.model.dropout > 0 or c.model.lora.rank > 0,
        "the weights come from train.init, and nothing is dropped out: leave one of them out",
    ),
    Effect(
        ("model.init_std",),
        lambda c: not c.train.init,
        "the weights come from train.init: leave one of them out",
    ),
    Effect(
        ("train.spike_window", "train.spike_deviations"),
        lambda c: c.train.on_spike != "off",
        "train.on_spike is off, so that nothing is a spike: add --train.on-spike rollback",
    ),
    Effect(
        ("train.max_bad_in_a_row", "train.max_bad_steps"),
        lambda c: c.train.on_nonfinite != "stop" or c.train.on_spike == "rollback",
        "the first bad step stops the run: add --train.on-nonfinite skip, or rollback",
    ),
    Effect(
        ("train.check_replicas",),
        _has_several_devices,
        "one device holds no copies: add --mesh.data 2",
    ),
)
_OF_OPTIMIZERS = (
    *map(_of_optimizer, get_args(OptimizerName)),
    Effect(
        tuple(f"pruning.{name}" for name in vars(Pruning()) if name != "method"),
        lambda c: c.pruning.method != "none",
        "pruning.method is none: add --pruning.method magnitude",
    ),
    Effect(
        ("pruning.regrow",),
        lambda c: c.pruning.method in ("none", "rigl"),
        "only rigl drops weights and grows others: add --pruning.method rigl",
    ),
    Effect(
        ("pruning.sparsity",),
        lambda c: not c.pruning.sparsity_by_depth,
        "pruning.sparsity_by_depth is given and takes its place: give only one of the two",
    ),
    Effect(
        ("optimizer.sgd.nesterov",),
        lambda c: c.optimizer.sgd.momentum > 0,
        "optimizer.sgd.momentum is 0: there is nothing to look ahead along",
    ),
)
_OF_TEACHERS = (
    Effect(
        (
            "distill.step",
            "distill.alpha",
            "distill.temperature",
            "distill.top_k",
            "distill.hidden",
            "distill.mesh.",
        ),
        lambda c: bool(c.distill.teacher),
        "there is no teacher: add --distill.teacher with the folder of a run",
    ),
    Effect(
        ("distill.temperature",),
        lambda c: c.distill.alpha > 0,
        "distill.alpha is 0, so that the teacher's answers have no share in the loss: raise it",
    ),
    Effect(
        ("distill.top_k", "distill.step", "distill.mesh."),
        lambda c: c.distill.alpha > 0 or bool(c.distill.hidden),
        "distill.alpha is 0, so that the teacher has no share in the loss: raise it",
    ),
    Effect(
        ("distill.hidden_width", "distill.hidden_weight"),
        lambda c: bool(c.distill.teacher and c.distill.hidden),
        "no hidden states of a teacher are learned: add --distill.hidden last",
    ),
    Effect(
        ("train.label_smoothing",),
        lambda c: not (c.distill.teacher and c.distill.alpha == 1),
        "distill.alpha is 1, so that the labels have no share in the loss: lower it",
    ),
)
_OF_MODELS = (
    Effect(
        ("model.lora.alpha", "model.lora.targets"),
        lambda c: c.model.lora.rank > 0,
        "model.lora.rank is 0, no LoRA: add --model.lora.rank 8",
    ),
    Effect(
        (
            "model.sparsity.targets",
            "model.sparsity.decay",
            "model.sparsity.block",
            "model.sparsity.pattern",
        ),
        lambda c: bool(c.model.sparsity.form),
        "model.sparsity.form is empty, all matrices are dense: add --model.sparsity.form 2:4",
    ),
    Effect(
        ("train.balance_loss",),
        lambda c: c.model.router != "expert_choice",
        "model.router is expert_choice, which gives all experts as many tokens: leave it out",
    ),
    Effect(
        ("model.sparsity.decay",),
        lambda c: c.model.sparsity.trains_all,
        "what model.sparsity.pattern=cyclic leaves out is not trained: leave the decay out",
    ),
    Effect(
        (
            "model.experts_per_token",
            "model.router",
            "model.shared_experts",
            "train.balance_loss",
            "train.router_z_loss",
            "rules.experts",
        ),
        lambda c: c.model.experts > 0,
        "the model has no experts: add --model.experts 8",
    ),
    Effect(
        ("model.rope_scaling",),
        lambda c: c.model.rope_factor != 1,
        "model.rope_factor is 1, no scaling: add --model.rope-factor 8",
    ),
    Effect(
        (
            "model.rope_low_freq_factor",
            "model.rope_high_freq_factor",
            "model.rope_original_seq_len",
        ),
        lambda c: c.model.rope_factor != 1 and c.model.rope_scaling == "llama3",
        "only the llama3 scaling of RoPE takes them: add --model.rope-factor 8",
    ),
    Effect(
        ("model.rope_local_theta",),
        lambda c: any("window(" in word or "local(" in word for word in c.model.masks),
        "no layer of model.masks has a window: add --model.masks 'window(1024)' causal",
    ),
)
_OF_LAYOUTS = (
    Effect(
        ("checkpoint.local_every",),
        lambda c: bool(c.checkpoint.local),
        "there is no local tier: add --checkpoint.local FOLDER, on a disk of each machine",
    ),
    Effect(
        ("checkpoint.local",),
        lambda c: not c.checkpoint.every or c.checkpoint.local_every % c.checkpoint.every != 0,
        "the run folder has a checkpoint at each of checkpoint.local_every's steps: let "
        "checkpoint.every be more of them",
    ),
    Effect(
        ("mesh.join_seconds",),
        lambda c: c.mesh.distributed,
        "one process has no others to wait for: add --mesh.distributed True",
    ),
    Effect(
        (
            "overlap.gather",
            "overlap.scatter",
            "overlap.heads_gather",
            "overlap.heads_scatter",
            "overlap.mlp_gather",
            "overlap.mlp_scatter",
        ),
        lambda c: _split(c, "residual_seq", besides="seq"),
        "no linear gathers a sequence on this mesh: add --mesh.tensor 4",
    ),
    Effect(
        ("context.",),
        lambda c: _split(c, "attention_seq"),
        "attention sees the whole sequence on this mesh: add --mesh.context 4",
    ),
    Effect(
        ("pipeline.",),
        lambda c: _split(c, "stage"),
        "mesh.stage is 1, no pipeline: add --mesh.stage 4",
    ),
)
_OF_MEMORY = (
    Effect(
        ("memory.optimizer",),
        lambda c: c.optimizer.settings.has_moments,
        "this optimizer has no array as large as a parameter, so that nothing would go to host "
        "memory: give it momentum, or leave it out",
    ),
    Effect(
        ("memory.policy", "memory.keep."),
        lambda c: not c.memory.budget,
        "memory.budget finds what to keep: leave one of them out",
    ),
    Effect(
        ("memory.may",),
        lambda c: bool(c.memory.budget),
        "there is no budget: add --memory.budget auto",
    ),
    Effect(
        ("memory.offload_anyway",),
        _offloads,
        "nothing is offloaded: add --memory.optimizer offload, or a budget",
    ),
    Effect(
        ("precision.gradients",),
        lambda c: c.train.accumulation > 1 or _split(c, "stage"),
        "a step adds up no microbatches: add --train.accumulation 2",
    ),
)
EFFECTS = (
    *_OF_DATA,
    *_OF_TRAINING,
    *_OF_OPTIMIZERS,
    *_OF_TEACHERS,
    *_OF_MODELS,
    *_OF_LAYOUTS,
    *_OF_MEMORY,
)
"""All of them. What is given in vain is named in this order."""


def require_effects(name: str, config: Config, flags: Collection[str]) -> None:
    """Refuse a setting that the user gave, that differs from its default and that can have no
    effect.

    Args:
      name: the config's preset, whose keys are not checked, or its file or run folder; empty = it
        is from no file.
      config: the config with the flags, on the mesh that is asked for.
      flags: the keys that were given on the command line.

    Raises:
      UserError: such a setting was given or is in the file, or the file cannot be read.
    """
    for key, because in idle_keys(config):
        if key in flags:
            raise UserError(f"{key} has no effect: {because}")
    if not name or name in presets("jaxpar.configs"):
        return
    text, origin = find_toml(name, "jaxpar.configs")
    if text.startswith(f"# {RESOLVED}"):
        return
    # A key of the file that only a flag has switched off is not the file's mistake.
    alone = dict(idle_keys(parse(text, origin)))
    for key, because in idle_keys(config):
        if key in alone:
            raise UserError(f"{origin}: {key} has no effect: {because}")


def idle_keys(config: Config) -> Iterator[tuple[str, str]]:
    """Find the settings that differ from their defaults and have no effect.

    Args:
      config: the config.

    Yields:
      The dotted key, and the reason.
    """
    values = flatten(config)
    defaults = flatten(Config())
    for effect in EFFECTS:
        if not effect.matters(config):
            tables = tuple(key for key in effect.keys if key.endswith("."))
            found = [key for key in values if key in effect.keys or key.startswith(tables)]
            if callable(effect.because):
                because = effect.because()
            else:
                because = effect.because
            yield from ((key, because) for key in found if values[key] != defaults[key])
