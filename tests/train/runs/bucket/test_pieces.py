"""What a training is made of, each piece in a bucket of a real server of S3: the texts of a mixture,
the weights that it starts from, a teacher, a pruned model, and a run as the name of a config.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from buckets import BUCKET, Server, s3_server

from jaxpar.base.storage import Bucket
from jaxpar.cli.main import main
from jaxpar.train.runs.bucket.layout import UPLOADED

pytestmark = pytest.mark.slow

SMALL = [
    "--model.layers",
    "1",
    "--model.embed",
    "32",
    "--model.heads",
    "2",
    "--train.batch",
    "4",
    "--data.seq-len",
    "32",
]
ONE = ["--mesh.data", "1", "--mesh.fsdp", "2", "--mesh.tensor", "1"]
RUNS = f"s3://{BUCKET}/runs"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as server:
        yield server


def last_step(run: str) -> int:
    """The last step of a run whose checkpoint is whole in the bucket."""
    names = Bucket(f"{RUNS}/{run}").files("checkpoints")
    return max(int(Path(name).parts[1]) for name in names if name.endswith(UPLOADED))


def test_each_piece_of_a_training_may_lie_in_a_bucket(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    texts = Bucket(f"s3://{BUCKET}/texts")
    for name in ("train/a.txt", "more/b.txt"):
        file = tmp_path / Path(name).name
        file.write_text(f"{name} is a line of text\n" * 300)
        texts.send_all([(file, name)])
    shares = [f"{texts.url}/train 0.7", f"{texts.url}/more 0.3"]
    data = ["--data.source", "text", "--data.mixture", *shares]

    def train(name: str, run: str, *more: str) -> None:
        flags = [*ONE, *more]
        if name == "tiny":
            flags += [*SMALL, *data, "--run", f"{RUNS}/{run}", "--train.steps", "2"]
        assert main(["train", name, *flags]) == 0

    train("tiny", "first")
    assert last_step("first") == 2
    train("tiny", "started", "--train.init", f"{RUNS}/first")
    train("tiny", "taught", "--distill.teacher", f"{RUNS}/first")
    # a process of its own: the run has two devices, and JAX starts with one if nobody says so
    command = [sys.executable, "-m", "jaxpar.cli.main", "prune", f"{RUNS}/first", f"{RUNS}/pruned"]
    done = subprocess.run(
        [*command, "--batches", "1"], env=dict(os.environ), check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    train(f"{RUNS}/pruned", "pruned", "--train.steps", "2")
    assert [last_step(run) for run in ("started", "taught", "pruned")] == [2, 2, 2]
