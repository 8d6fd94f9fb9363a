"""Training: from a config to a run folder with metrics, a picture and checkpoints; the same call again resumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpar.base.config import RESOLVED, Config, check, incompatible, require_settled, to_toml
from jaxpar.base.console import ProgressLine, banner, bytes_text, console, count_text, duration_text
from jaxpar.base.errors import UserError
from jaxpar.base.jax_compat import compiler_said, kernel_too_large
from jaxpar.base.plan import Plan
from jaxpar.base.processes import Batches, ask_to_stop, stop_signals, together
from jaxpar.base.runtime import start
from jaxpar.hlo.turns import require_order
from jaxpar.models import Model, Params
from jaxpar.parallel.host_memory import require_right_gradients
from jaxpar.train.checkpoint import METRIC, Checkpoints
from jaxpar.train.data import Corpus, Tokens, load_corpus, train_batches, unigram_entropy, val_batches
from jaxpar.train.metrics import MetricsLog, device_memory, mfu
from jaxpar.train.optimizer import schedule_note
from jaxpar.train.plans import make_plan, offload_asked, plan_notes
from jaxpar.train.restore import beside_state, initial_params, read_run_config, restore_state
from jaxpar.train.state import TrainState, init_state
from jaxpar.train.state_bytes import local_bytes
from jaxpar.train.step import batch_rows, compile_eval_step, empty_batch, make_train_step, put_batch, step_shapes
from jaxpar.train.tokenizer import save_tokenizer


class Result(NamedTuple):
    """How a run ended: the step it reached, its last losses (nats a token), and the text's unigram entropy."""

    step: int
    loss: float | None
    val_loss: float | None
    unigram_entropy: float
    interrupted: bool


class OutOfMemory(UserError):
    """A device has too little memory for the step, at its compilation or when it ran.

    Attributes:
      config: of the run.
      plan: of the config.
      said: what the compiler or the runtime said.
    """

    def __init__(self, config: Config, plan: Plan, said: str):
        super().__init__(
            f"out of memory ({compiler_said(said)[:200]}): try --memory.policy full, a higher --train.accumulation, or "
            "--memory.budget auto"
        )
        self.config, self.plan, self.said = config, plan, said


Watch = Callable[[Config, Plan, Any], None]
"""Called beside the first steps with the config, its plan and the compiled step, a `jax.stages.Compiled`."""


def run(config: Config, folder: Path, corpus: Corpus | None = None, watch: Watch = lambda *_: None) -> Result:
    """Train, or go on training, the run in `folder`.

    Args:
      config: the experiment, with nothing open: `jaxpar.plan.resolve` settles a memory budget and `overlap auto`. If
        the folder has a config already, they must agree but for layout and reporting.
      folder: the run folder; made when absent.
      corpus: the config's data where they are loaded already.
      watch: called on the first process, in a thread beside the loop.

    Raises:
      OutOfMemory: a device has too little for the step.
      UserError: whatever else the user can mend: config, devices, data, a run folder of another config, divergence.
    """
    require_settled(check(config))
    devices = start(config.mesh, config.compile.cache)
    say = console().print if jax.process_index() == 0 else lambda line: None
    plan = make_plan(config, devices)
    if corpus is None:
        corpus = together(lambda: load_corpus(config.data, config.model.vocab_size))
    for note in plan_notes(config, plan):
        say(note)
    if offload_asked(plan):
        together(lambda: require_right_gradients(jax.local_devices()[0], say))
    before = open_run(folder, config)
    tokenizer = corpus.tokenizer
    if tokenizer is not None:
        together(lambda: save_tokenizer(tokenizer, folder / "tokenizer.json") if jax.process_index() == 0 else None)
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint)
    if before is not None and (note := schedule_note(before.train, config.train, checkpoints.latest() or 0)):
        say(note)
    try:
        return _Run(config, folder, Model(config.model), plan, corpus, checkpoints, watch).go()
    finally:
        checkpoints.close()


def open_run(folder: Path, config: Config) -> Config | None:
    """Make a run folder with its `config.toml`, or check that the one there is of the same experiment.

    Process 0 does, and the others learn whether it could: what they see may be half written.

    Returns:
      On process 0 the config that was there, None where there was none.
    """
    return together(lambda: _open_run(folder, config) if jax.process_index() == 0 else None)


def _open_run(folder: Path, config: Config) -> Config | None:
    path, before = folder / "config.toml", None
    if path.exists():
        before = read_run_config(folder)
        changed = incompatible(before, config)
        if [name.name for name in (folder / "checkpoints").glob("[0-9]*")] == ["0"]:
            # An import that has not trained yet: how it will is open, what its arrays are is not.
            changed = [text for text in changed if text.startswith(("model.", "precision."))]
        if changed:
            differences = "; ".join(changed[:3] + ["..."] * (len(changed) > 3))
            raise UserError(
                f"{folder} holds a run of another config ({differences}): "
                "use another --run folder, or give the old values"
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there and is no run folder (it has no config.toml): use another --run folder")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(to_toml(config, RESOLVED), encoding="utf-8")
    return before


def evaluate(eval_step: Any, params: Params, stream: Tokens, config: Config, plan: Plan, limit: int) -> float:
    """Mean loss in nats a token over the windows of so many validation batches, or of all where `limit` is 0."""
    rows = batch_rows(config.train.batch, plan)
    read = val_batches(stream, config.data, config.train.batch, rows, config.model.vocab_size, limit)
    batches = Batches(read, empty_batch(config, plan))
    sums = jax.device_get([eval_step(params, put_batch(batch, plan)) for batch in batches])
    batches.require()
    nll, tokens = np.sum(np.asarray(sums, np.float64), axis=0)
    return float(nll / tokens)


@dataclass
class _Run:
    """One call of `run`: what the loop needs, and what it has measured since the last log line."""

    config: Config
    folder: Path
    model: Model
    plan: Plan
    corpus: Corpus
    checkpoints: Checkpoints
    watch: Watch
    val_loss: float | None = None
    loss: float | None = None
    _mark: tuple[float, int] = (0.0, 0)  # time and step of the last log line
    _waited: float = 0.0  # seconds spent waiting for data since then
    _aside: float = 0.0  # seconds spent on evaluation and saving since then
    _trained: float = 0.0  # seconds spent on steps in this call
    _unread: list[tuple[int, jax.Array, jax.Array]] = field(default_factory=list)  # loss and norm of steps since then

    def go(self) -> Result:
        config, train = self.config, self.config.train
        first = self.checkpoints.latest() or 0
        last = min(train.stop_at or train.steps, train.steps)
        entropy = unigram_entropy(self.corpus.train.tokens)
        self.main = jax.process_index() == 0
        self.show = ProgressLine(train.steps, first, self.main)
        if first >= last:
            more = f"stop-at 0 goes on to step {train.steps}" if last < train.steps else "steps extends it"
            done = f"step {first} of {last} is done already: nothing to train (--train.{more})"
            self.show.say(f"{done}; see {self.folder}")
            return Result(first, None, None, entropy, False)
        # One thread beside this one: it compiles the step while the state is made or read; while the first steps run it
        # compiles the evaluation and draws the memory.
        with self._out_of_memory(), _one_thread() as self.beside:
            compiling = self.beside.submit(self._compile)
            state, data = self._start(first, entropy)
            step_fn, said = compiling.result()
            self.show.say(said)
            metrics = MetricsLog(self.folder, first, config.metrics.tensorboard, self.main)
            with metrics as self.log, self.show, stop_signals() as stop_after:
                step = self._loop(step_fn, state, data, first, last, stop_after)
            if self.watched is not None:
                self.watched.result()
        if self.main:
            self._say_result(step, last, entropy)
        return Result(step, self.loss, self.val_loss, entropy, step < last)

    @contextmanager
    def _out_of_memory(self) -> Iterator[None]:
        """A device that has too little memory, at compilation or at a step, is an `OutOfMemory`."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            if said := kernel_too_large(str(error)):  # not what a device has
                raise UserError(f"the compiler refuses this step: {said}") from error
            raise OutOfMemory(self.config, self.plan, str(error)) from error

    def _start(self, first: int, entropy: float) -> tuple[TrainState, Any]:
        """The state and the data iterator at step `first`, and the start-up lines."""
        config, model, plan = self.config, self.model, self.plan
        rows = batch_rows(config.train.batch, plan)
        data = train_batches(self.corpus.train, config.data, config.train.batch, rows, config.model.vocab_size)
        if self.checkpoints.latest() is None:
            params = initial_params(config, plan) if config.train.init else None
            state = init_state(model, config, plan, params)
        else:
            state, data_state = restore_state(self.checkpoints, first, model, config, plan)
            trained_on, here = data_state["training_tokens"], len(self.corpus.train.tokens)
            if trained_on not in (None, here):
                raise UserError(
                    f"the run was trained on {trained_on:,} tokens and {self.corpus.train.origin} now has {here:,}: "
                    "bring the old text back (the stdlib corpus changes with Python), or start a new --run"
                )
            if data_state["iterator"] is not None:
                data.set_state(data_state["iterator"])
        facts = {
            "model": f"{config.model.family}, {count_text(model.parameter_count())} parameters, "
            f"{bytes_text(local_bytes(state))} of state per device",
            "data": f"{self.corpus.train.origin}: {len(self.corpus.train.tokens):,} training tokens, "
            f"{len(self.corpus.val.tokens) if self.corpus.val else 0:,} for validation, "
            f"unigram entropy {entropy:.3f} nats a token",
            "run": f"{self.folder}" + (f", resumed after step {first}" if first else ""),
            **({"weights": config.train.init} if config.train.init and not first else {}),
        }
        for line in banner(plan, facts):
            self.show.say(line)
        return state, data

    def _compile(self) -> tuple[Any, str]:
        """The training step, compiled ahead, so that the first step is timed like the others, and what to say of it."""
        began = time.perf_counter()
        step_fn = make_train_step(self.model, self.config, self.plan)
        compiled = step_fn.lower(*step_shapes(self.model, self.config, self.plan)).compile()
        require_order(compiled, self.plan.mesh.devices.flat)
        memory = compiled.memory_analysis()
        used = f": {bytes_text(memory.temp_size_in_bytes)} of temporaries per device" if memory else ""
        return compiled, f"compiled the training step in {time.perf_counter() - began:.1f} s{used}"

    def _compile_evaluation(self) -> Any:
        return compile_eval_step(self.model, self.config, self.plan)

    def _loop(
        self, step_fn: Any, state: TrainState, data: Any, first: int, last: int, stop_after: Callable[[int], bool]
    ) -> int:
        """Steps first+1..last; returns the last one finished."""
        train, every = self.config.train, self.config.checkpoint.every
        self._mark, step, metrics, logged = (time.perf_counter(), first), first, {}, first
        batches = Batches(data, empty_batch(self.config, self.plan), ask_to_stop)
        for step in range(first + 1, last + 1):
            asked, before = time.perf_counter(), metrics
            batch = put_batch(next(batches), self.plan)
            self._waited += time.perf_counter() - asked
            state, metrics = step_fn(state, batch)
            self._unread.append((step, metrics["loss"], metrics["grad_norm"]))
            if step == first + 1:
                if self.corpus.val is not None:
                    self.eval_step = self.beside.submit(self._compile_evaluation)
                self.watched = self.beside.submit(self.watch, self.config, self.plan, step_fn) if self.main else None
            # The host stays one step ahead: the step before is awaited, and its metrics fetched, while this one runs.
            jax.block_until_ready(before)
            if (step - 1) % self.config.metrics.log_every == 0 and step - 1 > logged:
                self._log(step - 1, before)
            stop = stop_after(step) or step == last
            evaluating = self.corpus.val is not None and (
                step == last or (train.eval_every and step % train.eval_every == 0)
            )
            saving = stop or (every and step % every == 0)
            if not (evaluating or saving):
                continue
            jax.block_until_ready(metrics)  # a step still under way belongs to training's time
            batches.require()
            if step % self.config.metrics.log_every == 0 or stop:
                self._log(step, metrics)
                logged = step
            self._require_finite(step)
            began = time.perf_counter()
            if evaluating:
                self.val_loss = self._evaluate(step, state, train.eval_batches)
            if saving:
                beside = beside_state(self.plan, self.config, data.get_state(), len(self.corpus.train.tokens))
                self.checkpoints.save(step, state, beside, self.val_loss if evaluating else None)
            self._aside += time.perf_counter() - began
            if stop:
                break
        final = train.final_eval_batches
        if step == train.steps and self.corpus.val is not None and final != train.eval_batches:
            self.val_loss = self._evaluate(step, state, final, "final_")
        return step

    def _log(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Fetch a step's metrics, and say and write them with the speed since the last time."""
        numbers: dict[str, Any] = {key: float(value) for key, value in jax.device_get(metrics).items()}
        now, (then, before) = time.perf_counter(), self._mark
        elapsed, steps = max(now - then - self._aside, 1e-9), step - before
        tokens_per_second = numbers.pop("tokens") * steps / elapsed
        flops, devices = self.model.flops_per_token(self.config.data.seq_len), list(self.plan.mesh.devices.ravel())
        on_cpu = devices[0].platform == "cpu"
        numbers |= {
            "tokens_per_second": tokens_per_second,
            "step_seconds": elapsed / steps,
            "tflops_per_device": None if on_cpu else tokens_per_second * flops / len(devices) / 1e12,
            "mfu": mfu(tokens_per_second, flops, devices, self.plan.compute),
            "device_memory": device_memory(devices),
            "data_wait": min(self._waited / elapsed, 1.0),
        }
        self._mark, self._waited, self._aside = (now, step), 0.0, 0.0
        self._trained += elapsed
        self.loss = numbers["loss"]
        self.show.step(step, numbers, (self.config.train.steps - step) * elapsed / steps)
        self.log.write(step, **numbers)
        self._require_finite(step)

    def _require_finite(self, last: int) -> None:
        """Stop where a step up to `last`, which has run, diverged: the step left its state as it was, none is saved.

        Steps between log lines are read here too, all at once: no step waits for its number to arrive.
        """
        read = [row for row in self._unread if row[0] <= last]
        del self._unread[: len(read)]
        for step, loss, norm in jax.device_get(read):
            if not (np.isfinite(loss) and np.isfinite(norm)):
                saved = self.checkpoints.latest()
                raise UserError(
                    f"loss {loss} and gradient norm {norm} at step {step}: the run diverged; try a lower "
                    "train.learning_rate or a longer train.warmup_steps; "
                    + ("no checkpoint was saved before" if saved is None else f"the checkpoint of step {saved} is kept")
                )

    def _evaluate(self, step: int, state: TrainState, limit: int, prefix: str = "") -> float:
        assert self.corpus.val is not None
        began = time.perf_counter()
        loss = evaluate(self.eval_step.result(), state.params, self.corpus.val, self.config, self.plan, limit)
        self.log.write(step, **{prefix + METRIC: loss})
        over = f"{limit} batches" if limit else "the whole set"
        self.show.say(f"step {step}  validation loss {loss:.4f}  ({over}, {time.perf_counter() - began:.1f} s)")
        return loss

    def _say_result(self, step: int, last: int, entropy: float) -> None:
        if step < last:
            self.show.say(f"stopped after step {step}, saved; the same command goes on from there")
            return
        val = "" if self.val_loss is None else f", validation loss {self.val_loss:.4f} nats a token"
        self.show.say(
            f"step {step} done in {duration_text(self._trained)} of training{val} (unigram entropy {entropy:.3f})"
        )


@contextmanager
def _one_thread() -> Iterator[ThreadPoolExecutor]:
    """A thread that is waited for, but not by Ctrl-C: it may be in the compiler, which nothing interrupts."""
    pool, wait = ThreadPoolExecutor(1), True
    try:
        yield pool
    except KeyboardInterrupt:
        wait = False
        raise
    finally:
        pool.shutdown(wait, cancel_futures=not wait)
