"""Continues a prompt greedily, which is enough to look at what a model has learned."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.base.errors import UserError
from jaxpar.base.plan import Plan
from jaxpar.base.sharding import replicated_sharding
from jaxpar.models import Model, Params


def greedy(
    model: Model, params: Params, plan: Plan, prompt: Sequence[int] | np.ndarray, count: int, window: int = 0
) -> list[int]:
    """Return `count` tokens after `prompt`, each the most likely one after those before it.

    Every token runs the whole window again (there is no key/value cache), so this is not meant for serving. The model
    sees `window` tokens at once; 0 = model.max_seq_len, at most 512.

    Raises:
      UserError: the prompt is empty, an id is outside the vocabulary, or the plan has stages.
    """
    if plan.size("stage") > 1:
        raise UserError(f"a pipeline of {plan.size('stage')} stages trains, and does not generate: use mesh.stage=1")
    ids = [int(token) for token in prompt]
    if not ids or not 0 <= min(ids) <= max(ids) < model.config.vocab_size:
        raise UserError(f"the prompt needs at least one token id, all in 0..{model.config.vocab_size - 1}")
    window = window or min(model.config.max_seq_len, 512)
    rows = plan.size("batch")  # the mesh must divide the batch dim, so every row holds the same prompt

    @jax.jit
    def next_token(params: Params, window_S: jax.Array, last: jax.Array) -> jax.Array:
        tokens_BS = plan.constrain(jnp.broadcast_to(window_S, (rows, window)), ("batch", None))
        return jnp.argmax(model.logits(params, {"tokens": tokens_BS}, plan)[0, last])

    for _ in range(count):
        seen = ids[-window:]
        window_S = jax.device_put(np.asarray(seen + [0] * (window - len(seen)), np.int32), replicated_sharding(plan))
        ids.append(int(next_token(params, window_S, np.int32(len(seen) - 1))))
    return ids[len(ids) - count :]
