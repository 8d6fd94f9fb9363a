"""Random parameters and batches that hide nothing that a plan may get wrong.

Shapes: B batch, S sequence, k entries of a teacher.
"""

from __future__ import annotations

import math

import jax
import numpy as np

from jaxpar.base.batch_arrays import TEACHER_HIDDEN, TEACHER_IDS, TEACHER_LOG_PROBS
from jaxpar.base.config import Config
from jaxpar.models import AnyModel, OwnModel, Params
from jaxpar.models.lora import lora_scale

Rows = dict[str, np.ndarray]
"""A batch on the host: its arrays by name."""
_SHAKEN = 0.02
"""The spread of what is added to fresh parameters of a model of one's own, so that none is zero."""


def random_params(model: AnyModel, seed: int = 0) -> Params:
    """Draw parameters that hide nothing: norm scales, biases and projections are random,
    activations of order one.

    A fresh model would hide mistakes: its scales are 1, its biases 0, its attention is close to
    uniform, and LoRA's B is 0. Here the product of a pair is as large as that of its matrix.

    Args:
      seed: the seed of the random numbers.

    Returns:
      The parameters on the host, in the form and shapes of the model's own, in float32 for a
      library model.
    """
    rng = np.random.default_rng(seed)
    if isinstance(model, OwnModel):
        fresh = jax.device_get(jax.jit(model.init)(jax.random.key(seed)))
        return jax.tree.map(
            lambda x: x + _SHAKEN * rng.standard_normal(x.shape).astype(x.dtype), fresh
        )

    def draw(leaf: jax.ShapeDtypeStruct, axes: tuple[str | None, ...]) -> np.ndarray:
        named = zip(leaf.shape, axes, strict=True)
        dims = [size for size, axis in named if axis not in ("layers", "experts")]
        if len(dims) == 1:
            std = 1.0
        else:
            std = 1 / math.sqrt(dims[0])
        std /= lora_scale(model.config.lora) if "rank" in axes[:-1] else 1
        return (std * rng.standard_normal(leaf.shape)).astype(np.float32)

    return jax.tree.map(draw, model.shapes(), model.axes)


def random_batch(config: Config, seed: int = 1) -> Rows:
    """Draw random tokens; a tenth of the labels is left out, unevenly; packed rows have some three
    documents.

    Where there are routers, for which padding is no text, rows are filled up from anywhere in their
    second half on.

    Args:
      config: gives the rows B, the sequence length S and the vocabulary, and whether rows are
        packed.
      seed: the seed of the random numbers.

    Returns:
      `tokens` and `labels` [B, S] as int32 on the host, and `segments` and `positions` [B, S] for
      packed rows. A label of -1 does not count.
    """
    rng = np.random.default_rng(seed)
    shape = (config.train.batch, config.data.seq_len)
    tokens, labels = rng.integers(0, config.model.vocab_size, (2, *shape)).astype(np.int32)
    batch = {
        "tokens": tokens,
        "labels": np.where(rng.random(shape) < 0.1, -1, labels).astype(np.int32),
    }
    if config.data.pack:
        starts = rng.random(shape) < 3 / shape[1]
        starts[:, 0] = True
        places = np.broadcast_to(np.arange(shape[1]), shape)
        batch["segments"] = np.cumsum(starts, axis=1).astype(np.int32)
        begins = np.maximum.accumulate(np.where(starts, places, 0), axis=1)
        batch["positions"] = (places - begins).astype(np.int32)
    if config.model.experts:
        ends = rng.integers(shape[1] // 2, shape[1] + 1, (shape[0], 1))
        padding = np.arange(shape[1]) >= ends
        filler = {"labels": -1}  # and 0 for the other arrays
        batch = {
            name: np.where(padding, filler.get(name, 0), rows).astype(np.int32)
            for name, rows in batch.items()
        }
    if config.distill.teacher:
        batch |= _random_answers(config, rng)
    return batch


def _random_answers(config: Config, rng: np.random.Generator) -> Rows:
    """Draw a teacher's most likely entries [B, S, k], and log-probabilities in falling order, some
    of which belong to entries that it does not have.
    """
    shape = (config.train.batch, config.data.seq_len, config.distill.top_k)
    vocab = np.tile(np.arange(config.model.vocab_size, dtype=np.int32), (*shape[:2], 1))
    ids = rng.permuted(vocab, axis=-1)[..., : shape[2]]
    log_probs = -np.sort(rng.exponential(2.0, shape), axis=-1)
    answers = {TEACHER_IDS: ids, TEACHER_LOG_PROBS: log_probs.astype(np.float32)}
    if config.distill.hidden:
        sizes = (len(config.distill.hidden), config.distill.hidden_width)
        states = rng.standard_normal((*shape[:2], *sizes))
        answers[TEACHER_HIDDEN] = states.astype(np.float32)
    return answers
