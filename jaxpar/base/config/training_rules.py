"""What only training reads of a config, and which settings of it contradict each other.

A run of an earlier version may have values that are refused today. They stop nobody from evaluating
it, from generating with it or from exporting it, and a run that goes on may replace them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxpar.base.config.schema import Config
from jaxpar.base.errors import is_url
from jaxpar.base.ranges import Range
from jaxpar.base.registry import RATES

_TABLES = ("train.", "distill.", "optimizer.", "checkpoint.", "metrics.")
_KEYS = frozenset(
    {
        "precision.gradients",
        "precision.moments",
        "model.dropout",
        "model.init_std",
        "data.stride",
        "data.seed",
        "data.shuffle_window",
        "data.prefetch",
        "data.accept_changed",
    }
)
_EVALUATION_TOO = frozenset(
    {
        "train.batch",
        "train.accumulation",
        "train.final_eval_batches",
        "train.init",
        "train.allow_nonfinite",
    }
)


class Rule(NamedTuple):
    """A contradiction between settings: their dotted keys, whether it is there, and what is said of
    it.
    """

    keys: tuple[str, ...]
    broken: bool
    message: str


def only_training(key: str) -> bool:
    """Whether a dotted key is read by training alone: an evaluation is the same whatever its
    value is.
    """
    return key in _KEYS or (key.startswith(_TABLES) and key not in _EVALUATION_TOO)


def training_rules(config: Config) -> list[Rule]:
    """List the contradictions that a config could have in what only training reads.

    Args:
      config: the config.

    Returns:
      The rules, of which each says whether it is broken, and what to try.
    """
    return [
        *_of_schedule(config),
        *_of_optimizer(config),
        *_of_bfloat16(config),
        *_of_teacher(config),
        *_of_hidden_states(config),
        *_of_metrics(config),
        *_of_checkpoints(config),
    ]


def _of_schedule(config: Config) -> list[Rule]:
    """What the steps of a training contradict: its warm-up, its decay and where it stops."""
    train = config.train
    left = train.steps - train.warmup_steps
    _ = train.most_seconds  # it refuses what is no duration
    return [
        Rule(
            ("train.warmup_steps",),
            train.warmup_steps >= train.steps and train.warmup_steps > 0,
            f"train.warmup_steps={train.warmup_steps} leaves nothing of train.steps={train.steps}: "
            f"try train.warmup_steps={train.steps // 10}",
        ),
        Rule(
            ("train.decay_steps",),
            RATES[train.schedule].decays and train.decay_steps > left,
            f"train.decay_steps={train.decay_steps} is more than train.steps={train.steps} "
            f"leave after train.warmup_steps={train.warmup_steps}, so the rate would not come "
            f"down to its floor: try train.decay_steps={left}",
        ),
        Rule(
            ("train.stop_at",),
            train.stop_at > train.steps,
            f"train.stop_at={train.stop_at} is not in 0..{train.steps}",
        ),
    ]


def _of_checkpoints(config: Config) -> list[Rule]:
    """What the places of checkpoints contradict."""
    local = config.checkpoint.local
    return [
        Rule(
            ("checkpoint.local",),
            is_url(local),
            f"checkpoint.local={local} is a URL: it is for a folder on a disk of each machine, and "
            "--run may be a URL",
        ),
    ]


def _of_optimizer(config: Config) -> list[Rule]:
    """What an optimizer contradicts: its rate, its schedule, and the dtype of parameters."""
    train = config.train
    optimizer = config.optimizer
    decay_key = f"optimizer.{optimizer.name}.weight_decay"
    averages = optimizer.name == "schedule_free"
    return [
        Rule(
            ("train.learning_rate", decay_key),
            train.learning_rate * optimizer.weight_decay >= 1,
            f"train.learning_rate={train.learning_rate:g} times "
            f"{decay_key}={optimizer.weight_decay:g} is 1 or more: a step would take away all of "
            "a matrix, try a smaller one",
        ),
        Rule(
            ("train.schedule", "optimizer.name"),
            averages and RATES[train.schedule].decays,
            f"train.schedule={train.schedule} with optimizer.name=schedule_free, which averages "
            "parameters in place of a decay: try train.schedule=constant",
        ),
        Rule(
            ("precision.params", "optimizer.name"),
            averages and config.precision.params == "bfloat16",
            "precision.params=bfloat16 with optimizer.name=schedule_free: its average is worked "
            "out from the parameters, and would have their rounding nine times over, try "
            "precision.params=float32",
        ),
    ]


def _of_bfloat16(config: Config) -> list[Rule]:
    """What moments and sums of gradients in bfloat16 contradict."""
    precision = config.precision
    optimizer = config.optimizer
    decays = {
        f"optimizer.{optimizer.name}.{key}": decay
        for key, decay in optimizer.settings.moment_decays.items()
    }
    microbatches = config.train.accumulation * max(config.pipeline.microbatches, 1)
    return [
        *(
            Rule(
                (key, "precision.moments"),
                precision.moments == "bfloat16" and decay > 0.95,
                f"{key}={decay:g} with precision.moments=bfloat16: a first moment would stop a "
                f"tenth or more away from where it should be, try {key}=0.95 or "
                "precision.moments=float32",
            )
            for key, decay in decays.items()
        ),
        Rule(
            ("precision.moments", "optimizer.name"),
            precision.moments == "bfloat16" and not optimizer.rounds_first_moments,
            f"precision.moments=bfloat16 with optimizer.name={optimizer.name}: it has no first "
            "moments here, and a bfloat16 could not follow what it has: try "
            "precision.moments=float32",
        ),
        Rule(
            ("precision.gradients", "train.accumulation"),
            precision.gradients == "bfloat16" and microbatches > 256,
            f"precision.gradients=bfloat16 adds up {microbatches} microbatches: past 256 of "
            "them the next is rounded away, try a lower train.accumulation, or "
            "precision.gradients=float32",
        ),
    ]


def _of_teacher(config: Config) -> list[Rule]:
    """What a teacher contradicts: it predicts next tokens, and as many as there are."""
    taught = bool(config.distill.teacher)
    return [
        Rule(
            ("distill.teacher", "data.objective"),
            taught and config.data.objective != "next",
            f"data.objective={config.data.objective} with distill.teacher: a teacher predicts the "
            "next token, try data.objective=next",
        ),
        Rule(
            ("distill.top_k", "model.vocab_size"),
            taught and config.distill.top_k > config.model.vocab_size,
            f"distill.top_k={config.distill.top_k} is more than "
            f"model.vocab_size={config.model.vocab_size}: try "
            f"distill.top_k={min(config.model.vocab_size, 32)}",
        ),
    ]


def _of_hidden_states(config: Config) -> list[Rule]:
    """What hidden states of a teacher contradict."""
    distill = config.distill
    learned = bool(distill.teacher and distill.hidden)
    word = f"distill.hidden={', '.join(distill.hidden)}"
    rank = config.model.lora.rank
    stages = config.mesh.stage * config.mesh.dcn.stage
    return [
        Rule(
            ("distill.hidden", "distill.hidden_width"),
            learned and distill.hidden_width == 0,
            f"{word} is learned through projections to the teacher's width: set "
            "distill.hidden_width to its model.embed",
        ),
        Rule(
            ("distill.hidden", "distill.hidden_weight"),
            learned and distill.hidden_weight == 0,
            f"{word} with distill.hidden_weight=0: nothing of it is in the loss, raise the weight "
            "or leave out distill.hidden",
        ),
        Rule(
            ("distill.hidden", "model.lora.rank"),
            learned and rank > 0,
            f"{word} with model.lora.rank={rank}: beside LoRA nothing else is trained, and "
            "projections are: leave one of them out",
        ),
        Rule(
            ("distill.hidden", "mesh.stage"),
            learned and stages > 1,
            f"{word} with mesh.stage={config.mesh.stage}: a pipeline hands no layer's states to "
            "the loss, use other axes of the mesh, or leave out distill.hidden",
        ),
    ]


def _of_metrics(config: Config) -> list[Rule]:
    """What a profile and the sinks of metrics contradict."""
    train = config.train
    profile = config.metrics.profile
    traced = config.metrics.profiled
    last = train.stop_at or train.steps
    evaluates = train.eval_every > 0 and bool(config.data.val_path or config.data.val_fraction)
    between = next(
        (step for step in traced[:-1] if evaluates and step % train.eval_every == 0),
        0,
    )
    return [
        Rule(
            ("metrics.profile",),
            bool(traced) and traced[-1] > last,
            f"metrics.profile={profile} goes beyond the last step, which is {last}",
        ),
        Rule(
            ("metrics.profile",),
            between > 0,
            f"metrics.profile={profile}: the evaluation after step {between} would be among "
            "them, try steps between two",
        ),
        Rule(
            ("metrics.sinks",),
            len({*config.metrics.sinks}) < len(config.metrics.sinks),
            "metrics.sinks names one of them twice",
        ),
    ]


def outdated_keys(
    config: Config, values: Mapping[str, Any], ranges: Mapping[str, Range]
) -> set[str]:
    """The keys of a run's config that only training reads and whose values are refused today.

    Args:
      config: the config that the run was made with.
      values: its values by dotted key.
      ranges: the range of each number, by dotted key.

    Returns:
      Their dotted keys.
    """
    outside = {
        key
        for key, allowed in ranges.items()
        if only_training(key) and not allowed.holds_all(values[key])
    }
    return outside | {key for rule in training_rules(config) if rule.broken for key in rule.keys}
