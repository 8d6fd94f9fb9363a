"""The command of a printed RayJob, submitted as a job to a real Ray cluster whose head has no CPU,
as the RayJob's has none: it trains on the other node, and the job succeeds.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("ray", reason="needs the ray extra")
yaml = pytest.importorskip("yaml")

SMALL = [
    "--mesh.data=1",
    "--mesh.fsdp=1",
    "--mesh.tensor=1",
    "--model.layers=1",
    "--model.embed=32",
    "--model.mlp=64",
    "--data.max-bytes=200000",
    "--data.seq-len=32",
    "--train.batch=8",
    "--train.steps=8",
    "--train.warmup-steps=1",
    "--train.eval-every=0",
    "--train.final-eval-batches=2",
    "--checkpoint.every=4",
    "--metrics.log-every=1",
]


def printed_command() -> list[str]:
    """The entrypoint of a RayJob, as `jaxpar launch gke --ray` prints it."""
    words = ["launch", "gke", "tiny", "--ray", "--target=h100x8", "--image=my/jaxpar:1"]
    printed = subprocess.run(
        [sys.executable, "-m", "jaxpar.cli.main", *words, "--claim=runs"],
        capture_output=True,
        text=True,
        check=True,
    )
    (job,) = yaml.safe_load_all(printed.stdout)
    return shlex.split(job["spec"]["entrypoint"])


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # Ray forks to start its own
def test_the_command_of_a_rayjob_succeeds_as_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.cluster_utils import Cluster
    from ray.job_submission import JobStatus, JobSubmissionClient

    # the cluster is of this test alone, and what else this machine does is no reason to wait
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    command = printed_command()
    assert command[:4] == ["jaxpar", "launch", "ray", "tiny"]
    words = [word for word in command[1:] if not word.startswith(("--target", "--run", "mesh."))]
    here = [sys.executable, "-m", "jaxpar.cli.main", *words, "--workers=1"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Ray's own port for what takes jobs may be that of another cluster of this machine
    node = {"object_store_memory": 80_000_000, "dashboard_agent_listen_port": 0}
    head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": port, **node}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=1, **node)
        client = JobSubmissionClient(f"http://127.0.0.1:{port}")
        until = time.monotonic() + 900  # a busy machine takes minutes to start it all
        entrypoint = shlex.join([*here, f"--run={tmp_path / 'run'}", *SMALL])
        job = None
        while job is None:
            try:
                job = client.submit_job(entrypoint=entrypoint)
            except RuntimeError as error:  # what takes jobs has not started yet
                assert "try again later" in str(error) and time.monotonic() < until, error
                time.sleep(0.5)
        while not client.get_job_status(job).is_terminal() and time.monotonic() < until:
            time.sleep(0.5)
        said = client.get_job_logs(job)
        assert client.get_job_status(job) == JobStatus.SUCCEEDED, said
        assert "step 8/8" in said
        assert os.listdir(tmp_path / "run" / "checkpoints")
    finally:
        cluster.shutdown()
