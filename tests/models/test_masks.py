"""The words of `model.masks`: what they show, how they shrink, and which are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.kernels.attention import dispatch
from jaxpar.kernels.masks import (
    PARTIAL,
    Causal,
    Mask,
    OfDistance,
    Tiles,
    dense,
    follows_documents,
    static_mask,
)
from jaxpar.models.masks import (
    WORDS,
    MaskWord,
    MayBeZero,
    layer_masks,
    reach,
    register_mask,
    shrink_mask,
    words_that_look_ahead,
)

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
        ("full", J == J + 0 * I),
        ("local(5)", abs(I - J) <= 5),
    ],
)
def test_a_word_shows_what_it_says(word: str, want: np.ndarray) -> None:
    np.testing.assert_array_equal(seen(word), want)


def test_random_blocks_are_drawn_by_their_seed() -> None:
    first, again, other = (seen(f"bigbird(1, 0, 2, block=3, seed={seed})") for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    "word", ["window(3)", "longformer(3, 2)", "bigbird(3, 1, 2, block=2)", "local(3)"]
)
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
        ("full(3)", r"has wrong numbers: write full"),
        ("local", r"'local' has wrong numbers: write local\(tokens\)"),
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
    assert shrink_mask("full", 1000, 10) == "full"
    assert shrink_mask("local(500)", 1000, 30) == "local(15)"
    assert shrink_mask("local(4)", 1000, 12) == "local(2)"  # both sides are a third
    assert shrink_mask("longformer(500)", 1000, 30) == "longformer(window=15, globals=1, stride=1)"
    assert (
        shrink_mask("bigbird(block=64)", 640, 20)
        == "bigbird(window=3, globals=2, random=3, block=2, seed=0)"
    )
    reached = {"causal": 99, "window(7)": 7, "longformer(7, 2)": 9, "bigbird(block=4)": 32}
    reached |= {"full": 99, "local(7)": 15}
    assert {word: reach(word, 99) for word in reached} == reached


@pytest.fixture
def even():
    """A word of one's own, for a mask of one's own that does not say its states."""

    @static_mask
    class Every(Mask):
        apart: int

        def visible(self, i: Any, j: Any) -> Any:
            return (i - j) % self.apart == 0

    @register_mask("even")
    @dataclass(frozen=True)
    class Even(MaskWord):
        apart: int = 2
        shift: MayBeZero = 0

        def mask(self, length: int) -> Mask:
            return Causal() & Every(self.apart)

    yield Every
    WORDS.remove("even")


def test_a_word_of_ones_own_is_a_word_like_ours(even: Any) -> None:
    np.testing.assert_array_equal(seen("even(3)"), (J <= I) & ((I - J) % 3 == 0))
    assert reach("even", 50) == 50
    assert shrink_mask("even(3)", 100, 10) == "even(3)"
    for word, said in {
        "evn": r"did you mean 'even'.*bigbird\(.*, even\(apart=2, shift=0\)",
        "even(0)": "apart=0: it is at least 1",
        "even(1, -1)": "shift=-1: it is at least 0",
        "even(1, 2, 3)": r"write even\(apart=2, shift=0\)",
    }.items():
        with pytest.raises(UserError, match=said):
            layer_masks(ModelConfig(masks=(word,)))


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_a_mask_without_states_serves_attention(even: Any, implementation: Any) -> None:
    """No tile of it is skipped: it is said to be partly seen."""
    mask = Causal() & even(3)
    q = jax.random.normal(jax.random.key(0), (1, S, 2, 4))
    out = jax.jit(lambda q: dispatch.attention(q, q, q, mask, implementation=implementation)[0])(q)
    scores = jnp.einsum("bshk,bthk->bhst", q, q) / 2
    scores = jnp.where((J <= I) & ((I - J) % 3 == 0), scores, -jnp.inf)
    wanted = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores), q)
    # float32 sums of at most 23 terms in another order
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    assert (even(3).states(Tiles(8, 8, 4, 4)) == PARTIAL).all()


def test_packed_documents_take_a_mask_of_ones_own_where_only_the_distance_counts(even: Any) -> None:
    @static_mask
    class Apart(OfDistance):
        apart: int

        def visible(self, i: Any, j: Any) -> Any:
            return (i - j) % self.apart == 0

    assert follows_documents(Causal() & Apart(2))
    assert not follows_documents(Causal() & even(2))


def test_masks_that_would_be_wrong_are_refused(even: Any) -> None:
    class Bare(Mask):
        pass

    with pytest.raises(UserError, match=r"Bare is none: write @masks.static_mask above the class"):
        Causal() & Bare()
    with pytest.raises(UserError, match=r"Mute .*`visible\(self, i, j\)`"):
        static_mask(type("Mute", (Mask,), {}))().visible(I, J)

    @register_mask("open")
    @dataclass(frozen=True)
    class Open(MaskWord):
        def mask(self, length: int) -> Mask:
            return even(2)

    try:
        with pytest.raises(UserError, match="'open' makes"):
            layer_masks(ModelConfig(masks=("open",)))
        assert words_that_look_ahead(ModelConfig(masks=("full", "causal", "local(2)"))) == [
            "full",
            "local(2)",
        ]
        with pytest.raises(UserError, match="frozen dataclasses of MaskWord"):
            register_mask("no_word")(Bare)  # pyright: ignore[reportArgumentType]
    finally:
        WORDS.remove("open")
