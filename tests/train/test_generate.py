"""Greedy generation picks the argmax, sees a window, and is the same on every mesh."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.base.plan import Plan
from jaxpar.models import Model
from jaxpar.train.generate import greedy

CONFIG = ModelConfig(vocab_size=31, vocab_multiple=8, layers=1, embed=16, heads=2, mlp=32, max_seq_len=8, init_std=0.5)


def test_each_token_is_the_most_likely_after_the_window(plan_of: Callable[..., Plan]) -> None:
    model, plan = Model(CONFIG), plan_of()
    params = jax.jit(model.init)(jax.random.key(0))
    found = greedy(model, params, plan, [3, 1, 4], 9, window=8)
    scores = jax.jit(lambda ids_S: model.logits(params, {"tokens": ids_S[None]}, plan)[0, -1])
    ids = [3, 1, 4]
    for token in found:
        assert token == int(np.argmax(scores(jnp.asarray(ids[-8:]))))
        ids.append(token)
    assert len(found) == 9
    many = plan_of(data=2, fsdp=2, tensor=2)
    assert greedy(model, params, many, [3, 1, 4], 9, window=8) == found


def test_a_prompt_outside_the_vocabulary_is_refused(plan_of: Callable[..., Plan]) -> None:
    for prompt in ([], [31], [-1]):
        with pytest.raises(UserError, match=r"at least one token id, all in 0\.\.30"):
            greedy(Model(CONFIG), {}, plan_of(), prompt, 1)
