"""Starting JAX: in this process it runs on 8 CPU devices already; a fresh process gets what it asks
for.
"""

import errno
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.base.process.runtime import keep_heap, keep_programs, start
from jaxpar.base.whole_files import replacing, write_whole


@pytest.fixture(autouse=True)
def same_platform_afterwards() -> Iterator[None]:
    yield
    jax.config.update("jax_platforms", "cpu")


def test_auto_takes_every_device():
    assert start(MeshSpec()) == jax.devices()


def test_cpu_takes_as_many_devices_as_the_mesh_needs():
    assert start(MeshSpec(platform="cpu", data=2, tensor=3)) == jax.devices()[:6]
    assert start(MeshSpec(platform="cpu", data=-1, fsdp=2)) == jax.devices()[:2]


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
    with pytest.raises(
        UserError, match=f"mesh.platform is '{platform}' and JAX runs on cpu: pip install"
    ):
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
