"""Settings by name, what of them contradicts or changes nothing, and how gains are held against
their parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from jaxpar.base.config import Config, load_config, override
from jaxpar.base.errors import UserError
from jaxpar.base.toml import flatten
from jaxpar.plan.compositions import Study, compose
from jaxpar.plan.rehearsal_cache import Figures, digest_of
from jaxpar.plan.settings import (
    SETTINGS,
    NoEffect,
    Setting,
    apply_settings,
    find_settings,
    read_settings,
)

GIB = 2**30
FACTORS = {"remat": 0.8, "offload": 0.9, "bf16-moments": 1.1}
"""The speed of a made-up step with each setting."""


def chosen(*names: str) -> dict[str, Setting]:
    return {name: SETTINGS[name] for name in names}


def figures(speed: float, memory: int = GIB, usable: int = 16 * GIB) -> Figures:
    return Figures(
        step=1 / speed,
        tokens_per_second=1000 * speed,
        exposed=0.1,
        host_stall=0.0,
        mfu=None,
        memory=memory,
        usable=usable,
        fits=memory <= usable,
        compile_seconds=1.0,
    )


def has(config: Config, name: str) -> bool:
    values = flatten(config)
    return all(values[key] == value for key, value in SETTINGS[name].changes.items())


def measure(config: Config) -> Figures:
    """Speeds multiply, but that remat and offload together lose nothing more than remat alone."""
    speed = 1.0
    for name, factor in FACTORS.items():
        if has(config, name):
            speed *= factor
    if has(config, "remat") and has(config, "offload"):
        speed /= FACTORS["offload"]
    return figures(speed)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_of_the_table_names_keys_of_a_config(name: str) -> None:
    before = override(load_config("gpt2_124m"), {"mesh.tensor": 4, "memory.policy": "selective"})
    changed = override(before, SETTINGS[name].changes)
    assert changed != before and SETTINGS[name].text


def test_settings_that_contradict_each_other_are_refused_by_name() -> None:
    base = load_config("gpt2_124m")
    with pytest.raises(UserError, match="remat and dots contradict"):
        apply_settings(base, chosen("remat", "dots"))
    both = apply_settings(base, chosen("remat", "bf16-moments"))
    assert (both.memory.policy, both.memory.keep.up) == ("full", "policy")
    assert both.precision.moments == "bfloat16"


def test_a_setting_that_changes_nothing_is_said_to() -> None:
    base = override(load_config("llama32_1b"), {"memory.policy": "full"})
    with pytest.raises(NoEffect, match="remat changes nothing"):
        apply_settings(base, chosen("remat"))
    with pytest.raises(NoEffect, match=r"rings .*: overlap.gather has no .*mesh.tensor 4"):
        apply_settings(base, chosen("rings"))
    together = apply_settings(base, chosen("rings", "tensor"))
    assert together.overlap.gather == "ring" and together.mesh.tensor == 2


def test_settings_of_a_file_join_those_of_the_table(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[narrow.model]\nmasks = ["window(64)"]\n[narrow.memory]\npolicy = "full"\n')
    found = find_settings(["narrow", "domino"], read_settings(str(file)))
    changed = apply_settings(load_config("gpt2_124m"), {"narrow": found["narrow"]})
    assert (changed.model.masks, changed.memory.policy) == (("window(64)",), "full")
    with pytest.raises(UserError, match=r"no setting 'narow' \(did you mean 'narrow'\?\)"):
        find_settings(["narow"], found)
    with pytest.raises(UserError, match="domino is given twice"):
        find_settings(["domino", "domino"], {})
    file.write_text("narrow = 3\n")
    with pytest.raises(UserError, match="narrow is a table"):
        read_settings(str(file))


def test_a_pair_stands_beside_the_product_of_its_parts() -> None:
    study = compose(load_config("gpt2_124m"), chosen(*FACTORS), measure)
    gains = {gain.pair.name: gain for gain in study.gains()}
    assert gains["remat + bf16-moments"].speed == pytest.approx(0.88)
    assert gains["remat + bf16-moments"].verdict == "add up"
    together = gains["remat + offload"]
    assert (together.speed, together.speed_of_parts) == pytest.approx((0.8, 0.72))
    assert together.verdict == "gain more together"
    assert study.best is not None and study.best.name == "bf16-moments"
    assert study.search == "all 1 combinations of three and more were tried"


def test_what_is_refused_and_what_changes_nothing_keep_their_reason() -> None:
    base = override(load_config("llama32_1b"), {"memory.policy": "full"})
    said = list[str]()
    study = compose(base, chosen("remat", "offload", "dots"), measure, say=said.append)
    alone = {point.name: point for point in study.alone}
    assert alone["remat"].idle and study.speed(alone["remat"]) == 1.0
    pairs = {point.name: point for point in study.pairs}
    assert "contradict" in pairs["remat + dots"].refused
    assert len(said) == len(study.points) and any("contradict" in line for line in said)


def test_a_setting_that_compiles_to_the_same_program_is_told() -> None:
    def compiled(config: Config) -> Figures:
        """The compiler makes nothing of the precision of moments."""
        made = "a" if has(config, "remat") else "b"
        return replace(measure(config), program=made)

    said = list[str]()
    names = ("remat", "bf16-moments")
    study = compose(load_config("gpt2_124m"), chosen(*names), compiled, say=said.append)
    same = {point.name: point.same_as for point in study.points}
    assert same == {
        "base": "",
        "remat": "",
        "bf16-moments": "base",
        "remat + bf16-moments": "remat",
    }
    assert sum("changed nothing: the program of base" in line for line in said) == 1
    assert all(not point.same_as for point in compose(Config(), {}, measure).points)


def test_the_best_fits_and_keeps_to_the_loss() -> None:
    base = load_config("gpt2_124m")

    def sized(config: Config) -> Figures:
        """Without remat a step is faster and does not fit."""
        return measure(config) if has(config, "remat") else figures(2.0, memory=20 * GIB)

    def loss(config: Config) -> float:
        return 3.5 if has(config, "bf16-moments") else 3.0

    names = chosen("remat", "bf16-moments")
    assert not compose(base, names, sized).base.fits
    assert _best(compose(base, names, sized)) == "remat + bf16-moments"
    assert _best(compose(base, names, sized, loss, loss_within=0.1)) == "remat"


def _best(study: Study) -> str:
    assert study.best is not None
    return study.best.name


def test_greedy_follows_the_pairs_and_says_so() -> None:
    """Of seven settings that each gain, the search comes to all seven in few steps."""
    keys = {
        "a": {"memory.loss_mib": 300},
        "b": {"precision.moments": "bfloat16"},
        "c": {"precision.params": "bfloat16"},
        "d": {"precision.gradients": "bfloat16"},
        "e": {"memory.optimizer": "offload"},
        "f": {"overlap.domino": "on"},
        "g": {"model.masks": ["window(64)"]},
    }
    settings = {name: Setting(name, changes) for name, changes in keys.items()}

    def gaining(config: Config) -> Figures:
        values: Mapping[str, object] = flatten(config)
        count = sum(
            values[key] in (value, tuple(value) if isinstance(value, list) else value)
            for changes in keys.values()
            for key, value in changes.items()
        )
        return figures(1.1**count)

    study = compose(load_config("gpt2_124m"), settings, gaining)
    assert study.best is not None and len(study.best.settings) == 7
    assert study.search.startswith("greedy") and len(study.larger) <= 5 * 3


def test_a_digest_is_of_the_config_and_the_target() -> None:
    base = load_config("gpt2_124m")
    other = override(base, {"train.batch": 240})
    digests = {digest_of(base, "v5e-8"), digest_of(other, "v5e-8"), digest_of(base, "h100x8")}
    assert len(digests) == 3 and digest_of(base, "v5e-8") in digests
