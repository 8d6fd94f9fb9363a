"""The words of `model.masks`: what they show, how they shrink, and which are refused."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.kernels.masks import Tiles, dense
from jaxpar.models.masks import layer_masks, reach, shrink_mask

pytestmark = pytest.mark.quick
S = 23
I = np.arange(S)[:, None]
J = np.arange(S)


def seen(word: str) -> np.ndarray:
    (mask,) = layer_masks(ModelConfig(masks=(word,), max_seq_len=S))
    return np.asarray(dense(mask, Tiles(S, S, 4, 4)))


@pytest.mark.parametrize(
    ("word", "want"),
    [
        ("causal", J <= I),
        ("window(5)", (J <= I) & (I - J < 5)),
        (
            "longformer(4, 2)",
            (J <= I) & ((I - J < 4) | (J < 2)),
        ),
        (
            "longformer(window=3, globals=0, stride=2)",
            (J <= I) & (I - J <= 4) & ((I - J) % 2 == 0),
        ),
        (
            "bigbird(3, 1, 0, block=4)",
            (J <= I) & ((abs(I // 4 - J // 4) <= 1) | (J < 4) | (I < 4)),
        ),
    ],
)
def test_a_word_shows_what_it_says(word: str, want: np.ndarray) -> None:
    np.testing.assert_array_equal(seen(word), want)


def test_random_blocks_are_drawn_by_their_seed() -> None:
    first, again, other = (seen(f"bigbird(1, 0, 2, block=3, seed={seed})") for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("word", ["window(3)", "longformer(3, 2)", "bigbird(3, 1, 2, block=2)"])
def test_a_longer_context_shows_the_same_tokens(word: str) -> None:
    """`train.restore.require_model` takes weights of another `max_seq_len`."""
    short, long = (
        layer_masks(ModelConfig(masks=(word,), max_seq_len=length))[0] for length in (32, 500)
    )
    i = np.arange(32)[:, None]
    j = np.arange(32)[None]
    np.testing.assert_array_equal(short.visible(i, j), long.visible(i, j))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "windw(5)",
            r"has no 'windw\(5\)' \(did you mean 'window'\?\): try one of causal, "
            r"window\(tokens\), lo",
        ),
        ("window", r"'window' has wrong numbers: write window\(tokens\)"),
        ("window(5, 6)", r"has wrong numbers: write window\(tokens\)"),
        ("window(five)", r"has wrong numbers: write window\(tokens\)"),
        ("window(0)", r"'window\(0\)' has tokens=0: it is at least 1"),
        ("causal(3)", r"has wrong numbers: write causal"),
        ("longformer(size=3)", r"write longformer\(window=512, globals=1, stride=1\)"),
        ("bigbird(4)", r"has window=4: blocks on both sides make it odd"),
    ],
)
def test_a_wrong_word_is_refused(word: str, message: str) -> None:
    with pytest.raises(UserError, match=f"model.masks.*{message}"):
        layer_masks(ModelConfig(masks=(word,)))


def test_a_word_shrinks_with_the_sequence() -> None:
    assert shrink_mask("causal", 1000, 10) == "causal"
    assert shrink_mask("window(4)", 1000, 12) == "window(4)"  # at least a third
    assert shrink_mask("window(500)", 1000, 30) == "window(15)"
    assert shrink_mask("longformer(500)", 1000, 30) == "longformer(window=15, globals=1, stride=1)"
    assert (
        shrink_mask("bigbird(block=64)", 640, 20)
        == "bigbird(window=3, globals=2, random=3, block=2, seed=0)"
    )
    reached = {"causal": 99, "window(7)": 7, "longformer(7, 2)": 9, "bigbird(block=4)": 32}
    assert {word: reach(word, 99) for word in reached} == reached
