"""`jaxpar bench`: both sides really train, on the same batch."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import optax
import pytest
from experiments import experiment_of

from jaxpar.base.config import Config, load_config, override
from jaxpar.base.layout.plan import Plan
from jaxpar.bench import measure as bench
from jaxpar.bench.measure import Timing
from jaxpar.bench.torch_step import OPTIMIZERS
from jaxpar.cli.main import main
from jaxpar.train.experiments import make_experiment, make_plan


def small(family: str) -> tuple[Config, Plan]:
    changes = {
        "train.learning_rate": 3e-3,
        "train.warmup_steps": 0,
        "model.layers": 1,
        "model.family": family,
    }
    config = override(
        load_config("shakespeare_char_cpu"), changes | {"model.tied_head": family == "gpt2"}
    )
    return config, make_plan(config, jax.devices()[:1])


# A step of Muon or Adafactor is a share of each matrix's size, and of SGD one of the gradient.
RATES = {"adamw": 3e-3, "adam": 3e-3, "sgd": 0.3, "adafactor": 3e-2, "muon": 3e-3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"), [("llama", "adamw"), *(("gpt2", name) for name in RATES)]
)
def test_both_sides_train_on_the_same_batch(family: str, name: str) -> None:
    pytest.importorskip("torch", reason="install the parity extra")
    pytest.importorskip("transformers", reason="install the parity extra")
    config, plan = small(family)
    changes = {"optimizer.name": name, "train.learning_rate": RATES[name]}
    config = override(config, changes)
    ours = bench.train_steps(experiment_of(config, plan))
    with bench.torch_steps(config) as theirs:
        assert str(theirs(0)["by"]).endswith(OPTIMIZERS[name])
        for run in (lambda: float(theirs(1)["loss"] or 0), lambda: ours(1)):
            losses = [run() for _ in range(5)]
            assert 4.0 < losses[0] < 4.4 and losses[-1] < losses[0] - 0.1  # log(65) = 4.17


def test_a_row_for_each_side_and_the_ratio_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs: dict[str, object] = {"by": "torch", "loss": 4.1, "peak, GiB": None}
    monkeypatch.setattr(
        bench, "torch_steps", lambda config: contextlib.nullcontext(lambda steps: theirs)
    )
    times = {
        "jaxpar": Timing(0.02, 1.0, (1.0, 1.0)),
        "torch": Timing(0.05, 2.5, (2.0, 4.0)),
    }
    called: list[object] = []
    monkeypatch.setattr(
        bench,
        "alternate",
        lambda them, rounds, calls: called.extend(f() for f in them.values()) or times,
    )
    config, plan = small("gpt2")
    said: list[str] = []
    ours, other = bench.bench_step(
        experiment_of(config, plan),
        rounds=7,
        steps=2,
        say=said.append,
    )
    assert (ours["by"], ours["ms"], other["ms"]) == ("jaxpar", 10.0, 25.0)
    assert ours["tokens/s"] == config.train.batch * config.data.seq_len / 0.01
    assert float(ours["loss"] or 9) < 4.2 and other["loss"] == 4.1 and len(called) == 2
    assert said == ["jaxpar / torch 0.400 (quartiles 0.250 to 0.500, 7 rounds of 2 steps)"]


@pytest.mark.parametrize(
    ("changes", "optimizer", "said"),
    [
        ({"optimizer.name": "lion"}, None, "torch.optim has no optimizer.name=lion: try adamw"),
        ({}, optax.lion(1e-3), "the optimizer that was given has no counterpart there"),
        (
            {"optimizer.name": "adafactor", "optimizer.adafactor.momentum": 0.9},
            None,
            "torch.optim.Adafactor has no momentum, and optimizer.adafactor.momentum=0.9",
        ),
    ],
)
def test_an_optimizer_that_torch_has_not_is_not_timed_beside_another(
    changes: dict[str, Any],
    optimizer: optax.GradientTransformation | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses = iter([4.0, 3.5, 3.0, 2.5, 2.0])
    monkeypatch.setattr(bench, "train_steps", lambda experiment: lambda steps: next(losses))
    monkeypatch.setattr(bench, "torch_steps", lambda config: pytest.fail("PyTorch was asked"))
    config, plan = small("gpt2")
    experiment = make_experiment(
        override(config, changes), [*plan.mesh.devices.flat], None, optimizer
    )
    lines: list[str] = []
    (row,) = bench.bench_step(experiment, rounds=1, steps=1, say=lines.append)
    assert row["by"] == "jaxpar" and lines[0].startswith(f"not beside PyTorch: {said}")


def test_ours_takes_the_optimizer_that_was_given() -> None:
    config, plan = small("gpt2")
    still = optax.set_to_zero()
    run = bench.train_steps(make_experiment(config, [*plan.mesh.devices.flat], None, still))
    assert run(1) == run(2)


def test_without_torch_it_is_said_and_ours_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.sys, "executable", "true")
    losses = iter([4.0, 3.5, 3.0, 2.5, 2.0])
    monkeypatch.setattr(bench, "train_steps", lambda experiment: lambda steps: next(losses))
    config, plan = small("gpt2")
    said: list[str] = []
    (row,) = bench.bench_step(
        experiment_of(config, plan),
        rounds=1,
        steps=1,
        say=said.append,
    )
    assert row["by"] == "jaxpar" and said == ["not beside PyTorch: its process ended"]


def test_the_words_reach_the_measuring_and_its_table_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measuring itself takes minutes."""
    given: list[object] = []
    monkeypatch.setattr(
        bench, "bench_step", lambda *values, **more: given.extend(values) or [{"ms": 1.5}]
    )
    assert main(["bench", "tiny", "--model.mlp", "32", "--rounds", "2"]) == 0
    config = override(load_config("tiny"), {"model.mlp": 32})
    assert given == [make_experiment(config), 2, 10]
    assert capsys.readouterr().out == "| ms |\n| --- |\n| 1.5 |\n"
