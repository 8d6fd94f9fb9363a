"""Opens a run folder: what a run needs is loaded and held against what the folder has, and the
state and the data of its first step are made or read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
from grain import DatasetIterator

from jaxpar.base.compiler import options_text, step_options
from jaxpar.base.config import Config
from jaxpar.base.config.checks import require_settled
from jaxpar.base.console import banner, bytes_text, count_text
from jaxpar.base.errors import UserError
from jaxpar.base.layout.placements import local_bytes
from jaxpar.base.machine import machine_memory
from jaxpar.base.process.together import run_together, told_by_first
from jaxpar.data.corpus import Corpus, train_batches
from jaxpar.data.masking import make_masking
from jaxpar.data.tokens import HostBatch
from jaxpar.parallel.host_memory import require_right_gradients
from jaxpar.train.distil import Teacher, open_teacher
from jaxpar.train.experiment import Experiment
from jaxpar.train.optimizer.given_optimizer import other_optimizer_note
from jaxpar.train.optimizer.learning_rate import schedule_note
from jaxpar.train.plans import make_experiment, offload_asked, plan_notes
from jaxpar.train.require_memory import require_memory
from jaxpar.train.restore import OPTIMIZER_FINGERPRINT, TEACHER, load_params, restore_state
from jaxpar.train.run_data import NOT_COMPARED, Compared, compare_data, keep_data, with_run_data
from jaxpar.train.runs.bucket_runs import folder_here
from jaxpar.train.runs.own_tokenizer import keep_tokenizer
from jaxpar.train.runs.run_folder import (
    compare_run,
    keep_config,
    replaced_values,
    resized_note,
)
from jaxpar.train.runs.run_identity import require_tokenizer_files, run_identity
from jaxpar.train.runs.run_lock import SharedLock
from jaxpar.train.runs.steps import CHECKPOINTS
from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints
from jaxpar.train.stateful import STATEFUL
from jaxpar.train.step import TrainState, batch_rows, init_state

Say = Callable[[str], None]
GUARD = "guard"
"""The name of what `Guard.saved` returns, beside a state."""


class OpenRun(NamedTuple):
    """A run folder and what is trained in it.

    Attributes:
      folder: the run folder.
      experiment: what is trained.
      corpus: its data.
      checkpoints: those of the folder.
      compared: what is known of the data that the run had before.
      first: the step to go on after; 0 = none was trained.
      is_new: whether it has no checkpoint, not even that of an import, which is of step 0.
      lock: that of the folder.
      teacher: its teacher; None = it has none.
    """

    folder: Path
    experiment: Experiment
    corpus: Corpus
    checkpoints: TrainingCheckpoints
    compared: Compared
    first: int
    is_new: bool
    lock: SharedLock
    teacher: Teacher | None = None

    @property
    def last(self) -> int:
        """The step to stop after."""
        train = self.experiment.config.train
        return min(train.stop_at or train.steps, train.steps)

    def require_lock(self) -> None:
        """Require that the run folder is still this training's, as far as the heartbeat has seen.

        Raises:
          UserError: another training has it, or it is gone.
        """
        if self.lock.lost:
            raise UserError(self.lock.lost)


class FirstStep(NamedTuple):
    """The state before the first step, the data at their place, what the guard had seen, and the
    states of a program's own objects by name; None = of a new run, which has none.
    """

    state: TrainState[jax.Array]
    data: DatasetIterator[HostBatch]
    guard: dict[str, Any] | None = None
    stateful: dict[str, Any] | None = None


def open_run(
    experiment: Config | Experiment, folder: Path, corpus: Corpus | None, say: Say
) -> OpenRun:
    """Open a run folder, which is made if it is absent.

    Args:
      experiment: the experiment, or the config of one, settled.
      folder: the run folder.
      corpus: the data, if they are already loaded and are not the experiment's.
      say: gets a line for each thing that is otherwise than the user may think.

    Raises:
      UserError: config, devices or data are bad, or the folder is of another run.
    """
    made = _checked(experiment)
    run_together(lambda: require_memory(made, machine_memory()))
    if corpus is not None:
        made = replace(made, corpus=corpus)
    experiment, corpus = with_run_data(made, folder, say)
    config = experiment.config
    for note in (*plan_notes(experiment), *(corpus.tokenizer.notes if corpus.tokenizer else ())):
        say(note)
    if offload_asked(experiment.plan):
        run_together(lambda: require_right_gradients(jax.local_devices()[0], say))
    main = jax.process_index() == 0
    teacher = run_together(lambda: open_teacher(experiment, corpus))
    if teacher is not None:
        say(teacher.note)
    compared = run_together(lambda: compare_data(folder, config, corpus) if main else NOT_COMPARED)
    before = compare_run(folder, config, compared.known)
    lock = SharedLock(folder, say)
    try:
        return _open_locked(experiment, folder, corpus, say, lock, compared, before, teacher)
    except BaseException:
        lock.close()
        raise


def _open_locked(
    experiment: Experiment,
    folder: Path,
    corpus: Corpus,
    say: Say,
    lock: SharedLock,
    compared: Compared,
    before: Config | None,
    teacher: Teacher | None,
) -> OpenRun:
    """Write what makes a folder a run folder, and find the step to go on after."""
    main = jax.process_index() == 0
    config = experiment.config
    # From now on it is a run folder; that of a run is written once nothing can be refused. Only
    # process 0 knows which.
    if told_by_first(before is None):
        keep_config(folder, config)
    tokenizer = corpus.tokenizer
    if tokenizer is not None:
        run_together(lambda: keep_tokenizer(tokenizer, folder) if main else None)
    identity = run_together(lambda: run_identity(folder, compared.pieces))
    checkpoints = TrainingCheckpoints(
        folder / CHECKPOINTS, config.checkpoint, identity, say, lock.require
    )
    latest, manifest = checkpoints.newest_whole()
    run_together(lambda: require_tokenizer_files(folder, manifest, say))
    first = latest or 0
    notes = [compared.note]
    if before is not None:
        notes.insert(0, replaced_values(before, config))
        if first:
            notes.append(resized_note(before, config))
        if first and experiment.optimizer.learning_rate is not None:
            notes.append(schedule_note(before.train, config.train, first))
    for note in filter(None, notes):
        say(note)
    return OpenRun(
        folder,
        experiment,
        corpus,
        checkpoints,
        compared,
        first,
        is_new=latest is None,
        lock=lock,
        teacher=teacher,
    )


def _checked(experiment: Config | Experiment) -> Experiment:
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
    return experiment


def keep_run(run: OpenRun) -> None:
    """Write what a run goes on with, once nothing of it can be refused: a refused call leaves a run
    as it was.
    """
    main = jax.process_index() == 0
    keep_config(run.folder, run.experiment.config)
    run_together(lambda: keep_data(run.folder, run.compared.pieces) if main else None)


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
        model = experiment.model
        state = init_state(model, config, experiment.plan, params, experiment.optimizer)
        return FirstStep(state, data)
    state, beside = restore_state(run.checkpoints, run.first, experiment)
    trained_with = beside.get(OPTIMIZER_FINGERPRINT)
    _require_teacher(run, beside.get(TEACHER))
    note = other_optimizer_note(trained_with, experiment.optimizer_fingerprint, run.first)
    if note:
        say(note)
    run_together(lambda: _require_as_much(run, beside["training_tokens"]))
    changed = told_by_first(run.compared.changed)
    if beside["iterator"] is not None:
        try:
            run_together(lambda: data.set_state(beside["iterator"]))
        # whatever an iterator says that finds other data, here or on another process
        except Exception as error:
            if not changed:
                raise
            say(f"warning: these data have no such place, they are read from their start: {error}")
            data = _batches(run)
    return FirstStep(state, data, beside.get(GUARD), beside.get(STATEFUL) or {})


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
      run: the run.
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
    main = jax.process_index() == 0
    if main and not run.compared.known and before not in (None, text.size):
        raise UserError(
            f"the run was trained on {before:,} tokens, documents or examples and {text.origin} "
            f"now has {text.amount}: bring the old text back (the stdlib corpus changes with "
            "Python), or start a new --run"
        )


def banner_lines(
    run: OpenRun,
    state: TrainState[jax.Array],
    entropy: float,
) -> list[str]:
    """Return the lines at the start of a run: versions, devices, model, data, folder.

    Args:
      run: the run.
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
        "run": f"{run.folder}" + (f", resumed after step {run.first}" if run.first else ""),
    }
    if config.train.init and run.is_new:
        facts["weights"] = config.train.init
    if options := step_options(run.experiment.plan.mesh, config.compiler.options):
        facts["compiler"] = options_text(options)
    return list(banner(run.experiment.plan, facts))
