"""The schema of an experiment: a frozen dataclass for each table of its TOML file. What stands
under a field is its help on the command line, and what stands beside its type says what it may be,
where it has no effect and what it contradicts (`jaxpar.base.field_marks`).

The tables that are long have rooms of their own, and those of the mesh, its rules and the pipeline
lie in `jaxpar.base.layout`. `jaxpar.base.config.checks` refuses a config whose values are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxpar.base.config.data import DataConfig
from jaxpar.base.config.distill import DistillConfig
from jaxpar.base.config.model import ModelConfig
from jaxpar.base.config.optimizer import OptimizerConfig
from jaxpar.base.config.pruning import Pruning
from jaxpar.base.config.train import TrainConfig
from jaxpar.base.errors import UserError, is_url
from jaxpar.base.field_marks import Called, Idle, Rule, Trait, WholeConfig
from jaxpar.base.layout.activation_names import Keep, Policy
from jaxpar.base.layout.fit_heads import fit_rules, may_split
from jaxpar.base.layout.mesh import MeshAxis, MeshSpec
from jaxpar.base.layout.plan import Context, Overlap, Pipeline
from jaxpar.base.layout.sharding import ShardingRules
from jaxpar.base.ranges import MOST_STEPS, Range
from jaxpar.base.registry import KERNELS, SINKS, OneOf
from jaxpar.base.toml import TABLE

_FOUND_BY_BUDGET = Idle(
    lambda c: bool(c.memory.budget),
    "memory.budget finds what to keep",
    "leave one of them out",
)


def _offloads(config: WholeConfig) -> bool:
    memory = config.memory
    in_host_memory = memory.optimizer != "device"
    offloads_arrays = "offload" in (memory.parameters, *vars(memory.keep).values())
    return bool(memory.budget) or in_host_memory or offloads_arrays


def _sums_of_microbatches(config: WholeConfig) -> str:
    microbatches = config.train.accumulation * max(config.pipeline.microbatches, 1)
    if config.precision.gradients != "bfloat16" or microbatches <= 256:
        return ""
    return (
        f"precision.gradients=bfloat16 adds up {microbatches} microbatches: past 256 of "
        "them the next is rounded away, try a lower train.accumulation, or "
        "precision.gradients=float32"
    )


def _has_first_moments(config: WholeConfig) -> str:
    optimizer = config.optimizer
    if config.precision.moments != "bfloat16" or optimizer.rounds_first_moments:
        return ""
    return (
        f"precision.moments=bfloat16 with optimizer.name={optimizer.name}: it has no first "
        "moments here, and a bfloat16 could not follow what it has: try precision.moments=float32"
    )


def _has_every_local_checkpoint(config: WholeConfig) -> bool:
    """Whether the run folder has each checkpoint that the local tier would have."""
    every = config.checkpoint.every
    return every != 0 and config.checkpoint.local_every % every == 0


def _local_folder(config: WholeConfig) -> str:
    local = config.checkpoint.local
    if not is_url(local):
        return ""
    return (
        f"checkpoint.local={local} is a URL: it is for a folder on a disk of each machine, and "
        "--run may be a URL"
    )


def _profiled_steps(config: WholeConfig) -> str:
    """What is wrong with the steps of a profile: its end, or an evaluation between them."""
    train = config.train
    profile = config.metrics.profile
    traced = config.metrics.profiled
    last = train.stop_at or train.steps
    if traced and traced[-1] > last:
        return f"metrics.profile={profile} goes beyond the last step, which is {last}"
    if train.eval_every < 1 or not (config.data.val_path or config.data.val_fraction):
        return ""
    between = next((step for step in traced[:-1] if step % train.eval_every == 0), 0)
    if not between:
        return ""
    return (
        f"metrics.profile={profile}: the evaluation after step {between} would be among "
        "them, try steps between two"
    )


def _sinks_once(config: WholeConfig) -> str:
    sinks = config.metrics.sinks
    return "" if len({*sinks}) == len(sinks) else "metrics.sinks names one of them twice"


_NO_LARGE_STATE = Idle(
    lambda c: not c.optimizer.settings.has_moments,
    "this optimizer has no array as large as a parameter, so that nothing would go to host memory",
    "give it momentum, or leave it out",
)
_NO_BUDGET = Idle(lambda c: not c.memory.budget, "there is no budget", "add --memory.budget auto")
_NOTHING_OFFLOADED = Idle(
    lambda c: not _offloads(c),
    "nothing is offloaded",
    "add --memory.optimizer offload, or a budget",
)


@dataclass(frozen=True)
class MemoryConfig:
    """What the backward pass keeps, where, and what it computes again: see docs/memory.md."""

    policy: Annotated[
        Policy,
        _FOUND_BY_BUDGET,
        Called(
            "gradient_checkpointing remat remat_policy activation_checkpointing "
            "activation_checkpoint recompute_granularity checkpoint_activations"
        ),
    ] = "none"
    """What each block keeps: none (everything, nothing is computed again), full (its input),
    block_inputs, attention_out, selective, dots."""
    keep: Annotated[Keep, _FOUND_BY_BUDGET] = field(default_factory=Keep)
    """What to do with single activations whatever the policy says: save, offload (to host memory)
    or recompute.
    """
    optimizer: Annotated[
        Literal["device", "offload", "host"],
        _NO_LARGE_STATE,
        Called("cpu_offload offload optimizer_offload offload_optimizer"),
    ] = "device"
    """offload: the optimizer's state lies in host memory, and passes the device layer by layer in
    the update. host: it lies there too, and the host computes the update.
    """
    parameters: Literal["device", "offload"] = "device"
    """offload: the layers' parameters lie in host memory, and pass the device layer by layer,
    forward and backward.
    """
    budget: str = ""
    """Bytes of a device, such as 14GiB, or auto (what it has, less 5 %). What to keep, offload and
    recompute is then found for the fastest step that fits, in place of `policy` and `keep`. Empty =
    as these say."""
    may: Annotated[
        tuple[Literal["optimizer", "parameters", "accumulation"], ...],
        _NO_BUDGET,
    ] = (
        "optimizer",
        "parameters",
    )
    """What a budget may decide as well: to offload the optimizer or the parameters, or to
    accumulate.
    """
    offload_anyway: Annotated[
        bool,
        _NOTHING_OFFLOADED,
    ] = False
    """Offload even on versions and devices that are known to give wrong gradients."""
    loss_mib: Annotated[int, Range(1, 2**24)] = 4096
    """MiB of a device that the loss may hold: the scores of some tokens, and the gathered
    vocabulary matrix with its gradient. Where this is not enough, or slower, the loss takes slices
    of the vocabulary and computes scores twice."""


_ONE_MICROBATCH = Idle(
    lambda c: c.train.accumulation <= 1 and not may_split(c, "stage"),
    "a step adds up no microbatches",
    "add --train.accumulation 2",
)


@dataclass(frozen=True)
class PrecisionConfig:
    """The dtypes. Norms, softmax, the loss, gradients' sums over devices and the optimizer are
    always in float32.
    """

    compute: Annotated[
        Literal["float32", "bfloat16"],
        Called("dtype precision bf16 fp16 mixed_precision compute_dtype amp half"),
    ] = "float32"
    """The dtype of matmuls and activations, and of the sums of activations over devices."""
    params: Annotated[
        Literal["float32", "bfloat16"], Called("weight_dtype param_dtype params_dtype")
    ] = "float32"
    """The dtype that matrices are stored in. In bfloat16 an update below a 256th of a parameter is
    rounded away, and a microbatch's gradients are bfloat16 too."""
    gradients: Annotated[
        Literal["float32", "bfloat16"],
        _ONE_MICROBATCH,
        Rule(_sums_of_microbatches, also=("train.accumulation",)),
        Trait.TRAINING_ONLY,
        Called("grad_dtype main_grads_dtype"),
    ] = "float32"
    """The dtype of the sums of gradients over microbatches."""
    moments: Annotated[
        Literal["float32", "bfloat16"],
        Rule(_has_first_moments, also=("optimizer.name",)),
        Trait.TRAINING_ONLY,
        Called("mu_dtype exp_avg_dtype optim_dtype"),
    ] = "float32"
    """The dtype of the first moments of matrices. Second moments are float32: a bfloat16 could not
    follow them.
    """


@dataclass(frozen=True)
class KernelsConfig:
    """Which kernels compute; `auto` takes the first that can serve on the devices."""

    attention: Annotated[
        str,
        OneOf(KERNELS, ("auto",)),
        Called("attn_implementation flash_attention flash_attn use_flash_attn attn attention"),
    ] = "auto"
    """One of auto, cudnn, pallas_gpu, splash, pallas_tpu, chunked and reference, or one that was
    registered: see docs/attention.md."""


@dataclass(frozen=True)
class CompilerConfig:
    """What XLA is told when it compiles the training step: see docs/config.md."""

    options: tuple[str, ...] = field(default=(), metadata=TABLE)
    """Options of XLA beside the library's own, which they win over: a table of names and values in
    a file, words `name=value` elsewhere."""


_ALL_SAVED = Idle(
    _has_every_local_checkpoint,
    "the run folder has a checkpoint at each of checkpoint.local_every's steps",
    "let checkpoint.every be more of them",
)
_NO_LOCAL_TIER = Idle(
    lambda c: not c.checkpoint.local,
    "there is no local tier",
    "add --checkpoint.local FOLDER, on a disk of each machine",
)


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and what to keep."""

    every: Annotated[
        int,
        Range(0, MOST_STEPS),
        Called(
            "save_steps save_interval save_every checkpoint_period "
            "checkpoint_interval ckpt_interval save_freq checkpoint_every"
        ),
    ] = 500
    """Steps between checkpoints; 0 = only at the end."""
    keep: Annotated[
        int, Range(1, 1_000_000), Called("save_total_limit keep_latest_k max_to_keep")
    ] = 2
    """How many of the newest are kept, besides the best."""
    keep_best: bool = True
    """Also keep the checkpoint with the lowest validation loss."""
    local: Annotated[
        str,
        _ALL_SAVED,
        Rule(_local_folder),
    ] = ""
    """A folder on a disk of each machine, in which newer checkpoints are kept than in the run
    folder; empty = none. See docs/checkpoints.md.
    """
    local_every: Annotated[
        int,
        Range(1, MOST_STEPS),
        _NO_LOCAL_TIER,
    ] = 100
    """Steps between two of them."""


@dataclass(frozen=True)
class MetricsConfig:
    """What is logged, and how often."""

    log_every: Annotated[
        int,
        Range(1, MOST_STEPS),
        Called("log_interval logging_steps log_freq log_period log_steps"),
    ] = 10
    sinks: Annotated[
        tuple[str, ...],
        OneOf(SINKS),
        Rule(_sinks_once),
        Called(
            "wandb use_wandb wandb_log enable_wandb report_to tensorboard "
            "enable_tensorboard mlflow logger wandb_project logging"
        ),
    ] = ()
    """Where each row of metrics.jsonl goes besides: tensorboard, wandb, mlflow, each of which needs
    the extra of its name, or what was registered. See docs/metrics.md.
    """
    profile: Annotated[
        str, Rule(_profiled_steps), Called("profile profiler enable_profiling profile_steps")
    ] = ""
    """Steps that are traced for XProf: `20:25` is steps 20 to 25. See docs/metrics.md."""

    @property
    def profiled(self) -> range:
        """The steps of `profile`, both ends among them; a UserError where it is not two steps in
        order.
        """
        first, _, last = self.profile.partition(":")
        if not self.profile:
            return range(0)
        if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise UserError(
                f"metrics.profile={self.profile} is not two steps in order: try "
                "metrics.profile=20:25"
            )
        return range(int(first), int(last) + 1)


_WHOLE_SEQUENCE = Idle(
    lambda c: not may_split(c, "attention_seq"),
    "attention sees the whole sequence on this mesh",
    "add --mesh.context 4",
)
_ONE_STAGE = Idle(
    lambda c: not may_split(c, "stage"),
    "mesh.stage is 1, no pipeline",
    "add --mesh.stage 4",
)


@dataclass(frozen=True)
class Config:
    """A complete experiment. A TOML file has one table per field."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: Annotated[TrainConfig, Trait.TRAINING_ONLY] = field(default_factory=TrainConfig)
    distill: Annotated[DistillConfig, Trait.TRAINING_ONLY] = field(default_factory=DistillConfig)
    optimizer: Annotated[OptimizerConfig, Trait.TRAINING_ONLY] = field(
        default_factory=OptimizerConfig
    )
    pruning: Pruning = field(default_factory=Pruning)
    mesh: Annotated[MeshSpec, Trait.MAY_CHANGE] = field(default_factory=MeshSpec)
    rules: Annotated[ShardingRules, Trait.MAY_CHANGE] = field(default_factory=ShardingRules)
    overlap: Annotated[Overlap, Trait.MAY_CHANGE] = field(default_factory=Overlap)
    context: Annotated[
        Context,
        _WHOLE_SEQUENCE,
        Trait.MAY_CHANGE,
    ] = field(default_factory=Context)
    pipeline: Annotated[
        Pipeline,
        _ONE_STAGE,
        Trait.MAY_CHANGE,
    ] = field(default_factory=Pipeline)
    memory: Annotated[MemoryConfig, Trait.MAY_CHANGE] = field(default_factory=MemoryConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    kernels: Annotated[KernelsConfig, Trait.MAY_CHANGE] = field(default_factory=KernelsConfig)
    compiler: Annotated[CompilerConfig, Trait.MAY_CHANGE] = field(default_factory=CompilerConfig)
    checkpoint: Annotated[CheckpointConfig, Trait.TRAINING_ONLY, Trait.MAY_CHANGE] = field(
        default_factory=CheckpointConfig
    )
    metrics: Annotated[MetricsConfig, Trait.TRAINING_ONLY, Trait.MAY_CHANGE] = field(
        default_factory=MetricsConfig
    )


def rules_of(config: Config, sizes: Mapping[MeshAxis, int]) -> ShardingRules:
    """The rules of a config's plan on a mesh of these sizes, changed where there are more devices
    than heads.

    Args:
      config: every setting.
      sizes: the devices along each mesh axis.

    Returns:
      The rules of its plan, as `fit_rules` changes them.
    """
    model = config.model
    return fit_rules(config.rules, model.heads, model.kv_head_count, sizes)[0]
