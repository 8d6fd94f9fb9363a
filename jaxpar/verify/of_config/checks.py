"""The comparison of a plan with one device on a shrunk model, first in float32, then in the plan's
own precision. Wrong gradients are explained with mistakes that need more than any program's loss
and batch."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxpar.base.config import Config
from jaxpar.base.errors import Say, UserError
from jaxpar.base.layout.mesh import describe, total_sizes
from jaxpar.base.layout.plan import Plan
from jaxpar.base.machine import versions
from jaxpar.base.toml import flatten
from jaxpar.models.hidden import PROJECTIONS
from jaxpar.parallel import MeshOps
from jaxpar.parallel.zigzag import TOKENS
from jaxpar.train import step
from jaxpar.train.experiment import Experiment, pipelined_microbatches
from jaxpar.verify.comparison import FLOAT32, Answer, compare, relative_error
from jaxpar.verify.explain import Alteration, Partition, explain, shards
from jaxpar.verify.of_config.losses_and_gradients import (
    Case,
    Gradients,
    OneDevice,
    is_stacked,
    one_device,
    parameter_order,
    under_plan,
)
from jaxpar.verify.of_config.setup import Setup, prepare
from jaxpar.verify.of_config.updates import compare_updates
from jaxpar.verify.reference_ops import ReferenceOps
from jaxpar.verify.report import GradientRow, Verdict

FLOAT32_LOSS = 3e-6
# In its own precision a plan may be this factor further from the float32 reference than one device
# is (a sum over a mesh axis rounds its parts once more). The floor is for gradients where one
# device was lucky.
OWN_FACTOR = 3.0
OWN_FLOOR = 2.0**-7
OWN_LOSS = 2.0**-8
# Plain ops are lucky wherever a gradient is zero by mathematics: its terms cancel to the last bit
# with a whole softmax, but only to the precision with attention in tiles. So one device with the
# library's ops, which were just compared in float32, counts too if it is this near to the
# reference. If it is further off, its ops are wrong in this precision.
OPS_FACTOR = 2.0
OPS_MOST = 2.0**-4
SCHEMA = 1
"""The version of `Verification.as_json`, which goes up when a key is renamed, removed or changes
its meaning.
"""


@dataclass(frozen=True)
class Verification:
    """The result of a verification: its setup, its comparisons up to the first that differs, and
    their seconds.
    """

    setup: Setup
    checks: tuple[Verdict, ...]
    seconds: float

    @property
    def equal(self) -> bool:
        return self.first_difference is None

    @property
    def first_difference(self) -> Verdict | None:
        """The check that differs, if there is one."""
        return next((check for check in self.checks if not check.equal), None)

    def as_json(
        self,
        config: str = "",
        command: str = "",
    ) -> dict[str, Any]:
        """Write the verification as an object of JSON (docs/verify.md has its keys), in which an
        error that is no finite number is None.

        Args:
          config: the name of the config.
          command: the command line.
        """
        setup = self.setup
        sizes = total_sizes(setup.config.mesh)
        return {
            "schema": SCHEMA,
            "config": config,
            "command": command,
            "date": datetime.date.today().isoformat(),
            "versions": versions(),
            "equal": self.equal,
            "says": str(self),
            "seconds": self.seconds,
            "mesh": {axis: size for axis, size in sizes.items() if size > 1},
            "devices": {"count": len(setup.devices), "kind": setup.devices[0].device_kind},
            "settings": flatten(setup.config),
            "notes": list(setup.notes),
            "checks": [check.as_json() for check in self.checks],
        }

    def __str__(self) -> str:
        devices = self.setup.devices
        failed = self.first_difference
        on = (
            f"{describe(total_sizes(self.setup.config.mesh))} ({len(devices)} x "
            f"{devices[0].device_kind})"
        )
        if failed:
            return f"DIFFERS on {on}, {failed.name}: {failed.difference}"
        names = ", ".join(check.name for check in self.checks)
        count = len(self.checks[0].rows)
        return (
            f"EQUAL: loss and {count} gradients on {on} as on one device; {names}; "
            f"{self.seconds:.0f} s"
        )


def verify(
    experiment: Config | Experiment,
    devices: list[jax.Device] | None = None,
    gradients: Gradients | None = None,
    say: Say = lambda line: None,
) -> Verification:
    """Compare the loss and every gradient under a config's plan with one device's.

    Args:
      experiment: the experiment to verify, or the config of one; its model is shrunk, and so is its
        mesh where there are too few devices.
      devices: the devices to use; None = those of this process, with simulated CPU devices where
        that is possible.
      gradients: the function under test; None = `jaxpar.train.step.gradients`, which `train` uses.
      say: receives a line of text as each phase begins.

    Returns:
      The verification, whose `checks` end with the first that differs.

    Raises:
      UserError: the config's own sizes do not fit its plan, or there are too few devices for its
        mesh axes.
    """
    return run(prepare(experiment, devices), gradients, say)


def require(
    experiment: Config | Experiment,
    devices: list[jax.Device],
    say: Say,
) -> None:
    """Verify a plan on this process's share of `devices`, for `train --verify`.

    Args:
      experiment: the experiment that is to be trained, or its config.
      devices: the devices of the training mesh, of all processes.
      say: receives a line of text as each phase begins, and the result.

    Raises:
      UserError: the plan differs from one device, or it cannot be verified here.
    """
    me = jax.process_index()
    mine = [device for device in devices if device.process_index == me]
    found = verify(experiment, mine, say=say)
    if not found.equal:
        raise UserError(
            f"--verify refuses to train this plan: {found}; `jaxpar verify` shows the whole table"
        )
    say(f"verified: {found}")


def run(
    setup: Setup, gradients: Gradients | None = None, say: Say = lambda line: None
) -> Verification:
    """Run the comparisons of `verify`, without `prepare`, which its seconds do not count.

    Args:
      setup: what `prepare` decided.
      gradients: the function under test; None = `jaxpar.train.step.gradients`.
      say: receives each note and a line of text as each phase begins.

    Raises:
      UserError: the CPU could mix up collectives of the program (`hlo.collective_order`).
    """
    began = time.perf_counter()
    case = Case.draw(setup, gradients or step.gradients)
    for note in setup.notes:
        say(f"note: {note}")
    return Verification(setup, tuple(_checks(case, say)), time.perf_counter() - began)


def _checks(case: Case, say: Say) -> Iterator[Verdict]:
    """Yield the comparisons, up to the first that differs."""
    say("reference: one device, plain ops, float32")
    reference = one_device(case, "float32", exact=True)
    want = reference(case.params, case.batch)
    count = len(case.devices)
    precision = case.config.precision.compute
    runs = [("float32", "float32", True)]
    # a CPU computes float32 in float32 anyway
    if precision != "float32" or case.devices[0].platform != "cpu":
        runs.append((precision if precision != "float32" else "float32 as run", precision, False))
    for name, precision, exact in runs:
        say(f"{name}: {count} devices" if exact else f"{name}: one device, then {count}")
        if exact:
            near = None
        else:
            near = one_device(case, precision, exact)(case.params, case.batch)
        got = under_plan(case, precision, exact)
        check = compare_answers(name, case, got, want, near)
        if check.wrong:
            say(f"{name}: one device with the library's ops")
            ops = one_device(case, precision, exact, ops=MeshOps)(case.params, case.batch)
            check = compare_answers(name, case, got, want, near, ops)
            if check.wrong:
                alike = all(
                    relative_error(ops, want, row.name) > 0.5 * row.error for row in check.wrong
                )
                check = replace(
                    explain_plan(case, check, got, want, reference, say), on_one_device=alike
                )
        yield check
        if not check.equal:
            return
    say("update: two steps of the optimizer")
    yield compare_updates(case, want)


def compare_answers(
    name: str,
    case: Case,
    got: Answer,
    want: Answer,
    near: Answer | None = None,
    ops: Answer | None = None,
) -> Verdict:
    """Compare the answer under the plan with the float32 reference, without findings.

    Args:
      name: the name of the check.
      case: what is run; its model gives the order of the rows.
      got: the answer under the plan, with all of its copies.
      want: the reference's answer, in float32 on one device.
      near: one device's answer with plain ops in the precision under test, from which the
        tolerances are taken; None = float32, whose tolerances are fixed.
      ops: one device's answer with the library's ops, which widens the tolerances where it is close
        to the reference; None = it was not run.
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


def explain_plan(
    case: Case, verdict: Verdict, got: Answer, want: Answer, one: OneDevice, say: Say
) -> Verdict:
    """Explain each wrong gradient under a plan, and name the one that lies nearest to the loss.

    Args:
      case: what was run.
      verdict: the comparison, in which at least one gradient is wrong.
      got: the answer under the plan, with its shardings.
      want: the reference's answer.
      one: runs the reference on parts of the batch and on changed ones.
      say: receives a line of text as each phase begins.

    Returns:
      The verdict with a finding in each wrong row, and with `origin`.
    """
    plan = case.experiment("float32").plan
    model = case.config.model
    run = partial(one, case.params)
    partitions = partitions_of(case, plan)
    say(
        f"differs: the gradients of {sum(len(part.batches) for part in partitions)} shards and "
        "microbatches alone"
    )

    def altered() -> Iterator[Alteration]:
        if verdict.loss_ok:  # the forward pass is right, and so is the mask
            return
        say("differs: the loss does too, so other attention masks are tried")
        for name, what in (
            ("segments", "a token sees the documents packed before its own"),
            ("positions", "positions do not restart with each document"),
        ):
            if name in case.batch:
                yield (
                    "documents",
                    what,
                    run({key: rows for key, rows in case.batch.items() if key != name}).grads,
                )
        for offset, what in (
            (1, "a token sees the one after it"),
            (-1, "a token does not see itself and the first sees all"),
        ):
            other = one_device(
                case, "float32", exact=True, ops=partial(ReferenceOps, offset=offset)
            )
            yield "mask", what, other(case.params, case.batch).grads

    # numbers, besides the sizes of mesh axes, that may be the factor by which a gradient is wrong
    sizes = {
        "accumulation": case.config.train.accumulation,
        "microbatches": pipelined_microbatches(plan),
        "query heads per kv head": model.heads // model.kv_head_count,
        "tokens that count": int(np.sum(case.batch["labels"] >= 0)),
    }
    verdict = explain(verdict, got, want, run, partitions, altered, sizes=sizes, stacked=is_stacked)
    return replace(verdict, origin=nearest_to_loss(verdict.wrong))


def partitions_of(case: Case, plan: Plan) -> list[Partition]:
    """Split the batch into row shards and into microbatches, as `step.gradients` deals them out and
    in other orders.

    The loss is a sum over tokens, so the gradients of the parts add up to the whole gradient.

    Args:
      case: what is run; its batch is on the host, [B, S] for each array.
      plan: the plan, whose mesh splits the rows.

    Returns:
      Partitions into the shards of each mesh axis that splits rows, and into microbatches where
      there is more than one.
    """
    batch = case.batch
    accumulation = case.config.train.accumulation
    piped = pipelined_microbatches(plan)
    row = np.arange(len(batch["labels"]))
    dealt = {
        " of the pipeline": (piped, row // accumulation % piped),
        "": (accumulation, row % accumulation),
        " (of consecutive rows)": (accumulation, row // (len(row) // accumulation)),
    }
    return [
        *shards(batch, dict.fromkeys(batch, plan.sharding(TOKENS))),
        *(
            Partition(
                "microbatch",
                of,
                [{key: x[owner == n] for key, x in batch.items()} for n in range(count)],
            )
            for of, (count, owner) in dealt.items()
            if count > 1
        ),
    ]


_PARTS = ("embed", "blocks", "query", "head", PROJECTIONS)
"""The parts of a model in the order of its forward pass: what compares hidden states with a
teacher's stands at the loss itself."""


def nearest_to_loss(wrong: tuple[GradientRow, ...]) -> str:
    """Name the wrong gradient that a backward pass meets first, because a mistake there is passed
    on to the others.

    Args:
      wrong: at least one row, in the order of the forward pass, but for layers.

    Returns:
      The name, such as `blocks.up of layer 3`.
    """

    def place(numbered: tuple[int, GradientRow]) -> tuple[int, int, int]:
        number, row = numbered
        part = row.name.split(".")[0]
        layer = max(row.layers or [-1])
        return (_PARTS.index(part) if part in _PARTS else 0, layer, number)

    _, row = max(enumerate(wrong), key=place)
    if row.layers:
        return f"{row.name} of layer {max(row.layers)}"
    return row.name
