"""The command `jaxpar plan`, which finds the fastest layout of a config on a target, and says why
it is this one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import RenderableType

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.config import Config
from jaxpar.base.console import check_folders, check_pictures, console
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MESH_AXES
from jaxpar.base.ranges import Range
from jaxpar.base.toml import flatten
from jaxpar.cli.arguments import config_args, flag_words, given_keys, plain_name, take_words
from jaxpar.cli.flags import flags_of, read_flags
from jaxpar.plan.budget import read_size
from jaxpar.plan.layout_search import Answer, search
from jaxpar.plan.layout_search.config_file import config_text
from jaxpar.plan.layout_search.find import REHEARSALS, WORKERS
from jaxpar.plan.layout_search.other_targets import (
    elastic_plans,
    smallest_fit,
)
from jaxpar.plan.layout_search.request import fixed_key, is_chosen, read_tokens
from jaxpar.rehearse.targets import Target, load_target


@dataclass(frozen=True)
class PlanArgs:
    """Find the fastest layout of a config on hardware that need not be here: the mesh, what is
    kept, recomputed and offloaded, the microbatches. A setting of the layout that is given is kept.
    """

    config: Config
    target: str = ""
    """v5p-64 (chips), v5e-8, h100x64, ..., or here, for the devices of this machine:
    docs/targets.md lists them. With --fit a chip, such as v5p."""
    global_batch: Annotated[int, Range(0, 2**20)] = 0
    """The sequences of a step; 0 = train.batch."""
    tokens: str = ""
    """The tokens of a step, 1M or 4194304, in place of sequences."""
    budget: str = ""
    """Bytes of a device that a step may take, 80GiB; empty = all that a program may have."""
    fix: tuple[str, ...] = ()
    """Choices that are made: tensor=8 (all devices of the axis), mesh.dcn.data=2,
    memory.policy=full, zero=true, ..."""
    forbid: tuple[str, ...] = ()
    """What no plan may use: offload, recompute, pipeline, tensor, context, accumulation, ..."""
    may: tuple[str, ...] = ()
    """What may be chosen all the same: moments (bfloat16 ones, which change the numbers), unrolled
    (layers that are compiled one by one, for many times as long)."""
    price: Annotated[float, Range(0.0, 1e6)] = 0.0
    """USD of a chip for an hour, for the cost of train.steps steps."""
    fit: bool = False
    """Find the smallest target of a chip that holds the config, and the cheapest near it."""
    elastic: str = ""
    """Numbers of chips that a run may have, 64,32,16: a plan for each, with one batch and one order
    of the data, and checkpoints that all of them read."""
    rehearsals: Annotated[int, Range(0, 64)] = REHEARSALS
    """The most plans that are rehearsed; 0 = the closed forms decide, which takes no compiler."""
    workers: Annotated[int, Range(1, 256)] = WORKERS
    """How many are rehearsed at a time."""
    no_verify: bool = False
    """Do not compare the plan that was found with one device."""
    out: str = ""
    """Write the config that was found, with the reasons as comments: FILE.toml."""
    json: str = ""
    """Write the answer as JSON; - = print it, and nothing else."""
    picture: str = ""
    """Draw the plans by time and memory, with their frontier: FILE.png or FILE.svg."""
    run: str = ""
    """Folder in which rehearsals are remembered; empty = runs/NAME_plan_TARGET."""


def plan_command(words: list[str]) -> int:
    """jaxpar plan CONFIG --target T [--global-batch B|--tokens N] [--budget GiB] [--fix K=V]
    [--forbid NAME] [--fit|--elastic A,B] [--out FILE.toml] [--section.key value ...]
    """
    fix, others = take_words("--fix", words)
    name, args = config_args(plan_command.__doc__, PlanArgs, others)
    args = replace(args, fix=tuple(fix))
    _require_flags(args)
    say: Callable[[RenderableType], None] = console().print
    if args.json == "-":
        say = _say_nothing
    command = " ".join(["jaxpar plan", *words])
    find = _search(name, args, others, say)
    if args.fit:
        return _fit(args, find, say, command)
    if args.elastic:
        return _elastic(args, find, say, command)
    answer = find(load_target(args.target))
    _show(answer, say)
    _write(answer, args, say, command, args.out)
    return _exit_code(answer)


def _say_nothing(line: RenderableType) -> None:
    """Print nothing, where JSON alone is printed."""


def _require_flags(args: PlanArgs) -> None:
    """Refuse flags that can have no effect, and files that cannot be written."""
    if not args.target:
        raise UserError(
            "plan needs --target: v5p-64, v5e-8, h100x64, here, ...: docs/targets.md lists them"
        )
    if args.fit and args.elastic:
        raise UserError("--fit and --elastic ask for other targets: leave one of them out")
    if args.out and not args.out.endswith(".toml"):
        raise UserError(f"--out {args.out} is a config: write FILE.toml")
    if args.elastic and (args.json or args.picture):
        raise UserError("--elastic has a config for each number, --out FILE.toml, and no --json")
    files = [file for file in (args.out, args.json, args.picture) if file != "-"]
    check_folders(*filter(None, files))
    check_pictures(args.picture)


def _search(
    name: str, args: PlanArgs, words: list[str], say: Callable[[RenderableType], None]
) -> Callable[[Target], Answer]:
    """Return what searches on a target as the flags ask."""
    fixed = _fixed(args, words)
    options: dict[str, Any] = {
        "sequences": args.global_batch,
        "tokens": read_tokens(args.tokens) if args.tokens else 0,
        "budget": read_size("--budget", args.budget) if args.budget else 0,
        "fixed": fixed,
        "forbidden": _split(args.forbid),
        "may": _split(args.may),
        "chip_hour": args.price,
        "workers": args.workers,
        "say": say,
    }

    def find(target: Target, quick: bool = False) -> Answer:
        folder = args.run or f"runs/{Path(name).stem}_plan_{plain_name(target.name)}"
        rehearsals = 0 if quick else args.rehearsals
        verify = not (quick or args.no_verify)
        return search(
            args.config,
            target,
            rehearsals=rehearsals,
            verify=verify,
            folder=Path(folder) / "points",
            **options,
        )

    return find


def _fixed(args: PlanArgs, words: list[str]) -> dict[str, Any]:
    """Collect the choices that are made: those of `--fix`, and settings of the layout among the
    flags.
    """
    given = given_keys(flag_words(words[1:]))
    values = flatten(args.config)
    fixed = {key: values[key] for key in given if key in values and is_chosen(key)}
    for word in _split(args.fix):
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"--fix takes a key with its value, tensor=8: found {word!r}")
        known = fixed_key(key)
        fixed[known] = _value(known, value)
    return fixed


def _split(words: tuple[str, ...]) -> list[str]:
    """Cut words at their commas: `offload,pipeline`."""
    return [part.strip() for word in words for part in word.split(",") if part.strip()]


def _value(key: str, value: str) -> Any:
    """Read the value of a key that is fixed."""
    if key in MESH_AXES:
        (found,) = read_flags(flags_of(Config), [f"--mesh.{key}", value])[0].values()
    elif key == "zero":
        if value not in ("true", "false"):
            raise UserError(f"--fix zero is true or false, found {value!r}")
        found = value == "true"
    else:
        (found,) = read_flags(flags_of(Config), [f"--{key}", value])[0].values()
    return found


def _show(answer: Answer, say: Callable[[RenderableType], None]) -> None:
    from jaxpar.show.plans import answer_parts  # matplotlib, once there is something to show

    for part in answer_parts(answer):
        say(part)


def _write(
    answer: Answer,
    args: PlanArgs,
    say: Callable[[RenderableType], None],
    command: str,
    out: str,
) -> None:
    """Write the files that were asked for."""
    if args.json == "-":
        print(json.dumps(answer.to_json(), allow_nan=False))
    elif args.json:
        write_whole(Path(args.json), json.dumps(answer.to_json(), allow_nan=False) + "\n")
        say(f"wrote {args.json}")
    if args.picture:
        from jaxpar.show.figures import save_figure
        from jaxpar.show.plans import plans_figure

        title = f"Plans for {answer.request.target.name}, {answer.request.tokens:,} tokens a step"
        save_figure(plans_figure(answer, title), Path(args.picture))
        say(f"wrote {args.picture}")
    if out and answer.config is not None:
        write_whole(Path(out), config_text(answer, command))
        say(f"wrote {out}: jaxpar train {out}")


def _exit_code(answer: Answer) -> int:
    """Return 1 where nothing fits, or the plan that was found is not verified."""
    is_wrong = answer.verified is not None and not answer.verified.equal
    return int(answer.best is None or is_wrong)


def _fit(
    args: PlanArgs, find: Callable[..., Answer], say: Callable[[RenderableType], None], command: str
) -> int:
    """Find the smallest target of a chip, and search on it."""
    fitting = smallest_fit(args.target, lambda target: find(target, quick=True), say)
    smallest = fitting.smallest.request.target
    cheapest = fitting.cheapest.request.target
    say(f"the smallest that holds it is {smallest.name}; the cheapest of those is {cheapest.name}")
    answer = find(smallest)
    _show(answer, say)
    _write(answer, args, say, command, args.out)
    return _exit_code(answer)


def _elastic(
    args: PlanArgs, find: Callable[..., Answer], say: Callable[[RenderableType], None], command: str
) -> int:
    """Find a plan for each number of chips."""
    counts = []
    for word in args.elastic.split(","):
        if not word.strip().isdecimal():
            raise UserError(f"--elastic takes numbers of chips, 64,32,16: found {args.elastic!r}")
        counts.append(int(word))
    chip = load_target(args.target).chip
    answers = elastic_plans(chip, counts, find)
    for answer, count in zip(answers, counts, strict=True):
        say("")
        _show(answer, say)
        out = args.out.removesuffix(".toml")
        _write(
            answer,
            args,
            say,
            command,
            f"{out}_{count}.toml" if out else "",
        )
    say("")
    say("one batch and one order of the data; each reads the checkpoints of the others")
    return max(_exit_code(answer) for answer in answers)
