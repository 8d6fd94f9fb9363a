"""A step that does not fit: what compilers say, and what is advised."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import pytest

from jaxpar.base.config import Config, DataConfig, MemoryConfig, ModelConfig, TrainConfig
from jaxpar.base.jax_compat import compiler_message, kernel_memory_message
from jaxpar.base.mesh import MeshSpec, make_mesh
from jaxpar.base.plan import Overlap, Pipeline, Plan
from jaxpar.rehearse.of_config import step_sizes
from jaxpar.rehearse.report.memory_advice import StepSizes, advice, needs_and_has, refusal

pytestmark = pytest.mark.quick

GIB = 2**30
EARLY = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (23.50G) exceeds "
    "available HBM (15.75G)."
)
LATE = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 16.25G of 15.75G "
    "hbm. Exceeded hbm capacity by 512.00M.\n\nTotal hbm usage >= 16.50G"
)
# Splash with tiles too large for heads of 256 in float32, compiled for v5e and for v4; operands and layouts left out.
KERNEL = """RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:
Ran out of memory in memory space vmem while allocating on stack for %splash_mha_fwd_residuals.1 = \
(f32[2048,128]{1,0}, f32[2,8192,256]{2,1,0:T(8,128)S(1)}) custom-call(%fusion), \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 2048, \\"use_fused_bwd_kernel\\": false, \\"q_layout\\": 1}"
}}, metadata={op_name="jit(f)/jvp(splash)/pallas_call" stack_frame_id=11}. Scoped allocation with size 21.83M \
and limit 16.00M exceeded scoped vmem limit by 5.83M. It should not be possible to run out of scoped vmem -
See https://openxla.org/xla/errors/error_1001 for more details."""
KERNEL_V4 = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem. Used \
18.71M of 16.00M vmem. Exceeded vmem capacity by 2.71M.

Program vmem requirement 18.71M:
    scoped           18.71M

  Largest program allocations in vmem:

  1. Size: 5.58M
     XLA label: register allocator spill slots in HLO :: splash_mha_fwd_residuals.1
     Allocation type: scoped
     ==========================

  2. Size: 2.00M
     Operator: op_name="jit(f)/jvp(splash)/pallas_call"
     XLA label: splash_mha_fwd_residuals.1 = custom-call(constant.4.clone, fusion, ...(+4))
"""


def config_of(remat: str = "full", batch: int = 8, accumulation: int = 1) -> Config:
    return Config(
        model=ModelConfig("llama", embed=1024), data=DataConfig(seq_len=1024),
        train=TrainConfig(batch=batch, accumulation=accumulation),
        memory=MemoryConfig(policy=remat),  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


def categories(state: float, activations: float, temporaries: float = 0.0) -> Mapping[str, int]:
    """GiB; a quarter of the state parameters, half optimizer, a quarter gradients."""
    parts = {"parameters": state / 4, "optimizer": state / 2, "gradients": state / 4}
    return {name: round(GIB * size) for name, size in (parts | {
        "activations": activations, "temporaries": temporaries, "batch": 0.0,
    }).items()}  # fmt: skip


def sizes_of(config: Config, plan: Plan) -> StepSizes:
    return step_sizes(config, dataclasses.replace(plan, remat=config.memory.policy))


def advised(found: Mapping[str, int], has: float, config: Config, plan: Plan) -> list[str]:
    return advice(found, sum(found.values()), round(has * GIB), sizes_of(config, plan))


def first(has: float, config: Config, plan: Plan) -> str:
    """Of the advice for 16 GiB of state and one of activations."""
    return advised(categories(16, 1), has, config, plan)[0]


def test_what_compilers_say():
    assert needs_and_has(EARLY) == (round(23.5 * GIB), round(15.75 * GIB))
    assert needs_and_has(LATE) == (round(16.25 * GIB), round(15.75 * GIB))
    assert needs_and_has("Used 900.5M of 15.75G hbm") == (round(900.5 * 2**20), round(15.75 * GIB))
    assert needs_and_has("INTERNAL: something else, 3G of it") is None


def test_a_refusal_says_by_how_much_and_what_helps_most(plan_of):
    step = sizes_of(config_of(), plan_of(data=8))
    message = refusal(EARLY, "v5e-8", lambda needs, has: advice(categories(16, 1), needs, has, step))
    assert "\n" not in message
    assert message == (
        "this step does not fit v5e-8: it needs 23.50 GiB a device, 7.75 GiB more than its 15.75 GiB; "
        "saves about 8.00 GiB, enough: mesh.fsdp=2 mesh.data=4 (splits parameters, optimizer and gradients)"
    )
    assert refusal(EARLY, "v5e-8").endswith("more than its 15.75 GiB"), "of a function without a config"


def test_another_refusal_is_passed_on_in_a_line():
    message = refusal("\nINTERNAL: Mosaic failed to compile\n  more\n", "v5e-8")
    assert message == "the compiler for v5e-8 refuses this step: INTERNAL: Mosaic failed to compile"
    assert len(refusal("x" * 5000, "v5e-8")) < 400


@pytest.mark.parametrize(("message", "needs"), [(KERNEL, "21.83M"), (KERNEL_V4, "18.71M")], ids=["v5e", "v4"])
def test_a_kernel_that_is_too_large_is_named_with_what_it_may_have(message: str, needs: str):
    said = refusal(message, "v5e-8")
    assert said == (
        f"the compiler for v5e-8 refuses this step: the kernel splash_mha_fwd_residuals.1 asks for {needs} of vmem and "
        "may have 16.00M; for attention, kernels.attention=chunked needs none"
    )
    assert not kernel_memory_message(EARLY) and not kernel_memory_message(LATE)


def test_a_heading_is_passed_on_with_what_it_announces():
    assert compiler_message("INTERNAL: E9: New:\n\n  no such layout\nmore") == "INTERNAL: E9: New: no such layout"
    assert compiler_message("") == ""


def test_as_few_devices_as_are_enough_share_the_state(plan_of):
    plan = plan_of(data=8)
    assert first(10, config_of(), plan).startswith("saves about 8.00 GiB, enough: mesh.fsdp=2")
    assert first(6, config_of(), plan).startswith("saves about 12.00 GiB, enough: mesh.fsdp=4")
    most, more = advised(categories(160, 1), 16, config_of(), plan)
    assert most.startswith("saves about 140.00 GiB: mesh.fsdp=8 mesh.data=1")
    assert more == "2 times the chips (mesh.fsdp=16): parameters, optimizer and gradients are 160.00 GiB in all"


def test_slices_keep_their_copies(plan_of):
    config = dataclasses.replace(config_of(), mesh=MeshSpec(dcn=dataclasses.replace(MeshSpec().dcn, data=2)))
    (found,) = advised(categories(16, 1), 10, config, plan_of(data=4, fsdp=2))
    assert found.startswith("saves about 8.00 GiB, enough: mesh.fsdp=4 mesh.data=1")


def test_embed_must_divide(plan_of):
    narrow = dataclasses.replace(config_of(), model=ModelConfig("llama", embed=1026))
    assert first(10, narrow, plan_of(data=8)).startswith("saves about 8.00 GiB, enough: mesh.fsdp=2")
    assert first(6, narrow, plan_of(data=8)).startswith("saves about 8.00 GiB: mesh.fsdp=2")


def test_recomputation_and_accumulation(plan_of):
    plan = plan_of(fsdp=8)
    first, second = advised(categories(4, 20, 4), 16, config_of("none", batch=32), plan)
    assert first == "saves about 18.00 GiB, enough: memory.policy=full (keeps one array a layer)"
    assert second == "saves about 12.00 GiB, enough: train.accumulation=2 (2 times fewer at a time)"
    (only,) = advised(categories(4, 40), 16, config_of(batch=64, accumulation=2), plan)
    assert only == "saves about 30.00 GiB, enough: train.accumulation=8 (4 times fewer at a time)"


def test_the_most_helpful_comes_first(plan_of):
    lines = advised(categories(40, 4, 4), 16, config_of("none", batch=16), plan_of(data=8))
    assert [line.rpartition(": ")[2].partition("=")[0] for line in lines] == [
        "mesh.fsdp", "train.accumulation", "memory.policy"
    ]  # fmt: skip


def test_more_chips_are_asked_for_only_where_nothing_else_is_enough(plan_of):
    def asked(state: int, moving: int) -> str:
        (line,) = advised(categories(state, moving), 16, config_of(), plan_of(fsdp=8))
        return line.partition(":")[0]

    assert asked(40, 1) == "4 times the chips (mesh.fsdp=32)"
    assert asked(40, 8) == "4 times the chips (mesh.fsdp=16 mesh.tensor=2)", "8 times, if fsdp alone had to do it"
    assert asked(1, 20) == "2 times the chips (mesh.fsdp=8 mesh.tensor=2)"
    (never,) = advised(categories(1, 200), 16, config_of(), plan_of(fsdp=8))
    assert never == "200.00 GiB of activations do not fit whatever the mesh: shorten the sequences"


# Pipelines. LLaMA of 8 layers in 2 stages, over fsdp=2.


def piped(schedule: str, microbatches: int, remat: str = "full", stash: str = "stage", virtual: int = 1) -> Any:
    """A config and its plan, 2 sequences a microbatch."""
    pipeline: Any = Pipeline(schedule, microbatches, virtual, stash=stash)  # pyright: ignore[reportArgumentType]
    config = config_of(remat, 2 * microbatches)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, layers=8), pipeline=pipeline)
    mesh = make_mesh(MeshSpec(stage=2, fsdp=2), jax.devices()[:4])
    return config, Plan(mesh, remat=remat, pipeline=pipeline)  # pyright: ignore[reportArgumentType]


def settings(config: Config, plan: Plan) -> list[str]:
    """What is advised of a pipeline, without the reasons."""
    lines = advised(categories(1, 4), 4.5, config, plan)
    return [line.removeprefix("may help: ").partition(" (")[0] for line in lines]


def test_a_pipeline_keeps_less():
    (line,) = advised(categories(1, 1), 16, *piped("1f1b", 4, stash="blocks"))
    assert line == ("may help: pipeline.stash=stage (keeps the input of a stage, and runs its forward once more)")
    assert settings(*piped("1f1b", 4)) == []
    assert settings(*piped("1f1b", 4, "none")) == ["memory.policy=full"]


def test_another_schedule_keeps_fewer_microbatches():
    assert settings(*piped("gpipe", 16)) == settings(*piped("zb_h1", 4)) == ["pipeline.schedule=1f1b"]
    assert settings(*piped("looped", 16, virtual=2)) == ["pipeline.schedule=interleaved"]


def test_more_microbatches_of_fewer_sequences_and_not_more_accumulation():
    """They make the bubble smaller too."""
    config, plan = piped("1f1b", 4)
    config = dataclasses.replace(config, train=TrainConfig(batch=32))  # 4 sequences a device and microbatch
    assert settings(config, plan) == ["pipeline.microbatches=8"]


def test_domino_leaves_a_device_two_sequences(plan_of):
    config, plan = piped("1f1b", 4)
    config = dataclasses.replace(config, train=TrainConfig(batch=32))  # 4 sequences a device and microbatch
    plan = dataclasses.replace(plan, overlap=Overlap(domino="on"))
    assert settings(config, plan) == ["pipeline.microbatches=8"]
    config = dataclasses.replace(config, train=TrainConfig(batch=16))
    assert settings(config, plan) == []
    plan = dataclasses.replace(plan_of(fsdp=4), overlap=plan.overlap)
    (line,) = advised(categories(1, 8), 6, config, plan)
    assert "train.accumulation=2" in line


def test_a_pipeline_of_copies_splits_them_first():
    config, _ = piped("gpipe", 8)
    plan = Plan(make_mesh(MeshSpec(stage=2, data=2), jax.devices()[:4]), pipeline=config.pipeline)
    first, *others = advised(categories(4, 4), 6, config, plan)
    assert first.startswith("saves about 2.00 GiB, enough: mesh.fsdp=2 mesh.data=1")
    assert all(line.startswith("may help: ") for line in others)
