"""Starting JAX: in this process it runs on 8 CPU devices already; a fresh process gets what it asks
for.
"""

import errno
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxpar.base import jax_compat
from jaxpar.base.atomic_write import replacing, write_whole
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.base.process import runtime
from jaxpar.base.process.runtime import devices_of_a_process, keep_heap, keep_programs, start


@pytest.fixture(autouse=True)
def same_platform_afterwards() -> Iterator[None]:
    yield
    jax.config.update("jax_platforms", "cpu")


def test_auto_takes_every_device():
    assert start(MeshSpec()) == jax.devices()


def test_cpu_takes_as_many_devices_as_the_mesh_needs():
    assert start(MeshSpec(platform="cpu", data=2, tensor=3)) == jax.devices()[:6]


def test_an_axis_that_is_open_takes_every_cpu_device_that_jax_was_told_of() -> None:
    assert start(MeshSpec(platform="cpu", data=-1, fsdp=2)) == jax.devices()
    assert start(MeshSpec(platform="cpu", data=-1, fsdp=3)) == jax.devices()[:6]
    with pytest.raises(UserError, match="16 simulated CPU devices are needed"):
        start(MeshSpec(platform="cpu", data=-1, fsdp=16))


@pytest.fixture
def programs(cache: Path) -> Iterator[Path]:
    """The folder of kept programs, with JAX's cache on, which conftest turns off."""
    names = [
        name
        for name in jax.config.values
        if "compilation_cache" in name or "persistent_cache" in name
    ]
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
    yield cache / "jaxpar" / "programs"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_a_program_is_compiled_once_and_then_read(
    programs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def compute() -> float:
        # a new function each time: JAX remembers none of it
        return float(jax.jit(lambda x: x * 3 + 1)(2.0))

    # the user's own, left as it is
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    keep_programs()
    with caplog.at_level(logging.DEBUG, "jax._src.lru_cache"):
        assert (compute(), compute()) == (7.0, 7.0)
    (folder,) = programs.iterdir()
    assert len(list(folder.glob("jit__lambda*-cache"))) == 1
    assert (
        len(
            [line for line in caplog.messages if line.startswith("Cache hit for key: 'jit__lambda")]
        )
        == 1
    )
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 0.0
    assert jax.config.values["jax_compilation_cache_max_size"] == 2 << 30


def test_the_settings_of_jax_come_first(programs: Path, tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    start(MeshSpec())
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "mine")
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    keep_programs()
    assert jax.config.values["jax_compilation_cache_dir"] is None and not programs.exists()


def test_a_folder_that_cannot_be_made(programs: Path, caplog: pytest.LogCaptureFixture) -> None:
    programs.parent.write_text("a file")
    keep_programs()
    assert re.search(
        r"cannot be kept in .*programs.* \(Not a directory\): every start compiles anew",
        caplog.text,
    )
    assert jax.config.values["jax_compilation_cache_dir"] is None


def test_too_few_cpu_devices_once_jax_runs_are_refused_with_both_numbers():
    with pytest.raises(
        UserError, match="16 simulated CPU devices are needed and JAX has started with 8"
    ):
        start(MeshSpec(platform="cpu", data=16))


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_another_platform_once_jax_runs_is_refused(platform):
    with pytest.raises(UserError, match=f"mesh.platform is '{platform}' .*cpu: pip install"):
        start(MeshSpec(platform=platform))


def test_a_fresh_process_simulates_as_many_devices_as_the_mesh_needs():
    program = (
        "from jaxpar import MeshSpec, start; print(len(start(MeshSpec(platform='cpu', data=3))))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("3\n", "")


MESHES = """
import sys, jax
if sys.argv[1]:
    jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
from jaxpar import MeshSpec, start
for sizes in (dict(data=1), dict(data=2, fsdp=2), dict(data=-1, fsdp=2)):
    print(len(start(MeshSpec(platform="cpu", **sizes))))
"""
FLAG = "--xla_force_host_platform_device_count"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told", "setting"),
    [
        ({}, "5"),
        ({"JAX_NUM_CPU_DEVICES": "5"}, ""),
        ({"XLA_FLAGS": f"{FLAG}=2 {FLAG}=5"}, ""),
        ({"XLA_FLAGS": f"{FLAG}=9"}, "5"),  # JAX's own setting comes first
    ],
)
def test_a_number_of_cpu_devices_that_was_told_is_never_lowered(
    told: dict[str, str], setting: str
) -> None:
    ours = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
    environment = {key: value for key, value in os.environ.items() if key not in ours} | told
    done = subprocess.run(
        [sys.executable, "-c", MESHES, setting],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == (["1", "4", "4"], "")


@pytest.mark.slow
def test_a_number_of_cpu_devices_that_was_told_is_raised_where_a_mesh_needs_more() -> None:
    program = "from jaxpar import MeshSpec, start; start(MeshSpec(platform='cpu', data=3))"
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=False)
    assert done.returncode == 0


def share(processes: int, **sizes: int) -> int:
    return devices_of_a_process(MeshSpec(platform="cpu", **sizes), processes)


def test_processes_share_the_cpu_devices_of_a_mesh() -> None:
    assert share(1, data=6) == 6
    assert share(2, data=2, fsdp=3) == 3
    # an open axis makes a multiple of the others
    assert share(2, data=-1) == 1
    assert share(2, data=-1, fsdp=2) == 1
    assert share(4, data=-1, fsdp=6) == 3
    with pytest.raises(UserError, match=r"2 processes .*fsdp=3"):
        share(2, fsdp=3)


def test_devices_that_processes_would_leave_unused_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some of JAX's own collectives are over all devices, and met those of a smaller mesh."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(runtime, "joined_processes", lambda: 2)
    here: list[Any] = [SimpleNamespace(process_index=i // 3, platform="cpu") for i in range(6)]
    monkeypatch.setattr(jax, "devices", lambda: here)
    assert start(MeshSpec(platform="cpu", data=6)) == here
    assert start(MeshSpec(platform="cpu", data=-1, fsdp=2)) == here
    told = "data=4 needs 2 simulated CPU devices in each of 2 processes, and JAX was told 3"
    with pytest.raises(UserError, match=told):
        start(MeshSpec(platform="cpu", data=4))
    with pytest.raises(UserError, match="4 simulated CPU devices"):
        start(MeshSpec(platform="cpu", data=8))


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes this process one of so many, as far as JAX says before it has started."""

    def join(processes: int) -> None:
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(jax_compat.find_private("distributed"), "num_processes", processes)

    return join


def test_who_joined_by_hand_shares_the_cpu_devices_too(
    joined: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    joined(4)
    asked = list[int]()
    monkeypatch.setattr(runtime, "ask_for_cpus", asked.append)
    start(MeshSpec(platform="cpu", data=8))
    assert asked == [2]


CLUSTERS = {
    "slurm": {
        "SLURM_JOB_ID": "{job}",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "{index}",
        "SLURM_LOCALID": "{index}",
    },
    "openmpi": {
        "OMPI_MCA_orte_hnp_uri": "{mpi_job}.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "{index}",
        "OMPI_COMM_WORLD_LOCAL_RANK": "{index}",
    },
    "by hand": {
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "{index}",
    },
}
"""What two processes are told of each other, and whence."""
SHARED = """
import jax
from jaxpar import MeshSpec, start
spec = MeshSpec(platform="cpu", fsdp=4, distributed=True, join_seconds=60)
print(len(start(spec)), len(jax.local_devices()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_processes_that_a_cluster_starts_share_the_cpu_devices(cluster: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = 4096 + port % 4096  # JAX makes the port of it
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM_", "OMPI_", "JAX_NUM_CPU", "XLA_FLAGS"))
    }
    pair = list[subprocess.Popen[str]]()
    for index in range(2):
        known = {
            name: text.format(index=index, port=port, job=job, mpi_job=job * 4096)
            for name, text in CLUSTERS[cluster].items()
        }
        command = [sys.executable, "-c", SHARED]
        pair.append(subprocess.Popen(command, env=kept | known, stdout=subprocess.PIPE, text=True))
    try:
        assert [process.communicate(timeout=240)[0] for process in pair] == ["4 2\n"] * 2
    finally:
        for process in pair:
            process.kill()


@pytest.mark.parametrize(
    ("given", "inside"),
    [
        ({}, "0.9"),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, "0.5"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, None),  # JAX refuses both
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, None),
    ],
)
def test_jaxs_pool_on_a_gpu_is_wider_where_the_user_has_set_none(given, inside, monkeypatch):
    for name in (
        "XLA_CLIENT_MEM_FRACTION",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "XLA_PYTHON_CLIENT_ALLOCATOR",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    found = list[str | None]()

    def devices() -> list[jax.Device]:
        found.append(os.environ.get("XLA_CLIENT_MEM_FRACTION"))
        return here

    here = jax.devices()
    monkeypatch.setattr(jax, "devices", devices)
    start(MeshSpec())
    assert found == [inside]
    assert dict(os.environ) == before


def test_keeping_the_heap_says_whether_it_did():
    assert keep_heap() is (
        os.confstr("CS_GNU_LIBC_VERSION") is not None if sys.platform == "linux" else False
    )


def test_the_heap_is_only_kept_on_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_heap() is False


def test_a_file_is_written_whole_by_whoever_is_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer at the same time has a file of its own until it is done."""
    path = tmp_path / "new" / "cache.json"
    own = Path.write_text

    def meanwhile(self: Path, text: str, **options: Any) -> int:
        monkeypatch.setattr(Path, "write_text", own)
        write_whole(path, "of another")
        return own(self, text, **options)

    monkeypatch.setattr(Path, "write_text", meanwhile)
    write_whole(path, "ours")
    assert path.read_text() == "ours" and list(path.parent.iterdir()) == [path]


def test_unfinished_file_never_takes_the_name(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "a") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_a_line(tmp_path):
    """An error of something that is read meanwhile is not taken for one."""
    with pytest.raises(UserError, match=r"cannot write .*: File name too long"):
        write_whole(tmp_path / ("a" * 300), "x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"cannot write .*: (File exists|Not a directory)"):
        write_whole(tmp_path / "file" / "inside", "x")
    with pytest.raises(UserError, match="No space left"), replacing(tmp_path / "full"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "copy") as copy:
        copy.write((tmp_path / "elsewhere" / "absent").read_bytes())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    write_whole(tmp_path / ("a" * 250), "x")
