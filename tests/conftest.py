"""Eight simulated CPU devices for every test, before anything touches a backend; random tests that
repeat exactly.
"""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # a test compiles what it tests

import hypothesis
import jax
import jaxtyping
import pytest
from jax.experimental.compilation_cache import compilation_cache
from slow_tier import (  # noqa: F401 (pytest calls them)
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_configure_node,
    pytest_report_header,
    pytest_runtest_setup,
    pytest_terminal_summary,
)
from stated_shapes import check_stated_shapes

from jaxpar.base.layout.mesh import MeshSpec, devices_needed, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.base.process.runtime import widen_cpu_pool

check_stated_shapes()

# Tests read values and programs, not speed: as plain machine code a step compiles in an eighth of
# the time. Without the fusion emitters, of which jax 0.12 has no choice, in a half. Where XLA_FLAGS
# is set, if to nothing, it stays (`make test-users-flags`).
_FLAGS = ["xla_backend_optimization_level=0", "xla_llvm_disable_expensive_passes=true"]
_FLAGS += ["xla_cpu_parallel_codegen_split_count=1"]
_FLAGS += ["xla_cpu_use_fusion_emitters=false"] if jax.__version_info__ < (0, 11) else []
os.environ.setdefault("XLA_FLAGS", " ".join(f"--{flag}" for flag in _FLAGS))
# Traced programs are millions of objects that stay: reading them all again and again took a fifth
# of the suite's time.
gc.set_threshold(100_000, 50, 100)
# The wings of which no test asks at which line of the source an instruction began: to write that
# down takes a fifth of the time of a compilation.
_WITHOUT_LINES = {"kernels", "models", "parallel", "train", "verify"}

widen_cpu_pool(8)
jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # started here, so that no test starts it with devices of its own

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """For wrong shapes that the library is to refuse in its own words."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module", autouse=True)
def _lines(request: pytest.FixtureRequest) -> Iterator[None]:
    before = jax.config.values["jax_traceback_in_locations_limit"]
    wing = request.path.relative_to(Path(__file__).parent).parts[0]
    if wing in _WITHOUT_LINES:
        jax.config.update("jax_traceback_in_locations_limit", 0)
    yield
    jax.config.update("jax_traceback_in_locations_limit", before)


@pytest.fixture(scope="session")
def _kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def keeps_programs(_kept: Path) -> Iterator[None]:
    """JAX's cache, for a file whose runs compile the same steps again and again: it reads them, as
    a user's would.
    """
    settings = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(_kept),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def plan_of() -> Callable[..., Plan]:
    """`plan_of(data=2, tensor=4)`: a plan on as many of the devices as these mesh axes take."""

    def build(**sizes: int) -> Plan:
        spec = MeshSpec(**sizes)
        return Plan(make_mesh(spec, jax.devices()[: devices_needed(spec)]))

    return build
