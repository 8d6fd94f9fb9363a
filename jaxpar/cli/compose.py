"""`jaxpar compose`: the words that name settings, and what it prints."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jaxpar.base.config import Config
from jaxpar.base.console import console
from jaxpar.base.errors import UserError
from jaxpar.base.field_marks import Trait
from jaxpar.base.ranges import MOST_STEPS, Range
from jaxpar.cli.arguments import ConfigArgs, config_args, flag_words, plain_name
from jaxpar.cli.flags import flags_of, read_flags
from jaxpar.launch.sweep import split_values
from jaxpar.plan.settings import SETTINGS, Setting, find_settings, read_settings
from jaxpar.rehearse.targets import load_target


@dataclass(frozen=True)
class ComposeArgs(ConfigArgs):
    """How settings compose on hardware that is not here: each alone, all pairs, and the fastest
    combination that fits.
    """

    with_: tuple[str, ...] = ()
    """The settings, by name (remat, offload, domino, ...: docs/compositions.md lists them) or as
    keys with their values: remat,memory.optimizer=offload,mesh.tensor=2+overlap.domino=on"""
    settings: str = ""
    """Settings of your own: a TOML file with a table for each, of the keys that it changes."""
    target: str = ""
    """v5p-64 (chips), v5e-8, h100x64, ...: docs/targets.md lists them."""
    train_steps: Annotated[int, Range(0, MOST_STEPS)] = 0
    """Train a small form of each config this many steps on one simulated device, for its loss; 0 =
    none is trained.
    """
    loss_within: Annotated[float, Range(0.0, 1e3)] = math.inf
    """By how many nats a token the loss of the best may be above the base's; for --train-steps.
    """
    run: Annotated[str, Trait.MAY_BE_URL] = ""
    """Folder of the tables and the picture, where points are remembered; empty =
    runs/NAME_compose_TARGET."""


def compose_command(words: list[str]) -> int:
    """jaxpar compose CONFIG --with NAME,NAME,KEY=VALUE --target T [--train-steps N]
    [--section.key value ...]
    """
    from jaxpar.launch.compose import compose_config
    from jaxpar.show.compositions import gains_table, points_table

    name, args = config_args(compose_command.__doc__, ComposeArgs, words)
    if not args.target:
        raise UserError(
            "compose needs --target: v5p-64, v5e-8, h100x64, ...: docs/targets.md lists them"
        )
    own = read_settings(args.settings) if args.settings else {}
    names = split_names(args.with_)
    own |= {word: own_setting(word) for word in names if "=" in word}
    target = load_target(args.target)
    folder = Path(args.run or f"runs/{Path(name).stem}_compose_{plain_name(args.target)}")
    show = console()
    study = compose_config(
        args.config,
        find_settings(names, own),
        target,
        folder,
        args.train_steps,
        args.loss_within,
        show.print,
        " ".join(["jaxpar compose", *words]),
    )
    show.print(points_table(study.points, study.base))
    show.print()
    show.print(gains_table(study.gains()))
    show.print(f"search: {study.search}")
    if study.best is None:
        show.print("best: nothing fits")
    else:
        show.print(f"best: {study.best.name}: {study.speed(study.best):.3f} of the base's speed")
    show.print(f"wrote {folder / 'results.csv'}, pairs.csv, results.json and results.png")
    return int(study.best is None)


def split_names(words: tuple[str, ...]) -> list[str]:
    """Cut the words of `--with` at commas outside brackets.

    Args:
      words: `("remat,domino", "model.masks=[window(8),bigbird(3, 1)]")`.

    Returns:
      A name or a group of keys each.
    """
    parts = [part for word in words for part in split_values(word)]
    return [part.strip() for part in parts if part.strip()]


def own_setting(word: str) -> Setting:
    """Read keys with their values, joined by `+`, as a setting.

    Args:
      word: `memory.policy=full+overlap.domino=on`.

    Returns:
      The setting.

    Raises:
      UserError: a part is no key with a value.
    """
    parts = re.split(r"\+(?=\w+\.[\w.]+=)", word)
    values, left = read_flags(flags_of(Config), flag_words(parts))
    if left:
        raise UserError(
            f"--with takes names ({', '.join(SETTINGS)}) and keys with their values, such as "
            f"memory.policy=full: found {left[0]!r}"
        )
    return Setting(word, values)
