"""Types of machines: every figure with its source, and a target in one has its network and host."""

from __future__ import annotations

import re

import pytest

from jaxpar.base.errors import UserError
from jaxpar.base.hardware import CHIPS, load_chip
from jaxpar.base.machine_types import MACHINES, MachineType, load_machine_type
from jaxpar.base.toml import from_toml, presets
from jaxpar.rehearse.targets import load_target

TYPES = presets(MACHINES)


@pytest.mark.parametrize("name", TYPES)
def test_a_type_has_chips_that_there_are_and_names_its_sources(name: str):
    text = TYPES[name].read_text(encoding="utf-8")
    machine = from_toml(MachineType, text, name)
    assert machine.chips and set(machine.chips) <= set(presets(CHIPS))
    assert not any(load_chip(chip).slices.name for chip in machine.chips)
    figures = [line for line in text.splitlines() if re.match(r"(?!chips)\w+ = ", line)]
    assert all(re.search(r"# (.*\[\d\]|assumed)", line) for line in figures)
    assert all("e9" in line or "e12" in line or "gpus" in line for line in figures)


def test_a_target_has_the_network_and_the_host_of_its_machines():
    own = load_target("h100x64")
    slow = load_target("h100x64@a3-highgpu-8g")
    assert slow.name == "h100x64@a3-highgpu-8g" and slow.topology == own.topology
    assert slow.hardware.dcn_bandwidth == own.hardware.dcn_bandwidth / 4
    assert slow.hardware.hbm_bandwidth == own.hardware.hbm_bandwidth
    few = load_target("h100x1@16-virtual-cores").hardware
    assert few.host_memory_bandwidth < own.hardware.host_memory_bandwidth / 4
    assert few.dcn_bandwidth == own.hardware.dcn_bandwidth, "where it says nothing, the chip's"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("h100x64@a3-highgpu-9g", "did you mean 'a3-highgpu-8g'"),
        ("h100x8@p4de.24xlarge", "has a100, and no"),
        ("h100x2@16-virtual-cores", "has 1 GPU"),
        ("h100x8@", "no type of machine"),
        ("v5p-64@a3-highgpu-8g", "those of GPUs"),
    ],
)
def test_a_machine_that_there_is_not_is_refused(name: str, says: str):
    with pytest.raises(UserError, match=re.escape(says)):
        load_target(name)


def test_a_type_is_found_by_name_alone():
    assert load_machine_type("a3-megagpu-8g", "h100").dcn_bandwidth == 25e9
