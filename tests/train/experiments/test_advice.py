"""Advice is tried: what a refusal says to try is done, and nothing of its kind is refused then.

python tests/train/experiments/test_advice.py [--trials N] [--seed N]
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from typing import Any, NamedTuple

import pytest

from jaxpar.base.config import Config, load_config, override
from jaxpar.base.config.checks import check
from jaxpar.base.errors import UserError
from jaxpar.base.toml import flatten
from jaxpar.train.experiments import make_experiment

BASE = {
    "model.embed": 32,
    "model.mlp": 64,
    "model.heads": 4,
    "model.head_dim": 8,
    "model.layers": 4,
    "data.seq_len": 32,
    "model.max_seq_len": 64,
    "mesh.data": 1,
    "mesh.fsdp": 1,
    "mesh.tensor": 1,
}
VALUES: dict[str, list[Any]] = {
    "train.batch": [1, 3, 6, 7, 8, 10, 12, 20, 32],
    "train.accumulation": [1, 2, 3, 4],
    "mesh.data": [1, 2, 3, 4, 8, -1],
    "mesh.fsdp": [1, 2, 3, 4, 8, -1],
    "mesh.tensor": [1, 2, 3, 4, 8],
    "mesh.stage": [1, 2, 3, 4, 8],
    "mesh.context": [1, 2, 3, 4],
    "mesh.expert": [1, 2, 4],
    "model.heads": [1, 2, 3, 4, 6, 8],
    "model.kv_heads": [0, 1, 2, 3, 4],
    "model.layers": [1, 2, 3, 4, 5, 6, 8],
    "model.embed": [32, 48, 60, 64],
    "model.mlp": [64, 96, 100, 128],
    "model.experts": [0, 2, 3, 4, 8],
    "model.family": ["gpt2", "llama", "qwen3", "gemma2", "bert"],
    "model.dropout": [0.0, 0.1],
    "model.masks": [["causal"], ["causal & window(16)"], ["causal", "full"]],
    "model.vocab_size": [100, 256, 300],
    "data.seq_len": [16, 30, 32, 33, 64, 128],
    "pipeline.schedule": ["gpipe", "1f1b", "interleaved", "zb_h1"],
    "pipeline.virtual": [1, 2, 3],
    "pipeline.microbatches": [0, 1, 2, 3, 4, 6, 8],
    "memory.optimizer": ["device", "offload", "host"],
    "memory.parameters": ["device", "offload"],
    "precision.moments": ["float32", "bfloat16"],
    "optimizer.name": ["adamw", "lion", "sgd", "adafactor", "muon", "schedule_free"],
    "train.schedule": ["cosine", "constant", "wsd"],
    "train.warmup_steps": [0, 5, 400],
    "train.decay_steps": [0, 1, 200],
    "train.steps": [10, 300],
    "train.check_replicas": [0, 10],
    "context.strategy": ["ring", "ulysses", "gather"],
    "overlap.domino": ["off", "on", "sequence"],
    "metrics.profile": ["", "4:2"],
    "pruning.schedule": ["", "cubic"],
}
_TRY = re.compile(r"\btry (.*)$", re.S)
_OR = re.compile(r",? or |, ")
_PAIR = re.compile(r"\b([a-z]\w*(?:\.\w+)+)=([^\s,;)]+)")


class Tried(NamedTuple):
    """What was tried of a refusal's advice."""

    refusal: str
    settings: dict[str, Any]
    then: str | None
    """The next refusal."""
    again: bool
    """Whether it is one of the same thing."""


def refusal_of(config: Config) -> str | None:
    try:
        check(config)
        make_experiment(config)
    except UserError as error:
        return str(error)
    return None


def kind_of(refusal: str) -> str:
    """The words of a message, without its numbers."""
    return re.sub(r"\d+", "N", refusal.partition("try ")[0])


def keys_of(advice: str) -> set[str]:
    return {key for key, _ in _PAIR.findall(advice)}


def read(value: Any, text: str) -> Any:
    """The value that a text is, of the type of another."""
    text = text.rstrip(".")
    if isinstance(value, bool):
        return text == "true"
    if isinstance(value, int | float):
        return type(value)(text)
    return text


def follow(config: Config, refusal: str) -> list[Tried]:
    """Do each of the things that a refusal says to try, one at a time."""
    found = _TRY.search(refusal)
    if found is None:
        return []
    tried = []
    flat = flatten(config)
    for advice in _OR.split(found[1]):
        settings = {
            key: read(flat[key], text) for key, text in _PAIR.findall(advice) if key in flat
        }
        if not settings:
            continue
        then = refusal_of(override(config, settings))
        more = _TRY.search(then or "")
        again = then is not None and (
            kind_of(then) == kind_of(refusal)
            or bool(settings.keys() & keys_of(more[1] if more else ""))
        )
        tried.append(Tried(refusal, settings, then, again))
    return tried


def tried_of(trials: int, seed: int) -> list[Tried]:
    draw = random.Random(seed)
    base = override(load_config("tiny"), BASE)
    found = list[Tried]()
    for _ in range(trials):
        keys = draw.sample(list(VALUES), draw.randint(1, 5))
        try:
            config = override(base, {key: draw.choice(VALUES[key]) for key in keys})
        except UserError:
            continue
        refusal = refusal_of(config)
        found += follow(config, refusal) if refusal else []
    return found


def report(tried: list[Tried]) -> str:
    return "\n".join(f"{one.refusal}\n  {one.settings}\n  {one.then}" for one in tried if one.again)


def test_advice_is_good() -> None:
    tried = tried_of(200, 0)
    assert len(tried) > 10
    assert not report(tried)


@pytest.mark.slow
def test_more_advice_is_good() -> None:
    tried = tried_of(1500, 1)
    assert len({kind_of(one.refusal) for one in tried}) > 12
    assert not report(tried)


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        # dims of several arrays, of which the first that is refused takes 2 or 3
        ({"mesh.tensor": 3, "data.seq_len": 33}, {"mesh.tensor": 1}),
        ({"mesh.tensor": 4, "data.seq_len": 30}, {"mesh.tensor": 2}),
        # how many devices share a batch is known only where they are
        ({"mesh.fsdp": -1, "train.accumulation": 3}, {"train.batch": 48}),
        # layers of two kinds in turn
        ({"mesh.stage": 8, "model.masks": ["causal", "full"]}, {"mesh.stage": 2}),
        ({"train.batch": 7, "train.accumulation": 2, "mesh.data": 2}, {"train.batch": 8}),
        ({"optimizer.name": "schedule_free"}, {"train.schedule": "constant"}),
    ],
)
def test_what_is_tried(changes: dict[str, Any], settings: dict[str, Any]) -> None:
    config = override(load_config("tiny"), BASE | changes)
    refusal = refusal_of(config)
    assert refusal is not None
    tried = follow(config, refusal)
    assert settings in [one.settings for one in tried]
    assert not report(tried)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()
    found = tried_of(args.trials, args.seed)
    for words, times in Counter(kind_of(one.refusal) for one in found).most_common():
        print(f"{times:5}  {words}")
    wrong = sum(one.again for one in found)
    print(f"{len(found)} pieces of advice were tried, {wrong} were wrong\n{report(found)}")
