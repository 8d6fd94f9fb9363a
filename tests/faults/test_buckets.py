"""Runs in a bucket of a real server of S3 on this machine, which is killed, slow, busy or away:
each ends as the run of a local folder to the bit, or in one line with the step before in place.

`PYTHONPATH=tests python tests/faults/test_buckets.py --trials 100 [--processes 2]` is the long form
of the kills, and `--busy-seconds 60` that of the bucket that answers 503.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from buckets import BUCKET, Server, client, environment_with, gcs_server, names, s3_server
from trainings import PROGRAM, SMALL, End, differences, end_of, start, token_file

from jaxpar.base.errors import UserError
from jaxpar.base.storage import Bucket, outages
from jaxpar.train.runs.bucket import remote_runs

pytestmark = pytest.mark.slow

Running = list[subprocess.Popen[str]]

STEPS = 12
LAST_OBJECT = re.compile(r"checkpoints/(\d+)/uploaded\.json$")
FLAGS = [
    *SMALL,
    "--data.source=tokens",
    "--data.val-fraction=0.1",
    f"--train.steps={STEPS}",
    "--train.eval-every=4",
    "--train.eval-batches=2",
    "--train.final-eval-batches=2",
    "--checkpoint.every=4",
    "--checkpoint.keep=2",
    "--metrics.log-every=1",
]
IMPATIENT = """
import sys
from jaxpar.base.storage import outages
from jaxpar.cli.main import main
outages.LIMIT_SECONDS = 3.0
sys.exit(main())
"""
"""`jaxpar` that waits for a bucket for three seconds."""


class Runs:
    """Trains the same experiment in a local folder and in a bucket."""

    def __init__(self, folder: Path, server: Server):
        self.folder = folder
        self.server = server
        self.lives: dict[str, float] = {}
        """The seconds that a training took."""
        self._ends: dict[str, End] = {}
        self.tokens = folder / "tokens.bin"
        token_file(self.tokens)

    def start(self, run: str, *flags: str, processes: int = 1, impatient: bool = False) -> Running:
        """Begin a training, or go on with it; its data are where its folder is."""
        scheme, in_bucket, _ = run.rpartition("://")
        data = f"{scheme}://{BUCKET}/data/tokens.bin" if in_bucket else str(self.tokens)
        environment = environment_with(self.server, str(self.folder / "cache"))
        if impatient:
            program = ("-c", IMPATIENT)
            # the client's own, each of which waits for longer than the one before
            environment["AWS_MAX_ATTEMPTS"] = "1"
        else:
            program = PROGRAM
        every = [*FLAGS, f"--data.path={data}", *flags]
        return start(run, every, processes, program, environment)

    def train(self, run: str, processes: int = 1, code: int = 0, impatient: bool = False) -> str:
        """Train to the end, and return what was said on standard error."""
        began = time.monotonic()
        running = self.start(run, processes=processes, impatient=impatient)
        try:
            said = [process.communicate(timeout=600)[1] for process in running]
        finally:
            for process in running:
                process.kill()
        assert [process.returncode for process in running] == [code] * processes, said
        assert not any("Traceback" in text for text in said), said
        self.lives[run] = time.monotonic() - began
        return "".join(said)

    def end_of(self, run: str) -> End:
        """What a run came to, as another machine finds it."""
        from fsspec import get_filesystem_class

        with pytest.MonkeyPatch.context() as patch:
            cache = str(self.folder / "another_machine")
            for name, value in environment_with(self.server, cache).items():
                patch.setenv(name, value)
            patch.setattr(remote_runs, "_COPIES", {})
            scheme, in_bucket, _ = run.rpartition("://")
            if in_bucket:
                # one that an earlier server was asked by
                get_filesystem_class(scheme).clear_instance_cache()
            return end_of(run)

    def require_equal(self, run: str, wanted: str) -> None:
        """Compare two runs in every bit."""
        if wanted not in self._ends:
            self._ends[wanted] = self.end_of(wanted)
        assert self._ends[wanted].step == STEPS
        assert not differences(self.end_of(run), self._ends[wanted])

    def steps(self, run: str) -> list[int]:
        """The steps that have their last object."""
        found = [LAST_OBJECT.search(name) for name in names(self.server, run)]
        return sorted(int(one[1]) for one in found if one)


def kill(runs: Runs, wanted: str, trials: int, processes: int = 1, seed: int = 0) -> int:
    """Kill a training in a bucket at random times, go on with it, and compare what comes of it with
    the run of a local folder.

    Returns:
      How many trainings ended meanwhile.
    """
    draw = random.Random(seed)
    name = f"killed_{processes}_{seed}"
    life = runs.lives[wanted]
    ended = 0
    killed = 0
    while killed < trials:
        run = f"s3://{BUCKET}/{name}_{ended}"
        running = runs.start(run, processes=processes)
        # mostly while it trains and saves, at times while it starts
        pause = draw.uniform(0.2 * life, 1.05 * life)
        with_end = time.monotonic() + pause
        while time.monotonic() < with_end and running[0].poll() is None:
            time.sleep(0.02)
        alive = running[0].poll() is None
        for process in running:
            process.kill()
            process.communicate()
        if alive:
            killed += 1
            print(f"{killed} kills, in run {ended + 1}", flush=True)
            # a step that is there is whole
            for step in runs.steps(f"{name}_{ended}"):
                require_whole(runs.server, f"{name}_{ended}/checkpoints/{step}")
        else:
            assert [process.returncode for process in running] == [0] * processes
            runs.require_equal(run, wanted)
            ended += 1
    runs.train(f"s3://{BUCKET}/{name}_{ended}", processes=processes)
    runs.require_equal(f"s3://{BUCKET}/{name}_{ended}", wanted)
    return ended + 1


def require_whole(server: Server, step: str) -> None:
    """Hold the objects of a step against what its last object says."""
    import hashlib
    import json

    ask = client(server)
    files = json.loads(ask.get_object(Bucket=BUCKET, Key=f"{step}/uploaded.json")["Body"].read())
    for name, (size, made) in files.items():
        content = ask.get_object(Bucket=BUCKET, Key=f"{step}/{name}")["Body"].read()
        assert len(content) == size
        assert hashlib.blake2b(content, digest_size=16).hexdigest() == made


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with s3_server() as server:
        yield runs_on_s3(tmp_path_factory.mktemp("runs"), server)


def runs_on_s3(folder: Path, server: Server) -> Runs:
    """Runs whose data are in the bucket too."""
    made = Runs(folder, server)
    content = made.tokens.read_bytes()
    client(server).put_object(Bucket=BUCKET, Key="data/tokens.bin", Body=content)
    return made


@pytest.fixture(scope="module")
def local(runs: Runs) -> str:
    """A run in a local folder, which nobody disturbs."""
    folder = str(runs.folder / "local")
    runs.train(folder)
    return folder


def test_a_run_that_is_killed_goes_on_from_the_bucket_to_the_bit(runs: Runs, local: str):
    assert kill(runs, local, trials=2) >= 1
    left = {name.split("/")[0] for name in names(runs.server)}
    assert left >= {"data", "killed_1_0_0"}
    assert not [path for path in Path.cwd().iterdir() if ":" in path.name]


def test_a_bucket_that_is_busy_for_a_while_is_waited_for(runs: Runs, local: str):
    busy(runs, local, seconds=4.0)


def busy(runs: Runs, wanted: str, seconds: float) -> str:
    """Let the bucket answer 503 for a while, from the middle of the first step that is sent."""
    name = f"busy_{seconds:.0f}"
    run = f"s3://{BUCKET}/{name}"
    server = runs.server
    (process,) = runs.start(run)
    try:
        while not any(f"/{name}/checkpoints/4/" in path for _, path in server.seen):
            assert process.poll() is None
            time.sleep(0.01)
        before = server.failed
        server.busy = True
        until = time.monotonic() + seconds
        # on a busy machine nothing may be asked for so long
        while time.monotonic() < until or server.failed == before:
            assert process.poll() is None
            time.sleep(0.01)
        server.busy = False
        _, said = process.communicate(timeout=600)
    finally:
        server.busy = False
        process.kill()
    assert process.returncode == 0, said
    lines = said.splitlines()
    again = [line for line in lines if "is tried again" in line]
    # s3fs itself asks again for some seconds
    assert again or seconds < 30, said
    assert sum("answers again" in line for line in lines) == len(again) <= 1, said
    assert "Traceback" not in said
    runs.require_equal(run, wanted)
    return said


def test_a_bucket_that_stays_away_ends_the_run_in_one_line_with_the_step_before(
    runs: Runs, local: str
):
    run = f"s3://{BUCKET}/away"
    runs.server.refuses = lambda method, path: "/away/checkpoints/8/state" in path
    try:
        said = runs.train(run, code=2, impatient=True)
    finally:
        runs.server.refuses = lambda method, path: False
    errors = [line for line in said.splitlines() if line.startswith("jaxpar: error: ")]
    assert len(errors) == 1 and f"written to {run}" in errors[0], said
    assert runs.steps("away/") == [4]
    runs.train(run)
    runs.require_equal(run, local)


def test_a_request_that_is_never_answered_is_said_and_ends_in_one_line(
    runs: Runs, monkeypatch, capsys
):
    from s3fs import S3FileSystem

    for name, value in runs.server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(S3FileSystem, "read_timeout", 0.5)
    monkeypatch.setattr(outages, "LIMIT_SECONDS", 4.0)
    monkeypatch.setattr(runs.server, "ignores", lambda method, path: path.endswith("/silent"))
    S3FileSystem.clear_instance_cache()
    Bucket(f"s3://{BUCKET}").find("answers")
    before = runs.server.failed
    with pytest.raises(UserError) as ended:
        Bucket(f"s3://{BUCKET}").read("silent")
    # it was asked again before the line, and after it
    assert runs.server.failed - before >= 2
    assert f"s3://{BUCKET}/silent cannot be read (Read" in str(ended.value)
    assert "was tried for 4 s" in str(ended.value)
    (said,) = capsys.readouterr().err.splitlines()
    assert "Read timeout" in said and "it is tried again" in said
    S3FileSystem.clear_instance_cache()


def test_a_second_training_in_a_bucket_is_refused_in_one_line(runs: Runs):
    run = f"s3://{BUCKET}/taken"
    (first,) = runs.start(run, "--train.steps=100000", "--train.eval-every=0")
    try:
        while not any("/taken/metrics.jsonl" in path for _, path in runs.server.seen):
            assert first.poll() is None, first.communicate()
            time.sleep(0.05)
        said = runs.train(run, code=2)
        errors = [line for line in said.splitlines() if line.startswith("jaxpar: error: ")]
        assert len(errors) == 1
        assert f"by process {first.pid} on " in errors[0], said
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()


def test_one_request_in_ten_fails_and_each_is_slow(runs: Runs, local: str):
    run = f"s3://{BUCKET}/unreliable"
    runs.server.share = 0.1
    runs.server.latency = 0.02
    before = runs.server.failed
    try:
        runs.train(run)
    finally:
        runs.server.share = runs.server.latency = 0.0
    assert runs.server.failed - before > 5
    runs.require_equal(run, local)


def test_a_run_in_a_bucket_of_google_goes_on_to_the_bit(
    runs: Runs, local: str, tmp_path, monkeypatch
):
    with gcs_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        there = Runs(tmp_path, server)
        Bucket(f"gs://{BUCKET}").write("data/tokens.bin", there.tokens.read_bytes())
        run = f"gs://{BUCKET}/run"
        (process,) = there.start(run, "--train.stop-at=8")
        assert "Traceback" not in process.communicate(timeout=600)[1]
        there.train(run)
        assert not differences(there.end_of(run), runs.end_of(local))


def test_of_two_that_create_an_object_of_google_as_a_lock_is_taken_one_has_it(monkeypatch):
    from gcsfs import GCSFileSystem

    with gcs_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        GCSFileSystem.clear_instance_cache()
        bucket = Bucket(f"gs://{BUCKET}/run")
        assert [bucket.create("lock", b"first"), bucket.create("lock", b"second")] == [True, False]
        assert bucket.read("lock") == b"first"
        GCSFileSystem.clear_instance_cache()


@pytest.mark.parametrize("last", [b"\r", b"\n", b"\r\n"])
def test_the_stand_in_for_google_keeps_the_last_byte_of_an_object(monkeypatch, last):
    from gcsfs import GCSFileSystem

    # longer than what the parser takes at once
    content = 100 * bytes(range(256)) + last
    with gcs_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        GCSFileSystem.clear_instance_cache()
        bucket = Bucket(f"gs://{BUCKET}/run")
        bucket.write("object", content)
        assert bucket.read("object") == content
        GCSFileSystem.clear_instance_cache()


def test_two_processes_send_their_own_files_and_go_on_after_a_kill(runs: Runs):
    folder = str(runs.folder / "local_2")
    runs.train(folder, processes=2)
    assert kill(runs, folder, trials=1, processes=2) >= 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--busy-seconds", type=float, default=0.0)
    args = parser.parse_args()
    with s3_server() as server, tempfile.TemporaryDirectory() as folder:
        runs = runs_on_s3(Path(folder), server)
        wanted = os.path.join(folder, "local")
        runs.train(wanted, processes=args.processes)
        if args.trials:
            ended = kill(runs, wanted, args.trials, args.processes)
            print(f"{args.trials} kills: {ended} of {ended} runs equal to the bit")
        if args.busy_seconds:
            print(busy(runs, wanted, args.busy_seconds))


if __name__ == "__main__":
    main()
