"""What a collective moves and between which devices, in the compilers' many ways of writing it; TPU
slices.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpar.hlo.program.parse import parse_module
from jaxpar.hlo.program.tasks import Collective
from jaxpar.hlo.work.collectives import Devices, collective_of, devices_of, paired_send

DATA = Path(__file__).parents[1] / "data" / "hlo"
PAIRS = ((0, 1), (2, 3))


def collective(line: str, computations: str = "", devices: int = 4) -> Collective | None:
    """Of one instruction over `%a`, f32[8,4] (128 bytes)."""
    module = parse_module(
        f"HloModule m, num_partitions={devices}\n{computations}\nENTRY %main () -> f32[] {{\n"
        "  %a = f32[8,4]{1,0} parameter(0)\n  %b = bf16[16]{0} parameter(1)\n  ROOT %x = "
        f"{line}\n}}\n"
    )
    entry = module.computations["main"]
    return collective_of(
        module,
        Devices((tuple(range(devices)),)),
        entry,
        entry.instructions["x"],
    )


GROUPS = "replica_groups={{0,1},{2,3}}"


@pytest.mark.parametrize(
    ("line", "kind", "size"),
    [
        (f"f32[16,4]{{1,0}} all-gather(%a), {GROUPS}, dimensions={{0}}", "all-gather", 256),
        (
            f"(f32[8,4], f32[16,4]) all-gather-start(%a), {GROUPS}, dimensions={{0}}",
            "all-gather",
            256,
        ),
        (
            f"f32[4,4]{{1,0}} reduce-scatter(%a), {GROUPS}, dimensions={{0}}, to_apply=%add",
            "reduce-scatter",
            128,
        ),
        (f"((f32[8,4]), f32[4,4]) reduce-scatter-start(%a), {GROUPS}", "reduce-scatter", 128),
        (f"f32[8,4]{{1,0}} all-reduce(%a), {GROUPS}, to_apply=%add", "all-reduce", 128),
        (f"f32[8,4]{{1,0}} all-reduce-start(%a), {GROUPS}, to_apply=%add", "all-reduce", 128),
        (f"f32[8,4]{{1,0}} all-to-all(%a), {GROUPS}, dimensions={{0}}", "all-to-all", 128),
        (f"f32[8,4]{{1,0}} ragged-all-to-all(%a, %a, %b, %b, %b, %b), {GROUPS}", "all-to-all", 128),
        (
            "f32[8,4]{1,0} collective-permute(%a), source_target_pairs={{0,1},{2,3}}",
            "ppermute",
            128,
        ),
        (
            "(f32[8,4], f32[8,4]) collective-permute-start(%a), source_target_pairs={{0,1},{2,3}}",
            "ppermute",
            128,
        ),
        (
            "(f32[8,4]) send(%a, %b), "
            'frontend_attributes={_xla_source_target_pairs="{{0,1},{2,3}}"}',
            "ppermute",
            128,
        ),
    ],
)
def test_kinds_and_bytes(line: str, kind: str, size: int) -> None:
    assert collective(line) == Collective(kind, PAIRS, size, "f32")  # pyright: ignore[reportArgumentType]


def test_several_arrays_at_once_and_the_type_of_most_bytes() -> None:
    found = collective(f"(f32[8,4], bf16[16]) all-reduce(%a, %b), {GROUPS}, to_apply=%add")
    assert found == Collective("all-reduce", PAIRS, 128 + 32, "f32")


def test_no_groups_mean_all_devices() -> None:
    found = collective("f32[8,4]{1,0} all-reduce(%a), replica_groups={}, to_apply=%add")
    assert found == Collective("all-reduce", ((0, 1, 2, 3),), 128, "f32")


def test_groups_that_nobody_can_read_are_empty() -> None:
    found = collective("f32[8,4]{1,0} all-reduce(%a), replica_groups=[?], to_apply=%add")
    assert found == Collective("all-reduce", (), 128, "f32")


def test_what_is_none() -> None:
    assert collective("f32[8,4]{1,0} negate(%a)") is None
    assert collective("(f32[8,4], u32[], token[]) send(%a, %b), is_host_transfer=true") is None


WRAPPED = """
%wrapped (a: f32[8,4]) -> %s {
  %%a = f32[8,4]{1,0} parameter(0)
  %%i = s32[] constant(0)
  %%r = f32[8,4]{1,0} all-reduce(%%a), replica_groups={{0,1},{2,3}}, to_apply=%%add
  %s
}
"""


def test_an_all_reduce_fused_with_the_slice_of_its_part_is_a_reduce_scatter() -> None:
    inner = (
        WRAPPED.replace("%%", "%")
        .replace("%s", "f32[4,4]", 1)
        .replace(
            "%s", "ROOT %d = f32[4,4]{1,0} dynamic-slice(%r, %i, %i), dynamic_slice_sizes={4,4}"
        )
    )
    found = collective("f32[4,4]{1,0} fusion(%a), kind=kCustom, calls=%wrapped", inner)
    assert found == Collective("reduce-scatter", PAIRS, 128, "f32")


def test_an_all_reduce_in_an_async_start_is_one() -> None:
    inner = (
        WRAPPED.replace("%%", "%")
        .replace("%s", "f32[8,4]", 1)
        .replace("%s", "ROOT %n = f32[8,4]{1,0} bitcast(%r)")
    )
    found = collective("((f32[8,4]), f32[8,4]) async-start(%a), calls=%wrapped", inner)
    assert found == Collective("all-reduce", PAIRS, 128, "f32")


def megascale(target: str, transfer: str) -> str:
    return (
        "(f32[8,4], u32[], token[]) send(%a, %b), channel_id=2, is_host_transfer=true, "
        "frontend_attributes={"
        f'_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target={target},'
        f'_xla_megascale_transfer_type="{transfer}"}}'
    )


@pytest.mark.parametrize(
    ("target", "transfer", "kind", "groups", "size"),
    [
        ('"{1,2}x{0:1}"', "ALL_REDUCE", "all-reduce", ((0, 2), (1, 3)), 128),
        ("{{100000,200000},{100001,200001}}", "ALL_GATHER", "all-gather", ((0, 2), (1, 3)), 256),
        ("{{100000,200001}}", "REDUCE_SCATTER", "reduce-scatter", ((0, 3),), 128),
        ("{{100000->200000},{200000->100000}}", "ONE_TO_ONE", "ppermute", ((0, 2), (2, 0)), 128),
    ],
)
def test_traffic_between_tpu_slices(
    target: str, transfer: str, kind: str, groups: tuple[tuple[int, ...], ...], size: int
) -> None:
    module = parse_module(
        "HloModule m, num_partitions=2\n\nENTRY %main () -> f32[] {\n"
        f"  %a = f32[8,4]{{1,0}} parameter(0)\n  ROOT %x = {megascale(target, transfer)}\n}}\n"
    )
    devices = Devices(((0, 1), (2, 3)))
    entry = module.computations["main"]
    found = collective_of(module, devices, entry, entry.instructions["x"])
    assert found == Collective(kind, groups, size, "f32")  # pyright: ignore[reportArgumentType]


def test_devices_of_slices_that_are_not_one_after_another() -> None:
    module = parse_module(
        "HloModule m, num_partitions=2\n\nENTRY %main () -> f32[] {\n  ROOT %a = f32[] "
        "parameter(0)\n}\n"
    )
    devices = devices_of(module, (0, 1, 0, 1))
    assert devices == Devices(((0, 2), (1, 3)))
    assert devices.everywhere(((0, 1),)) == ((0, 2), (1, 3))
    assert devices_of(module, None) == devices_of(module, (0, 1)) == Devices(((0, 1),)), (
        "GPU nodes share one program"
    )


def test_a_real_all_reduce_over_four_slices() -> None:
    """Within a slice a reduce-scatter and an all-gather, between slices an all-reduce of the
    quarter.
    """
    module = parse_module((DATA / "tpu_between_slices.txt").read_text())
    devices = devices_of(module, [place // 4 for place in range(16)])
    entry = module.computations[module.entry]
    found = {i.name: collective_of(module, devices, entry, i) for i in entry.instructions.values()}
    send = found["send"]
    scatter = found["fusion"]
    assert send is not None and scatter is not None
    assert (send.kind, len(send.groups), send.groups[0]) == ("all-reduce", 8, (0, 4))
    assert (scatter.kind, len(scatter.groups), scatter.groups[2]) == ("reduce-scatter", 8, (4, 6))
    assert (
        scatter.bytes == pytest.approx(512 * 512 * 32 * 4, rel=0.01)
        and send.bytes == scatter.bytes // 2 - 6 * 4096
    )
    receive = entry.instructions["recv-done"]
    assert (
        paired_send(entry, receive) == "send"
        and paired_send(entry, entry.instructions["send-done"]) == "send"
    )
