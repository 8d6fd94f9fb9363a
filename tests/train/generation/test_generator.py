"""Generation with a cache picks what the whole model would, on every mesh; draws do not depend on
the other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.base.layout.plan import Plan
from jaxpar.models import Model
from jaxpar.models.masks import layer_masks
from jaxpar.parallel.cache import EMPTY, NewTokens, attend_cached
from jaxpar.parallel.mesh_ops import MeshOps
from jaxpar.parallel.ops import AttentionCall
from jaxpar.train.generation import Generator, bucket
from jaxpar.train.generation.sampling import Sampling, draw
from jaxpar.verify.reference_ops import ReferenceOps

CONFIG = ModelConfig(
    "llama",
    vocab_size=31,
    vocab_multiple=8,
    layers=4,
    embed=16,
    heads=4,
    kv_heads=2,
    mlp=32,
    max_seq_len=64,
    init_std=0.5,
    attention_softcap=2.0,
    logit_softcap=3.0,
    masks=(
        "window(5)",
        "causal",
        "longformer(window=4, stride=2)",
        "bigbird(window=1, globals=1, block=4)",
    ),
)
PROMPTS = [
    [3, 1, 4],
    [
        1,
        5,
        9,
        2,
        6,
        5,
        3,
        5,
        8,
        9,
        7,
        9,
        3,
        2,
        3,
        8,
        4,
    ],
    [6],
]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(CONFIG)


@pytest.fixture(scope="module")
def params(model: Model):
    return jax.jit(model.init)(jax.random.key(0))


@pytest.mark.users_flags
def test_each_token_is_the_most_likely_after_those_before(
    model, params, plan_of: Callable[..., Plan]
) -> None:
    plan = plan_of()
    scores = jax.jit(lambda ids_S: model.logits(params, {"tokens": ids_S[None]}, plan)[0])
    found = Generator(model, params, plan).generate(PROMPTS, 12)
    for prompt, new in zip(PROMPTS, found, strict=True):
        assert len(new) == 12
        ids = np.array(prompt + new)
        best = np.argmax(
            scores(
                jnp.pad(
                    jnp.asarray(ids),
                    (0, 32 - len(ids)),
                )
            ),
            axis=-1,
        )
        assert new == best[len(prompt) - 1 : len(ids) - 1].tolist()
    many = Generator(model, params, plan_of(data=2, tensor=4))  # each kv head has two copies
    assert many.generate(PROMPTS, 12) == found


@pytest.mark.slow
def test_what_is_generated_depends_on_no_other_rows_and_on_no_chunk(
    model, params, plan_of: Callable[..., Plan]
) -> None:
    many = Generator(model, params, plan_of(data=2, tensor=4))
    found = many.generate(PROMPTS, 12)
    assert many.generate(PROMPTS, 12, rows=2) == found  # another batch, with other rows beside
    *parts, whole = many.stream(PROMPTS, 12, chunk=4)
    assert whole == found and [len(part[0]) for part in parts] == [5, 9]
    stop = found[0][3]
    cut = [new[: new.index(stop)] if stop in new else new for new in found]
    assert many.generate(PROMPTS, 12, stop=[stop]) == cut


@pytest.mark.slow
def test_a_token_goes_to_the_shared_experts_while_a_text_is_written(
    plan_of: Callable[..., Plan],
) -> None:
    model = Model(replace(CONFIG, layers=2, masks=("causal",), experts=4, shared_experts=2))
    params = jax.jit(model.init)(jax.random.key(1))
    plan = plan_of()
    scores = jax.jit(lambda ids_S: model.logits(params, {"tokens": ids_S[None]}, plan)[0])
    for one in (plan, plan_of(data=2, tensor=2)):
        (new,) = Generator(model, params, one).generate([[3, 1, 4]], 8)
        best = np.argmax(scores(jnp.pad(jnp.asarray([3, 1, 4, *new]), (0, 5))), axis=-1)
        assert new == best[2:10].tolist()


@pytest.mark.slow
def test_parallel_sublayers_generate_what_they_score(plan_of: Callable[..., Plan]) -> None:
    model = Model(replace(CONFIG, sublayers="parallel", activation="relu2"))
    params = jax.jit(model.init)(jax.random.key(0))
    test_each_token_is_the_most_likely_after_those_before(model, params, plan_of)


@pytest.mark.slow
def test_a_query_layer_generates_what_it_scores(plan_of: Callable[..., Plan]) -> None:
    masks = ("window(6)", "causal")
    model = Model(
        replace(CONFIG, family="gpt2", kv_heads=0, layers=3, masks=masks, query_layer=True)
    )
    params = jax.jit(model.init)(jax.random.key(0))
    test_each_token_is_the_most_likely_after_those_before(model, params, plan_of)


@pytest.mark.slow
def test_scores_are_those_of_the_whole_model(model, params, plan_of: Callable[..., Plan]) -> None:
    plan = plan_of()
    counted = [2, 9, 1]
    sequences = [[*prompt, 7, 5] for prompt in PROMPTS]
    found = Generator(model, params, plan_of(data=2, tensor=4)).score(
        sequences,
        counted,
    )
    logits = jax.jit(
        lambda ids_S: jax.nn.log_softmax(model.logits(params, {"tokens": ids_S[None]}, plan)[0])
    )
    for ids, count, (total, best) in zip(sequences, counted, found, strict=True):
        scores = np.asarray(logits(jnp.pad(jnp.asarray(ids), (0, 32 - len(ids)))))[: len(ids) - 1][
            -count:
        ]
        # float32, another order
        np.testing.assert_allclose(
            total,
            scores[range(count), ids[-count:]].sum(),
            rtol=1e-5,
        )
        assert best == (scores.argmax(-1) == ids[-count:]).all()
    (new,) = Generator(model, params, plan).generate(
        [[3, 1, 4]],
        4,
    )
    assert Generator(model, params, plan).score([[3, 1, 4, *new]], [4])[0][1]


@pytest.mark.slow
def test_draws_depend_on_nothing_but_the_seed_and_the_place(
    model, params, plan_of: Callable[..., Plan]
) -> None:
    one = Generator(model, params, plan_of())
    sampling = Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=3)
    found = one.generate(PROMPTS, 6, sampling)
    assert one.generate(PROMPTS[:1], 6, sampling) == found[:1]
    assert (
        Generator(model, params, plan_of(data=2, fsdp=2, tensor=2)).generate(
            PROMPTS,
            6,
            sampling,
        )
        == found
    )
    compiled = len(one._programs)
    assert one.generate(PROMPTS, 6, replace(sampling, seed=4)) != found
    assert len(one._programs) == compiled


def test_draws_have_the_frequencies_of_the_filtered_scores() -> None:
    probabilities = np.array([0.4, 0.05, 0.3, 0.15, 0.1])
    keys = jax.random.split(jax.random.key(0), 4000)
    count = 4000
    scores = jnp.broadcast_to(jnp.log(probabilities), (count, 5))

    def frequencies(**values) -> np.ndarray:
        drawn = draw(
            scores,
            Sampling(**values),
            keys,
            jnp.zeros(count, jnp.int32),
        )
        return np.bincount(drawn, minlength=5) / count

    def normalized(*kept: int, power: float = 1.0) -> np.ndarray:
        weights = np.where(
            np.isin(np.arange(5), kept),
            probabilities**power,
            0,
        )
        return weights / weights.sum()

    # Four standard deviations of a frequency of 1/2 over 4,000 draws are 0.032.
    for values, expected in (
        ({"temperature": 1.0}, normalized(0, 1, 2, 3, 4)),
        (
            {"temperature": 0.5, "top_k": 3},
            normalized(0, 2, 3, power=2),
        ),
        ({"temperature": 1.0, "top_p": 0.75}, normalized(0, 2, 3)),
        # of three, two have 0.82
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.8}, normalized(0, 2)),
        ({"temperature": 1.0, "top_p": 0.01}, normalized(0)),
    ):
        np.testing.assert_allclose(frequencies(**values), expected, atol=0.032)


def test_lengths_are_rounded_up_a_little() -> None:
    assert [bucket(n) for n in (1, 16, 17, 65, 129, 1000)] == [16, 16, 32, 80, 160, 1024]
    assert all(n <= bucket(n) <= max(1.25 * n + 1, n + 15) for n in range(1, 3000))


def test_what_cannot_be_continued_is_refused(model, params, plan_of: Callable[..., Plan]) -> None:
    one = Generator(model, params, plan_of())
    for prompt in ([], [31], [-1]):
        with pytest.raises(UserError, match=r"prompt 2 .*0\.\.30"):
            one.generate([[1], prompt], 1)
    with pytest.raises(UserError, match=r"60 tokens, .*5 more .*64.*4 new"):
        one.generate([[1] * 60], 5)
    with pytest.raises(UserError, match="a pipeline of 2 stages trains"):
        Generator(model, params, plan_of(stage=2))
    encoder = Model(replace(model.config, masks=("causal", "local(4)")))
    with pytest.raises(UserError, match=r"model.masks=local\(4\)"):
        Generator(encoder, params, plan_of())
    experts = Model(replace(model.config, family="llama", experts=4, router="expert_choice"))
    with pytest.raises(UserError, match=r"model.router=expert_choice"):
        Generator(experts, params, plan_of())
    for values, message in (
        ({"top_k": 5}, "no effect"),
        ({"temperature": 1.0, "top_p": 0.0}, "0 < top_p"),
        ({"temperature": 1.0, "seed": -1}, "0 <= seed"),
    ):
        with pytest.raises(UserError, match=message):
            Sampling(**values)


def test_a_new_token_is_attended_as_the_last_of_a_whole_sequence(
    plan_of: Callable[..., Plan],
) -> None:
    """With a soft cap that bends the scores, and a mask: by the definition, and by the cache."""
    rng = np.random.default_rng(0)
    plan = plan_of()
    q, k, v = (
        jnp.asarray(3 * rng.standard_normal((2, 9, heads, 6)), jnp.float32) for heads in (4, 2, 2)
    )
    (mask,) = layer_masks(replace(CONFIG, masks=("longformer(window=4, stride=2)",)))
    before = tuple(
        jnp.pad(x[:, :-1].swapaxes(1, 2).reshape(4, 8, 6), ((0, 0), (0, 3), (0, 0))) for x in (k, v)
    )
    places = jnp.tile(
        jnp.where(jnp.arange(11) < 9, jnp.arange(11), EMPTY),
        (2, 1),
    )

    @jax.jit
    def both(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        call = AttentionCall(q[:, -1:], k[:, -1:], v[:, -1:], mask, softcap=2.0)
        new = NewTokens(8, jnp.array([8, 8]), places)
        found, _ = attend_cached(call, before, MeshOps(plan), plan=plan, new=new)
        return found, ReferenceOps(plan).attention(AttentionCall(q, k, v, mask, softcap=2.0))[
            :,
            -1:,
        ]

    found, want = both(q, k, v)
    # the same float32 sums over more, masked, slots
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
