"""Refuses a config whose values are wrong: of another type, out of their range, of a name that
nobody registered, too large for any machine, or in contradiction with each other.

No device or file is looked at, and nothing is built. What a setting may be and what it contradicts
is said at its field, beside its type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxpar.base.config.hidden_pairs import require_layers
from jaxpar.base.config.schema import Config
from jaxpar.base.errors import UserError, short
from jaxpar.base.field_marks import Idle, Rule, Trait, keys_with, marks_of
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
        of its type, as a run of an earlier version may: such values stop nobody from evaluating it,
        from generating with it or from exporting it.

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
    for key, rules in marks_of(Config, Rule).items():
        for rule in rules:
            asked = training or not (rule.training or only_training(key))
            if asked and (message := rule.message(config)):
                raise UserError(message)
    return config


def only_training(key: str) -> bool:
    """Whether a dotted key is read by training alone: an evaluation is the same whatever its
    value is.
    """
    of_training = keys_with(Config, Trait.TRAINING_ONLY)
    return key in of_training - keys_with(Config, Trait.EVALUATION_TOO)


def outdated(config: Config) -> set[str]:
    """Return which values of an older run's config would be refused today where only training reads
    them. A run that goes on may replace them.

    Args:
      config: the config of the run.

    Returns:
      Their dotted keys.
    """
    values = flatten(config)
    outside = {
        key
        for key, allowed in ranges(Config).items()
        if only_training(key) and not allowed.holds_all(values[key])
    }
    may_be_idle = marks_of(Config, Idle)
    contradict = set[str]()
    for key, rules in marks_of(Config, Rule).items():
        if not only_training(key):
            continue
        broken = [rule for rule in rules if rule.message(config)]
        # such as the decay of an optimizer that is not the one
        if broken and any(mark.when(config) for mark in may_be_idle.get(key, ())):
            continue
        contradict |= {other for rule in broken for other in (key, *rule.also)}
    return outside | contradict


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
