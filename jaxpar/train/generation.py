"""Continues prompts token by token: a prefill that reads them, and a decode loop over a cache of
keys and values.

Both are one jitted program each for a shape. The layers are unrolled, and each has arrays of its
own, so that a token copies neither a parameter nor a cache.

Shapes: B rows, S prompt length, T slots of the cache, N new tokens, D embed, V vocab.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.stages import Compiled
from jaxtyping import Array, Bool, Float, Int, Key

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.base.jax_compat import compiler_options
from jaxpar.base.plan import Overlap, Plan, is_matrix
from jaxpar.base.sharding import Axes, fit_rules, is_axes, replicated_sharding
from jaxpar.hlo.collective_order import require_order
from jaxpar.models import Model, Params
from jaxpar.parallel.cache import EMPTY, Cache, DecodeOps, PrefillOps, cache_spec
from jaxpar.parallel.collectives import platform_of
from jaxpar.train.restore import drop_stages


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; the filters are applied in this order, as in Hugging Face's
    `generate`.

    Attributes:
      temperature: the scores are divided by it; 0 = greedy, the most likely token.
      top_k: only this many of the most likely tokens may be drawn; 0 = all.
      top_p: only the most likely tokens that together have this probability may be drawn
        (arXiv:1904.09751).
      seed: the seed. A draw depends on it, on the number of the prompt and on the token's place,
        and on nothing else.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a value that is out of range, or has no effect, with a UserError."""
        draws = self.temperature == 0 or 1e-4 <= self.temperature <= 1e4
        if not draws or self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.seed < 2**32:
            want = (
                "temperature 0 or 0.0001 to 10000, top_k >= 0, 0 < top_p <= 1 and 0 <= seed < 2**32"
            )
            raise UserError(f"sampling takes {want}, found {self}")
        if self.temperature == 0 and (self.top_k or self.top_p < 1 or self.seed):
            raise UserError(
                "top_k, top_p and seed have no effect at temperature 0, which is greedy: set a "
                "temperature"
            )


GREEDY = Sampling()


def draw(
    scores_BV: Float[Array, "B V"], sampling: Sampling, keys_B: Array, place_B: Array
) -> Int[Array, " B"]:
    """Draw a token of each row, by the row's key and the place of the token."""
    if sampling.temperature == 0:
        return jnp.argmax(scores_BV, axis=-1).astype(jnp.int32)
    keys_B = jax.vmap(jax.random.fold_in)(keys_B, place_B)
    return jax.vmap(jax.random.categorical)(keys_B, filter_scores(scores_BV, sampling)).astype(
        jnp.int32
    )


def filter_scores(scores_BV: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Divide the scores by the temperature, and set those of tokens that may not be drawn to minus
    infinity.
    """
    scores_BV = scores_BV / sampling.temperature
    if 0 < sampling.top_k < scores_BV.shape[1]:
        least_B1 = jax.lax.top_k(scores_BV, sampling.top_k)[0][:, -1:]
        scores_BV = jnp.where(scores_BV < least_B1, -jnp.inf, scores_BV)
    if sampling.top_p < 1:
        sorted_BV = jnp.sort(scores_BV, axis=-1, descending=True)
        share_BV = jax.nn.softmax(sorted_BV, axis=-1)
        # what is more likely has less than this
        kept_BV = jnp.cumsum(share_BV, axis=-1) - share_BV < sampling.top_p
        least_B1 = jnp.min(
            jnp.where(kept_BV, sorted_BV, jnp.inf),
            axis=-1,
            keepdims=True,
        )
        scores_BV = jnp.where(scores_BV < least_B1, -jnp.inf, scores_BV)
    return scores_BV


Prompts = Sequence[Sequence[int] | np.ndarray]


class State(NamedTuple):
    """Where generation stands; `tokens_BN` are the new ones so far, and -1."""

    caches: list[Cache]
    tokens_BN: Int[Array, "B N"]
    lengths_B: Int[Array, " B"]
    done_B: Bool[Array, " B"]
    keys_B: Key[Array, " B"]
    stop: Int[Array, " stops"]
    made: Int[Array, ""]


@dataclass
class GenerationTimes:
    """Tokens and seconds, without the time that programs took to compile."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0


def generate(
    model: Model,
    params: Params,
    plan: Plan,
    prompts: Prompts,
    max_tokens: int = 128,
    sampling: Sampling = GREEDY,
    stop: Sequence[int] = (),
) -> list[list[int]]:
    """Continue each prompt (token ids) by up to `max_tokens` tokens; see `Generator`, which keeps
    what is compiled.
    """
    return Generator(model, params, plan).generate(prompts, max_tokens, sampling, stop)


class Generator:
    """Continues prompts of different lengths in one batch, on any mesh without stages.

    Rows are split over the data-parallel axes and heads over tensor; no sequence is split. Experts
    drop no token. The parameters are held a second time, layer by layer (matrices in the plan's
    compute dtype), unless it may `consume` the given ones, which it then deletes one by one.

    Attributes:
      plan: the plan as it is used.
      times: tokens and seconds of all calls.
    """

    def __init__(self, model: Model, params: Params, plan: Plan, consume: bool = False):
        """Take the model onto the plan; raise a UserError where that has stages."""
        self.plan, self.times = decode_plan(plan, model.config), GenerationTimes()
        self.model = model.with_config(replace(model.config, dropout=0.0))
        self.config = self.model.config
        self.params = layer_by_layer(model, params, self.plan, consume)
        self._programs: dict[tuple[Any, ...], Compiled] = {}

    def generate(
        self,
        prompts: Prompts,
        max_tokens: int = 128,
        sampling: Sampling = GREEDY,
        stop: Sequence[int] = (),
        rows: int = 32,
    ) -> list[list[int]]:
        """Return the new token ids of each prompt, without the stop token that ended them.

        Args:
          prompts: token ids; there must be one at least in each.
          max_tokens: the largest number of new tokens.
          sampling: how tokens are drawn.
          stop: ids that end a row.
          rows: how many prompts run at once.

        Raises:
          UserError: a prompt is empty, has an id outside the vocabulary, or is too long for so many
            new tokens.
        """
        self.check(prompts, max_tokens)
        found: list[list[int]] = []
        for first in range(0, len(prompts), rows):
            some = prompts[first : first + rows]
            # Without chunks the stream has one item: all new tokens.
            found += next(
                self.stream(
                    some, max_tokens, sampling, stop, first=first, rows=min(rows, len(prompts))
                )
            )
        return found

    def stream(
        self,
        prompts: Prompts,
        max_tokens: int = 128,
        sampling: Sampling = GREEDY,
        stop: Sequence[int] = (),
        chunk: int = 0,
        first: int = 0,
        rows: int = 0,
    ) -> Iterator[list[list[int]]]:
        """Yield all new ids of each prompt after every `chunk` of tokens (0 = at the end);
        otherwise as `generate`.

        `first` is the number of the first prompt, for its draws. The batch has `rows` rows, if that
        is more.
        """
        self.check(prompts, max_tokens)
        if not prompts or not max_tokens:
            yield [[] for _ in prompts]
            return
        shards = self.plan.size("batch")
        B = -(-max(rows, len(prompts)) // shards) * shards
        S = min(bucket(max(map(len, prompts))), self.config.max_seq_len)
        tokens_BS = np.zeros((B, S), np.int32)
        lengths_B = np.ones(B, np.int32)
        for row, prompt in enumerate(prompts):
            tokens_BS[row, : len(prompt)], lengths_B[row] = prompt, len(prompt)
        inputs = (
            tokens_BS,
            lengths_B,
            np.arange(B) >= len(prompts),
            first + np.arange(B, dtype=np.int32),
            np.array(stop or [-1], np.int32),
            np.uint32(sampling.seed),
        )
        inputs = jax.device_put(inputs, replicated_sharding(self.plan))
        # the seed is an argument
        shape = (
            B,
            S,
            max_tokens,
            replace(sampling, seed=0),
            len(inputs[4]),
        )
        prefill = self._compiled(_prefill, shape, self.params, *inputs)
        began = time.perf_counter()
        state = jax.block_until_ready(prefill(self.params, *inputs))
        self.times.prefill_tokens += sum(map(len, prompts))
        self.times.prefill_seconds += time.perf_counter() - began
        limit = np.int32(1)
        before = len(prompts)
        decode = self._compiled(_decode, shape, self.params, state, limit)
        while True:
            began = time.perf_counter()
            limit = np.int32(min(limit + (chunk or max_tokens), max_tokens))
            state = decode(self.params, state, limit)
            tokens_BN, done_B, count = jax.device_get((state.tokens_BN, state.done_B, state.made))
            new = [ids[ids >= 0].tolist() for ids in tokens_BN[: len(prompts)]]
            ended = bool(done_B.all()) or count >= max_tokens
            made = sum(map(len, new))
            self.times.decode_tokens += made - before
            self.times.decode_seconds += time.perf_counter() - began
            before = made
            yield [ids[:-1] if ids and ids[-1] in stop else ids for ids in new]
            if ended:
                return

    def score(
        self,
        sequences: Prompts,
        counted: Sequence[int],
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood in nats of the last `counted` tokens of each sequence after
        those before them, and whether each of these is the most likely one. All sequences run at
        once, and are refused as by `generate`."""
        self.check([sequence[:-1] for sequence in sequences], 0)
        shards = self.plan.size("batch")
        B = -(-len(sequences) // shards) * shards
        S = min(
            bucket(max(map(len, sequences)) - 1),
            self.config.max_seq_len,
        )
        tokens_BS = np.zeros((B, S), np.int32)
        labels_BS = np.full((B, S), -1, np.int32)
        for row, (sequence, count) in enumerate(zip(sequences, counted, strict=True)):
            end = len(sequence) - 1
            tokens_BS[row, :end], labels_BS[row, end - count : end] = (
                sequence[:-1],
                sequence[len(sequence) - count :],
            )
        inputs = jax.device_put((tokens_BS, labels_BS), replicated_sharding(self.plan))
        program = self._compiled(_score, (B, S), self.params, *inputs)
        sums_B, best_B = jax.device_get(program(self.params, *inputs))
        return list(
            zip(
                sums_B[: len(sequences)].tolist(),
                best_B[: len(sequences)].tolist(),
                strict=True,
            )
        )

    def check(self, prompts: Prompts, max_tokens: int) -> None:
        """Refuse prompts that the model cannot continue by so many tokens, with a UserError."""
        vocab = self.config.vocab_size
        context = self.config.max_seq_len
        for number, prompt in enumerate(prompts, 1):
            if not len(prompt) or not 0 <= min(prompt) <= max(prompt) < vocab:
                raise UserError(
                    f"prompt {number} needs at least one token id, all in 0..{vocab - 1}"
                )
            if (left := context - len(prompt)) < max_tokens:
                if left > 0:
                    fits = f"at most {left} new ones fit"
                else:
                    fits = "shorten it"
                more = f"{max_tokens} more are beyond the context of {context} (model.max_seq_len)"
                raise UserError(f"prompt {number} has {len(prompt)} tokens, and {more}: {fits}")

    def _compiled(
        self, function: Callable[..., Any], shape: tuple[Any, ...], *args: Any
    ) -> Compiled:
        """Return the program for arguments of these shapes, compiled when it is first asked for."""
        key = (function, shape)
        if key not in self._programs:
            whole = replicated_sharding(self.plan)
            known = shape[1:4]
            places: Any = (whole, whole)
            if function is not _score:
                caches = NamedSharding(self.plan.mesh, cache_spec(self.plan))
                shardings: Any = dict.fromkeys(State._fields, whole) | {"caches": caches}
                places = State(**shardings)
            program = (
                jax.jit(
                    partial(function, self.model, self.plan, *known),
                    out_shardings=places,
                    donate_argnums=(1,) if function is _decode else (),
                    compiler_options=compiler_options(self.plan.mesh),
                )
                .lower(*args)
                .compile()
            )
            require_order(program, self.plan.mesh.devices.flat)
            self._programs[key] = program
        return self._programs[key]


def bucket(length: int) -> int:
    """Round a length up so that few programs serve all lengths, and at most a quarter is added (16
    at least).
    """
    step = max(1 << max(length.bit_length() - 3, 0), 16)
    return -(-length // step) * step


def decode_plan(plan: Plan, model: ModelConfig) -> Plan:
    """Return the plan for generating: no sequence is split, and nothing is kept or moved for a
    backward. Stages, which keep the layers in an order of their own, are refused with a UserError.
    """
    if plan.size("stage") > 1:
        raise UserError(
            f"a pipeline of {plan.size('stage')} stages trains, and does not generate: use "
            "mesh.stage=1"
        )
    rules = replace(plan.rules, seq=(), residual_seq=(), attention_seq=())
    rules, _ = fit_rules(rules, model.heads, model.kv_head_count, plan.mesh.shape)
    return drop_stages(replace(plan, rules=rules, remat="none", overlap=Overlap()))


def layer_by_layer(model: Model, params: Params, plan: Plan, consume: bool = False) -> Params:
    """Return the parameters with `blocks` as a list of layers, on the plan's mesh, matrices in its
    compute dtype.

    On CPUs the head's matrix is there a second time, as `head_DV`: with several rows XLA:CPU takes
    2.5 times as long to multiply by a transpose. `consume` deletes each of the given arrays once it
    is no longer needed.
    """

    def place(axes: Axes, x: Array) -> Array | list[Array]:
        stacked = axes[:1] == ("layers",)
        # The router and learned positions are read in float32.
        if is_matrix(axes) and None not in axes:
            dtype = plan.dtype
        else:
            dtype = x.dtype
        cut = lambda x: [layer.astype(dtype) for layer in x] if stacked else x.astype(dtype)  # noqa: E731
        found = jax.jit(cut, out_shardings=plan.sharding(axes[stacked:]))(x)
        if consume:
            x.delete()
        return found

    found = jax.tree.map(place, model.axes, params, is_leaf=is_axes)
    layers, form = jax.tree.flatten(
        found["blocks"],
        lambda tree: isinstance(tree, list),
    )
    found["blocks"] = [form.unflatten(layer) for layer in zip(*layers, strict=True)]
    if platform_of(plan) == "cpu":
        x_BSD = jnp.zeros((1, 1, model.config.embed), plan.dtype)
        found["head_DV"] = jax.jit(
            lambda params: model.head(params, x_BSD)[1].T,
            out_shardings=plan.sharding(("embed", "vocab")),
        )({name: found[name] for name in ("embed", "head")})
    return found


def run(
    model: Model, params: Params, tokens_BS: Array, positions_BS: Array, plan: Plan
) -> Float[Array, "B S D"]:
    """Run tokens through the embedding and all layers of `layer_by_layer` parameters."""
    x_BSD = model.embed(params, tokens_BS, positions_BS, plan)
    for i, layer in enumerate(params["blocks"]):
        x_BSD, _ = model.block(
            layer,
            x_BSD,
            positions_BS,
            None,
            plan,
            kind=i % model.config.kinds,
        )
    return x_BSD


def _scores(
    model: Model,
    params: Params,
    x_BSD: Array,
    plan: Plan,
) -> Float[Array, "B S V"]:
    """Return the float32 scores of the vocabulary, whole on every device of their rows."""
    x_BSD, head_VD = model.head(params, x_BSD)
    if "head_DV" in params:
        head_VD = params["head_DV"].T
    sizes = model.config
    scores_BSV = model.ops(plan).logits(x_BSD, head_VD, sizes.vocab_size, sizes.logit_softcap)
    return plan.constrain(scores_BSV[..., : sizes.vocab_size], ("batch", None, None))


def _prefill(
    model: Model,
    plan: Plan,
    S: int,
    N: int,
    sampling: Sampling,
    params: Params,
    tokens_BS: Array,
    lengths_B: Array,
    done_B: Array,
    number_B: Array,
    stop: Array,
    seed: Array,
) -> State:
    """Read the prompts, and draw the first new token of each."""
    ops = PrefillOps(plan, slots=S + N)
    model = model.with_config(model.config, lambda plan: ops)
    tokens_BS = plan.constrain(tokens_BS, ("batch", None))
    positions_BS = jnp.broadcast_to(jnp.arange(S), tokens_BS.shape)
    x_BSD = run(model, params, tokens_BS, positions_BS, plan)
    if not ops.caches:
        raise UserError(
            "no block calls ops.attention, so that there is no cache of what came before a token: "
            "generation needs one"
        )
    last_B1D = jnp.take_along_axis(x_BSD, lengths_B[:, None, None] - 1, axis=1)
    scores_BV = _scores(model, params, plan.constrain(last_B1D, ("batch", None, None)), plan)[:, 0]
    keys_B = jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(number_B)
    tokens_BN = jnp.full((len(lengths_B), N), -1, jnp.int32)
    state = State(
        ops.caches,
        tokens_BN,
        lengths_B,
        done_B,
        keys_B,
        stop,
        jnp.int32(0),
    )
    return _add(state, scores_BV, sampling)


def _decode(
    model: Model,
    plan: Plan,
    S: int,
    N: int,
    sampling: Sampling,
    params: Params,
    state: State,
    limit: Array,
) -> State:
    """Draw tokens until there are `limit` of each row, or every row has met a stop token."""
    slots = jnp.arange(S + N)
    n = state.lengths_B[:, None]
    places_BT = jnp.where(
        slots < S,
        jnp.where(slots < n, slots, EMPTY),
        n + slots - S,
    )

    def step(state: State) -> State:
        place_B = state.lengths_B + state.made - 1  # of the newest token, which has no cache yet
        ops = DecodeOps(plan, state.caches, S + state.made - 1, places_BT, place_B)
        decoding = model.with_config(model.config, lambda plan: ops)
        tokens_B1 = jax.lax.dynamic_slice_in_dim(state.tokens_BN, state.made - 1, 1, axis=1)
        tokens_B1 = plan.constrain(tokens_B1, ("batch", None))
        positions_B1 = plan.constrain(place_B[:, None], ("batch", None))
        # A row that has ended has no newest token; what it computes is not used.
        x_B1D = run(decoding, params, jnp.maximum(tokens_B1, 0), positions_B1, plan)
        scores_BV = _scores(decoding, params, x_B1D, plan)[:, 0]
        return _add(state._replace(caches=ops.caches), scores_BV, sampling)

    return jax.lax.while_loop(
        lambda state: (state.made < limit) & ~state.done_B.all(),
        step,
        state,
    )


def _score(
    model: Model, plan: Plan, S: int, params: Params, tokens_BS: Array, labels_BS: Array
) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """Return the log-likelihood of each row's labels (-1 = not counted), and whether they are all
    the most likely.
    """
    tokens_BS, labels_BS = (plan.constrain(x, ("batch", None)) for x in (tokens_BS, labels_BS))
    x_BSD = run(
        model,
        params,
        tokens_BS,
        jnp.broadcast_to(jnp.arange(S), tokens_BS.shape),
        plan,
    )
    width = math.gcd(S, 16)  # the scores of so many tokens a row are in memory at a time

    def part(
        sums: tuple[Array, Array],
        first: Array,
    ) -> tuple[tuple[Array, Array], None]:
        x_BCD, labels_BC = (
            jax.lax.dynamic_slice_in_dim(x, first, width, axis=1) for x in (x_BSD, labels_BS)
        )
        scores_BCV = _scores(model, params, x_BCD, plan)
        counted_BC = labels_BC >= 0
        found_BC = jnp.take_along_axis(scores_BCV, jnp.maximum(labels_BC, 0)[..., None], axis=-1)[
            ..., 0
        ]
        found_BC -= jax.nn.logsumexp(scores_BCV, axis=-1)
        best_BC = jnp.argmax(scores_BCV, axis=-1) == labels_BC
        total_B, best_B = sums
        return (
            total_B + jnp.sum(found_BC * counted_BC, axis=1),
            best_B & jnp.all(best_BC | ~counted_BC, axis=1),
        ), None

    nothing = jnp.zeros(len(tokens_BS)), jnp.ones(len(tokens_BS), bool)
    return jax.lax.scan(part, nothing, jnp.arange(0, S, width))[0]


def _add(state: State, scores_BV: Array, sampling: Sampling) -> State:
    """Draw a token of each row that has not ended, and put it at the end of its new tokens."""
    token_B = draw(scores_BV, sampling, state.keys_B, state.lengths_B + state.made)
    token_B = jnp.where(state.done_B, -1, token_B)
    tokens_BN = jax.lax.dynamic_update_slice_in_dim(
        state.tokens_BN, token_B[:, None], state.made, axis=1
    )
    done_B = state.done_B | jnp.isin(token_B, state.stop)
    return state._replace(tokens_BN=tokens_BN, done_B=done_B, made=state.made + 1)
