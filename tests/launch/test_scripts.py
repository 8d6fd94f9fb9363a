"""Scripts and manifests: by shellcheck, by the schema of Kubernetes, and run with commands that
pretend.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from jaxpar.base.config import load_config, override
from jaxpar.base.errors import UserError
from jaxpar.launch.script_run import Placement
from jaxpar.launch.scripts import script
from jaxpar.rehearse.targets import load_target

SHELLCHECK = shutil.which(
    "shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
)
GCLOUD = Path(__file__).with_name("pretended_gcloud.py")
SLICES = {"mesh.dcn.data": 2, "mesh.fsdp": -1}


def make(
    kind: str,
    target: str,
    source: str = "llama3_8b",
    **settings: object,
) -> str:
    config = override(
        load_config(source), {"mesh.data": 1, "mesh.fsdp": -1, "mesh.tensor": 4, **settings}
    )
    if kind in ("jobset", "rayjob"):
        gke = {"image": "some/image:1", "claim": "runs", "ray": kind == "rayjob"}
    else:
        gke = {}
    if gke:
        kind = "gke"
    return script(kind, source, config, Placement(target, spot=kind != "slurm", **gke))


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A config that is a file."""
    path = tmp_path / "My config.toml"
    path.write_text(
        "# a config\n[mesh]\nfsdp = -1\ntensor = 4\n[data]\npath = 'it''s'\n".replace("''", "")
    )
    return str(path)


@pytest.mark.parametrize(
    "target, hosts",
    [
        ("v5p-64", 16),
        ("v5e-8", 1),
        ("v5e-16", 4),
        ("v6e-1", 1),
        ("v5p-64x2", 32),
        ("h100x64", 8),
        ("h100x4", 1),
    ],
)
def test_hosts(target: str, hosts: int) -> None:
    assert load_target(target).hosts == hosts


@pytest.mark.parametrize(
    "kind, target",
    [
        ("slurm", "h100x64"),
        ("tpu-vm", "v5p-64"),
        ("skypilot", "h100x16"),
        ("skypilot", "v6e-8"),
    ],
)
def test_shell(kind: str, target: str, source: str, tmp_path: Path) -> None:
    if SHELLCHECK is None:
        pytest.skip("shellcheck is not here: pip install 'jaxpar[dev]'")
    for place, text in enumerate(
        (
            make(kind, target),
            make(kind, target, source),
        )
    ):
        if kind == "skypilot":
            task = pytest.importorskip("yaml").safe_load(text)
            text = f"#!/bin/bash\n{task['setup']}\n{task['run']}"
        file = tmp_path / f"{place}.sh"
        file.write_text(text)
        done = subprocess.run([SHELLCHECK, file], capture_output=True, text=True, check=False)
        assert not done.returncode, done.stdout


@pytest.mark.parametrize(
    "kind, target, settings",
    [
        ("jobset", "v5p-64x2", SLICES),
        ("jobset", "h100x64", {}),
        ("jobset", "v5e-8", {}),
        ("rayjob", "v6e-16", {}),
        ("rayjob", "h100x16", {}),
    ],
)
def test_kubernetes_takes_it(
    kind: str, target: str, settings: dict[str, object], source: str
) -> None:
    """Jobs, pods and config maps by Kubernetes' own schema; what is around them by the fields that
    we write.
    """
    kubernetes = pytest.importorskip("kubernetes_validate")
    yaml = pytest.importorskip("yaml")

    def require(kind: str, version: str, **rest: object) -> None:
        newest = kubernetes.latest_version()
        kubernetes.validate({"apiVersion": version, "kind": kind, **rest}, newest, strict=True)

    for name in ("llama3_8b", source):
        *maps, job = yaml.safe_load_all(make(kind, target, name, **settings))
        for found in maps:
            kubernetes.validate(found, kubernetes.latest_version(), strict=True)
        assert len(maps) == (name == source)
        if kind == "jobset":
            assert job["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and set(job["spec"]) == {
                "failurePolicy",
                "replicatedJobs",
            }
            (workers,) = job["spec"]["replicatedJobs"]
            assert set(workers) == {"name", "replicas", "template"}
            require("Job", "batch/v1", **workers["template"])
            pods = workers["replicas"] * workers["template"]["spec"]["completions"]
        else:
            assert job["apiVersion"] == "ray.io/v1"
            cluster = job["spec"]["rayClusterSpec"]
            (workers,) = cluster["workerGroupSpecs"]
            for group in (cluster["headGroupSpec"], workers):
                require("PodTemplate", "v1", template=group["template"])
            pods = workers["replicas"] * workers["numOfHosts"]
        assert pods == load_target(target).hosts


@pytest.mark.parametrize("target", ["h100x16", "v6e-8"])
def test_skypilot_takes_it(target: str, source: str) -> None:
    sky = pytest.importorskip("sky")
    yaml = pytest.importorskip("yaml")
    task = sky.Task.from_yaml_config(
        yaml.safe_load(make("skypilot", target, source)), [("BUCKET", "gs://some-bucket")]
    )
    assert task.num_nodes == (2 if target == "h100x16" else 1)


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`pretend(name, script)`: a command of this name, which is a script of bash, first on PATH."""
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, text: str) -> None:
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    return make


VERSION = f"echo jaxpar {version('jaxpar')}"
NEXT_CODE = 'code=$(head -n1 codes); sed -i 1d codes; echo "$@" >> calls; '


@pytest.mark.parametrize(
    "codes, state, code, runs, requeued",
    [
        ("0", "RUNNING", 0, 1, False),
        ("2", "RUNNING", 2, 1, False),
        ("130", "RUNNING", 130, 1, True),
        ("130", "COMPLETING", 130, 1, False),
        ("1 134 0", "RUNNING", 0, 3, False),
        ("1 1 1 137", "RUNNING", 137, 4, False),
    ],
)
def test_a_batch_script_does_what_an_exit_code_asks_for(
    codes: str, state: str, code: int, runs: int, requeued: bool, pretend, tmp_path: Path
) -> None:
    (tmp_path / "codes").write_text("\n".join(codes.split()) + "\n")
    (tmp_path / "job.sh").write_text(make("slurm", "h100x64"))
    pretend("jaxpar", VERSION)
    pretend("srun", NEXT_CODE + "exit $code")
    pretend("squeue", f"echo {state}")
    pretend("scontrol", 'echo "$@" > requeued')
    done = subprocess.run(
        ["bash", "job.sh"],
        env=os.environ | {"SLURM_JOB_ID": "7"},
        check=False,
    )
    assert (done.returncode, (tmp_path / "requeued").exists()) == (code, requeued)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == runs and "jaxpar train llama3_8b --run=runs/llama3_8b" in calls[0]


def test_a_batch_script_outlives_the_signal_that_stops_its_step(pretend, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(make("slurm", "h100x64"))
    pretend("jaxpar", VERSION)
    pretend("srun", "trap 'exit 130' TERM; touch begun; sleep 20 & wait")
    pretend("squeue", "echo RUNNING")
    pretend("scontrol", 'echo "$@" > requeued')
    with subprocess.Popen(
        ["bash", "job.sh"], env=os.environ | {"SLURM_JOB_ID": "7"}, start_new_session=True
    ) as process:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        # Slurm tells the step, and on a preemption the script too
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(timeout=10) == 130
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


@pytest.mark.parametrize(
    "codes, states, slices",
    [
        ("134 0", "ACTIVE", 1),
        ("130 0", "SUSPENDED", 2),
        ("2", "ACTIVE", 1),
    ],
)
def test_a_tpu_vm_is_replaced_where_it_was_taken_and_released_at_the_end(
    codes: str, states: str, slices: int, pretend, tmp_path: Path
) -> None:
    (tmp_path / "codes").write_text("\n".join(codes.split()) + "\n")
    (tmp_path / "job.sh").write_text(make("tpu-vm", "v5e-8"))
    pretend(
        "gcloud",
        f"""{sys.executable} {GCLOUD} "$@" || exit 2
echo "$@" >> calls
case "$*" in
  *" create "*) echo ACTIVE > state ;;
  *" describe "*) cat state ;;
  *"cat /tmp/jaxpar_code"*) head -n1 codes; sed -i 1d codes; [[ -s codes ]] && echo {states} > state ;;
esac; true""",
    )
    environment = os.environ | {"PROJECT": "p", "ZONE": "z", "SHARE": "10.0.0.2:/share"}
    done = subprocess.run(
        ["bash", "job.sh"], env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == int(codes.split()[-1]), done.stderr
    calls = (tmp_path / "calls").read_text()
    assert calls.count(" create ") == calls.count(" delete ") == slices
    assert calls.count("/tmp/jaxpar/bin/jaxpar train llama3_8b") == len(codes.split())


@pytest.mark.parametrize(
    "kind, target, said",
    [
        ("slurm", "v5p-64", "not run by Slurm"),
        ("tpu-vm", "h100x8", "had by tpu-vm"),
        ("tpu-vm", "tpu7x-64", "not to be had"),
        ("skypilot", "v5p-64x2", "2 slices"),
        ("slurm", "h100x2", "tensor=4"),
    ],
)
def test_what_cannot_start_there_is_refused(kind: str, target: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make(kind, target, **(SLICES if "x2" in target and "v5p" in target else {}))
