"""`rehearse` from config to report, for absent chips and, quickly, by the compiler of the CPU (the
command: cli).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import jax
import pytest
import traced_steps
from report_types import assert_the_trace_is_the_step, problems
from tiers import needs_cuda, needs_libtpu

from jaxpar.base.config import (
    Config,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    PrecisionConfig,
    TrainConfig,
    override,
)
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.base.toml import to_toml
from jaxpar.cli.main import main
from jaxpar.models import Model
from jaxpar.rehearse import of_config as subject
from jaxpar.rehearse.of_config import CompiledStep, compile_step, rehearse
from jaxpar.rehearse.report.schema import Rehearsal
from jaxpar.rehearse.targets import Target, load_target

BATCH = 16
SEQ = 128
EMBED = 128
LAYERS = 2


def config_of(family: str = "llama", **mesh: int) -> Config:
    model = ModelConfig(
        family,
        vocab_size=500,
        vocab_multiple=128,
        layers=LAYERS,
        embed=EMBED,
        heads=4,
        mlp=384,
        max_seq_len=SEQ,
        tied_head=family == "gpt2",
    )
    return Config(
        model=model,
        data=DataConfig(seq_len=SEQ),
        train=TrainConfig(batch=BATCH),
        mesh=MeshSpec(**mesh),
        memory=MemoryConfig(policy="full"),
        precision=PrecisionConfig(compute="bfloat16"),
    )


CONFIG = config_of(fsdp=4, tensor=2)
# as XLA:CPU sends all of it
IN_FLOAT32 = dataclasses.replace(CONFIG, precision=PrecisionConfig(compute="float32"))


class Simulated(Target):
    """Eight H100s by their figures, whose compiler is that of the CPU devices here."""

    def devices(self) -> list[jax.Device]:
        return jax.devices()


SIMULATED = Simulated(**(vars(load_target("h100x8")) | {"name": "simulated", "platform": "cpu"}))


@functools.cache
def compiled(config: Config, target: str | Target) -> CompiledStep:
    return compile_step(config, load_target(target) if isinstance(target, str) else target)


def report_of(
    config: Config, target: str | Target, monkeypatch: pytest.MonkeyPatch, **figures: Any
) -> Rehearsal:
    """A report of a step that is compiled once; `figures` of the hardware replaced."""
    found = compiled(config, target)
    target_ = found.compiled.target
    target_ = dataclasses.replace(
        target_, hardware=dataclasses.replace(target_.hardware, **figures)
    )
    found = found._replace(compiled=found.compiled._replace(target=target_))
    monkeypatch.setattr(subject, "compile_step", lambda *_: found)
    return rehearse(config, target_, "mini", "jaxpar rehearse mini")


# The report.


def unattributed(report: Rehearsal) -> float:
    """Share of the step in lines that have neither scope nor source."""
    seconds = [
        row["compute"] + row["exposed"]
        for row in report["lines"]
        if not row["scope"] and not row["source"]
    ]
    return sum(seconds) / report["time"]["step"]


def assert_consistent(report: Rehearsal, config: Config, devices: int) -> None:
    """What holds of every report."""
    assert list(problems(report)) == []
    assert_times_add_up(report, config)
    assert_the_trace_is_the_step(report)
    memory = report["memory"]
    assert sum(memory["categories"].values()) == memory["total"] > 0
    assert min(memory["categories"].values()) >= 0
    assert unattributed(report) <= 0.02
    assert report["batch"] == {
        "sequences": BATCH,
        "seq_len": SEQ,
        "tokens": BATCH * SEQ,
        "accumulation": config.train.accumulation,
    }
    assert report["target"]["chips"] == devices
    json.dumps(report, allow_nan=False)


def assert_times_add_up(report: Rehearsal, config: Config) -> None:
    time = report["time"]
    parts = [
        time["compute"],
        time["exposed_communication"],
        time["host_stall"],
        time["copy_stall"],
        time["idle"],
    ]
    assert time["step"] == pytest.approx(sum(parts), rel=1e-9)
    assert min(parts) >= 0
    assert time["tokens_per_second"] == pytest.approx(BATCH * SEQ / time["step"])
    assert sum(row["exposed"] for row in report["collectives"]) == pytest.approx(
        time["exposed_communication"], rel=1e-6
    )
    assert sum(row["compute"] for row in report["lines"]) == pytest.approx(
        time["compute"] + time["idle"], rel=1e-6
    )


def assert_utilisation_adds_up(report: Rehearsal, config: Config) -> None:
    """MFU is of the model's FLOPs as PaLM counts them, HFU of those in the program: recomputation
    and padding too.
    """
    time = report["time"]
    target = report["target"]
    peak = target["peak_flops"]
    assert peak and time["mfu"] and time["hfu"]
    flops = Model(config.model).flops_per_token(SEQ) * BATCH * SEQ / target["chips"]
    assert time["mfu"] == pytest.approx(flops / (peak * time["step"]))
    done = sum(row["flops"] for row in report["lines"])
    assert time["hfu"] == pytest.approx(done / (peak * time["step"]))
    assert 1.05 < time["hfu"] / time["mfu"] < 1.5, "with recomputation"


def assert_all_planned(report: Rehearsal) -> None:
    assert report["collectives"] and all(row["planned"] for row in report["collectives"])


@needs_libtpu
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_report_for_absent_tpus(family, monkeypatch):
    config = config_of(family, fsdp=4, tensor=2)
    report = report_of(config, "v5e-8", monkeypatch)
    assert_consistent(report, config, 8)
    assert_utilisation_adds_up(report, config)
    assert_all_planned(report)
    assert report["time"]["estimated_without_cycles"] < 0.05
    assert {row["phase"] for row in report["lines"]} >= {
        "forward",
        "recomputed",
        "backward",
        "update",
    }
    assert (report["config"], report["command"], report["mesh"]) == (
        "mini",
        "jaxpar rehearse mini",
        {"fsdp": 4, "tensor": 2},
    )
    assert report["memory"]["fits"] and report["memory"]["advice"] == []
    assert report["versions"]["libtpu"]
    timeline = report.get("timeline")
    assert timeline and timeline["lanes"][0] == "compute" and timeline["events"]


@needs_cuda
def test_a_report_for_absent_gpus(monkeypatch):
    layers = 4  # of two jaxlib 0.12 makes no loop, and so no stack of what is kept
    config = override(CONFIG, {"model.layers": layers})
    report = report_of(config, "h100x8", monkeypatch)
    assert_consistent(report, config, 8)
    assert_utilisation_adds_up(report, config)
    assert_all_planned(report)
    assert report["time"]["estimated_without_cycles"] == 1.0
    assert report["time"]["idle"] > 0, "launches"
    # A device's part of the residual stream for each layer, in bfloat16.
    assert report["memory"]["categories"]["activations"] == layers * 2 * BATCH * SEQ * EMBED // 8


def test_a_report_of_what_the_cpus_compiler_makes(monkeypatch):
    report = report_of(IN_FLOAT32, SIMULATED, monkeypatch)
    assert_consistent(report, IN_FLOAT32, 8)
    assert_utilisation_adds_up(report, IN_FLOAT32)
    assert_all_planned(report)
    assert report["memory"]["fits"]
    gathers = [
        row
        for row in report["collectives"]
        if row["kind"] == "all-gather" and row["axes"] == ["fsdp"]
    ]
    assert 4 * EMBED * EMBED // 2 in {row["bytes"] for row in gathers}


def test_a_step_that_compiles_but_does_not_fit_says_what_would_help(monkeypatch):
    report = report_of(IN_FLOAT32, SIMULATED, monkeypatch, hbm_bytes=2**20)
    assert not report["memory"]["fits"] and report["findings"][0]["rule"] == "does-not-fit"
    assert report["memory"]["advice"][0].startswith("try memory.budget=auto, mesh.fsdp=8")
    assert list(problems(report)) == []


def test_the_command_from_config_to_json(tmp_path, capsys, monkeypatch):
    name = tmp_path / "mini.toml"
    name.write_text(to_toml(IN_FLOAT32))
    found = compiled(IN_FLOAT32, SIMULATED)
    monkeypatch.setattr(subject, "compile_step", lambda *_: found)
    monkeypatch.setattr("jaxpar.cli.rehearse.target_of", lambda *_: SIMULATED)
    assert (
        main(
            [
                "rehearse",
                str(name),
                "--target",
                "any",
                "--json",
                "-",
                "--fail-on",
                "unplanned-collective",
            ]
        )
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert list(problems(report)) == []
    assert report["config"] == "mini" and {row["rule"] for row in report["findings"]} <= {
        "large-copy"
    }


# What the compiler refuses.


def test_a_compiler_that_gives_up_for_another_reason_is_quoted(monkeypatch):
    class Refusing:
        jaxpr = jax.make_jaxpr(lambda: ())()

        def trace(self, *_: Any) -> Any:
            return self

        def lower(self, **_: Any) -> Any:
            raise jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed\nmore of it")

    monkeypatch.setattr(subject, "make_train_step", lambda *_: Refusing())
    with pytest.raises(UserError, match=r"simulated refuses .*INTERNAL: Mosaic failed$"):
        compile_step(CONFIG, SIMULATED)


def refused(capsys: pytest.CaptureFixture[str], words: str) -> str:
    """The one line of a refused command."""
    assert main(["rehearse", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("jaxpar: error: ")


@needs_libtpu
def test_a_model_that_cannot_fit_says_by_how_much_and_what_helps(capsys):
    line = refused(
        capsys, "llama3_70b --target v5e-8 --mesh.fsdp 8 --mesh.tensor 1 --train.batch 8"
    )
    assert line.startswith("this step does not fit v5e-8: it needs 1")
    assert "GiB more than its 15.75 GiB; " in line
    assert (
        "; try memory.budget=auto, " in line
        and "mesh.fsdp=16; parameters, optimizer and gradients are 1.0" in line
    )


@needs_libtpu
def test_no_copy_of_all_parameters_in_bfloat16_is_kept_on_a_tpu() -> None:
    """What a compiler option turns off: the loop over layers reading a bfloat16 copy of all of
    them, made before it.
    """
    config = traced_steps.config_of("llama", "full", compute="bfloat16", fsdp=4)
    text = compile_step(config, load_target("v5e-4")).compiled.text
    # of gate and up, on one device
    shard = f"{config.model.layers},{config.model.embed // 4},{config.model.mlp}"
    assert f"f32[{shard}]" in text
    assert f"bf16[{shard}]" not in text
