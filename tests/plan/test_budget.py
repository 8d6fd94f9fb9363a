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
from jaxpar.plan import memory_search as subject
from jaxpar.plan.budget import _is_slower, budget_bytes, resolve, solve_budget
from jaxpar.plan.choose_remat import ActionCosts, Item, Solution
from jaxpar.plan.memory_search import CompiledSolution, SearchSpace, compiled_bytes
from jaxpar.rehearse.of_config import compile_step
from jaxpar.rehearse.report.memory import allocated_bytes, saved_bytes
from jaxpar.rehearse.targets import load_target
from jaxpar.train.activations import activations
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment


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
    """The compiler takes 3 MiB more than was thought: the next solution knows, and the last one
    fits.
    """
    config = override(config_of("llama"), {"memory.budget": "12MiB", "model.layers": 8})
    real: list[int] = []

    def compiled(experiment: Experiment, platform: str) -> tuple[int, str, None]:
        kept = sum(one.kept_bytes for one in activations(experiment) if one.action == "save")
        state = subject.state_bytes(experiment, platform).device
        real.append(state + kept + subject.work_bytes(experiment) + 3 * 2**20)
        return real[-1], "", None

    monkeypatch.setattr(subject, "compiled_bytes", compiled)
    experiment = make_experiment(config, jax.devices()[:1])
    state = subject.state_bytes(experiment, "cpu").device
    room = state + subject.work_bytes(experiment) + 3 * 2**20 + 12 * 2**20
    config = override(config, {"memory.budget": str(room)})
    found, tried = solve_budget(make_experiment(config, jax.devices()[:1]), "cpu", Hardware())
    assert tried[0].compiled > room, "else the test says nothing"
    assert compiled(found.experiment, "cpu")[0] <= room
    assert len(tried) <= 3


def test_the_rehearsal_says_what_is_waited_for_and_which_is_slower() -> None:
    """40 bytes out and back over 10 bytes/s are 8 s; of 3 s of waiting one is for streamed
    state.
    """

    def tried(host: int, *played: float) -> Any:
        timeline: Any = SimpleNamespace(seconds=played[0], host_stall=played[1]) if played else None
        return CompiledSolution(
            make_experiment(Config(), jax.devices()[:1]),
            subject.Outer(),
            Solution(0, host, 0.0, ()),
            0,
            0,
            1.0,
            timeline,
        )

    costs = ActionCosts(1.0, 2.0, 10.0, 0.5)
    assert subject._exposed_share(tried(40, 9.0, 3.0), costs) == 0.25
    assert subject._exposed_share(tried(40, 9.0, 99.0), costs) == 1.0
    assert (
        subject._exposed_share(tried(0, 9.0, 0.0), costs)
        == subject._exposed_share(tried(40), costs)
        == 0.5
    )
    assert _is_slower(tried(40, 9.0, 3.0), tried(0, 8.0, 0.0))
    assert not _is_slower(tried(0, 8.0, 0.0), tried(40, 9.0, 3.0))
    assert not _is_slower(tried(40), tried(0)), "devices at hand: nothing was played"


def test_what_the_rehearsal_waits_for_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloading is the faster by the first guess, 30 % of it waited for; the rehearsal shows all
    of it waited for, by which making again is faster; without a rehearsal the guess stays."""
    base = override(config_of("llama"), {"model.layers": 8, "memory.may": ()})
    devices = jax.devices()[:1]
    flops = 1e9
    # Of a matmul's result, making it again takes 1.2 times its bytes over the link, and 2 times is
    # there and back.
    link = 1.2**2 * flops / base.model.embed
    hardware = Hardware(
        peak_flops=PeakFlops(flops, flops), hbm_bandwidth=1e15, host_link_bandwidth=link
    )
    monkeypatch.setattr(subject, "_may_offload", lambda *_: True)
    monkeypatch.setattr(subject, "_AWAY", 1.0)  # the guess as it is

    def moved(experiment: Experiment) -> int:
        return sum(
            one.bytes * one.blocks for one in activations(experiment) if one.action == "offload"
        )

    def compiled(experiment: Experiment, platform: str) -> tuple[int, str, None]:
        kept = sum(one.kept_bytes for one in activations(experiment) if one.action == "save")
        state = subject.state_bytes(experiment, platform).device
        size = state + kept + subject.work_bytes(experiment)
        return size, str(moved(experiment)), None

    def played(text: str, *_: Any) -> Any:
        waits = 2 * int(text) / link
        return SimpleNamespace(seconds=1 + waits, host_stall=waits)

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
    every search.
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
    devices = jax.devices()[:2]
    monkeypatch.setattr(subject, "_may_offload", lambda *_: True)
    predictions = subject.first_predictions(make_experiment(config, devices), "cuda", Hardware())
    assert {one.space.outer.loss_mib for one in predictions} > {0}
    whole, less = (
        next(one for one in predictions if one.space.outer == outer)
        for outer in (subject.Outer(), subject.Outer(loss_mib=64))
    )
    assert less.work < whole.work and less.space.config.memory.loss_mib == 64
    least = less.space.least
    assert less.rank(least) > less.seconds(least), "what goes to host memory is taken to be slower"
    (here,) = {one.solve(1 << 40, away=False) for one in (less,)}
    assert here is not None and here.host == 0 and less.rank(here) == less.seconds(here)
    compiled = CompiledSolution(
        whole.space.experiment, subject.Outer(), here, predicted=100, compiled=130, moved=0.0
    )
    assert subject.corrected(less, compiled).work == less.work + 30
    state = whole.space.state.device
    own = subject.corrected(whole, compiled._replace(compiled=state + here.device + 7))
    assert own.work == 7 and own.compiled
    assert subject.corrected(own, compiled._replace(outer=less.space.outer)).work == 7


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


def best_of_all(items: list[Item], search: SearchSpace, room: int) -> float:
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
    costs = search.costs
    fits = device <= room
    each = host[fits] / costs.link
    too_long = np.maximum(each - costs.forward, 0) + np.maximum(
        each - costs.backward - again[fits], 0
    )
    waits = np.maximum(too_long, 2 * costs.exposed * each)
    return float(np.min(costs.forward + costs.backward + again[fits] + waits))


def checked(model: str, mesh: str, share: float) -> list[str]:
    """A row of the table: a budget, what the compiler says of the winner, how far the predictions
    were off (of all, and of the activations), and its time beside the best of all assignments."""
    sizes = MESHES[mesh]
    target = load_target(f"h100x{sizes.get('mesh.fsdp', 1) * sizes.get('mesh.tensor', 1)}")
    devices = target.devices()
    base = override(Config(), SIZES | MODELS[model] | sizes | {"memory.may": ()})
    experiment = make_experiment(base, devices)
    search = subject.search_space(experiment, subject.Outer(), "cuda", target.hardware)
    everything = (
        search.state.device + search.work + sum(item.options[0].device for item in search.items)
    )
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
    room = last.solution.device + budget - last.predicted
    ours = search.costs.seconds(last.solution.host, last.solution.again)
    best = best_of_all(search.items, search, room)
    assert last.compiled <= budget
    assert ours <= 1.05 * best
    # what is kept is known to 5 %, and what a block works with is a guess: jaxlib 0.12's is up to
    # 14 % less than was thought, so that a plan of it recomputes more than it needs to
    most = 0.15 if jax.__version_info__ >= (0, 11) else 0.1
    assert -0.1 <= last.predicted / last.compiled - 1 <= most
    assert abs(kept / stacks - 1) <= 0.05
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
