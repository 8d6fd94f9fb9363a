"""A run for every combination of some settings, under Ray Tune, with a table, a file and a picture
of the results.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.table import Table

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.config import Config
from jaxpar.base.console import count_text
from jaxpar.base.errors import UserError, require_local
from jaxpar.launch.gang import job_of, read_job
from jaxpar.launch.local import train_config
from jaxpar.launch.ray_cluster import ray_started
from jaxpar.train.metrics import read_metrics


class Trial(NamedTuple):
    """How the run of one combination of settings ended: losses in nats a token, medians of its
    rates.
    """

    settings: str
    """The settings, `mesh.tensor=2 train.learning_rate=1e-3`."""
    loss: float | None = None
    val_loss: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    error: str = ""
    """The reason why the config was refused, or why the run broke off."""


def grid(over: Sequence[str]) -> list[list[str]]:
    """List every combination of `["mesh.tensor=1,2", ...]`, as settings: `[["mesh.tensor=1", ...],
    ...]`.

    Raises:
      UserError: a word names no values, or there is none.
    """
    axes = []
    for word in over:
        key, equals, values = word.partition("=")
        if not (equals and values and "." in key):
            raise UserError(
                f"--over takes settings with their values, as in mesh.tensor=1,2,4: found {word!r}"
            )
        axes.append([f"{key}={value}" for value in split_values(values)])
    if not axes:
        raise UserError(
            "over which settings? --over mesh.tensor=1,2,4 train.learning_rate=1e-3,3e-4"
        )
    return [list(combination) for combination in itertools.product(*axes)]


def split_values(text: str) -> list[str]:
    """Cut a text at the commas that stand in no brackets: `[window(8),bigbird(3, 1)],[causal]` has
    two parts.
    """
    parts = [""]
    depth = 0
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def sweep(
    trials: Mapping[str, Config | UserError], folder: Path, per_trial: int = 0, address: str = ""
) -> list[Trial]:
    """Train each config in a folder of its own under `folder`; write `results.csv` and
    `results.png` there.

    Args:
      trials: for each combination of settings its config, or why there is none.
      folder: storage that all machines of the cluster share. Runs that are in it go on.
      per_trial: CPUs, GPUs or TPU chips of a run; 0 = all that one machine has.
      address: the cluster, as `jaxpar.launch.ray_cluster.ray_started` takes it.

    Returns:
      How each ended, in the order of `trials`.

    Raises:
      UserError: Ray is not here, or has too few chips.
    """
    require_local(folder)
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    found = {
        settings: Trial(settings, error=str(e))
        for settings, e in trials.items()
        if isinstance(e, UserError)
    }
    configs = {
        settings: config for settings, config in trials.items() if isinstance(config, Config)
    }
    jobs = {
        settings: job_of(config, folder / _name(settings)) for settings, config in configs.items()
    }
    on_cpu = all(config.mesh.platform == "cpu" for config in configs.values())
    with ray_started(address) as cluster:
        from ray import tune  # pyright: ignore[reportMissingImports]

        lines = cluster.lines  # all of the cluster that a trial's process is sent

        def run(chosen: dict[str, str]) -> None:
            tune.report(_run(chosen["settings"], jobs[chosen["settings"]], lines)._asdict())

        tuner = tune.Tuner(
            tune.with_resources(run, _resources(cluster.ray, on_cpu, per_trial)),
            param_space={"settings": tune.grid_search(list(jobs))},
            run_config=tune.RunConfig(storage_path=cluster.records, verbose=0),
        )
        ended: Any = tuner.fit() if jobs else ()
        for result in ended:
            settings = result.config["settings"]
            known = {key: result.metrics.get(key) for key in Trial._fields}
            if result.error:
                last = str(result.error).strip().splitlines()[-1]
            else:
                last = ""
            found[settings] = Trial(settings, error=last) if last else Trial(**known)
    results = [found[settings] for settings in trials]
    text = io.StringIO(newline="")
    csv.writer(text).writerows([Trial._fields, *results])
    write_whole(folder / "results.csv", text.getvalue())
    from jaxpar.show.figures import save_figure, sweep_figure  # matplotlib, which no run waits for

    rates = {trial.settings: trial.tokens_per_second or 0 for trial in results if not trial.error}
    rows = {settings: read_metrics(folder / _name(settings)) for settings in rates}
    save_figure(sweep_figure(rows, rates), folder / "results.png")
    return results


def _name(settings: str) -> str:
    return re.sub(r"[^\w.=-]+", "_", settings)


def _resources(ray: Any, on_cpu: bool, count: int) -> dict[str, float]:
    """Choose what Ray keeps for a run: `count` CPUs, GPUs or TPU chips, or all of the largest
    machine.
    """
    kinds = ["CPU"] if on_cpu else ["TPU", "GPU", "CPU"]
    kind = next(kind for kind in kinds if ray.cluster_resources().get(kind))
    most = int(max(node["Resources"].get(kind, 0) for node in ray.nodes()))
    if count > most:
        raise UserError(
            f"--per-trial {count}: no machine of the Ray cluster has more than {most} {kind}s"
        )
    return {kind.replace("CPU", "cpu").replace("GPU", "gpu"): count or most}


def _run(settings: str, job: dict[str, str], lines: Any) -> Trial:
    """Train one combination of settings in a process of its own."""
    try:
        config, folder = read_job(job)
        train_config(config, folder)
    except UserError as error:
        lines.put(f"{settings}: {error}")
        return Trial(settings, error=str(error))
    rows = read_metrics(folder)
    last = {key: value for row in rows for key, value in row.items()}
    rates = {
        key: [row[key] for row in rows if key in row]
        for key in ("tokens_per_second", "step_seconds")
    }
    trial = Trial(
        settings,
        last.get("loss"),
        last.get("final_val_loss", last.get("val_loss")),
        # the first is of the start
        **{key: median(values[1:] or values) for key, values in rates.items() if values},
    )
    lines.put(
        f"{settings}: loss {trial.loss:.4f}, {count_text(trial.tokens_per_second or 0)} tok/s"
    )
    return trial


def results_table(results: Sequence[Trial]) -> Table:
    """Make the table of what `sweep` returned, a row for each combination; all have the same
    settings.
    """
    # a value may have spaces
    words = [re.split(r" (?=\w+\.[\w.]+=)", trial.settings) for trial in results]
    keys = [word.partition("=")[0] for word in words[0]]
    table = Table(
        *keys, "loss", "validation", "tok/s", "step", "refused or failed", box=None, pad_edge=False
    )
    forms = ("{:.4f}", "{:.4f}", "{:,.0f}", "{:.3f} s")
    for trial, settings in zip(results, words, strict=True):
        numbers = (trial.loss, trial.val_loss, trial.tokens_per_second, trial.step_seconds)
        shown = [
            form.format(x) if x is not None else "" for form, x in zip(forms, numbers, strict=True)
        ]
        table.add_row(
            *(word.partition("=")[2] for word in settings),
            *shown,
            trial.error,
        )
    return table
