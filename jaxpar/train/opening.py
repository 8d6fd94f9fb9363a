"""Opens a run folder: what a run needs is loaded and held against what the folder has, and the
state and the data of its first step are made or read.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
from grain import DatasetIterator

from jaxpar.base.config import Config, incompatible_changes
from jaxpar.base.config.checks import require_settled
from jaxpar.base.errors import Say, UserError, is_url
from jaxpar.base.machine import machine_memory
from jaxpar.base.process.multihost import run_on_first, run_together, told_by_first
from jaxpar.data.corpus import Corpus, train_batches
from jaxpar.data.masking import make_masking
from jaxpar.data.streams.tokens import HostBatch
from jaxpar.parallel.host_memory import require_right_gradients
from jaxpar.parallel.pipeline import stored_order
from jaxpar.train.batch import batch_rows
from jaxpar.train.distil import Teacher, open_teacher
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment, offload_asked, plan_notes
from jaxpar.train.optimizer.given_optimizer import other_optimizer_note
from jaxpar.train.optimizer.learning_rate import schedule_note
from jaxpar.train.restore import (
    OPTIMIZER_FINGERPRINT,
    TEACHER,
    load_params,
    restore_state,
    same_folder,
    saved_part,
)
from jaxpar.train.run_data import NOT_COMPARED, Compared, compare_data, keep_data, with_run_data
from jaxpar.train.runs.bucket import folder_here
from jaxpar.train.runs.checkpoints import Whole
from jaxpar.train.runs.folder.own_tokenizer import keep_tokenizer
from jaxpar.train.runs.folder.run_folder import (
    compare_run,
    keep_config,
    moved_data,
    replaced_values,
    resized_note,
)
from jaxpar.train.runs.folder.run_identity import require_tokenizer_files, run_identity
from jaxpar.train.runs.folder.steps import CHECKPOINTS
from jaxpar.train.runs.local_tier import LocalTier, note_start
from jaxpar.train.runs.locks.run_lock import SharedLock
from jaxpar.train.runs.orbax_options import longest_save
from jaxpar.train.runs.stores import StoreOf, store_of
from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints
from jaxpar.train.state import TrainState
from jaxpar.train.state_memory import require_memory
from jaxpar.train.step import init_state

GUARD = "guard"
"""The name of what `Guard.saved` returns, beside a state."""
HOOKS = "stateful"
"""The name of the states of hooks, beside a state: that of earlier versions."""


class OpenRun(NamedTuple):
    """A run folder and what is trained in it.

    Attributes:
      folder: the run folder.
      experiment: what is trained.
      corpus: its data.
      checkpoints: those of the folder.
      compared: what is known of the data that the run had before.
      after: the step to go on after; 0 = none was trained.
      is_new: whether it has no checkpoint, not even that of an import, which is of step 0.
      lock: keeps the folder from other trainings, and says where it was lost.
      held: gives back what was opened, the last first; docs/architecture.md has a table of it.
      source: what has the step to go on after: `checkpoints`, or those of the local tier.
      local: what `checkpoint.local` has; None = it is not set.
      teacher: its teacher; None = it has none.
    """

    folder: Path
    experiment: Experiment
    corpus: Corpus
    checkpoints: TrainingCheckpoints
    compared: Compared
    after: int
    is_new: bool
    lock: SharedLock
    held: ExitStack
    source: TrainingCheckpoints
    local: LocalTier | None = None
    teacher: Teacher | None = None

    @property
    def last(self) -> int:
        """The step to stop after."""
        return _last_step(self.experiment.config)

    @property
    def tiers(self) -> list[TrainingCheckpoints]:
        """All checkpoints of the run: those of the folder, and the local ones."""
        local = [] if self.local is None else [self.local.checkpoints]
        return [self.checkpoints, *local]

    @property
    def newest(self) -> int | None:
        """The newest step that is saved, in either tier; None = there is none."""
        return max((step for tier in self.tiers for step in tier.steps()), default=None)

    def back_to(self, step: int | None) -> OpenRun:
        """Return the run as it goes on after a step.

        Args:
          step: one that is saved; None = it begins anew.
        """
        if step is None:
            return self._replace(after=0, is_new=True)
        source = next(tier for tier in self.tiers if step in tier.steps())
        return self._replace(after=step, is_new=False, source=source)

    def release(self) -> None:
        """Give the folders back, whatever fails: nothing is written or sent from now on."""
        self.held.close()

    def require_lock(self) -> None:
        """Require that the run folder is still this training's, as far as the heartbeat has seen.

        Raises:
          UserError: another training has it, or it is gone.
        """
        if self.lock.lost:
            raise UserError(self.lock.lost)


def _last_step(config: Config) -> int:
    train = config.train
    return min(train.stop_at or train.steps, train.steps)


class FirstStep(NamedTuple):
    """The state before the first step, the data at their place, what the guard had seen, and the
    states of hooks by name; None = of a new run, which has none.
    """

    state: TrainState[jax.Array]
    data: DatasetIterator[HostBatch]
    guard: dict[str, Any] | None = None
    hooks: dict[str, Any] | None = None


def open_folder(
    experiment: Config | Experiment,
    folder: Path,
    corpus: Corpus | None,
    say: Say,
    store: StoreOf = store_of,
) -> OpenRun:
    """Open a run folder, which is made if it is absent.

    Args:
      experiment: the experiment, or the config of one, settled.
      corpus: the data, if they are already loaded and are not the experiment's.
      say: gets a line for each thing that is otherwise than the user may think.

    Raises:
      UserError: config, devices or data are bad, or the folder is of another run.
    """
    made = _checked(experiment, folder)
    run_together(lambda: require_memory(made, machine_memory()))
    if corpus is not None:
        made = replace(made, corpus=corpus)
    experiment, corpus = with_run_data(made, folder, say)
    config = experiment.config
    for note in (*plan_notes(experiment), *(corpus.tokenizer.notes if corpus.tokenizer else ())):
        say(note)
    if offload_asked(experiment.plan):
        run_together(lambda: require_right_gradients(jax.local_devices()[0], say))
    teacher = run_together(lambda: open_teacher(experiment, corpus))
    if teacher is not None:
        say(teacher.note)
    compared = run_on_first(lambda: compare_data(folder, config, corpus)) or NOT_COMPARED
    before = compare_run(folder, config, compared.known)
    with ExitStack() as held:
        lock = held.enter_context(closing(SharedLock(folder, say)))
        # From now on it is a run folder; that of a run is written once nothing can be refused. Only
        # process 0 knows which.
        if told_by_first(before is None):
            keep_config(folder, config)
        tokenizer = corpus.tokenizer
        if tokenizer is not None:
            run_on_first(lambda: keep_tokenizer(tokenizer, folder))
        identity = run_together(lambda: run_identity(folder, compared.pieces))
        checkpoints = TrainingCheckpoints(
            folder / CHECKPOINTS,
            config.checkpoint,
            identity,
            say,
            lock.require,
            store,
            seconds=longest_save(experiment.state),
        )
        held.callback(checkpoints.abandon)
        local = _find_local(experiment, folder)
        if local is not None:
            held.callback(local.release)
        begin, is_local = _choose_tier(checkpoints, local, folder, config, compared, before, say)
        run_together(lambda: require_tokenizer_files(folder, begin.manifest, say))
        after = begin.step or 0
        source = checkpoints
        if local is not None:
            local.open(after, config.checkpoint, identity)
            held.callback(local.checkpoints.abandon)
            if is_local:
                source = local.checkpoints
        for note in _changes(before, compared, experiment, after):
            say(note)
        return OpenRun(
            folder,
            experiment,
            corpus,
            checkpoints,
            compared,
            after,
            is_new=begin.step is None,
            lock=lock,
            held=held.pop_all(),
            source=source,
            local=local,
            teacher=teacher,
        )


def _changes(
    before: Config | None, compared: Compared, experiment: Experiment, after: int
) -> list[str]:
    """Say what is otherwise than in the run's last call, whose config was `before`."""
    config = experiment.config
    notes = [compared.note]
    if before is not None:
        notes.insert(0, replaced_values(before, config))
        if after:
            notes.append(resized_note(before, config))
        if after and experiment.optimizer.learning_rate is not None:
            notes.append(schedule_note(before.train, config.train, after))
    return [note for note in notes if note]


def _find_local(experiment: Experiment, folder: Path) -> LocalTier | None:
    """What `checkpoint.local` has; None = it is not set."""
    local = experiment.config.checkpoint.local
    if not local:
        return None
    state = saved_part(experiment.state, experiment.model)
    order = stored_order(experiment.plan, experiment.model.config.layers)
    return LocalTier(local, folder, state, order)


def _choose_tier(
    checkpoints: TrainingCheckpoints,
    local: LocalTier | None,
    folder: Path,
    config: Config,
    compared: Compared,
    before: Config | None,
    say: Say,
) -> tuple[Whole, bool]:
    """Take the newest step that is whole, of the run folder or of the local tier, and say which.

    Returns:
      The step, with its manifest, and whether it is the local tier's.
    """
    whole = checkpoints.newest_whole(may_lack=local is not None and bool(local.steps))
    if local is None:
        return whole, False
    name = f"checkpoint.local={config.checkpoint.local}"
    there = whole.step or 0
    # the last step is to be in the run folder, and is trained again where it is not
    last = _last_step(config)
    newest = max((step for step in local.steps if step < last), default=0)
    if newest <= there:
        if whole.step is not None:
            say(f"goes on after step {there} of {folder}: {name} {local.why_not(there)}")
        return whole, False
    if not there:  # the folder cannot refuse another config for its checkpoints' sake
        run_together(lambda: _require_unchanged(folder, before, config, compared.known))
    than = f"step {there}" if there else "all that is whole"
    say(f"goes on after step {newest} of {name}, which is newer than {than} in {folder}")
    return Whole(newest, local.manifest(newest)), True


def _require_unchanged(
    folder: Path, before: Config | None, config: Config, data_compared: bool
) -> None:
    """Refuse to go on from a local checkpoint as another experiment."""
    changed = [] if before is None else incompatible_changes(before, config)
    if data_compared:
        changed = moved_data(changed)
    if changed:
        raise UserError(
            f"{folder} holds a run of another config ({changed[0]}), of which checkpoint.local has "
            "checkpoints: give the old values, or use another --run folder"
        )


def _checked(experiment: Config | Experiment, folder: Path) -> Experiment:
    """The experiment, held against what a training needs."""
    if isinstance(experiment, Config):
        experiment = make_experiment(experiment)
    config = experiment.config
    require_settled(config)
    if config.model.lora.rank and not config.train.init:
        raise UserError(
            "model.lora trains beside frozen weights, and there are none: name their folder in "
            "train.init"
        )
    named = {"train.init": config.train.init, "distill.teacher": config.distill.teacher}
    for setting, there in named.items():
        if there and not is_url(there) and same_folder(Path(there), folder):
            raise UserError(
                f"{setting}={there} is the folder of this run: name another model's, or use "
                "another --run folder"
            )
    return experiment


def keep_run(run: OpenRun) -> None:
    """Write what a run goes on with, once nothing of it can be refused: a refused call leaves a run
    as it was.
    """
    keep_config(run.folder, run.experiment.config)
    run_on_first(lambda: keep_data(run.folder, run.compared.pieces))
    run_on_first(lambda: note_start(run.folder, run.after))


def first_step(run: OpenRun, say: Say) -> FirstStep:
    """Make the state of a new run, or read that of its last checkpoint, with the place in the data.

    Raises:
      UserError: the checkpoint cannot be read, or its run was trained on other data.
    """
    experiment = run.experiment
    config = experiment.config
    data = _batches(run)
    if run.is_new:
        params = None
        if config.train.init:
            params = load_params(folder_here(config.train.init), experiment)
        return FirstStep(init_state(experiment, params), data)
    state, beside = restore_state(run.source, run.after, experiment)
    trained_with = beside.get(OPTIMIZER_FINGERPRINT)
    _require_teacher(run, beside.get(TEACHER))
    note = other_optimizer_note(trained_with, experiment.optimizer_fingerprint, run.after)
    if note:
        say(note)
    run_on_first(lambda: _require_as_much(run, beside.get("training_tokens")))
    changed = told_by_first(run.compared.changed)
    place = beside.get("iterator")
    if place is not None:
        try:
            run_together(lambda: data.set_state(place))
        # whatever an iterator says that finds other data, here or on another process
        except Exception as error:
            if not changed:
                raise
            say(f"warning: these data have no such place, they are read from their start: {error}")
            data = _batches(run)
    return FirstStep(state, data, beside.get(GUARD), beside.get(HOOKS) or {})


def _batches(run: OpenRun) -> DatasetIterator[HostBatch]:
    """This process's rows of the training batches, from the start."""
    config = run.experiment.config
    batch = config.train.batch
    rows = batch_rows(batch, run.experiment.plan)
    corpus = run.corpus
    beside = None if run.teacher is None else run.teacher.read
    size = config.model.vocab_size
    masking = make_masking(config.data, size, corpus.tokenizer)
    return train_batches(corpus.train, config.data, batch, rows, size, masking, beside)


def rows_at(run: OpenRun, position: Any, count: int) -> list[HostBatch]:
    """Read this process's rows of some batches once more.

    Args:
      position: the state of the data's iterator before the first of them.
      count: how many batches.

    Raises:
      UserError: they cannot be read, here or by another process.
    """

    def read() -> list[HostBatch]:
        data = _batches(run)
        data.set_state(position)
        return [next(data) for _ in range(count)]

    return run_together(read)


def _require_teacher(run: OpenRun, before: str | None) -> None:
    """Refuse to go on with another teacher than the checkpoint's, under the same name.

    Raises:
      UserError: the weights, or the answers on disk, are others.
    """
    if run.teacher is None or before in (None, run.teacher.identity):
        return
    distill = run.experiment.config.distill
    raise UserError(
        f"distill.teacher={distill.teacher} is no longer what this run was trained with: bring it "
        "back (distill.step names the checkpoint of a run that has trained on), or start a new "
        "--run"
    )


def _require_as_much(run: OpenRun, before: int | None) -> None:
    """Raise a UserError where a run that does not say which data it has was trained on more or
    fewer.
    """
    text = run.corpus.train
    if not run.compared.known and before not in (None, text.size):
        raise UserError(
            f"the run was trained on {before:,} tokens, documents or examples and {text.origin} "
            f"now has {text.amount}: bring the old text back (the stdlib corpus changes with "
            "Python), or start a new --run"
        )
