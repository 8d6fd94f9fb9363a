"""`jaxpar generate`: prompts to a screen as they are continued."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from jaxpar.base.console import count_text
from jaxpar.base.errors import UserError
from jaxpar.base.mesh import MeshSpec, describe
from jaxpar.train.prompts import Prompt, continuation, encode_prompts, read_prompts, stop_ids
from jaxpar.train.sampling import Sampling
from jaxpar.train.trained import Dtype, Trained, open_trained, require_tokenizer

Repeated = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]


@dataclass(frozen=True)
class GenerateArgs:
    """Continue prompts with the model of a run folder, of a Hugging Face folder or of a PEFT adapter."""

    prompt: Repeated = ()
    """A prompt; may be given several times."""
    prompts: str = ""
    """A file with one prompt a line, or .jsonl with "prompt" or "messages" in each line."""
    chat: bool = False
    """Take a prompt as the user's message, and write it as the folder's chat template does."""
    max_tokens: int = 0
    """New tokens of a prompt at most; 0 = as many as the context has room for, but no more than 128."""
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
    """Of matmuls, parameters and cache; auto = a run's own, else float32 on CPU and bfloat16 elsewhere."""
    json: bool = False
    """Print one JSON object a prompt."""
    mesh: MeshSpec = field(default_factory=MeshSpec)


def generate_words(folder: Path, args: GenerateArgs) -> None:
    """The `generate` command.

    Raises:
      UserError: see `open_trained`, `encode_prompts` and `Generator.generate`; or no prompt is given.
    """
    if bool(args.prompt) == bool(args.prompts):
        raise UserError("generate needs --prompt TEXT, once or several times, or --prompts FILE")
    if args.batch < 1 or args.max_tokens < 0:
        raise UserError(f"--batch is at least 1 and --max-tokens at least 0, found {args.batch} and {args.max_tokens}")
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    given = list(args.prompt) or read_prompts(Path(args.prompts))
    trained = open_trained(folder, args.mesh, args.dtype, args.step)
    prompts = encode_prompts(trained, given, args.chat)
    stop = stop_ids(trained, args.chat or any(isinstance(one, list) for one in given))
    longest = max(len(prompt.ids) for prompt in prompts)
    max_tokens = args.max_tokens or max(min(128, trained.config.model.max_seq_len - longest), 1)
    live = len(prompts) == 1 and not args.json
    ids = [prompt.ids for prompt in prompts]
    if live:
        new = _stream(trained, prompts[0], max_tokens, sampling, stop, args.chat)
    else:
        new = trained.generator.generate(ids, max_tokens, sampling, stop, args.batch)
    if jax.process_index() == 0:
        if not live:
            _write(_rows(trained, prompts, new, max_tokens), args)
        print(_summary(trained), file=sys.stderr)


def _stream(
    trained: Trained, prompt: Prompt, max_tokens: int, sampling: Sampling, stop: list[int], chat: bool
) -> list[list[int]]:
    """Print a prompt and what follows as it is made; return the new tokens."""
    tokenizer, printed, new = require_tokenizer(trained), "", []
    trained.generator.check([prompt.ids], max_tokens)  # nothing is printed of a prompt that is refused
    _say("" if chat else prompt.text)
    for (new,) in trained.generator.stream([prompt.ids], max_tokens, sampling, stop, chunk=4):
        text = continuation(tokenizer, prompt.ids, new, ended=False)
        _say(text[len(printed) :])
        printed = text
    _say(continuation(tokenizer, prompt.ids, new)[len(printed) :] + "\n")
    return [new]


def _say(text: str) -> None:
    if jax.process_index() == 0:
        sys.stdout.write(text)
        sys.stdout.flush()


def _rows(trained: Trained, prompts: list[Prompt], new: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
    tokenizer = require_tokenizer(trained)
    return [
        {"prompt": prompt.text, "text": continuation(tokenizer, prompt.ids, ids), "tokens": ids,
         "prompt_tokens": len(prompt.ids), "finish": "length" if len(ids) == max_tokens else "stop"}
        for prompt, ids in zip(prompts, new, strict=True)
    ]  # fmt: skip


def _write(rows: list[dict[str, Any]], args: GenerateArgs) -> None:
    for number, row in enumerate(rows, 1):
        text = f"--- {number} ---\n{'' if args.chat else row['prompt']}{row['text']}"
        print(json.dumps(row, ensure_ascii=False) if args.json else text)


def _summary(trained: Trained) -> str:
    """One line with the tokens per second, and the devices."""
    plan, spent = trained.generator.plan, trained.generator.spent
    devices = list(plan.mesh.devices.flat)
    prefill = spent.prefill_tokens / max(spent.prefill_seconds, 1e-9)
    decode = spent.decode_tokens / max(spent.decode_seconds, 1e-9)
    return (
        f"prefill {count_text(prefill)} tokens/s ({spent.prefill_tokens}), decode {count_text(decode)} tokens/s "
        f"({spent.decode_tokens}), {plan.compute}, on {len(devices)} x {devices[0].device_kind} "
        f"({describe(dict(plan.mesh.shape))})"
    )
