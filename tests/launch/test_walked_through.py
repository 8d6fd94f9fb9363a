"""Printed scripts, walked through: what each would train is the config that printed it, and their
steps run on this machine, on CPU devices in place of chips.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxpar.base.config import Config, load_config, override
from jaxpar.base.config.checks import check
from jaxpar.base.errors import UserError
from jaxpar.cli.arguments import config_args
from jaxpar.cli.commands import TrainArgs
from jaxpar.launch.script_run import Placement
from jaxpar.launch.scripts import script
from jaxpar.launch.staging import FILES, package_for
from jaxpar.train.metrics import read_metrics

SMALL = {
    "mesh.data": 16,
    "mesh.fsdp": 1,
    "mesh.tensor": 1,
    "model.layers": 1,
    "model.embed": 32,
    "model.mlp": 64,
    "data.source": "tokens",
    "data.path": "data.bin",
    "data.seq_len": 32,
    "data.val_fraction": 0.0,
    "train.batch": 16,
    "train.steps": 6,
    "train.warmup_steps": 1,
    "checkpoint.every": 0,
    "metrics.log_every": 1,
}
KINDS = ("slurm", "gke", "rayjob", "tpu-vm", "skypilot")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a user, with data, where the tests are."""
    monkeypatch.chdir(tmp_path)
    np.arange(20_000, dtype=np.uint16).__mod__(200).tofile("data.bin")
    return tmp_path


def printed(kind: str, config: Config, source: str = "tiny", **more: object) -> str:
    """The script of a kind, on 16 chips where that has them."""
    target = {"tpu-vm": "v5e-16", "gke": "h100x16", "rayjob": "h100x16"}.get(kind, "h100x16")
    if kind in ("gke", "rayjob"):
        more |= {"image": "my/jaxpar:1", "claim": "runs", "ray": kind == "rayjob"}
        kind = "gke"
    return script(kind, source, config, Placement(target, **more))


def command(kind: str, text: str) -> list[str]:
    """The words that each host runs, read out of the script."""
    if kind == "slurm":
        return shlex.split(re.search(r"^command=\((.*)\)$", text, re.MULTILINE)[1])
    if kind == "gke":
        return json.loads(re.search(r"^ *command: (\[.*\])$", text, re.MULTILINE)[1])
    if kind == "rayjob":
        return shlex.split(json.loads(re.search(r"^ *entrypoint: (.*)$", text, re.MULTILINE)[1]))
    if kind == "tpu-vm":
        (words,) = shlex.split(re.search(r"^train=(.*)$", text, re.MULTILINE)[1])
        return shlex.split(words.rpartition(" && ")[2])
    return shlex.split(re.search(r"^ *(/tmp/jaxpar/bin/.*) \|\| code", text, re.MULTILINE)[1])


def trained(words: list[str], source: str) -> Config:
    """The config that `jaxpar train` or `jaxpar launch ray` reads of these words, where the file
    `source` stands in place of the one that goes along."""
    rest = words[words.index("ray" if "ray" in words else "train") + 1 :]
    ours = ("--run=", "--target=", "--max-failures=")
    flags = [word for word in rest[1:] if not word.startswith(ours)]
    if source == "tiny":
        assert rest[0] == source
    return config_args("jaxpar train CONFIG", TrainArgs, [source, *flags])[1].config


@pytest.mark.parametrize("from_file", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_script_trains_the_config_that_printed_it(
    kind: str, from_file: bool, place: Path
) -> None:
    source = "tiny"
    if from_file:
        source = "mine.toml"
        Path(source).write_text("[train]\nlearning_rate = 0.0007\n[model]\nheads = 2\n")
    if kind in ("gke", "rayjob"):
        changes = SMALL | {"data.path": "/mnt/jaxpar/data.bin"}
    else:
        changes = SMALL
    config = override(load_config(source), changes)
    text = printed(kind, config, source)
    platform = "tpu" if kind == "tpu-vm" else "gpu"
    mesh = replace(config.mesh, platform=platform, distributed=True)
    wanted = check(replace(config, mesh=mesh))
    if kind in ("tpu-vm", "skypilot"):
        wanted = override(wanted, {"data.path": f"{FILES}/0_data.bin"})
    words = command(kind, text)
    if from_file and kind in ("gke", "rayjob"):
        assert words[words.index("ray" if kind == "rayjob" else "train") + 1] == (
            "/etc/jaxpar/config.toml"
        )
        assert "    learning_rate = 0.0007" in text  # the whole text, in the config map
    assert trained(words, source) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_has_the_names_of_secrets_and_not_their_values(
    kind: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_the_value")
    changes = SMALL | {"data.path": "/mnt/jaxpar/data.bin"}
    config = override(load_config("tiny"), changes)
    text = printed(kind, config, secrets=("HF_TOKEN",), env=("HF_HOME=/mnt/it's",))
    assert "HF_TOKEN" in text and "hf_the_value" not in text
    assert "HF_HOME" in text and "/mnt/it" in text
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in text) == (kind != "tpu-vm")


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("slurm", {"env": ("HF_TOKEN=hf_x",)}, "try --secrets HF_TOKEN"),
        ("slurm", {"env": ("HF_HOME",)}, "no NAME=value"),
        ("slurm", {"secrets": ("A=b",)}, "no name of a variable"),
        ("slurm", {"package": "jaxpar==0.1.0"}, "--package has no effect"),
        ("rayjob", {"run": "gs://bucket/run"}, "Ray's processes share a folder"),
        ("skypilot", {"package": "jaxpar"}, "does not say which version"),
        ("skypilot", {"package": "missing.whl"}, "no file here"),
        ("gke", {}, "a pod sees only the claim, at /mnt/jaxpar: copy it there"),
    ],
)
def test_what_a_script_could_not_do_is_refused(
    kind: str, more: dict[str, object], said: str, place: Path
) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        printed(kind, override(load_config("tiny"), SMALL), **more)


def test_an_image_without_a_version_is_refused(place: Path) -> None:
    config = override(load_config("tiny"), SMALL | {"data.path": ""})
    for image in ("my/jaxpar", "my/jaxpar:latest", "host:5000/jaxpar"):
        with pytest.raises(UserError, match="which version it is"):
            script("gke", "tiny", config, Placement("h100x16", image=image, claim="runs"))


@pytest.mark.parametrize("kind", ["slurm", "gke", "tpu-vm", "skypilot"])
def test_a_run_and_data_in_a_bucket_need_no_mount(kind: str, place: Path) -> None:
    url = "gs://bucket/data.bin"
    config = override(load_config("tiny"), SMALL | {"data.path": url})
    more = {"image": "my/jaxpar:1"} if kind == "gke" else {}
    where = Placement("v5e-16" if kind == "tpu-vm" else "h100x16", run="gs://bucket/run", **more)
    text = script(kind, "tiny", config, where)
    words = command(kind, text)
    assert "--run=gs://bucket/run" in words and f"data.path={url}" in words
    for mounted in ("SHARE", "BUCKET", "claimName", "/mnt/jaxpar", FILES):
        assert mounted not in text
    if kind in ("tpu-vm", "skypilot"):
        assert re.search(r"jaxpar\[(tpu|cuda),cloud\]", text)
    if kind in ("gke", "skypilot"):
        (*_, made) = pytest.importorskip("yaml").safe_load_all(text)
        assert made


def test_one_version_is_installed(place: Path) -> None:
    assert re.search(r"@[0-9a-f]{40}$|==\d", package_for("", "tpu").requirement)
    Path("jaxpar-0.1.0-py3-none-any.whl").write_bytes(b"")
    wheel = package_for("jaxpar-0.1.0-py3-none-any.whl", "cuda")
    assert wheel.requirement == f"jaxpar[cuda] @ file://{FILES}/jaxpar-0.1.0-py3-none-any.whl"
    assert wheel.wheel is not None and wheel.wheel.there in wheel.requirement
    config = override(load_config("tiny"), SMALL)
    text = printed("tpu-vm", config, package="jaxpar-0.1.0-py3-none-any.whl")
    assert f"send_to_hosts jaxpar-0.1.0-py3-none-any.whl {FILES}/" in text


SRUN = """
# two processes of a step, as Slurm would start one on each of two nodes of four GPUs
while [[ $1 == --* ]]; do shift; done
export SLURM_JOB_ID=7 SLURM_NTASKS=2 SLURM_STEP_NODELIST=127.0.0.1 SLURM_LOCALID=0
export SLURM_STEP_NUM_TASKS=2 SLURM_JOB_NUM_NODES=2
pids=()
for ((i = 0; i < 2; i++)); do
  SLURM_PROCID=$i "$@" & pids+=($!)
done
trap 'kill -TERM "${pids[@]}"' TERM
code=0
for pid in "${pids[@]}"; do
  wait "$pid" || code=$?
  while kill -0 "$pid" 2>/dev/null; do wait "$pid" || code=$?; done
done
exit $code
"""
SHIM = f"""#!/bin/bash
# this machine has no chips; everything else is as the script says
if [[ $1 == train ]]; then
  exec {sys.executable} -m jaxpar.cli.main "$@" mesh.platform=cpu
fi
exec {sys.executable} -m jaxpar.cli.main "$@"
"""


def commands(place: Path, **texts: str) -> dict[str, str]:
    """An environment in which these commands are what their texts say."""
    bin = place / "bin"
    bin.mkdir()
    for name, text in texts.items():
        (bin / name).write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}")
        (bin / name).chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    return environment | {"PATH": f"{bin}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.slow
def test_a_batch_script_trains_in_two_processes_stops_and_goes_on(place: Path) -> None:
    """Slurm's own commands are pretended: two processes find each other by what Slurm would say,
    stop together when the step is told, and the job that is queued again ends the run."""
    changes = SMALL | {"train.steps": 400, "mesh.data": 8, "train.batch": 8}
    text = script("slurm", "tiny", override(load_config("tiny"), changes), Placement("h100x8"))
    text = text.replace("mesh.data=8", "mesh.data=8 mesh.distributed=True")
    Path("job.sh").write_text(text)
    environment = commands(
        place,
        srun=SRUN,
        jaxpar=SHIM,
        squeue="echo RUNNING",
        scontrol='echo "$@" >> requeued',
    )
    environment |= {"SLURM_JOB_ID": "7"}
    with subprocess.Popen(["bash", "job.sh"], env=environment, start_new_session=True) as job:
        until = time.monotonic() + 120
        while not read_metrics(place / "runs/tiny") and time.monotonic() < until:
            assert job.poll() is None
            time.sleep(0.1)
        os.killpg(job.pid, signal.SIGTERM)
        assert job.wait(timeout=120) == 130
    assert Path("requeued").read_text() == "requeue 7\n"
    stopped = max(row["step"] for row in read_metrics(place / "runs/tiny"))
    assert 0 < stopped < 400
    assert subprocess.run(["bash", "job.sh"], env=environment, check=False).returncode == 0
    assert max(row["step"] for row in read_metrics(place / "runs/tiny")) == 400
