"""The command line: every command does its work, and every mistake of a user is one line and exit
code 2.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from heard_signals import children_hear
from orbax.checkpoint._src.serialization import serialization
from safetensors.numpy import load_file, save_file

from jaxpar.base.config import ModelConfig, load_config, parse
from jaxpar.base.registry import SINKS
from jaxpar.base.toml import flatten, presets, to_toml
from jaxpar.cli import commands
from jaxpar.cli.arguments import config_args
from jaxpar.cli.commands import TrainArgs
from jaxpar.cli.main import _ORBAX_READING, COMMANDS, _unraisable, main
from jaxpar.models import Model
from jaxpar.models.hf.export import export_hf
from jaxpar.train.metrics import read_metrics
from jaxpar.train.sinks import register_sink

SMALL = """
--model.embed 16 --model.heads 2 --model.mlp 32 --model.layers 1 --model.max-seq-len 16 --data.seq-len 16
--train.batch 8 --train.steps 3 --train.warmup-steps 1 --train.eval-batches 1
--train.final-eval-batches 1
""".split()  # noqa: SIM905 (a command line reads as one)


@pytest.fixture
def run(capsys):
    """`run(*words)`: what a command that succeeds prints."""

    def call(*words: object) -> str:
        assert main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    return call


NO_URLS = [
    "tokenize stdlib gs://b/t.bin",
    "generate run --prompts s3://b/p",
    "sweep tiny --over train.seed=1 --run gs://b",
    "show tiny --out gs://b/p.png",
    "rehearse tiny --target v5e-8 --json gs://b/r.json",
    "eval run --top-k 2 --out s3://b/answers",
    "launch slurm tiny --target h100x8 --run s3://b",
    "launch ray tiny --workers 2 --run gs://b",
]


@pytest.mark.parametrize("words", NO_URLS)
def test_a_bucket_is_refused_where_only_a_path_of_this_machine_will_do(
    words, refused, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    assert "://b" in (line := refused(*shlex.split(words))) and "is a URL" in line
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


URLS = [
    "train nowhere://b/run",
    "train tiny --run nowhere://b/run",
    "train tiny --data.source text --data.path nowhere://b",
    "train tiny --data.source text --data.mixture 'nowhere://b 0.5'",
    "train tiny --train.init nowhere://b",
    "train tiny --data.tokenizer nowhere://b/tokenizer.json",
    "tokenize nowhere://b out.bin",
    "convert nowhere://b run",
    "generate nowhere://b --prompt x",
    "eval nowhere://b",
    "watch nowhere://b",
    "verify nowhere://b/c.toml",
]


@pytest.mark.parametrize("words", URLS)
def test_a_url_that_nothing_reads_is_refused_and_makes_no_folder(
    words, refused, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    line = refused(*shlex.split(words))
    assert "nowhere://b" in line and "s3:// and gs://" in line
    assert not [path for path in tmp_path.iterdir() if ":" in path.name]


@pytest.fixture
def refused(capsys):
    """`refused(*words)`: the one line that a mistake prints."""

    def call(*words: object) -> str:
        assert main([str(word) for word in words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("jaxpar: error: ")
        assert "Error(" not in line
        return line.removeprefix("jaxpar: error: ")

    return call


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return path


def shell(*words: str, **changes: str) -> subprocess.CompletedProcess:
    """A command in a process of its own, as on a user's machine: nothing of this test run's
    settings.
    """
    ours = ("JAX_", "TPU_", "XLA_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    environment |= {"JAX_ENABLE_COMPILATION_CACHE": "false"} | changes
    command = [sys.executable, "-m", "jaxpar.cli.main", *words]
    return subprocess.run(
        command, env=environment, check=False, capture_output=True, text=True, timeout=120
    )


# Commands and flags.


def test_help_lists_every_command(run):
    text = run("--help")
    assert run() == text
    for name, command in COMMANDS.items():
        assert f"{name} " in text
        assert command.text in text


def test_what_needs_no_jax_does_not_wait_for_it():
    """Nor for numpy and rich; the names of `jaxpar` come when they are asked for, and
    mistakes are told.
    """
    words = ["--help", "--version", "configs", "meshes", "trian", "configs tiny"]
    script = f"""
import sys, jaxpar
from jaxpar.cli.main import main
codes = [main(line.split()) for line in {words}]
print(codes, {{"jax", "numpy", "rich"}} & set(sys.modules))
from jaxpar import *
print(jaxpar.base.layout.mesh.MeshSpec is MeshSpec, set(jaxpar.__all__) <= set(globals()), hasattr(jaxpar, "Confgi"))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-2:] == ["[0, 0, 0, 0, 2, 2] set()", "True True False"]


@pytest.mark.slow
def test_a_second_start_reads_its_programs_and_computes_the_same_bits(text, tmp_path):
    on = {"XDG_CACHE_HOME": str(tmp_path), "JAX_ENABLE_COMPILATION_CACHE": "true"}
    words = [
        "train",
        "tiny",
        "--data.source",
        "text",
        "--data.path",
        str(text),
        *SMALL,
        "--mesh.tensor",
        "2",
    ]
    rows = []
    programs = []
    for name in ("first", "second"):
        done = shell(*words, "--run", str(tmp_path / name), **on)
        assert done.returncode == 0, done.stderr
        assert not done.stderr
        rows.append(
            [(row.get("loss"), row.get("val_loss")) for row in read_metrics(tmp_path / name)]
        )
        programs.append(
            {file.name for file in (tmp_path / "jaxpar" / "programs").rglob("jit_step*-cache")}
        )
    assert rows[0] == rows[1]
    # a step that was not found would be another file
    assert len(programs[0]) == 2 and programs[0] == programs[1]


@pytest.mark.parametrize(
    "words",
    [
        ("configs",),
        pytest.param(("train", "--help"), marks=pytest.mark.slow),
    ],
)
def test_a_reader_that_has_gone_is_no_error(words):
    """`jaxpar train --help | head`: what is left unsaid goes nowhere, quietly."""
    command = [sys.executable, "-m", "jaxpar.cli.main", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141  # of a program that SIGPIPE ends


@pytest.fixture
def heard():
    """Ctrl-C reaches a child also where the tests were started in the background, deaf to it."""
    with children_hear():
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("heard")
def test_ctrl_c_while_compiling_is_a_line(tmp_path):
    """And it does not wait for the compiler, which nothing interrupts."""
    words = ["train", "tiny", "--model.layers", "12", "--run", str(tmp_path / "run")]
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))
    }
    environment |= {"JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_LOG_COMPILES": "1"}
    command = [sys.executable, "-m", "jaxpar.cli.main", *words]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **quiet) as run:
        assert run.stderr
        next(
            line
            for line in run.stderr
            if "Finished jaxpr to MLIR module conversion jit(step)" in line
        )
        run.send_signal(signal.SIGINT)
        pressed = time.monotonic()
        said = [line for line in run.stderr if "Finished" not in line and "Compiling" not in line]
        assert run.wait(timeout=120) == 130
        assert time.monotonic() - pressed < 5
    assert said == ["jaxpar: interrupted\n"]


@pytest.mark.usefixtures("heard")
def test_ctrl_c_inside_the_garbage_collector_ends_the_command_too():
    """Python swallows what is raised there, and a run went on to its end."""
    script = (
        "import gc, signal, sys, jaxpar.cli.main\n"
        "gc.callbacks.append(lambda phase, _: signal.raise_signal(signal.SIGINT))\n"
        "jaxpar.cli.main._command = lambda _: gc.collect()\n"
        "sys.exit(jaxpar.cli.main.main())"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (130, "jaxpar: interrupted\n")


def test_version(run):
    assert run("--version").startswith("jaxpar 0.")


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_shows_its_usage_and_flags(command, flag, capsys):
    with pytest.raises(SystemExit) as stop:
        sys.exit(main([command, flag, "all"]))
    assert stop.value.code == 0
    text = capsys.readouterr().out
    function = getattr(commands, f"{command}_command", None)
    assert text.startswith(f"usage: jaxpar {command}")
    promised = re.findall(r"--[a-z.-]+", str(function.__doc__))
    takes_config = "--section.key" in promised
    wanted = [*promised, *(["--train.learning-rate", "--mesh.dcn.data"] if takes_config else [])]
    assert all(flag in text for flag in wanted if flag != "--section.key")


def test_help_shows_the_values_of_the_config_that_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["train", "tiny", "--help", "train"])
    assert "default: 300)" in capsys.readouterr().out


def test_help_is_short_and_lists_the_tables(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    short = capsys.readouterr().out
    assert len(short.splitlines()) < 60 and "--run STR" in short
    for table in load_config("tiny").__dataclass_fields__:
        assert re.search(rf"^  {table} +[A-Z]", short, re.MULTILINE), table
    assert "--model.layers" not in short


def test_help_on_tables(capsys, refused):
    with pytest.raises(SystemExit):
        main(["train", "tiny", "--help", "kernels", "model.lora"])
    shown = capsys.readouterr().out
    assert "--kernels.attention STR" in shown and "(one of auto, cudnn, pallas_gpu" in shown
    assert "[model.lora]  Low-rank adaptation" in shown and "--model.layers" not in shown
    assert "no help on 'modle' (did you mean 'model'?)" in refused(
        "train", "tiny", "--help", "modle"
    )


def test_help_lists_a_name_that_a_program_registered(capsys):
    register_sink("of-a-test")(lambda config, folder, first_step, run_id: None)
    try:
        with pytest.raises(SystemExit):
            main(["train", "tiny", "--help", "metrics"])
    finally:
        SINKS.remove("of-a-test")
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"any of tensorboard, wandb, mlflow, ([\w-]+, )*of-a-test;", shown)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian tiny", "no command 'trian' (did you mean 'train'?): jaxpar --help lists them"),
        (
            "train",
            "usage: jaxpar train CONFIG [--run DIR] [--target T] [--verify] [--section.key value "
            "...]",
        ),
        ("tokenize stdlib", "usage: jaxpar tokenize SOURCE OUT.bin [--tokenizer NAME]"),
        (
            "tokenize nosuch/ out.bin",
            "no file or folder nosuch/: give the path of a text, or of a folder of them",
        ),
        (
            "tokenize stdlib out.bin --bos true",
            "--bos=true: the tokenizer bytes has no token that begins a text: leave --bos out",
        ),
        ("tokenize stdlib out.bin --max-bytes 1", "fits in --max-bytes=1: raise it"),
        (
            "convert here",
            "usage: jaxpar convert HF_OR_PEFT RUN_FOLDER [--section.key value ...], or "
            "RUN_FOLDER OUT",
        ),
        (
            "convert nowhere run",
            "there is no nowhere: give a run folder, or a folder with a Hugging Face checkpoint",
        ),
        ("configs tiny", "jaxpar configs takes no arguments, found tiny"),
        ("doctor --now", "jaxpar doctor takes no arguments, found --now"),
        (
            "train tinny",
            "no preset 'tinny' (did you mean 'tiny'?): `jaxpar configs` lists them; a path ends "
            "in .toml, or",
        ),
        ("train tiny --on h100-8", "no target 'h100-8': write h100x64 for 64 GPUs, 8 to a node"),
        ("train tiny --on cpu_8 --mesh.data 2", "leave out the --mesh. flags, or leave out --on"),
        ("train tiny --train.stepz 3", "takes no --train.stepz (did you mean '--train.steps'?)"),
        ("train tiny --train.stepz=3", "takes no --train.stepz (did you mean '--train.steps'?)"),
        ("train tiny --rum here", "takes no --rum (did you mean '--run'?)"),
        ("train tiny here", "takes no here: jaxpar train --help lists its flags"),
        ("tokenize a b.bin --max-byte 3", "takes no --max-byte (did you mean '--max-bytes'?)"),
        ("train tiny --train.steps abc", "--train.steps is a whole number, found 'abc'"),
        (
            "train tiny --train.learning-rate fast",
            "--train.learning-rate is a number, found 'fast'",
        ),
        (
            "train tiny --train.on-nonfinite skyp",
            "--train.on-nonfinite is one of stop, skip, rollback, found 'skyp' "
            "(did you mean 'skip'?)",
        ),
        (
            "train tiny --train.schedule cosin",
            "train.schedule is one of cosine, wsd, constant, found 'cosin' "
            "(did you mean 'cosine'?)",
        ),
        ("train tiny --data.pack maybe", "--data.pack is true or false, found 'maybe'"),
        (
            "train tiny --rules.mlp data tensr",
            "--rules.mlp is one of stage, data, fsdp, context, expert, tensor, found 'tensr' "
            "(did you mean 'tensor'?)",
        ),
        (
            "train tiny --train.steps",
            "--train.steps takes a value, and none follows: give a whole number",
        ),
        (
            "show tiny --layer --masks a.png",
            "--layer takes a value, and none follows: give a name, a path or other text",
        ),
        ("train tiny --run -x", "one that begins with a hyphen is written --run=-x"),
        ("train tiny --verify=False", "--verify stands alone: leave out '=False'"),
        ("train tiny --memory.keep full", "(it is a table: write --memory.keep.NAME VALUE)"),
        ("train tiny --mesh tensor=2", "takes no --mesh (did you mean '--mesh.tensor 2'?)"),
    ],
)
def test_a_mistaken_command_line(words, message, refused):
    assert message in refused(*words.split())


def test_flags_change_the_config(run, tmp_path):
    picture = tmp_path / "a.png"
    words = [
        "--mesh.tensor=1",
        "--mesh.data",
        "-1",
        "--rules.embed",
        "--model.scan_layers",
        "True",
        "--out",
        picture,
    ]
    text = run("show", "tiny", *words)
    assert " P() " in text and "P('" not in text and "P(None" not in text
    assert picture.exists()


def test_a_setting_may_be_written_as_messages_write_it(run, refused, tmp_path):
    words = [
        "mesh.tensor=1",
        "mesh.data=-1",
        "mesh.fsdp=1",
        "rules.residual_seq=[context, tensor]",
        "rules.mlp=[]",
    ]
    words += [
        "--out",
        tmp_path / "a.svg",
        "model.family=llama",
        'model.masks=["longformer(8, 2)", causal]',
    ]
    text = run("show", "tiny", *words)
    assert " P() " in text and "P('" not in text and "P(None" not in text
    assert "takes no --mesh.tensr (did you mean '--mesh.tensor'?)" in refused(
        "show", "tiny", "mesh.tensr=1"
    )


# Configs, meshes, data.


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[train]\nstepz = 3", "unknown key train.stepz (did you mean 'steps'?)"),
        ("[train]\nsteps = '3'", "train.steps is a whole number, found '3'"),
        ("[train\n", "is not valid TOML"),
        ("[train]\nbatch = 0", "train.batch=0 is below 1"),
    ],
)
def test_a_mistaken_config_file(content, message, refused, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(content)
    assert message in refused("train", path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--mesh.data 16", "64 simulated CPU devices are needed and JAX has started with 8"),
        (
            "--mesh.platform auto --mesh.data 1",
            "mesh fsdp=2 x tensor=2 needs 4 devices, 8 are here: try mesh.fsdp=4",
        ),
        (
            "--mesh.data 0",
            "mesh.data=0 is not in [1, 65,536], nor -1: an axis has at least 1 device",
        ),
        ("--mesh.data 5000", "20,000 simulated CPU devices: at most 4,096 are made"),
        ("--mesh.dcn.data 0", "mesh.dcn.data=0 is below 1"),
        ("--mesh.data -1 --mesh.fsdp -1", "mesh has data and fsdp = -1"),
        ("--model.mlp 511", "dim 1 (mlp) has size 511, which tensor=2 does not divide"),
        ("--train.batch 6", "4 data-parallel shards do not divide: try train.batch=8"),
        (
            "--data.seq-len 127",
            "residual stream: dim 1 (residual_seq) has size 127, which tensor=2 does not divide",
        ),
        ("--rules.mlp tensor --rules.embed tensor", "mesh axis tensor=2 is used twice, by dim"),
        ("--model.family gpt3", "no model family 'gpt3' (did you mean 'gpt2'?)"),
        ("--model.embed 100 --model.heads 3", "model.embed=100 is not a multiple of model.heads=3"),
    ],
)
def test_a_layout_that_does_not_fit(words, message, refused, tmp_path):
    assert message in refused("train", "tiny", "--run", tmp_path / "run", *words.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (None, "--data.source text", "no file or folder"),
        (b"", "--data.source text", "is empty"),
        (b"ab\0cd" * 99, "--data.source text", "is binary (NUL at byte 2), not text"),
        (b"caf\xe9 " * 99, "--data.source text", "is not UTF-8 text"),
        (b"too short", "--data.source text", "one window takes data.seq_len + 1 = 17"),
        (
            b"abcdefghij" * 99,
            "--data.source text --data.tokenizer chars --model.vocab-size 8",
            "has 10 tokens, model.vocab_size=8: try model.vocab_size=10",
        ),
        (
            b"abcdefghij" * 99,
            "--data.source text --data.tokenizer charz",
            "no tokenizer 'charz' (did you mean 'chars'?)",
        ),
        (None, "--data.source tokens", "a file of token ids, is not there"),
        (b"", "--data.source tokens", "has 0 bytes, not a positive multiple of 2"),
        (b"odd" * 333, "--data.source tokens", "has 999 bytes, not a positive multiple of 2"),
        (
            np.arange(900, dtype="<u2").tobytes(),
            "--data.source tokens --train.steps 50",
            "model.vocab_size=256: raise it to at least",
        ),
    ],
)
def test_mistaken_data(content, words, message, refused, tmp_path):
    path = tmp_path / "data.bin"
    if content is not None:
        path.write_bytes(content)
    line = refused(
        "train", "tiny", *SMALL, "--run", tmp_path / "run", "--data.path", path, *words.split()
    )
    assert message in line
    assert str(path) in line or "charz" in words


def test_steps_alone_shorten_the_warm_up_and_an_old_flag_is_taken(refused, capsys, tmp_path):
    """What is said goes to standard error."""
    name, args = config_args("jaxpar train", TrainArgs, ["tiny", "--train.steps", "20"])
    assert (name, args.config.train.warmup_steps) == ("tiny", 2)
    said = capsys.readouterr()
    assert said.out == "" and said.err == (
        "jaxpar: note: train.steps=20 is shorter than the schedule was: train.warmup_steps 30 "
        "-> 2\n"
    )
    words = ["tiny", "--train.min-learning-rate", "3e-5", "train.learning_rate=6e-5"]
    assert (
        config_args("jaxpar train", TrainArgs, words)[1].config.train.min_learning_rate_ratio == 0.5
    )
    line = refused("show", "tiny", "--train.min-learning-rate=1")
    assert "as train.min_learning_rate was a rate: the rate must not climb to it" in line


# Runs.


@pytest.mark.slow
def test_tokenize_then_train_then_evaluate(run, refused, tmp_path):
    tokens = tmp_path / "text.bin"
    folder = tmp_path / "run"
    printed = run("tokenize", "stdlib", tokens, "--max-bytes", 20_000)
    assert f"{tokens}: " in printed
    assert "tokens (uint16), unigram entropy" in printed
    train = [
        "train",
        "tiny",
        *SMALL,
        "--data.source",
        "tokens",
        "--data.path",
        tokens,
        "--run",
        folder,
    ]
    printed = run(*train)
    assert "mesh         data=2 x fsdp=2 x tensor=2" in printed
    assert "step 3 done" in printed
    assert [row["step"] for row in read_metrics(folder) if "loss" in row] == [3]
    assert "nothing to train" in run(*train)
    assert "holds a run of another config (model.mlp: 32 -> 64)" in refused(
        *train, "--model.mlp", 64
    )
    result = json.loads(run("eval", folder, "--json"))
    assert result["step"] == 3
    assert result["val_loss"] == pytest.approx(np.log(result["perplexity"]))
    # a token is a byte
    assert result["bits_per_byte"] == pytest.approx(result["val_loss"] / np.log(2))
    assert "has no step 99: it has 3" in refused("eval", folder, "--step", 99)


@pytest.mark.slow
def test_a_run_folder_is_taken_wherever_a_config_is(run, refused, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "tiny", *SMALL, "--data.source", "text", "--data.path", text, "--run", "mine"]
    run(*words, "mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", "--train.stop-at", 2)
    assert "--train.stop-at 0 goes on to step 3" in run("train", "mine")
    assert "run          mine, resumed after step 2" in run(
        "train", "mine/config.toml", "--train.stop-at", 0
    )
    assert "blocks.up " in run("show", "mine")
    assert "mine.png" in os.listdir() and not Path("runs").exists()
    Path("empty").mkdir()
    assert "a path ends in .toml, or is that of a run folder" in refused("train", "empty")
    folders = {
        "mine/": "mine",
        "tiny": "runs/tiny",
        "my/config.toml": "runs/config",
        "a.toml": "runs/a",
    }
    for name, folder in folders.items():
        assert commands.run_folder(name) == Path(folder)


def test_a_run_folder_of_something_else(refused, text, tmp_path):
    train = [
        "train",
        "tiny",
        *SMALL,
        "--data.source",
        "text",
        "--data.path",
        text,
        "--run",
        tmp_path,
    ]
    assert "is there and is no run folder (it has no config.toml)" in refused(*train)
    assert "has neither config.toml, as a run folder, nor config.json" in refused("eval", tmp_path)


def test_a_run_without_a_checkpoint(refused, text, tmp_path):
    config = load_config("tiny")
    config = replace(
        config,
        data=replace(config.data, source="text", path=str(text)),
    )
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert f"{tmp_path / 'checkpoints'} has no finished checkpoint" in refused("eval", tmp_path)


# Listings.


@pytest.mark.parametrize("listing", ["configs", "meshes"])
def test_every_preset_is_listed_with_what_it_is(listing, run):
    lines = run(listing).splitlines()
    listed = {line.split()[0]: line for line in lines[: lines.index("")]}
    assert list(listed) == list(presets(f"jaxpar.{listing}"))
    assert all(len(line.split(maxsplit=1)[1]) > 10 for line in listed.values())
    assert all(line.endswith(".") for line in listed.values())  # whole sentences


def test_doctor(run):
    facts = run("doctor")
    for word in ("python ", "jax 0.", "8 x cpu", "processes    1", "memory kinds"):
        assert word in facts


def test_show_on_another_mesh(run, tmp_path):
    out = run("show", "tiny", "--on", "cpu_8", "--out", tmp_path / "a.png")
    assert "parameters, on data=2 x fsdp=2 x tensor=2" in out


def test_memory_is_held_against_a_chip_on_a_mesh_of_ones_own(run, refused, tmp_path):
    words = ("show", "tiny", "--mesh.fsdp", 2, "--out", tmp_path / "a.png", "--chip")
    assert "79.11 GiB" in run(*words, "h100")
    assert "h100" in refused(*words, "h10")
    assert "--chip has no effect" in refused(*words, "h100", "--schedule")


@pytest.mark.slow
def test_show_simulates_64_devices(tmp_path):
    picture = tmp_path / "llama.png"
    done = shell("show", "llama3_8b", "--out", str(picture))
    assert (done.returncode, done.stderr) == (0, "")
    title, *_, last = done.stdout.splitlines()
    assert title.startswith("llama, 8.03B parameters, on ")
    assert last == f"picture: {picture}"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_show_a_schedule(run, refused, tmp_path):
    words = (
        "show",
        "tiny",
        "--schedule",
        "--mesh.stage",
        2,
        "--pipeline.microbatches",
        4,
        "--out",
        tmp_path / "a.png",
    )
    assert run(*words).startswith("1f1b, 2 stages, 4 microbatches, 1 layer in each stage\n")
    assert [path.name for path in tmp_path.iterdir()] == ["a_schedule.png"]
    assert run(*words, "--pipeline.schedule", "gpipe").startswith("gpipe, 2 stages")
    assert "try mesh.stage=4" in refused("show", "tiny", "--schedule")
    assert "found 'zb_h2'" in refused(*words, "--pipeline.schedule", "zb_h2")


# Machines.

TPU_HERE = any(Path("/dev").glob("accel*")) or Path("/dev/vfio").is_dir()
GPU_HERE = Path("/dev/nvidiactl").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "platform",
    [
        pytest.param("tpu", marks=pytest.mark.skipif(TPU_HERE, reason="a TPU is here")),
        pytest.param("gpu", marks=pytest.mark.skipif(GPU_HERE, reason="a GPU is here")),
    ],
)
def test_a_platform_that_is_not_here(platform, tmp_path):
    """In one line even where libtpu is installed, which says more."""
    done = shell("train", "tiny", "--mesh.platform", platform, "--run", str(tmp_path / "run"))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"jaxpar: error: mesh.platform is '{platform}' and JAX ")
    assert "mesh.platform=cpu to simulate the mesh here" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.skipif(TPU_HERE, reason="a TPU is here")
def test_a_pod_that_is_not_here(tmp_path):
    """A preset of many hosts: what is missing is the TPU, and no coordinator's address."""
    done = shell("train", "llama3_8b", "--on", "v5p-64", "--run", str(tmp_path / "run"))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "jaxpar: error: mesh.platform is 'tpu' and no TPU is here: start it on each host"
    )


def test_a_jax_that_cannot_start():
    done = shell("doctor", JAX_PLATFORMS="rocm")
    assert done.returncode == 2
    assert "unset JAX_PLATFORMS" in done.stderr.splitlines()[-1]


# Hugging Face checkpoints.

HF_MODEL = ModelConfig(
    vocab_size=32,
    layers=1,
    embed=8,
    heads=2,
    mlp=16,
    max_seq_len=16,
)
ONE_DEVICE = ["--mesh.data", "8", "--data.seq-len", "16"]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory, plan_of) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "gpt2"
    model = Model(HF_MODEL)
    params = jax.tree.map(
        lambda leaf: jax.numpy.full(leaf.shape, 0.5, leaf.dtype),
        model.shapes(),
    )
    export_hf(jax.device_put(params, plan_of().sharding(())), model, folder)
    return folder


@pytest.fixture
def checkpoint(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "gpt2"))


@pytest.mark.slow
def test_convert_there_and_back_gives_the_same_tensors(run, checkpoint, tmp_path):
    folder = tmp_path / "run"
    back = tmp_path / "back"
    assert f"imported {checkpoint} as step 0 of {folder}" in run(
        "convert", checkpoint, folder, *ONE_DEVICE
    )
    assert parse((folder / "config.toml").read_text()).model == HF_MODEL
    assert "exported step 0" in run("convert", folder, back)
    before = load_file(checkpoint / "model.safetensors")
    after = load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_a_tokenizer_comes_along_and_training_asks_for_data(
    run, refused, checkpoint, text, tmp_path, monkeypatch
):
    """Through import, training and export; what a run of an import trains on is open until it has
    trained.
    """
    monkeypatch.chdir(tmp_path)
    assert "has no tokenizer.json: put it into bare, or give data.tokenizer" in run(
        "convert", checkpoint, "bare", *ONE_DEVICE
    )
    assert "cannot read bare/tokenizer.json" in refused("train", "bare", "--data.path", text)
    chars = "\n abcdefghijklmnopqrstuvwxyz"
    (checkpoint / "tokenizer.json").write_text(json.dumps({"tokenizer": "chars", "chars": chars}))
    (checkpoint / "tokenizer_config.json").write_text("{}")
    assert "`jaxpar train run --data.path TEXT` trains it on" in run(
        "convert", checkpoint, "run", *ONE_DEVICE
    )
    train = ["train", "run", "--train.batch", 8, "--train.steps", 1, "--train.warmup-steps", 0]
    assert "data.source=text needs data.path: the file or folder to read" in refused(*train)
    assert "step 1 done" in run(*train, "--data.path", text)
    assert "holds a run of another config (train.batch: 8 -> 16)" in refused(
        "train", "run", "--train.batch", 16
    )
    run("convert", "run", "back")
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(os.listdir("back"))
    assert json.loads(Path("back/tokenizer.json").read_text())["chars"] == chars


def break_weights(folder: Path, change) -> None:
    """Rewrite the tensors after `change` has had them."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


WTE = "transformer.wte.weight"
UP = "transformer.h.0.mlp.c_fc.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "is truncated or not a safetensors file"),
        (
            lambda folder: break_weights(folder, lambda t: t.pop(UP)),
            "it lacks " + UP.removeprefix("transformer."),
        ),
        (
            lambda folder: break_weights(
                folder,
                lambda t: t.update(extra=np.zeros(3, np.float32)),
            ),
            "the model has no place for its extra",
        ),
        (
            lambda folder: break_weights(
                folder,
                lambda t: t.update({WTE: t[WTE][:, :4].copy()}),
            ),
            "has shape (32, 4), the model wants (32, 8)",
        ),
        (
            lambda folder: break_weights(
                folder, lambda t: t.update({WTE: t[WTE].astype(np.int32)})
            ),
            "is I32, not one of F32, BF16, F16",
        ),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "a PyTorch pickle is never read because it can run code",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no model.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "cannot read"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not valid JSON"),
        (
            lambda folder: edit_config(folder, model_type="gpt3"),
            "'gpt3' is not supported (did you mean 'gpt2'?)",
        ),
        (
            lambda folder: edit_config(folder, activation_function="relu"),
            "activation_function='relu' is not supported",
        ),
    ],
)
def test_a_damaged_checkpoint(damage, message, checkpoint, refused, tmp_path):
    damage(checkpoint)
    assert message in refused("convert", checkpoint, tmp_path / "run", *ONE_DEVICE)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_model_than_the_flags_say(checkpoint, refused, tmp_path):
    line = refused("convert", checkpoint, tmp_path / "run", *ONE_DEVICE, "--model.mlp", "24")
    assert "mlp is 16 there and 24 here" in line


def test_every_flag_of_a_config_is_a_key_of_its_file(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help", "all"])
    shown = capsys.readouterr().out
    for key in flatten(load_config("tiny")):
        assert f"--{key.replace('_', '-')} " in shown, key


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train tiny --data.path nowhere.txt", "data.path has no effect: data.source is stdlib"),
        (
            "tokenize here.txt a.bin --max-bytes 5",
            "--max-bytes has no effect: it caps the stdlib corpus alone",
        ),
        ("tokenize stdlib a.bin --max-bytes -5", "max_bytes=-5 is below 1"),
        ("bench tiny --rounds 0", "rounds=0 is below 1"),
        ("bench tiny --calls -1", "calls=-1 is below 1"),
        ("sweep tiny --over train.seed=1 --per-trial -1", "per_trial=-1 is below 0"),
    ],
)
def test_a_flag_that_can_have_no_effect_or_is_out_of_its_range(words, message, refused):
    assert message in refused(*words.split())


def test_an_export_s_flags_on_an_import(refused, checkpoint, tmp_path):
    line = refused("convert", checkpoint, tmp_path / "run", *ONE_DEVICE, "--dtype", "bfloat16")
    assert (
        "--dtype, --step, --adapter and --compressed have no effect" in line
        and not (tmp_path / "run").exists()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "eval {run} --train.learning-rate 0.5",
            "--train.learning_rate has no effect on an evaluation",
        ),
        ("eval {run} --train.steps 3", "--train.steps has no effect on an evaluation"),
        ("eval {run} --model.dropout 0.1", "--model.dropout has no effect on an evaluation"),
        (
            "convert {run} out --train.learning-rate 5",
            "--train.learning_rate has no effect: an export takes a mesh",
        ),
        (
            "convert {run} out --data.seq-len 5",
            "--data.seq_len has no effect: an export takes a mesh",
        ),
    ],
)
def test_a_setting_that_only_training_reads(words, message, refused, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(to_toml(load_config("tiny")))
    assert message in refused(*words.format(run=tmp_path / "run").split())


LONG = "a" * 300


@pytest.mark.parametrize(
    "words",
    [
        "train LONG",
        "train tiny --run LONG",
        "train tiny --on LONG",
        "watch LONG",
        "eval LONG",
        "convert LONG out",
        "generate LONG --prompt a",
        "tokenize LONG out.bin",
        "tokenize stdlib LONG.bin --max-bytes 100000",
        "train tiny --data.source text --data.path LONG",
        "train tiny --train.init LONG",
    ],
)
def test_a_name_that_is_too_long_is_a_line(words, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refused(*words.replace("LONG", LONG).split())
    assert any(words in line for words in ("too long", "no preset", "is no run folder")), line


def test_what_orbax_drops_of_a_damaged_checkpoint_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert callable(getattr(serialization, _ORBAX_READING))  # which Orbax still calls so
    printed = list[object]()
    monkeypatch.setattr(sys, "__unraisablehook__", lambda what: printed.append(what.object))
    for dropped in (getattr(serialization, _ORBAX_READING), main):
        _unraisable(SimpleNamespace(exc_value=ValueError(), object=dropped))
    assert printed == [main]
