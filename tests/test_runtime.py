"""Starting JAX: in this process it runs on 8 CPU devices already; a fresh process gets what it asks for."""

import os
import subprocess
import sys
from collections.abc import Iterator

import jax
import pytest

from jaxpar.errors import UserError
from jaxpar.mesh import MeshSpec
from jaxpar.runtime import keep_heap, start

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def same_platform_afterwards() -> Iterator[None]:
    yield
    jax.config.update("jax_platforms", "cpu")


def test_auto_takes_every_device():
    assert start(MeshSpec()) == jax.devices()


def test_cpu_takes_as_many_devices_as_the_mesh_needs():
    assert start(MeshSpec(platform="cpu", data=2, tensor=3)) == jax.devices()[:6]
    assert start(MeshSpec(platform="cpu", data=-1, fsdp=2)) == jax.devices()[:2]


def test_too_few_cpu_devices_once_jax_runs_are_refused_with_both_numbers():
    with pytest.raises(UserError, match="16 simulated CPU devices are needed and JAX has started with 8"):
        start(MeshSpec(platform="cpu", data=16))


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_another_platform_once_jax_runs_is_refused(platform):
    with pytest.raises(UserError, match=f"mesh.platform is '{platform}' and JAX runs on cpu: pip install"):
        start(MeshSpec(platform=platform))


def test_a_fresh_process_simulates_as_many_devices_as_the_mesh_needs():
    program = "from jaxpar import MeshSpec, start; print(len(start(MeshSpec(platform='cpu', data=3))))"
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("3\n", "")


def test_keeping_the_heap_says_whether_it_did():
    assert keep_heap() is (os.confstr("CS_GNU_LIBC_VERSION") is not None if sys.platform == "linux" else False)


def test_the_heap_is_only_kept_on_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_heap() is False
