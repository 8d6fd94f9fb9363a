"""Is it the same answer? Loss and every gradient of a plan against one device, on a shrunk model.

Gradients are compared copy by copy, so that one wrong replica is seen too. An error is |got - want| / max(|want|,
floor), root mean squares. The floor is a tenth of that of the whole gradient: a gradient that is zero by mathematics
(GPT-2's key bias: softmax ignores what is added to every score of a row) is nothing but rounding and has no scale.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh

from jaxpar.base.config import Config, KernelsConfig, check
from jaxpar.base.errors import UserError
from jaxpar.base.heads import fit_rules
from jaxpar.base.mesh import MESH_AXES, MeshSpec, describe, devices_needed, make_mesh
from jaxpar.base.plan import Plan
from jaxpar.base.runtime import start, widen_cpu_pool
from jaxpar.base.sharding import ShardingRules, tree_shardings
from jaxpar.kernels.attention.chunked import ROWS
from jaxpar.models import Model
from jaxpar.parallel.context import check_split
from jaxpar.parallel.ops import Ops, choose_attention
from jaxpar.parallel.pipeline import check_stages, microbatches
from jaxpar.train import step
from jaxpar.train.state import param_shapes
from jaxpar.verify import copies
from jaxpar.verify._gradients import GradientRow
from jaxpar.verify.explain import explain, nearest_to_loss
from jaxpar.verify.losses_and_gradients import (
    Answer,
    Case,
    Gradients,
    one_device,
    parameter_order,
    random_batch,
    random_params,
    under_plan,
)
from jaxpar.verify.shrink import (
    LEAST,
    Shrunk,
    asked_sizes,
    fit_mesh,
    mesh_note,
    rules_of,
    shrink,
    simulated_devices,
    total_sizes,
)

# Float32: a gradient is a float32 sum of at most some thousand products; in another order it is off by a few ulps
# (6e-8), and a few dozen ops lie between it and the loss. Over all meshes of docs/verify.md the worst is 1.1e-6.
FLOAT32, FLOAT32_LOSS = 1e-5, 3e-6
# The plan's own precision: as far from the float32 reference as one device in that precision, up to this factor (a sum
# over a mesh axis rounds its parts once more), and a floor for where one device was lucky.
OWN_FACTOR, OWN_FLOOR, OWN_LOSS = 3.0, 2.0**-7, 2.0**-8
# Plain ops are lucky wherever a gradient is zero by mathematics: with a whole softmax its terms cancel to the last bit,
# with attention in tiles only to the precision. So one device with the library's ops, which have just been compared in
# float32, counts too where it is this near to the reference: further off, its ops would be wrong in this precision.
OPS_FACTOR, OPS_MOST = 2.0, 2.0**-4


class Check(NamedTuple):
    """One comparison of the loss and of all gradients.

    Attributes:
      name: `float32`, `bfloat16`, or `float32 as run` where the device computes float32 in less by default.
      loss: summed over the batch, in nats, z-loss included; `reference_loss` likewise.
      loss_error, loss_tolerance: relative.
      tokens_agree: whether as many labels count.
      rows: the parameters in the order of the model.
      origin: the wrong gradient that lies nearest to the loss: what is wrong there is passed back to the others.
      on_one_device: the library's ops differ as much on one device, so the mesh has no part in it.
    """

    name: str
    loss: float
    reference_loss: float
    loss_error: float
    loss_tolerance: float
    tokens_agree: bool
    rows: tuple[GradientRow, ...]
    origin: str = ""
    on_one_device: bool = False

    @property
    def loss_ok(self) -> bool:
        return self.loss_error <= self.loss_tolerance and self.tokens_agree

    @property
    def ok(self) -> bool:
        return self.loss_ok and all(row.ok for row in self.rows)

    @property
    def first(self) -> GradientRow | None:
        """The first parameter that differs, in the order of the model."""
        return next((row for row in self.rows if not row.ok), None)


class Setup(NamedTuple):
    """What is to be verified, shrunk to the devices here.

    Attributes:
      config: the shrunk config that is run.
      asked: the mesh as it was given.
      devices: the devices of the plan.
      notes: what was changed, a sentence each.
    """

    config: Config
    asked: MeshSpec
    devices: list[jax.Device]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Verification:
    """What `verify` found: the checks, up to the first that differs, and how many seconds they took."""

    setup: Setup
    checks: tuple[Check, ...]
    seconds: float

    @property
    def equal(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def failed(self) -> Check | None:
        """The check that differs."""
        return next((check for check in self.checks if not check.ok), None)


def verify(
    config: Config,
    devices: list[jax.Device] | None = None,
    gradients: Gradients | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Compare a config's plan with one device: the loss and every gradient.

    Args:
      config: what to verify; its model is shrunk, and its mesh where the devices are too few.
      devices: the devices to use; None = those of this process, CPU devices being simulated where that is possible.
      gradients: the function under test; None = `jaxpar.train.step.gradients`, which `train` uses.
      say: called with a line as each phase begins.

    Raises:
      UserError: a plan that the config's own sizes do not fit, or too few devices for its mesh axes.
    """
    return run(prepare(config, devices), gradients, say)


def prepare(config: Config, devices: list[jax.Device] | None = None) -> Setup:
    """The first half of `verify`: what will be run, and where."""
    check(config)
    mesh, used, notes = _place(config.mesh, devices, config.compile.cache)
    mesh = dataclasses.replace(mesh, platform="auto", distributed=False)
    _check_layout(config, mesh)
    small, more = _shrink_alike(config, mesh, used)
    return Setup(small, config.mesh, used, (*notes, *more))


def _shrink_alike(config: Config, mesh: MeshSpec, devices: list[jax.Device]) -> Shrunk:
    """The smallest config whose attention has the implementation that the whole one has on these devices."""
    rules = rules_of(config, asked_sizes(config, mesh))
    plan, model, asked = _layout(config, make_mesh(mesh, devices), rules), config.model, config.mesh.platform
    other: list[str] = []
    try:
        wanted = _attention(plan, config)
    except UserError as refused:  # a kernel of other hardware
        other = [f"OTHER ATTENTION: {refused}"]
        config = dataclasses.replace(config, kernels=KernelsConfig())
        plan = dataclasses.replace(plan, attention="auto")
        wanted = _attention(plan, config)
    found, small, notes = "", config, ()
    for least in LEAST:
        if found != wanted:
            small, notes = shrink(config, mesh, least)
            with contextlib.suppress(UserError):  # what was asked for may not serve small sizes
                found = _attention(plan, small)
    said = [] if found == wanted else [f"OTHER ATTENTION: {wanted} has no small form, so this verifies {found}"]
    said = [*other, *said]
    if not other and asked not in ("auto", "cpu", devices[0].platform) and plan.size("attention_seq") == 1:
        there = _attention(plan, config, asked)
        said += [] if there == wanted else [f"OTHER ATTENTION: {there} on {asked}, {wanted} here"]
    model = small.model
    _, changed = fit_rules(config.rules, model.heads, model.kv_heads or model.heads, total_sizes(mesh))
    return Shrunk(small, (*said, *notes, *changed))


def _attention(plan: Plan, config: Config, platform: str = "") -> str:
    """The implementation, and whether plain XLA takes several tiles."""
    model, seq_len, packed = config.model, config.data.seq_len, config.data.pack
    head_dim = model.head_dim or model.embed // model.heads
    name, _ = choose_attention(plan, seq_len, head_dim, False, model.window, packed, platform)
    return f"{name} in tiles" if name == "chunked" and seq_len > ROWS else name


def run(
    setup: Setup, gradients: Gradients | None = None, say: Callable[[str], None] = lambda line: None
) -> Verification:
    """The second half of `verify`."""
    began = time.perf_counter()
    model = Model(setup.config.model)
    case = Case(
        setup.config, model, setup.devices, random_params(model), random_batch(setup.config),
        gradients or step.gradients,
    )  # fmt: skip
    for note in setup.notes:
        say(f"note: {note}")
    checks: list[Check] = []
    for found in _checks(case, say):
        checks.append(found)
        if not found.ok:
            break
    return Verification(setup, tuple(checks), time.perf_counter() - began)


def _checks(case: Case, say: Callable[[str], None]) -> Iterator[Check]:
    """The comparisons one after another: each is made when it is asked for."""
    say("reference: one device, plain ops, float32")
    one = one_device(case, "float32", exact=True)
    want = one(case.params, case.batch)
    say(f"float32: {len(case.devices)} devices")
    got = under_plan(case, "float32", exact=True)
    yield _explained(compare_answers("float32", case, got, want), case, got, want, one, say)
    precision, platform = case.config.precision.compute, case.devices[0].platform
    if precision == "float32" and platform == "cpu":
        return  # CPUs compute float32 in float32: the plan's own precision was just compared
    name = precision if precision != "float32" else "float32 as run"
    say(f"{name}: one device, then {len(case.devices)}")
    near = one_device(case, precision, exact=False)(case.params, case.batch)
    got = under_plan(case, precision, exact=False)
    found, ops = compare_answers(name, case, got, want, near), None
    if not all(row.ok for row in found.rows):
        ops = _with_ops(case, name, say)
        found = compare_answers(name, case, got, want, near, ops)
    yield _explained(found, case, got, want, one, say, ops)


def _with_ops(case: Case, name: str, say: Callable[[str], None]) -> Answer:
    """One device with the library's ops, in a check's precision."""
    say(f"{name}: one device with the library's ops")
    return one_device(case, name.split()[0], exact=name == "float32", ops=Ops)(case.params, case.batch)


def _explained(
    check: Check, case: Case, got: Answer, want: Answer, one: Callable[..., Answer], say: Callable[[str], None],
    ops: Answer | None = None,
) -> Check:  # fmt: skip
    """The check, its wrong gradients diagnosed."""
    wrong = {row.name: row.tolerance * _scale(want, row.name) for row in check.rows if not row.ok}
    if not wrong:
        return check
    found = explain(case, wrong, check.loss_ok, got, want, one, say)
    findings = {entry.name: entry.finding for entry in found}
    rows = tuple(row._replace(finding=findings.get(row.name)) for row in check.rows)
    ops = ops or _with_ops(case, check.name, say)
    alone = all(relative_error(ops, want, name) > 0.5 * relative_error(got, want, name) for name in wrong)
    return check._replace(rows=rows, origin=nearest_to_loss(found), on_one_device=alone)


def compare_answers(
    name: str, case: Case, got: Answer, want: Answer, near: Answer | None = None, ops: Answer | None = None
) -> Check:
    """Errors of an answer against the reference; tolerances from one device in the same precision, if given.

    Args:
      near: one device with plain ops.
      ops: one device with the library's.
    """
    rows = []
    for parameter in parameter_order(case.model):
        tolerance = FLOAT32
        if near is not None:
            spread = OWN_FACTOR * relative_error(near, want, parameter)
            if ops is not None and (off := relative_error(ops, want, parameter)) <= OPS_MOST:
                spread = max(spread, OPS_FACTOR * off)
            tolerance = spread + OWN_FLOOR
        shape = want.grads[parameter].shape[1:]
        rows.append(GradientRow(parameter, shape, relative_error(got, want, parameter), tolerance))
    loss, reference_loss = float(got.sums.loss), float(want.sums.loss)
    return Check(
        name,
        loss,
        reference_loss,
        copies.finite(abs(loss - reference_loss) / abs(reference_loss)),
        FLOAT32_LOSS if near is None else OWN_LOSS,
        bool(got.sums.tokens == want.sums.tokens),
        tuple(rows),
    )


def relative_error(got: Answer, want: Answer, name: str) -> float:
    """Of one gradient: see `jaxpar.verify.copies.relative_error`."""
    return copies.relative_error(got.grads[name], want.grads[name][0], _floor(want))


def _scale(want: Answer, name: str) -> float:
    """What an error is relative to: the root mean square of a gradient, or the floor."""
    return max(copies.rms(want.grads[name][0]), _floor(want))


def _floor(want: Answer) -> float:
    return copies.floor_of(want.grads.values())


def _place(
    spec: MeshSpec, devices: list[jax.Device] | None, cache: str
) -> tuple[MeshSpec, list[jax.Device], tuple[str, ...]]:
    """The mesh that fits, its devices, and what to say about them."""
    found = _devices_here(spec, cache) if devices is None else devices
    mesh, notes = fit_mesh(spec, len(found)), []
    if mesh is None and found[0].platform != "cpu":
        notes.append(f"{len(found)} {found[0].device_kind} cannot keep every mesh axis above 1: CPU devices instead")
        with contextlib.suppress(RuntimeError):  # JAX runs without a CPU platform
            found = jax.local_devices(backend="cpu")
        mesh = fit_mesh(spec, len(found))
    if mesh is None:
        raise UserError(
            f"{len(found)} devices are here, too few to keep 2 along each axis of mesh {describe(total_sizes(spec))}: "
            "`jaxpar verify CONFIG --mesh.platform cpu` in a fresh process simulates them"
        )
    used = found[: devices_needed(mesh)]
    if used[0].platform == "cpu" and len(used) > 1:
        wanted = f": mesh.platform is {spec.platform!r} and none is here" if spec.platform in ("gpu", "tpu") else ""
        notes.append(f"{len(used)} simulated CPU devices{wanted}")
    if spec.distributed:
        notes.append("mesh.distributed is left out: one process verifies on its own devices")
    note = mesh_note(spec, mesh, len(found))
    return mesh, used, (*([note] if note else []), *notes)


def simulate_for(spec: MeshSpec) -> None:
    """Before JAX starts for a TPU or GPU mesh: let the CPU simulate devices too, where too few of the others are here.

    On CPU, and on `auto`, which may turn out to be CPU, the number of devices is the run's own.
    """
    if spec.platform in ("tpu", "gpu"):
        with contextlib.suppress(RuntimeError):  # JAX has started
            jax.config.update("jax_num_cpu_devices", simulated_devices(spec))


def _devices_here(spec: MeshSpec, cache: str) -> list[jax.Device]:
    """This process's devices, the CPU simulating enough for the mesh if JAX has not started."""
    count = simulated_devices(spec)
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX has started
        count = len(jax.devices("cpu")) if spec.platform == "cpu" else 1
    widen_cpu_pool(count)
    found = start(MeshSpec(data=count, platform="cpu") if spec.platform == "cpu" else MeshSpec(), cache)
    return [device for device in found if device.process_index == jax.process_index()]


def _check_layout(config: Config, mesh: MeshSpec) -> None:
    """Refuse a config whose own sizes its mesh does not divide: the shrunk ones always fit."""
    sizes = asked_sizes(config, mesh)
    whole = AbstractMesh(tuple(sizes.values()), MESH_AXES)
    plan = _layout(config, whole, rules_of(config, sizes))
    model, rows = Model(config.model), config.train.batch // config.train.accumulation
    if plan.size("stage") > 1:
        count = microbatches(config, sizes)
        check_stages(plan, config.model.layers, count)
        rows //= count
    tree_shardings(param_shapes(model, plan), model.axes, plan)
    activation = (rows, config.data.seq_len, config.model.embed)
    plan.sharding(("batch", "seq", None), activation, "activations of a microbatch")
    plan.sharding(("batch", "residual_seq", None), activation, "residual stream of a microbatch")
    check_split(
        plan,
        plan.context.strategy,
        config.data.seq_len,
        config.model.heads,
        config.model.kv_heads or config.model.heads,
    )


def _layout(config: Config, mesh: Any, rules: ShardingRules) -> Plan:
    """The part of a plan that says where arrays lie."""
    return Plan(mesh, rules, context=config.context, attention=config.kernels.attention, pipeline=config.pipeline)
