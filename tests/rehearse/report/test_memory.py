"""Device memory by category: the compiler's own account of real steps, and arrays that a loop
fills.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from experiments import experiment_of

from jaxpar.base.config import Config, DataConfig, MemoryConfig, ModelConfig, TrainConfig, override
from jaxpar.base.layout.mesh import MeshSpec, devices_needed
from jaxpar.base.layout.placements import local_bytes
from jaxpar.base.layout.plan import Plan
from jaxpar.hlo.program.module import Module
from jaxpar.hlo.program.parse import parse_module
from jaxpar.models import Model
from jaxpar.rehearse.report import lint
from jaxpar.rehearse.report.memory import account, saved_bytes
from jaxpar.rehearse.report.report_tables import memory_verdict
from jaxpar.train.activations import activations, unnamed_bytes
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_plan
from jaxpar.train.step import make_train_step, step_shapes

LAYERS = 3
BATCH = 16
SEQ = 32
EMBED = 64


def config_of(remat: str, **mesh: int) -> Config:
    model = ModelConfig(
        "llama",
        vocab_size=256,
        layers=LAYERS,
        embed=EMBED,
        heads=4,
        mlp=192,
        max_seq_len=SEQ,
        tied_head=False,
    )
    return Config(
        model=model,
        data=DataConfig(seq_len=SEQ),
        train=TrainConfig(batch=BATCH),
        mesh=MeshSpec(**mesh),
        memory=MemoryConfig(policy=remat),  # pyright: ignore[reportArgumentType]
    )


@functools.cache
def compiled(config: Config) -> tuple[Any, Module, Any, Any, Plan]:
    """The compiler's account, the program, state and batch, the plan."""
    plan = make_plan(config, jax.devices()[: devices_needed(config.mesh)])
    model = Model(config.model)
    experiment = Experiment(config, model, plan)
    state, batch = step_shapes(experiment)
    lowered = make_train_step(experiment).trace(state, batch).lower()
    step = lowered.compile(compiler_options={"xla_backend_optimization_level": "0"})
    return step.memory_analysis(), parse_module(step.as_text()), state, batch, plan


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [{}, {"fsdp": 4, "tensor": 2}], ids=["one device", "fsdp x tensor"]
)
def test_a_step_that_keeps_one_array_a_layer(mesh):
    stats, module, state, batch, plan = compiled(config_of("full", **mesh))
    arguments = {
        "parameters": local_bytes(state.params),
        "optimizer": local_bytes(state.opt_state),
        "batch": local_bytes(batch),
    }
    found = account(
        stats, "cpu", arguments, 2**30, saved_bytes(module, LAYERS), arguments["parameters"]
    )
    parts = found["categories"]
    assert sum(parts.values()) == found["total"] and found["fits"] and found["host"] == {}
    assert found["total"] >= stats.argument_size_in_bytes + stats.temp_size_in_bytes
    assert min(parts.values()) >= 0
    # The block's input of each layer, in float32, split over the batch and the sequence.
    assert parts["activations"] == 4 * LAYERS * BATCH * SEQ * EMBED // plan.size(
        "batch"
    ) // plan.size("residual_seq")
    assert parts["batch"] == 2 * 4 * BATCH * SEQ // plan.size("batch")
    assert parts["gradients"] == parts["parameters"]
    assert 2 * parts["parameters"] < parts["optimizer"] < 2.01 * parts["parameters"], (
        "two moments and a counter"
    )
    assert parts["padding"] < 64, "the number of the step; XLA:CPU pads nothing"


@pytest.mark.slow
def test_recomputation_keeps_less():
    kept = {}
    for remat in ("none", "full"):
        _, module, *_ = compiled(config_of(remat))
        kept[remat] = saved_bytes(module, LAYERS)
    assert kept["none"] > 4 * kept["full"] > 0


@pytest.mark.parametrize(
    ("family", "mesh"),
    [("llama", {}), ("gpt2", {"fsdp": 2, "tensor": 2})],
)
def test_what_is_kept_without_a_name_is_known(family: str, mesh: dict[str, int]) -> None:
    """XLA keeps some arrays once that autodiff keeps twice, in another dtype: within 5 %."""
    config = override(config_of("none", **mesh), {"model.family": family})
    _, module, *_, plan = compiled(config)
    known = sum(one.kept_bytes for one in activations(experiment_of(config, plan))) + unnamed_bytes(
        experiment_of(config, plan)
    )
    assert known == pytest.approx(saved_bytes(module, LAYERS), rel=0.05)
    assert unnamed_bytes(experiment_of(config, replace(plan, remat="dots"))) == 0


TEXT = """HloModule m, is_scheduled=true

%body (p: (f32[3,8], f32[3,4], f32[3,2], f32[5,8], f32[3,6])) -> (f32[3,8], f32[3,4], f32[3,2], f32[5,8], f32[3,6]) {
  %p = (f32[3,8]{1,0}, f32[3,4]{1,0}, f32[3,2]{1,0}, f32[5,8]{1,0}, f32[3,6]{1,0}) parameter(0)
  %p0 = f32[3,8]{1,0} get-tuple-element(%p), index=0
  %p1 = f32[3,4]{1,0} get-tuple-element(%p), index=1
  %p2 = f32[3,2]{1,0} get-tuple-element(%p), index=2
  %p3 = f32[5,8]{1,0} get-tuple-element(%p), index=3
  %p4 = f32[3,6]{1,0} get-tuple-element(%p), index=4
  %n0 = f32[3,8]{1,0} negate(%p0)
  %n1 = f32[3,4]{1,0} negate(%p1)
  %n2 = f32[3,2]{1,0} negate(%p2)
  %n3 = f32[5,8]{1,0} negate(%p3)
  ROOT %out = (f32[3,8]{1,0}, f32[3,4]{1,0}, f32[3,2]{1,0}, f32[5,8]{1,0}, f32[3,6]{1,0}) tuple(%n0, %n1, %n2, %n3, %p4)
}

%cond (p: (f32[3,8], f32[3,4], f32[3,2], f32[5,8], f32[3,6])) -> pred[] {
  %p.1 = (f32[3,8]{1,0}, f32[3,4]{1,0}, f32[3,2]{1,0}, f32[5,8]{1,0}, f32[3,6]{1,0}) parameter(0)
  ROOT %c = pred[] constant(false)
}

ENTRY %main (a: f32[3,4]) -> f32[3,8] {
  %a = f32[3,4]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %empty = f32[3,8]{1,0} broadcast(%zero), dimensions={}
  %other = f32[5,8]{1,0} broadcast(%zero), dimensions={}
  %table = f32[3,6]{1,0} broadcast(%zero), dimensions={}
  %near = f32[3,2]{1,0:S(1)} broadcast(%zero), dimensions={}
  %copy = f32[3,8]{1,0} copy(%empty)
  %t = (f32[3,8], f32[3,4], f32[3,2]{1,0:S(1)}, f32[5,8], f32[3,6]) tuple(%copy, %a, %near, %other, %table)
  %w = (f32[3,8]{1,0}, f32[3,4]{1,0}, f32[3,2]{1,0:S(1)}, f32[5,8]{1,0}, f32[3,6]{1,0}) while(%t), REST
  ROOT %r = f32[3,8]{1,0} get-tuple-element(%w), index=0
}
"""


def loop(path: str) -> Module:
    return parse_module(
        TEXT.replace(
            "REST", f'condition=%cond, body=%body, metadata={{op_name="jit(step)/{path}/while"}}'
        )
    )


@pytest.mark.parametrize(
    ("path", "size"),
    [
        ("jvp()", 3 * 8 * 4),
        ("jvp(loss)", 0),
        ("transpose(jvp())", 0),
        ("update", 0),
    ],
)
def test_what_a_forward_loop_fills_is_kept(path, size):
    """Not what it is given (`a`) or reads alone (`table`), stays on the chip (`near`), has another
    length (`other`).
    """
    assert saved_bytes(loop(path), 3) == size


def test_an_account_of_given_figures():
    stats = SimpleNamespace(
        argument_size_in_bytes=1000,
        temp_size_in_bytes=500,
        output_size_in_bytes=1040,
        alias_size_in_bytes=1000,
        generated_code_size_in_bytes=30,
        host_argument_size_in_bytes=0,
        host_temp_size_in_bytes=70,
    )
    arguments = {"parameters": 240, "optimizer": 480, "batch": 20}
    found = account(stats, "cuda", arguments, 1500, activations=96, gradients=240)
    assert found["categories"] == {
        "parameters": 240,
        "optimizer": 480,
        "batch": 20,
        "activations": 96,
        "gradients": 240,
        "temporaries": 500 - 96 - 240 + 40,
        "program": 30,
        "padding": 260,
    }
    assert found["total"] == 1000 + 500 + 40 + 30 == sum(found["categories"].values())
    assert (found["fits"], found["host"]) == (False, {"temporaries": 70})
    assert account(stats, "cuda", arguments, 1745)["fits"], "1570 bytes within nine tenths"
    assert account(stats, "cuda", arguments, 0)["fits"], "no figure: nothing to be said against it"
    assert account(stats, "cuda", arguments, 0)["categories"] == {
        "parameters": 240,
        "optimizer": 480,
        "batch": 20,
        "temporaries": 540,
        "program": 30,
        "padding": 260,
    }, "what is not known is not among them"
    unused = account(stats, "cuda", arguments | {"unused": 1000}, 0)["categories"]
    assert unused == {"temporaries": 540, "program": 30, "arguments": 1000}, (
        "an argument that the program leaves out"
    )


@pytest.mark.parametrize(
    ("platform", "has", "fits"),
    [
        ("tpu", 1500, True),
        ("tpu", 1300, True),
        ("tpu", 1299, False),
        ("cuda", 1500, False),
        ("cuda", 1744, False),
        ("cuda", 1745, True),
    ],
)
def test_what_has_to_fit_is_the_peak_where_the_compiler_lays_that_out(
    platform: str, has: int, fits: bool
) -> None:
    """On a TPU `temp_size_in_bytes` is more than what is laid out; on a GPU it is one block,
    allocated whole.
    """
    stats = SimpleNamespace(
        argument_size_in_bytes=1000,
        temp_size_in_bytes=500,
        output_size_in_bytes=1040,
        alias_size_in_bytes=1000,
        generated_code_size_in_bytes=30,
        host_argument_size_in_bytes=0,
        host_temp_size_in_bytes=0,
        peak_memory_in_bytes=1270,
    )
    found = account(stats, platform, {"parameters": 1000}, has, activations=96, gradients=400)
    assert found["fits"] == fits
    assert (
        found["total"] == sum(found["categories"].values()) == (1300 if platform == "tpu" else 1570)
    )
    assert min(found["categories"].values()) >= 0, (
        "activations and gradients are parts of what is there at the peak"
    )
    assert found.get("basis")
    for finding in lint.find("does-not-fit", lint.LintedStep(memory=found)):
        assert finding["bytes"] == found["total"] - found["usable_bytes"]
    assert found["usable_bytes"] == (int(0.9 * has) if platform == "cuda" else has)
    pool = (
        "does not fit: 1 B too much: 1.53 KiB of 1.70 KiB a device, of which JAX's pool may "
        "take 1.53 KiB"
    )
    assert (memory_verdict(found) == pool) == (has == 1744)
    assert bool(lint.find("does-not-fit", lint.LintedStep(memory=found))) != fits
