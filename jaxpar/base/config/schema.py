"""The schema of an experiment: a frozen dataclass for each table of its TOML file. What stands
under a field is its help on the command line.

The tables of the optimizer, of pruning, of sparsity and of distillation have rooms of their own,
and those of the mesh, its rules and the pipeline lie in `jaxpar.base.layout`.
`jaxpar.base.config.checks` refuses a config whose values are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxpar.base.config.distill import DistillConfig
from jaxpar.base.config.optimizer import OptimizerConfig
from jaxpar.base.config.pruning import Pruning
from jaxpar.base.config.sparsity import Sparsity
from jaxpar.base.durations import seconds_of
from jaxpar.base.errors import UserError
from jaxpar.base.layout.activation_names import Keep, Policy
from jaxpar.base.layout.fit_heads import fit_rules
from jaxpar.base.layout.mesh import MeshAxis, MeshSpec
from jaxpar.base.layout.plan import Context, Overlap, Pipeline
from jaxpar.base.layout.sharding import ShardingRules
from jaxpar.base.ranges import MOST_SEED, MOST_STEPS, MOST_WORDS, Range
from jaxpar.base.registry import KERNELS, RATES, SINKS, SOURCES, OneOf
from jaxpar.base.toml import TABLE

_FLOOR = (
    "a share of train.learning_rate, as train.min_learning_rate was a rate: the rate must "
    "not climb to it"
)


@dataclass(frozen=True)
class Lora:
    """Low-rank adaptation (LoRA, Hu et al. 2021, arXiv:2106.09685): all that is trained are two
    small matrices beside each matrix W that is named. The model computes x W + (alpha / rank) (x A)
    B: see docs/finetune.md."""

    rank: Annotated[int, Range(0, 65_536)] = 0
    """Columns of A and rows of B; 0 = no LoRA, all parameters are trained."""
    alpha: Annotated[float, Range(1e-3, 1e6)] = 16.0
    """The product is weighted with alpha / rank."""
    targets: tuple[str, ...] = ("q", "v")
    """The matrices of every block that have a pair: some of q, k, v, out, gate, up, down."""


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model. A family refuses a setting that it has no use for, such as RoPE in
    GPT-2.
    """

    family: str = "gpt2"
    """Which model of `jaxpar.models`: gpt2, llama, qwen2, qwen3, gemma2, gemma3, bert or
    modernbert."""
    vocab_size: Annotated[int, Range(2, MOST_WORDS)] = 256
    vocab_multiple: Annotated[int, Range(1, 2**20)] = 128
    """The stored vocabulary is rounded up to a multiple of this, to divide over a mesh; the loss is
    the same.
    """
    layers: Annotated[int, Range(1, 10_000)] = 4
    embed: Annotated[int, Range(1, 2**20)] = 128
    heads: Annotated[int, Range(1, 65_536)] = 4
    kv_heads: Annotated[int, Range(0, 65_536)] = 0
    """Key/value heads (grouped-query attention); 0 = as many as `heads`."""
    head_dim: Annotated[int, Range(0, 65_536)] = 0
    """Size of a head; 0 = embed / heads."""
    mlp: Annotated[int, Range(1, 2**24)] = 512
    """Hidden size of the MLP, or of one expert."""
    token_types: Annotated[int, Range(0, 65_536)] = 0
    """Types of tokens, such as BERT's two for the sentences of a pair; 0 = tokens have no types."""
    query_layer: bool = False
    """One more layer on top of `layers`, whose queries are made of an embedding of the next
    position in place of the residual stream (PanGu-alpha, arXiv:2104.12369, section 3.1)."""
    sublayers: Literal["serial", "parallel"] = "serial"
    """`parallel` takes attention and the MLP from one norm and adds both at once (PaLM,
    arXiv:2204.02311, section 2): one gather and one scatter a block where there are two.
    """
    activation: Literal["family", "silu", "gelu", "relu2"] = "family"
    """The activation of the MLP: the family's own, or another. `relu2` is the square of what is
    above zero (Primer, arXiv:2109.08668, section 3).
    """
    experts: Annotated[int, Range(0, 65_536)] = 0
    """Experts of a block, each an MLP (LLaMA: Mixtral, arXiv:2401.04088); 0 = one MLP for every
    token.
    """
    experts_per_token: Annotated[int, Range(1, 65_536)] = 2
    """How many experts a token is sent to. Their weights add up to 1; that of a single one is its
    probability.
    """
    router: Literal["token_choice", "expert_choice"] = "token_choice"
    """Who chooses: each token its experts, or each expert as many tokens of each sequence
    (arXiv:2202.09368), so that a token goes to `experts_per_token` in the mean. Whether an expert
    takes a token depends on those after it, so such a model is for encoders.
    """
    shared_experts: Annotated[int, Range(0, 65_536)] = 0
    """Experts that every token goes to besides, each as wide as the others: one MLP of all their
    hidden features (DeepSeekMoE, arXiv:2401.06066, section 3.2). With one, and one chosen expert
    a token, experts are the residual of an MLP (DeepSpeed-MoE, arXiv:2201.05596, section 4.1.2).
    """
    max_seq_len: Annotated[int, Range(1, 2**30)] = 1024
    """Longest sequence: the length of GPT-2's position table, and the limit of `data.seq_len`."""
    masks: tuple[str, ...] = ("causal",)
    """What the tokens of each layer see: layer i takes word i % len(masks) of causal, window(4096),
    longformer(...), bigbird(...), and for encoders full and local(64). See docs/attention.md."""
    attention_softcap: Annotated[float, Range(1.0, 1e6, also=(0,))] = 0.0
    """Scores of attention become `cap * tanh(score / cap)` (Gemma 2, arXiv:2408.00118, section 2);
    0 = no cap.
    """
    logit_softcap: Annotated[float, Range(1.0, 1e6, also=(0,))] = 0.0
    """The same cap for the scores of the vocabulary."""
    query_scale: Annotated[float, Range(1e-6, 1e3, also=(0,))] = 0.0
    """The factor of attention's scores (Gemma); 0 = head_dim ** -0.5."""
    dropout: Annotated[float, Range(0.0, 0.99)] = 0.0
    tied_head: bool = True
    """Use the embedding table as the output head."""
    norm_eps: Annotated[float, Range(1e-12, 0.1)] = 1e-5
    init_std: Annotated[float, Range(1e-6, 10.0)] = 0.02
    rope_theta: Annotated[float, Range(1.0, 1e15)] = 10000.0
    rope_local_theta: Annotated[float, Range(1.0, 1e15, also=(0,))] = 0.0
    """The base of RoPE in layers with a window, which are not scaled (Gemma 3, arXiv:2503.19786); 0
    = as in others.
    """
    rope_factor: Annotated[float, Range(1e-3, 1e6)] = 1.0
    """Context extension of RoPE; 1 = no scaling."""
    rope_scaling: Literal["llama3", "linear"] = "llama3"
    """How RoPE is extended: llama3 divides low frequencies by the factor, linear divides all
    (arXiv:2306.15595).
    """
    rope_low_freq_factor: Annotated[float, Range(1e-3, 1e6)] = 1.0
    rope_high_freq_factor: Annotated[float, Range(1e-3, 1e6)] = 4.0
    rope_original_seq_len: Annotated[int, Range(1, 2**30)] = 8192
    scan_layers: bool = True
    """Run the blocks by `lax.scan` (one block is compiled) or unrolled (longer compile, faster on
    CPU).
    """
    lora: Lora = Lora()
    sparsity: Sparsity = field(default_factory=Sparsity)

    @property
    def kv_head_count(self) -> int:
        """The number of key and value heads, which is that of the heads where `kv_heads` is 0."""
        return self.kv_heads or self.heads

    @property
    def kinds(self) -> int:
        """The number of kinds of layers: layer i is of kind i % kinds."""
        return len(self.masks)

    @property
    def head_size(self) -> int:
        """The size of a head, which is embed / heads where `head_dim` is 0."""
        return self.head_dim or self.embed // self.heads


Bos = Literal["auto", True, False]
"""Whether texts begin with the tokenizer's begin of text; auto = where the tokenizer says so."""


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from, and how they become sequences."""

    source: Annotated[str, OneOf(SOURCES)] = "stdlib"
    """stdlib = the text of this Python's own standard library; text = a file or folder; tokens = a
    .bin file; hf = a data set of Hugging Face; parquet, arrayrecord = files of documents; chat =
    conversations (JSON or Parquet); or one that was registered (`jaxpar.data.sources`)."""
    path: str = ""
    """File, folder, or pattern of files. For hf: `path`, `path:split` or `path:config:split`, where
    path is a name on the hub, a folder or a file, and the split is train if it is not given."""
    mixture: tuple[str, ...] = ()
    """Paths of one source in place of `path`, each with its share of the sequences: `["a.bin 0.7",
    "b.bin 0.3"]`.
    """
    val_path: str = ""
    """Validation data, of the same source; empty = the last `val_fraction` of `path`."""
    val_fraction: Annotated[float, Range(0.0, 0.99)] = 0.1
    """Of text, tokens and chat. Documents (hf, parquet, arrayrecord) and mixtures are validated on
    `val_path` only.
    """
    column: str = "text"
    """The column of hf and parquet that holds a document."""
    streaming: bool = False
    """Read hf as a stream, in order, without a copy on this machine."""
    shuffle_window: Annotated[int, Range(0, 2**31 - 1)] = 0
    """Shuffle a stream (parquet, or hf with `streaming`) within runs of this many documents; 0 =
    read it in order.
    """
    loss_on: Literal["completions", "all"] = "completions"
    """Which tokens of a chat count: those that the assistant writes, or all."""
    template_args: tuple[str, ...] = ()
    """Names that the chat template reads, each with its value, as JSON or text:
    `["enable_thinking=false"]`.
    """
    template_date: str = ""
    """The date that a chat template writes as today's, such as 2026-01-31; empty = that of the
    run's first start.
    """
    objective: Literal["next", "masked"] = "next"
    """What a model is asked for: next = the token that follows each; masked = those that were
    corrupted, of which it sees both sides (BERT, arXiv:1810.04805). See docs/encoders.md."""
    mask_rate: Annotated[float, Range(1e-3, 1.0)] = 0.15
    """The share of the tokens that the objective `masked` corrupts: 80 % of these are hidden, 10 %
    replaced, and 10 % stay."""
    mask_whole_words: bool = False
    """Corrupt all tokens of a word or none."""
    mask_token: Annotated[int, Range(-1, 2**24)] = -1
    """The id that hides a token; -1 = the tokenizer's own ([MASK], <mask>), or else the first past
    its vocabulary."""
    tokenizer: str = "bytes"
    """bytes, chars, a tokenizer.json or its folder, or a model of the Hugging Face Hub, hf://gpt2
    (the extra hf)."""
    bos: Bos = "auto"
    """Whether documents, prompts and windows begin with the tokenizer's begin of text; auto = where
    it says so, by `add_bos_token` in tokenizer_config.json, or else by what it puts before a text.
    """
    seq_len: Annotated[int, Range(1, 2**30)] = 256
    pack: bool = False
    """Keep documents apart with segment ids and positions that restart, instead of plain windows;
    for chat, put as many examples into a sequence as fit, instead of one."""
    stride: Annotated[int, Range(0, 2**31 - 1)] = 0
    """Distance between the starts of training windows; 0 = seq_len (no overlap), 1 = every
    position, as nanoGPT.
    """
    max_bytes: Annotated[int, Range(1, 2**40)] = 8_000_000
    """Size cap of the stdlib corpus."""
    seed: Annotated[int, Range(0, MOST_SEED)] = 0
    prefetch: Annotated[int, Range(0, 1_000)] = 2
    """Batches read ahead of the step."""
    accept_changed: bool = False
    """Go on with a run although its data are others than it was trained on; of one call alone."""


@dataclass(frozen=True)
class TrainConfig:
    """The global batch, the schedule of the learning rate, clipping, and evaluation."""

    steps: Annotated[int, Range(1, MOST_STEPS)] = 1000
    stop_at: Annotated[int, Range(0, MOST_STEPS)] = 0
    """Stop (and save) after this step without changing the schedule; 0 = run to `steps`."""
    max_time: str = ""
    """Stop and save before a call has taken so long, such as `11h45m`; empty = no limit. `jaxpar
    train` counts from the begin of its process."""
    batch: Annotated[int, Range(1, 2**20)] = 32
    """Global batch in sequences = microbatch x accumulation x data-parallel degree (data x fsdp x
    expert).
    """
    accumulation: Annotated[int, Range(1, 2**20)] = 1
    init: str = ""
    """Start from the weights of this run folder or Hugging Face folder, with a fresh optimizer;
    empty = from `seed`.
    """
    allow_nonfinite: bool = False
    """Take weights that have NaN or infinite entries, of `train.init` or a folder that is
    converted, all the same.
    """
    seed: Annotated[int, Range(0, MOST_SEED)] = 0
    learning_rate: Annotated[float, Range(1e-8, 1e3)] = 1e-3
    """The highest rate, which the warm-up ends at."""
    min_learning_rate_ratio: Annotated[float, Range(0.0, 1.0, why=_FLOOR)] = 0.1
    """The rate that the decay ends at, as a share of `learning_rate`; 0 = it decays to zero."""
    warmup_steps: Annotated[int, Range(0, MOST_STEPS)] = 100
    schedule: Annotated[str, OneOf(RATES)] = "cosine"
    decay_steps: Annotated[int, Range(0, MOST_STEPS)] = 0
    """Steps of the decay. wsd decays over the last of them, a single one at the floor; 0 = a fifth
    of `steps`, or what the warm-up leaves. cosine decays over the first after the warm-up and stays
    at its end; 0 = all that the warm-up leaves."""
    clip_norm: Annotated[float, Range(1e-6, 1e30, also=(0,))] = 1.0
    """Largest global norm of the gradient; 0 = no clipping."""
    z_loss: Annotated[float, Range(0.0, 1e3)] = 0.0
    """Weight of the squared log-normaliser (PaLM, arXiv:2204.02311, section 5)."""
    label_smoothing: Annotated[float, Range(0.0, 0.99)] = 0.0
    """The share of a label's mass that is spread evenly over the vocabulary, without its padding
    (arXiv:1512.00567, section 7). `loss` and validation stay those of the labels themselves."""
    balance_loss: Annotated[float, Range(0.0, 1e3)] = 0.0
    """Weight of the experts' load balance, sequence by sequence (DeepSeek-V3, arXiv:2412.19437,
    section 2.1.2), as a mean over all tokens but padding, whether their labels count or not."""
    router_z_loss: Annotated[float, Range(0.0, 1e3)] = 0.0
    """Weight of the router's squared log-normaliser (ST-MoE, arXiv:2202.08906, section 3.3), a mean
    likewise.
    """
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """What to do after a step whose loss or gradients are not finite, which leaves its state as it
    was: stop; skip, and go on with the next batch; or rollback, to the last checkpoint, and go on
    with the batches after the bad one. See docs/reliability.md."""
    on_spike: Literal["off", "stop", "rollback"] = "off"
    """What to do after a step whose loss or gradient norm is far above those before it."""
    spike_window: Annotated[int, Range(8, 65_536)] = 128
    """How many steps before it a spike is held against; as many begin a run without it."""
    spike_deviations: Annotated[float, Range(1.0, 1e6)] = 10.0
    """How many deviations above the median of those steps a spike is. A deviation is 1.4826 times
    the median absolute deviation, and at least a hundredth of the median."""
    max_bad_in_a_row: Annotated[int, Range(1, MOST_STEPS)] = 3
    """After how many bad steps without a good one beyond them a run stops all the same."""
    max_bad_steps: Annotated[int, Range(1, MOST_STEPS)] = 20
    """After how many bad steps in all a run stops all the same."""
    hang_seconds: Annotated[float, Range(1.0, 1e7, also=(0,))] = 1800.0
    """Seconds after which a step that has not finished ends the process, with exit code 76 and the
    stack of every thread, where 20 times the median of the last steps is not more; or a batch of an
    evaluation; 0 = never."""
    check_replicas: Annotated[int, Range(0, MOST_STEPS)] = 0
    """Steps between two comparisons of what devices hold copies of: parameters and the optimizer's
    state must be the same in every bit. They are compared before a checkpoint too; 0 = never. See
    docs/reliability.md."""
    eval_every: Annotated[int, Range(0, MOST_STEPS)] = 250
    eval_batches: Annotated[int, Range(0, MOST_STEPS)] = 20
    """Validation batches of an evaluation while training, spread evenly over the validation set,
    the same each time; 0 = all of it."""
    final_eval_batches: Annotated[int, Range(0, MOST_STEPS)] = 0
    """The same as `eval_batches` for the evaluation after the last step, which takes no more
    batches than the run has steps (or `eval_batches`), and for `jaxpar eval`."""

    @property
    def most_seconds(self) -> int:
        """The seconds of `max_time`, 0 = no limit; a UserError where it is no duration."""
        if not self.max_time:
            return 0
        return seconds_of("train.max_time", self.max_time)


@dataclass(frozen=True)
class MemoryConfig:
    """What the backward pass keeps, where, and what it computes again: see docs/memory.md."""

    policy: Policy = "none"
    """What each block keeps: none (everything, nothing is computed again), full (its input),
    block_inputs, attention_out, selective, dots."""
    keep: Keep = field(default_factory=Keep)
    """What to do with single activations whatever the policy says: save, offload (to host memory)
    or recompute.
    """
    optimizer: Literal["device", "offload", "host"] = "device"
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
    may: tuple[Literal["optimizer", "parameters", "accumulation"], ...] = (
        "optimizer",
        "parameters",
    )
    """What a budget may decide as well: to offload the optimizer or the parameters, or to
    accumulate.
    """
    offload_anyway: bool = False
    """Offload even on versions and devices that are known to give wrong gradients."""
    loss_mib: Annotated[int, Range(1, 2**24)] = 4096
    """MiB of a device that the loss may hold: the scores of some tokens, and the gathered
    vocabulary matrix with its gradient. Where this is not enough, or slower, the loss takes slices
    of the vocabulary and computes scores twice."""


@dataclass(frozen=True)
class PrecisionConfig:
    """The dtypes. Norms, softmax, the loss, gradients' sums over devices and the optimizer are
    always in float32.
    """

    compute: Literal["float32", "bfloat16"] = "float32"
    """The dtype of matmuls and activations, and of the sums of activations over devices."""
    params: Literal["float32", "bfloat16"] = "float32"
    """The dtype that matrices are stored in. In bfloat16 an update below a 256th of a parameter is
    rounded away, and a microbatch's gradients are bfloat16 too."""
    gradients: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the sums of gradients over microbatches."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the first moments of matrices. Second moments are float32: a bfloat16 could not
    follow them.
    """


@dataclass(frozen=True)
class KernelsConfig:
    """Which kernels compute; `auto` takes the first that can serve on the devices."""

    attention: Annotated[str, OneOf(KERNELS, ("auto",))] = "auto"
    """One of auto, cudnn, pallas_gpu, splash, pallas_tpu, chunked and reference, or one that was
    registered: see docs/attention.md."""


@dataclass(frozen=True)
class CompilerConfig:
    """What XLA is told when it compiles the training step: see docs/config.md."""

    options: tuple[str, ...] = field(default=(), metadata=TABLE)
    """Options of XLA beside the library's own, which they win over: a table of names and values in
    a file, words `name=value` elsewhere."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and what to keep."""

    every: Annotated[int, Range(0, MOST_STEPS)] = 500
    """Steps between checkpoints; 0 = only at the end."""
    keep: Annotated[int, Range(1, 1_000_000)] = 2
    """How many of the newest are kept, besides the best."""
    keep_best: bool = True
    """Also keep the checkpoint with the lowest validation loss."""
    local: str = ""
    """A folder on a disk of each machine, in which newer checkpoints are kept than in the run
    folder; empty = none. See docs/checkpoints.md.
    """
    local_every: Annotated[int, Range(1, MOST_STEPS)] = 100
    """Steps between two of them."""


@dataclass(frozen=True)
class MetricsConfig:
    """What is logged, and how often."""

    log_every: Annotated[int, Range(1, MOST_STEPS)] = 10
    sinks: Annotated[tuple[str, ...], OneOf(SINKS)] = ()
    """Where each row of metrics.jsonl goes besides: tensorboard, wandb, mlflow, each of which needs
    the extra of its name, or what was registered. See docs/metrics.md.
    """
    profile: str = ""
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


@dataclass(frozen=True)
class Config:
    """A complete experiment. A TOML file has one table per field."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    pruning: Pruning = field(default_factory=Pruning)
    mesh: MeshSpec = field(default_factory=MeshSpec)
    rules: ShardingRules = field(default_factory=ShardingRules)
    overlap: Overlap = field(default_factory=Overlap)
    context: Context = field(default_factory=Context)
    pipeline: Pipeline = field(default_factory=Pipeline)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    compiler: CompilerConfig = field(default_factory=CompilerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)


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
