"""The layouts of `jaxpar.configs` are those that `jaxpar plan` finds, by the command that each file
names.
"""

import json
import re
from pathlib import Path

import pytest

from jaxpar.base.config import load_config
from jaxpar.base.hardware import usable_bytes
from jaxpar.base.layout.mesh import MESH_AXES, resolve
from jaxpar.base.toml import presets
from jaxpar.bench.presets import PRESET_TARGETS
from jaxpar.cli.main import main
from jaxpar.plan.candidate import candidate_of
from jaxpar.plan.closed_form import Estimate, estimate, step_shapes
from jaxpar.rehearse.targets import load_target

CONFIGS = presets("jaxpar.configs")
DEMONSTRATIONS = {"tiny", "tiny_moe", "tiny_bert", "shakespeare_char_cpu"}
"""Presets whose layout is there to be seen, or that have one device."""
BY_HAND = {"gpt2_124m"}
"""Presets whose layout was found by rehearsals: docs/benchmarks_log.md has how little a v5e gains by
keeping what GELU and norms make, which the closed forms do not know.
"""
SEARCHED = sorted(set(CONFIGS) - DEMONSTRATIONS - BY_HAND)
QUICK = {"gpt2_774m", "llama3_8b_1m"}
"""Presets of which a search takes a second."""
SLOWER = 1.05
"""What a preset may be slower than what is found: less than the closed forms are sure of, so that
another figure of a chip does not change every preset.
"""


def words_of(name: str) -> list[str]:
    """The words of the command by which a preset's layout was found."""
    text = CONFIGS[name].read_text(encoding="utf-8")
    found = re.search(r"^# Layout: +`jaxpar (plan [^`]+)`", text, re.MULTILINE)
    assert found is not None
    return found[1].split()


def own_plan(name: str) -> Estimate:
    """What the closed forms say of a preset as it is."""
    config = load_config(name)
    target = load_target(PRESET_TARGETS[name])
    sizes = resolve(config.mesh, target.device_count)
    mesh = tuple(sizes[axis] for axis in MESH_AXES)
    return estimate(step_shapes(config), candidate_of(config)._replace(mesh=mesh), target)


@pytest.mark.parametrize("name", SEARCHED)
def test_the_command_is_of_the_presets_own_target(name: str) -> None:
    command, preset, flag, target, *_ = words_of(name)
    assert (command, preset, flag, target) == ("plan", name, "--target", PRESET_TARGETS[name])


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SEARCHED],
)
def test_a_preset_is_what_its_command_finds(name: str, tmp_path: Path) -> None:
    file = tmp_path / "answer.json"
    quick = ["--rehearsals", "0", "--no-verify", "--json", str(file)]
    assert main([*words_of(name), *quick]) == 0
    best = json.loads(file.read_text(encoding="utf-8"))["best"]
    own = own_plan(name)
    assert own.seconds <= SLOWER * best["seconds"]
    target = load_target(PRESET_TARGETS[name])
    assert own.bytes.total <= usable_bytes(target.hardware.hbm_bytes, target.platform)
