"""Options of the compiler: which a mesh gets, a user's words and tables, and what is refused before
a step compiles.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experiments import experiment_of
from tiers import needs_cuda, needs_libtpu

from jaxpar.base.compiler import (
    option_notes,
    options_text,
    read_options,
    repeats_to_the_bit,
    step_options,
)
from jaxpar.base.config import Config, override, parse
from jaxpar.base.errors import UserError
from jaxpar.base.hardware import CHIPS, load_chip
from jaxpar.base.jax_compat import (
    SCOPED_VMEM,
    TPU_FLAGS,
    UNSAFE_OPTIONS,
    options_of,
    sparse_core_all_gathers,
)
from jaxpar.base.layout.mesh import MeshSpec, make_mesh
from jaxpar.base.toml import presets, to_toml
from jaxpar.kernels.attention import libraries
from jaxpar.kernels.attention.call import Call
from jaxpar.kernels.attention.kernel import AttentionRequest
from jaxpar.kernels.masks import Causal
from jaxpar.models import Model
from jaxpar.rehearse.targets import load_target
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_plan, plan_notes
from jaxpar.train.step import make_train_step, step_shapes

GPU_OPTION = "xla_gpu_all_reduce_combine_threshold_bytes"
TPUS = [name for name in presets(CHIPS) if load_chip(name).slices.name]


def here(devices: int = 1) -> Any:
    return make_mesh(MeshSpec(data=devices), jax.devices()[:devices])


def absent(platform: str, kind: str, devices: int) -> Any:
    """What is asked of a mesh of devices that are not here."""
    device = SimpleNamespace(platform=platform, device_kind=kind)
    return SimpleNamespace(devices=np.array([device] * devices, object), size=devices)


# A user's options.


def test_words_have_the_types_that_xla_takes() -> None:
    words = [
        "xla_a=true",
        "--xla_b=False",
        "xla_c=65536",
        "xla_d=1.5",
        "xla_e = some=text",
        "xla_f=",
    ]
    found = read_options(words)
    assert found == {
        "xla_a": True,
        "xla_b": False,
        "xla_c": 65536,
        "xla_d": 1.5,
        "xla_e": "some=text",
        "xla_f": "",
    }
    assert [type(value) for value in found.values()] == [bool, bool, int, float, str, str]
    assert options_text({"xla_a": True, "xla_c": 65536}) == "xla_a=true, xla_c=65536"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([3], 'are words, such as "xla_a=true", and 3 was given'),
        (["xla_a"], "'xla_a' is no option with its value: write xla_"),
        (["=5"], "'=5' is no option"),
        (["xla a=5"], "'xla a=5' is no option"),
        (["xla_a=1", "--xla_a=2"], "names xla_a twice"),
    ],
)
def test_a_word_of_another_form_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_options(words)


@pytest.mark.parametrize(
    "text",
    [
        f"[compiler.options]\n{GPU_OPTION} = 4194304\nxla_cpu_enable_fast_math = false\n",
        f"[compiler]\noptions = {{{GPU_OPTION} = 4194304, xla_cpu_enable_fast_math = false}}\n",
        f'[compiler]\noptions = ["{GPU_OPTION}=4194304", "xla_cpu_enable_fast_math=false"]\n',
    ],
    ids=["table", "inline table", "words"],
)
def test_a_file_has_them_as_a_table_or_as_words(text: str) -> None:
    config = parse(text)
    assert read_options(config.compiler.options) == {
        GPU_OPTION: 4194304,
        "xla_cpu_enable_fast_math": False,
    }
    assert parse(to_toml(config)) == config and hash(config)


def test_a_table_of_another_key_is_still_refused() -> None:
    with pytest.raises(UserError, match=r"data.mixture is a list of names"):
        parse("[data]\nmixture = {a = 1}\n")
    with pytest.raises(UserError, match=r"compiler.options.xla_a is one value, found \[1\]"):
        parse("[compiler.options]\nxla_a = [1]\n")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("xla_of_nobody=1", "XLA knows no option xla_of_nobody"),
        ("xla_gpu_of_nobody=true", "XLA knows no option xla_gpu_of_nobody"),
        (
            "xla_cpu_enable_fast_math=maybe",
            "xla_cpu_enable_fast_math takes a value of type bool, found maybe",
        ),
        (f"{GPU_OPTION}=1.5", f"{GPU_OPTION} takes a value of type int64, found 1.5$"),
        (f"{GPU_OPTION}=1_0", f"{GPU_OPTION} takes a value of type int64, found 1_0$"),
        (
            "xla_gpu_enable_latency_hiding_schedule=true",
            r"did you mean 'xla_gpu_enable_latency_hiding_scheduler'\?",
        ),
    ],
)
def test_what_xla_does_not_know_is_refused_in_a_line(word: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        step_options(here(), [word])
    assert str(caught.value).startswith("compiler.options: ") and "\n" not in str(caught.value)


def test_options_of_a_tpu_are_left_out_elsewhere_and_a_note_says_so() -> None:
    """A config for a TPU is verified and shown on CPUs, whose compiler has no such options."""
    words = (f"{SCOPED_VMEM}=1024", f"{GPU_OPTION}=5")
    assert step_options(here(), words) == {GPU_OPTION: 5}
    config = override(Config(), {"compiler.options": words})
    (note,) = plan_notes(experiment_of(config, make_plan(config, jax.devices()[:1])))
    assert note == f"compiler.options: {SCOPED_VMEM} left out, only TPUs' compiler has it"
    assert not option_notes(absent("tpu", "TPU v5", 4), words)


def test_the_training_step_is_compiled_with_them() -> None:
    small = {
        "model.layers": 1,
        "model.embed": 16,
        "model.heads": 2,
        "model.mlp": 16,
        "data.seq_len": 16,
    }
    config = override(
        Config(), small | {"train.batch": 2, "compiler.options": (f"{GPU_OPTION}=5",)}
    )
    plan = make_plan(config, jax.devices()[:1])
    model = Model(config.model)
    experiment = Experiment(config, model, plan)
    lowered = make_train_step(experiment).lower(*step_shapes(experiment))
    assert options_of(lowered) == {GPU_OPTION: 5}


def test_options_of_a_jitted_function_are_found() -> None:
    lowered = jax.jit(jnp.sin, compiler_options={GPU_OPTION: 5}).lower(1.0)
    assert options_of(lowered) == {GPU_OPTION: 5}
    assert options_of(jax.jit(jnp.sin).lower(1.0)) == {}


def test_an_option_that_another_version_renamed_is_named_as_this_one_has_it() -> None:
    old = "xla_gpu_enable_pipelined_reduce_scatter=true"
    new = "xla_gpu_pipeline_reduce_scatter=COLLECTIVE_PIPELINING_MODE_ON"
    here_it_is, elsewhere = (new, old) if jax.__version_info__ >= (0, 12) else (old, new)
    assert step_options(here(), [here_it_is])
    with pytest.raises(UserError, match=f"other versions of XLA call it {here_it_is}$"):
        step_options(here(), [elsewhere])


# The library's own.


@needs_libtpu
@pytest.mark.parametrize("name", TPUS)
def test_a_tpus_step_gets_what_its_chips_file_says(name: str) -> None:
    chip = load_chip(name)
    target = load_target(f"{name}:{chip.slices.shapes[1]}")
    mesh = make_mesh(MeshSpec(data=-1), target.devices())
    found = step_options(mesh)
    assert found.get(SCOPED_VMEM, 0) == chip.tpu_compiler.scoped_vmem_kib
    assert all(option.startswith(TPU_FLAGS) for option in found)
    fused = [name for name in UNSAFE_OPTIONS if name in found]
    by_sparse_cores = sparse_core_all_gathers().name in found
    assert by_sparse_cores == (name in ("v5p", "v6e")) == chip.tpu_compiler.sparse_core_all_gathers
    assert fused == (list(UNSAFE_OPTIONS) if name == "v5e" else []), "unsafe on all chips but v5e"


def test_one_gpu_and_a_cpu_get_none() -> None:
    assert step_options(absent("gpu", "NVIDIA H100 80GB HBM3", 1)) == {} == step_options(here(2))


@pytest.mark.parametrize(
    ("kind", "warned"), [("TPU v5", True), ("TPU v5 lite", False), ("TPU of nobody", True)]
)
def test_a_users_option_that_its_makers_call_unsafe_is_named(kind: str, warned: bool) -> None:
    notes = option_notes(absent("tpu", kind, 4), [f"{UNSAFE_OPTIONS[0]}=true"])
    assert bool(notes) == warned
    assert all("unsafe" in note and UNSAFE_OPTIONS[0] in note for note in notes)
    assert not option_notes(absent("tpu", kind, 4), [f"{UNSAFE_OPTIONS[0]}=false"])


@needs_libtpu
def test_a_tpus_compiler_takes_them_and_a_users_win() -> None:
    mesh = make_mesh(MeshSpec(fsdp=8), load_target("v6e-8").devices())
    assert step_options(mesh, [f"{SCOPED_VMEM}=20480"])[SCOPED_VMEM] == 20480
    with pytest.raises(
        UserError, match=rf"no option xla_tpu_scoped_vmem_limit_kb \(did you mean '{SCOPED_VMEM}'"
    ):
        step_options(mesh, ["xla_tpu_scoped_vmem_limit_kb=20480"])
    with pytest.raises(UserError, match=f"{SCOPED_VMEM} takes no value lots"):
        step_options(mesh, [f"{SCOPED_VMEM}=lots"])


@needs_cuda
def test_a_gpus_compiler_takes_them_and_a_users_win() -> None:
    mesh = make_mesh(MeshSpec(data=8), load_target("h100x8").devices())
    jitted = jax.jit(jnp.sin, compiler_options=step_options(mesh))
    jitted.trace(
        jax.ShapeDtypeStruct(
            (8,),
            jnp.float32,
            sharding=jax.NamedSharding(mesh, jax.P("data")),
        )
    ).lower(lowering_platforms=("cuda",)).compile()
    assert step_options(mesh, [f"{GPU_OPTION}=7"])[GPU_OPTION] == 7


@pytest.mark.parametrize(
    ("platform", "flags", "repeats"),
    [
        ("cpu", "", True),
        ("tpu", "", True),
        ("gpu", "", False),
        ("gpu", "--xla_gpu_exclude_nondeterministic_ops=true", True),
        ("gpu", "--a=b --xla_gpu_exclude_nondeterministic_ops --c=d", True),
        ("gpu", "--xla_gpu_deterministic_ops=1", True),
        ("gpu", "--xla_gpu_exclude_nondeterministic_ops=false", False),
        ("gpu", "--xla_gpu_deterministic_ops_of_another_name=true", False),
    ],
)
def test_a_gpu_repeats_to_the_bit_where_xla_is_told_to(
    platform: str, flags: str, repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert repeats_to_the_bit(platform) == repeats
    call = (np.zeros((1, 8, 2, 64), jnp.bfloat16),) * 2
    why = libraries.refuse_cudnn(AttentionRequest(*call, Causal(), Call()), "gpu")
    assert ("repeat to the bit" in why) == (platform == "gpu" and repeats)
