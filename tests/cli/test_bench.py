"""`jaxpar bench`: the list, the flags of each and of no other, and what reaches the measuring."""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest

from jaxpar.base.config import load_config, override
from jaxpar.cli import bench as bench_commands
from jaxpar.cli.main import BENCHES, main
from jaxpar.train.plans import make_plan

pytestmark = pytest.mark.quick

CONFIG = ["step", "generate"]  # those that take one
FLAGS = {
    "step": {"--rounds", "--calls"},
    "generate": {"--batch", "--prompt-tokens", "--new-tokens", "--rounds"},
}  # fmt: skip


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_every_bench_is_listed_with_what_it_is(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 0
    usage, _, *lines = capsys.readouterr().out.splitlines()
    assert usage.startswith("usage: jaxpar bench BENCH ...")
    assert [line.split(maxsplit=1) for line in lines] == [[name, text] for name, text in BENCHES.items()]


@pytest.mark.parametrize("bench", BENCHES)
def test_help_shows_a_bench_its_own_flags(bench: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", bench, "--help"])
    assert stop.value.code == 0
    text, usage = capsys.readouterr().out, str(getattr(bench_commands, f"{bench}_command").__doc__)
    assert text.startswith(f"usage: jaxpar bench {bench}")
    shown = set(re.findall(r"^\W (--[a-z][a-z.-]*)", text, re.MULTILINE))
    assert {flag for flag in shown if "." not in flag} == FLAGS[bench]
    assert ("--train.learning-rate" in shown) == (bench in CONFIG)
    assert set(re.findall(r"--[a-z-]+", usage)) - {"--section"} <= FLAGS[bench]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("setp", "no bench 'setp' (did you mean 'step'?): jaxpar bench --help lists them"),
        ("tiny", "no bench 'tiny'"),
        ("step", "usage: jaxpar bench step CONFIG [--rounds N] [--calls N] [--section.key value ...]"),
        ("step tiny --target v5e-8", "jaxpar bench step takes no --target"),
    ],
)
def test_a_mistaken_command_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"jaxpar: error: {message}")


TINY = override(load_config("tiny"), {"model.mlp": 32})


@pytest.mark.parametrize(
    ("words", "measure", "wanted"),
    [("step tiny --model.mlp 32 --rounds 2", "step.bench_step", (TINY, make_plan(TINY), 2, 10))],
)
def test_the_words_reach_the_measuring_and_its_table_is_printed(
    words: str, measure: str, wanted: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Measuring itself takes minutes: `wanted` is what it would be given, before `say`."""
    given: list[Any] = []
    monkeypatch.setattr(bench_commands, "start", lambda *_: jax.devices())  # which would also turn the cache on
    monkeypatch.setattr(f"jaxpar.bench.{measure}", lambda *values, **more: given.extend(values) or [{"ms": 1.5}])
    assert main(["bench", *words.split()]) == 0
    assert tuple(given[: len(wanted)]) == wanted
    assert capsys.readouterr().out == "| ms |\n| --- |\n| 1.5 |\n"
