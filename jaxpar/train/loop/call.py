"""A call of `run`: the folder is opened, what is left of the run is trained, and the folder is
given back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import jax
from jax.stages import Compiled

from jaxpar.base.compiled_for import compiling_for
from jaxpar.base.config import Config
from jaxpar.base.console import ProgressLine, bytes_text, console
from jaxpar.base.process.machine_notice import MachineNotice
from jaxpar.base.process.multihost import raised_together, run_together
from jaxpar.base.process.preemption import Stop
from jaxpar.data.corpus import Corpus
from jaxpar.hlo.collective_order import require_order
from jaxpar.train.evaluations import Evaluations
from jaxpar.train.experiment import Experiment
from jaxpar.train.goodput import Account, Cause
from jaxpar.train.guard.failures import (
    CopiesDiffer,
    Diverged,
    PeerLost,
    Running,
    memory_errors,
    peer_errors,
)
from jaxpar.train.guard.time_limit import TimeLimit, save_seconds
from jaxpar.train.loop.messages import done_already, ended, failed, left, stopped
from jaxpar.train.loop.parts import Parts, Watch
from jaxpar.train.loop.steps import run_steps
from jaxpar.train.loop.timing import save_watchdog
from jaxpar.train.loop.tools import make_tools
from jaxpar.train.metrics import MetricsLog, Profile, Report
from jaxpar.train.open_run import FirstStep, OpenRun, banner_lines, first_step, keep_run, open_run
from jaxpar.train.runs.bucket import copy_of, run_here
from jaxpar.train.runs.folder.manifest import DamagedCheckpoint, UnreadCheckpoint
from jaxpar.train.sinks import Sink
from jaxpar.train.stateful import Stateful, load_states
from jaxpar.train.step import evaluation_params, make_train_step


class Result(NamedTuple):
    """How a run ended: the step that it reached, its last losses (nats a token), and the text's
    unigram entropy.
    """

    step: int
    loss: float | None
    val_loss: float | None
    unigram_entropy: float
    interrupted: bool


def run(
    experiment: Config | Experiment,
    folder: str | Path,
    corpus: Corpus | None = None,
    watch: Watch = lambda *_: None,
    report: Report | None = None,
    began: float | None = None,
    stateful: Mapping[str, Stateful] | None = None,
    account: Account | None = None,
    finish: Callable[[], None] = lambda: None,
) -> Result:
    """Train the run in `folder`, or go on with it.

    Args:
      experiment: the experiment, or the config of one, with nothing left open:
        `jaxpar.plan.resolve` settles a memory budget and `overlap auto`. If the folder already has
        a config, the two may differ only in layout and reporting.
      folder: the run folder, which is made if it is absent; or its URL in a bucket.
      corpus: the data, if they are already loaded and are not the experiment's.
      watch: a function that the first process calls in a thread beside the loop.
      report: a function that every process calls with the step and the numbers of each row of
        metrics.jsonl. The calls are the same in number and order on all of them; speed and
        data_wait are those of the process, and the first alone is told what the time went on.
      began: when `train.max_time` began to count, by `time.monotonic`; None = now.
      stateful: objects by name whose state is saved with each checkpoint, on the first process, and
        given back to them, on every process, when the run goes on.
      account: counts what the time of this process goes on, and is closed by the caller, for whom
        the run has not ended yet; None = its time is that of this call, from `began`.
      finish: is called on every process when the run has been saved, before its folder is given
        back, for what is to be written there.

    Raises:
      OutOfMemory: a device has too little memory for a step or an evaluation.
      Diverged: a step was not finite.
      PeerLost: another process does not answer any more.
      CopiesDiffer: `train.check_replicas` found that a device fails.
      UserError: the user can mend it: config, devices or data are bad, or the folder has another
        config.
    """
    folder = run_here(folder)
    say = console().print if jax.process_index() == 0 else lambda line: None
    began = time.monotonic() if began is None else began
    with ExitStack() as stack:
        stack.enter_context(peer_errors())
        if account is None:
            account = stack.enter_context(closing(Account(began)))
        call = _Call(watch, report, began, stateful or {}, account, say, finish)
        while True:
            opened = open_run(experiment, folder, corpus, say)
            result = _train_and_close(opened, call)
            if result is not None:
                return result


class _Call(NamedTuple):
    """What the caller of `run` has given beside experiment and folder (see there), and `say`, which
    prints a line on the first process.
    """

    watch: Watch
    report: Report | None
    began: float
    stateful: Mapping[str, Stateful]
    account: Account
    say: Callable[[str], None]
    finish: Callable[[], None]


def _is_of_first_step(opened: OpenRun, error: BaseException) -> bool:
    """Whether an error is damage of the step that the run goes on from. A step without a manifest
    shows its damage when it is read, and of several processes perhaps to one alone.
    """
    if not isinstance(error, DamagedCheckpoint) or isinstance(error, UnreadCheckpoint):
        return False
    # another step may have been read too, as that of a run whose weights are begun from
    place = opened.source.folder / str(opened.after)
    return jax.process_count() == 1 and not opened.is_new and error.place == place


def _train_and_close(opened: OpenRun, call: _Call) -> Result | None:
    """Run the steps that are left, and give the folder back. None = the step to go on from is
    damaged, and was moved aside: the run is to be opened again.
    """
    limit = _time_limit(opened, call.began)
    stop = Stop(limit.asks)
    # what was saved is written to its end before a signal ends the process
    with _released(opened, call.account), closing(stop), closing(MachineNotice(stop.ask)):
        try:
            result = _train(opened, call, stop, limit)
        except PeerLost as error:
            call.account.ends(failed(error))
            raise  # nothing is waited for, as that would wait for the other process
        except BaseException as error:
            call.account.ends(failed(error))
            aside = _is_of_first_step(opened, error)
            if aside:  # while the folder is still this training's
                opened.source.set_aside(opened.after, str(error))
            for tier in opened.tiers:
                try:
                    with save_watchdog(opened):
                        tier.close(_leave_together(error))
                except Exception as later:  # the first error is the one to tell
                    call.say(f"warning: {later}")
            if aside:
                return None
            raise
        with call.account.clock.during("saving"), save_watchdog(opened):
            opened.checkpoints.remove_old()
            for tier in opened.tiers:
                tier.close()
        call.account.ends(left(result.step, result.interrupted, stop.why))
        if said := call.account.summary():
            call.say(said)
        call.finish()
    return result


@contextmanager
def _released(opened: OpenRun, account: Account) -> Iterator[None]:
    """Give the folders back at the end, with the account of the time until then."""
    try:
        yield
    finally:
        account.note(at_once=True)
        opened.release()


def _leave_together(error: BaseException) -> bool:
    """Whether all processes leave with an error: those of the numbers of a step are found by each
    of them.
    """
    return raised_together(error) or isinstance(error, Diverged | CopiesDiffer)


def _time_limit(opened: OpenRun, began: float) -> TimeLimit:
    """That of `train.max_time`, which knows from a run that goes on how long a save takes."""
    train = opened.experiment.config.train
    limit = TimeLimit(train.most_seconds, began, f"train.max_time={train.max_time}")
    # not that of the local tier, nor of what is sent to a bucket: how long that took is not known
    if opened.after and opened.source is opened.checkpoints and copy_of(opened.folder) is None:
        limit.note_save(save_seconds(opened.source.folder / str(opened.after)))
    return limit


def _train(opened: OpenRun, call: _Call, stop: Stop, limit: TimeLimit) -> Result:
    """Run the steps that are left. From the first of them on `stop` takes signals."""
    experiment = opened.experiment
    show = ProgressLine(experiment.config.train.steps, opened.after, jax.process_index() == 0)
    running = Running()
    evaluations = Evaluations(opened, show.say, running, stop, clock=call.account.clock)
    missed = evaluations.missed()
    nothing_left = opened.after >= opened.last
    if nothing_left and not missed:
        show.say(done_already(opened))
        return Result(opened.after, None, None, experiment.unigram_entropy, False)
    run_together(lambda: _open_account(opened, call))
    profile = _profile(opened, evaluations)
    # One other thread compiles the step while this one makes or reads the state; while the first
    # steps run, it compiles the evaluation and draws the memory.
    with (
        closing(profile),
        _open_log(opened, call.report, show.say) as log,
        memory_errors(experiment, running),
        _one_thread() as beside,
    ):
        parts = Parts(
            opened,
            evaluations,
            log,
            show,
            beside,
            profile,
            call.watch,
            limit,
            call.stateful,
            call.account,
        )
        if nothing_left:
            outcome = _make_up(parts, missed, stop)
        else:
            outcome = _train_steps(parts, missed, stop)
    show.say(outcome.said)
    return outcome.result


def _open_account(opened: OpenRun, call: _Call) -> None:
    """Have the first process keep the account of the run's time in its folder."""
    if jax.process_index() == 0:
        call.account.open(opened.folder, opened.after, opened.lock.holds, call.say)


def _first_step(parts: Parts) -> FirstStep:
    """Make or read the state before the first step."""
    cause: Cause = "startup" if parts.run.is_new else "restoring"
    with parts.account.clock.during(cause):
        return first_step(parts.run, parts.show.say)


class _Outcome(NamedTuple):
    """How a call ended, and what is said of it once its files are closed."""

    result: Result
    said: str


def _train_steps(parts: Parts, missed: set[str], stop: Stop) -> _Outcome:
    """Compile the step, make or read the state, and run the steps that are left."""
    run = parts.run
    say = parts.show.say
    entropy = run.experiment.unigram_entropy
    compiling = parts.beside.submit(_compile, run.experiment)
    start = _first_step(parts)
    saved = start.stateful
    if saved is not None:
        run_together(lambda: load_states(parts.stateful, saved, say))
    for line in banner_lines(run, start.state, entropy):
        say(line)
    with parts.account.clock.during("compiling"):
        program, compiled = compiling.result()
    say(compiled)
    keep_run(run)
    tools = make_tools(parts, start, program)
    parts.account.clock.enter("other")
    stop.listen()
    with parts.show:
        step = run_steps(tools, missed, stop)
    tools.runner.finish()
    evaluations = parts.evaluations
    val_loss = evaluations.last_loss
    interrupted = step < run.last or evaluations.cut_short
    if interrupted:
        said = stopped(step, evaluations.cut_short, stop.why)
    else:
        said = ended(step, val_loss, tools.timing.meter.trained, entropy)
    return _Outcome(Result(step, tools.rows.loss, val_loss, entropy, interrupted), said)


def _make_up(parts: Parts, missed: set[str], stop: Stop) -> _Outcome:
    """Make up for the evaluation of the last step, after which there is nothing to train."""
    run = parts.run
    experiment = run.experiment
    evaluations = parts.evaluations
    entropy = experiment.unigram_entropy
    start = _first_step(parts)
    parts.account.clock.enter("other")
    for line in banner_lines(run, start.state, entropy):
        parts.show.say(line)
    params = evaluation_params(experiment, start.state)
    with parts.show:
        evaluations.make_up(missed, lambda: params, parts.log, parts.beside)
    cut_short = evaluations.cut_short
    said = done_already(run)
    if cut_short:
        said = stopped(run.after, cut_short, stop.why)
    return _Outcome(Result(run.after, None, evaluations.last_loss, entropy, cut_short), said)


def _compile(experiment: Experiment) -> tuple[Compiled, str]:
    """Compile the step ahead, so that the first is timed like the others; return it and a line to
    say about it.
    """
    began = time.perf_counter()
    step = make_train_step(experiment)
    with compiling_for(experiment.devices[0]):
        lowered = step.lower(experiment.state, experiment.batch)
    compiled = lowered.compile()
    require_order(compiled, experiment.devices)
    used = ""
    if memory := compiled.memory_analysis():
        used = f": {bytes_text(memory.temp_size_in_bytes)} of temporaries per device"
    return compiled, f"compiled the training step in {time.perf_counter() - began:.1f} s{used}"


def _open_log(
    opened: OpenRun,
    report: Report | None,
    say: Callable[[str], None],
) -> MetricsLog:
    """Open the log and the sinks, before anything is compiled: where one is refused, no process
    waits for it.
    """
    main = jax.process_index() == 0
    config = opened.experiment.config
    names = config.metrics.sinks if main else ()
    place = (config, opened.folder, opened.after, say)

    def open_all() -> MetricsLog:
        sinks = [Sink(name, *place) for name in names]
        return MetricsLog(opened.folder, opened.after, main, sinks, report, say)

    return run_together(open_all)


def _profile(opened: OpenRun, evaluations: Evaluations) -> Profile:
    """What traces the steps of `metrics.profile`. Only the first process does: its devices do what
    all do.
    """
    steps = range(0)
    if jax.process_index() == 0 and opened.after < opened.last:
        steps = opened.experiment.config.metrics.profiled
    advice = _profile_advice(opened, evaluations)
    return run_together(lambda: Profile(steps, opened.folder, opened.after, advice))


def _profile_advice(opened: OpenRun, evaluations: Evaluations) -> str:
    """Steps of `metrics.profile` that this call could trace, as they are written."""
    # the first step after a start is slower than the others
    first = min(opened.after + 2, opened.last)
    last = min(first + 4, opened.last)
    due = [step for step in range(first, last) if evaluations.is_due(step)]
    return f"{first}:{min([last, *due])}"


@contextmanager
def _one_thread() -> Iterator[ThreadPoolExecutor]:
    """Give a thread that is waited for, except after Ctrl-C: it may be in the compiler, which
    nothing interrupts.
    """
    pool = ThreadPoolExecutor(1)
    wait = True
    try:
        yield pool
    except KeyboardInterrupt:
        wait = False
        raise
    finally:
        pool.shutdown(wait, cancel_futures=not wait)
