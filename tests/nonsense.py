"""Nonsense settings, through the command line's own parser and checks; what is accepted must train.

    python tests/nonsense.py [--count 500]

Every key of a config meets NaN, infinity, negative and huge numbers, zero, nothing, other scripts
and other types. A setting is refused in a sentence, or it is accepted, and then three steps of a
small model move its parameters to other finite numbers. A run that a step ends because it is not
finite would be told so, which is all right too. None may take more time or memory than `limits`
allows.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator

import jax
import numpy as np
from limits import cost_of

from jaxpar.base.config import Config
from jaxpar.base.config.checks import check
from jaxpar.base.errors import UserError
from jaxpar.base.toml import flatten
from jaxpar.cli.arguments import config_args
from jaxpar.cli.commands import TrainArgs
from jaxpar.data import load_corpus
from jaxpar.models import Model
from jaxpar.plan import resolve
from jaxpar.train import init_state, make_plan, make_train_step, put_batch
from jaxpar.train.experiment import Experiment

NUMBERS = (
    "nan",
    "inf",
    "-inf",
    "-1",
    "-0.5",
    "0",
    str(2**70),
    "1e308",
    "1e-308",
    "0x10",
)
WORDS = (
    "",
    "é",
    "日本",
    "true",
    "None",
    "[]",
    "..",
    "a b",
    "\u202e",
    "-",
    "%s",
    "{}",
)
SMALL = """
--mesh.data 1 --mesh.fsdp 1 --mesh.tensor 1 --model.layers 2 --model.embed 16 --model.heads 2 --model.mlp 16
--model.max-seq-len 16 --data.seq-len 16 --data.max-bytes 100000 --train.batch 4 --train.steps 4
--train.warmup-steps 0
""".split()  # noqa: SIM905 (a command line reads as one)


def settings() -> list[tuple[str, str]]:
    """Every key with every value, in an order that is the same each time."""
    pairs = [(key, value) for key in flatten(Config()) for value in NUMBERS + WORDS]
    random.Random(0).shuffle(pairs)
    return pairs


def parse(key: str, value: str) -> Config:
    """The config of a command line with this setting, checked; a UserError where it is refused."""
    words = ["tiny", *SMALL, f"--{key.replace('_', '-')}", value]
    with contextlib.redirect_stderr(io.StringIO()):
        return check(config_args("jaxpar train", TrainArgs, words)[1].config)


def trains(config: Config) -> str:
    """Whether three steps move the parameters; what is wrong in a word, and empty if nothing is."""
    config = resolve(config, say=lambda line: None)
    plan = make_plan(config, jax.devices())
    model = Model(config.model)
    load_corpus(config.data, config.model.vocab_size)
    experiment = Experiment(config, model, plan)
    state = init_state(experiment)
    before = jax.tree.map(np.asarray, model.trained(state.params))
    step = make_train_step(experiment)
    rng = np.random.default_rng(0)
    for _ in range(3):
        ids = rng.integers(
            0,
            256,
            (config.train.batch, config.data.seq_len + 1),
            np.int32,
        )
        ids %= config.model.vocab_size
        rows = {"tokens": ids[:, :-1], "labels": ids[:, 1:]}
        if config.data.pack:
            rows |= {
                "positions": np.arange(config.data.seq_len, dtype=np.int32) + 0 * rows["tokens"]
            }
            rows["segments"] = np.zeros_like(rows["tokens"])
        state, metrics = step(state, put_batch(rows, plan))
        numbers = {name: float(value) for name, value in metrics.items()}
        if numbers["overflows"] or not all(map(np.isfinite, numbers.values())):
            return ""  # the run stops, and says why
    after = jax.tree.map(np.asarray, model.trained(state.params))
    leaves = list(
        zip(
            jax.tree.leaves(before),
            jax.tree.leaves(after),
            strict=True,
        )
    )
    if not all(np.all(np.isfinite(leaf.astype(np.float32))) for _, leaf in leaves):
        return "not finite"
    moved = sum(bool(np.any(old != new)) for old, new in leaves)
    if moved > len(leaves) // 2:
        return ""
    return f"{moved} of {len(leaves)} parameters moved"


def _trains_in_limits(config: Config) -> str:
    """Whether it trains, in the time and the memory that a trial may take."""
    cost = cost_of(lambda: trains(config))
    return cost.result or cost.fault


def outcomes(
    pairs: list[tuple[str, str]],
    prove: bool,
) -> Iterator[tuple[str, str, str]]:
    """Each setting with what became of it: `refused`, `trains`, or what is wrong."""
    proved: dict[Config, str] = {}
    for key, value in pairs:
        try:
            config = parse(key, value)
            if prove and config not in proved:
                proved[config] = _trains_in_limits(config)
            yield key, value, (prove and proved[config]) or "accepted"
        except UserError as error:
            sentence = str(error)
            yield (
                key,
                value,
                "refused"
                if len(sentence) < 1000 and sentence.strip()
                else "refused in a long message",
            )
        except (Exception, SystemExit):
            yield key, value, "traceback: " + traceback.format_exc().strip().splitlines()[-1][:200]


def summary(pairs: list[tuple[str, str]], prove: bool) -> tuple[str, list[str]]:
    """A line with the counts, and a line for each setting that went wrong."""
    counts = Counter[str]()
    wrong = list[str]()
    for key, value, outcome in outcomes(pairs, prove):
        good = outcome in ("refused", "accepted")
        counts[outcome if good else "wrong"] += 1
        if not good:
            wrong.append(f"{key} = {value!r}: {outcome}")
    line = (
        f"{len(pairs)} nonsense settings: {counts['refused']} refused in a sentence, "
        f"{counts['accepted']} accepted"
        f"{' and train' if prove else ''}, {counts['wrong']} wrong"
    )
    return line, wrong


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(
        description="Nonsense settings through the command line's own checks."
    )
    arguments.add_argument("--count", type=int, default=500)
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        said, faults = summary(settings()[: arguments.parse_args().count], prove=True)
    print(said, *faults, sep="\n")
    sys.exit(bool(faults))
