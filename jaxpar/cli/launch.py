"""The commands `jaxpar launch` and `jaxpar sweep`: the words of each, and what it prints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from jaxpar.base.config import Config
from jaxpar.base.config.checks import check
from jaxpar.base.console import console
from jaxpar.base.errors import UserError, suggest
from jaxpar.base.field_marks import Trait
from jaxpar.base.ranges import Range
from jaxpar.cli.arguments import ConfigArgs, config_args, plain_name, run_folder, take_words
from jaxpar.launch.script_run import Placement
from jaxpar.launch.scripts import script
from jaxpar.rehearse.targets import load_target


@dataclass(frozen=True)
class RayArgs(ConfigArgs):
    """Start the processes of one run on this machine or on a Ray cluster; they start again together
    when one has died.
    """

    workers: Annotated[int, Range(0, 1_000_000)] = 0
    """Processes on simulated CPU devices, which share the devices of the mesh."""
    target: str = ""
    """The TPUs or GPUs of the cluster to run on, a process for each host: docs/targets.md lists the
    names.
    """
    max_failures: Annotated[int, Range(0, 1_000_000)] = 0
    """The number of times that they start again after a crash."""
    elastic: str = ""
    """The fewest and the most processes, 1:4: when one is gone for good, the run continues with the
    processes that are left, and with more at the next start when there is room.
    """
    at_size: tuple[str, ...] = ()
    """Settings of one number of processes under --elastic, in a word: "2 mesh.fsdp=2 mesh.data=1"
    """
    run: Annotated[str, Trait.MAY_BE_URL] = ""
    """Run folder, on storage that all hosts share; empty = runs/NAME, or the folder that the config
    came from.
    """
    address: Annotated[str, Trait.MAY_BE_URL] = ""
    """The address of the cluster; empty = $RAY_ADDRESS, or this machine alone where that is not
    set.
    """


@dataclass(frozen=True)
class ScriptArgs(Placement, ConfigArgs):
    """Write a script or manifest that starts a run to standard output."""


@dataclass(frozen=True)
class SweepArgs(ConfigArgs):
    """Start a run for every combination of some settings, on this machine or on a Ray cluster; with
    a target, rehearse each.
    """

    over: tuple[str, ...] = ()
    """The settings, each with its values: mesh.tensor=1,2,4 train.learning_rate=1e-3,3e-4"""
    target: str = ""
    """Rehearse each combination for this hardware, which need not be here, and train none: v5p-64,
    h100x64, ...: docs/targets.md lists them. Empty = train.
    """
    run: Annotated[str, Trait.MAY_BE_URL] = ""
    """Folder of the runs, the table and the picture; empty = runs/NAME_sweep, with the target's
    name behind it where there is one.
    """
    per_trial: Annotated[int, Range(0, 1_000_000)] = 0
    """CPUs, GPUs or TPU chips that each run has, by mesh.platform; 0 = all that one machine has."""
    address: Annotated[str, Trait.MAY_BE_URL] = ""
    """The address of the Ray cluster; empty = $RAY_ADDRESS, or this machine alone where that is not
    set.
    """


KINDS = {
    "ray": "start and restart processes here, on a Ray cluster or under KubeRay",
    "slurm": "print a batch script for sbatch",
    "gke": "print a JobSet or a RayJob for kubectl",
    "tpu-vm": "print a bash script that uses gcloud",
    "skypilot": "print a task for sky jobs launch",
}


def launch_command(words: list[str]) -> int:
    """jaxpar launch ray|slurm|gke|tpu-vm|skypilot CONFIG ..."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(
            "usage: jaxpar launch KIND CONFIG ...   (jaxpar launch KIND --help lists its flags)\n"
        )
        print("\n".join(f"  {kind:<8}  {text}" for kind, text in KINDS.items()))
        return 0
    kind, *rest = words
    if kind not in KINDS:
        raise UserError(
            f"no launch {kind!r}{suggest(kind, KINDS)}: jaxpar launch --help lists them"
        )
    usage = f"jaxpar launch {kind} CONFIG [--target T] [--run DIR] [--section.key value ...]"
    if kind != "ray":
        name, args = config_args(usage, ScriptArgs, rest, urls=False)
        print(script(kind, name, args.config, args), end="")
        return 0
    from jaxpar.launch.gang import launch

    name, args = config_args(usage, RayArgs, rest, training=True, urls=False)
    _require_launch(args)
    if args.target:
        target = load_target(args.target)
    else:
        target = None
    result = launch(
        args.config,
        run_folder(name, args.run),
        args.workers,
        target,
        args.max_failures,
        args.address,
        args.elastic,
        _configs_at_size(usage, rest, args.at_size),
    )
    return 130 if result["interrupted"] else 0


def _require_launch(args: RayArgs) -> None:
    """Refuse flags of `launch ray` that can have no effect beside the others."""
    if args.workers and args.target:
        raise UserError("--workers has no effect: a target has a process for each of its hosts")
    if args.workers and args.elastic:
        raise UserError("--workers has no effect: --elastic says how many processes there are")
    if args.at_size and not args.elastic:
        raise UserError("--at-size has no effect: the number of processes changes with --elastic")
    if args.elastic and not args.max_failures:
        raise UserError(
            "--elastic has no effect with --max-failures=0, which starts nothing again: add "
            "--max-failures 10"
        )


def _configs_at_size(usage: str, words: list[str], given: tuple[str, ...]) -> dict[int, Config]:
    """Read the config of each number of processes that has settings of its own."""
    configs = dict[int, Config]()
    for text in given:
        number, *settings = text.split()
        if not number.isdecimal() or not settings:
            raise UserError(
                f"--at-size is {text!r}: give a number of processes and its settings in one word, "
                'such as "2 mesh.fsdp=2"'
            )
        configs[int(number)] = config_args(usage, RayArgs, [*words, *settings])[1].config
    return configs


def sweep_command(words: list[str]) -> int:
    """jaxpar sweep CONFIG --over KEY=V,V KEY=V,V [--run DIR] [--target T] [--per-trial N]
    [--section.key value ...]
    """
    from jaxpar.launch.sweep import grid, results_table, sweep

    usage = sweep_command.__doc__
    over, rest = take_words("--over", words)
    name, args = config_args(usage, SweepArgs, rest)
    trials: dict[str, Any] = {}
    for settings in grid(over):
        try:
            trials[" ".join(settings)] = check(
                config_args(usage, SweepArgs, [*rest, *settings])[1].config
            )
        except UserError as error:
            trials[" ".join(settings)] = error
    if args.target:
        return _rehearse_sweep(Path(name).stem, args, trials)
    folder = Path(args.run or f"runs/{Path(name).stem}_sweep")
    results = sweep(trials, folder, args.per_trial, args.address)
    console().print(results_table(results))
    console().print(f"wrote {folder / 'results.csv'} and {folder / 'results.png'}")
    return int(all(trial.error for trial in results))


def _rehearse_sweep(name: str, args: SweepArgs, trials: dict[str, Any]) -> int:
    """Rehearse the combinations of a sweep in place of training them."""
    from jaxpar.launch.compose import rehearse_trials
    from jaxpar.show.compositions import points_table

    for flag in ("per_trial", "address"):
        if getattr(args, flag):
            raise UserError(
                f"--{flag.replace('_', '-')} has no effect: with --target nothing is trained"
            )
    target = load_target(args.target)
    folder = Path(args.run or f"runs/{name}_sweep_{plain_name(args.target)}")
    points = rehearse_trials(trials, target, folder, console().print)
    console().print(points_table(points))
    refused = all(point.figures is None for point in points)
    picture = "" if refused else f" and {folder / 'results.png'}"
    console().print(f"wrote {folder / 'results.csv'}{picture}")
    return int(refused)
