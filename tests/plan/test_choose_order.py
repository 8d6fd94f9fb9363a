"""An order is imposed: what is tried, which one is kept, and what `train` is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiers import needs_cuda

from jaxpar.base.compiler import order_options
from jaxpar.base.config import load_config, override
from jaxpar.base.errors import UserError
from jaxpar.base.jax_compat import SCHEDULER_PROFILE, Options
from jaxpar.hlo.program.tasks import Loop, Program, Task
from jaxpar.plan import choose_order as subject
from jaxpar.plan.choose_order import (
    AS_IT_IS,
    TriedOrder,
    choose_order,
    order_parts,
    scheduler_profile,
)
from jaxpar.rehearse.cost import Cost
from jaxpar.rehearse.of_config import on_target
from jaxpar.rehearse.targets import load_target
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment

TARGET = load_target("h100x8")


def test_a_profile_has_a_line_for_each_instruction() -> None:
    dot = Task("dot.1", "dot", "matmul")
    program = Program("test", (Loop("while", 3, (dot,)), Task("copy.2", "copy", "copy"), dot))
    costs = {(0, 0): Cost(2e-3, ()), (1,): Cost(0.0, ()), (2,): Cost(5e-3, ())}
    assert scheduler_profile(program, costs).splitlines() == [
        'costs { name: "dot.1" cost_us: 2000 }',
        'costs { name: "copy.2" cost_us: 0.001 }',
    ]


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[float, bool]]:
    """Seconds by order, and whether it fits, in place of compilations."""
    found: dict[str, tuple[float, bool]] = {AS_IT_IS: (5.0, True)}

    def fake(experiment: Experiment, target: Any, name: str, options: Options) -> TriedOrder:
        if name not in found:
            raise UserError(f"{name} crashes the compiler")
        seconds, fits = found[name]
        formed = subject._with_options(experiment, options)
        return TriedOrder(name, formed, None, seconds, 0.0, fits, f"prices of {name}")  # type: ignore[arg-type]

    settings: dict[str, Options] = {
        "late": {"xla_gpu_enable_nccl_user_buffers": True},
        "early": {"xla_gpu_enable_while_loop_double_buffering": False},
    }
    monkeypatch.setattr(subject, "_try", fake)
    monkeypatch.setattr(subject, "order_options", lambda mesh: settings)
    monkeypatch.setattr(subject, "profile_option", lambda mesh: SCHEDULER_PROFILE)
    return found


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    small = {"model.layers": 1, "compiler.options": ["xla_gpu_enable_nccl_user_buffers=false"]}
    return make_experiment(override(load_config("tiny"), small))


def test_the_fastest_that_fits_is_kept_with_its_profile(
    tries: dict[str, tuple[float, bool]], experiment: Experiment, tmp_path: Path
) -> None:
    tries |= {"late": (4.0, True), "late, priced": (3.0, True), "early": (1.0, False)}
    said: list[str] = []
    file = tmp_path / "order.pbtxt"
    best, *others = choose_order(experiment, TARGET, file, said.append)
    assert (best.name, best.profile) == ("late, priced", "prices of late")
    assert file.read_text(encoding="utf-8") == "prices of late"
    assert best.experiment.config.compiler.options == (
        "xla_gpu_enable_nccl_user_buffers=true",
        f"{SCHEDULER_PROFILE}={file}",
    )
    assert [one.name for one in others] == ["late", AS_IT_IS, "early"]
    assert any("early, priced: refused" in line for line in said)
    assert str(file) in str(order_parts([best, *others])[-1])


def test_where_nothing_is_faster_nothing_is_written(
    tries: dict[str, tuple[float, bool]], experiment: Experiment, tmp_path: Path
) -> None:
    tries |= {"late": (6.0, True), f"{AS_IT_IS}, priced": (5.5, True)}
    file = tmp_path / "order.pbtxt"
    tried = choose_order(experiment, TARGET, file)
    assert tried[0].experiment.config.compiler == experiment.config.compiler
    assert not file.exists()
    assert order_parts(tried)[-1] == "no order was faster"


def test_what_cannot_be_ordered_is_refused(experiment: Experiment, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"order\.txt -> \.pbtxt"):
        choose_order(experiment, TARGET, tmp_path / "order.txt")
    with pytest.raises(UserError, match="changes the order"):
        choose_order(experiment, TARGET, tmp_path / "order.pbtxt")  # the devices are CPUs


def test_a_profile_that_is_not_there_is_refused(experiment: Experiment) -> None:
    with pytest.raises(UserError, match=r"there is no file gone\.pbtxt"):
        subject._with_options(experiment, {SCHEDULER_PROFILE: "gone.pbtxt"})


@needs_cuda
def test_the_gpu_compiler_takes_every_order_and_goes_by_the_prices(tmp_path: Path) -> None:
    small = {
        "model.layers": 2,
        "model.embed": 512,
        "model.mlp": 2048,
        "model.vocab_size": 1024,
        "data.seq_len": 512,
        "train.batch": 8,
        "mesh.fsdp": 8,
        "mesh.tensor": 1,
    }
    config = override(load_config("llama3_8b"), small)
    experiment = on_target(config, TARGET)
    said: list[str] = []
    tried = choose_order(experiment, TARGET, tmp_path / "order.pbtxt", said.append)
    assert not [line for line in said if "refused" in line]
    assert len(tried) == 2 * (1 + len(order_options(experiment.plan.mesh)))
    seconds = {one.name: one.seconds for one in tried}
    assert seconds[tried[0].name] <= seconds[AS_IT_IS]
    assert len({one.program.as_text() for one in tried}) > 2
