"""Targets: names and their sizes, devices for every kind of chip from the real compilers, and where
those sit.
"""

import dataclasses
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies as jax_topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import MARKS, needs_cuda, needs_libtpu, some

from jaxpar.base.config import load_config
from jaxpar.base.errors import UserError
from jaxpar.base.hardware import CHIPS, has_bfloat16, load_mesh_preset
from jaxpar.base.jax_compat import private
from jaxpar.base.layout.mesh import DcnSpec, MeshSpec, devices_needed, make_mesh
from jaxpar.base.layout.sharding import Layout, ShardingRules
from jaxpar.base.process import runtime
from jaxpar.base.toml import presets
from jaxpar.kernels.masks import Causal
from jaxpar.parallel import attention, choose_attention
from jaxpar.parallel.context import Split
from jaxpar.rehearse import topologies
from jaxpar.rehearse.targets import check_mesh, load_target, places
from jaxpar.rehearse.topologies import compilers
from jaxpar.train.experiments import make_plan

# Names.


@pytest.mark.parametrize(
    ("name", "platform", "topology", "slices", "devices"),
    [
        ("v4-64", "tpu", "4x4x4", 1, 64),
        ("v4-4096", "tpu", "16x16x16", 1, 4096),
        ("v5e-1", "tpu", "1x1", 1, 1),
        ("v5e-8", "tpu", "2x4", 1, 8),
        ("v5p-16", "tpu", "2x2x4", 1, 16),
        ("v5p-64", "tpu", "4x4x4", 1, 64),
        ("v5p-192", "tpu", "4x4x12", 1, 192),
        ("v5p-512", "tpu", "8x8x8", 1, 512),
        ("v5p-768", "tpu", "8x8x12", 1, 768),
        ("v5p-6144", "tpu", "16x16x24", 1, 6144),
        ("v5p-64x4", "tpu", "4x4x4", 4, 256),
        ("v5p-128x4", "tpu", "4x4x8", 4, 512),
        ("v5p:4x4x8", "tpu", "4x4x8", 1, 128),
        ("v5p:4x4x28", "tpu", "4x4x28", 1, 448),
        ("v6e-256", "tpu", "16x16", 1, 256),
        ("tpu7x-64", "tpu", "4x4x4", 1, 128),
        ("tpu7x-9216", "tpu", "16x24x24", 1, 18432),
        ("a100x16", "cuda", "2x8", 2, 16),
        ("h100x4", "cuda", "1x4", 1, 4),
        ("h100x64", "cuda", "8x8", 8, 64),
        ("H200x8", "cuda", "1x8", 1, 8),
        ("b200x8", "cuda", "1x8", 1, 8),
    ],
)
def test_names(name, platform, topology, slices, devices):
    target = load_target(name)
    assert target.name == name.lower()
    assert (target.platform, target.topology, target.slices) == (platform, topology, slices)
    assert target.device_count == devices
    inside = math.prod(target.hardware.ici.shape) * target.hardware.devices_per_chip
    assert inside * target.slices == devices
    assert len(target.hardware.ici.wraps) == len(target.hardware.ici.shape)


@pytest.mark.parametrize(
    ("name", "wraps"),
    [
        ("v5p-64", (True, True, True)),
        ("v5p-32", (False, False, False)),
        ("v5e-8", (False, False)),
        ("v5e-128", (False, True)),
        ("v6e-256", (True, True)),
    ],
)
def test_only_whole_cubes_and_whole_pods_close_into_rings(name, wraps):
    assert load_target(name).hardware.ici.wraps == wraps


def test_a_target_spans_the_mesh_of_the_preset_of_its_size():
    for name in presets("jaxpar.meshes"):
        if name == "cpu_8":
            continue
        target = load_target(name)
        (spec, chip) = load_mesh_preset(name)
        check_mesh(spec, target)
        assert target.hardware.chips == devices_needed(spec)
        assert target.hardware.chip == chip.chip


@pytest.mark.parametrize(
    ("name", "cores"),
    [
        ("v4-64", "v4-128"),
        ("v5p-64", "v5p-128"),
        ("tpu7x-64", "tpu7x-128"),
    ],
)
def test_a_note_says_that_the_vendor_counts_cores(name, cores):
    assert load_target(name).note.startswith(
        f"64 chips; Google Cloud counts TensorCores and calls this {cores}"
    )


def test_no_note_where_the_vendor_counts_chips_too():
    assert (
        load_target("v5e-64").note
        == load_target("v6e-64").note
        == load_target("h100x64").note
        == ""
    )


def test_every_chip_is_a_target():
    for chip in presets(CHIPS):
        assert (
            load_target(f"{chip}-4" if chip.startswith(("v", "tpu")) else f"{chip}x8").chip == chip
        )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "v5p64",
            r"no target 'v5p64' \(did you mean 'v5p-64'\?\): chips are a100, .*, as in v5p-64",
        ),
        ("v5litepod-8", "did you mean 'v5e-8'"),
        ("tpu7-64", "did you mean 'tpu7x-64'"),
        ("h100", "did you mean 'h100x"),
        ("cpu-8", "no target 'cpu-8'"),
        ("", "no target ''"),
        ("h100-8", "no target 'h100-8': write h100x64 for 64 GPUs, 8 to a node"),
        (
            "v5px64",
            "'v5px64': .*v5p-64 .*v5p-64x4 .*v5p:4x4x4",
        ),
        ("v5e-64x2x2", "v5e:8x8 for a shape"),
        ("v5p-63", "no v5p slice has 63 chips, the nearest are v5p-32 and v5p-64"),
        ("v5p-0", "no target 'v5p-0'"),
        ("v5p-64x0", "no target 'v5p-64x0'"),
        ("v5e-12", "the nearest are v5e-8 and v5e-16"),
        ("v5e-512", "v5e-256 and .*v5e-256x2"),
        ("v5p:3x4x4", "v5p .*2x2x1, .*6144 chips"),
        ("v5p:4x4", "no v5p slice has this shape"),
        ("v5p:0x4x4", "no v5p slice has this shape"),
        ("v5e:4x16", "v5e .*1x1"),
        ("h100x12", "GPUs come 8 to a node .*, the nearest are h100x8 and h100x16"),
        ("h100x0", "no target .h100x0.: write h100x64"),
    ],
)
def test_mistakes_name_what_exists(name, message):
    with pytest.raises(UserError, match=message):
        load_target(name)


# Missing compilers.


@pytest.mark.parametrize(
    ("installed", "name", "message"),
    [
        ({}, "v5p-64", r"needs libtpu, the TPU compiler: .* or 'jax\[tpu\]=="),
        ({}, "v5p-64", r"target v5p-64 .*: pip install 'jaxpar\[rehearse\]', or"),
        (
            {},
            "h100x8",
            r"CUDA plugin.*: pip install .*, or jax-cuda12-plugin==.* jax-cuda12-pjrt==",
        ),
        (
            {"jax-cuda12-plugin": "0.9.9"},
            "h100x8",
            r"of jax's own version.*found jax-cuda12-plugin 0.9.9\): pip install",
        ),
    ],
)
def test_a_missing_compiler_is_named_with_its_install(installed, name, message, monkeypatch):
    monkeypatch.setattr(
        topologies,
        "versions",
        lambda names: {name: installed[name] for name in names if name in installed},
    )
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(UserError, match=message):
        load_target(name).devices()
    assert "pip install" in compilers()["tpu"]


def test_a_compiler_that_does_not_start_is_an_error_of_one_line(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("INVALID_ARGUMENT: no such thing\nand more")

    monkeypatch.setattr(topologies, "versions", dict.fromkeys)
    monkeypatch.setattr(jax_topologies, "get_topology_desc", refuse)
    with pytest.raises(
        UserError, match=r"compiler for v5p-64 does not start \(INVALID_ARGUMENT: no such thing\)"
    ):
        load_target("v5p-64").devices()


# Real compilers.

TPU_SPECS = {
    "v4-64": MeshSpec(fsdp=16, tensor=4),
    "v5e-8": MeshSpec(fsdp=4, tensor=2),
    "v5p-64": MeshSpec(fsdp=16, tensor=4),
    "v6e-256": MeshSpec(fsdp=64, tensor=4),
    "tpu7x-64": MeshSpec(fsdp=32, tensor=4),
    "v5p-128x4": MeshSpec(fsdp=16, tensor=8, dcn=DcnSpec(data=4)),
}
GPU_SPECS = {
    "a100x16": MeshSpec(fsdp=8, dcn=DcnSpec(data=2)),
    "h100x64": MeshSpec(fsdp=16, tensor=4),
    "h200x8": MeshSpec(fsdp=4, tensor=2),
    "b200x8": MeshSpec(fsdp=8),
}


def assert_places_fill_the_target(name: str, spec: MeshSpec) -> None:
    """A mesh over all devices, each in a seat of its own, and no seat empty."""
    target = load_target(name)
    devices = target.devices()
    assert devices[0].device_kind in target.hardware.device_kinds
    check_mesh(spec, target)
    seats = places(make_mesh(spec, devices).devices.flat, target)
    assert len(set(seats)) == len(seats) == target.device_count
    assert {seat.slice for seat in seats} == set(range(target.slices))
    shape = target.hardware.ici.shape
    assert {len(seat.coords) for seat in seats} == {len(shape)}
    assert (
        tuple(max(side) + 1 for side in zip(*(seat.coords for seat in seats), strict=True)) == shape
    )
    assert {seat.core for seat in seats} == set(range(target.hardware.devices_per_chip))


@needs_libtpu
@pytest.mark.parametrize("name", TPU_SPECS)
def test_tpus_that_are_not_here(name, capfd):
    assert_places_fill_the_target(name, TPU_SPECS[name])
    assert capfd.readouterr().err == ""


@needs_cuda
@pytest.mark.parametrize(
    "name",
    some(GPU_SPECS, len(GPU_SPECS), pytest.mark.long),
)
def test_gpus_that_are_not_here(name):
    assert_places_fill_the_target(name, GPU_SPECS[name])


@needs_cuda
def test_nodes_are_the_outer_blocks_of_a_mesh():
    target = load_target("h100x16")
    mesh = make_mesh(
        MeshSpec(fsdp=8, dcn=DcnSpec(data=2)),
        target.devices(),
    )
    assert [seat.slice for seat in places(mesh.devices.flat, target)] == [0] * 8 + [1] * 8


@needs_libtpu
def test_tensor_parallelism_gets_a_ring_of_the_torus():
    target = load_target("v5p-64")
    mesh = make_mesh(MeshSpec(fsdp=16, tensor=4), target.devices())
    seats = places(mesh.devices.flat, target)
    for start in range(0, 64, 4):
        along_x = [seat.coords for seat in seats[start : start + 4]]
        assert [x for x, _, _ in along_x] == [0, 1, 2, 3]
        assert len({coords[1:] for coords in along_x}) == 1


@needs_libtpu
def test_a_mesh_axis_may_be_split_over_physical_ones_inside_slices():
    target = load_target("v5p-64x4")
    mesh = make_mesh(
        MeshSpec(fsdp=8, tensor=8, dcn=DcnSpec(data=4)),
        target.devices(),
    )
    assert mesh.devices.shape == (1, 4, 8, 1, 1, 8)


STARTED = """
import jax
import jax.numpy as jnp

before = jax.devices()
x = jnp.ones((256, 256)) + 1

from jaxpar import rehearse

report = rehearse.step(jax.jit(lambda x: jnp.tanh(x @ x)), x, target="TARGET", say=print)
assert report["memory"]["categories"]["x"] == 4 * 256 * 256
assert report["time"]["step"] > 0
assert jax.devices() == before
print(float(x.sum()))
"""
"""A user's script, which has JAX start and takes an array before it rehearses."""


@pytest.mark.parametrize("told", [{}, {"JAX_PLATFORMS": ""}], ids=["nothing", "an empty text"])
@pytest.mark.parametrize(
    "name", [pytest.param("h100x8", marks=MARKS["cuda"]), pytest.param("v5e-8", marks=MARKS["tpu"])]
)
def test_a_script_in_which_jax_has_started_rehearses(name, told):
    """Told of no platform, JAX leaves out the CUDA plugin where libraries to run it are missing."""
    untold = {
        key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "TPU_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", STARTED.replace("TARGET", name)],
        env=untold | told,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"compiling for {name}"
    assert done.stdout.splitlines()[-1] == "131072.0"


def test_a_plugin_that_was_left_out_is_loaded_for_its_compiler_alone(monkeypatch, caplog):
    """JAX has started without it; here it brings no topologies after all."""
    checks = []

    def describe(**_):
        raise NotImplementedError("topology not implemented for cuda")

    def initialize():
        checks.append(os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"])

    plugin = SimpleNamespace(initialize=initialize)
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", raising=False)
    monkeypatch.setattr(runtime, "_device_files", lambda platform: True)
    monkeypatch.setattr(topologies, "versions", lambda names: dict.fromkeys(names, jax.__version__))
    monkeypatch.setattr(jax_topologies, "get_topology_desc", describe)
    monkeypatch.setattr(private, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, private._CUDA_PLUGINS[0], plugin)
    with pytest.raises(UserError, match=r"for cuda.*JAX_PLATFORMS=cpu"):
        load_target("h100x8").devices()
    assert checks == ["1"], "the plugin would look for libraries that only running needs"
    assert "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ
    assert caplog.messages == [
        "JAX had started without its CUDA plugin: it is loaded now, to compile for h100x8 alone"
    ]


def assert_compiles(name: str, spec: MeshSpec) -> None:
    """A sharded gradient through the target's own compiler, to a scheduled program for it."""
    target = load_target(name)
    mesh = make_mesh(spec, target.devices())

    def array(rows: int, columns: int, *names) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (rows, columns), jnp.bfloat16, sharding=NamedSharding(mesh, P(*names))
        )

    def loss(weight_DF, x_BD):
        return jnp.mean(jnp.square(jax.nn.gelu(x_BD @ weight_DF)).astype(jnp.float32))

    args = (
        array(512, 2048, "fsdp", "tensor"),
        array(
            4096,
            512,
            ("data", "fsdp"),
            None,
        ),
    )
    compiled = (
        jax.jit(jax.grad(loss)).trace(*args).lower(lowering_platforms=(target.platform,)).compile()
    )
    text = compiled.as_text()
    assert "is_scheduled=true" in text
    assert ("estimated_cycles" in text) == (target.platform == "tpu")
    assert compiled.memory_analysis().argument_size_in_bytes < target.hardware.hbm_bytes


@needs_libtpu
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "v5p-64" else pytest.mark.long) for name in TPU_SPECS],
)
def test_a_sharded_program_compiles_for_every_tpu(name):
    assert_compiles(name, TPU_SPECS[name])


@needs_cuda
@pytest.mark.parametrize(
    "name",
    some(GPU_SPECS, len(GPU_SPECS), pytest.mark.long),
)
def test_a_sharded_program_compiles_for_every_gpu(name):
    assert_compiles(name, GPU_SPECS[name])


@needs_cuda
@pytest.mark.slow
def test_a_t4_multiplies_bfloat16_in_float32_and_attends_without_a_kernel(caplog):
    """It is older than Triton's and cuDNN's kernels, and than bfloat16: what docs/targets.md says
    of it.
    """
    (device,) = load_target("t4x1").devices()
    assert not has_bfloat16(device) and has_bfloat16(load_target("l4x1").devices()[0])
    layout = Layout(make_mesh(MeshSpec(), [device]), ShardingRules(), compute="bfloat16")
    with caplog.at_level("INFO"):
        name, why = choose_attention(
            Split(layout, "ring", "auto", 0.0),
            Causal(),
            256,
            64,
        )
    assert name == "chunked"
    assert why == (
        "cudnn: compute capability 7.5 is below 8.0; pallas_gpu: compute capability 7.5 is "
        "below 8.0"
    )
    where = NamedSharding(layout.mesh, P())
    heads = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16, sharding=where)

    def attend(q, k, v):
        return attention(q, k, v, Causal(), layout=layout).sum()

    lowered = (
        jax.jit(jax.grad(attend)).trace(heads, heads, heads).lower(lowering_platforms=("cuda",))
    )
    products = re.findall(
        r"custom-call\((.*?)\), custom_call_target=.__cublas", text := lowered.compile().as_text()
    )
    types = dict(re.findall(r"%([\w.-]+) = \(?(\w+)\[", text))
    assert products, "nothing is multiplied"
    assert {types[name.strip(" %")] for operands in products for name in operands.split(",")} == {
        "f32"
    }


@needs_libtpu
def test_the_environment_is_left_as_it_was():
    before = dict(os.environ)
    load_target("v5p-8").devices()
    changed = {key for key in before | dict(os.environ) if before.get(key) != os.environ.get(key)}
    assert changed <= {"TPU_LIBRARY_PATH"}  # which libtpu's own package sets


# Meshes that do not fit.


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        (
            "v5p-64",
            MeshSpec(fsdp=16, tensor=8),
            r"needs 128 devices, v5p-64 has 64 \(4x4x4\): try mesh.fsdp=8",
        ),
        (
            "tpu7x-64",
            MeshSpec(fsdp=16, tensor=4),
            r"needs 64 devices, tpu7x-64 has 128 \(64 chips\): try mesh.fsdp=32",
        ),
        (
            "v5p-64x4",
            MeshSpec(fsdp=64, tensor=4),
            "v5p-64x4 is 4 slices",
        ),
        (
            "v5p-64x4",
            MeshSpec(fsdp=64, dcn=DcnSpec(data=2)),
            r"spans 2 of them \(mesh.dcn data=2\): try mesh.dcn.data=4",
        ),
        (
            "v5p-64",
            MeshSpec(fsdp=32, dcn=DcnSpec(data=2)),
            "v5p-64 is one slice, and .*leave out the mesh.dcn sizes",
        ),
        (
            "h100x64",
            MeshSpec(fsdp=8, dcn=DcnSpec(data=4)),
            "h100x64 is 8 nodes",
        ),
        ("h100x64", MeshSpec(fsdp=8), "h100x64 has 64"),
    ],
)
def test_a_mesh_that_does_not_fit(name, spec, message):
    with pytest.raises(UserError, match=message):
        check_mesh(spec, load_target(name))


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("h100x64", MeshSpec(fsdp=64)),
        ("h100x64", MeshSpec(fsdp=8, dcn=DcnSpec(data=8))),
        ("v5p-64", MeshSpec(fsdp=-1, tensor=4)),
        (
            "v5p-64x4",
            MeshSpec(data=2, fsdp=32, dcn=DcnSpec(data=2, fsdp=2)),
        ),
    ],
)
def test_a_mesh_that_fits(name, spec):
    check_mesh(spec, load_target(name))
    assert load_target(name).device_count % math.prod(vars(spec.dcn).values()) == 0


@needs_libtpu
def test_a_plan_is_made_on_a_target():
    config = load_config("llama3_8b")
    spec = load_mesh_preset("v5p-64")[0]
    plan = make_plan(dataclasses.replace(config, mesh=spec), load_target("v5p-64").devices())
    assert plan.mesh.size == 64
