"""The files that `fuzz_readers` damages, each with the command that reads it, made so small that a
command ends soon.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from damage import (
    Damage,
    damage_bytes,
    damage_json,
    damage_jsonl,
    damage_safetensors,
    damage_toml,
)
from tokenizer_kinds import KINDS, change_part, make_kinds, use_tokenizer


class Reader(NamedTuple):
    """A file, relative to the folder of all, and the words of the command that reads it."""

    name: str
    file: str
    words: str
    ways: tuple[Damage, ...]
    quick: int = 4
    """How many trials `make test` makes."""
    manifest: str = ""
    """The manifest that is written anew over the damage, so that what reads behind it meets the
    damage too; empty = none is."""


def seal(manifest: Path) -> None:
    """Write the manifest of a step anew, for the files that are there now."""
    from jaxpar.train.runs.folder.manifest import write_manifest

    write_manifest(manifest.parent, 0, {})


def damage_and_seal(content: bytes, draw: random.Random) -> bytes:
    """Damage what a manifest says, and give it the check of that, as if it had been written so."""
    from jaxpar.train.runs.folder.manifest import _check

    said = json.loads(content)
    del said["check"]
    damaged = json.loads(damage_json(json.dumps(said).encode(), draw))
    if not isinstance(damaged, dict):
        return json.dumps(damaged).encode()
    return json.dumps({"check": _check(damaged), **damaged}).encode()


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
_IN_BUCKET = "generate file://HERE/bucket/run --prompt a --max-tokens 99999"
_CUT = "tokenize text.txt new.bin --tokenizer words/tokenizer.json"
_LONG = "generate model --prompt a --max-tokens 99999"
_RESTORE = "generate run --prompt a --max-tokens 99999"
_STEP = "run/checkpoints/0"
# What a step's manifest covers, which says at once that it is damaged; and the same with a manifest
# that has the damage for good.
_COVERED = (
    ("_METADATA", "state/_METADATA", _JSON),
    ("sharding", "state/_sharding", _JSON),
    ("data", "data/metadata", _JSON),
    ("manifest.ocdbt", "state/manifest.ocdbt", _BYTES_ONLY),
)


def _covered(name: str, file: str, ways: tuple[Damage, ...]) -> Reader:
    return Reader(f"checkpoint's {name}", f"{_STEP}/{file}", _RESTORE, ways, 1)


def _below_manifest(name: str, file: str, ways: tuple[Damage, ...]) -> Reader:
    # where arrays are read, what Orbax drops is a warning to pytest, which a command keeps quiet
    quick = 4 if name == "data" else 0
    manifest = f"{_STEP}/manifest.json"
    return Reader(f"{name} below it", f"{_STEP}/{file}", _RESTORE, ways, quick, manifest)


def _tokenizer(kind: str) -> Reader:
    ways = (change_part, change_part, *_JSON)
    return Reader(f"tokenizer, {kind}", f"kinds/{kind}/tokenizer.json", "", ways, 12)


_CHECKPOINT = (
    Reader("checkpoint's metadata", f"{_STEP}/_CHECKPOINT_METADATA", _RESTORE, _JSON),
    Reader("checkpoint's manifest", f"{_STEP}/manifest.json", "checkpoints run --verify", _JSON),
    Reader("manifest, resealed", f"{_STEP}/manifest.json", _RESTORE, (damage_and_seal,), 12),
    Reader("validation loss", f"{_STEP}/val_loss.json", "checkpoints run", _JSON),
    *(_covered(*one) for one in _COVERED),
    *(_below_manifest(*one) for one in _COVERED),
    Reader("checkpoint in a bucket", f"bucket/{_STEP}/uploaded.json", _IN_BUCKET, _JSON),
    Reader("a copy's index", "copies/index.json", "", _JSON, 12),
    Reader("lock of a run", "run/lock.json", "", _JSON, 1),
    Reader("mark of a reader", "run/.reading-1", "", _JSON),
    Reader("a teacher's answers", "answers/top_k.json", "", _JSON),
)
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
    *(_tokenizer(kind) for kind in KINDS),
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
    Reader("goodput.jsonl", "run/goodput.jsonl", "goodput run", _JSONL, 8),
    Reader("sinks.json", "run/sinks.json", "", _JSON, 12),
    Reader("data.json", "run/data.json", "", _JSON, 20),
    Reader("token ids", "text.bin", _TOKENS, _BYTES_ONLY),
    Reader("token ids' .json", "text.bin.json", _TOKENS, _JSON),
    Reader("document starts", "text.bin.docs", f"{_TOKENS} --data.pack True", _BYTES_ONLY),
    Reader("token ids' tokenizer", "text.bin.tokenizer.json", _TOKENS, _JSON),
    Reader("text", "text.txt", "tokenize text.txt new.bin", _BYTES_ONLY),
    *_CHECKPOINT,
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


def wait_for_nobody(patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Have commands wait for no other process, as there is none, and keep what they fetch in a
    cache of their own.
    """
    from jaxpar.train.restore import which_step
    from jaxpar.train.runs.locks import run_lock

    patch.setenv("XDG_CACHE_HOME", str(cache))
    patch.setattr(which_step, "_REMOVAL_SECONDS", 0.0)
    patch.setattr(run_lock, "_SETTLE", 0.0)
    patch.setattr(run_lock, "WATCH", 0.0)


def make_files(folder: Path) -> None:
    """Make all files that are read, in a folder which is the current one."""
    import jax

    from jaxpar.base.config import Lora, ModelConfig
    from jaxpar.base.layout.mesh import MeshSpec, make_mesh
    from jaxpar.base.layout.plan import Plan
    from jaxpar.models import Model
    from jaxpar.models.hf import hf_config, peft
    from jaxpar.models.hf.export import export_hf

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
    make_kinds(folder / "kinds")
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

    from jaxpar.base.process.processes import machine
    from jaxpar.train.runs.folder import val_losses

    _make("convert model run --mesh.data 1 --mesh.platform cpu")
    _make("convert model file://HERE/bucket/run --mesh.data 1 --mesh.platform cpu")
    rows = [
        {"step": step, "loss": 5.0 - step, "val_loss": 5.0, "step_seconds": 0.1}
        for step in (1, 2, 3)
    ]
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    account = {"began": 0, "ended": 9, "lowest": 0, "step": 3, "saves": 1, "marks": [[2, 3.5]]}
    lives = [account | {"seconds": {"productive": 5, "data": 4}}] * 2
    (folder / "run" / "goodput.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lives))
    (folder / "run" / "sinks.json").write_text(json.dumps({"tensorboard": "", "wandb": "abc"}))
    pieces = [["text.txt", 940, "abc"], ["stream", None, "def"]]
    (folder / "run" / "data.json").write_text(json.dumps({"broken": "", "files": pieces}))
    step = folder / "run" / "checkpoints" / "0"
    loss = {"val_loss": 5.0, "check": val_losses._check(0, 5.0)}
    (step / "val_loss.json").write_text(json.dumps(loss))
    owner = {"machine": machine(), "pid": 5, "began": "1", "since": "then", "token": "t"}
    (folder / "run" / "lock.json").write_text(json.dumps(owner))
    (folder / "run" / ".reading-1").write_text(json.dumps({**owner, "step": 0}))
    _make_answers(folder / "answers")
    (folder / "copies").mkdir()
    (folder / "copies" / "index.json").write_text(json.dumps({"tokenizer.json": "1", "x": "2"}))
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


def _make_answers(folder: Path) -> None:
    """A teacher's answers of one entry for a window of four tokens."""
    folder.mkdir()
    header = {
        "version": 1,
        "teacher": "run",
        "step": 0,
        "k": 1,
        "vocab_size": 300,
        "tokenizer": "",
        "seq_len": 4,
        "stride": 4,
        "pack": False,
        "begins": [-1],
        "tokens": [5],
        "windows": [1],
        "data": [["text.txt", 940, "abc"]],
    }
    (folder / "top_k.json").write_text(json.dumps(header))
    (folder / "ids.bin").write_bytes(bytes(8))
    (folder / "log_probs.bin").write_bytes(bytes(16))


def _make(words: str) -> None:
    code, said = run_command(words)
    assert code == 0, said


def run_command(words: str) -> tuple[int, str]:
    """The exit code of a command, and what it said on standard error; `HERE` in its words is the
    current folder.
    """
    from jaxpar.cli.main import main
    from jaxpar.train.runs.bucket import remote_runs

    remote_runs._COPIES.clear()  # another process has none
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        code = main(words.replace("HERE", str(Path.cwd())).split())
    return code, said.getvalue()


def _read_program(file: Path) -> None:
    from jaxpar.hlo.read import read_program

    read_program(file.read_text(encoding="utf-8", errors="replace"))


def _read_data(file: Path) -> None:
    from jaxpar.train.run_data import read_data

    read_data(file)


def _read_sinks(file: Path) -> None:
    from jaxpar.train.sinks import read_sink_ids

    read_sink_ids(file.parent)


def _take_lock(file: Path) -> None:
    from jaxpar.train.runs.locks import run_lock

    run_lock.RunLock(file.parent, lambda line: None).close()


def _read_mark(file: Path) -> None:
    from jaxpar.train.runs.locks.in_use import steps_in_use

    steps_in_use(file.parent, [0])


def _read_answers(file: Path) -> None:
    from jaxpar.data.top_k_files import open_answers

    answers = open_answers(file.parent)
    answers.require(answers.header)
    assert answers.identity


def _refresh_copy(file: Path) -> None:
    from jaxpar.base.storage.bucket import Bucket
    from jaxpar.base.storage.copies import _refresh

    bucket = Bucket(f"file://{Path.cwd()}/words")
    _refresh(bucket, file.with_name("copy"), file, bucket.files())


READS: dict[str, Callable[[Path], None]] = {
    "HLO": _read_program,
    "data.json": _read_data,
    "sinks.json": _read_sinks,
    "lock of a run": _take_lock,
    "mark of a reader": _read_mark,
    "a teacher's answers": _read_answers,
    "a copy's index": _refresh_copy,
    **{f"tokenizer, {kind}": use_tokenizer for kind in KINDS},
}
"""What reads a file that no short command reads."""
