"""The commands that measure the training step and generation beside PyTorch, rehearse the presets,
hold rehearsals against published steps and against steps of this machine, and rank measured plans.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.config import Config
from jaxpar.base.console import check_folders, console
from jaxpar.base.errors import UserError
from jaxpar.base.machine import machine_memory
from jaxpar.base.ranges import Range
from jaxpar.cli.arguments import (
    config_args,
    parse_words,
)


@dataclass(frozen=True)
class BenchArgs:
    """Measure the training step beside the step of `transformers` in PyTorch, in turns; `jaxpar
    bench generate CONFIG` measures generation.
    """

    config: Config
    rounds: Annotated[int, Range(1, 1_000_000)] = 15
    """The number of rounds, in which each is measured once; the ratio's quartiles are over them."""
    calls: Annotated[int, Range(1, 1_000_000)] = 10
    """The steps of each in a round."""


@dataclass(frozen=True)
class BenchGenerateArgs:
    """Measure prefill and decoding beside those of `transformers` in PyTorch, in turns, with random
    weights.
    """

    config: Config
    batch: Annotated[int, Range(1, 1_000_000)] = 1
    """The prompts that run at once."""
    prompt_tokens: Annotated[int, Range(1, 1_000_000)] = 128
    """The tokens of each prompt."""
    new_tokens: Annotated[int, Range(2, 1_000_000)] = 64
    """The new tokens of each prompt; the prefill makes the first of them."""
    rounds: Annotated[int, Range(1, 1_000_000)] = 9
    """The number of rounds, in which each is measured once; the ratio's quartiles are over them."""


@dataclass(frozen=True)
class BenchPresetsArgs:
    """Rehearse every preset on its target with the compilers at hand: the time of a step, the part
    of it that waits for collectives, and a device's memory. With `--against`, beside the numbers of
    another version.
    """

    only: tuple[str, ...] = ()
    """Rehearse these presets; none = all."""
    json: str = ""
    """Write the table: FILE.json."""
    against: str = ""
    """A table that another version has written."""


@dataclass(frozen=True)
class BenchPlansArgs:
    """Rank measured plans by the closed forms of a step's time: published iteration times of many
    plans of one model on one cluster. Within each group the rank correlation, and what the plan
    that is ranked first costs more than the fastest. With `--rehearsed`, plans of the planner's own
    space beside their rehearsals. docs/plan_board.md has the results.
    """

    rows: str = ""
    """A CSV file of plans in place of the ones that come with the library: docs/plan_board.md has
    its columns.
    """
    rehearsed: bool = False
    """Rank plans that were rehearsed, by pairs of a model and a target."""
    anew: bool = False
    """Draw and rehearse the plans anew, which takes a compiler and hours; what --out has already is
    not rehearsed again.
    """
    only: tuple[str, ...] = ()
    """Take the pairs whose names begin so; none = all."""
    out: str = "runs/plans"
    """Folder of what is rehearsed anew."""
    json: str = ""
    """Write every plan with its estimate: FILE.json."""
    picture: str = ""
    """Draw predicted against measured or rehearsed times: FILE.png."""


@dataclass(frozen=True)
class BenchForesightArgs:
    """Rehearse published training steps, and show each prediction beside what was measured: by
    chip the error, and the error of a plain count of FLOPs. docs/foresight.md has the result.
    """

    rows: str = ""
    """A CSV file of measurements in place of the published ones: docs/foresight.md has its
    columns.
    """
    only: tuple[str, ...] = ()
    """Take the rows whose names begin so; none = all."""
    out: str = "runs/foresight"
    """Folder of the compiled programs, the board and its picture. A program that is there is priced
    again, and not compiled.
    """
    anew: bool = False
    """Compile also the rows whose programs come with the library."""
    json: str = ""
    """Write the board: FILE.json; empty = board.json in the folder."""
    quick: bool = False
    """Take one row a chip, the one with the fewest devices."""


@dataclass(frozen=True)
class BenchHereArgs:
    """Run small training steps on this machine's CPU, on one device and on several simulated ones,
    beside their rehearsals for it: the rank correlation of the two, and the error of each.
    """

    only: tuple[str, ...] = ()
    """Take these configs, by the names of the table; none = all 16."""
    quick: bool = False
    """Take five of them."""
    rounds: Annotated[int, Range(1, 1_000_000)] = 15
    """The number of rounds, in which each is measured once."""
    json: str = ""
    """Write the board: FILE.json."""


def bench_command(words: list[str]) -> int:
    """jaxpar bench CONFIG [--rounds N] [--calls N] [--section.key value ...]"""
    if words[:1] == ["generate"]:
        return bench_generate_command(words[1:])
    if words[:1] == ["presets"]:
        return bench_presets_command(words[1:])
    if words[:1] == ["plans"]:
        return bench_plans_command(words[1:])
    if words[:1] == ["foresight"]:
        return bench_foresight_command(words[1:])
    if words[:1] == ["here"]:
        return bench_here_command(words[1:])
    from jaxpar.bench.measure import bench_step, table
    from jaxpar.train.experiments import make_experiment
    from jaxpar.train.state_memory import require_memory

    _, args = config_args(bench_command.__doc__, BenchArgs, words)
    say = console().print
    experiment = make_experiment(args.config)
    require_memory(experiment, machine_memory())
    say(table(bench_step(experiment, args.rounds, args.calls, say=say)))
    return 0


def bench_generate_command(words: list[str]) -> int:
    """jaxpar bench generate CONFIG [--batch N] [--prompt-tokens N] [--new-tokens N] [--rounds N]
    [--section.key value ...]
    """
    from jaxpar.bench.generate import bench_generate
    from jaxpar.bench.measure import table
    from jaxpar.train.experiments import make_experiment

    _, args = config_args(bench_generate_command.__doc__, BenchGenerateArgs, words)
    say = console().print
    experiment = make_experiment(args.config)
    rows = bench_generate(
        experiment, args.batch, args.prompt_tokens, args.new_tokens, args.rounds, say
    )
    say(table(rows))
    return 0


def bench_presets_command(words: list[str]) -> int:
    """jaxpar bench presets [--only NAME ...] [--json FILE.json] [--against FILE.json]"""
    from jaxpar.bench.measure import table
    from jaxpar.bench.presets import preset_rows, read_presets, rehearse_presets

    args = parse_words(bench_presets_command.__doc__, BenchPresetsArgs(), words)
    say = console().print
    before = read_presets(Path(args.against)) if args.against else None
    check_folders(args.json)
    found = rehearse_presets(args.only, say)
    if args.json:
        write_whole(Path(args.json), json.dumps(found, indent=1) + "\n")
    for title, of in (("before", before), ("now", found)):
        if of:
            say(f"{title}: {', '.join(f'{name} {it}' for name, it in of['versions'].items())}")
    say(table(preset_rows(found, before)), soft_wrap=True)
    return 1 if any(row["refused"] for row in found["rows"]) else 0


def bench_plans_command(words: list[str]) -> int:
    """jaxpar bench plans [--rows FILE.csv] [--rehearsed [--only PAIR ...] [--anew] [--out FOLDER]]
    [--json FILE.json] [--picture FILE.png]
    """
    args = parse_words(bench_plans_command.__doc__, BenchPlansArgs(), words)
    _require_plans_flags(args)
    check_folders(args.json, args.picture)
    return _rank_rehearsed(args) if args.rehearsed else _rank_measured(args)


def _require_plans_flags(args: BenchPlansArgs) -> None:
    """Refuse flags that can have no effect."""
    if not args.rehearsed and (args.anew or args.only):
        raise UserError("--anew and --only are of rehearsed plans: give --rehearsed too")
    if args.anew and args.rows:
        raise UserError("--anew writes the rows of --out, and --rows reads others: leave one out")
    if args.out != BenchPlansArgs().out and not args.anew:
        raise UserError("--out is the folder of --anew: give that too")


def _rank_measured(args: BenchPlansArgs) -> int:
    from jaxpar.bench.measure import table
    from jaxpar.bench.plans.ranking import as_json, rank_plans, summary_rows, worst_rows
    from jaxpar.bench.plans.rows import measured_plans

    say = console().print
    rows = measured_plans(Path(args.rows) if args.rows else None)
    groups = rank_plans(rows, say=say)
    if not groups:
        say("no group has two plans: there is nothing to rank")
        return 0
    say(table(summary_rows(groups)), soft_wrap=True)
    say(table(worst_rows(groups)), soft_wrap=True)
    _write_plans(args, as_json(groups))
    return 0


def _rank_rehearsed(args: BenchPlansArgs) -> int:
    from jaxpar.bench.measure import table
    from jaxpar.bench.plans.against_rehearsals import (
        as_json,
        choice_rows,
        pair_rows,
        rank_rehearsed,
    )
    from jaxpar.bench.plans.pairs import pairs_of
    from jaxpar.bench.plans.rehearse_pairs import rehearse_pairs
    from jaxpar.bench.plans.rehearsed import rehearsed_plans

    say = console().print
    wanted = pairs_of(args.only)
    if args.anew:
        rows = rehearse_pairs(wanted, Path(args.out), say)
    else:
        rows = rehearsed_plans(Path(args.rows) if args.rows else None)
    names = {pair.name for pair in wanted}
    pairs = rank_rehearsed([row for row in rows if row.pair in names], say)
    if not pairs:
        say("no pair has two plans that fit: there is nothing to rank")
        return 0
    say(table(pair_rows(pairs)), soft_wrap=True)
    say(table(choice_rows(pairs)), soft_wrap=True)
    _write_plans(args, as_json(pairs))
    return 0


def _write_plans(args: BenchPlansArgs, found: list[dict[str, object]]) -> None:
    """Write ranked plans as JSON and as a picture, where these are asked for."""
    say = console().print
    if args.json:
        write_whole(Path(args.json), json.dumps(found, indent=1) + "\n")
        say(f"wrote {args.json}")
    if args.picture:
        from jaxpar.show.figures import save_figure
        from jaxpar.show.measured_plans import measured_plans_figure
        from jaxpar.show.rehearsed_plans import rehearsed_plans_figure

        draw = rehearsed_plans_figure if args.rehearsed else measured_plans_figure
        save_figure(draw(found), Path(args.picture))
        say(f"wrote {args.picture}")


def bench_foresight_command(words: list[str]) -> int:
    """jaxpar bench foresight [--rows FILE.csv] [--only PREFIX ...] [--out FOLDER]
    [--json FILE.json] [--quick] [--anew]
    """
    from jaxpar.bench.foresight import board
    from jaxpar.bench.foresight.rows import published_rows, read_rows
    from jaxpar.bench.measure import table
    from jaxpar.show.figures import save_figure
    from jaxpar.show.foresight import foresight_figure

    args = parse_words(bench_foresight_command.__doc__, BenchForesightArgs(), words)
    say = console().print
    rows = board.choose_rows(
        read_rows(Path(args.rows)) if args.rows else published_rows(), args.only
    )
    if args.quick:
        rows = board.quick_rows(rows)
    folder = Path(args.out)
    check_folders(args.json)
    command = " ".join(["jaxpar bench foresight", *words])
    found = board.make_board(rows, folder, command, say, args.anew)
    file = Path(args.json) if args.json else folder / "board.json"
    write_whole(file, board.write_board(found))
    write_whole(folder / "errors.json", board.write_errors(found))
    say(table(board.step_rows(found)), soft_wrap=True)
    say(table(board.chip_rows(found)), soft_wrap=True)
    for line in [*board.worst_lines(found), *board.left_lines(found)]:
        say(line, soft_wrap=True)
    if any(row["predicted"] for row in found["rows"]):
        picture = folder / "foresight.png"
        save_figure(foresight_figure([row for row in found["rows"] if row["predicted"]]), picture)
        say(f"wrote {picture}")
    say(f"wrote {file}")
    return 1 if any(row["refused"] for row in found["rows"]) else 0


def bench_here_command(words: list[str]) -> int:
    """jaxpar bench here [--only NAME ...] [--quick] [--rounds N] [--json FILE.json]"""
    from jaxpar.bench.here import QUICK, bench_here, here_rows
    from jaxpar.bench.measure import table

    args = parse_words(bench_here_command.__doc__, BenchHereArgs(), words)
    if args.only and args.quick:
        raise UserError("--quick has no effect beside --only, which names the configs")
    check_folders(args.json)
    say = console().print
    found = bench_here(args.only or (QUICK if args.quick else ()), args.rounds, say)
    say(table(here_rows(found)), soft_wrap=True)
    ranks = found["rank_correlation"]
    said = "" if ranks is None else f"rank correlation {ranks:.3f}, "
    say(f"{said}median error {100 * found['median_error']:.0f} %")
    if args.json:
        write_whole(Path(args.json), json.dumps(found, indent=1) + "\n")
    return 0
