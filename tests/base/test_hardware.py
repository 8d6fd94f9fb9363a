"""Chips and mesh presets: every figure positive and sourced, meshes that fit their chips, look-ups
by device kind.
"""

import re

import pytest

from jaxpar.base.errors import UserError
from jaxpar.base.hardware import (
    CHIPS,
    Board,
    Hardware,
    chip_of,
    hardware_of,
    load_chip,
    load_mesh_preset,
    peak_flops,
)
from jaxpar.base.layout.mesh import MeshSpec, devices_needed
from jaxpar.base.prices import AttentionShare, Prices
from jaxpar.base.toml import flatten, presets

MESHES = presets("jaxpar.meshes")
ACCELERATORS = [name for name in MESHES if not name.startswith("cpu")]
ALL_CHIPS = presets(CHIPS)
GPUS = [name for name in ALL_CHIPS if not load_chip(name).slices.name]
# What is said of the system, not of one chip.

every_mesh = pytest.mark.parametrize("name", MESHES)
every_accelerator = pytest.mark.parametrize("name", ACCELERATORS)
every_chip = pytest.mark.parametrize("name", ALL_CHIPS)


def test_the_presets():
    assert set(MESHES) == {"cpu_8", "v5e_8", "v5p_64", "v6e_256", "h100_8", "h100_64"}
    assert set(ALL_CHIPS) == {
        "v4",
        "v5e",
        "v5p",
        "v6e",
        "tpu7x",
        "a100",
        "h100",
        "h200",
        "b200",
        "l4",
        "t4",
    }


@every_mesh
def test_the_mesh_uses_every_chip(name):
    spec, hardware = load_mesh_preset(name)
    chips = devices_needed(spec)
    a_host = hardware.chips_per_host or 8
    assert chips == int(name.rpartition("_")[2])
    assert chips % a_host == 0
    assert spec.platform in ("cpu", "tpu", "gpu")
    assert spec.distributed == (chips > a_host)


@every_chip
def test_figures_are_positive(name):
    hardware = load_chip(name).hardware
    figures = {
        key: value for key, value in flatten(hardware).items() if isinstance(value, int | float)
    }
    missing = {key for key, value in figures.items() if value <= 0}
    allowed = {"peak_flops.float8", "chips"} | (
        set() if name in GPUS else {"peak_flops.float32", "launch_overhead"}
    )
    # what a hidden collective costs is fitted, and a matrix unit has a width on TPUs
    allowed |= {"prices.hidden", "matrix_unit"} if name in GPUS else {"prices.hidden"}
    # of a host for which there is no source, the link's speed stands for it
    allowed |= {"host_memory_bandwidth", "host_flops"}
    if hardware.devices_per_chip == 1:
        allowed.add("ici.chip_bandwidth")
    if name == "tpu7x":
        allowed.add("peak_flops.int8")  # it has float8 in its place
    assert missing <= allowed
    # which multiplies it in float32
    assert hardware.peak_flops.bfloat16 > (8e12 if name == "t4" else 1e14)
    assert hardware.hbm_bandwidth > hardware.ici.axis_bandwidth > hardware.dcn_bandwidth > 1e9


@every_chip
def test_latencies_are_those_of_a_network(name):
    for protocol in load_chip(name).hardware.protocols:
        assert 1e-7 < protocol.hop < protocol.start < 1e-4
        assert protocol.hop < protocol.dcn_hop < 1e-3
        assert 0.4 < protocol.share <= 1


@pytest.mark.parametrize("name", GPUS)
def test_what_the_gpu_compiler_must_know_is_there(name):
    chip = load_chip(name).compiler
    assert all(value for value in flatten(chip).values())
    assert chip.shared_memory_per_block_optin <= chip.shared_memory_per_core < chip.l2_cache_size


@every_chip
def test_only_tpus_come_in_slices(name):
    slices = load_chip(name).slices
    assert (
        bool(slices.shapes) == bool(slices.most_chips) == bool(slices.vendor) == (name not in GPUS)
    )


@every_chip
def test_no_program_reaches_more_than_the_peak(name):
    prices = load_chip(name).hardware.prices
    shares = [prices.matmul, prices.matmul_float32, prices.memory]
    shares += [share for row in prices.attention for share in (row.forward, row.backward)]
    assert all(0.1 < share <= 1 for share in shares)
    assert 0 <= prices.hidden < 1


TABLE = Prices(
    attention=(
        AttentionShare("cudnn", 64, 1000, 0.25, 0.2),
        AttentionShare("cudnn", 64, 4000, 0.5, 0.4),
        AttentionShare("cudnn", 128, 4000, 0.6, 0.5),
    )
)


@pytest.mark.parametrize(
    ("head_dim", "tokens", "forward"),
    [
        (64, 1000, 0.25),
        (64, 100, 0.25),
        (64, 8000, 0.5),
        (64, 2000, 1 / 2.6666667),  # a third of the way from 4 to 2 is left of 1/1000 to 1/4000
        (80, 4000, 0.5),
        (128, 1, 0.6),
        (96, 4000, 0.6),  # as near to both: the larger
    ],
)
def test_attention_between_two_lengths_is_linear_in_one_over_the_length(
    head_dim: int, tokens: int, forward: float
):
    found = TABLE.attention_share("cudnn", head_dim, tokens)
    assert found and found.forward == pytest.approx(forward)
    assert TABLE.attention_share("splash", head_dim, tokens) is None


def test_v5p_sends_180_gb_a_second_along_an_axis():
    assert load_mesh_preset("v5p_64")[1].ici.axis_bandwidth == 180e9


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("a100", 240e9),
        ("h100", 370.8e9),
        ("b200", 721.8e9),
    ],
)
def test_nvlink_gives_what_nccl_gets_of_it(name, bandwidth):
    assert load_chip(name).hardware.ici.axis_bandwidth == pytest.approx(bandwidth)


def test_half_of_a_tpu7x_chip_is_a_device():
    hardware = load_chip("tpu7x").hardware
    assert hardware.devices_per_chip * hardware.peak_flops.bfloat16 == 2307e12
    assert hardware.devices_per_chip * hardware.hbm_bytes == 192 * 2**30


FLOPS_A_CYCLE = {
    "v4": 2 * 4 * 2 * 128 * 128,
    "v5e": 4 * 2 * 128 * 128,
    "v5p": 2 * 4 * 2 * 128 * 128,
    "v6e": 4 * 2 * 256 * 256,
    "tpu7x": 4 * 2 * 256 * 256,
}
"""What the matrix units of one device do in a cycle, in bfloat16."""


@pytest.mark.parametrize("name", sorted(set(ALL_CHIPS) - set(GPUS)))
def test_a_tpus_clock_times_the_width_of_its_matrix_units_is_its_peak(name):
    """The compiler's cycles over the clock are seconds, and the peak is what MFU is a share of:
    they must be of one chip. Vendors print three digits: 0.25 %."""
    hardware = load_chip(name).hardware
    assert hardware.clock_hz * FLOPS_A_CYCLE[name] == pytest.approx(
        hardware.peak_flops.bfloat16, rel=0.0025
    )


@every_mesh
def test_opens_with_what_it_is(name):
    assert re.match(r"# \w+", MESHES[name].read_text(encoding="utf-8"))


@every_chip
def test_every_figure_names_its_source(name):
    text = ALL_CHIPS[name].read_text(encoding="utf-8")
    assert re.match(r"# \w+", text)
    opening, _, tables = text.partition("[hardware]\n")
    sources = set(re.findall(r"^# (\[\d+\]) ", opening, re.MULTILINE))
    told = re.split(r"^# \[\d+\] ", opening, flags=re.MULTILINE)[1:]
    places = ("https://", "docs/benchmarks_log.md", ".toml")
    assert all(any(place in source for place in places) for source in told)
    figures = [
        line
        for line in tables.splitlines()
        if "=" in line and not line.startswith(("chip ", "name "))
    ]
    cited = {line: set(re.findall(r"\[\d+\]", line.partition("  # ")[2])) for line in figures}
    assert not [line for line, found in cited.items() if not found and "# assumed" not in line]
    assert set.union(*cited.values()) == sources


@every_accelerator
def test_a_mesh_has_the_figures_of_its_chip(name):
    text = MESHES[name].read_text(encoding="utf-8")
    assert re.search(r'^chip = "\w+"$', text, re.MULTILINE)
    assert load_mesh_preset(name)[1] == load_chip(re.findall(r'chip = "(\w+)"', text)[0]).hardware


def test_no_figure_for_simulated_devices():
    assert hardware_of("cpu") is None and peak_flops("cpu", "float32") is None
    assert peak_flops("cpu", "bfloat16") is None


@pytest.mark.parametrize(
    ("device_kind", "bfloat16"),
    [
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU7x", 1153.5e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA B200", 2250e12),
        # other boards
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA GH200 480GB", 989.4e12),
    ],
)
def test_look_up_by_device_kind(device_kind, bfloat16):
    assert device_kind in hardware_of(device_kind).device_kinds
    assert peak_flops(device_kind, "bfloat16") == bfloat16


BOARDS = [board for name in ALL_CHIPS for board in load_chip(name).boards]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.chip)
def test_another_board_has_its_own_figures_and_the_chips_for_the_rest(board: Board) -> None:
    (kind,) = board.device_kinds
    chip = chip_of(kind)
    assert chip is not None
    hardware = chip.hardware
    like = next(load_chip(name).hardware for name in ALL_CHIPS if board in load_chip(name).boards)
    assert hardware == hardware_of(kind) != like
    assert hardware.chip == board.chip and hardware.device_kinds == (kind,)
    assert hardware.launch_overhead == like.launch_overhead
    peaks = vars(hardware.peak_flops)
    assert all(0 <= peaks[dtype] <= peak for dtype, peak in vars(like.peak_flops).items())
    assert {dtype for dtype in peaks if peaks[dtype]} == {
        dtype for dtype, peak in vars(like.peak_flops).items() if peak
    }
    assert hardware.hbm_bandwidth > hardware.ici.axis_bandwidth >= hardware.host_link_bandwidth / 2


def test_a_pcie_card_is_not_priced_as_if_nvlink_joined_all() -> None:
    pcie = hardware_of("NVIDIA A100 80GB PCIe")
    assert pcie is not None
    assert (pcie.ici.axis_bandwidth, pcie.hbm_bytes) == (32e9, 85_100_068_864)


def test_unknown_chips_and_dtypes_have_no_figure():
    assert hardware_of("TPU v99") is None
    assert peak_flops("TPU v99", "bfloat16") is None
    assert peak_flops("TPU v5", "float32") is None
    assert peak_flops("TPU v5", "complex64") is None


def test_no_device_kind_belongs_to_two_chips():
    chips = [load_chip(name) for name in ALL_CHIPS]
    kinds = [kind for chip in chips for kind in chip.hardware.device_kinds]
    kinds += [kind for chip in chips for board in chip.boards for kind in board.device_kinds]
    assert len(kinds) == len(set(kinds))


def test_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'h100_8'"):
        load_mesh_preset("h100-8")


def test_unknown_chip_names_the_nearest():
    with pytest.raises(UserError, match=r"no chip 'h10'.*did you mean 'h100'"):
        load_chip("h10")


def test_a_file_may_leave_the_hardware_out(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[mesh]\ntensor = 2\n")
    assert load_mesh_preset(str(path)) == (MeshSpec(tensor=2), Hardware())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('chip = "v5pp"\n', "mine.toml: no chip 'v5pp'.*did you mean 'v5p'.*there are a100"),
        ("chip = 5\n", "chip is a string"),
        ('chip = "v5p"\n[mehs]\ndata = 5\n', "unknown key mehs .*did you mean 'mesh'"),
        ("[mesh\n", "not valid TOML"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_mesh_preset(str(path))
