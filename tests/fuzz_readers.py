"""Damages every file that a command reads, in every way of `damage`: does each end in one line that
names the place?

    python tests/fuzz_readers.py [--only NAME ...] [--trials N] [--seed N] [--list]

A command runs in this process, by `main`. It may take the damaged file for a good one, or refuse
it: in one line, which names the file or its folder. Anything else is a fault, and the exit code is
1: another exception, several lines, a line that does not say where, more than `_SECONDS`. The table
counts them. Below it stands each fault, with the seed that shows it again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from damage import (
    Damage,
    damage_bytes,
    damage_json,
    damage_jsonl,
    damage_safetensors,
    damage_toml,
)

_SECONDS = 60
# of this process: what allocates more is ended with a MemoryError, and not the machine
_BYTES = 12 * 2**30


class Reader(NamedTuple):
    """A file, relative to the folder of all, and the words of the command that reads it."""

    name: str
    file: str
    words: str
    ways: tuple[Damage, ...]
    quick: int = 4
    """How many trials `make test` makes."""


_JSON = (damage_json, damage_json, damage_bytes)
_JSONL = (damage_jsonl,)
_TOML = (damage_toml, damage_toml, damage_bytes)
_TENSORS = (damage_safetensors, damage_safetensors, damage_bytes)
_BYTES_ONLY = (damage_bytes,)
_DATA = (
    "--data.source chat --data.path chat.jsonl --data.val-path absent --data.tokenizer "
    "words/tokenizer.json"
)
_TOKENS = (
    "train tiny.toml --run new --data.source tokens --data.path text.bin --data.val-path absent.bin"
)
_WATCH = "watch run --once"
_CUT = "tokenize text.txt new.bin --tokenizer words/tokenizer.json"
_LONG = "generate model --prompt a --max-tokens 99999"
_RESTORE = "generate run --prompt a --max-tokens 99999"
# Each ends soon after the file is read, also where that is as good as before: weights, more data or
# room are missing.
READERS = (
    Reader("config.json", "bare/config.json", "generate bare --prompt a", _JSON, 20),
    Reader("config.json of gemma3", "gemma/config.json", "generate gemma --prompt a", _JSON, 12),
    Reader("weights", "model/model.safetensors", _LONG, _TENSORS),
    Reader("index", "shards/model.safetensors.index.json", "generate shards --prompt a", _JSON),
    Reader(
        "adapter_config.json",
        "adapter/adapter_config.json",
        "generate adapter --prompt a",
        _JSON,
        12,
    ),
    Reader(
        "adapter weights",
        "adapter/adapter_model.safetensors",
        "generate adapter --prompt a",
        _TENSORS,
    ),
    Reader("tokenizer.json", "words/tokenizer.json", _CUT, _JSON),
    Reader("tokenizer of ours", "model/tokenizer.json", "generate bare --prompt a", _JSON),
    Reader(
        "tokenizer_config.json",
        "words/tokenizer_config.json",
        f"train tiny.toml --run new {_DATA}",
        _JSON,
        4,
    ),
    Reader("generation_config.json", "model/generation_config.json", _LONG, _JSON),
    Reader(
        "chat template",
        "jinja/chat_template.jinja",
        f"train tiny.toml --run new {_DATA.replace('words', 'jinja')}",
        _BYTES_ONLY,
    ),
    Reader("chat", "chat.jsonl", f"train tiny.toml --run new {_DATA}", _JSONL, 8),
    Reader("prompts", "prompts.jsonl", "generate bare --prompts prompts.jsonl", _JSONL, 12),
    Reader("prompts as text", "prompts.txt", "generate bare --prompts prompts.txt", _BYTES_ONLY),
    Reader("config.toml", "run/config.toml", _WATCH, _TOML, 16),
    Reader("config of a user", "tiny.toml", "train tiny.toml --run new --data.source text", _TOML),
    Reader("metrics.jsonl", "run/metrics.jsonl", _WATCH, _JSONL, 16),
    Reader("sinks.json", "run/sinks.json", "", _JSON, 12),
    Reader("data.json", "run/data.json", "", _JSON, 20),
    Reader("token ids", "text.bin", _TOKENS, _BYTES_ONLY),
    Reader("token ids' .json", "text.bin.json", _TOKENS, _JSON),
    Reader("document starts", "text.bin.docs", f"{_TOKENS} --data.pack True", _BYTES_ONLY),
    Reader("token ids' tokenizer", "text.bin.tokenizer.json", _TOKENS, _JSON),
    Reader("text", "text.txt", "tokenize text.txt new.bin", _BYTES_ONLY),
    Reader("checkpoint's _METADATA", "run/checkpoints/0/state/_METADATA", _RESTORE, _JSON),
    Reader("checkpoint's metadata", "run/checkpoints/0/_CHECKPOINT_METADATA", _RESTORE, _JSON),
    Reader("checkpoint's data", "run/checkpoints/0/data/metadata", _RESTORE, _JSON),
    Reader(
        "checkpoint's manifest", "run/checkpoints/0/state/manifest.ocdbt", _RESTORE, _BYTES_ONLY, 0
    ),
    Reader("profile's lines", "run/profile/steps_1_2.json", "watch run --profile", _JSON, 16),
    Reader("profile's trace", "run/profile/trace.xplane.pb", "watch run --profile", _BYTES_ONLY),
    Reader(
        "mesh", "mesh.toml", "train tiny.toml --on mesh.toml --run new --data.source text", _TOML
    ),
    Reader("HLO", "step.hlo", "", _BYTES_ONLY, 20),
)

_TINY = """[model]
family = "llama"
vocab_size = 300
layers = 1
embed = 16
heads = 2
mlp = 32
max_seq_len = 64

[data]
seq_len = 16
path = ""

[mesh]
platform = "cpu"
"""
_MESH = """chip = "v5e"

[mesh]
data = 2
fsdp = 2
platform = "cpu"

[mesh.dcn]
data = 1
"""
_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_files(folder: Path) -> None:
    """Make all files that are read, in a folder which is the current one."""
    import jax

    from jaxpar.base.config import Lora, ModelConfig
    from jaxpar.base.layout.mesh import MeshSpec, make_mesh
    from jaxpar.base.layout.plan import Plan
    from jaxpar.models import Model
    from jaxpar.models.hf import peft
    from jaxpar.models.hf.export import export_hf
    from jaxpar.models.hf.families import hf_config

    (folder / "tiny.toml").write_text(_TINY)
    (folder / "mesh.toml").write_text(
        'chip = "v5e"\n\n[mesh]\ndata = 2\nfsdp = 2\ntensor = 1\n\n[mesh.dcn]\ndata = 1\n'
    )
    (folder / "text.txt").write_text("Once upon a time there was a mesh of devices. " * 20)
    plan = Plan(make_mesh(MeshSpec(), jax.devices()[:1]))
    sizes = ModelConfig(
        "llama", vocab_size=300, layers=1, embed=16, heads=2, mlp=32, max_seq_len=64
    )
    model = Model(sizes)
    adapted = Model(replace(sizes, lora=Lora(2)))
    params, pairs = (
        jax.jit(one.init, out_shardings=plan.sharding(()))(jax.random.key(0))
        for one in (model, adapted)
    )
    export_hf(params, model, folder / "model")
    export_hf(params, model, folder / "shards", max_shard_bytes=20_000)
    peft.export_adapter(pairs, adapted, folder / "adapter", str(folder / "bare"))
    for name, config in {
        "bare": sizes,
        "gemma": ModelConfig(
            "gemma3",
            300,
            layers=6,
            masks=("window(8)",) * 5 + ("causal",),
        ),
    }.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(hf_config(config)))
    _make_words(folder)
    _make_data(folder)
    _make_run(folder)


def _make_words(folder: Path) -> None:
    """A tokenizer of Hugging Face, and what lies beside it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["upon a time"],
        trainers.BpeTrainer(
            vocab_size=270,
            initial_alphabet=alphabet,
            special_tokens=["<|endoftext|>", "<s>"],
            show_progress=False,
        ),
    )
    (folder / "words").mkdir()
    (folder / "jinja").mkdir()
    (folder / "jinja" / "chat_template.jinja").write_text(_TEMPLATE)
    for name in ("words", "jinja", "model", "bare"):
        made.save(str(folder / name / "tokenizer.json"))
    special = {
        "eos_token": "<|endoftext|>",
        "bos_token": {"content": "<s>", "special": True},
        "model_max_length": 64,
    }
    named = [{"name": "default", "template": _TEMPLATE}, {"name": "tool_use", "template": "x"}]
    (folder / "words" / "tokenizer_config.json").write_text(
        json.dumps({**special, "chat_template": named})
    )
    (folder / "words" / "special_tokens_map.json").write_text(json.dumps(special))
    generation = {"eos_token_id": [0, 1], "bos_token_id": 1, "pad_token_id": None, "max_length": 20}
    (folder / "model" / "generation_config.json").write_text(json.dumps(generation))


def _make_data(folder: Path) -> None:
    """Conversations, prompts, token ids and a compiled program."""
    import jax
    import jax.numpy as jnp

    turns = [
        {"role": "user", "content": "What is a mesh?"},
        {"role": "assistant", "content": "Devices."},
    ]
    call = {"type": "function", "function": {"name": "count", "arguments": {"of": "devices"}}}
    tools = [
        {
            "type": "function",
            "function": {"name": "count", "parameters": {"type": "object", "properties": {}}},
        }
    ]
    with_call = [turns[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    rows = [
        {"messages": turns},
        {"messages": with_call, "tools": tools},
        {"prompt": "a", "completion": "b"},
    ]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "prompts.jsonl").write_text(
        "\n".join(map(json.dumps, [{"prompt": "a"}, {"messages": turns[:1]}])) + "\n"
    )
    (folder / "prompts.txt").write_text("a\nb\n")
    _make("tokenize text.txt text.bin")
    step = jax.jit(
        lambda x: jax.lax.fori_loop(
            0,
            3,
            lambda i, x: jnp.tanh(x @ x),
            x,
        )
    )
    (folder / "step.hlo").write_text(step.lower(jnp.ones((8, 8))).compile().as_text() or "")


def _make_run(folder: Path) -> None:
    """A run with a checkpoint, metrics, and a trace of two steps."""
    import jax
    import jax.numpy as jnp

    _make("convert model run --mesh.data 1 --mesh.platform cpu")
    rows = [
        {"step": step, "loss": 5.0 - step, "val_loss": 5.0, "step_seconds": 0.1}
        for step in (1, 2, 3)
    ]
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run" / "sinks.json").write_text(json.dumps({"tensorboard": "", "wandb": "abc"}))
    pieces = [["text.txt", 940, "abc"], ["stream", None, "def"]]
    (folder / "run" / "data.json").write_text(json.dumps({"broken": "", "files": pieces}))
    profile = folder / "run" / "profile"
    with jax.profiler.trace(str(profile)):
        jax.block_until_ready(jax.jit(jnp.sin)(jnp.ones(8)))
    shutil.move(next(profile.rglob("*.xplane.pb")), profile / "trace.xplane.pb")
    facts = {
        "steps": [1, 2],
        "trace": "trace.xplane.pb",
        "module": "jit_sin",
        "device_kind": "cpu",
        "devices": 1,
        "traced": 1,
        "lines": {"sine.1": ["", "", ""]},
    }
    (profile / "steps_1_2.json").write_text(json.dumps(facts))


def _make(words: str) -> None:
    code, said = _run(words)
    assert code == 0, said


class Outcome(NamedTuple):
    """What became of one damaged file."""

    kind: str
    """`taken`, `refused`, or a fault."""
    said: str = ""


def _run(words: str) -> tuple[int, str]:
    """The exit code of a command, and what it said on standard error."""
    from jaxpar.cli.main import main

    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        code = main(words.split())
    return code, said.getvalue()


def _read(reader: Reader) -> tuple[int, str]:
    if reader.words:
        return _run(reader.words)
    from jaxpar.base.errors import UserError
    from jaxpar.hlo.read import read_program
    from jaxpar.train.run_data import read_data
    from jaxpar.train.sinks import read_sink_ids

    file = Path(reader.file)
    try:
        if reader.name == "HLO":
            read_program(file.read_text(encoding="utf-8", errors="replace"))
        elif reader.name == "data.json":
            read_data(file)
        else:
            read_sink_ids(file.parent)
    except UserError as error:
        return 2, f"jaxpar: error: {reader.file}: {error}"
    return 0, ""


@contextlib.contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """End what takes longer, by a TimeoutError."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def attempt(reader: Reader, damaged: bytes) -> Outcome:
    """Run the command of a reader over a damaged file, in the current folder, and leave the file as
    it was.
    """
    file = Path(reader.file)
    whole = file.read_bytes()
    file.write_bytes(damaged)
    try:
        with _at_most(_SECONDS):
            code, said = _read(reader)
    except BaseException as error:  # a panic of a library in Rust is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        where = traceback.extract_tb(error.__traceback__)
        ours = [
            frame for frame in where if "/jaxpar/" in frame.filename or "/models/" in frame.filename
        ]
        place = ours[-1] if ours else where[-1]
        line = f"{Path(place.filename).name}:{place.lineno} {place.name}"
        return Outcome("traceback", f"{type(error).__name__}: {str(error)[:120]!r} at {line}")
    finally:
        file.write_bytes(whole)
        shutil.rmtree("new", ignore_errors=True)
    if code in (0, 1):
        return Outcome("taken")
    return _of_line(reader, said)


def _of_line(reader: Reader, said: str) -> Outcome:
    """Whether a refusal is one line that names the file or its folder."""
    from jaxpar.base.config import Config

    lines = [line for line in said.splitlines() if line.startswith("jaxpar: error: ")]
    if len(lines) != 1 or "Traceback" in said or not lines[0].isprintable():
        return Outcome("lines", said[:300])
    # A setting is a place too.
    if reader.file.endswith(".toml"):
        settings = [f"{field}." for field in vars(Config())]
    else:
        settings = []
    *folders, name = Path(reader.file).parts
    # A template of other text is a good one, over which the conversations are at fault.
    names = (
        *folders,
        name.partition(".bin")[0],
        *settings,
        *["chat.jsonl"] * name.endswith(".jinja"),
    )
    named = any(one in lines[0] for one in names)
    return Outcome("refused" if named else "place", lines[0])


def trials(
    reader: Reader,
    count: int,
    seed: int,
) -> Iterator[tuple[int, bytes, Outcome]]:
    """Damage a reader's file `count` times; every trial has a number, from which alone its damage
    comes.
    """
    content = Path(reader.file).read_bytes()
    usual = attempt(reader, content)  # taken, or refused for what the command lacks besides
    for number in range(seed, seed + count):
        draw = random.Random(f"{reader.name} {number}")
        damaged = draw.choice(reader.ways)(content, draw)
        outcome = attempt(reader, damaged)
        yield number, damaged, Outcome("taken") if outcome.said == usual.said else outcome


def fuzz(
    readers: list[Reader],
    count: int,
    seed: int,
    say: Callable[[str], None],
) -> int:
    """Print a table of the trials of each reader, with its faults below it, and return the number
    of faults.
    """
    faults = 0
    say(f"{'reader':<26} {'trials':>6} {'taken':>6} {'refused':>7} {'faults':>6} {'seconds':>7}")
    for reader in readers:
        kinds = Counter[str]()
        found = list[str]()
        began = time.monotonic()
        for number, damaged, outcome in trials(reader, count, seed):
            kinds[outcome.kind] += 1
            if outcome.kind not in ("taken", "refused"):
                found.append(
                    f"    {outcome.kind} at --seed {number}: {outcome.said!a}  <- {damaged[:60]!r}"
                )
        faults += len(found)
        numbers = (
            count,
            kinds["taken"],
            kinds["refused"],
            len(found),
            round(time.monotonic() - began),
        )
        say("{:<26} {:>6} {:>6} {:>7} {:>6} {:>7}".format(reader.name, *numbers))
        for line in found:
            say(line)
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--only", nargs="+", default=[], help="readers whose names have one of these words"
    )
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first trial")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    chosen = [
        one for one in READERS if not args.only or any(word in one.name for word in args.only)
    ]
    if args.list:
        print("\n".join(f"{one.name:<26} {one.file:<44} jaxpar {one.words}" for one in chosen))
        return 0
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    from jaxpar.cli.main import _unraisable

    sys.unraisablehook = _unraisable
    resource.setrlimit(resource.RLIMIT_DATA, (_BYTES, _BYTES))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        make_files(Path(folder))
        return int(fuzz(chosen, args.trials, args.seed, lambda line: print(line, flush=True)) > 0)


if __name__ == "__main__":
    sys.exit(main())
