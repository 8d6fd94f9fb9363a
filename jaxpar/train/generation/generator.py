"""The generator, which continues prompts of different lengths in one batch, on any mesh without
stages.

The programs of a shape are in `decode_programs`, and the draw of a token is in `sampling`.

Shapes: B rows, S prompt length, N new tokens, D embed, V vocab.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.stages import Compiled
from jaxtyping import Array

from jaxpar.base.compiled_for import compiling_for
from jaxpar.base.compiler import program_options
from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError
from jaxpar.base.layout.fit_heads import fit_rules
from jaxpar.base.layout.plan import Overlap, Plan, is_matrix
from jaxpar.base.layout.sharding import Axes, replicated_sharding
from jaxpar.base.layout.specs import is_axes
from jaxpar.hlo.collective_order import require_order
from jaxpar.models import Model, Params
from jaxpar.models.masks import words_that_look_ahead
from jaxpar.parallel.cache import cache_spec
from jaxpar.parallel.collectives import platform_of
from jaxpar.train.generation import decode_programs
from jaxpar.train.generation.decode_programs import DecodeSizes, DecodeState, PromptRows
from jaxpar.train.generation.sampling import GREEDY, Sampling
from jaxpar.train.restore import drop_stages

Prompts = Sequence[Sequence[int] | np.ndarray]


@dataclass
class GenerationTimes:
    """The tokens and seconds of generation, without the time that programs took to compile."""

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
    """Continue each prompt (token ids) by up to `max_tokens` tokens; a `Generator` keeps the
    compiled programs for further calls.
    """
    return Generator(model, params, plan).generate(prompts, max_tokens, sampling, stop)


class Generator:
    """Continues prompts of different lengths in one batch, on any mesh without stages.

    Rows are split over the data-parallel axes and heads over tensor; no sequence is split. Experts
    drop no token. The parameters are held a second time, layer by layer (matrices in the plan's
    compute dtype), unless it may `consume` the given ones, which it then deletes one by one.

    Attributes:
      plan: the plan, changed for generation.
      times: tokens and seconds of all calls.
    """

    def __init__(self, model: Model, params: Params, plan: Plan, consume: bool = False):
        """Lay the model out on the plan; raise a UserError where the plan has stages, or a mask of
        the model looks ahead.
        """
        require_causal(model.config)
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
          prompts: the token ids of each prompt, at least one.
          max_tokens: the largest number of new tokens.
          stop: ids that end a row.
          rows: the number of prompts that run at once.

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
        """Yield all new ids of each prompt after every `chunk` of tokens (0 = at the end).

        The other arguments are those of `generate`. `first` is the number of the first prompt, for
        its draws. The batch has `rows` rows, if that is more.
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
        given = (
            tokens_BS,
            lengths_B,
            np.arange(B) >= len(prompts),
            first + np.arange(B, dtype=np.int32),
            np.array(stop or [-1], np.int32),
            np.uint32(sampling.seed),
        )
        inputs = PromptRows(*jax.device_put(given, replicated_sharding(self.plan)))
        # the seed is an argument
        sizes = DecodeSizes(S, max_tokens, replace(sampling, seed=0))
        shape = (B, sizes, len(inputs.stop))
        prefill = self._compiled(decode_programs.prefill, shape, self.params, inputs)
        began = time.perf_counter()
        state = jax.block_until_ready(prefill(self.params, inputs))
        self.times.prefill_tokens += sum(map(len, prompts))
        self.times.prefill_seconds += time.perf_counter() - began
        limit = np.int32(1)
        before = len(prompts)
        decode = self._compiled(decode_programs.decode, shape, self.params, state, limit)
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
        """Compute the log-likelihood in nats of the last `counted` tokens of each sequence after
        those before them, and whether each of these is the most likely one. All sequences run at
        once, and are refused where `generate` would refuse them.
        """
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
        program = self._compiled(decode_programs.score, (B, S), self.params, *inputs)
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
            _, size, *_ = shape
            places: Any = (whole, whole)
            if function is not decode_programs.score:
                caches = NamedSharding(self.plan.mesh, cache_spec(self.plan))
                shardings: Any = dict.fromkeys(DecodeState._fields, whole) | {"caches": caches}
                places = DecodeState(**shardings)
            jitted = jax.jit(
                partial(function, self.model, self.plan, size),
                out_shardings=places,
                donate_argnums=(1,) if function is decode_programs.decode else (),
                compiler_options=program_options(self.plan.mesh),
            )
            with compiling_for(self.plan.mesh.devices.flat[0]):
                lowered = jitted.lower(*args)
            program = lowered.compile()
            require_order(program, self.plan.mesh.devices.flat)
            self._programs[key] = program
        return self._programs[key]


def bucket(length: int) -> int:
    """Round a length up so that few programs serve all lengths; at most a quarter is added, or 16
    where that is more.
    """
    step = max(1 << max(length.bit_length() - 3, 0), 16)
    return -(-length // step) * step


def require_causal(config: ModelConfig) -> None:
    """Refuse a model whose tokens see those after them: it cannot write one after the other.

    Raises:
      UserError: a word of `model.masks` looks ahead, or experts choose their tokens.
    """
    for word in words_that_look_ahead(config):
        raise UserError(
            f"model.masks={word} lets tokens see those after them, which are not there yet while a "
            "text is written: an encoder does not generate, take a model whose masks are causal"
        )
    if config.experts and config.router == "expert_choice":
        raise UserError(
            "model.router=expert_choice: an expert chooses among all tokens of a text, of which "
            "the later ones are not there yet while it is written, so the model does not generate"
        )


def decode_plan(plan: Plan, model: ModelConfig) -> Plan:
    """Change a plan for generation: no sequence is split, and nothing is kept or moved for a
    backward pass. Stages, which keep the layers in an order of their own, are refused with a
    UserError.
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
    """Lay parameters out on the plan's mesh with `blocks` as a list of layers, and matrices in its
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

        def cut(x: Array) -> Array | list[Array]:
            if stacked:
                return [layer.astype(dtype) for layer in x]
            return x.astype(dtype)

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
            lambda params: model.head(params, x_BSD, plan).table_VD.T,
            out_shardings=plan.sharding(("embed", "vocab")),
        )({name: found[name] for name in ("embed", "head")})
    return found
