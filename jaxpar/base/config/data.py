"""Where tokens come from, and how they become sequences: the table `[data]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxpar.base.field_marks import Called, Idle, Rule, Trait, WholeConfig
from jaxpar.base.ranges import MOST_SEED, Range
from jaxpar.base.registry import SOURCES, OneOf


def _reads(config: WholeConfig, setting: str) -> bool:
    """Whether the source of the data reads a setting of [data] that not all sources read."""
    return setting in SOURCES[config.data.source].reads


def _read_by(setting: str) -> Idle:
    """Say of a setting that some sources do not read it, with those that do as the advice."""

    def advice() -> str:
        others = [name for name, source in SOURCES.items() if setting in source.reads]
        return f"it is for data.source {', '.join(others)}"

    return Idle(lambda c: not _reads(c, setting), "data.source does not read it", advice)


def _streams(config: WholeConfig) -> bool:
    return SOURCES[config.data.source].streams(config.data)


def _brings_tokenizer(config: WholeConfig) -> bool:
    return SOURCES[config.data.source].has_tokenizer


def _is_json(config: WholeConfig) -> bool:
    return config.data.tokenizer.endswith(".json")


def holds_out(config: WholeConfig) -> bool:
    """Whether the last part of the training data may be kept for validation."""
    return SOURCES[config.data.source].holds_out and not config.data.mixture


_NO_FILES = Idle(
    lambda c: not _reads(c, "path"),
    "data.source is stdlib, which is read from this Python",
    "add --data.source text, or tokens",
)
_NOT_MASKED = Idle(
    lambda c: c.data.objective != "masked",
    "data.objective is next, which corrupts nothing",
    "add --data.objective masked",
)


def _longest_sequence(config: WholeConfig) -> str:
    seq_len = config.data.seq_len
    longest = config.model.max_seq_len
    if seq_len <= longest:
        return ""
    return f"data.seq_len={seq_len} is not in 1..model.max_seq_len={longest}"


Bos = Literal["auto", True, False]
"""Whether texts begin with the tokenizer's begin of text; auto = where the tokenizer says so."""


_MIXED = Idle(lambda c: bool(c.data.mixture), "data.mixture says what to read", "give one of them")
_OTHER_VALIDATION = Idle(
    lambda c: bool(c.data.val_path),
    "data.val_path is the validation set",
    "give one of them",
)
_NOTHING_HELD_OUT = Idle(
    lambda c: not holds_out(c),
    "no part of documents or of a mixture is held out",
    "give data.val_path",
)
_ALL_SHUFFLED = Idle(
    lambda c: not _streams(c),
    "all of the data is shuffled",
    "it is for parquet, and hf with streaming",
)
_OWN_TOKENIZER = Idle(
    lambda c: _brings_tokenizer(c) and not _is_json(c),
    "data.source is tokens, whose file brings its own",
    "leave it out, or add --data.source text",
)
_NO_BEGIN_OF_TEXT = Idle(
    lambda c: not (_brings_tokenizer(c) or _is_json(c)),
    "the tokenizer has no begin of text",
    "add --data.tokenizer with the path of a tokenizer.json",
)
_NOT_STDLIB = Idle(
    lambda c: not _reads(c, "max_bytes"),
    "data.source is not stdlib, whose corpus it caps",
    "add --data.source stdlib",
)
_IN_ORDER = Idle(
    lambda c: _streams(c) and not c.data.shuffle_window,
    "a stream is read in order",
    "add --data.shuffle-window 1000",
)


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from, and how they become sequences."""

    source: Annotated[str, OneOf(SOURCES)] = "stdlib"
    """stdlib = the text of this Python's own standard library; text = a file or folder; tokens = a
    .bin file; hf = a data set of Hugging Face; parquet, arrayrecord = files of documents; chat =
    conversations (JSON or Parquet); or one that was registered (`jaxpar.data.sources`)."""
    path: Annotated[
        str,
        _NO_FILES,
        _MIXED,
        Trait.MAY_BE_URL,
        Called("dataset data dataset_path data_path train_file dataset_name train_data data_dir"),
    ] = ""
    """File, folder, or pattern of files. For hf: `path`, `path:split` or `path:config:split`, where
    path is a name on the hub, a folder or a file, and the split is train if it is not given."""
    mixture: Annotated[tuple[str, ...], _NO_FILES] = ()
    """Paths of one source in place of `path`, each with its share of the sequences: `["a.bin 0.7",
    "b.bin 0.3"]`.
    """
    val_path: Annotated[str, Trait.MAY_BE_URL] = ""
    """Validation data, of the same source; empty = the last `val_fraction` of `path`."""
    val_fraction: Annotated[
        float,
        Range(0.0, 0.99),
        _OTHER_VALIDATION,
        _NOTHING_HELD_OUT,
    ] = 0.1
    """Of text, tokens and chat. Documents (hf, parquet, arrayrecord) and mixtures are validated on
    `val_path` only.
    """
    column: Annotated[str, _read_by("column")] = "text"
    """The column of hf and parquet that holds a document."""
    streaming: Annotated[bool, _read_by("streaming")] = False
    """Read hf as a stream, in order, without a copy on this machine."""
    shuffle_window: Annotated[
        int,
        Range(0, 2**31 - 1),
        _ALL_SHUFFLED,
        Trait.TRAINING_ONLY,
    ] = 0
    """Shuffle a stream (parquet, or hf with `streaming`) within runs of this many documents; 0 =
    read it in order.
    """
    loss_on: Annotated[Literal["completions", "all"], _read_by("loss_on")] = "completions"
    """Which tokens of a chat count: those that the assistant writes, or all."""
    template_args: Annotated[tuple[str, ...], _read_by("loss_on")] = ()
    """Names that the chat template reads, each with its value, as JSON or text:
    `["enable_thinking=false"]`.
    """
    template_date: Annotated[str, _read_by("loss_on")] = ""
    """The date that a chat template writes as today's, such as 2026-01-31; empty = that of the
    run's first start.
    """
    objective: Literal["next", "masked"] = "next"
    """What a model is asked for: next = the token that follows each; masked = those that were
    corrupted, of which it sees both sides (BERT, arXiv:1810.04805). See docs/encoders.md."""
    mask_rate: Annotated[float, Range(1e-3, 1.0), _NOT_MASKED] = 0.15
    """The share of the tokens that the objective `masked` corrupts: 80 % of these are hidden, 10 %
    replaced, and 10 % stay."""
    mask_whole_words: Annotated[bool, _NOT_MASKED] = False
    """Corrupt all tokens of a word or none."""
    mask_token: Annotated[int, Range(-1, 2**24), _NOT_MASKED] = -1
    """The id that hides a token; -1 = the tokenizer's own ([MASK], <mask>), or else the first past
    its vocabulary."""
    tokenizer: Annotated[
        str,
        _OWN_TOKENIZER,
        Trait.PATH,
        Trait.MAY_BE_URL,
        Called(
            "tokenizer_path tokenizer_name tokenizer_model tokenizer_type vocab_file hf_assets_path"
        ),
    ] = "bytes"
    """bytes, chars, a tokenizer.json or its folder, or a model of the Hugging Face Hub, hf://gpt2
    (the extra hf)."""
    bos: Annotated[
        Bos,
        _NO_BEGIN_OF_TEXT,
    ] = "auto"
    """Whether documents, prompts and windows begin with the tokenizer's begin of text; auto = where
    it says so, by `add_bos_token` in tokenizer_config.json, or else by what it puts before a text.
    """
    seq_len: Annotated[
        int,
        Range(1, 2**30),
        Rule(_longest_sequence),
        Called(
            "seq_length sequence_length block_size max_length context_length "
            "context_len ctx_len seqlen max_target_length max_seq_length"
        ),
    ] = 256
    pack: Annotated[bool, Called("packing")] = False
    """Keep documents apart with segment ids and positions that restart, instead of plain windows;
    for chat, put as many examples into a sequence as fit, instead of one."""
    stride: Annotated[int, Range(0, 2**31 - 1), _read_by("stride"), Trait.TRAINING_ONLY] = 0
    """Distance between the starts of training windows; 0 = seq_len (no overlap), 1 = every
    position, as nanoGPT.
    """
    max_bytes: Annotated[
        int,
        Range(1, 2**40),
        _NOT_STDLIB,
    ] = 8_000_000
    """Size cap of the stdlib corpus."""
    seed: Annotated[
        int,
        Range(0, MOST_SEED),
        _IN_ORDER,
        Trait.TRAINING_ONLY,
    ] = 0
    prefetch: Annotated[int, Range(0, 1_000), Trait.TRAINING_ONLY, Trait.MAY_CHANGE] = 2
    """Batches read ahead of the step."""
    accept_changed: Annotated[bool, Trait.TRAINING_ONLY, Trait.MAY_CHANGE] = False
    """Go on with a run although its data are others than it was trained on; of one call alone."""
