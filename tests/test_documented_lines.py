"""What README and docs/ tell a user to type, run as it stands there.

A page's lines run one after another in one folder and in one process (`page_process.py`): a later
line finds the run of an earlier one. What starts processes itself, and what needs more devices than
that process has, is run in one of its own, and so is a page's Python. What the tests add comes
before a line's own flags, which so count. A block of `text` below a block is what that prints, each
line of it; one with a title is an excerpt, or another program's. Quick: every line parses, and its
config is one.
"""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
from buckets import s3_server

from jaxpar.base.config import Config, ModelConfig, parse
from jaxpar.base.config.checks import check
from jaxpar.base.toml import presets
from jaxpar.cli import arguments, commands, compose, launch, plan, rehearse
from jaxpar.cli import main as cli
from jaxpar.cli.arguments import config_args
from jaxpar.models import Model
from jaxpar.models.hf.export import export_hf
from jaxpar.rehearse.topologies import compilers

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

SCHEMAS = {
    "train": commands.TrainArgs,
    "verify": commands.VerifyArgs,
    "show": commands.ShowArgs,
    "rehearse": rehearse.RehearseArgs,
    "plan": plan.PlanArgs,
    "compose": compose.ComposeArgs,
    "sweep": launch.SweepArgs,
    "watch": lambda _: commands.WatchArgs(),
}
SMALL = """
--model.embed 32 --model.mlp 64 --train.steps 20 --train.warmup-steps 2
--train.eval-every 10 --train.eval-batches 1 --train.final-eval-batches 1 --checkpoint.every 5
"""
SMALLER = (
    f"{SMALL} --model.layers 1 --data.seq-len 32 --train.batch 8 --train.steps 6 "
    "--checkpoint.every 3"
)
SMALL_GPT2 = """
--mesh.platform cpu --model.vocab-size 256 --model.layers 1 --model.embed 32 --model.heads 2 --model.mlp 64
--data.seq-len 32
--train.batch 8 --train.accumulation 1 --train.stop-at 2 --train.eval-batches 1 --train.final-eval-batches 1
"""
SMALL_IMPORT = (
    "--mesh.platform cpu --data.seq-len 16 --train.batch 8 --train.steps 4 --train.warmup-steps 1"
)
QUICKLY_COMPILED = "--compiler.options xla_tpu_scoped_vmem_limit_kib=16384"
ADDED = {
    "train tiny": SMALL,
    "train my_experiment.toml": f"{SMALL} --train.batch 8",
    "launch ray": SMALLER,
    "sweep tiny": SMALLER,
    "train gpt2_124m": SMALL_GPT2,
    "convert path/to/hf_folder": SMALL_IMPORT,
    "convert exported": "--mesh.platform cpu --train.batch 8",
    "rehearse llama3_8b": f"--model.layers 2 {QUICKLY_COMPILED}",
    "plan llama3_8b": f"--model.layers 2 {QUICKLY_COMPILED} --rehearsals 1 --no-verify",
}
DEAR = {
    "bench": "",
    "rehearse": "rehearse.md",
    "verify": "verify.md",
    "launch": "launch.md",
    "sweep": "launch.md",
    "plan": "plan.md",
    "compose": "compositions.md",
}
"""What takes long, whatever is added: it runs on its own page, and elsewhere only parses."""
TESTED_ELSEWHERE = {"--compiler", "jax==0.10.1", "--measured"}
"""What needs another compiler from an index, or a step that somebody has measured:
tests/launch/test_other_compiler.py and tests/rehearse/test_calibration.py have these."""
ERROR = "jaxpar: error: "
TIMEOUT = 900
"""Seconds that a command may take."""
SET = re.compile("[A-Z_]+=")
"""A variable that a line sets for itself; the tests set it for all."""
PYTHON = {
    "attention.md": "import jax.numpy as jnp\nq = k = v = jnp.ones((1, 128, 2, 16))\n",
    "rehearse.md": "import jaxpar.base.config as c\nreal = c.load_config\n"
    "small = {'model.layers': 2, 'compiler.options': ['xla_tpu_scoped_vmem_limit_kib=16384']}\n"
    "c.load_config = lambda name: c.override(real(name), small)\n",
}
"""What stands before the Python of a page."""


class Block(NamedTuple):
    """A fenced block: the number of its first line, its language and title, its text, and the
    output below it.
    """

    line: int
    language: str
    title: str
    text: str
    prints: str = ""


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fences = re.finditer(r"^```(\w*) *(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)
    found = [Block(text.count("\n", 0, m.start()) + 2, m[1], m[2], m[3]) for m in fences]
    below = {
        block.line: block.text.strip()
        for block in found
        if block.language == "text" and not block.title
    }
    return [
        block._replace(
            prints=below.get(
                block.line + block.text.count("\n") + 3,
                "",
            )
        )
        for block in found
    ]


def lines(block: Block) -> list[list[str]]:
    """The words of each command of a block of shell, without variables that are set for it alone,
    and the file that its output goes to."""
    joined = block.text.replace("\\\n", " ").splitlines()
    split = [shlex.split(line.partition(" > ")[0], comments=True) for line in joined]
    return [words for line in split if (words := [word for word in line if not SET.match(word)])]


def shell_lines(page: Path) -> list[list[str]]:
    right = (
        block
        for block in blocks(page)
        if block.language == "sh" and not block.prints.startswith(ERROR)
    )
    return [words for block in right for words in lines(block)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_line_parses(page: Path) -> None:
    for program, *words in shell_lines(page):
        if program == "jaxpar":
            command, *rest = words
            assert command in cli.COMMANDS, words
            if command == "launch":
                assert rest[0] in launch.KINDS, rest
                if rest[0] == "ray":
                    schema = launch.RayArgs
                else:
                    schema = launch.ScriptArgs
                config_args("jaxpar", schema, rest[1:])
            elif command in SCHEMAS:
                if command == "sweep":
                    rest = arguments.take_words("--over", rest)[1]
                if command == "plan":
                    rest = arguments.take_words("--fix", rest)[1]
                if rest[0] in presets("jaxpar.configs"):
                    check(config_args("jaxpar", SCHEMAS[command], rest)[1].config)
                else:
                    arguments.parse_words("jaxpar", SCHEMAS[command](Config()), rest[1:])
        elif program == "make":
            assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
        elif program == "pip":
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
                "optional-dependencies"
            ]
            assert (
                words[:2] == ["install", "-e"]
                or re.fullmatch(r"jaxpar\[(\w+)\]", words[1])[1] in extras
            )
        else:
            assert [program, *words[:2]] == ["python", "-m", "pytest"], words
            assert any((ROOT / word).is_file() for word in words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_table_of_a_config_parses(page: Path) -> None:
    for block in blocks(page):
        if block.language == "toml":
            config = parse(block.text, f"{page.name}:{block.line}")
            assert check(config) == config


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_of_a_kind_that_is_tested(page: Path) -> None:
    found = blocks(page)
    outputs = sum(bool(block.prints) for block in found if block.language in ("sh", "python"))
    assert outputs == sum(block.language == "text" and not block.title for block in found), (
        "text below no command"
    )
    for block in found:
        if block.language == "json":
            assert all(json.loads(line) for line in block.text.splitlines())
        assert (
            block.language in ("sh", "python", "toml", "text", "json")
            or block.title
            or page.name == "README.md"
        )


PROGRAMS = [page for page in PAGES if "```python" in page.read_text("utf-8")]


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.name)
def test_every_program_takes_what_there_is(page: Path) -> None:
    """The programs themselves run in the slow tier; a name that is gone is found at once."""
    for block in blocks(page):
        if block.language == "python" and not block.title:
            ours = [
                node
                for node in ast.walk(ast.parse(block.text))
                if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "jaxpar"
            ]
            for node in ours:
                exec(ast.unparse(node), {})


OWN_PROCESS = ("launch", "sweep")
"""Commands that start processes, which must not inherit a JAX that has started."""
TOO_FEW_DEVICES = "simulated CPU devices are needed and JAX has started with"


class Shell:
    """Runs what a page has a user type, in a folder, as on a user's machine.

    Of this test run's settings only those that make XLA compile fast are handed on. `compiled` is a
    folder of compiled programs that all pages share: several train the same small model.
    """

    def __init__(self, folder: Path, compiled: Path):
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self.environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "TPU_"))
        } | {
            "XDG_CACHE_HOME": str(folder / "cache"),
            "PYTHONWARNINGS": "default",
            "WANDB_MODE": "offline",
            "JAX_COMPILATION_CACHE_DIR": str(compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.01",
        }

    def jaxpar(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command of `jaxpar`."""
        if words[0] in OWN_PROCESS:
            return self.python(["-m", "jaxpar.cli.main", *words])
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, ROOT / "tests" / "page_process.py"],
                cwd=self._folder,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        limit = threading.Timer(TIMEOUT, self._process.kill)
        limit.start()
        try:
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        finally:
            limit.cancel()
        assert answer, f"the process ended: {words}\n{self._process.stderr.read()}"
        code, out, err = json.loads(answer)
        if TOO_FEW_DEVICES in err:
            return self.python(["-m", "jaxpar.cli.main", *words])
        return subprocess.CompletedProcess(words, code, out, err)

    def python(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        """Run Python with these words, in a process of its own."""
        return subprocess.run(
            [sys.executable, *words],
            cwd=self._folder,
            env=self.environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


@pytest.fixture
def shell(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    base = tmp_path_factory.getbasetemp()
    # all processes of this run have this parent
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = base.parent
    else:
        shared = base
    opened = Shell(folder, shared / "compiled")
    yield opened
    opened.close()


@pytest.fixture
def buckets() -> Iterator[ExitStack]:
    """What stops the servers of buckets that a page needs."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a user types: texts, documents, conversations, a tokenizer, a Hugging Face folder, and
    the docs.
    """
    for name in ("my_texts", "held_out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "fox.txt").write_text(
            "the quick brown fox jumps over the lazy dog\n" * 200
        )
    (tmp_path / "my_documents").mkdir()
    for i in range(3):
        lines = [json.dumps({"text": f"{i} the quick brown fox\n" * 99}) + "\n" for _ in range(9)]
        (tmp_path / "my_documents" / f"{i}.jsonl").write_text("".join(lines))
    (tmp_path / "held_out.jsonl").write_text("".join(lines))
    talk = json.dumps({"prompt": "Which animal jumps? ", "completion": "The quick brown fox."})
    (tmp_path / "talks.jsonl").write_text(f"{talk}\n" * 20)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    model = Model(
        ModelConfig(
            family="llama", layers=2, embed=32, heads=4, kv_heads=4, mlp=64, max_seq_len=128
        )
    )
    export_hf(
        jax.jit(model.init)(jax.random.key(0)),
        model,
        tmp_path / "path" / "to" / "hf_folder",
    )
    tokenizer = json.dumps({"tokenizer": "bytes"})
    (tmp_path / "path" / "to" / "hf_folder" / "tokenizer.json").write_text(tokenizer)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_line_runs(page: Path, folder: Path, shell: Shell, buckets: ExitStack) -> None:
    found = blocks(page)
    experiment = next(
        (block.text for block in found if block.language == "toml" and "[train]" in block.text), ""
    )
    (folder / "my_experiment.toml").write_text(experiment)
    if any("s3://" in block.text for block in found if block.language == "sh"):
        shell.environment |= buckets.enter_context(s3_server()).environment
    for block in found:
        if block.language != "sh":
            continue
        for program, *words in lines(block):
            if program != "jaxpar" or DEAR.get(words[0], page.name) != page.name:
                continue
            if TESTED_ELSEWHERE.intersection(words):
                continue
            if (words[0] == "rehearse" or "--target" in words) and "pip" in compilers()["tpu"]:
                pytest.skip(compilers()["tpu"])
            for sink in {"wandb", "mlflow"}.intersection(words):
                pytest.importorskip(sink, reason=f"needs the {sink} extra")
            trains = words[0] == "sweep" and "--target" not in words
            if trains or words[:2] == ["launch", "ray"]:
                pytest.importorskip("ray", reason="needs the ray extra")
            words = ["llama3_8b" if word == "CONFIG" else word for word in words]
            if " ".join(words).startswith("train llama3_8b"):
                words[0] = "show"  # the chips that it would train on are not here
            added = ADDED.get(" ".join(words[:2]), "").split()
            if (
                "tiny" in words[:3]
                and words[0] in ("train", "launch", "sweep")
                and "--data.source" not in words
            ):
                added += ["--data.max-bytes", "200000"]
            if words[0] in ("convert", "launch"):
                place = 3
            else:
                place = 2
            done = shell.jaxpar(
                [
                    *words[:place],
                    *added,
                    *words[place:],
                ]
            )
            where = f"{page.name}:{block.line} {' '.join(words)}\n{done.stdout}\n{done.stderr}"
            assert done.returncode == (2 if block.prints.startswith(ERROR) else 0), where
            assert not missing(block, done), where
    if python := [block for block in found if block.language == "python"]:
        done = shell.python(
            [
                "-c",
                "\n".join(
                    [
                        PYTHON.get(page.name, ""),
                        *(block.text for block in python),
                    ]
                ),
            ]
        )
        absent = [line for block in python for line in missing(block, done)]
        assert done.returncode == 0 and not absent, (
            f"{page.name}: {absent}\n{done.stdout}\n{done.stderr}"
        )


def missing(block: Block, done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines below a block that it did not print; how wide a column is does not count, and `...`
    stands for any.
    """
    printed = {" ".join(line.split()) for line in (done.stderr + done.stdout).splitlines()}
    return [
        line
        for line in block.prints.splitlines()
        if line.strip() not in ("", "...") and " ".join(line.split()) not in printed
    ]
