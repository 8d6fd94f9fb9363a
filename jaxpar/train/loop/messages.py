"""What a call of `run` says once it knows how it ended."""

from __future__ import annotations

from jaxpar.base.console import duration_text
from jaxpar.train.opening import OpenRun


def done_already(opened: OpenRun) -> str:
    """Return what to say where there is nothing to train.

    Args:
      opened: the run, whose last step is done.
    """
    steps = opened.experiment.config.train.steps
    more = "steps extends it"
    if opened.last < steps:
        more = f"stop-at 0 goes on to step {steps}"
    done = f"step {opened.after} of {opened.last} is done already: nothing to train"
    return f"{done} (--train.{more}); see {opened.folder}"


def ended(step: int, val_loss: float | None, seconds: float, entropy: float) -> str:
    """Return what to say of a run that reached its last step, or `train.stop_at`.

    Args:
      step: that step.
      val_loss: its validation loss, in nats a token; None = there was no evaluation.
      seconds: how long its steps took.
      entropy: that of the text's unigrams, in nats a token.
    """
    val = ""
    if val_loss is not None:
        val = f", validation loss {val_loss:.4f} nats a token"
    took = duration_text(seconds)
    return f"step {step} done in {took} of training{val} (unigram entropy {entropy:.3f})"


def stopped(step: int, in_evaluation: bool, why: str) -> str:
    """Return what to say of a run that was told to stop.

    Args:
      step: the last step, which is saved.
      in_evaluation: whether the evaluation after it was left.
      why: what told it to stop, which only the process that was told knows; else empty.
    """
    by = f" by {why}" if why else ""
    where = "in the evaluation" if in_evaluation else ""
    place = f"stopped{by} {where}".rstrip()
    return f"{place} after step {step}, saved; the same command goes on from there"


def left(step: int, interrupted: bool, why: str) -> str:
    """Return what the folder of a run says of a call that ended well.

    Args:
      step: the last step, which is saved.
      interrupted: whether it was told to stop before its last step.
      why: what told it to, as for `stopped`.
    """
    if not interrupted:
        return f"ended after step {step}"
    by = f" by {why}" if why else ""
    return f"stopped{by} after step {step}, saved"


def failed(error: BaseException) -> str:
    """Return what the folder of a run says of a call that an error ended."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"ended by an error: {said}"
