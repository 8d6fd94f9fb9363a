"""The whole training step, compiled by the real TPU compiler for chips that are not here. Compiled,
not run.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from jaxpar.base.config import Config, load_config
from jaxpar.base.console import bytes_text
from jaxpar.base.hardware import load_mesh_preset
from jaxpar.base.layout.mesh import MeshSpec, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.hlo.program.tasks import walk
from jaxpar.hlo.read import read_program
from jaxpar.kernels.masks import Causal
from jaxpar.models import Model
from jaxpar.parallel.mesh_ops import MeshOps
from jaxpar.parallel.ops import AttentionCall
from jaxpar.rehearse.targets import load_target
from jaxpar.train.batch import batch_shapes
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_plan
from jaxpar.train.step import make_train_step

pytest.importorskip("libtpu", reason="the TPU compiler is not here: pip install 'jaxpar[rehearse]'")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def v5p_64() -> list[jax.Device]:
    return load_target("v5p-64").devices()


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(
            "gpt2_124m",
            MeshSpec(data=8, fsdp=4, tensor=2),
            marks=pytest.mark.long,
        ),
        ("llama3_8b", MeshSpec(fsdp=16, tensor=4)),
    ],
)
def test_the_whole_training_step_compiles_for_64_absent_v5p_chips(
    name: str, mesh: MeshSpec, v5p_64: list[jax.Device], capsys: pytest.CaptureFixture[str]
) -> None:
    config: Config = dataclasses.replace(load_config(name), mesh=mesh)
    plan = make_plan(config, v5p_64)
    model = Model(config.model)
    experiment = Experiment(config, model, plan)
    state = experiment.state
    lowered = (
        make_train_step(experiment)
        .trace(state, batch_shapes(config, plan))
        .lower(lowering_platforms=("tpu",))
    )
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    flat = jax.tree_util.tree_leaves_with_path(state)
    sizes = {jax.tree_util.keystr(path): _local_bytes(leaf) for path, leaf in flat}
    largest = max(sizes, key=lambda path: sizes[path])
    with capsys.disabled():
        print(
            f"\n{name} on v5p 4x4x4: arguments {bytes_text(memory.argument_size_in_bytes)}, "
            "temporaries "
            f"{bytes_text(memory.temp_size_in_bytes)}, largest argument {largest} "
            f"{bytes_text(sizes[largest])} a device"
        )
    # Nothing of any size may be whole on every device: each parameter is split at least fsdp ways,
    # but for those that have one dim only (norms and biases), which are small.
    for path, leaf in flat:
        whole = leaf.size * leaf.dtype.itemsize
        assert sizes[jax.tree_util.keystr(path)] * mesh.fsdp <= whole or whole < 2**20, path
    assert memory.argument_size_in_bytes < 1.05 * sum(sizes.values()) + 2**24
    hbm = load_mesh_preset("v5p-64")[1].hbm_bytes
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < hbm


def test_heads_of_64_are_not_copied_between_linears_and_attention() -> None:
    """Neither q, k, v and the output nor their gradients, which go into kernels and matmuls as they
    come.
    """
    B = 4
    S = 1024
    D = 256
    H = 4
    h = 64
    plan = Plan(make_mesh(MeshSpec(), load_target("v5e-1").devices()), compute="bfloat16")
    heads = ("heads", "head_dim")

    def loss(
        x_BSD: jax.Array,
        columns: list[jax.Array],
        out: jax.Array,
    ) -> jax.Array:
        q, k, v = MeshOps(plan).column_linear(x_BSD, columns, (heads,) * 3)
        return jnp.sum(
            jnp.square(
                MeshOps(plan).row_linear(
                    MeshOps(plan).attention(AttentionCall(q, k, v, Causal())),
                    out,
                    heads,
                )
            )
        )

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=plan.sharding((None,)))

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(
        array(B, S, D), [array(D, H, h)] * 3, array(H, h, D)
    )
    text = traced.lower(lowering_platforms=("tpu",)).compile().as_text()
    tasks = [task for task, _ in walk(read_program(text).nodes)]
    kernels = {task.name.split(".")[0]: task.shape for task in tasks if task.kind == "kernel"}
    assert kernels["attention_dq"] == f"bf16[{B},{H},{h},{S}]"  # without gaps
    sizes = [
        math.prod(
            map(
                int,
                task.shape[task.shape.index("[") + 1 : -1].split(","),
            )
        )
        for task in tasks
        if task.kind == "copy" and task.shape.startswith("bf16[")
    ]
    assert max(sizes, default=0) < B * S * H * h


def _local_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    assert isinstance(leaf.sharding, jax.sharding.NamedSharding)
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
