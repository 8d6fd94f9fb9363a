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
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from buckets import BUCKET, Server, client, environment_with, gcs_server, names, s3_server

from jaxpar.base.storage import Bucket

pytestmark = pytest.mark.slow

STEPS = 12
LAST_OBJECT = re.compile(r"checkpoints/(\d+)/uploaded\.json$")
FLAGS = [
    "--mesh.platform=cpu",
    "--mesh.fsdp=1",
    "--mesh.tensor=1",
    "--model.layers=1",
    "--model.embed=32",
    "--model.mlp=64",
    "--data.seq-len=32",
    "--data.source=tokens",
    "--data.val-fraction=0.1",
    "--train.batch=8",
    "--train.warmup-steps=1",
    f"--train.steps={STEPS}",
    "--train.eval-every=4",
    "--train.eval-batches=2",
    "--train.final-eval-batches=2",
    "--checkpoint.every=4",
    "--checkpoint.keep=2",
    "--metrics.log-every=1",
]
SHORT_LIMIT = "import jaxpar.base.storage as storage; storage.LIMIT_SECONDS = 3.0; "
MAIN = "import sys; from jaxpar.cli.main import main; sys.exit(main(sys.argv[1:]))"


class Runs:
    """Trains the same experiment in a local folder and in a bucket."""

    def __init__(self, folder: Path, server: Server):
        self.folder = folder
        self.server = server
        self.lives: dict[str, float] = {}
        """The seconds that a training took."""
        self._results: dict[str, tuple[list, dict[str, np.ndarray]]] = {}
        self.tokens = folder / "tokens.bin"
        ids = np.random.default_rng(0).integers(0, 200, 40_000).astype(np.uint16)
        ids.tofile(self.tokens)

    def start(
        self, run: str, limit: str = "", processes: int = 1, *flags: str
    ) -> list[subprocess.Popen[str]]:
        """Begin a training, or go on with it; its data are where its folder is."""
        scheme, in_bucket, _ = run.rpartition("://")
        data = f"{scheme}://{BUCKET}/data/tokens.bin" if in_bucket else str(self.tokens)
        command = [sys.executable, "-c", limit + MAIN, "train", "tiny", f"--run={run}", *FLAGS]
        command += [f"--data.path={data}", f"--mesh.data={processes}", *flags]
        command += [f"--mesh.distributed={processes > 1}"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        begun = []
        for index in range(processes):
            environment = environment_with(self.server, str(self.folder / "cache"))
            environment["JAX_ENABLE_COMPILATION_CACHE"] = "true"
            if processes > 1:
                environment |= {
                    "JAX_COORDINATOR_ADDRESS": address,
                    "JAX_NUM_PROCESSES": str(processes),
                    "JAX_PROCESS_ID": str(index),
                }
            one = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            begun.append(one)
        return begun

    def train(self, run: str, limit: str = "", processes: int = 1, code: int = 0) -> str:
        """Train to the end, and return what was said on standard error."""
        began = time.monotonic()
        running = self.start(run, limit, processes)
        said = [process.communicate(timeout=600)[1] for process in running]
        assert [process.returncode for process in running] == [code] * processes, said
        assert not any("Traceback" in text for text in said), said
        self.lives[run] = time.monotonic() - began
        return "".join(said)

    def result(self, run: str) -> tuple[list[tuple[int, float, float]], dict[str, np.ndarray]]:
        """The losses of a run by step, and all arrays of the state at its end, as another machine
        finds them.
        """
        asked = [sys.executable, __file__, "--result", run, str(self.folder / "result.npz")]
        cache = str(self.folder / "another_machine")
        subprocess.run(asked, env=environment_with(self.server, cache), check=True, timeout=600)
        with np.load(self.folder / "result.npz") as found:
            arrays = {name: found[name] for name in found.files}
        return arrays.pop("losses").tolist(), arrays

    def require_equal(self, run: str, wanted: str) -> None:
        """Compare two runs in every bit."""
        losses, arrays = self.result(run)
        if wanted not in self._results:
            self._results[wanted] = self.result(wanted)
        their_losses, their_arrays = self._results[wanted]
        assert losses == their_losses and len(losses) >= STEPS
        assert arrays.keys() == their_arrays.keys()
        for name, array in arrays.items():
            assert array.tobytes() == their_arrays[name].tobytes(), name

    def steps(self, run: str) -> list[int]:
        """The steps that have their last object."""
        found = [LAST_OBJECT.search(name) for name in names(self.server, run)]
        return sorted(int(one[1]) for one in found if one)


def write_result(run: str, file: str) -> None:
    """Write what `Runs.result` returns, in a process of its own."""
    import jax

    from jaxpar.base.layout.sharding import path_name
    from jaxpar.train.experiment import Experiment
    from jaxpar.train.metrics import read_metrics
    from jaxpar.train.plans import make_experiment
    from jaxpar.train.restore import restore_state
    from jaxpar.train.runs.bucket_runs import folder_here
    from jaxpar.train.runs.checkpoints import Checkpoints
    from jaxpar.train.runs.run_folder import read_run_config

    folder = folder_here(run)
    experiment: Experiment = make_experiment(_on_one_device(read_run_config(folder)))
    checkpoints = Checkpoints(folder / "checkpoints")
    state, _ = restore_state(checkpoints, STEPS, experiment)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    arrays = {path_name(path): np.asarray(leaf) for path, leaf in leaves}
    rows = [(r["step"], r.get("loss", 0.0), r.get("val_loss", 0.0)) for r in read_metrics(folder)]
    np.savez(file, losses=np.array(rows, np.float64), **arrays)


def _on_one_device(config):
    from dataclasses import replace

    return replace(config, mesh=replace(config.mesh, data=1, distributed=False))


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
        running = runs.start(run, "", processes)
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


def test_a_run_that_is_killed_goes_on_from_the_bucket_to_the_bit(runs, local):
    assert kill(runs, local, trials=2) >= 1
    left = {name.split("/")[0] for name in names(runs.server)}
    assert left >= {"data", "killed_1_0_0"}
    assert not [path for path in Path.cwd().iterdir() if ":" in path.name]


def test_a_bucket_that_is_busy_for_a_while_is_waited_for(runs, local):
    busy(runs, local, seconds=4.0)


def busy(runs: Runs, wanted: str, seconds: float) -> str:
    """Let the bucket answer 503 for a while, from the middle of the first step that is sent."""
    run = f"s3://{BUCKET}/busy_{seconds:.0f}"
    (process,) = runs.start(run)
    while not any("/checkpoints/4/" in path for _, path in runs.server.seen[-50:]):
        assert process.poll() is None
        time.sleep(0.01)
    before = runs.server.failed
    with runs.server.busy_for(seconds):
        pass
    assert runs.server.failed > before
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said
    lines = said.splitlines()
    again = [line for line in lines if "is tried again" in line]
    # s3fs itself asks again for some seconds
    assert again or seconds < 30, said
    assert sum("answers again" in line for line in lines) == len(again) <= 1, said
    assert "Traceback" not in said
    runs.require_equal(run, wanted)
    return said


def test_a_bucket_that_stays_away_ends_the_run_in_one_line_with_the_step_before(runs, local):
    run = f"s3://{BUCKET}/away"
    runs.server.refuses = lambda method, path: "/away/checkpoints/8/state" in path
    try:
        said = runs.train(run, limit=SHORT_LIMIT, code=2)
    finally:
        runs.server.refuses = lambda method, path: False
    errors = [line for line in said.splitlines() if line.startswith("jaxpar: error: ")]
    assert len(errors) == 1 and f"could not be written to {run}" in errors[0], said
    assert runs.steps("away/") == [4]
    runs.train(run)
    runs.require_equal(run, local)


def test_one_request_in_ten_fails_and_each_is_slow(runs, local):
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


def test_a_run_in_a_bucket_of_google_goes_on_to_the_bit(tmp_path, monkeypatch):
    with gcs_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        runs = Runs(tmp_path, server)
        Bucket(f"gs://{BUCKET}").write("data/tokens.bin", runs.tokens.read_bytes())
        runs.train(str(tmp_path / "local"))
        run = f"gs://{BUCKET}/run"
        (process,) = runs.start(run, "", 1, "--train.stop-at=8")
        assert "Traceback" not in process.communicate(timeout=600)[1]
        runs.train(run)
        runs.require_equal(run, str(tmp_path / "local"))


def test_two_processes_send_their_own_files_and_go_on_after_a_kill(runs):
    folder = str(runs.folder / "local_2")
    runs.train(folder, processes=2)
    assert kill(runs, folder, trials=1, processes=2) >= 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--busy-seconds", type=float, default=0.0)
    parser.add_argument("--result", nargs=2, default=())
    args = parser.parse_args()
    if args.result:
        write_result(*args.result)
        return
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
