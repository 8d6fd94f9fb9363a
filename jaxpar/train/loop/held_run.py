"""An open run: `open_run` holds a run folder from first to last, and `Run.train` runs the steps
that are left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import jax

from jaxpar.base.config import Config
from jaxpar.base.console import console
from jaxpar.base.errors import Say, UserError
from jaxpar.base.process.machine_notice import MachineNotice
from jaxpar.base.process.multihost import raised_together
from jaxpar.base.process.preemption import Stop
from jaxpar.data.corpus import Corpus
from jaxpar.train.experiment import Experiment
from jaxpar.train.goodput import Account
from jaxpar.train.guard.failures import CopiesDiffer, Diverged, PeerLost, peer_errors
from jaxpar.train.guard.time_limit import TimeLimit, save_seconds
from jaxpar.train.hooks import Hook
from jaxpar.train.hooks.given import require_hooks
from jaxpar.train.loop.messages import failed, left
from jaxpar.train.loop.timing import save_watchdog
from jaxpar.train.loop.training import Result, has_work, nothing_to_do, train_opened
from jaxpar.train.opening import OpenRun, open_folder
from jaxpar.train.runs.bucket import copy_of, run_here
from jaxpar.train.runs.folder.manifest import DamagedCheckpoint, UnreadCheckpoint
from jaxpar.train.runs.stores import StoreOf, store_of


def run(
    experiment: Config | Experiment,
    folder: str | Path,
    hooks: Sequence[Hook] = (),
    corpus: Corpus | None = None,
    store: StoreOf = store_of,
) -> Result:
    """Train the run in `folder`, or go on with it: `open_run`, then `Run.train`.

    Args:
      experiment: the experiment, or the config of one, with nothing left open:
        `jaxpar.plan.resolve` settles a memory budget and `overlap auto`. If the folder already has
        a config, the two may differ only in layout and reporting.
      folder: the run folder, which is made if it is absent; or its URL in a bucket.
      hooks: what a program does besides at steps; the same ones on every process.
      corpus: the data, if they are already loaded and are not the experiment's.
      store: makes the store that keeps the checkpoints; a `CheckpointStore`, or a class of one's
        own.

    Raises:
      OutOfMemory: a device has too little memory for a step or an evaluation.
      Diverged: a step was not finite.
      PeerLost: another process does not answer any more.
      CopiesDiffer: `train.check_replicas` found that a device fails.
      UserError: the user can mend it: config, devices or data are bad, or the folder has another
        config.
    """
    with open_run(experiment, folder, corpus, store) as opened:
        return opened.train(hooks)


@contextmanager
def open_run(
    experiment: Config | Experiment,
    folder: str | Path,
    corpus: Corpus | None = None,
    store: StoreOf = store_of,
    account: Account | None = None,
    began: float | None = None,
) -> Iterator[Run]:
    """Open a run folder, hold it, and give it back at the end, whatever fails.

    Inside, the folder is this training's: nobody else trains it, and what is written there goes to
    its bucket too.

    Args:
      experiment: the experiment, or the config of one, with nothing left open.
      folder: the run folder, which is made if it is absent; or its URL in a bucket.
      corpus: the data, if they are already loaded and are not the experiment's.
      store: makes the store that keeps the checkpoints.
      account: counts what the time of this process goes on, and is closed by the caller; None = its
        time is that of this context, from `began`.
      began: when `train.max_time` began to count, by `time.monotonic`; None = now.

    Raises:
      UserError: config, devices or data are bad, or the folder has another config.
    """
    say = console().print if jax.process_index() == 0 else lambda line: None
    began = time.monotonic() if began is None else began
    with ExitStack() as stack:
        stack.enter_context(peer_errors())
        if account is None:
            account = stack.enter_context(closing(Account(began)))
        here = run_here(folder)
        opened = Run(lambda: open_folder(experiment, here, corpus, say, store), account, began, say)
        stack.callback(opened.close)
        yield opened


class Run:
    """A run folder that this training has, until the end of `open_run`."""

    def __init__(
        self,
        open_again: Callable[[], OpenRun],
        account: Account,
        began: float,
        say: Say,
    ):
        """Open a run folder.

        Args:
          open_again: opens it; is called once more where its newest step turns out to be damaged.
          account: counts the time by what it goes on.
          began: when `train.max_time` began to count, by `time.monotonic`.
          say: prints a line, on the first process.

        Raises:
          UserError: it cannot be opened.
        """
        self._open_again = open_again
        self._account = account
        self._began = began
        self._say = say
        self._has_trained = False
        self._opened = open_again()

    @property
    def experiment(self) -> Experiment:
        """What is trained."""
        return self._opened.experiment

    @property
    def folder(self) -> Path:
        """The run folder on this machine; that of a run in a bucket is a copy."""
        return self._opened.folder

    @property
    def after(self) -> int:
        """The step that the run goes on after; 0 = it begins."""
        return self._opened.after

    def train(self, hooks: Sequence[Hook] = ()) -> Result:
        """Run the steps that are left. All processes must call this, once.

        Args:
          hooks: what a program does besides at steps; the same ones on every process.

        Raises:
          OutOfMemory, Diverged, PeerLost, CopiesDiffer, UserError: what `run` raises.
        """
        if self._has_trained:
            raise UserError("this run was trained already: open it again to go on with it")
        require_hooks(hooks)
        self._has_trained = True
        while True:
            result = self._train_and_end(hooks)
            if result is not None:
                return result
            self.close()
            self._opened = self._open_again()

    def close(self) -> None:
        """Give the folders back, with the account of the time until then; nothing is written into
        them, or sent, from now on.
        """
        try:
            self._account.rest()
        finally:
            self._opened.release()

    def _train_and_end(self, hooks: Sequence[Hook]) -> Result | None:
        """Run the steps that are left, and wait until they are saved. None = the step to go on from
        is damaged, and was moved aside: the run is to be opened again.
        """
        opened = self._opened
        account = self._account
        limit = self._time_limit()
        stop = Stop(limit.asks)
        # what was saved is written to its end before a signal ends the process
        with closing(stop), closing(MachineNotice(stop.ask)):
            try:
                begins = has_work(opened)
                if begins:
                    result = train_opened(opened, hooks, stop, limit, account)
                else:
                    result = nothing_to_do(opened, self._say)
            except PeerLost as error:
                account.note_end(failed(error))
                for tier in opened.tiers:
                    tier.leave()  # nothing is waited for, as that would wait for the other process
                raise
            except BaseException as error:
                account.note_end(failed(error))
                aside = _is_of_first_step(opened, error)
                if aside:  # while the folder is still this training's
                    opened.source.set_aside(opened.after, str(error))
                for tier in opened.tiers:
                    try:
                        with save_watchdog(opened):
                            tier.close(_leave_together(error))
                    except Exception as later:  # the first error is the one to tell
                        self._say(f"warning: {later}")
                if aside:
                    return None
                raise
            with account.clock.during("saving"), save_watchdog(opened):
                opened.checkpoints.remove_old()
                for tier in opened.tiers:
                    tier.close()
            account.note_end(left(result.step, result.interrupted, stop.why))
            if said := account.summary():
                self._say(said)
            if begins:
                for hook in hooks:
                    hook.on_end(result.step)
        return result

    def _time_limit(self) -> TimeLimit:
        """Make the limit of `train.max_time`, which knows from a run that goes on how long a save
        takes.
        """
        opened = self._opened
        train = opened.experiment.config.train
        limit = TimeLimit(train.most_seconds, self._began, f"train.max_time={train.max_time}")
        # not that of the local tier, nor of what is sent to a bucket: how long that took is not
        # known
        in_folder = opened.source is opened.checkpoints and copy_of(opened.folder) is None
        if opened.after and in_folder:
            limit.note_save(save_seconds(opened.source.folder / str(opened.after)))
        return limit


def _is_of_first_step(opened: OpenRun, error: BaseException) -> bool:
    """Whether an error is damage of the step that the run goes on from. A step without a manifest
    shows its damage when it is read, and of several processes perhaps to one alone.
    """
    if not isinstance(error, DamagedCheckpoint) or isinstance(error, UnreadCheckpoint):
        return False
    # another step may have been read too, as that of a run whose weights are begun from
    place = opened.source.folder / str(opened.after)
    return jax.process_count() == 1 and not opened.is_new and error.place == place


def _leave_together(error: BaseException) -> bool:
    """Whether all processes leave with an error: those of the numbers of a step are found by each
    of them.
    """
    return raised_together(error) or isinstance(error, Diverged | CopiesDiffer)
