"""Compares a plan with one device on a shrunk model: first in float32, then in the plan's own precision."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax

from jaxpar.base.config import Config
from jaxpar.base.errors import UserError
from jaxpar.base.mesh import describe, total_sizes
from jaxpar.parallel import Ops
from jaxpar.train import step
from jaxpar.verify.comparison import Answer, compare, relative_error
from jaxpar.verify.of_config.explain import explain_plan
from jaxpar.verify.of_config.losses_and_gradients import Case, Gradients, one_device, parameter_order, under_plan
from jaxpar.verify.of_config.setup import Setup, prepare
from jaxpar.verify.report import Verdict

# Float32: a gradient is a float32 sum of at most a few thousand products. In another order it is off by a few ulps
# (6e-8), and a few dozen ops lie between it and the loss. Over all meshes of docs/verify.md the worst is 3.6e-6.
FLOAT32, FLOAT32_LOSS = 1e-5, 3e-6
# In its own precision a plan may be this factor further from the float32 reference than one device is (a sum over a
# mesh axis rounds its parts once more). The floor is for gradients where one device was lucky.
OWN_FACTOR, OWN_FLOOR, OWN_LOSS = 3.0, 2.0**-7, 2.0**-8
# Plain ops are lucky wherever a gradient is zero by mathematics: its terms cancel to the last bit with a whole softmax,
# but only to the precision with attention in tiles. So one device with the library's ops, which were just compared in
# float32, counts too if it is this near to the reference. If it is further off, its ops are wrong in this precision.
OPS_FACTOR, OPS_MOST = 2.0, 2.0**-4

Say = Callable[[str], None]


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes:
      setup: what was run, and on which devices.
      checks: the comparisons, up to the first that differs.
      seconds: how long the comparisons took.
    """

    setup: Setup
    checks: tuple[Verdict, ...]
    seconds: float

    @property
    def equal(self) -> bool:
        return all(check.equal for check in self.checks)

    @property
    def first_difference(self) -> Verdict | None:
        """The check that differs, if there is one."""
        return next((check for check in self.checks if not check.equal), None)

    def __str__(self) -> str:
        devices, failed = self.setup.devices, self.first_difference
        on = f"{describe(total_sizes(self.setup.config.mesh))} ({len(devices)} x {devices[0].device_kind})"
        if failed:
            return f"DIFFERS on {on}, {failed.name}: {failed.difference}"
        names, count = ", ".join(check.name for check in self.checks), len(self.checks[0].rows)
        return f"EQUAL: loss and {count} gradients on {on} as on one device; {names}; {self.seconds:.0f} s"


def verify(
    config: Config,
    devices: list[jax.Device] | None = None,
    gradients: Gradients | None = None,
    say: Say = lambda line: None,
) -> Verification:
    """Compare the loss and every gradient under a config's plan with those on one device.

    Args:
      config: the config to verify; its model is shrunk, and so is its mesh where there are too few devices.
      devices: the devices to use; None = those of this process, with simulated CPU devices where that is possible.
      gradients: the function under test; None = `jaxpar.train.step.gradients`, which `train` uses.
      say: receives a line of text as each phase begins.

    Raises:
      UserError: the config's own sizes do not fit its plan, or there are too few devices for its mesh axes.
    """
    return run(prepare(config, devices), gradients, say)


def require(config: Config, devices: list[jax.Device], say: Say) -> None:
    """Verify a plan on this process's share of `devices`, for `train --verify`.

    Raises:
      UserError: the plan differs from one device, or it cannot be verified here.
    """
    found = verify(config, [device for device in devices if device.process_index == jax.process_index()], say=say)
    if not found.equal:
        raise UserError(f"--verify refuses to train this plan: {found}; `jaxpar verify` shows the whole table")
    say(f"verified: {found}")


def run(setup: Setup, gradients: Gradients | None = None, say: Say = lambda line: None) -> Verification:
    """Run the second half of `verify`, the comparisons."""
    began = time.perf_counter()
    case = Case.draw(setup.config, setup.devices, gradients or step.gradients)
    for note in setup.notes:
        say(f"note: {note}")
    checks = tuple(_checks(case, say))
    return Verification(setup, checks, time.perf_counter() - began)


def _checks(case: Case, say: Say) -> Iterator[Verdict]:
    """Yield the comparisons, up to the first that differs."""
    say("reference: one device, plain ops, float32")
    reference = one_device(case, "float32", exact=True)
    want = reference(case.params, case.batch)
    count, precision = len(case.devices), case.config.precision.compute
    runs = [("float32", "float32", True)]
    if precision != "float32" or case.devices[0].platform != "cpu":  # a CPU computes float32 in float32 anyway
        runs.append((precision if precision != "float32" else "float32 as run", precision, False))
    for name, precision, exact in runs:
        say(f"{name}: {count} devices" if exact else f"{name}: one device, then {count}")
        near = None if exact else one_device(case, precision, exact)(case.params, case.batch)
        got = under_plan(case, precision, exact)
        check = compare_answers(name, case, got, want, near)
        if check.wrong:
            say(f"{name}: one device with the library's ops")
            ops = one_device(case, precision, exact, ops=Ops)(case.params, case.batch)
            check = compare_answers(name, case, got, want, near, ops)
            alike = all(relative_error(ops, want, row.name) > 0.5 * row.error for row in check.wrong)
            check = explain_plan(case, check, got, want, reference, say)
            check = dataclasses.replace(check, on_one_device=bool(check.wrong) and alike)
        yield check
        if not check.equal:
            return


def compare_answers(
    name: str, case: Case, got: Answer, want: Answer, near: Answer | None = None, ops: Answer | None = None
) -> Verdict:
    """Compare the answer under the plan with the float32 reference.

    In another precision the tolerances come from one device's answers in it, with plain ops and with the library's.
    """
    limits = dict.fromkeys(parameter_order(case.model), FLOAT32)
    if near is None:
        return compare(got, want, limits, FLOAT32_LOSS, name)
    for parameter in limits:
        spread = OWN_FACTOR * relative_error(near, want, parameter)
        if ops is not None and (off := relative_error(ops, want, parameter)) <= OPS_MOST:
            spread = max(spread, OPS_FACTOR * off)
        limits[parameter] = spread + OWN_FLOOR
    return compare(got, want, limits, OWN_LOSS, name)
