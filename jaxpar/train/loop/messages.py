"""What a call of `run` says at its begin, and once it knows how it ended."""

from __future__ import annotations

import jax

from jaxpar.base.compiler import REPEATING_FLAG, options_text, repeats_to_the_bit
from jaxpar.base.config import Config
from jaxpar.base.console import banner, bytes_text, count_text, duration_text
from jaxpar.base.layout.placements import local_bytes
from jaxpar.data.streams.tokens import Tokens
from jaxpar.train.opening import OpenRun
from jaxpar.train.runs.bucket import folder_here
from jaxpar.train.runs.folder.own_tokenizer import have_other_tokenizers
from jaxpar.train.state import TrainState


def banner_lines(
    run: OpenRun,
    state: TrainState[jax.Array],
    entropy: float,
) -> list[str]:
    """Return the lines at the start of a run: versions, devices, model, data, folder.

    Args:
      state: its state, whose bytes are counted.
      entropy: that of the text's unigrams, in nats a token.
    """
    config = run.experiment.config
    text = run.corpus.train
    held_out = "nothing, as there is no data.val_path,"
    if run.corpus.val:
        held_out = run.corpus.val.amount
    parameters = count_text(run.experiment.model.parameter_count())
    facts = {
        "model": f"{config.model.family}, {parameters} parameters, "
        f"{bytes_text(local_bytes(state))} of state per device",
        "data": f"{text.origin}: {text.amount} to train on, {held_out} for validation, "
        f"unigram entropy {entropy:.3f} nats a token",
        "run": f"{run.folder}" + (f", resumed after step {run.after}" if run.after else ""),
    }
    if isinstance(text, Tokens):
        facts["reading"] = how_often_read(config, text.size)
    if config.train.init and run.is_new:
        facts["weights"] = config.train.init
        if have_other_tokenizers(folder_here(config.train.init), run.folder):
            facts["weights"] += ", WHOSE TOKENIZER IS ANOTHER: its ids meant other tokens"
    options = run.experiment.compiler_options
    repeats = repeats_to_the_bit(run.experiment.plan.mesh.devices.flat[0].platform)
    if not (repeats or options.get(REPEATING_FLAG)):
        facts["repeats"] = (
            f"not in every bit; XLA_FLAGS=--{REPEATING_FLAG}=true makes it so, and slower "
            "(docs/reliability.md)"
        )
    if options:
        facts["compiler"] = options_text(options)
    return list(banner(run.experiment.plan, facts))


def how_often_read(config: Config, tokens: int) -> str:
    """Say how often a run reads its text, and whether a single step already does so twice."""
    train = config.train
    of_a_step = train.batch * config.data.seq_len
    times = train.steps * of_a_step / tokens
    said = f"{train.steps:,} steps of {of_a_step:,} tokens read the text {times:.3g} times"
    if of_a_step > tokens:
        said += "; A STEP IS MORE THAN ALL OF IT, so that rows of one step repeat each other"
    return said


def done_already(opened: OpenRun) -> str:
    """Return what to say where there is nothing to train."""
    steps = opened.experiment.config.train.steps
    more = "steps extends it"
    if opened.last < steps:
        more = f"stop-at 0 goes on to step {steps}"
    done = f"step {opened.after} of {opened.last} is done already: nothing to train"
    return f"{done} (--train.{more}); see {opened.folder}"


def ended(step: int, val_loss: float | None, seconds: float, entropy: float) -> str:
    """Return what to say of a run that reached its last step, or `train.stop_at`.

    Args:
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
      why: what told it to, which only the process that was told knows; else empty.
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
