"""Trains a config in a run folder with metrics, a picture and checkpoints; the same call again
resumes the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from grain import DatasetIterator
from jax.stages import Compiled

from jaxpar.base.compiler import options_text, step_options
from jaxpar.base.config import Config, check, require_settled
from jaxpar.base.console import ProgressLine, banner, bytes_text, console, count_text, duration_text
from jaxpar.base.errors import UserError, require_local
from jaxpar.base.jax_compat import compiler_message, kernel_memory_message
from jaxpar.base.runtime import (
    Batches,
    ask_to_stop,
    machine_memory,
    raised_together,
    run_together,
    start,
    stop_signals,
    told_by_first,
)
from jaxpar.base.sharding import local_bytes
from jaxpar.data.corpus import (
    Corpus,
    HostBatch,
    load_corpus,
    skipped_records,
    train_batches,
    unigram_entropy,
)
from jaxpar.hlo.collective_order import require_order
from jaxpar.models import Params
from jaxpar.parallel.host_memory import require_right_gradients
from jaxpar.train.evaluate import evaluate, final_batches
from jaxpar.train.experiment import Experiment
from jaxpar.train.metrics import Meter, MetricsLog, Profile, Report, read_metrics
from jaxpar.train.optimizer import schedule_note
from jaxpar.train.own_tokenizer import keep_tokenizer, with_own_tokenizer
from jaxpar.train.plans import make_experiment, offload_asked, plan_notes
from jaxpar.train.require_memory import require_memory
from jaxpar.train.restore import beside_state, fingerprint, load_params, restore_state, saved_part
from jaxpar.train.run_data import NOT_COMPARED, Compared, compare_data, keep_data
from jaxpar.train.run_folder import METRIC, Checkpoints, compare_run, keep_config, replaced_values
from jaxpar.train.sinks import Sink
from jaxpar.train.step import (
    TrainState,
    batch_rows,
    compile_eval_step,
    empty_batch,
    evaluation_params,
    init_state,
    make_train_step,
    put_batch,
)
from jaxpar.train.template_date import with_template_date
from jaxpar.train.update import largest_parameter


class Result(NamedTuple):
    """How a run ended: the step that it reached, its last losses (nats a token), and the text's
    unigram entropy.
    """

    step: int
    loss: float | None
    val_loss: float | None
    unigram_entropy: float
    interrupted: bool


class _Numbers(NamedTuple):
    """What a step says of itself, before it is read: its loss, gradient norm, and overflows (see
    `Updated`).
    """

    step: int
    loss: Any
    norm: Any
    overflows: Any

    @property
    def finite(self) -> bool:
        """Whether the step, whose numbers have been read, was made."""
        return bool(np.isfinite(self.loss) and np.isfinite(self.norm) and self.overflows == 0)


STEP = "this step"
EVALUATION = "this evaluation"


class OutOfMemory(UserError):
    """A device has too little memory for a step or an evaluation, at compilation or when it runs.

    Attributes:
      experiment: what ran.
      said: the device's message.
      where: what had too little: `this step` or `this evaluation`.
    """

    def __init__(self, experiment: Experiment, said: str, where: str = STEP):
        tries = "memory.policy=full, a higher train.accumulation, or memory.budget=auto"
        if where == EVALUATION:  # which keeps nothing for a backward pass
            tries = "a higher train.accumulation, which is that of an evaluation too, or mesh.fsdp"
        super().__init__(f"out of memory in {where} ({compiler_message(said)[:200]}): try {tries}")
        self.experiment = experiment
        self.said = said
        self.where = where


class Diverged(UserError):
    """The loss, the gradients or the update of a step are not finite."""


Watch = Callable[[Experiment, Compiled], None]
"""A function that runs beside the first steps and gets the experiment and the compiled step."""


def run(
    experiment: Config | Experiment,
    folder: str | Path,
    corpus: Corpus | None = None,
    watch: Watch = lambda *_: None,
    report: Report | None = None,
) -> Result:
    """Train the run in `folder`, or go on with it.

    Args:
      experiment: the experiment, or the config of one, with nothing left open:
        `jaxpar.plan.resolve` settles a memory budget and `overlap auto`. If the folder already has
        a config, the two may differ only in layout and reporting.
      folder: the run folder, which is made if it is absent.
      corpus: the data, if they are already loaded and are not the experiment's.
      watch: a function that the first process calls in a thread beside the loop.
      report: a function that every process calls with the step and the numbers of each row of
        metrics.jsonl. The calls are the same in number and order on all of them; speed and
        data_wait are those of the process.

    Raises:
      OutOfMemory: a device has too little memory for a step or an evaluation.
      UserError: the user can mend it: config, devices or data are bad, the folder has another
        config, or it diverged.
    """
    require_local(folder)
    folder = Path(folder)
    given = experiment if isinstance(experiment, Config) else experiment.config
    config = check(given)
    require_settled(config)
    if config.model.lora.rank and not config.train.init:
        raise UserError(
            "model.lora trains beside frozen weights, and there are none: name their folder in "
            "train.init"
        )
    if isinstance(experiment, Config):
        experiment = make_experiment(config, start(config.mesh))
    made = experiment
    say = console().print if jax.process_index() == 0 else lambda line: None
    run_together(lambda: require_memory(made, machine_memory()))
    config = with_template_date(config, folder)
    corpus = corpus or experiment.corpus
    if corpus is None:
        data = run_together(lambda: with_own_tokenizer(config.data, folder, say))
        corpus = run_together(lambda: load_corpus(data, config.model.vocab_size))
    experiment = replace(experiment, config=config, corpus=corpus)
    for note in (*plan_notes(experiment), *(corpus.tokenizer.notes if corpus.tokenizer else ())):
        say(note)
    if offload_asked(experiment.plan):
        run_together(lambda: require_right_gradients(jax.local_devices()[0], say))
    main = jax.process_index() == 0
    compared = run_together(lambda: compare_data(folder, config, corpus) if main else NOT_COMPARED)
    before = compare_run(folder, config, compared.known)
    # From now on it is a run folder; that of a run is written once nothing can be refused. Only
    # process 0 knows which.
    if told_by_first(before is None):
        keep_config(folder, config)
    if before is not None and (note := replaced_values(before, config)):
        say(note)
    if compared.note:
        say(compared.note)
    tokenizer = corpus.tokenizer
    if tokenizer is not None:
        run_together(
            lambda: keep_tokenizer(tokenizer, folder) if jax.process_index() == 0 else None
        )
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint)
    trained = checkpoints.latest() or 0
    if (
        before is not None
        and trained
        and (note := schedule_note(before.train, config.train, trained))
    ):
        say(note)
    try:
        result = _Run(experiment, folder, corpus, checkpoints, compared, watch, report).go()
    except BaseException:
        try:
            checkpoints.close()
        except Exception as error:  # the first error is the one to tell
            say(f"warning: {error}")
        raise
    checkpoints.remove_old()
    checkpoints.close()
    return result


class _Run:
    """One call of `run`; it has what the loop needs, and the steps whose numbers have not been read
    yet.
    """

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        corpus: Corpus,
        checkpoints: Checkpoints,
        compared: Compared,
        watch: Watch,
        report: Report | None,
    ):
        config = experiment.config
        self.experiment = experiment
        self.config = config
        self.model = experiment.model
        self.plan = experiment.plan
        self.folder = folder
        self.corpus = corpus
        self.compared = compared
        self.broken = ""
        self.checkpoints = checkpoints
        self.watch = watch
        self.report = report
        self.first = checkpoints.latest() or 0
        self.last = min(config.train.stop_at or config.train.steps, config.train.steps)
        self.entropy = unigram_entropy(corpus.train.sample)
        self.main = jax.process_index() == 0
        self.show = ProgressLine(config.train.steps, self.first, self.main)
        self.skipped = skipped_records(corpus.train)
        self.told = dict[int, int]()  # how many of each were said
        self.running = STEP
        """What an error of the device is one of."""
        self.loss: float | None = None
        self.val_loss: float | None = None
        self.lines: Future[None] | None = None
        self.eval_step: Future[Compiled] | None = None
        self._unread: list[_Numbers] = []

    def go(self) -> Result:
        self.missed = self._missed_evaluations()
        if self.first >= self.last:
            if self.missed:
                self._finish()
            steps = self.config.train.steps
            if self.last < steps:
                more = f"stop-at 0 goes on to step {steps}"
            else:
                more = "steps extends it"
            done = (
                f"step {self.first} of {self.last} is done already: nothing to train "
                f"(--train.{more})"
            )
            self.show.say(f"{done}; see {self.folder}")
            return Result(self.first, None, self.val_loss, self.entropy, False)
        # Only the first process traces: its devices do what all do.
        if self.main:
            steps = self.config.metrics.profiled
        else:
            steps = range(0)
        self.profile = run_together(
            lambda: Profile(steps, self.folder, self.first, self._profile_advice())
        )
        # One other thread compiles the step while this one makes or reads the state; while the
        # first steps run, it compiles the evaluation and draws the memory.
        with (
            closing(self.profile),
            self._metrics() as self.log,
            self._out_of_memory(),
            _one_thread() as self.beside,
        ):
            compiling = self.beside.submit(self._compile)
            state, data = self._start()
            step_fn, said = compiling.result()
            self.show.say(said)
            self._keep()
            with self.show, stop_signals() as stop_after:
                step = self._loop(step_fn, state, data, stop_after)
            self.watching.result()
            if self.lines is not None:
                self.lines.result()
                self.show.say(
                    f"wrote {self.profile.file.parent}: `jaxpar watch {self.folder} --profile` "
                    "shows it"
                )
        if self.main:
            self._say_result(step)
        return Result(step, self.loss, self.val_loss, self.entropy, step < self.last)

    def _profile_advice(self) -> str:
        """Steps of `metrics.profile` that this call could trace, as they are written."""
        # the first step after a start is slower than the others
        first = min(self.first + 2, self.last)
        last = min(first + 4, self.last)
        train = self.config.train
        due = [
            step
            for step in range(first, last)
            if self.corpus.val and _is_due(step, train.eval_every)
        ]
        return f"{first}:{min([last, *due])}"

    def _keep(self) -> None:
        """Write what the run goes on with, once nothing of it can be refused: a refused call leaves
        a run as it was.
        """
        keep_config(self.folder, self.config)
        run_together(lambda: keep_data(self.folder, self.compared.pieces) if self.main else None)

    def _missed_evaluations(self) -> set[str]:
        """The metrics that the step to go on after should have and has not, because an error ended
        its evaluation.
        """
        train = self.config.train
        step = self.first
        if not step or self.corpus.val is None:
            return set()
        due = dict[str, bool]()
        due[METRIC] = step == self.last or _is_due(step, train.eval_every)
        due[_FINAL + METRIC] = step == train.steps and final_batches(train) != train.eval_batches
        rows = read_metrics(self.folder) if self.main else []
        known = {key for row in rows if row["step"] == step for key in row}
        return {key for key, is_due in due.items() if told_by_first(is_due and key not in known)}

    def _evaluate_missed(self) -> None:
        if not self.missed:
            return
        self._compile_evaluation()
        train = self.config.train
        if METRIC in self.missed:
            self.val_loss = self._evaluate(self.first, train.eval_batches)
            self.checkpoints.record(self.first, self.val_loss)
        if _FINAL + METRIC in self.missed:
            self.val_loss = self._evaluate(self.first, final_batches(train), _FINAL)

    def _finish(self) -> None:
        """Make up for the evaluation of the last step, after which there is nothing to train."""
        with self._metrics() as self.log, self._out_of_memory(), _one_thread() as self.beside:
            self.state, self.data = self._start()
            with self.show:
                self._evaluate_missed()

    def _compile_evaluation(self) -> None:
        """Have the other thread compile the evaluation, unless it has."""
        if self.eval_step is None and self.corpus.val is not None:
            compile_it = partial(compile_eval_step, self.model, self.config, self.plan)
            self.eval_step = self.beside.submit(compile_it)

    def _metrics(self) -> MetricsLog:
        """Open the log and the sinks, before anything is compiled: where one is refused, no process
        waits for it.
        """
        names = self.config.metrics.sinks if self.main else ()
        place = self.config, self.folder, self.first, self.show.say
        sinks = run_together(lambda: [Sink(name, *place) for name in names])
        return MetricsLog(
            self.folder,
            self.first,
            self.main,
            sinks,
            self.report,
            self.show.say,
        )

    @contextmanager
    def _out_of_memory(self) -> Iterator[None]:
        """Raise `OutOfMemory` where a device has too little memory, at compilation or when the
        program runs.
        """
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            # a kernel's limit, not the device's memory
            if said := kernel_memory_message(str(error)):
                raise UserError(f"the compiler refuses {self.running}: {said}") from error
            raise OutOfMemory(self.experiment, str(error), self.running) from error

    def _start(self) -> tuple[TrainState[jax.Array], DatasetIterator[HostBatch]]:
        """Return the state and the data iterator at the first step, and print the start-up
        lines.
        """
        config = self.config
        model = self.model
        plan = self.plan
        text = self.corpus.train
        rows = batch_rows(config.train.batch, plan)
        data = train_batches(text, config.data, config.train.batch, rows, config.model.vocab_size)
        if self.checkpoints.latest() is None:
            if config.train.init:
                params = load_params(Path(config.train.init), self.experiment)
            else:
                params = None
            state = init_state(model, config, plan, params, self.experiment.optimizer)
        else:
            state, beside = restore_state(self.checkpoints, self.first, self.experiment)
            run_together(lambda: self._require_as_much(beside["training_tokens"]))
            changed = told_by_first(self.compared.changed)
            if beside["iterator"] is not None:
                try:
                    data.set_state(beside["iterator"])
                # whatever an iterator says that finds other data than it was in
                except Exception as error:
                    if not changed:
                        raise
                    self.show.say(
                        "warning: these data have no such place, they are read from their "
                        f"start: {error}"
                    )
                    data = train_batches(
                        text, config.data, config.train.batch, rows, config.model.vocab_size
                    )
        self.frozen = fingerprint(model, state.params)
        val = self.corpus.val
        if val:
            held_out = val.amount
        else:
            held_out = "nothing, as there is no data.val_path,"
        facts = {
            "model": f"{config.model.family}, {count_text(model.parameter_count())} parameters, "
            f"{bytes_text(local_bytes(state))} of state per device",
            "data": f"{text.origin}: {text.amount} to train on, {held_out} for validation, "
            f"unigram entropy {self.entropy:.3f} nats a token",
            "run": f"{self.folder}" + (f", resumed after step {self.first}" if self.first else ""),
        }
        if config.train.init and not self.first:
            facts["weights"] = config.train.init
        if options := step_options(plan.mesh, config.compiler.options):
            facts["compiler"] = options_text(options)
        for line in banner(plan, facts):
            self.show.say(line)
        return state, data

    def _require_as_much(self, before: int | None) -> None:
        """Raise a UserError where a run that does not say which data it has was trained on more or
        fewer.
        """
        text = self.corpus.train
        if self.main and not self.compared.known and before not in (None, text.size):
            raise UserError(
                f"the run was trained on {before:,} tokens, documents or examples and "
                f"{text.origin} now has "
                f"{text.amount}: bring the old text back (the stdlib corpus changes with "
                "Python), or start a new --run"
            )

    def _compile(self) -> tuple[Compiled, str]:
        """Compile the step ahead, so that the first is timed like the others; return it and a line
        to say about it.
        """
        began = time.perf_counter()
        step_fn = make_train_step(self.model, self.config, self.plan, self.experiment.optimizer)
        compiled = step_fn.lower(self.experiment.state, self.experiment.batch).compile()
        require_order(compiled, self.plan.mesh.devices.flat)
        memory = compiled.memory_analysis()
        if memory:
            used = f": {bytes_text(memory.temp_size_in_bytes)} of temporaries per device"
        else:
            used = ""
        return compiled, f"compiled the training step in {time.perf_counter() - began:.1f} s{used}"

    def _loop(
        self,
        step_fn: Compiled,
        state: TrainState[jax.Array],
        data: DatasetIterator[HostBatch],
        stop_after: Callable[[int], bool],
    ) -> int:
        """Run the steps after `first`, and return the last one that finished. What is good is saved
        before an error leaves, where all processes leave by it."""
        self.state = state
        self.data = data
        self.positions: dict[int, Any] = {}  # the state of the data's iterator, by step
        self.batches = Batches(
            data,
            empty_batch(self.config, self.plan, absent=True),
            ask_to_stop,
        )
        try:
            self._evaluate_missed()
            return self._steps(step_fn, stop_after)
        except Exception as error:
            if raised_together(error) and not isinstance(error, Diverged):
                self._save_good()
            if self.broken and self.main:
                keep_data(self.folder, self.compared.pieces, self.broken)
            raise

    def _steps(self, step_fn: Compiled, stop_after: Callable[[int], bool]) -> int:
        config = self.config
        train = self.config.train
        flops = self.model.flops_per_token(config.data.seq_len)
        devices = list(self.plan.mesh.devices.ravel())
        self.meter = Meter(self.first, flops, devices, self.plan.compute)
        step = logged = self.first
        metrics: dict[str, jax.Array] = {}
        for step in range(self.first + 1, self.last + 1):
            before = metrics
            if step == self.profile.first:
                self._aside(metrics, self.profile.start)
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                with self.meter.timed("waiting"):
                    batch = put_batch(self._next_rows(step), self.plan)
                self.state, metrics = step_fn(self.state, batch)
            if step == self.profile.last:
                self._aside(metrics, self.profile.close)
                self.lines = self.beside.submit(self.profile.write_lines, step_fn, devices)
            self._unread.append(
                _Numbers(step, metrics["loss"], metrics["grad_norm"], metrics["overflows"])
            )
            if step == self.first + 1:
                self._compile_evaluation()
                watch = self.watch if self.main else lambda *_: None
                self.watching = self.beside.submit(watch, self.experiment, step_fn)
            # The host stays one step ahead: it awaits the step before, and fetches its metrics,
            # while this one runs.
            jax.block_until_ready(before)
            if (step - 1) % config.metrics.log_every == 0 and step - 1 > logged:
                self._log(step - 1, before)
            stop = stop_after(step) or step == self.last
            saving = stop or _is_due(step, config.checkpoint.every)
            evaluating = self.corpus.val is not None and (
                step == self.last or _is_due(step, train.eval_every)
            )
            if not (evaluating or saving):
                continue
            jax.block_until_ready(metrics)  # a step that is still running counts as training time
            self._require_rows()
            self.positions = {step: self.positions[step]}
            if step % config.metrics.log_every == 0 or stop:
                self._log(step, metrics)
                logged = step
            self._require_finite(step)
            with self.meter.timed("aside"):
                if saving:
                    self._save(step)
                if evaluating:
                    self.val_loss = self._evaluate(step, train.eval_batches)
                    self.checkpoints.record(step, self.val_loss)
            if stop:
                break
        final = final_batches(train)
        if step == train.steps and self.corpus.val is not None and final != train.eval_batches:
            self.val_loss = self._evaluate(step, final, _FINAL)
        return step

    def _next_rows(self, step: int) -> HostBatch:
        """Read this process's rows of a step's batch, and keep the position after it for a
        checkpoint of that step.
        """
        with self._reading_data():
            rows = next(self.batches)
        if jax.process_count() == 1:
            self.positions.clear()  # of several, which steps are void is known later
        if not self.batches.failed:
            self.positions[step] = self.data.get_state()
        return rows

    def _require_rows(self) -> None:
        with self._reading_data():
            self.batches.require()

    @contextmanager
    def _reading_data(self) -> Iterator[None]:
        """Note an error of the data, after which the run may go on over what is mended."""
        try:
            yield
        except UserError as error:
            self.broken = str(error)
            raise

    def _save(self, step: int) -> None:
        size = self.corpus.train.size
        position = self.positions[step]
        beside = beside_state(self.experiment, position, size, self.frozen)
        self.checkpoints.save(step, saved_part(self.state, self.model), beside)

    def _save_good(self) -> None:
        """Save what was trained until now, and say so, unless the last step failed or diverged."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
            return  # the step that failed had taken the state
        try:
            step = int(jax.device_get(self.state.step))
            trained = jax.device_get([row for row in self._unread if row.step <= step])
            if step == self.first or not all(row.finite for row in trained):
                return
            self._save(step)
            self.checkpoints.wait()
        except Exception as error:  # the first error is the one to tell
            self.show.say(f"warning: the steps since the last checkpoint are lost: {error}")
            return
        self.show.say(
            f"an error ends this run after step {step}, which is saved: the same command goes "
            "on from there"
        )

    def _aside(
        self,
        metrics: dict[str, jax.Array],
        do: Callable[[], None],
    ) -> None:
        """Wait for the steps until now, and do something that is no part of them."""
        jax.block_until_ready(metrics)
        with self.meter.timed("aside"):
            do()

    def _log(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Fetch a step's metrics, and print and write them with the speed since the last time."""
        numbers = {key: float(value) for key, value in jax.device_get(metrics).items()}
        if not np.isfinite(numbers["loss"]):
            self._require_rows()  # which is why, where a process had no rows
        del numbers["overflows"]
        numbers["labels"] = numbers.pop("tokens")
        speed = self.meter.read(
            step,
            self.config.train.batch * self.config.data.seq_len,
        )
        self.loss = numbers["loss"]
        if skipped := sum(count.count for count in self.skipped):
            numbers["records_skipped"] = float(skipped)
        self._say_skipped()
        left = (self.last - step) * (speed["step_seconds"] or 0.0)
        self.show.step(step, numbers | speed, left)
        self.log.write(step, **numbers, **speed)
        self._require_finite(step)

    def _say_skipped(self) -> None:
        """Say how many records were left out, whenever there are more; of the validation data,
        which are read again at each evaluation, once."""
        if self.corpus.val is None:
            validation = []
        else:
            validation = skipped_records(self.corpus.val)
        for number, count in enumerate([*self.skipped, *validation]):
            told = self.told.get(number, 0)
            if count.count > told and not (told and count in validation):
                self.told[number] = count.count
                self.show.say(f"warning: {count.text}")

    def _require_finite(self, last: int) -> None:
        """Stop if a step up to `last`, which has run, diverged; such a step left its state as it
        was, and is not saved.

        Steps between log lines are also read here, all at once, so that no step waits for its
        numbers to arrive.
        """
        read = [row for row in self._unread if row.step <= last]
        del self._unread[: len(read)]
        for row in jax.device_get(read):
            if not row.finite:
                self._require_rows()
                raise Diverged(self._divergence(row))

    def _divergence(self, row: _Numbers) -> str:
        """What to say of a step that was not finite, with advice that the next command takes."""
        found = f"loss {row.loss} and gradient norm {row.norm} at step {row.step}"
        if np.isfinite(row.loss) and np.isfinite(row.norm):
            name, size = largest_parameter(self.model.trained(self.state.params))
            found = (
                f"step {row.step} would make {row.overflows} entries of the parameters not "
                "finite (the largest is now "
                f"{size:.2g}, in {name})"
            )
        saved = self.checkpoints.latest()
        advice = (
            "try a lower train.learning_rate or a longer train.warmup_steps in another --run folder"
        )
        if saved is None:
            return f"{found}: the run diverged; {advice}; no checkpoint was saved before"
        return (
            f"{found}: the run diverged; {advice}, from the start or with "
            f"train.init={self.folder}; the checkpoint of "
            f"step {saved} is kept"
        )

    def _evaluate(self, step: int, limit: int, prefix: str = "") -> float:
        assert self.corpus.val is not None and self.eval_step is not None
        began = told = time.perf_counter()
        done = 0
        self.running = EVALUATION

        def tick(count: int) -> None:
            nonlocal told, done
            done = count
            now = time.perf_counter()
            if now - told > _PATIENCE:
                told = now
                of = f" of {limit}" if limit else ""
                self.show.say(
                    f"evaluating: {done}{of} batches in {duration_text(now - began)}; {key} "
                    "takes fewer"
                )

        if prefix:
            key = "train.final_eval_batches"
        else:
            key = "train.eval_batches"
        eval_step = run_together(self.eval_step.result)
        with self._reading_data():
            loss = evaluate(
                eval_step,
                self._evaluation_params(),
                self.corpus.val,
                self.config,
                self.plan,
                limit,
                tick,
            )
        self.running = STEP
        self.log.write(step, **{prefix + METRIC: loss})
        if done == limit:
            over = f"{done} batches"
        else:
            over = "the whole set"
        if prefix and done == limit != self.config.train.final_eval_batches:
            over += f", as many as there were steps; `jaxpar eval {self.folder}` takes more"
        self.show.say(
            f"step {step}  validation loss {loss:.4f}  ({over}, "
            f"{time.perf_counter() - began:.1f} s)"
        )
        return loss

    def _evaluation_params(self) -> Params:
        """The parameters as they are evaluated: the average of an optimizer that has one."""
        return evaluation_params(self.model, self.state, self.experiment.optimizer)

    def _say_result(self, step: int) -> None:
        if step < self.last:
            self.show.say(f"stopped after step {step}, saved; the same command goes on from there")
            return
        if self.val_loss is None:
            val = ""
        else:
            val = f", validation loss {self.val_loss:.4f} nats a token"
        took = duration_text(self.meter.trained)
        self.show.say(
            f"step {step} done in {took} of training{val} (unigram entropy {self.entropy:.3f})"
        )


_FINAL = "final_"
"""What stands before the metrics of the evaluation after the last step."""
_PATIENCE = 20.0  # seconds of an evaluation after which it says how far it is


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


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
