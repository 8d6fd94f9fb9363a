"""Bytes really read and written: slices of stacked weights, updates in place, what lies on the chip
or the host.
"""

from __future__ import annotations

from pathlib import Path

from jaxpar.hlo.program.parse import parse_module
from jaxpar.hlo.work.memory_traffic import result_of, traffic

DATA = Path(__file__).parents[1] / "data" / "hlo"
WHOLE = 32 * 64 * 4
SLICE = 64 * 4  # f32[32,64] and one row of it


def bytes_of(lines: str, computations: str = "") -> int:
    module = parse_module(
        f"HloModule m, is_scheduled=true\n{computations}\nENTRY %main () -> f32[] {{\n{lines}\n}}\n"
    )
    entry = module.computations["main"]
    return traffic(module, entry, entry.instructions[entry.root])


def fused(body: str, result: str = "f32[32,64]") -> int:
    """A fusion of a stack f32[32,64] (%w), a row f32[1,64] (%r) and an offset (%i)."""
    computation = f"""
%fused (w: f32[32,64], r: f32[1,64], i: s32[]) -> {result} {{
  %w = f32[32,64]{{1,0}} parameter(0)
  %r = f32[1,64]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
{body}
}}
"""
    return bytes_of(
        "  %w = f32[32,64]{1,0} parameter(0)\n  %r = f32[1,64]{1,0} parameter(1)\n  %i = s32[] "
        "parameter(2)\n"
        f"  ROOT %f = {result} fusion(%w, %r, %i), kind=kLoop, calls=%fused",
        computation,
    )


def test_elementwise_reads_everything_and_writes_everything() -> None:
    assert (
        bytes_of("  %a = f32[32,64]{1,0} parameter(0)\n  ROOT %n = f32[32,64]{1,0} negate(%a)")
        == 2 * WHOLE
    )


def test_a_slice_reads_what_it_returns() -> None:
    line = "  %a = f32[32,64]{1,0} parameter(0)\n  %i = s32[] parameter(1)\n"
    assert (
        bytes_of(line + "  ROOT %s = f32[1,64]{1,0} slice(%a), slice={[3:4], [0:64]}") == 2 * SLICE
    )
    assert (
        bytes_of(
            line
            + "  ROOT %s = f32[1,64]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,64}"
        )
        == 2 * SLICE + 8
    )


def test_an_update_writes_what_it_is_given() -> None:
    lines = (
        "  %a = f32[32,64]{1,0} parameter(0)\n  %r = f32[1,64]{1,0} parameter(1)\n  %i = "
        "s32[] parameter(2)\n"
    )
    assert (
        bytes_of(lines + "  ROOT %u = f32[32,64]{1,0} dynamic-update-slice(%a, %r, %i, %i)")
        == 2 * SLICE
    )


def test_a_gather_reads_rows_and_their_numbers() -> None:
    lines = "  %t = f32[1000,64]{1,0} parameter(0)\n  %ids = s32[8,1]{1,0} parameter(1)\n"
    gathered = 8 * 64 * 4
    assert (
        bytes_of(lines + "  ROOT %g = f32[8,64]{1,0} gather(%t, %ids), slice_sizes={1,64}")
        == 2 * gathered + 32
    )


def test_a_scatter_changes_rows() -> None:
    lines = (
        "  %t = f32[1000,64]{1,0} parameter(0)\n  %ids = s32[8,1]{1,0} parameter(1)\n"
        "  %d = f32[8,64]{1,0} parameter(2)\n"
    )
    rows = 8 * 64 * 4
    assert (
        bytes_of(lines + "  ROOT %s = f32[1000,64]{1,0} scatter(%t, %ids, %d), to_apply=%add")
        == 3 * rows + 32
    )


def test_a_fusion_that_slices_reads_the_slice() -> None:
    body = "  ROOT %s = f32[1,64]{1,0} dynamic-slice(%w, %i, %z), dynamic_slice_sizes={1,64}"
    assert fused(body, "f32[1,64]") == SLICE + SLICE + 4


def test_a_slice_behind_elementwise_work_still_reads_the_slice() -> None:
    body = (
        "  %c = f32[32,64]{1,0} negate(%w)\n  %b = f32[32,64]{1,0} bitcast(%c)\n"
        "  %s = f32[1,64]{1,0} dynamic-slice(%b, %i, %z), dynamic_slice_sizes={1,64}\n"
        "  ROOT %m = f32[1,64]{1,0} multiply(%s, %r)"
    )
    assert fused(body, "f32[1,64]") == SLICE + SLICE + 4 + SLICE


def test_a_slice_before_a_reduction_is_read_and_no_more() -> None:
    body = (
        "  %s = f32[1,64]{1,0} dynamic-slice(%w, %i, %z), dynamic_slice_sizes={1,64}\n"
        "  ROOT %d = f32[1]{0} reduce(%s, %z), dimensions={1}, to_apply=%add"
    )
    assert fused(body, "f32[1]") == SLICE + 4 + 4


def test_two_readers_of_different_slices_and_of_the_whole() -> None:
    one = (
        "  %s = f32[1,64]{1,0} slice(%w), slice={[0:1], [0:64]}\n"
        "  %t = f32[1,64]{1,0} slice(%w), slice={[1:2], [0:64]}\n"
    )
    assert fused(one + "  ROOT %a = f32[1,64]{1,0} add(%s, %t)", "f32[1,64]") == 2 * SLICE + SLICE
    both = (
        one + "  %n = f32[32,64]{1,0} negate(%w)\n  ROOT %o = (f32[1,64], f32[32,64]) tuple(%s, %n)"
    )
    assert fused(both, "(f32[1,64], f32[32,64])") == WHOLE + SLICE + WHOLE


def test_a_fusion_that_updates_in_place_touches_the_update_only() -> None:
    body = "  ROOT %u = f32[32,64]{1,0} dynamic-update-slice(%w, %r, %i, %z)"
    assert fused(body) == SLICE + SLICE + 4
    viewed = (
        "  %b = f32[32,64]{1,0} bitcast(%w)\n  %u = f32[32,64]{1,0} dynamic-update-slice(%b, "
        "%r, %i, %z)\n"
        "  ROOT %v = f32[32,64]{1,0} bitcast(%u)"
    )
    assert fused(viewed) == SLICE + SLICE + 4


def test_one_update_among_several_results() -> None:
    body = (
        "  %u = f32[32,64]{1,0} dynamic-update-slice(%w, %r, %i, %z)\n  %n = f32[1,64]{1,0} "
        "negate(%r)\n"
        "  ROOT %t = (f32[32,64], f32[1,64]) tuple(%u, %n)"
    )
    assert fused(body, "(f32[32,64], f32[1,64])") == SLICE + SLICE + 4 + SLICE


def test_an_update_of_something_computed_is_not_in_place() -> None:
    body = (
        "  %n = f32[32,64]{1,0} negate(%w)\n  ROOT %u = f32[32,64]{1,0} "
        "dynamic-update-slice(%n, %r, %i, %z)"
    )
    assert fused(body) == WHOLE + SLICE + 4 + WHOLE


def test_an_operand_that_nobody_reads() -> None:
    assert fused("  ROOT %n = f32[1,64]{1,0} negate(%r)", "f32[1,64]") == 2 * SLICE


def test_on_a_tpu_only_hbm_counts_elsewhere_all_but_the_host() -> None:
    vmem = (
        "  %a = f32[32,64]{1,0:T(8,128)S(1)} parameter(0)\n  ROOT %n = "
        "f32[32,64]{1,0:T(8,128)} negate(%a)"
    )
    assert bytes_of(vmem) == WHOLE
    gpu = "  %a = f32[32,64]{1,0:S(1)} parameter(0)\n  ROOT %n = f32[32,64]{1,0} negate(%a)"
    assert bytes_of(gpu) == 2 * WHOLE
    host = "  %a = f32[32,64]{1,0:S(5)} parameter(0)\n  ROOT %n = f32[32,64]{1,0} copy(%a)"
    assert bytes_of(host) == WHOLE


def test_what_the_start_of_a_pair_makes() -> None:
    lines = "  %a = f32[32,64]{1,0:T(8,128)} parameter(0)\n"
    copy = lines + (
        "  ROOT %c = (f32[32,64]{1,0:T(8,128)S(1)}, f32[32,64]{1,0:T(8,128)}, u32[]) copy-start(%a)"
    )
    assert bytes_of(copy) == WHOLE
    cut = "((f32[32,64]{1,0:T(8,128)}), f32[1,64]{1,0:T(8,128)S(1)}, s32[])"
    assert bytes_of(lines + f"  ROOT %c = {cut} slice-start(%a), slice={{[3:4], [0:64]}}") == SLICE
    gather = "(f32[32,64]{1,0}, f32[128,64]{1,0})"
    assert (
        bytes_of(lines + f"  ROOT %c = {gather} all-gather-start(%a), dimensions={{0}}")
        == WHOLE + 4 * WHOLE
    )


def test_real_fusions_of_a_scan_over_layers() -> None:
    """The stacked f32[3,256,64] weight is read one layer at a time, the saved activations are
    written one layer.
    """
    module = parse_module((DATA / "cpu_fusions.txt").read_text())
    entry = module.computations[module.entry]
    layer = 256 * 64 * 4
    saved = 16 * 32 * 64 * 4
    index = 4
    found = {
        i.name: traffic(module, entry, i)
        for i in entry.instructions.values()
        if i.opcode == "fusion"
    }
    assert found["dynamic-slice_bitcast_fusion"] == 2 * layer + index
    assert found["bitcast_dynamic-update-slice_fusion"] == 2 * saved + index


def test_a_collective_that_goes_on_during_a_fusion_is_not_the_fusions_traffic() -> None:
    module = parse_module((DATA / "tpu_async_fusion.txt").read_text())
    entry = module.computations[module.entry]
    start = entry.instructions["async-collective-start.8"]
    during = entry.instructions["fusion.551"]
    assert str(result_of(during).parts[0]) == "f32[4,512,1,128]"
    assert traffic(module, entry, start) == traffic(module, entry, during) == 0  # all of it in VMEM
