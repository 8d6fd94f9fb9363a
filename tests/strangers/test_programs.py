"""Programs as strangers would write them: with no config, no model of ours and nothing private."""

from __future__ import annotations

import ast
import importlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from strangers import own_mesh, own_model, own_ops, own_pipeline, own_rehearsal, sharded_loss
from tiers import needs_cuda, some

import jaxpar
from jaxpar import parallel, rehearse, train, verify
from jaxpar.kernels.attention import libraries
from jaxpar.parallel import pipeline
from jaxpar.rehearse import compiled
from jaxpar.rehearse.report.report_tables import report_parts

ALL = sharded_loss.NAMES
PROGRAMS = [
    path for path in sorted(Path(__file__).parent.glob("*.py")) if not path.name.startswith("test_")
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_strangers_program_imports_nothing_of_ours_but_the_front_door(program: Path) -> None:
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            modules = []
        modules += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        for module in modules:
            assert module.count(".") < (2 if module.startswith("jaxpar") else 9), (
                f"{module} is no front door"
            )
            assert not module.startswith(("jaxpar.models", "jaxpar.base"))
        if isinstance(node, ast.Attribute | ast.Name):
            if isinstance(node, ast.Attribute):
                name = node.attr
            else:
                name = node.id
            assert name not in ("Config", "load_config", "Plan", "Model")


def test_the_training_wing_hands_out_what_its_types_say() -> None:
    tree = ast.parse(Path(str(train.__file__)).read_text())
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and "jaxpar." in str(node.module)
    ]
    given = {alias.name: str(node.module) for node in found for alias in node.names}
    assert given.keys() == set(train.__all__)
    assert all(
        getattr(train, name) is getattr(importlib.import_module(given[name]), name)
        for name in given
    )


@pytest.mark.slow
def test_a_strangers_model_trains_on_many_devices_as_on_one_and_goes_on_from_a_checkpoint(
    tmp_path: Path,
) -> None:
    want, _ = own_model.train(
        jaxpar.make_mesh(devices=jax.devices()[:1]),
        6,
    )
    losses, state = own_model.train(
        jaxpar.make_mesh(data=2, fsdp=-1, tensor=2), 6, tmp_path, save_at=3
    )
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert losses[-1] < losses[0]
    assert state["up"][...].sharding.spec == P("fsdp", "tensor")
    assert state["up"][...].addressable_shards[0].data.size * 4 == state["up"][...].size


@pytest.mark.slow
def test_a_strangers_mesh_is_verified_trained_saved_and_restored_on_another(tmp_path) -> None:
    """Two steps on data x model, and two more on another mesh, are four steps on one device."""
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    verdict = own_mesh.verdict_of(mesh)
    assert verdict.equal, str(verdict)
    alone = jaxpar.Layout(jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1]))
    want, *_ = own_mesh.train(alone_with_gates(alone), 4)
    losses, params, state = own_mesh.train(jaxpar.Layout(mesh, own_mesh.RULES), 2)
    assert params["gates"].sharding.spec == P(("data", "model"))
    assert optax.tree.get(state, "mu")["up"].sharding.spec == P("data", "model")
    own_mesh.save(tmp_path, params, state)
    # the same rules on a mesh of another shape
    other = jaxpar.Layout(jax.make_mesh((4, 2), ("data", "model")), own_mesh.RULES)
    more, params, _ = own_mesh.train(other, 2, 2, *own_mesh.restore(tmp_path, other))
    assert params["up"].sharding.mesh.shape["data"] == 4
    np.testing.assert_allclose([*losses, *more], want, rtol=1e-5)


def alone_with_gates(layout: jaxpar.Layout) -> jaxpar.Layout:
    """The layout with the stranger's own logical axis, whole."""
    return jaxpar.Layout(layout.mesh, {"gates": None})


@pytest.mark.slow
def test_a_strangers_mesh_is_rehearsed_in_its_own_words() -> None:
    report = own_mesh.report_for("v5e-8", ("data", "model"), (2, 4))
    assert report["mesh"] == {"data": 2, "model": 4}
    assert {tuple(row["axes"]) for row in report["collectives"]} <= {
        ("data",),
        ("model",),
        ("data", "model"),
    }
    assert report["time"]["step"] > 0


OPS = {
    "MLP": (
        own_ops.mlp,
        own_ops.plain_mlp,
        {"fsdp": 2, "tensor": 4},
        {},
    ),
    "MLP, ring": (
        own_ops.mlp,
        own_ops.plain_mlp,
        {"fsdp": 2, "tensor": 4},
        {"overlap": "ring"},
    ),
    "MLP, both ways": (own_ops.mlp, own_ops.plain_mlp, {"tensor": 8}, {"overlap": "bidirectional"}),
    "attention": (
        own_ops.attention_block,
        own_ops.plain_attention,
        {"data": 2, "tensor": 4},
        {},
    ),
    "attention, ring": (
        own_ops.attention_block,
        own_ops.plain_attention,
        {"data": 2, "context": 4},
        {},
    ),
    "attention, Ulysses": (
        own_ops.attention_block,
        own_ops.plain_attention,
        {"data": 2, "context": 4},
        {"context": "ulysses"},
    ),
    "loss": (
        own_ops.loss,
        own_ops.plain_loss,
        {"fsdp": 2, "tensor": 4},
        {},
    ),
    "experts": (
        own_ops.experts,
        own_ops.plain_experts,
        {"expert": 4, "tensor": 2},
        {},
    ),
}


@pytest.mark.parametrize("name", some(OPS, 2))
def test_a_strangers_ops_give_what_plain_jax_gives(name: str) -> None:
    """Answers and gradients. Float32 sums in another order: the worst seen is 6e-7 of the largest
    entry.
    """
    make, plain, mesh, options = OPS[name]
    layout = parallel.fit_heads(
        jaxpar.Layout(jaxpar.make_mesh(**mesh)),
        own_ops.H,
        own_ops.K,
    )
    assert own_ops.worst_error(*make(layout, **options), plain) < 5e-6


def test_more_devices_than_kv_heads_without_a_fit_are_refused() -> None:
    make, plain, mesh, _ = OPS["attention"]
    with pytest.raises(
        jaxpar.UserError,
        match=r"^weight: dim 1 \(kv_heads\) has size 2, which tensor=4 does not divide",
    ):
        own_ops.worst_error(*make(jaxpar.Layout(jaxpar.make_mesh(**mesh))), plain)


def test_attention_on_one_device_asks_for_no_layout() -> None:
    assert own_ops.worst_error(*own_ops.attention_alone(), own_ops.plain_attention_alone) < 5e-6


@pytest.mark.parametrize(
    ("schedule", "virtual", "mesh"),
    [
        ("1f1b", 1, {"stage": 4, "data": 2}),
        pytest.param("looped", 2, {"stage": 2, "tensor": 4}, marks=pytest.mark.slow),
        pytest.param(
            "interleaved",
            2,
            {"stage": 4, "fsdp": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param("gpipe", 1, {"stage": 8}, marks=pytest.mark.slow),
        pytest.param("last_first", 1, {"stage": 4, "data": 2}, marks=pytest.mark.slow),
        ("1f1b", 1, {"stage": 2, "fsdp": 2, "tensor": 2}),
        pytest.param(
            pipeline.schedule("1f1b", 2, 4), 1, {"stage": 2, "data": 4}, marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else "a table" if hasattr(value, "rounds") else None
    ),
)
def test_a_strangers_blocks_in_a_pipeline_give_one_devices_gradients(
    schedule, virtual, mesh
) -> None:
    verdict = own_pipeline.verdict_of(schedule, virtual=virtual, **mesh)
    assert verdict.equal, str(verdict)
    assert max(row.tolerance for row in verdict.rows) < 1e-4


def test_a_pipeline_without_stages_or_blocks_is_refused() -> None:
    with pytest.raises(jaxpar.UserError, match=r"^a pipeline needs stages"):
        own_pipeline.verdict_of(data=8)
    layout = jaxpar.Layout(jaxpar.make_mesh(stage=8))
    axes = {"tokens": ("vocab", "embed")}
    with pytest.raises(
        jaxpar.UserError,
        match=r"`blocks`, .*tokens",
    ):
        pipeline.value_and_grad(*own_pipeline.functions(layout), axes, layout, microbatches=8)
    with pytest.raises(jaxpar.UserError, match=r"^16 rows .*5 microbatches"):
        own_pipeline.verdict_of(stage=4, data=2, microbatches=5)
    with pytest.raises(
        jaxpar.UserError,
        match=r"^a microbatch: dim 0 \(batch\) has size 1, which data=2 does not divide",
    ):
        own_pipeline.verdict_of(stage=4, data=2, microbatches=16)


def test_a_table_that_would_be_run_wrongly_is_refused() -> None:
    with pytest.raises(jaxpar.UserError, match=r"8 stages .*has 4"):
        own_pipeline.verdict_of(pipeline.schedule("1f1b", 8, 8), stage=4, data=2)
    table = pipeline.schedule("1f1b", 4, 8)
    without_last = pipeline.Table(4, 8, 1, table.rounds[:-1])
    with pytest.raises(
        jaxpar.UserError,
        match=r"stage 0: .*microbatch 7, chunk 0",
    ):
        own_pipeline.verdict_of(without_last, stage=4, data=2)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e-8", "h100x8"])
def test_a_strangers_step_is_rehearsed_by_line_of_its_file(target: str) -> None:
    report = own_rehearsal.report_for(target, data=2, tensor=4)
    lines = Path(own_rehearsal.__file__).read_text().splitlines()
    forward = next(number for number, line in enumerate(lines, 1) if 'params["down"]' in line)
    waiting = max(report["lines"], key=lambda line: line["exposed"])
    assert waiting["source"].endswith(f"own_rehearsal.py:{forward}")
    assert {(row["kind"], *row["axes"]) for row in report["collectives"]} == {
        ("all-reduce", "tensor"),
        ("all-reduce", "data"),
    }
    assert (
        report["memory"]["categories"]["params"]
        == 2 * own_rehearsal.EMBED * own_rehearsal.HIDDEN * 4 // 4
    )
    assert (
        report["memory"]["fits"]
        and report["time"]["step"] > 0
        and report["time"]["exposed_communication"] > 0
    )
    mesh = jaxpar.make_mesh(
        devices=jaxpar.load_target(target).devices(),
        data=2,
        tensor=4,
    )
    assert report["compiler_options"] == rehearse.compiler_options(mesh) != {}, (
        "those that train takes on this chip"
    )
    assert not {"model", "batch"} & set(report)
    assert not any("planned" in row for row in report["collectives"])


@needs_cuda
def test_a_strangers_own_options_win_and_attention_without_cudnn_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = jaxpar.load_target("h100x2")
    mesh = jaxpar.make_mesh(devices=target.devices(), data=2)
    threshold = "xla_gpu_all_reduce_combine_threshold_bytes"
    scheduler = "xla_gpu_enable_latency_hiding_scheduler"
    layout = jaxpar.Layout(mesh, compute="bfloat16")
    sharding = layout.sharding(("batch", "seq", "heads", "head_dim"))
    q = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16, sharding=sharding)
    monkeypatch.setattr(libraries, "has_cudnn", lambda: False)  # also where it is installed

    def attend(q: jax.Array) -> jax.Array:
        return jnp.sum(parallel.attention(q, q, q, layout=layout).astype(jnp.float32))

    jitted = jax.jit(jax.grad(attend), compiler_options={threshold: 5})
    report = rehearse.step(
        jitted, q, target=target, compiler_options={threshold: 7, scheduler: True}
    )
    assert report["compiler_options"] == {threshold: 5, scheduler: True}
    (row,) = report["kernels"]
    assert (row["op"], row["priced"], row["runs"]) == ("attention", "pallas_gpu", "cuDNN")
    assert [finding["rule"] for finding in report["findings"]].count("other-kernel") == 1
    shown = " ".join(str(part) for part in report_parts(report))
    assert "KERNELS" in shown and row["install"] in shown and f"{threshold}=5" in shown


ABSENT = {
    "v5e": (("tpu", "", "TPU v5 lite"), "splash"),
    "h100": (("gpu", "9.0", "NVIDIA H100 80GB HBM3"), "attention_forward"),
    "t4": (("gpu", "7.5", "Tesla T4"), ""),
}


@pytest.mark.parametrize("chip", ABSENT)
def test_attention_without_a_layout_takes_the_kernel_of_the_chip_it_is_rehearsed_for(
    chip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function was traced for this machine before, and is again; neither trace is taken for the
    other's.
    """
    monkeypatch.setattr(libraries, "has_cudnn", lambda: False)  # also where it is installed
    place, kernel = ABSENT[chip]
    device: Any = SimpleNamespace(
        platform=place[0], compute_capability=place[1], device_kind=place[2]
    )
    mesh: Any = SimpleNamespace(devices=np.array([device]))
    q = jax.ShapeDtypeStruct((1, 1024, 2, 128), jnp.bfloat16)
    jitted = jax.jit(lambda q: parallel.attention(q, q, q))
    here = str(jitted.trace(q).jaxpr)
    there = list[str]()

    def lower(jitted: Any, arguments: Any, *_: Any) -> None:
        there.append(str(jitted.trace(*arguments).jaxpr))
        raise jax.errors.JaxRuntimeError("that is enough")

    monkeypatch.setattr(compiled, "lower_for", lower)
    with pytest.raises(jaxpar.UserError, match="that is enough"):
        compiled.compile_for(jitted, (q,), mesh, jaxpar.load_target("v5e-1"))
    assert "pallas_call" not in here and ("pallas_call" in there[0]) == bool(kernel)
    assert kernel in there[0]
    assert str(jitted.trace(q).jaxpr) == here


def test_a_function_that_takes_arguments_by_name_is_rehearsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = jaxpar.Layout(jaxpar.make_mesh(data=8))
    x = jax.ShapeDtypeStruct(
        (8, 4),
        jnp.float32,
        sharding=layout.sharding(("batch", None)),
    )
    lowered = list[str]()

    def stop(program: jax.stages.Lowered, _: Any) -> None:
        lowered.append(program.as_text())
        raise jax.errors.JaxRuntimeError("that is enough")

    monkeypatch.setattr(compiled, "compile_absent", stop)
    jitted = jax.jit(lambda x, *, y: x - y)
    with pytest.raises(jaxpar.UserError, match="that is enough"):
        compiled.compile_for(
            jitted,
            (x,),
            layout.mesh,
            jaxpar.load_target("v5e-8"),
            keywords={"y": x},
        )
    assert "stablehlo.subtract" in lowered[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "names", "kind", "says"),
    [
        (
            "missing psum",
            {"head"},
            "sum missing",
            "copies along data differ and add up to the reference",
        ),
        ("doubled psum", {"q"}, "sum doubled", "2 times the reference, the size of data"),
        (
            "mask of the first shard",
            sharded_loss.NAMES,
            "shard",
            "every shard of data has the first one's part of mask",
        ),
        ("mean of a shard", ALL, "mean", "each shard of data divides by its own number of tokens"),
        (
            "stale positions",
            sharded_loss.NAMES,
            "shard",
            "every shard of context has the first one's part of positions",
        ),
    ],
)
def test_a_wrong_sharded_loss_is_named_with_its_mistake(
    fault: str, names: set[str], kind: str, says: str
) -> None:
    verdict = sharded_loss.verdict_of(fault)
    assert {row.name for row in verdict.wrong} == names
    for row in verdict.wrong:
        assert row.finding is not None
        assert row.finding.kind == kind
        assert says in row.finding.says
    assert says in str(verdict)
    assert verdict.loss_ok == (kind in ("sum missing", "sum doubled"))


def test_a_gradient_too_small_to_tell_is_named() -> None:
    """Twice the right one is within the tolerance of the whole gradient, and so is none."""
    mesh = jaxpar.make_mesh(data=8)
    place = jax.sharding.NamedSharding(mesh, P())

    def loss(params: Any, batch: Any, times: float = 1.0) -> jax.Array:
        return jnp.sum(100 * batch * params["a"]) + times * 1e-4 * jnp.sum(params["c"])

    params = {name: np.arange(1, 9, dtype=np.float32) for name in ("a", "c")}
    batch = np.arange(1, 9, dtype=np.float32)
    verdict = verify.gradients(
        partial(loss, times=2.0),
        loss,
        params,
        batch,
        (place, place),
    )
    assert str(verdict).startswith("EQUAL: loss and 2 gradients, to ")
    assert str(verdict).endswith("; too small beside the whole gradient to tell: c")
    assert [row.too_small for row in verdict.rows] == [False, True]


def test_a_right_sharded_loss_is_equal() -> None:
    verdict = sharded_loss.verdict_of()
    assert verdict.equal
    assert str(verdict).startswith("EQUAL: loss and 6 gradients, to ")
    assert max(row.tolerance for row in verdict.rows) < 1e-4
