"""Settings by name: each is a few keys of a config that change together, such as `remat`.

`SETTINGS` is the table of them; a new one is a row. A program, a file of tables and the command
line add their own (`Setting(changes=...)`, `read_settings`). `apply_settings` puts some into a
config, and refuses those that contradict each other or change nothing, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpar.base.config import Config, override
from jaxpar.base.config.checks import check
from jaxpar.base.config.unused_settings import idle_keys
from jaxpar.base.errors import UTF8, UserError, reading, suggest
from jaxpar.base.layout.activation_names import Keep
from jaxpar.base.toml import flatten, read_tables


@dataclass(frozen=True)
class Setting:
    """A few keys of a config with the values that they take, and what that is for.

    Attributes:
      text: what the setting does, in a few words.
      changes: the values by dotted key: `{"overlap.domino": "on"}`.
    """

    text: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)


class NoEffect(UserError):
    """A refusal of a setting that changes nothing: the step is the same with it and without."""


def _policy(name: str, **keep: str) -> dict[str, Any]:
    """List the keys of a memory policy, with every activation as it says but for those in
    `keep`.
    """
    kept = vars(Keep()) | keep
    return {"memory.policy": name} | {f"memory.keep.{one}": choice for one, choice in kept.items()}


SETTINGS: dict[str, Setting] = {
    "remat": Setting("each block keeps its input alone, and is computed again", _policy("full")),
    "dots": Setting("each block keeps what its matmuls make", _policy("dots")),
    "attention-out": Setting(
        "each block keeps its input and what attention makes", _policy("attention_out")
    ),
    "keep-all": Setting("each block keeps everything", _policy("none")),
    "offload": Setting(
        "the optimizer's state lies in host memory", {"memory.optimizer": "offload"}
    ),
    "offload-inputs": Setting(
        "the inputs of the blocks go to host memory, and all else is computed again",
        _policy("full", block_input="offload"),
    ),
    "domino": Setting("each block runs on two halves of the batch", {"overlap.domino": "on"}),
    "rings": Setting(
        "sequences are gathered and scattered part by part beside the matmuls",
        {"overlap.gather": "ring", "overlap.scatter": "ring"},
    ),
    "tensor": Setting("pairs of devices share each layer", {"mesh.tensor": 2}),
    "zero1": Setting(
        "the optimizer's state is split over data as well", {"rules.state_embed": ["fsdp", "data"]}
    ),
    "bf16-moments": Setting("first moments in bfloat16", {"precision.moments": "bfloat16"}),
    "bf16-gradients": Setting(
        "sums of gradients over microbatches in bfloat16", {"precision.gradients": "bfloat16"}
    ),
    "bf16-params": Setting("matrices stored in bfloat16", {"precision.params": "bfloat16"}),
    "bigbird": Setting(
        "attention to blocks near, first and at random", {"model.masks": ["bigbird"]}
    ),
    "window": Setting("attention to the last 1,024 tokens", {"model.masks": ["window(1024)"]}),
    "2:4": Setting(
        "of every four entries of a matrix two multiply, trained with SR-STE",
        {"model.sparsity.form": "2:4"},
    ),
    "loss-slices": Setting("the loss holds 256 MiB at once", {"memory.loss_mib": 256}),
    "one-microbatch": Setting("the batch is not cut into microbatches", {"train.accumulation": 1}),
}
"""The settings that `jaxpar compose --with` knows by name."""


def read_settings(file: str) -> dict[str, Setting]:
    """Read settings of one's own from a TOML file: a table for each, with the keys that it changes.
    They are checked when they are applied.

        [narrow.model]
        masks = ["window(256)"]

    Raises:
      UserError: the file cannot be read or is no TOML, or a name stands for no table.
    """
    with reading(file), open(file, encoding=UTF8) as opened:
        text = opened.read()
    found = dict[str, Setting]()
    for name, table in read_tables(text, file).items():
        if not isinstance(table, dict) or not table:
            raise UserError(
                f"{file}: {name} is a table of the keys that the setting changes, found {table!r}: "
                f'write [{name}.memory] and policy = "full"'
            )
        found[name] = Setting(f"of {file}", _dotted(table))
    return found


def _dotted(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables into values by dotted key."""
    found = dict[str, Any]()
    for key, value in table.items():
        if isinstance(value, dict):
            found |= _dotted(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def find_settings(names: Sequence[str], own: Mapping[str, Setting]) -> dict[str, Setting]:
    """Look settings up by name.

    Args:
      names: the names, in the order in which they are shown.
      own: settings beside those of the table; one of the same name goes before the table's.

    Raises:
      UserError: a name is not known or is given twice, or there is none.
    """
    known = SETTINGS | dict(own)
    if not names:
        raise UserError(f"which settings? --with takes some of {', '.join(known)}")
    for name in names:
        if name not in known:
            raise UserError(
                f"no setting {name!r}{suggest(name, known)}: there are {', '.join(known)}, and "
                "keys with their values, such as memory.policy=full"
            )
        if names.count(name) > 1:
            raise UserError(f"the setting {name} is given twice: leave one of them out")
    return {name: known[name] for name in names}


def contradiction(settings: Mapping[str, Setting]) -> str:
    """Name two settings that cannot stand together, the key and both its values, in one line; empty
    = all can.
    """
    by_key = dict[str, tuple[str, Any]]()
    for name, setting in settings.items():
        for key, value in setting.changes.items():
            first, said = by_key.setdefault(key, (name, value))
            if _as_list(said) != _as_list(value):
                return f"{first} and {name} contradict each other: {key} is {said!r} and {value!r}"
    return ""


def _as_list(value: Any) -> Any:
    """Convert a tuple to a list, so that both compare as one."""
    return list(value) if isinstance(value, tuple) else value


def apply_settings(config: Config, settings: Mapping[str, Setting]) -> Config:
    """Put settings into a config, which `check` then has passed.

    Raises:
      NoEffect: one of them changes nothing: the config is so already, or its keys have no effect
        there.
      UserError: two contradict each other, a key is not known, or `check` refuses a value.
    """
    if said := contradiction(settings):
        raise UserError(said)
    changes = {
        key: value for setting in settings.values() for key, value in setting.changes.items()
    }
    changed = override(config, changes)
    before = flatten(config)
    after = flatten(changed)
    for name, setting in settings.items():
        if all(before[key] == after[key] for key in setting.changes):
            raise NoEffect(f"{name} changes nothing: the config is so already")
    known = dict(idle_keys(config))
    for key, because in idle_keys(changed):
        of = [name for name, setting in settings.items() if key in setting.changes]
        if of and (key not in known or before[key] != after[key]):
            raise NoEffect(f"{of[0]} changes nothing: {key} has no effect: {because}")
    return check(changed)
