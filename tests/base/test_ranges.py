"""Every number of a config has a range, which is checked whatever way it came in."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.base.config import (
    Config,
    MetricsConfig,
    ModelConfig,
    TrainConfig,
    load_config,
    override,
    parse,
)
from jaxpar.base.config.checks import check
from jaxpar.base.config.optimizer import AdamW, OptimizerConfig
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.base.ranges import ranges
from jaxpar.base.toml import flatten, presets
from jaxpar.cli.arguments import config_args
from jaxpar.cli.commands import TrainArgs

DEFAULTS = flatten(Config())


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def test_every_number_has_a_range_that_holds_its_default() -> None:
    """Those of lists too: the layers of a pipeline's stages, the sides of a sparse block, and shares
    of zeros by depth.
    """
    numbers = {key for key, value in DEFAULTS.items() if is_number(value)}
    lists = {"pipeline.layers", "model.sparsity.block", "pruning.sparsity_by_depth"}
    assert ranges(Config).keys() == numbers | lists
    assert all(ranges(Config)[key].holds(DEFAULTS[key]) for key in numbers)
    assert all(
        math.isfinite(end) for one in ranges(Config).values() for end in (one.least, one.most)
    )


@pytest.mark.parametrize("name", presets("jaxpar.configs"))
def test_every_preset_is_in_them(name: str) -> None:
    config = load_config(name)
    assert check(config) == config


@given(
    st.sampled_from(sorted(ranges(Config))),
    st.sampled_from(
        [
            math.nan,
            math.inf,
            -math.inf,
            -2,
            2**110,
            1e308,
        ]
    ),
)
def test_what_no_number_is_is_refused_for_every_key(key: str, value: float) -> None:
    """A whole number's own type is kept: it cannot be 1e308."""
    if isinstance(DEFAULTS[key], float):
        item = value
    elif math.isfinite(value):
        item = int(value)
    else:
        item = 2**70
    with pytest.raises(UserError, match=rf"^{key}=.* is (not in|below) "):
        check(override(Config(), {key: [item] if DEFAULTS[key] == () else item}))


@pytest.mark.parametrize(
    "door", ["toml", "override", "flag", "word", "dataclass", "today", "flag of today"]
)
def test_every_door_leads_through_the_ranges(door: str) -> None:
    """The config of a run folder is a TOML file, and a sweep's settings are words of the
    command line.
    """
    made = {
        "toml": lambda: parse("[train]\nbeta2 = 1.0"),
        "override": lambda: override(Config(), {"train.beta2": 1}),
        "flag": lambda: (
            config_args("jaxpar train", TrainArgs, ["tiny", "--train.beta2", "1.0"])[1].config
        ),
        "word": lambda: (
            config_args("jaxpar train", TrainArgs, ["tiny", "train.beta2=1.0"])[1].config
        ),
        "dataclass": lambda: Config(optimizer=OptimizerConfig(adamw=AdamW(beta2=1.0))),
        "today": lambda: parse("[optimizer.adamw]\nbeta2 = 1.0"),
        "flag of today": lambda: (
            config_args("jaxpar train", TrainArgs, ["tiny", "--optimizer.adamw.beta2", "1.0"])[
                1
            ].config
        ),
    }
    with pytest.raises(UserError, match=r"^optimizer.adamw.beta2=1.0 is not in \[0, 0.99999\]$"):
        check(made[door]())


WRONG: list[tuple[Any, str]] = [
    (
        Config(train=TrainConfig(learning_rate="fast")),
        "train.learning_rate is a number, found 'fast'",
    ),  # pyright: ignore[reportArgumentType]
    (Config(train=TrainConfig(steps=10.0)), "train.steps is a whole number, found 10.0"),  # pyright: ignore[reportArgumentType]
    (Config(train=TrainConfig(steps=True)), "train.steps is a whole number, found True"),
    (
        Config(train=TrainConfig(z_loss=np.float32(0.5))),
        "train.z_loss is a number, found np.float32",
    ),  # pyright: ignore[reportArgumentType]
    (Config(train=None), "train is a table of settings, found None"),  # pyright: ignore[reportArgumentType]
    (Config(model=ModelConfig(masks="causal")), r"model.masks is a tuple, found 'causal'"),  # pyright: ignore[reportArgumentType]
    (
        Config(metrics=MetricsConfig(sinks=["wandb"])),
        r"metrics.sinks is a tuple, found \['wandb'\]",
    ),  # pyright: ignore[reportArgumentType]
    (
        Config(mesh=MeshSpec(data=0)),
        r"mesh.data=0 is not in \[1, 65,536\], nor -1: an axis has at least 1 device",
    ),
]


@pytest.mark.parametrize(("config", "message"), WRONG)
def test_a_dataclass_of_a_program_is_checked_as_a_file_is(config: Config, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(config)


def test_a_number_of_numpy_that_is_a_float_of_python_is_one() -> None:
    config = override(Config(), {"train.learning_rate": np.float64(1e-4)})
    assert type(config.train.learning_rate) is float and check(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.batch": 10**12}, r"train.batch=1000000000000 is not in \[1, 1,048,576\]"),
        ({"model.layers": 2**63 - 1}, "model.layers=9223372036854775807 is not in"),
        ({"model.layers": 2**70}, r"model.layers=\(a number of 71 bits\) is not in"),
        (
            {"train.batch": 2**20, "data.seq_len": 2048, "model.max_seq_len": 2048},
            "tokens a step: at most 1,073,741,8",
        ),
        ({"model.embed": 2**20, "model.mlp": 2**24}, r"are a model of 1.6e\+14 parameters or more"),
        (
            {"train.learning_rate": 1e-2, "optimizer.adamw.weight_decay": 100.0},
            "would take away all of a matrix",
        ),
        (
            {"model.rope_factor": 8.0, "model.rope_low_freq_factor": 4.0},
            "is not below model.rope_high_freq_factor=4",
        ),
    ],
)
def test_sizes_that_no_machine_has_room_for_are_refused_before_anything_is_built(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check(override(Config(), changes))


def test_a_whole_number_too_large_for_a_float_is_refused_as_infinity_is() -> None:
    with pytest.raises(UserError, match=r"^train\.learning_rate=inf is not in"):
        check(parse(f"[train]\nlearning_rate = {10**400}"))
