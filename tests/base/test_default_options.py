"""Default options: the compiler at hand is asked which it takes, once, and what it does not take is
a line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import pytest
from tiers import needs_cuda, needs_libtpu

from jaxpar.base import default_options
from jaxpar.base.compiler import order_options, profile_option, program_options, step_options
from jaxpar.base.default_options import ask_compiler, compile_nothing
from jaxpar.base.jax_compat import (
    DEFAULT_OPTIONS,
    SCHEDULER_PROFILE,
    UNSAFE_OPTIONS,
    DefaultOption,
    fuse_all_gathers,
    less_tuned,
    options,
)
from jaxpar.base.layout.mesh import MeshSpec, make_mesh
from jaxpar.rehearse.targets import load_target

FAST = "xla_cpu_enable_fast_math"
"""An option of every CPU's compiler."""
NOBODYS = "xla_of_nobody"


def one(name: str, value: Any = True, *others: tuple[str, Any]) -> DefaultOption:
    spellings = tuple(((spelled, given),) for spelled, given in ((name, value), *others))
    return DefaultOption(f"is what {name} is for", spellings)


@pytest.fixture(autouse=True)
def _forget(cache: Path) -> None:
    default_options._ask_once.cache_clear()
    default_options._say_once.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each program that is compiled to ask."""
    asked: list[dict[str, Any]] = []

    def compile_it(device: jax.Device, given: Mapping[str, Any]) -> None:
        asked.append(dict(given))
        compile_nothing(device, given)

    monkeypatch.setattr(default_options, "compile_nothing", compile_it)
    return asked


def test_what_the_compiler_takes_is_asked_once_and_read_by_the_next_process(
    compiled: list[dict[str, Any]], cache: Path
) -> None:
    device = jax.devices()[0]
    wanted = (one(FAST, False), less_tuned(1))
    taken = {FAST: False, "xla_backend_optimization_level": 1}
    assert ask_compiler(wanted, device) == taken == ask_compiler(wanted, device)
    default_options._ask_once.cache_clear()  # as another process
    assert ask_compiler(wanted, device) == taken
    assert compiled == [taken], "one program, of all options at once"
    (file,) = (cache / "jaxpar" / "compilers").iterdir()
    file.write_text("{")  # damaged: asked again
    default_options._ask_once.cache_clear()
    assert ask_compiler(wanted, device) == taken
    assert len(compiled) == 2
    assert json.loads(file.read_text())["options"] == taken


def test_an_option_that_is_unknown_is_left_out_with_a_line(
    compiled: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    device = jax.devices()[0]
    wanted = (one(NOBODYS), one(FAST, False))
    for _ in range(2):
        assert ask_compiler(wanted, device) == {FAST: False}
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{NOBODYS} is left out, an option that is what {NOBODYS} is for: the compiler of cpu does "
        f"not take it (XLA knows no option {NOBODYS})"
    )
    default_options._ask_once.cache_clear()
    default_options._say_once.cache_clear()
    before = len(compiled)
    assert ask_compiler(wanted, device) == {FAST: False}
    assert len(compiled) == before and len(caplog.records) == 2, "said in each process, not asked"


def test_a_value_that_is_refused_is_left_out_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    assert ask_compiler((one(FAST, "perhaps"), less_tuned(0)), jax.devices()[0]) == {
        "xla_backend_optimization_level": 0
    }
    assert f"{FAST} takes a value of type bool, found perhaps" in caplog.text


def test_the_first_spelling_that_the_compiler_takes_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = one(NOBODYS, True, (FAST, "perhaps"), (FAST, True))
    assert ask_compiler((wanted,), jax.devices()[0]) == {FAST: True}
    assert not caplog.records, "a renamed option is no loss"


def test_what_only_a_later_version_has_is_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    later = DefaultOption("is for later", (((NOBODYS, True),), ()))
    assert ask_compiler((later, one(FAST, False)), jax.devices()[0]) == {FAST: False}
    assert not caplog.records


def test_what_is_refused_only_beside_others_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse_both(device: jax.Device, given: Mapping[str, Any]) -> None:
        if {"xla_a", "xla_c"} <= set(given):
            raise jax.errors.JaxRuntimeError("FAILED_PRECONDITION: a with c is unsafe\nmore")

    monkeypatch.setattr(default_options, "compile_nothing", refuse_both)
    wanted = tuple(map(one, ("xla_a", "xla_b", "xla_c")))
    assert set(ask_compiler(wanted, jax.devices()[0])) == {"xla_a", "xla_b"}
    assert "xla_c is left out" in caplog.text and "a with c is unsafe" in caplog.text


def test_a_compiler_that_does_not_work_judges_no_option(
    monkeypatch: pytest.MonkeyPatch, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(device: jax.Device, given: Mapping[str, Any]) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: ptxas is not there")

    monkeypatch.setattr(default_options, "compile_nothing", fail)
    assert ask_compiler((one(FAST),), jax.devices()[0]) == {FAST: True}
    assert "ptxas is not there" in caplog.text
    assert not (cache / "jaxpar").exists(), "and nothing is remembered of it"


@pytest.mark.parametrize("platform", DEFAULT_OPTIONS)
def test_each_default_says_what_it_is_for(platform: str) -> None:
    for option in (*DEFAULT_OPTIONS[platform], fuse_all_gathers()):
        assert option.purpose.split()[0].endswith("s"), "it reads on after: an option that ..."
        assert option.name.startswith("xla_")


# The compilers of absent chips, of whichever version is here.


@needs_cuda
@pytest.mark.parametrize("name", ["h100x8", "a100x8"])
def test_a_gpus_collectives_are_pipelined_by_todays_name(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = make_mesh(MeshSpec(data=8), load_target(name).devices())
    found = step_options(mesh)
    needed = [option for option in DEFAULT_OPTIONS["gpu"] if () not in option.spellings]
    assert len(found) >= len(needed) == 4
    assert any("pipeline" in option and "reduce_scatter" in option for option in found)
    assert profile_option(mesh) == SCHEDULER_PROFILE
    assert len(order_options(mesh)) == 3
    assert not caplog.records, "nothing that we ask for is gone"


@needs_libtpu
@pytest.mark.parametrize("name", ["v4-8", "v5p-8", "v5e-8", "v6e-8", "tpu7x-8"])
def test_a_tpus_compiler_takes_all_that_we_ask_for(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = make_mesh(MeshSpec(data=-1), load_target(name).devices())
    assert len(program_options(mesh)) >= len(DEFAULT_OPTIONS["tpu"])
    assert not caplog.records


@needs_libtpu
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="libtpu refuses it from 0.0.50 on")
def test_a_planted_option_that_its_makers_call_unsafe_is_left_out_with_their_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planted = (*DEFAULT_OPTIONS["tpu"], fuse_all_gathers(), one("xla_tpu_of_nobody"))
    monkeypatch.setitem(options.DEFAULT_OPTIONS, "tpu", planted)
    mesh = make_mesh(MeshSpec(data=8), load_target("v5p-8").devices())
    assert not {*UNSAFE_OPTIONS, "xla_tpu_of_nobody"} & set(step_options(mesh))
    refused, unknown = (record.getMessage() for record in caplog.records)
    assert "runs all-gathers beside fusions" in refused and "incorrect resul" in refused
    assert "XLA knows no option xla_tpu_of_nobody" in unknown
