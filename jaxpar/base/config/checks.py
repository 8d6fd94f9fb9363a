"""Refuses a config whose values are wrong: of another type, out of their range, of a name that
nobody registered, too large for any machine, or in contradiction with each other.

No device or file is looked at, and nothing is built. What only training reads of a config, and its
contradictions, are in `jaxpar.base.config.training_rules`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxpar.base.config.fitting_batch import batch_shards, fitting_batch
from jaxpar.base.config.hidden_pairs import require_layers
from jaxpar.base.config.schema import Config, ModelConfig
from jaxpar.base.config.training_rules import only_training, outdated_keys, training_rules
from jaxpar.base.errors import UserError, short
from jaxpar.base.ranges import ranges, require_ranges
from jaxpar.base.registry import require_names
from jaxpar.base.toml import as_tables, flatten, from_dict

_SURROGATE = re.compile("[\ud800-\udfff]")
"""What Python makes of bytes of a file's name that are no UTF-8."""
_MOST_PARAMETERS = 10**14
_MOST_TOKENS = 2**30  # of a global batch


def check(config: Config, training: bool = True) -> Config:
    """Return the config, or refuse it; no device or file is looked at, and nothing is built.

    Args:
      config: the config.
      training: whether it is to be trained. Otherwise what only training reads may have any value
        of its type, as a run of an earlier version may.

    Returns:
      The config as it is.

    Raises:
      UserError: a value has the wrong type, a number is not in its range, a name is not registered,
        or settings contradict each other.
    """
    values = flatten(config)
    _require_types(values)
    if training:
        read = values
    else:
        read = {key: value for key, value in values.items() if not only_training(key)}
    require_ranges(Config, read)
    require_names(Config, values)
    _require_size(config)
    require_layers(config.distill.hidden, config.model.layers)
    messages = [*_of_model(config.model), *_of_step(config)]
    if training:
        messages += _of_pruning(config)
        messages += [rule.message for rule in training_rules(config) if rule.broken]
    if messages:
        raise UserError(messages[0])
    return config


def outdated(config: Config) -> set[str]:
    """Return which values of an older run's config would be refused today where only training reads
    them.

    Args:
      config: the config of the run.

    Returns:
      Their dotted keys.
    """
    return outdated_keys(config, flatten(config), ranges(Config))


def require_settled(config: Config) -> None:
    """Refuse a config in which something is open that `jaxpar.plan.resolve` settles.

    Args:
      config: the config.

    Raises:
      UserError: a part of `overlap` is `auto`, or `memory.budget` is set.
    """
    still = [
        f"overlap.{key} = auto" for key, value in vars(config.overlap).items() if value == "auto"
    ]
    if config.memory.budget:
        still.append(f"memory.budget = {config.memory.budget}")
    if still:
        raise UserError(f"{', '.join(still)}: still to be settled, by jaxpar.plan.resolve(config)")


def _of_model(model: ModelConfig) -> Iterator[str]:
    """The contradictions between the sizes of a model, a message each."""
    low = model.rope_low_freq_factor
    high = model.rope_high_freq_factor
    if model.rope_factor != 1 and low >= high:
        yield (
            f"model.rope_low_freq_factor={low:g} is not below model.rope_high_freq_factor={high:g}"
            ": between the two RoPE goes from scaled to not scaled"
        )
    if model.head_dim == 0 and model.embed % model.heads:
        yield (
            f"model.embed={model.embed} is not a multiple of model.heads={model.heads}: set "
            "model.head_dim"
        )
    if model.kv_heads > 0 and model.heads % model.kv_heads:
        yield f"model.heads={model.heads} is not a multiple of model.kv_heads={model.kv_heads}"
    if not model.masks:
        yield 'model.masks is empty: masks = ["causal"] is the usual one'
    if model.lora.rank > 0 and not model.lora.targets:
        yield "model.lora.targets=[] adapts nothing: name a matrix"
    yield from model.sparsity.contradictions()
    if model.lora.rank > 0 and model.sparsity.form:
        yield (
            f"model.lora.rank={model.lora.rank} with model.sparsity.form={model.sparsity.form}: "
            "merged into a sparse matrix, the product of a pair would make it dense: use one of "
            "them"
        )
    chosen = model.experts_per_token
    if model.experts != 0 and not 1 <= chosen <= model.experts:
        yield f"model.experts_per_token={chosen} is not in 1..model.experts={model.experts}"


def _of_pruning(config: Config) -> Iterator[str]:
    """What cannot be pruned, a message each."""
    yield from config.pruning.contradictions(config.train.steps, config.model.layers)
    method = config.pruning.method
    if method == "none":
        return
    if config.model.sparsity.form:
        yield (
            f"pruning.method={method} with model.sparsity.form={config.model.sparsity.form}: both "
            "choose which entries count: use one of them"
        )
    if config.model.lora.rank > 0:
        yield (
            f"pruning.method={method} with model.lora.rank={config.model.lora.rank}: what would be "
            "pruned is frozen beside LoRA: use one of them"
        )
    streamed = [
        name for name in ("optimizer", "parameters") if getattr(config.memory, name) == "offload"
    ]
    if streamed:
        yield (
            f"pruning.method={method} with memory.{streamed[0]}=offload: the choice looks at all "
            f"layers at once, and they pass the device one by one: try memory.{streamed[0]}=device"
        )


def _of_step(config: Config) -> Iterator[str]:
    """The contradictions between a model and its batches, a message each."""
    model = config.model
    seq_len = config.data.seq_len
    batch = config.train.batch
    parts = config.train.accumulation
    if config.overlap.domino in ("on", "sequence") and model.dropout > 0:
        yield (
            f"overlap.domino with model.dropout={model.dropout}: halves of a batch would drop "
            "other entries than the whole, leave one of them out"
        )
    if seq_len > model.max_seq_len:
        yield f"data.seq_len={seq_len} is not in 1..model.max_seq_len={model.max_seq_len}"
    # where the devices decide how many share a batch, the plan is asked
    if batch % parts and (shards := batch_shards(config)):
        yield (
            f"train.batch={batch} does not split into train.accumulation={parts} microbatches: "
            f"try train.batch={fitting_batch(config, shards)}"
        )


def _require_types(values: Mapping[str, Any]) -> None:
    """Refuse a value of another type than the schema's, as a program may give a dataclass."""
    typed = flatten(from_dict(Config, as_tables(values), "config"))
    for key, value in values.items():
        if isinstance(typed[key], tuple) and not isinstance(value, tuple):
            raise UserError(f"config: {key} is a tuple, found {value!r}: write {typed[key]!r}")
        if isinstance(value, tuple):
            items = value
        else:
            items = (value,)
        if any(isinstance(item, str) and _SURROGATE.search(item) for item in items):
            raise UserError(
                f"{key} is no text that can be written as UTF-8, found {short(value)}: rename "
                "the file"
            )


def _require_size(config: Config) -> None:
    """Refuse a model or a batch that no machine has room for, by its sizes alone."""
    model = config.model
    train = config.train
    data = config.data
    heads = model.heads + model.kv_head_count
    attention = 2 * model.embed * model.head_size * heads
    mlp = 2 * model.embed * model.mlp * max(model.experts + model.shared_experts, 1)
    tables = model.embed * (model.vocab_size + model.max_seq_len)
    layers = model.layers + model.query_layer
    parameters = tables + layers * (attention + mlp)
    if parameters > _MOST_PARAMETERS:
        raise UserError(
            f"model.layers={model.layers:,}, embed={model.embed:,}, mlp={model.mlp:,}, "
            f"heads={model.heads:,}, experts="
            f"{model.experts:,}, vocab_size={model.vocab_size:,} and "
            f"max_seq_len={model.max_seq_len:,} are a model of "
            f"{parameters:.1e} parameters or more: at most {_MOST_PARAMETERS:.0e} are taken"
        )
    tokens = train.batch * data.seq_len
    if tokens > _MOST_TOKENS:
        raise UserError(
            f"train.batch={train.batch:,} sequences of data.seq_len={data.seq_len:,} are "
            f"{tokens:,} tokens a step: at "
            f"most {_MOST_TOKENS:,} are taken"
        )
