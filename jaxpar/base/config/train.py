"""The table `[train]`: the batch, the steps, their learning rate, and what becomes of bad steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxpar.base.config.data import holds_out
from jaxpar.base.config.fitting_batch import batch_shards, fitting_batch
from jaxpar.base.durations import seconds_of
from jaxpar.base.field_marks import Called, Idle, Rule, Trait, WholeConfig
from jaxpar.base.layout.mesh import total_sizes
from jaxpar.base.layout.rules import NO_EXPERTS
from jaxpar.base.ranges import MOST_SEED, MOST_STEPS, Range
from jaxpar.base.registry import RATES, OneOf

_FLOOR = (
    "a share of train.learning_rate, as train.min_learning_rate was a rate: the rate must "
    "not climb to it"
)


def _has_several_devices(config: WholeConfig) -> bool:
    """Return whether the mesh has, or may have (-1), more than one device."""
    sizes = total_sizes(config.mesh)
    open_axes = [axis for axis in sizes if getattr(config.mesh, axis) == -1]
    return bool(open_axes) or math.prod(sizes.values()) > 1


def _is_validated(config: WholeConfig) -> bool:
    return bool(config.data.val_path) or (config.data.val_fraction > 0 and holds_out(config))


_NO_VALIDATION = Idle(
    lambda c: not _is_validated(c),
    "there is no validation set",
    "set data.val_fraction or data.val_path",
)
_NO_DECAY = Idle(
    lambda c: not RATES[c.train.schedule].decays,
    "train.schedule has no decay",
    "add --train.schedule cosine, or wsd",
)
_NO_SPIKES = Idle(
    lambda c: c.train.on_spike == "off",
    "train.on_spike is off, so that nothing is a spike",
    "add --train.on-spike rollback",
)
_NO_SECOND_BAD_STEP = Idle(
    lambda c: c.train.on_nonfinite == "stop" and c.train.on_spike != "rollback",
    "the first bad step stops the run",
    "add --train.on-nonfinite skip, or rollback",
)


def _is_duration(config: WholeConfig) -> str:
    _ = config.train.most_seconds  # which refuses what is none
    return ""


def _whole_microbatches(config: WholeConfig) -> str:
    batch = config.train.batch
    parts = config.train.accumulation
    shards = batch_shards(config)
    if batch % parts == 0 or not shards:  # where the devices decide, the plan is asked
        return ""
    return (
        f"train.batch={batch} does not split into train.accumulation={parts} microbatches: "
        f"try train.batch={fitting_batch(config, shards)}"
    )


def _warmup_leaves_steps(config: WholeConfig) -> str:
    train = config.train
    if train.warmup_steps < train.steps or train.warmup_steps <= 0:
        return ""
    return (
        f"train.warmup_steps={train.warmup_steps} leaves nothing of train.steps={train.steps}: "
        f"try train.warmup_steps={train.steps // 10}"
    )


def _decay_comes_down(config: WholeConfig) -> str:
    train = config.train
    left = train.steps - train.warmup_steps
    if train.decay_steps <= left or not RATES[train.schedule].decays:
        return ""
    return (
        f"train.decay_steps={train.decay_steps} is more than train.steps={train.steps} "
        f"leave after train.warmup_steps={train.warmup_steps}, so the rate would not come "
        f"down to its floor: try train.decay_steps={left}"
    )


def _stops_within(config: WholeConfig) -> str:
    train = config.train
    if train.stop_at <= train.steps:
        return ""
    return f"train.stop_at={train.stop_at} is not in 0..{train.steps}"


_NOTHING_DRAWN = Idle(
    lambda c: bool(c.train.init) and c.model.dropout <= 0 and c.model.lora.rank < 1,
    "the weights come from train.init, and nothing is dropped out",
    "leave one of them out",
)
_NO_LABELS = Idle(
    lambda c: bool(c.distill.teacher) and c.distill.alpha == 1,
    "distill.alpha is 1, so that the labels have no share in the loss",
    "lower it",
)
_BALANCED = Idle(
    lambda c: c.model.router == "expert_choice",
    "model.router is expert_choice, which gives all experts as many tokens",
    "leave it out",
)
_ONE_DEVICE = Idle(
    lambda c: not _has_several_devices(c), "one device holds no copies", "add --mesh.data 2"
)


@dataclass(frozen=True)
class TrainConfig:
    """The global batch, the schedule of the learning rate, clipping, and evaluation."""

    steps: Annotated[
        int,
        Range(1, MOST_STEPS),
        Trait.MAY_CHANGE,
        Called(
            "epoch epochs num_epochs n_epochs max_epochs num_train_epochs iters "
            "max_iters train_iters iterations num_steps max_steps total_steps "
            "training_steps train_steps num_train_steps n_steps train_samples"
        ),
    ] = 1000
    stop_at: Annotated[int, Range(0, MOST_STEPS), Trait.MAY_CHANGE, Rule(_stops_within)] = 0
    """Stop (and save) after this step without changing the schedule; 0 = run to `steps`."""
    max_time: Annotated[str, Trait.MAY_CHANGE, Rule(_is_duration)] = ""
    """Stop and save before a call has taken so long, such as `11h45m`; empty = no limit. `jaxpar
    train` counts from the begin of its process."""
    batch: Annotated[
        int,
        Range(1, 2**20),
        Trait.EVALUATION_TOO,
        Rule(_whole_microbatches),
        Called(
            "batch_size bs global_batch_size train_batch_size "
            "per_device_train_batch_size per_device_batch_size micro_batch_size "
            "local_batch_size device_batch_size"
        ),
    ] = 32
    """Global batch in sequences = microbatch x accumulation x data-parallel degree (data x fsdp x
    expert).
    """
    accumulation: Annotated[
        int,
        Range(1, 2**20),
        Trait.MAY_CHANGE,
        Trait.EVALUATION_TOO,
        Called(
            "gradient_accumulation_steps gradient_accumulation grad_accum "
            "grad_accumulation grad_accum_steps accumulate_grad_batches accum "
            "accumulation_steps"
        ),
    ] = 1
    init: Annotated[
        str,
        Trait.EVALUATION_TOO,
        Trait.PATH,
        Trait.MAY_BE_URL,
        Called(
            "init_from resume resume_from_checkpoint load_checkpoint load "
            "model_name_or_path pretrained load_parameters_path from_pretrained "
            "finetune"
        ),
    ] = ""
    """Start from the weights of this run folder or Hugging Face folder, with a fresh optimizer;
    empty = from `seed`.
    """
    allow_nonfinite: Annotated[bool, Trait.MAY_CHANGE, Trait.EVALUATION_TOO] = False
    """Take weights that have NaN or infinite entries, of `train.init` or a folder that is
    converted, all the same.
    """
    seed: Annotated[
        int,
        Range(0, MOST_SEED),
        _NOTHING_DRAWN,
        Called("random_seed manual_seed"),
    ] = 0
    learning_rate: Annotated[
        float, Range(1e-8, 1e3), Called("lr learning_rate lrate max_lr peak_lr base_lr")
    ] = 1e-3
    """The highest rate, which the warm-up ends at."""
    min_learning_rate_ratio: Annotated[
        float,
        Range(0.0, 1.0, why=_FLOOR),
        _NO_DECAY,
        Called(
            "min_lr lr_min final_lr lr_end min_lr_ratio min_lr_factor "
            "min_learning_rate learning_rate_final_fraction"
        ),
    ] = 0.1
    """The rate that the decay ends at, as a share of `learning_rate`; 0 = it decays to zero."""
    warmup_steps: Annotated[
        int,
        Range(0, MOST_STEPS),
        Rule(_warmup_leaves_steps),
        Called(
            "warmup warmup_iters warmup_ratio num_warmup_steps lr_warmup_iters "
            "lr_warmup_steps warmup_steps_fraction lr_warmup"
        ),
    ] = 100
    schedule: Annotated[
        str,
        OneOf(RATES),
        Called(
            "lr_scheduler lr_scheduler_type scheduler lr_schedule lr_schedule_type "
            "lr_decay_style decay_lr"
        ),
    ] = "cosine"
    """The course of the learning rate after the warm-up: see docs/config.md."""
    decay_steps: Annotated[
        int,
        Range(0, MOST_STEPS),
        _NO_DECAY,
        Rule(_decay_comes_down),
        Called("lr_decay_iters lr_wsd_decay_iters decay_ratio decay_iters lr_decay_steps"),
    ] = 0
    """Steps of the decay. wsd decays over the last of them, a single one at the floor; 0 = a fifth
    of `steps`, or what the warm-up leaves. cosine decays over the first after the warm-up and stays
    at its end; 0 = all that the warm-up leaves."""
    clip_norm: Annotated[
        float,
        Range(1e-6, 1e30, also=(0,)),
        Called(
            "clip grad_clip clip_grad max_grad_norm gradient_clip gradient_clip_val "
            "max_norm grad_norm gradient_clipping gradient_clipping_threshold"
        ),
    ] = 1.0
    """Largest global norm of the gradient; 0 = no clipping."""
    z_loss: Annotated[float, Range(0.0, 1e3)] = 0.0
    """Weight of the squared log-normaliser (PaLM, arXiv:2204.02311, section 5)."""
    label_smoothing: Annotated[
        float,
        Range(0.0, 0.99),
        _NO_LABELS,
    ] = 0.0
    """The share of a label's mass that is spread evenly over the vocabulary, without its padding
    (arXiv:1512.00567, section 7). `loss` and the validation loss are of the labels themselves.
    """
    balance_loss: Annotated[
        float,
        Range(0.0, 1e3),
        _BALANCED,
        NO_EXPERTS,
    ] = 0.0
    """Weight of the experts' load balance, sequence by sequence (DeepSeek-V3, arXiv:2412.19437,
    section 2.1.2), as a mean over all tokens but padding, whether their labels count or not."""
    router_z_loss: Annotated[float, Range(0.0, 1e3), NO_EXPERTS] = 0.0
    """Weight of the router's squared log-normaliser (ST-MoE, arXiv:2202.08906, section 3.3), a mean
    likewise.
    """
    on_nonfinite: Annotated[Literal["stop", "skip", "rollback"], Trait.MAY_CHANGE] = "stop"
    """The reaction to a step whose loss or gradients are not finite, which leaves its state as it
    was: stop; skip, and continue with the next batch; or rollback, to the last checkpoint, and
    continue with the batches after the bad one. See docs/reliability.md.
    """
    on_spike: Annotated[Literal["off", "stop", "rollback"], Trait.MAY_CHANGE] = "off"
    """The reaction to a step whose loss or gradient norm is far above those before it."""
    spike_window: Annotated[int, Range(8, 65_536), Trait.MAY_CHANGE, _NO_SPIKES] = 128
    """The number of steps before it that a spike is compared with; the first steps of a run, as
    many, have no check.
    """
    spike_deviations: Annotated[float, Range(1.0, 1e6), Trait.MAY_CHANGE, _NO_SPIKES] = 10.0
    """The deviations above the median of those steps from which a step is a spike. A deviation is
    1.4826 times the median absolute deviation, and at least a hundredth of the median.
    """
    max_bad_in_a_row: Annotated[
        int, Range(1, MOST_STEPS), Trait.MAY_CHANGE, _NO_SECOND_BAD_STEP
    ] = 3
    """The number of bad steps, without a good one beyond them, after which a run stops all the
    same.
    """
    max_bad_steps: Annotated[int, Range(1, MOST_STEPS), Trait.MAY_CHANGE, _NO_SECOND_BAD_STEP] = 20
    """The number of bad steps in all after which a run stops all the same."""
    hang_seconds: Annotated[float, Range(1.0, 1e7, also=(0,)), Trait.MAY_CHANGE] = 1800.0
    """Seconds after which a step that has not finished ends the process, with exit code 76 and the
    stack of every thread, where 20 times the median of the last steps is not more; or a batch of an
    evaluation; 0 = never."""
    check_replicas: Annotated[
        int,
        Range(0, MOST_STEPS),
        Trait.MAY_CHANGE,
        _ONE_DEVICE,
    ] = 0
    """Steps between two comparisons of what devices hold copies of: parameters and the optimizer's
    state must be the same in every bit. They are compared before a checkpoint too; 0 = never. See
    docs/reliability.md."""
    eval_every: Annotated[
        int,
        Range(0, MOST_STEPS),
        Trait.MAY_CHANGE,
        _NO_VALIDATION,
        Called(
            "eval_interval eval_steps eval_freq eval_frequency validate_every val_check_interval"
        ),
    ] = 250
    eval_batches: Annotated[
        int, Range(0, MOST_STEPS), Trait.MAY_CHANGE, _NO_VALIDATION, Called("eval_iters eval_batch")
    ] = 20
    """Validation batches of an evaluation while training, spread evenly over the validation set,
    the same each time; 0 = all of it."""
    final_eval_batches: Annotated[
        int, Range(0, MOST_STEPS), Trait.MAY_CHANGE, Trait.EVALUATION_TOO, _NO_VALIDATION
    ] = 0
    """Validation batches of the evaluation after the last step, as `eval_batches`, but no more than
    the run has steps (or `eval_batches`), and of `jaxpar eval`; 0 = all of the validation set.
    """

    @property
    def microbatch(self) -> int:
        """The sequences of one of the `accumulation` parts of a batch, on all devices."""
        return self.batch // self.accumulation

    @property
    def most_seconds(self) -> int:
        """The seconds of `max_time`, 0 = no limit; a UserError where it is no duration."""
        if not self.max_time:
            return 0
        return seconds_of("train.max_time", self.max_time)
