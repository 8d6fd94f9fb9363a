"""What becomes of a run after a bad step: it is looked at once more, and the run stops, or goes on
from the last checkpoint with the batches after those that were read.
"""

from __future__ import annotations

import jax

from jaxpar.base.errors import UserError
from jaxpar.base.jax_compat import compiler_message
from jaxpar.train.guard.failures import Diverged, divergence_message
from jaxpar.train.guard.judge import BadStep
from jaxpar.train.guard.run_again import look_again
from jaxpar.train.loop.timing import save_watchdog
from jaxpar.train.loop.tools import Tools
from jaxpar.train.open_run import first_step


def go_back(tools: Tools, bad: BadStep) -> int:
    """Say what was found of a bad step, and go on from the last checkpoint. All processes must call
    this.

    Args:
      tools: what the steps work with.
      bad: the step.

    Returns:
      The step to go on after.

    Raises:
      Diverged: the policy is to stop.
      UserError: the checkpoint cannot be read.
    """
    run = tools.parts.run
    said = "; ".join(filter(None, (_look_again(tools, bad), bad.judged.why)))
    if bad.judged.decision == "rollback":
        return _roll_back(tools, bad.numbers.step, said)
    trained = run.experiment.model.trained(tools.runner.state.params)
    saved = run.newest
    raise Diverged(divergence_message(bad.numbers, trained, saved, run.folder, said))


def _look_again(tools: Tools, bad: BadStep) -> str:
    """What to say of a step that was not finite, after another look at it; what becomes of the
    state is not the run's any more. Nothing of a step that has changed its state.
    """
    row = bad.numbers
    runner = tools.runner
    if not row.kept_state or tools.batches.place_before(row.step) is None:
        return ""
    tools.parts.show.say(f"step {row.step} was not finite: it is looked at once more")
    try:
        with tools.timing.apart("guard"):
            return look_again(
                tools.parts.run.experiment,
                runner.program,
                runner.state,
                runner.batches_again(row.step),
                row,
                bad.finite_since,
            )
    except (jax.errors.JaxRuntimeError, UserError) as error:
        return f"it could not be looked at again ({compiler_message(str(error))})"


def _roll_back(tools: Tools, bad_step: int, said: str) -> int:
    """Take the last checkpoint, and go on from it with the batches after those that were read;
    return its step.
    """
    run = tools.parts.run
    say = tools.parts.show.say
    guard = tools.judge.guard
    most = run.experiment.config.train.max_bad_steps
    with tools.timing.apart("guard"):
        for tier in run.tiers:
            with save_watchdog(run):
                tier.wait()
        saved = run.newest
        step = saved or 0
        where = "the beginning" if saved is None else f"the checkpoint of step {step}"
        say(f"warning: step {bad_step} was bad: {said or 'its update was not finite'}")
        say(
            f"the run goes on from {where}, with the batches after those that were read "
            f"({guard.bad_steps} of train.max_bad_steps={most})"
        )
        tools.judge.forget()
        tools.batches.forget_all()
        start = first_step(run.back_to(saved), say)
        tools.runner.go_on_with(start.state)
        tools.saves.give_back(start.stateful)
    tools.batches.go_on_after(step)
    guard.roll_back(step)
    tools.parts.account.roll_back(step)
    tools.rows.go_back(step)
    return step
