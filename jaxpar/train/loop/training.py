"""The training of an open run by one call: the step is compiled, the state made or read, the steps
are run, and what is to be said at the end is known.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import jax
from jax.stages import Compiled

from jaxpar.base.compiled_for import compiling_for
from jaxpar.base.console import ProgressLine, bytes_text
from jaxpar.base.errors import Say, UserError, short
from jaxpar.base.process.multihost import run_together
from jaxpar.base.process.preemption import Stop
from jaxpar.hlo.collective_order import require_order
from jaxpar.train.experiment import Experiment
from jaxpar.train.goodput import Account, Cause
from jaxpar.train.guard import Guard
from jaxpar.train.guard.failures import Running, memory_errors
from jaxpar.train.guard.judge import Judge
from jaxpar.train.guard.time_limit import TimeLimit
from jaxpar.train.hooks import Hook, HookedRun
from jaxpar.train.hooks.copies import Copies
from jaxpar.train.hooks.evaluations import Evaluations, misses_an_evaluation
from jaxpar.train.hooks.profile import Profile, steps_to_trace
from jaxpar.train.loop.messages import banner_lines, done_already, ended, stopped
from jaxpar.train.loop.rows import StepRows
from jaxpar.train.loop.run_step import StepRunner
from jaxpar.train.loop.saves import Saves
from jaxpar.train.loop.steps import Steps
from jaxpar.train.loop.timing import Timing
from jaxpar.train.metrics import MetricsLog, MetricsRow
from jaxpar.train.opening import FirstStep, OpenRun, first_step, keep_run
from jaxpar.train.sinks import Sink
from jaxpar.train.step import make_train_step


class Result(NamedTuple):
    """How a run ended: the step that it reached, its last losses (nats a token), and the text's
    unigram entropy.
    """

    step: int
    loss: float | None
    val_loss: float | None
    unigram_entropy: float
    interrupted: bool


def has_work(run: OpenRun) -> bool:
    """Whether an open run has steps left, or misses an evaluation. All processes must call this."""
    return run.after < run.last or misses_an_evaluation(run)


def nothing_to_do(run: OpenRun, say: Say) -> Result:
    """Say that an open run is done already."""
    say(done_already(run))
    return Result(run.after, None, None, run.experiment.unigram_entropy, False)


def train_opened(
    run: OpenRun, hooks: Sequence[Hook], stop: Stop, limit: TimeLimit, account: Account
) -> Result:
    """Run the steps that are left of an open run that has work. All processes must call this.

    Args:
      hooks: what a program does besides.
      stop: says when to stop; from the first step on it takes signals.
      limit: the time that the call may take.
      account: counts the time by what it goes on.

    Returns:
      How it ended.
    """
    experiment = run.experiment
    show = ProgressLine(experiment.config.train.steps, run.after, jax.process_index() == 0)
    running = Running()
    steps_left = run.after < run.last
    run_together(lambda: _open_account(run, account, show.say))
    traced = run_together(lambda: steps_to_trace(run))
    # One other thread compiles the step while this one makes or reads the state; while the first
    # steps run, it compiles the evaluation and draws the memory.
    with (
        _open_log(run, hooks, show.say) as log,
        memory_errors(experiment, running),
        _one_thread() as beside,
    ):
        compiling = beside.submit(_compile, experiment) if steps_left else None
        cause: Cause = "startup" if run.is_new else "restoring"
        with account.clock.during(cause):
            start = first_step(run, show.say)
        for line in banner_lines(run, start.state, experiment.unigram_entropy):
            show.say(line)
        timing = Timing(run, limit, account)
        batch_done = timing.watchdog.batch_done
        evaluations = Evaluations(run, log, running, stop, beside, hooks, batch_done)
        if compiling is None:
            with show:
                _make_up(run, start, [*hooks, evaluations], timing, stop, show.say)
            result = _result(run, run.after, None, evaluations, stop.cut_short)
            said = done_already(run)
        else:
            with account.clock.during("compiling"):
                program, compiled = compiling.result()
            show.say(compiled)
            runner = StepRunner(run, program, start, timing)
            guard = Guard(experiment.config.train, start.guard)
            rows = StepRows(run, log, show, timing)
            profile = Profile(experiment.config.metrics.profiled, traced, program, beside)
            copies = [Copies(run)] if experiment.config.train.check_replicas else []
            in_order = [profile, *copies, *hooks, evaluations]
            saves = Saves(run, in_order, timing, show.say)
            saves.begin(start)
            keep_run(run)
            account.clock.enter("other")
            stop.listen()
            steps = Steps(
                run=run,
                hooks=in_order,
                stop=stop,
                timing=timing,
                rows=rows,
                judge=Judge(guard, runner.batches.require, show.say),
                runner=runner,
                saves=saves,
                beside=beside,
                say=show.say,
            )
            with show, profile:
                last = steps.take()
            interrupted = last < run.last or stop.cut_short
            result = _result(run, last, rows.loss, evaluations, interrupted)
            said = ended(last, result.val_loss, timing.meter.trained, result.unigram_entropy)
        if result.interrupted:
            said = stopped(result.step, stop.cut_short, stop.why)
    show.say(said)
    return result


def _make_up(
    run: OpenRun, start: FirstStep, hooks: Sequence[Hook], timing: Timing, stop: Stop, say: Say
) -> None:
    """Make the evaluations that the last step of a run has missed, by the parameters that hooks
    give.
    """
    Saves(run, hooks, timing, say).begin(start)
    timing.account.clock.enter("other")
    seen = HookedRun(run.experiment, run.folder, run.after, say, stop.ask, timing.apart)
    for hook in hooks:
        hook.on_begin(seen, start.state)


def _result(
    run: OpenRun, step: int, loss: float | None, evaluations: Evaluations, interrupted: bool
) -> Result:
    entropy = run.experiment.unigram_entropy
    return Result(step, loss, evaluations.last_loss, entropy, interrupted)


def _open_account(run: OpenRun, account: Account, say: Say) -> None:
    """Have the first process keep the account of the run's time in its folder."""
    if jax.process_index() == 0:
        account.open(run.folder, run.after, run.lock.holds, say)


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


@contextmanager
def _open_log(run: OpenRun, hooks: Sequence[Hook], say: Say) -> Iterator[MetricsLog]:
    """Open the log and the sinks, before anything is compiled: where one is refused, no process
    waits for it.
    """
    main = jax.process_index() == 0
    config = run.experiment.config
    names = config.metrics.sinks if main else ()
    place = (config, run.folder, run.after, say)

    def report(step: int, row: MetricsRow) -> None:
        for hook in hooks:
            hook.on_row(step, row)
            _require_numbers(hook, row)

    with ExitStack() as stack:

        def open_all() -> MetricsLog:
            sinks = list[Sink]()
            for name in names:
                sinks.append(Sink(name, *place))
                stack.callback(sinks[-1].close, failed=True)
            log = MetricsLog(run.folder, run.after, main, sinks, report, say)
            stack.pop_all()  # the log closes its sinks
            return stack.push(log)

        yield run_together(open_all)


def _require_numbers(hook: Hook, row: MetricsRow) -> None:
    """Refuse what a hook has put into a row, where it is no number."""
    for key, value in row.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            del row[key]
            raise UserError(
                f"the hook {hook.name} has put {key}={short(value)} into a row of metrics.jsonl, "
                "which takes numbers: write float(...) of it"
            )


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
