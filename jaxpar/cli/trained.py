"""`jaxpar generate` and `jaxpar eval`: what a trained model writes, and how good it is, by its loss
or by lm-eval.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import jax

from jaxpar.base.config import Config
from jaxpar.base.config.checks import only_training
from jaxpar.base.console import console, count_text
from jaxpar.base.errors import Say, UserError, json_line, visible
from jaxpar.base.field_marks import Trait
from jaxpar.base.layout.mesh import MeshSpec, describe
from jaxpar.base.toml import flatten
from jaxpar.cli.arguments import config_args, flag_words, parse_words, positional
from jaxpar.data.chat.answers import missing_names
from jaxpar.train.distil import write_top_k
from jaxpar.train.evaluate import evaluate_folder
from jaxpar.train.generation.prompts import (
    Prompt,
    continuation,
    encode_prompts,
    read_prompts,
    stop_ids,
)
from jaxpar.train.generation.sampling import Sampling
from jaxpar.train.generation.trained import (
    Dtype,
    Trained,
    open_trained,
    read_config,
    require_tokenizer,
)
from jaxpar.train.runs.bucket import folder_here


@dataclass(frozen=True)
class GenerateArgs:
    """Continue prompts with the model of a run folder, of a Hugging Face folder or of a PEFT
    adapter.
    """

    prompt: Annotated[tuple[str, ...], Trait.REPEATED] = ()
    """A prompt; may be given several times."""
    prompts: str = ""
    """A file with one prompt a line, or .jsonl with "prompt", "messages" or "conversations" in each
    line.
    """
    chat: bool = False
    """Take a prompt as the user's message, and write it as the folder's chat template does."""
    max_tokens: int = 0
    """New tokens of a prompt at most; 0 = as many as the context has room for, but no more than
    128.
    """
    temperature: float = 0.0
    """0 = always the most likely token; above it tokens are drawn."""
    top_k: int = 0
    """Draw from this many of the most likely tokens; 0 = from all."""
    top_p: float = 1.0
    """Draw from the most likely tokens that together have this probability."""
    seed: int = 0
    """Of the draws. A prompt's text does not depend on the others, or on the mesh."""
    batch: int = 32
    """Prompts that run at once."""
    step: int = 0
    """Checkpoint of a run; 0 = the best one, or the newest when none was evaluated."""
    dtype: Dtype = "auto"
    """Of matmuls, parameters and cache; auto = a run's own, else float32 on CPU and bfloat16
    elsewhere.
    """
    template_args: tuple[str, ...] = ()
    """Names that the chat template reads, each with its value: enable_thinking=false. Those of a
    run stand before.
    """
    template_date: str = ""
    """The date that the chat template writes as today's, such as 2026-01-31; empty = today's."""
    json: bool = False
    """Print one JSON object a prompt."""
    mesh: MeshSpec = field(default_factory=MeshSpec)


@dataclass(frozen=True)
class EvalArgs:
    """Validation loss of a run's checkpoint or of a Hugging Face folder, or tasks of EleutherAI's
    lm-eval.
    """

    config: Config
    step: int = 0
    """Checkpoint of a run; 0 = the best one, or the newest when none was evaluated."""
    tasks: str = ""
    """Tasks of lm-eval instead (extra: eval): names and paths of YAML files, with commas
    between.
    """
    top_k: int = 0
    """Write the so many most likely entries for every token of the training data instead, for
    distill.teacher.
    """
    out: str = ""
    """The folder that they are written to."""
    limit: int = 0
    """Examples of a task; 0 = all."""
    num_fewshot: int = -1
    """Examples before each question; -1 = as the task says."""
    chat: bool = False
    """Write the prompts of tasks by the folder's chat template."""
    template_args: tuple[str, ...] = ()
    """Names that the chat template reads with --chat, each with its value:
    enable_thinking=false.
    """
    template_date: str = ""
    """The date that the chat template writes with --chat as today's; empty = today's."""
    batch: int = 32
    """Requests of tasks that run at once."""
    json: bool = False
    """Print one JSON object."""


def generate_command(words: list[str]) -> int:
    """jaxpar generate RUN|HF_FOLDER --prompt TEXT | --prompts FILE [--chat] [--temperature T]
    [--mesh.data N ...]
    """
    (folder,) = positional(generate_command.__doc__, GenerateArgs(), words, 1, urls=True)
    args = parse_words(generate_command.__doc__, GenerateArgs(), flag_words(words[1:]))
    if bool(args.prompt) == bool(args.prompts):
        raise UserError("generate needs --prompt TEXT, once or several times, or --prompts FILE")
    if args.batch < 1 or args.max_tokens < 0:
        raise UserError(
            f"--batch is at least 1 and --max-tokens at least 0, found {args.batch} and "
            f"{args.max_tokens}"
        )
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    given = list(args.prompt) or read_prompts(Path(args.prompts))
    folder_args = (args.template_args, args.template_date)
    trained = open_trained(folder, args.mesh, args.dtype, args.step, *folder_args)
    prompts = encode_prompts(trained, given, args.chat)
    main = jax.process_index() == 0
    if main:
        _print_notes(trained, prompts)
    as_chat = args.chat or any(not isinstance(one, str) for one in given)
    longest = max(len(prompt.ids) for prompt in prompts)
    request = _Request(
        prompts,
        args.max_tokens or max(min(128, trained.config.model.max_seq_len - longest), 1),
        sampling,
        stop_ids(trained, as_chat),
    )
    say = partial(print, end="", flush=True) if main else lambda text: None
    if len(prompts) == 1 and not args.json:
        _stream(trained, request, args.chat, say)
    else:
        _generate_all(trained, request, args, say)
    if main:
        print(_speed(trained), file=sys.stderr)
    return 0


@dataclass(frozen=True)
class _Request:
    """What is generated: the prompts, and new tokens of each up to a number or a stop."""

    prompts: Sequence[Prompt]
    most: int
    sampling: Sampling
    stop: Sequence[int]

    @property
    def ids(self) -> list[list[int]]:
        """The tokens of each prompt."""
        return [prompt.ids for prompt in self.prompts]


def _print_notes(trained: Trained, prompts: Sequence[Prompt]) -> None:
    """Print on standard error what the tokenizer has to say, and names that a template lacked."""
    notes = list(require_tokenizer(trained).notes)
    undefined = {name for prompt in prompts for name in prompt.undefined}
    if undefined:
        notes.append(missing_names(undefined))
    for note in notes:
        print(visible(note), file=sys.stderr)


def _stream(trained: Trained, request: _Request, chat: bool, say: Say) -> None:
    """Print the text of one prompt while it is made, four tokens at a time."""
    tokenizer = require_tokenizer(trained)
    prompt = request.prompts[0]
    # nothing is printed of a prompt that is refused
    trained.generator.check(request.ids, request.most)
    if not chat:
        say(visible(prompt.text))
    printed = ""
    new = list[int]()
    made = trained.generator.stream(
        request.ids, request.most, request.sampling, request.stop, chunk=4
    )
    for (new,) in made:
        text = visible(continuation(tokenizer, prompt.ids, new, ended=False))
        say(text[len(printed) :])
        printed = text
    say(visible(continuation(tokenizer, prompt.ids, new))[len(printed) :] + "\n")


def _generate_all(trained: Trained, request: _Request, args: GenerateArgs, say: Say) -> None:
    """Print the texts of all prompts once they are made, or a JSON object for each."""
    tokenizer = require_tokenizer(trained)
    found = trained.generator.generate(
        request.ids, request.most, request.sampling, request.stop, args.batch
    )
    rows = zip(request.prompts, found, strict=True)
    for number, (prompt, new) in enumerate(rows, 1):
        text = continuation(tokenizer, prompt.ids, new)
        row = {
            "prompt": prompt.text,
            "text": text,
            "tokens": new,
            "prompt_tokens": len(prompt.ids),
            "finish": "length" if len(new) == request.most else "stop",
        }
        before = "" if args.chat else prompt.text
        if args.json:
            line = json_line(row)
        else:
            line = visible(f"--- {number} ---\n{before}{text}")
        say(line + "\n")


def _speed(trained: Trained) -> str:
    """One line with the tokens per second, and the devices."""
    plan = trained.generator.plan
    times = trained.generator.times
    prefill = count_text(times.prefill_tokens / max(times.prefill_seconds, 1e-9))
    decode = count_text(times.decode_tokens / max(times.decode_seconds, 1e-9))
    return (
        f"prefill {prefill} tokens/s ({times.prefill_tokens}), decode {decode} tokens/s "
        f"({times.decode_tokens}), "
        f"{plan.compute}, on {plan.mesh.size} x {plan.mesh.devices.flat[0].device_kind} "
        f"({describe(dict(plan.mesh.shape))})"
    )


def eval_command(words: list[str]) -> int:
    """jaxpar eval RUN|HF_FOLDER [--step N] [--tasks NAME,NAME] [--top-k K --out DIR] [--json]
    [--section.key value ...]
    """
    name, args = config_args(
        eval_command.__doc__, EvalArgs, words, lambda name: read_config(folder_here(name))
    )
    folder = folder_here(name)
    out = console()
    if args.batch < 1 or args.limit < 0:
        raise UserError(
            f"--batch is at least 1 and --limit at least 0, found {args.batch} and {args.limit}"
        )
    if bool(args.top_k) != bool(args.out):
        raise UserError("--top-k K and --out FOLDER go together: give both, or none")
    if args.tasks and args.top_k:
        raise UserError("--tasks has no effect beside --top-k: give one of them")
    if args.tasks:
        results = _run_tasks(folder, args)
        if args.json:
            out.print(json.dumps(results, default=str))
            return 0
        for task, numbers in results.items():
            named = {
                key.removesuffix(",none"): value
                for key, value in numbers.items()
                if isinstance(value, float)
            }
            values = ", ".join(
                f"{key} {value:.4f}" for key, value in named.items() if "stderr" not in key
            )
            out.print(f"{task}: {values}")
        return 0
    _require_effect_on_loss(folder, args.config, bool(args.top_k))
    for flag in ("limit", "num_fewshot", "chat", "template_args", "template_date", "batch"):
        if getattr(args, flag) != getattr(EvalArgs, flag):
            raise UserError(f"--{flag.replace('_', '-')} has no effect without --tasks")
    if args.top_k:
        return _write_answers(folder, args)
    found = evaluate_folder(
        args.config, folder, args.step, (lambda line: None) if args.json else out.print
    )
    if found.bits_per_byte is None:
        bits = ""
    else:
        bits = f", {found.bits_per_byte:.4f} bits a byte"
    text = (
        f"step {found.step}: validation loss {found.val_loss:.4f} nats a token, perplexity "
        f"{found.perplexity:.3f}"
    )
    out.print(json.dumps(found._asdict()) if args.json else text + bits)
    return 0


def _write_answers(folder: Path, args: EvalArgs) -> int:
    """Write a teacher's answers, and say what was written."""
    out = console()
    say = (lambda line: None) if args.json else out.print
    found = write_top_k(args.config, folder, Path(args.out), args.top_k, args.step, say)
    if args.json:
        out.print(json.dumps(found._asdict()))
        return 0
    tokens = sum(found.windows) * found.seq_len
    out.print(
        f"wrote {args.out}: the {found.k} most likely entries of step {found.step} for "
        f"{tokens:,} tokens in {sum(found.windows):,} windows"
    )
    return 0


def _require_effect_on_loss(folder: Path, config: Config, windows: bool) -> None:
    """Refuse a setting that was given and that an evaluation, or the writing of the training's
    windows, does not read.
    """
    before = flatten(read_config(folder))
    after = flatten(config)
    read = ("data.stride",) if windows else ()
    changed = [key for key, value in after.items() if value != before[key]]
    idle = [key for key in changed if only_training(key) and key not in read]
    if idle:
        raise UserError(
            f"--{idle[0]} has no effect on an evaluation: only training reads it, leave it out"
        )


def _run_tasks(folder: Path, args: EvalArgs) -> dict[str, dict[str, float]]:
    """The numbers of each task of lm-eval."""
    before = flatten(own := read_config(folder))
    after = flatten(args.config)
    changed = {key for key in after if after[key] != before[key]}
    useless = [key for key in changed if not key.startswith("mesh.") and key != "precision.compute"]
    if useless:
        raise UserError(
            f"--{useless[0]} has no effect beside --tasks, which takes a mesh and "
            "precision.compute alone"
        )
    try:
        from jaxpar.train.generation.harness import run_tasks
    except ImportError as error:
        raise UserError(
            f"--tasks needs the lm-eval package ({error}): pip install 'jaxpar[eval]'"
        ) from error
    if args.config.mesh != own.mesh:
        mesh = args.config.mesh
    else:
        mesh = None
    if "precision.compute" in changed:
        dtype = args.config.precision.compute
    else:
        dtype = "auto"
    trained = open_trained(folder, mesh, dtype, args.step, args.template_args, args.template_date)
    return run_tasks(
        trained, args.tasks.split(","), args.limit, args.num_fewshot, args.chat, args.batch
    )["results"]
