"""The whole training step, compiled by the real TPU compiler for chips that are not here. Compiled, not run."""

import dataclasses
import math

import jax
import pytest

from jaxpar.config import Config, load_config
from jaxpar.hardware import load_mesh_preset
from jaxpar.mesh import MeshSpec
from jaxpar.metrics import bytes_text
from jaxpar.models import Model
from jaxpar.step import batch_shapes, make_plan, make_train_step, state_shapes, state_shardings
from jaxpar.targets import load_target, target_devices

pytest.importorskip("libtpu", reason="the TPU compiler is not here: pip install 'jaxpar[rehearse]'")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def v5p_64() -> list[jax.Device]:
    return target_devices(load_target("v5p-64"))


@pytest.mark.parametrize(
    ("name", "mesh"), [("gpt2_124m", MeshSpec(data=8, fsdp=4, tensor=2)), ("llama3_8b", MeshSpec(fsdp=16, tensor=4))]
)
def test_the_whole_training_step_compiles_for_64_absent_v5p_chips(
    name: str, mesh: MeshSpec, v5p_64: list[jax.Device], capsys: pytest.CaptureFixture[str]
) -> None:
    config: Config = dataclasses.replace(load_config(name), mesh=mesh)
    plan, model = make_plan(config, v5p_64), Model(config.model)
    shapes, shardings = state_shapes(model, config, plan), state_shardings(model, config, plan)
    state = jax.tree.map(lambda s, sh: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sh), shapes, shardings)
    lowered = (
        make_train_step(model, config, plan).trace(state, batch_shapes(config, plan)).lower(lowering_platforms=("tpu",))
    )
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    flat = jax.tree_util.tree_leaves_with_path(state)
    sizes = {jax.tree_util.keystr(path): _local_bytes(leaf) for path, leaf in flat}
    largest = max(sizes, key=lambda path: sizes[path])
    with capsys.disabled():
        print(
            f"\n{name} on v5p 4x4x4: arguments {bytes_text(memory.argument_size_in_bytes)}, temporaries "
            f"{bytes_text(memory.temp_size_in_bytes)}, largest argument {largest} {bytes_text(sizes[largest])} a device"
        )
    # Nothing of any size may be whole on every device: each parameter is split at least fsdp ways, but for those that
    # have one dim only (norms and biases), which are small.
    for path, leaf in flat:
        whole = leaf.size * leaf.dtype.itemsize
        assert sizes[jax.tree_util.keystr(path)] * mesh.fsdp <= whole or whole < 2**20, path
    assert memory.argument_size_in_bytes < 1.05 * sum(sizes.values()) + 2**24
    hbm = load_mesh_preset("v5p_64")[1].hbm_bytes
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < hbm


def _local_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    assert isinstance(leaf.sharding, jax.sharding.NamedSharding)
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
