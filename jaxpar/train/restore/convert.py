"""The import of a Hugging Face folder or a PEFT adapter as a run, and the export of a run as
one.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from jaxpar.base.config import (
    Config,
    DataConfig,
    PrecisionConfig,
    TrainConfig,
)
from jaxpar.base.config.optimizer import AdamW, OptimizerConfig
from jaxpar.base.errors import UserError, read_json, with_urls
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.base.layout.plan import Plan
from jaxpar.base.layout.sharding import Axes
from jaxpar.data.vocabulary.special_tokens import MODEL_CONFIG, TOKENIZER
from jaxpar.data.vocabulary.tokenizer import load_tokenizer
from jaxpar.models import Model, Params, in_parts
from jaxpar.models.hf import peft
from jaxpar.models.hf.compressed import export_compressed
from jaxpar.models.hf.export import export_hf
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import make_experiment
from jaxpar.train.restore.folder_model import adapters_of, frozen_folder, model_of
from jaxpar.train.restore.load import drop_stages, load_params, load_run
from jaxpar.train.restore.metadata import fingerprint, saved_part, state_metadata
from jaxpar.train.runs.bucket import folder_here
from jaxpar.train.runs.checkpoints import warn
from jaxpar.train.runs.folder.own_tokenizer import carry_tokenizer, export_tokenizer, exported_ids
from jaxpar.train.runs.folder.run_folder import (
    compare_run,
    finished_steps,
    is_run,
    keep_config,
    read_run_config,
)
from jaxpar.train.runs.folder.run_identity import run_identity
from jaxpar.train.runs.folder.steps import CHECKPOINTS
from jaxpar.train.runs.locks.run_lock import SharedLock
from jaxpar.train.runs.orbax_options import longest_save
from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints
from jaxpar.train.step import init_state

_LONGEST = 8192
"""The most tokens of a sequence of a fine-tuning, unless asked for: models' contexts are longer
than examples are.
"""


def folder_config(source: Path, target: Path) -> Config:
    """Make a config with the model of a Hugging Face folder or a PEFT adapter, and with the
    tokenizer that lies, or will lie, in the folder `target`. The rest is default and can be
    overridden. It has no data.
    """
    model = model_of(source)
    seq_len = min(DataConfig.seq_len, model.max_seq_len)
    data = DataConfig(source="text", tokenizer=with_urls(str(target / TOKENIZER)), seq_len=seq_len)
    return Config(model=model, mesh=MeshSpec(data=-1), data=data)


def config_of(source: Path, target: Path, lora: bool = False) -> Config:
    """Make the config of a fine-tuning that starts from a Hugging Face folder or a PEFT adapter,
    with the usual settings.

    The rate is 2e-5, as in LLaMA 2's (Touvron et al. 2023, arXiv:2307.09288, section 3.1), and for
    LoRA 2e-4 (Dettmers et al. 2023, arXiv:2305.14314, appendix B). It rises in 3 % of the steps and
    decays to zero; there is no weight decay. Sequences are as long as the model's own, up to 8,192
    tokens. Matmuls are in bfloat16 where the folder's weights are in 16 bits; parameters stay
    float32, since bfloat16 rounds updates of such a rate away.

    Args:
      source: the folder, which `jaxpar.train.restore.import_run` reads.
      target: the run folder, where the tokenizer will lie.
      lora: whether LoRA is asked for; an adapter has it anyway.
    """
    config = folder_config(source, target)
    model = config.model
    train = TrainConfig()
    train = replace(
        train,
        learning_rate=2e-4 if lora or model.lora.rank else 2e-5,
        min_learning_rate_ratio=0.0,
        warmup_steps=3 * train.steps // 100,
    )
    optimizer = OptimizerConfig(adamw=AdamW(beta2=0.999, weight_decay=0.0))
    if _stored_in_16_bits(source):
        compute = "bfloat16"
    else:
        compute = "float32"
    data = replace(config.data, seq_len=min(model.max_seq_len, _LONGEST))
    return replace(
        config,
        train=train,
        optimizer=optimizer,
        data=data,
        precision=PrecisionConfig(compute=compute),
    )


def _stored_in_16_bits(source: Path) -> bool:
    """Return whether config.json says that the weights of a folder, or the weights beside an
    adapter, are in 16 bits.
    """
    folder = adapters_of(source)[-1]
    if is_run(folder):
        return read_run_config(folder).precision.compute == "bfloat16"
    config = read_json(folder / MODEL_CONFIG)
    return config.get("dtype", config.get("torch_dtype")) in ("bfloat16", "float16")


def import_run(config: Config, source: Path, target: Path) -> None:
    """Make a run folder whose checkpoint at step 0 holds the weights of a Hugging Face folder.

    With LoRA, of a PEFT adapter or of the config, it holds LoRA's matrices alone, and `train.init`
    names the folder of the model. A vocabulary that is larger than the folder's gets new rows
    (`grow_vocabulary`), and a note says so. A UserError says that the config has another model,
    that the target holds another run or has already trained, or what is wrong with the checkpoint.
    """
    rows = model_of(source).vocab_size
    grows = config.model.vocab_size > rows
    if grows and config.model.lora.rank:
        raise UserError(
            f"model.vocab_size={config.model.vocab_size} of a model of {rows} tokens: LoRA trains "
            "no embedding, so new tokens would never be learned: leave it out, or train without "
            "model.lora.rank"
        )
    if config.model.lora.rank:
        base = frozen_folder(source, config.model.lora)
        config = replace(config, train=replace(config.train, init=with_urls(str(base))))
    experiment = make_experiment(config)
    require_new_run(target, config)
    if grows:
        params = _load_grown(source, experiment, rows)
    else:
        params = load_params(source, experiment)
    keep_import(experiment, params, source, target)
    _compare_tokenizer(target, config)


def _load_grown(source: Path, experiment: Experiment, rows: int) -> Params:
    """Load the parameters of a folder into a model with more tokens than its `rows`, and print a
    note.
    """
    config = experiment.config
    theirs = replace(config, model=replace(config.model, vocab_size=rows))
    params = load_params(source, make_experiment(theirs))
    warn(
        f"{config.model.vocab_size - rows} tokens are new, ids {rows} to "
        f"{config.model.vocab_size - 1}: each begins as the mean of the {rows} that {source} has"
    )
    model = in_parts(experiment.model, "model.vocab_size")
    return grow_vocabulary(params, rows, model, drop_stages(experiment.plan))


def grow_vocabulary(params: Params, rows: int, model: Model, plan: Plan) -> Params:
    """Give a model rows for more tokens, in its embedding and its head.

    A new row is the mean of the rows that are there, as by `resize_token_embeddings` of
    `transformers`, whose new rows differ from the mean by 3e-5 standard deviations. So a new token
    begins no likelier than the others are on average (J. Hewitt, "Initializing New Word Embeddings
    for Pretrained Language Models", 2021).

    Args:
      params: the parameters of the smaller model.
      rows: how many tokens the smaller model has, without the padding of the vocabulary.
      model: the larger model, which is the same but for its vocabulary.
      plan: the plan that says where the larger model's parameters go.

    Returns:
      The parameters of the larger model.
    """
    size = model.config.vocab_size

    def grow(x: jax.Array, whole: jax.ShapeDtypeStruct, axes: Axes) -> jax.Array:
        if "vocab" not in axes:
            return x
        dim = axes.index("vocab")
        there = jax.lax.slice_in_dim(x, 0, rows, axis=dim)
        mean = jnp.mean(there, dim, keepdims=True, dtype=jnp.float32).astype(x.dtype)
        shape = [*whole.shape]
        shape[dim] = size - rows
        padding = [(0, 0)] * x.ndim
        padding[dim] = (0, whole.shape[dim] - size)
        return jnp.pad(jnp.concatenate([there, jnp.broadcast_to(mean, shape)], dim), padding)

    shapes = {name: model.shapes()[name] for name in params}
    axes = {name: model.axes[name] for name in params}
    places = {name: plan.sharding(axes[name], shapes[name]) for name in params}
    return jax.jit(lambda params: jax.tree.map(grow, params, shapes, axes), out_shardings=places)(
        params
    )


def _compare_tokenizer(target: Path, config: Config) -> None:
    """Print a note where the tokenizer of an import has tokens that the model has no rows for."""
    if not (target / TOKENIZER).exists():
        return
    try:
        tokens = load_tokenizer(target / TOKENIZER).vocab_size
    except UserError:  # it is refused where it is first needed
        return
    rows = config.model.vocab_size
    if tokens > rows:
        warn(
            f"the tokenizer has {tokens} tokens and the model {rows}, so a text with one of the "
            f"others is refused: --model.vocab-size={tokens} gives them rows on import"
        )


def require_new_run(target: Path, config: Config) -> None:
    """Refuse a run folder that has checkpoints, or is the folder of another experiment.

    Raises:
      UserError: the folder is no new run.
    """
    if finished_steps(target):
        raise UserError(f"{target} has checkpoints already: import into a new run folder")
    compare_run(target, config)


def keep_import(experiment: Experiment, params: Params, source: Path, target: Path) -> None:
    """Write a run folder whose checkpoint at step 0 holds parameters, with the tokenizer of the
    folder that they come from.

    Args:
      params: the parameters, with the model's order of layers.
      source: the folder that they come from.
    """
    model = experiment.model
    config = experiment.config
    state = init_state(experiment, params)
    with closing(SharedLock(target, warn)) as lock:
        keep_config(target, config)
        if jax.process_index() == 0:
            for place, there in enumerate(reversed(adapters_of(source))):
                carry_tokenizer(there, target, keep=place > 0)
        identity = run_identity(target, ())
        checkpoints = TrainingCheckpoints(
            target / CHECKPOINTS,
            config.checkpoint,
            identity,
            warn,
            lock.require,
            seconds=longest_save(state),
        )
        frozen = fingerprint(model, state.params)
        metadata = state_metadata(experiment, None, None, frozen, step=0)
        checkpoints.save(0, saved_part(state, model), metadata, None)
        checkpoints.close()


def export_run(
    config: Config,
    source: Path,
    target: Path,
    step: int,
    dtype: Literal["float32", "bfloat16"],
    adapter: bool = False,
    compressed: bool = False,
) -> int:
    """Write a run's checkpoint and its tokenizer as a Hugging Face folder; return the step that was
    exported.

    LoRA's matrices are merged into the others, or as an `adapter` they are all that is written, in
    PEFT's form. Sparse matrices are written with their zeros, or `compressed`.
    """
    if adapter and not config.model.lora.rank:
        raise UserError(
            f"--adapter: {source} was trained without LoRA, so it has none: leave it out"
        )
    experiment = make_experiment(config, training=False)
    experiment = replace(experiment, plan=drop_stages(experiment.plan))
    model = in_parts(experiment.model, "an export")
    step, params = load_run(source, step, experiment)
    if adapter:
        base = frozen_folder(folder_here(config.train.init), config.model.lora)
        peft.export_adapter(params, model, target, with_urls(str(base)))
    elif compressed:
        export_compressed(params, model, target, dtype)
    else:
        export_hf(
            params, model, target, dtype=dtype, token_ids=exported_ids(source, config.data.bos)
        )
    if jax.process_index() == 0:
        export_tokenizer(source, target, config.data)
    return step
