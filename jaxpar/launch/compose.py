"""Many rehearsals of one config: with settings alone, in pairs and together (`compose_config`), or
for each combination of a sweep (`rehearse_trials`).

Both leave tables and a picture in a folder, and go on where they broke off.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.config import Config
from jaxpar.base.errors import Say, UserError, require_local
from jaxpar.base.machine import versions
from jaxpar.launch.small_loss import loss_after
from jaxpar.plan.compositions import Gain, Study, compose, point_line, try_point
from jaxpar.plan.engine import one_by_one, try_rounds
from jaxpar.plan.figures import Figures, Point
from jaxpar.plan.rehearsal_cache import rehearse_point
from jaxpar.plan.settings import Setting
from jaxpar.rehearse.targets import Target

POINTS = "points"
"""The folder, inside that of a study or a sweep, in which rehearsals are remembered."""
LOSSES = "losses"


def compose_config(
    config: Config,
    settings: Mapping[str, Setting],
    target: Target,
    folder: Path,
    train_steps: int = 0,
    loss_within: float = math.inf,
    say: Say = lambda line: None,
    command: str = "",
) -> Study:
    """Rehearse a config with settings alone, in pairs and together; write `results.csv`,
    `pairs.csv`, `results.json` and `results.png`.

    Args:
      folder: where the files go. What was rehearsed or trained there before is not done again.
      train_steps: the steps after which the loss of the small form counts
        (`jaxpar.launch.small_loss`); 0 = nothing is trained.
      loss_within: by how many nats a token the loss of the best may be above the base's.
      say: is called with a line for each point.
      command: the command line, for `results.json`.

    Raises:
      UserError: the config as it is cannot be rehearsed, or a limit of the loss is given and
        nothing is trained.
    """
    require_local(folder)
    if not train_steps and not math.isinf(loss_within):
        raise UserError(
            f"loss_within={loss_within} has no effect: nothing is trained, add train_steps=300"
        )

    def measure(one: Config) -> Figures:
        return rehearse_point(one, target, folder / POINTS, say)

    def train(one: Config) -> float:
        return loss_after(one, train_steps, folder / LOSSES, say)

    loss = train if train_steps else None
    study = compose(config, settings, measure, loss, loss_within, say)
    _write_study(study, settings, target, folder, command)
    return study


def _write_study(
    study: Study, settings: Mapping[str, Setting], target: Target, folder: Path, command: str
) -> None:
    from jaxpar.show.compositions import composition_figure  # matplotlib, for a picture alone
    from jaxpar.show.figures import save_figure

    _write_points(study.points, folder / "results.csv")
    gains = [(gain.pair.name, *gain[1:], gain.verdict) for gain in study.gains()]
    fields = (*Gain._fields, "verdict")
    _write_csv([fields, *gains], folder / "pairs.csv")
    whole = {
        "command": command,
        "target": target.name,
        "versions": versions(),
        "settings": {name: dict(setting.changes) for name, setting in settings.items()},
        "points": [asdict(point) for point in study.points],
        "pairs": [dict(zip(fields, gain, strict=True)) for gain in gains],
        "best": None if study.best is None else study.best.settings,
        "search": study.search,
    }
    write_whole(folder / "results.json", json.dumps(whole, indent=1, default=list) + "\n")
    title = f"{folder.name}: settings on {target.name}, alone and in pairs"
    save_figure(composition_figure(study, title), folder / "results.png")


def rehearse_trials(
    trials: Mapping[str, Config | UserError],
    target: Target,
    folder: Path,
    say: Say = lambda line: None,
) -> list[Point]:
    """Rehearse each combination of a sweep; write `results.csv` and, where one could be,
    `results.png`.

    Args:
      trials: for each combination of settings its config, or why there is none.
      folder: where the files go. What was rehearsed there before is not done again.
      say: is called with a line for each combination.

    Returns:
      How each came out, in the order of `trials`.

    Raises:
      UserError: the folder is none or cannot be written, or the target's compiler is not here.
    """
    from jaxpar.show.compositions import sweep_points_figure  # matplotlib, for a picture alone
    from jaxpar.show.figures import save_figure

    require_local(folder)
    target.devices()  # a compiler that is missing is said once
    known = dict[str, Point]()

    def attempt(name: str) -> Point:
        point = try_point((name,), partial(figures_of, trials[name]), known.values())
        say(f"[{len(known) + 1}/{len(trials)}] {point_line(point)}")
        return point

    def figures_of(config: Config | UserError) -> Figures:
        if isinstance(config, UserError):
            raise config
        return rehearse_point(config, target, folder / POINTS, say)

    points = list(try_rounds([list(trials)], one_by_one(attempt), known).values())
    _write_points(points, folder / "results.csv")
    if any(point.figures for point in points):
        title = f"rehearsed on {target.name}"
        save_figure(sweep_points_figure(points, title), folder / "results.png")
    else:
        say("no combination could be rehearsed, so there is no picture")
    return points


def _write_points(points: Sequence[Point], file: Path) -> None:
    fields = tuple(Figures.__dataclass_fields__)
    rows: list[tuple[Any, ...]] = [("settings", *fields, "loss", "why_not", "same_as")]
    for point in points:
        known = {} if point.figures is None else asdict(point.figures)
        figures = [known.get(field) for field in fields]
        rows.append((point.name, *figures, point.loss, point.why_not, point.same_as))
    _write_csv(rows, file)


def _write_csv(rows: Sequence[Sequence[Any]], file: Path) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    write_whole(file, text.getvalue())
