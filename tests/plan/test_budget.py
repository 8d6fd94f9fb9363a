"""A budget solved: what it leads to fits the compiled program, and is the best under the cost
model.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from tiers import needs_cuda
from traced_steps import config_of

from jaxpar.base.config import Config, override
from jaxpar.base.errors import UserError
from jaxpar.base.hardware import Hardware, PeakFlops
from jaxpar.hlo.program.parse import parse_module
from jaxpar.kernels.attention import triton_tiles
from jaxpar.plan import budget as subject
from jaxpar.plan import budget_space
from jaxpar.plan.budget import budget_bytes, compiled_bytes, resolve, solve_budget
from jaxpar.plan.budget_space import question_of, space_of
from jaxpar.plan.choose_remat import ActionCosts, Item, costs_of, items_of
from jaxpar.plan.engine import Correction, Outcome, Priced, Rehearsed, correct
from jaxpar.plan.engine.finalists import contenders
from jaxpar.plan.memory_account import work_bytes
from jaxpar.rehearse.of_config import compile_step
from jaxpar.rehearse.report.memory import allocated_bytes, saved_bytes
from jaxpar.rehearse.targets import load_target
from jaxpar.train.activations import activations
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment
from jaxpar.train.state_memory import state_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("14GiB", 14 * 2**30),
        ("900 MiB", 900 * 2**20),
        ("80GB", 80 * 10**9),
        ("1.5G", 3 * 2**29),
        ("2000", 2000),
    ],
)
def test_sizes(text, size):
    assert budget_bytes(text, Hardware(), jax.devices()[0]) == size


@pytest.mark.parametrize("text", ["", "GiB", "14 Gib", "-3GiB", "all", "1.2.3GiB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UserError, match=r"is no size: write 14GiB"):
        budget_bytes(text, Hardware(), jax.devices()[0])


def test_auto_is_what_a_device_has_less_a_margin():
    assert budget_bytes("auto", Hardware(hbm_bytes=1000), jax.devices()[0]) == 950
    with pytest.raises(UserError, match="how much memory"):
        budget_bytes("auto", Hardware(), jax.devices()[0])


@pytest.mark.slow
def test_a_budget_is_met_and_spent():
    config = override(config_of("llama", fsdp=2), {"memory.budget": "100GiB", "model.layers": 3})
    said: list[str] = []
    devices = jax.devices()[:2]
    roomy, tried = solve_budget(make_experiment(config, devices), "cpu", Hardware(), said.append)
    memory = roomy.experiment.config.memory
    assert memory.budget == "" and memory.policy == "full"
    assert set(vars(memory.keep).values()) <= {"save", "policy", "recompute"}
    assert memory.keep.up == memory.keep.attention_out == "save"
    least = compiled_bytes(
        make_experiment(override(config, {"memory.policy": "full", "memory.budget": ""}), devices),
        "cpu",
    )[0]
    budget = (least + max(one.compiled for one in tried)) // 2  # of the least and of everything
    tight = override(config, {"memory.budget": str(budget)})
    found, tried = solve_budget(make_experiment(tight, devices), "cpu", Hardware(), said.append)
    assert found in tried and found.compiled <= budget
    assert len(tried) <= 3 and said[-1].startswith("memory.budget ")
    assert "recompute" in said[-1]
    assert [line[:24] for line in said if line.startswith("compiling")][
        -1
    ] == f"compiling {len(tried)} of at most 3"


def test_a_budget_below_the_least_says_what_it_would_take():
    config = override(config_of("llama", fsdp=8), {"memory.budget": "1MiB"})
    with pytest.raises(UserError) as refused:
        resolve(config)
    said = str(refused.value)
    assert "is less than this plan" in said
    for words in (
        "parameters",
        "optimizer",
        "gradients",
        "precision.moments=bfloat16",
        "mesh.fsdp=16",
        "train.accum",
    ):
        assert words in said


def test_a_prediction_that_is_too_low_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler takes 6 MiB more than was thought: the next solution knows, and the last one
    fits.
    """
    config = override(config_of("llama"), {"memory.budget": "12MiB", "model.layers": 8})
    real: list[int] = []

    def compiled(experiment: Experiment, platform: str) -> tuple[int, str, None]:
        kept = sum(one.kept_bytes for one in activations(experiment) if one.action == "save")
        state = state_bytes(experiment, platform).device
        real.append(state + kept + work_bytes(experiment) + 6 * 2**20)
        return real[-1], "", None

    monkeypatch.setattr(subject, "compiled_bytes", compiled)
    experiment = make_experiment(config, jax.devices()[:1])
    state = state_bytes(experiment, "cpu").device
    room = state + work_bytes(experiment) + 6 * 2**20 + 12 * 2**20
    config = override(config, {"memory.budget": str(room)})
    found, tried = solve_budget(make_experiment(config, jax.devices()[:1]), "cpu", Hardware())
    assert tried[0].compiled > room, "else the test says nothing"
    assert compiled(found.experiment, "cpu")[0] <= room
    assert len(tried) <= 3


def test_what_the_rehearsal_waits_for_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloading is the faster by the first guess, 30 % of it waited for; the rehearsal shows all
    of it waited for, by which making again is faster; without a rehearsal the guess stays."""
    base = override(config_of("llama"), {"model.layers": 8, "memory.may": ()})
    devices = jax.devices()[:1]
    flops = 1e9
    # Of a matmul's result, making it again takes 1.1 to 1.8 times its bytes over the link, and 2
    # times is there and back. Matrices of this size reach 0.4 of the speed of large ones, or less.
    reached = 0.4 * Hardware().prices.matmul_float32
    link = 1.1 * 2 * reached * flops / base.model.embed
    hardware = Hardware(
        peak_flops=PeakFlops(flops, flops), hbm_bandwidth=1e15, host_link_bandwidth=link
    )
    monkeypatch.setattr(budget_space, "may_offload", lambda *_: True)
    monkeypatch.setattr(correct, "_HOST", 1.0)  # the guess as it is

    def moved(experiment: Experiment) -> int:
        return sum(
            one.bytes * one.blocks for one in activations(experiment) if one.action == "offload"
        )

    def compiled(experiment: Experiment, platform: str) -> tuple[int, str, None]:
        kept = sum(one.kept_bytes for one in activations(experiment) if one.action == "save")
        state = state_bytes(experiment, platform).device
        size = state + kept + work_bytes(experiment)
        return size, str(moved(experiment)), None

    def played(text: str, *_: Any) -> Any:
        waits = 2 * int(text) / link
        return SimpleNamespace(seconds=1 + waits, host_stall=waits, exposed_communication=0.0)

    monkeypatch.setattr(subject, "compiled_bytes", compiled)
    monkeypatch.setattr(subject, "simulate", played)
    policies = [override(base, {"memory.policy": policy}) for policy in ("none", "full")]
    everything, least = (compiled(make_experiment(one, devices), "cuda")[0] for one in policies)
    config = override(base, {"memory.budget": str((least + everything) // 2)})
    guessed, _ = solve_budget(make_experiment(config, devices), "cuda", hardware)
    found, tried = solve_budget(
        make_experiment(config, devices), "cuda", hardware, target=load_target("h100x1")
    )
    assert moved(guessed.experiment) > 0, "else the test says nothing"
    assert any(moved(one.experiment) for one in tried), "what is waited for has been seen"
    assert moved(found.experiment) == 0


def test_a_loss_that_holds_less_is_weighed_before_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a plan works with the loss, less of it makes room; what one compilation shows corrects
    every plan.
    """
    config = override(
        config_of("llama", fsdp=2),
        {
            "model.vocab_size": 1 << 17,
            "data.seq_len": 64,
            "model.max_seq_len": 64,
            "train.batch": 64,
        },
    )
    experiment = make_experiment(config, jax.devices()[:2])
    monkeypatch.setattr(budget_space, "may_offload", lambda *_: True)
    question = question_of(experiment, "cuda", Hardware())
    space = space_of(question, 1 << 40, 0.0)
    here = [one for one in space.branches if not one.estimate.host]
    whole, less = (next(b for b in here if b.candidate.loss_mib == mib) for mib in (4096, 64))
    assert less.estimate.bytes.working < whole.estimate.bytes.working
    assert budget_space.config_of(question, less.candidate).memory.loss_mib == 64
    away = next(one for one in space.branches if one.estimate.host)
    known = Correction()
    assert known.seconds(away) == pytest.approx(1.1 * away.seconds), "host memory may take longer"
    assert known.seconds(less) == less.seconds
    fastest, *_ = contenders(space, known)
    assert fastest.estimate.host == 0 and "offload" not in dict(fastest.candidate.keep).values()
    larger = Correction((_compiled(whole, round(whole.bytes) + 30_000),))
    assert larger.bytes(whole) == round(whole.bytes) + 30_000
    assert 10_000 < larger.bytes(less) - less.bytes < 30_000, "by how much alike the two are"


def _compiled(plan: Priced, size: int) -> Rehearsed:
    """A plan that takes so many bytes by the compiler."""
    one = subject.CompiledPlan(plan, make_experiment(Config(), jax.devices()[:1]), 0, size)
    figures = subject._figures(one, Correction(), 1024, 1 << 40)
    return Rehearsed(plan, Outcome(figures).figures)


def test_a_tpu_allocates_the_peak_of_what_is_alive() -> None:
    """`temp_size_in_bytes` is more: see docs/memory.md. Gaps add 5 %; without a figure, or
    elsewhere, it counts.
    """
    sizes = {
        "argument": 100,
        "temp": 900,
        "output": 100,
        "alias": 100,
        "generated_code": 10,
        "host_argument": 0,
        "host_temp": 0,
    }
    stats = SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})
    assert allocated_bytes(stats, "tpu") == 1010
    stats.peak_memory_in_bytes = 600
    assert (allocated_bytes(stats, "tpu"), allocated_bytes(stats, "cuda")) == (640, 1010)


# Over many models, meshes and budgets, by the real compiler for H100.

SIZES = {
    "model.vocab_size": 4096,
    "model.layers": 8,
    "model.embed": 512,
    "model.heads": 4,
    "model.head_dim": 128,
    "model.mlp": 1536,
    "model.max_seq_len": 2048,
    "data.seq_len": 1024,
    "precision.compute": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"model.family": "gpt2"},
    "llama": {"model.family": "llama", "model.kv_heads": 2, "model.tied_head": False},
    "llama, 16 layers": {"model.family": "llama", "model.kv_heads": 2, "model.layers": 16},
    "moe": {"model.family": "llama", "model.experts": 4, "model.experts_per_token": 2},
}
MESHES: dict[str, dict[str, int]] = {
    "one": {"train.batch": 8},
    "fsdp=4": {"mesh.fsdp": 4, "train.batch": 32},
    "fsdp=2 x tensor=2": {"mesh.fsdp": 2, "mesh.tensor": 2, "train.batch": 16},
}
SHARES = (0.25, 0.5, 0.8)
"""Budgets between the least and everything kept."""


def best_of_all(items: list[Item], costs: ActionCosts, room: float) -> float:
    """The least seconds of every assignment that fits, tried one by one."""
    device = np.zeros(1)
    host = np.zeros(1)
    again = np.zeros(1)
    for item in items:
        device, host, again = (
            (
                total[:, None] + np.array([getattr(option, field) for option in item.options])[None]
            ).ravel()
            for total, field in ((device, "device"), (host, "host"), (again, "seconds"))
        )
    fits = device <= room
    each = host[fits] / costs.link
    too_long = np.maximum(each - costs.forward, 0) + np.maximum(
        each - costs.backward - again[fits], 0
    )
    waits = np.maximum(too_long, 2 * costs.exposed * each)
    return float(np.min(costs.forward + costs.backward + again[fits] + waits))


def _host_and_again(plan: Priced, items: list[Item]) -> tuple[int, float]:
    """The bytes that a plan sends to host memory, and the seconds of what it makes again."""
    keep = {"block_input": "save"} | dict(plan.candidate.keep)
    chosen = [
        option
        for item in items
        for option in item.options
        if option.action == keep.get(item.names[0], "recompute")
    ]
    return sum(one.host for one in chosen), sum(one.seconds for one in chosen)


def checked(model: str, mesh: str, share: float) -> list[str]:
    """A row of the table: a budget, what the compiler says of the winner, how far the predictions
    were off (of all, and of the activations), and its time beside the best of all assignments."""
    sizes = MESHES[mesh]
    target = load_target(f"h100x{sizes.get('mesh.fsdp', 1) * sizes.get('mesh.tensor', 1)}")
    devices = target.devices()
    base = override(Config(), SIZES | MODELS[model] | sizes | {"memory.may": ()})
    question = question_of(make_experiment(base, devices), "cuda", target.hardware)
    items = list(items_of(question.base, question.names, question.price, question.offload))
    kept = tuple(sorted((name, "save") for name in question.names))
    everything = question.price(question.base._replace(keep=kept)).bytes.total
    least = compiled_bytes(
        make_experiment(override(base, {"memory.policy": "full"}), devices), "cuda"
    )[0]
    budget = int(least + share * (everything - least))
    found, tried = solve_budget(
        make_experiment(override(base, {"memory.budget": str(budget)}), devices),
        "cuda",
        target.hardware,
    )
    last = found
    compiled = compile_step(found.experiment, target)
    kept = sum(one.kept_bytes for one in activations(found.experiment) if one.action == "save")
    stacks = saved_bytes(parse_module(compiled.compiled.text), base.model.layers)
    # The solver and trying all, given the same room: what the winner's own prediction left.
    room = last.plan.estimate.bytes.activations + budget - last.predicted
    costs = costs_of(question.base, items, question.price)
    ours = costs.seconds(*_host_and_again(last.plan, items))
    best = best_of_all(items, costs, room)
    assert last.compiled <= budget
    assert ours <= 1.05 * best
    # what is kept is known to 5 %, and what a block works with is a guess: jaxlib 0.12's is up to
    # 14 % less than was thought, so that a plan of it recomputes more than it needs to
    most = 0.15 if jax.__version_info__ >= (0, 11) else 0.1
    assert last.predicted / last.compiled - 1 <= most
    assert abs(kept / stacks - 1) <= 0.05
    if last.predicted / last.compiled - 1 < -0.1:
        pytest.xfail("where q, k and v are kept, jaxlib 0.10's program holds 80 MiB more: unknown")
    return [
        f"{model}, {mesh}",
        f"{budget / 2**20:.0f}",
        f"{last.compiled / 2**20:.0f}",
        f"{100 * (last.predicted / last.compiled - 1):+.1f} %",
        f"{kept / 2**20:.0f}",
        f"{100 * (kept / stacks - 1):+.1f} %",
        f"{ours / best:.3f}",
        str(len(tried)),
    ]


@pytest.mark.slow
@needs_cuda
def test_a_budget_is_compiled_with_the_tiles_of_an_absent_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One device has no mesh from which attention could see its chip."""
    target = load_target("h100x1")
    devices = target.devices()
    config = override(config_of("llama", compute="bfloat16"), {"data.pack": True})

    def tile_sizes_for(h: int, dtype: str, device_kind: str) -> None:
        raise LookupError(device_kind)  # what comes after it would take long

    monkeypatch.setattr(triton_tiles, "tile_sizes_for", tile_sizes_for)
    with pytest.raises(LookupError) as asked:
        compiled_bytes(make_experiment(config, devices), "cuda")
    assert asked.value.args == (devices[0].device_kind,)


@needs_cuda
def test_the_solved_plan_fits_the_compiled_program() -> None:
    checked("llama", "fsdp=2 x tensor=2", 0.5)


@pytest.mark.long
@needs_cuda
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_the_table_of_budgets(model: str, mesh: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the table of docs/memory.md."""
    for share in SHARES:
        row = checked(model, mesh, share)
        with capsys.disabled():
            print(f"\n| {' | '.join(row)} |", end="", flush=True)
