"""A step that does not fit: what compilers say, and what to try."""

from __future__ import annotations

import jax
import pytest
from experiments import experiment_of

from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError
from jaxpar.base.jax_compat import compiler_message, kernel_memory_message
from jaxpar.base.layout.mesh import make_mesh
from jaxpar.rehearse import compiled
from jaxpar.rehearse.of_config import advice
from jaxpar.rehearse.report.memory import DoesNotFit, needs_and_has, refusal
from jaxpar.rehearse.targets import load_target
from jaxpar.train.experiments import make_plan

GIB = 2**30
EARLY = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
    "temporaries (23.50G) exceeds "
    "available HBM (15.75G)."
)
LATE = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
    "hbm. Used 16.25G of 15.75G "
    "hbm. Exceeded hbm capacity by 512.00M.\n\nTotal hbm usage >= 16.50G"
)
# Splash with tiles too large for heads of 256 in float32, compiled for v5e and for v4; operands and
# layouts left out.
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


def test_what_compilers_say():
    assert needs_and_has(EARLY) == (round(23.5 * GIB), round(15.75 * GIB))
    assert needs_and_has(LATE) == (round(16.25 * GIB), round(15.75 * GIB))
    assert needs_and_has("Used 900.5M of 15.75G hbm") == (round(900.5 * 2**20), round(15.75 * GIB))
    assert needs_and_has("INTERNAL: something else, 3G of it") is None


def test_a_refusal_says_by_how_much_and_what_to_try():
    over = (
        "this step does not fit v5e-8: it needs 23.50 GiB a device, 7.75 GiB more than its "
        "15.75 GiB"
    )
    assert refusal(EARLY, "v5e-8") == over
    assert refusal(EARLY, "v5e-8", "try less") == f"{over}; try less"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"mesh.fsdp": 8},
            "try memory.budget=auto, memory.policy=full, mesh.fsdp=16, train.accumulation=4; ",
        ),
        (
            {"mesh.fsdp": 8, "memory.policy": "full", "train.batch": 16},
            "try memory.budget=auto, mesh.fsdp=16; ",
        ),
        (
            {"mesh.fsdp": 4, "mesh.stage": 2, "pipeline.microbatches": 2},
            "try pipeline.stash=stage, memory.policy=full, mesh.fsdp=8, pipeline.microbatches=4; ",
        ),
    ],
)
def test_what_is_worth_a_try(changes, said):
    config = override(Config(), {"train.batch": 32, "train.accumulation": 2} | changes)
    found = advice(experiment_of(config, make_plan(config, jax.devices())), "tpu")
    assert found.startswith(said) and found.endswith(" over all 8 devices")


def test_another_refusal_is_passed_on_in_a_line():
    message = refusal("\nINTERNAL: Mosaic failed to compile\n  more\n", "v5e-8")
    assert message == "the compiler for v5e-8 refuses this step: INTERNAL: Mosaic failed to compile"
    assert len(refusal("x" * 5000, "v5e-8")) < 400


@pytest.mark.parametrize(
    ("message", "needs"), [(KERNEL, "21.83M"), (KERNEL_V4, "18.71M")], ids=["v5e", "v4"]
)
def test_a_kernel_that_is_too_large_is_named_with_what_it_may_have(message: str, needs: str):
    said = refusal(message, "v5e-8")
    assert said == (
        "the compiler for v5e-8 refuses this step: the kernel splash_mha_fwd_residuals.1 asks "
        f"for {needs} of vmem and "
        "may have 16.00M; for attention, kernels.attention=chunked needs none"
    )
    assert not kernel_memory_message(EARLY) and not kernel_memory_message(LATE)


def test_a_heading_is_passed_on_with_what_it_announces():
    assert (
        compiler_message("INTERNAL: E9: New:\n\n  no such layout\nmore")
        == "INTERNAL: E9: New: no such layout"
    )
    assert compiler_message("") == ""
    assert "16032 rows on a device; of a vocabulary's, try model.vocab_multiple=128 times" in (
        compiler_message(
            "UNIMPLEMENTED: No feasible span count for single input all reduce scatter fusion "
            "with concat shape f32[16032,8192]{1,0:T(8,128)}"
        )
    )


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (EARLY, DoesNotFit),
        (LATE, DoesNotFit),
        (KERNEL, UserError),
    ],
)
def test_a_refusal_for_the_devices_memory_is_told_from_others(
    message: str, kind: type, monkeypatch
) -> None:
    def refuses(*_: object) -> None:
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(compiled, "lower_for", refuses)
    target = load_target("v5e-8")
    with pytest.raises(UserError) as caught:
        compiled.compile_for(
            jax.jit(lambda x: x),
            (),
            make_mesh(data=8),
            target,
        )
    assert type(caught.value) is kind
