"""Multiply-adds: dots and convolutions against counting, fusions, the libraries' calls."""

from __future__ import annotations

from itertools import product
from math import prod
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from jaxpar.hlo.program.parse import parse_module
from jaxpar.hlo.work.flops import Multiplied, backend_config, work_of

DATA = Path(__file__).parents[1] / "data" / "hlo"


def work(lines: str, name: str = "", computations: str = "") -> Multiplied:
    module = parse_module(f"HloModule m\n{computations}\nENTRY %main () -> f32[] {{\n{lines}\n}}\n")
    entry = module.computations["main"]
    return work_of(module, entry, entry.instructions[name or entry.root])


def test_a_batched_dot() -> None:
    found = work(
        "  %a = bf16[5,7,11]{2,1,0} parameter(0)\n  %b = f32[5,11,13]{2,1,0} parameter(1)\n"
        "  ROOT %d = f32[5,7,13]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
        "rhs_batch_dims={0}, rhs_contracting_dims={1}"
    )
    assert found == Multiplied(2 * 5 * 7 * 13 * 11, "bf16")


def test_two_contracted_dims_and_none() -> None:
    lines = "  %a = f32[3,4]{1,0} parameter(0)\n  %b = f32[3,4]{1,0} parameter(1)\n"
    assert work(lines + "  ROOT %d = f32[] dot(%a, %b), lhs_contracting_dims={0,1}").flops == 2 * 12
    assert work(lines + "  ROOT %d = f32[3,4,3,4]{3,2,1,0} dot(%a, %b)").flops == 2 * 144


def test_elementwise_work_is_not_counted() -> None:
    assert (
        work("  %a = f32[3]{0} parameter(0)\n  ROOT %d = f32[3]{0} exponential(%a)") == Multiplied()
    )


positive = st.integers(1, 6)


@given(
    size=positive,
    window=positive,
    stride=st.integers(1, 3),
    before=st.integers(0, 6),
    after=st.integers(0, 6),
    lhs_dilation=st.integers(1, 4),
    rhs_dilation=st.integers(1, 3),
)
def test_a_convolution_counts_what_it_meets(
    size: int,
    window: int,
    stride: int,
    before: int,
    after: int,
    lhs_dilation: int,
    rhs_dilation: int,
) -> None:
    wide = (size - 1) * lhs_dilation + 1 + before + after
    reach = (window - 1) * rhs_dilation + 1
    if wide < reach:
        return
    out = (wide - reach) // stride + 1
    met = 0
    for o, w in product(range(out), range(window)):
        position = o * stride + w * rhs_dilation - before
        met += 0 <= position <= (size - 1) * lhs_dilation and position % lhs_dilation == 0
    found = work(
        f"  %a = f32[2,{size},3]{{2,1,0}} parameter(0)\n  %k = f32[{window},3,5]{{2,1,0}} "
        "parameter(1)\n"
        f"  ROOT %c = f32[2,{out},5]{{2,1,0}} convolution(%a, %k), window={{size={window} "
        f"stride={stride} "
        f"pad={before}_{after} lhs_dilate={lhs_dilation} rhs_dilate={rhs_dilation}}}, "
        "dim_labels=b0f_0io->b0f"
    )
    assert found.flops == 2 * 2 * 3 * 5 * met


def test_a_batched_dot_as_the_tpu_compiler_writes_it() -> None:
    """The batch is a window over an operand with holes: each output meets its own element only."""
    found = work(
        "  %a = bf16[8,128,64]{2,1,0} parameter(0)\n  %b = bf16[8,64,32]{2,1,0} parameter(1)\n"
        "  ROOT %c = f32[8,128,32]{2,1,0} convolution(%a, %b), window={size=8 stride=7 pad=0_0 "
        "lhs_dilate=8}, "
        "dim_labels=0bf_0io->0bf"
    )
    assert found.flops == 2 * 8 * 128 * 64 * 32


def test_a_plain_matmul_as_a_convolution_without_window() -> None:
    found = work(
        "  %a = bf16[128,64]{1,0} parameter(0)\n  %b = bf16[32,64]{1,0} parameter(1)\n"
        "  ROOT %c = f32[128,32]{1,0} convolution(%a, %b), dim_labels=bf_oi->bf"
    )
    assert found == Multiplied(2 * 128 * 64 * 32, "bf16")


def test_a_fusion_has_what_is_inside_at_any_depth() -> None:
    inner = """
%deep (a: f32[4,8], b: f32[8,2]) -> f32[4,2] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,2]{1,0} parameter(1)
  ROOT %d = f32[4,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused (a: f32[4,8], b: f32[8,2]) -> f32[4,2] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,2]{1,0} parameter(1)
  %f = f32[4,2]{1,0} fusion(%a, %b), kind=kOutput, calls=%deep
  %g = f32[4,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %s = f32[4,2]{1,0} add(%f, %g)
}
"""
    lines = "  %a = f32[4,8]{1,0} parameter(0)\n  %b = f32[8,2]{1,0} parameter(1)\n"
    found = work(
        lines + "  ROOT %x = f32[4,2]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused",
        computations=inner,
    )
    assert found == Multiplied(2 * 2 * 4 * 8 * 2, "f32")


def excerpt(name: str, instruction: str) -> Multiplied:
    module = parse_module((DATA / f"{name}.txt").read_text())
    entry = module.computations[module.entry]
    return work_of(module, entry, entry.instructions[instruction])


def test_cublas() -> None:
    """Batch 16: [512, 256] times [256, 128], the result beside a workspace of bytes."""
    assert excerpt("gpu_cublas", "custom-call.1") == Multiplied(2 * 16 * 512 * 256 * 128, "f32")


def test_cudnn_attention_causal_forward_and_backward() -> None:
    """B 2, S 1024, H 4, h 64; the half above the diagonal is skipped."""
    pairs = 2 * 4 * 1024 * 1024 * 64
    assert excerpt("gpu_attention", "dot_product_attention_fwd.5").flops == 4 * pairs / 2
    assert excerpt("gpu_attention", "dot_product_attention_bwd.8").flops == 10 * pairs / 2


def test_cudnn_attention_in_a_sliding_window() -> None:
    """A query sees 256 keys, the first ones fewer: 256 x 1024 - 256^2 / 2 pairs of the 1024^2."""
    text = (DATA / "gpu_attention.txt").read_text()
    assert '"sliding_window_length": 0' in text
    module = parse_module(
        text.replace('"sliding_window_length": 0', '"sliding_window_length": 256')
    )
    computation = module.computations[module.entry]
    work = work_of(module, computation, computation.instructions["dot_product_attention_fwd.5"])
    assert work.flops == 4 * 2 * 4 * 64 * (256 * 1024 - 256**2 / 2)


def test_real_fusions() -> None:
    assert excerpt("gpu_all_gather", "gemm_fusion_dot.57").flops == 2 * prod((2048, 256, 512))
    assert excerpt("cpu_fusions", "ynn_fusion").flops == 2 * prod((512, 256, 64))
    assert excerpt("tpu_async_fusion", "fusion.551").flops == 2 * prod((2048, 512, 128))


def test_a_backend_config_that_is_not_json() -> None:
    module = parse_module((DATA / "gpu_cublas.txt").read_text())
    call = module.computations[module.entry].instructions["custom-call.1"]
    assert backend_config(call)["gemm_backend_config"]
    for text in ("", "backend_config={grid_x = 8 : i32}", 'backend_config="plain"'):
        odd = parse_module(
            "HloModule m\n\nENTRY %main () -> f32[] {\n  ROOT %c = f32[] custom-call(), "
            f"{text}\n}}\n"
        )
        assert backend_config(odd.computations["main"].instructions["c"]) == {}
