"""The mesh presets: every figure positive and sourced, meshes that fit their chips, and look-ups by device kind."""

import math
import re

import pytest

from jaxpar.config import flatten, presets
from jaxpar.errors import UserError
from jaxpar.hardware import Hardware, hardware_of, load_mesh_preset, peak_flops
from jaxpar.mesh import MeshSpec, devices_needed

MESHES = presets("jaxpar.meshes")
ACCELERATORS = [name for name in MESHES if not name.startswith("cpu")]
# What is said of the system, not of one chip.
SYSTEM = {"chips", "ici.shape", "ici.wraps"}

every_mesh = pytest.mark.parametrize("name", MESHES)
every_accelerator = pytest.mark.parametrize("name", ACCELERATORS)


def test_the_presets():
    assert set(MESHES) == {"cpu_8", "v5e_8", "v5p_64", "v6e_256", "h100_8", "h100_64"}


@every_mesh
def test_the_mesh_uses_every_chip(name):
    spec, hardware = load_mesh_preset(name)
    assert hardware.chips == devices_needed(spec) == int(name.rpartition("_")[2])
    assert hardware.chips % hardware.chips_per_host == 0
    assert spec.platform in ("cpu", "tpu", "gpu")
    assert spec.distributed == (hardware.chips > hardware.chips_per_host)


@every_accelerator
def test_figures_are_positive(name):
    hardware = load_mesh_preset(name)[1]
    figures = {key: value for key, value in flatten(hardware).items() if isinstance(value, int | float)}
    missing = {key for key, value in figures.items() if value <= 0}
    assert missing <= {"peak_flops.float32", "peak_flops.float8"}
    assert hardware.peak_flops.bfloat16 > 1e14
    assert hardware.hbm_bandwidth > hardware.ici.axis_bandwidth > hardware.dcn_bandwidth


@every_accelerator
def test_the_interconnect_spans_what_the_mesh_spans(name):
    spec, hardware = load_mesh_preset(name)
    ici = hardware.ici
    assert math.prod(ici.shape) * math.prod(vars(spec.dcn).values()) == hardware.chips
    assert len(ici.wraps) == len(ici.shape)
    assert ici.kind == "switch" or ici.links == 2 * len(ici.shape)


def test_v5p_sends_180_gb_a_second_along_an_axis():
    assert load_mesh_preset("v5p_64")[1].ici.axis_bandwidth == 180e9


def test_nvlink_is_450_gb_a_second_a_direction():
    assert load_mesh_preset("h100_8")[1].ici.axis_bandwidth == 450e9


@every_mesh
def test_opens_with_what_it_is(name):
    assert re.match(r"# \w+", MESHES[name].read_text(encoding="utf-8"))


@every_accelerator
def test_every_figure_names_its_source(name):
    text = MESHES[name].read_text(encoding="utf-8")
    opening, _, hardware = text.partition("[hardware]\n")
    sources = set(re.findall(r"^# (\[\d\]) .*https://", opening, re.MULTILINE))
    figures = [line for line in hardware.splitlines() if "=" in line and not line.startswith(("chip ", "chips "))]
    cited = [set(re.findall(r"\[\d\]", line.partition("  # ")[2])) for line in figures]
    assert all(cited), [line for line, found in zip(figures, cited, strict=True) if not found]
    assert set.union(*cited) == sources


def test_no_figure_for_simulated_devices():
    assert hardware_of("cpu").chips == 8
    assert peak_flops("cpu", "float32") is None
    assert peak_flops("cpu", "bfloat16") is None


@pytest.mark.parametrize(
    ("device_kind", "bfloat16"),
    [
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
    ],
)
def test_look_up_by_device_kind(device_kind, bfloat16):
    assert device_kind in hardware_of(device_kind).device_kinds
    assert peak_flops(device_kind, "bfloat16") == bfloat16


def test_unknown_chips_and_dtypes_have_no_figure():
    assert hardware_of("TPU v99") is None
    assert peak_flops("TPU v99", "bfloat16") is None
    assert peak_flops("TPU v5", "float32") is None
    assert peak_flops("TPU v5", "complex64") is None


def test_presets_of_one_chip_agree_on_it():
    seen = {}
    for name in MESHES:
        hardware = load_mesh_preset(name)[1]
        chip = {key: value for key, value in flatten(hardware).items() if key not in SYSTEM}
        for kind in hardware.device_kinds:
            assert seen.setdefault(kind, chip) == chip


def test_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'h100_8'"):
        load_mesh_preset("h100-8")


def test_a_file_may_leave_the_hardware_out(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[mesh]\ntensor = 2\n")
    assert load_mesh_preset(str(path)) == (MeshSpec(tensor=2), Hardware())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[hardware]\nhbm_byte = 1\n", "did you mean 'hbm_bytes'"),
        ("[hardware.peak_flops]\nbfloat61 = 1e12\n", "did you mean 'bfloat16'"),
        ('[hardware]\nhbm_bytes = "80 GB"\n', "hardware.hbm_bytes is a whole number"),
        ("[mesh\n", "not valid TOML"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_mesh_preset(str(path))
