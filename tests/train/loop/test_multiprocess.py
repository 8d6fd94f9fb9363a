"""Two real processes, four devices each, over gloo: the losses of one process with eight."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxpar.base.config import load_config, override
from jaxpar.data.corpus import load_corpus
from jaxpar.data.top_k_files import describe, writing_answers
from jaxpar.train.metrics import read_metrics

pytestmark = pytest.mark.slow

FLAGS = [
    "--model.layers",
    "1",
    "--model.embed",
    "32",
    "--model.mlp",
    "64",
    "--data.seq-len",
    "32",
    "--train.batch",
    "8",
    "--train.steps",
    "6",
    "--train.warmup-steps",
    "1",
    "--train.eval-every",
    "3",
    "--train.eval-batches",
    "2",
    "--train.final-eval-batches",
    "2",
    "--checkpoint.every",
    "3",
    "--metrics.log-every",
    "1",
]


# `jaxpar`, which reads little of a set of documents before it starts: what is broken comes while it
# trains.
START = (
    "import jaxpar.data.documents.tokenized as d; d.SAMPLE = 1000; from jaxpar.cli.main import main; "
    "raise SystemExit(main())"
)
LONG = ("--train.steps", "100000", "--train.eval-every", "0", "--checkpoint.every", "20")

Process = subprocess.Popen[str]


def launch(folder: Path, environment: dict[str, str], *flags: str) -> Process:
    if "--data.source" in flags:
        data = []
    else:
        data = ["--data.max-bytes", "200000"]
    command = [
        sys.executable,
        "-c",
        START,
        "train",
        "tiny",
        "--run",
        str(folder),
        *FLAGS,
        *data,
        *flags,
    ]
    # Files, not pipes: nobody reads them while the other process is waited for.
    return subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.DEVNULL, text=True
    )


def launch_pair(
    folder: Path, *flags: str, only: tuple[Sequence[str], Sequence[str]] = ((), ())
) -> list[Process]:
    """Two processes with the same flags, and each with `only` its own besides."""
    return [
        launch(folder, environment, "--mesh.distributed", "True", *flags, *own)
        for environment, own in zip(environments(), only, strict=True)
    ]


def pair_of(words: Sequence[str]) -> list[Process]:
    """Two processes of one command, by its words."""
    command = [sys.executable, "-c", START, *words, "--mesh.distributed", "True"]
    return [
        subprocess.Popen(
            command, env=os.environ | environment, stdout=subprocess.DEVNULL, text=True
        )
        for environment in environments()
    ]


def environments() -> list[dict[str, str]]:
    """What tells two processes of each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    return [
        {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(index),
        }
        for index in range(2)
    ]


def wait(pair: list[Process]) -> list[int]:
    """Their exit codes; neither outlives the test."""
    try:
        return [process.wait(timeout=240) for process in pair]
    finally:
        for process in pair:
            process.kill()


def test_two_processes_read_their_own_rows_and_reach_the_losses_of_one(tmp_path: Path) -> None:
    for stop_at in ("4", "0"):  # stopped after step 4 and resumed, both processes together
        assert wait(launch_pair(tmp_path / "two", "--train.stop-at", stop_at)) == [0, 0]
    assert launch(tmp_path / "one", {}).wait(timeout=240) == 0

    def curve(folder: Path, key: str, steps: list[int]) -> list[float]:
        return [row[key] for row in read_metrics(folder) if key in row and row["step"] in steps]

    for key, steps in (("loss", [1, 2, 3, 4, 5, 6]), ("val_loss", [3, 6])):
        two, one = (curve(tmp_path / name, key, steps) for name in ("two", "one"))
        assert len(one) == len(steps)
        # Collectives of gloo and of one process sum in different orders.
        np.testing.assert_allclose(two, one, rtol=1e-5)


def test_a_folder_that_one_process_refuses_is_refused_by_both(tmp_path: Path) -> None:
    (tmp_path / "a_file").write_text("of the user's")
    assert wait(launch_pair(tmp_path)) == [2, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["a_file"]


def test_a_file_that_is_another_on_the_other_machine_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "first.txt", tmp_path / "second.txt"]
    for number, file in enumerate(files):
        file.write_text(f"{number} is a text of some length\n" * 500)
    only = tuple(("--data.path", str(file)) for file in files)
    pair = launch_pair(tmp_path / "run", "--data.source", "text", only=(only[0], only[1]))
    assert wait(pair) == [2, 2]
    said = capfd.readouterr().err
    assert f"{files[1]} is another here" in said
    assert "process 1 cannot go on" in said


def test_answers_on_disk_are_read_by_both_and_a_teacher_beside_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answers = tmp_path / "answers"
    draw_answers(answers, 3)
    told = ("--distill.teacher", str(answers), "--distill.top-k", "3", "--train.eval-every", "0")
    assert wait(launch_pair(tmp_path / "two", *told)) == [0, 0]
    assert launch(tmp_path / "one", {}, *told).wait(timeout=240) == 0
    two, one = (
        [row["objective"] for row in read_metrics(tmp_path / name) if "objective" in row]
        for name in ("two", "one")
    )
    assert len(one) == 6
    # Collectives of gloo and of one process sum in different orders.
    np.testing.assert_allclose(two, one, rtol=1e-5)
    capfd.readouterr()
    beside = ("--distill.teacher", str(tmp_path / "one"), "--train.eval-every", "0")
    assert wait(launch_pair(tmp_path / "refused", *beside)) == [2, 2]
    said = capfd.readouterr().err
    assert f"distill.teacher={tmp_path / 'one'} runs beside" in said
    assert "write its answers with `jaxpar eval" in said
    writes = ("--top-k", "3", "--out", str(tmp_path / "none"))
    assert wait(pair_of(["eval", str(tmp_path / "one"), *writes])) == [2, 2]
    assert "--top-k writes from one process, and these are 2" in capfd.readouterr().err
    assert not (tmp_path / "none").exists()


def draw_answers(folder: Path, k: int) -> None:
    """Answers of nobody to the data of `launch`."""
    words = [word.removeprefix("--").replace("-", "_") for word in FLAGS[::2]]
    given = dict(zip(words, map(int, FLAGS[1::2]), strict=True))
    config = override(load_config("tiny"), given | {"data.max_bytes": 200_000})
    vocab = config.model.vocab_size
    corpus = load_corpus(config.data, vocab)
    header = describe(corpus, config.data, vocab, k)
    count = header.windows[0]
    rng = np.random.default_rng(0)
    shape = (count, config.data.seq_len, k)
    with writing_answers(folder, header._replace(teacher="nobody", step=1)) as writer:
        writer.write(rng.integers(0, vocab, shape), -rng.exponential(1.0, shape), count)


@pytest.mark.parametrize(
    "told",
    [pytest.param(0, marks=pytest.mark.long), 1],
)
def test_a_signal_that_reaches_one_stops_both_after_the_same_step(
    tmp_path: Path, told: int
) -> None:
    pair = launch_pair(tmp_path / "run", *LONG, "--checkpoint.every", "0")
    try:
        until = time.monotonic() + 200
        while not read_metrics(tmp_path / "run") and time.monotonic() < until:
            time.sleep(0.2)
        pair[told].send_signal(signal.SIGTERM)
    finally:
        codes = wait(pair)
    assert codes == [130, 130]
    (saved,) = (int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == max(row["step"] for row in read_metrics(tmp_path / "run"))


def tokens_file(path: Path, *ids: int) -> Sequence[str]:
    np.resize(np.array([*range(200), *ids], np.uint16), 40_000).tofile(path)
    return "--data.source", "tokens", "--data.path", str(path)


def test_what_cannot_be_read_any_more_loses_no_step(tmp_path: Path) -> None:
    """A line of the second file is broken: both save the steps before, and the run knows why it
    stopped. A file that is another for one of them is refused before the first step.
    """
    pytest.importorskip("datasets")
    rows = [f'{{"text": "{i} {"lorem ipsum " * 100}"}}' for i in range(60)]
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(2):
            (tmp_path / name / f"{number}.jsonl").write_text("\n".join(rows))
    (tmp_path / "b" / "1.jsonl").write_text("\n".join([*rows[:9], '{"text": "cut', *rows[9:]]))
    flags = (*LONG, "--data.source", "hf", "--data.streaming", "True", "--checkpoint.every", "0")
    (tmp_path / "val.jsonl").write_text("\n".join(rows))
    flags = (*flags, "--data.val-path", str(tmp_path / "val.jsonl"), "--train.batch", "64")
    only = ("--data.path", str(tmp_path / "a")), ("--data.path", str(tmp_path / "b"))
    assert wait(launch_pair(tmp_path / "unlike", *flags, only=only)) == [2, 2]
    assert not (tmp_path / "unlike" / "checkpoints").exists()
    flags = (*flags, "--data.path", str(tmp_path / "b"))
    assert wait(launch_pair(tmp_path / "run", *flags)) == [2, 2]
    (saved,) = (int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir())
    logged = read_metrics(tmp_path / "run")
    assert saved > 20 and saved - 1 <= max(row["step"] for row in logged) <= saved
    assert all(np.isfinite(row["loss"]) for row in logged)
    assert json.loads((tmp_path / "run" / "data.json").read_text())["broken"]


@pytest.mark.parametrize(
    "bad",
    ["id", pytest.param("file", marks=pytest.mark.long)],
)
def test_what_one_process_cannot_read_ends_both(tmp_path: Path, bad: str) -> None:
    """An id that comes up in the second process's batches, from the first on; or a file that it
    lacks.
    """
    fine = tokens_file(tmp_path / "a.bin")
    foul = tokens_file(tmp_path / "b.bin", *([] if bad == "file" else [999]))
    if bad == "file":
        (tmp_path / "b.bin").unlink()
    began = time.monotonic()
    assert wait(
        launch_pair(tmp_path / "run", *LONG, "--data.val-fraction", "0.5", only=(fine, foul))
    ) == [2, 2]
    assert time.monotonic() - began < 120
    assert not any((tmp_path / "run" / "checkpoints").glob("[0-9]*"))


HOOKED = """
import json
import sys
import jax
import jaxpar
from jaxpar import train
from jaxpar.base.errors import UserError
from jaxpar.base.process.runtime import start

class Average(train.Hook):
    def __init__(self):
        self.average = None
    def on_begin(self, run, state):
        self.run = run
        self.average = jax.tree.map(jax.numpy.copy, state.params)
    def on_step(self, step, state):
        mean = lambda old, new: jax.tree.map(lambda a, b: (a + b) / 2, old, new)
        self.average = jax.jit(mean)(self.average, state.params)
        if step == 2 and jax.process_index() == 1:
            self.run.stop("the second process")
    def params(self):
        return self.average
    def load_params(self, params):
        self.average = params

folder, both, changes = sys.argv[1:]
config = jaxpar.override(jaxpar.load_config("tiny"), json.loads(changes))
start(config.mesh)
hooks = [Average()] if both == "both" or jax.process_index() == 0 else []
try:
    print(train.run(config, folder, hooks).step)
except UserError as error:
    print(error)
    raise SystemExit(2)
"""


@pytest.mark.parametrize("both", ["both", "one"])
def test_hooks_of_two_processes_are_called_alike_or_refused(tmp_path: Path, both: str) -> None:
    changes = {
        "model.layers": 1,
        "model.embed": 32,
        "model.mlp": 64,
        "data.seq_len": 32,
        "data.max_bytes": 200_000,
        "train.batch": 8,
        "train.steps": 500,
        "train.warmup_steps": 1,
        "mesh.distributed": True,
    }
    command = [sys.executable, "-c", HOOKED, str(tmp_path / "run"), both, json.dumps(changes)]
    logs = [tmp_path / f"log{index}" for index in range(2)]
    pair = []
    for environment, log in zip(environments(), logs, strict=True):
        with log.open("w") as out:
            own = os.environ | environment
            pair.append(subprocess.Popen(command, env=own, stdout=out, stderr=out, text=True))
    codes = wait(pair)
    said = [" ".join(log.read_text().split()) for log in logs]
    if both == "both":
        assert codes == [0, 0], said
        steps = {text.split()[-1] for text in said}
        assert len(steps) == 1 and 2 <= int(steps.pop()) < 500, said
    else:
        assert codes == [2, 2], said
        assert all("were given different hooks" in text for text in said)
