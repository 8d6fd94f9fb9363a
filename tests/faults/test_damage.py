"""Damage to every kind of file in a run folder: a bit that flips, a file that is cut or gone. What
is used afterwards is right, or what is wrong is said in a line; never neither, and never a traceback.

`python tests/faults/test_damage.py --flips 200 --cuts 40 --deletions 40` is the long form.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import numpy as np
import pytest
from trainings import SMALL, TEXT

from jaxpar.base.errors import UserError
from jaxpar.cli.main import main
from jaxpar.train.experiments import make_experiment
from jaxpar.train.restore import load_run
from jaxpar.train.runs.folder.run_folder import read_run_config

pytestmark = pytest.mark.slow

Damage = Literal["flip", "cut", "delete"]
Kind = Literal[
    "right, nothing to say",
    "the step before, said",
    "refused in a line",
    "warned",
    "wrong",
    "traceback",
]
BAD = ("wrong", "traceback")
RESULT = "validation loss"
TRAIN = [
    "train",
    "tiny",
    *SMALL,
    *TEXT,
    "--train.steps=6",
    "--train.eval-every=3",
    "--train.eval-batches=2",
    "--train.final-eval-batches=2",
    "--checkpoint.every=3",
    "--checkpoint.keep=3",
    "--metrics.log-every=1",
]
COMMANDS = ("load", "load", "eval", "load", "load", "train", "load", "load")
"""What is called in turn; `load` is what eval, generate and convert begin with."""
Results = dict[str, tuple[str, str]]
"""What each command says of a whole run: with its last step, and with the one before."""


class Answer(NamedTuple):
    """What a command did: its exit code, what it printed, and what it said on standard error."""

    code: int | str
    printed: str
    said: str


class Trial(NamedTuple):
    """One damage, and what came of it."""

    damage: Damage
    file: str
    command: str
    kind: Kind
    answer: Answer


def call(words: list[str]) -> Answer:
    """Run a command in this process, as the command line does."""
    out = io.StringIO()
    err = io.StringIO()
    code: int | str
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except Exception:  # which the command line would print
            code = traceback.format_exc()
    return Answer(code, out.getvalue(), err.getvalue())


def damage_file(file: Path, damage: Damage, draw: random.Random) -> None:
    """Damage a file in one way."""
    content = bytearray(file.read_bytes())
    if damage == "delete":
        file.unlink()
        return
    if damage == "flip":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    else:
        del content[draw.randrange(len(content)) :]
    file.write_bytes(content)


def kind_of(file: str) -> str:
    """The kind of a file of a run folder, by which trials are spread."""
    parts = file.split("/")
    if parts[0] != "checkpoints":
        return file
    if "d" in parts[2:]:
        return "arrays"
    return "/".join(parts[2:])


def load(run: Path, step: int = 0) -> Answer:
    """Load the parameters of a run, as a command does; the result is a hash of their bits and of
    the config.
    """
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        try:
            config = read_run_config(run)
            experiment = make_experiment(config, jax.devices()[:1], training=False)
            found, params = load_run(run, step, experiment)
        except UserError as error:
            return Answer(2, "", f"{err.getvalue()}jaxpar: error: {error}")
        except Exception:  # which the command line would print
            return Answer(traceback.format_exc(), "", err.getvalue())
    bits = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params))
    made = hashlib.sha256(repr(config).replace(str(run), "").encode() + bits)
    return Answer(0, f"step {found}: {RESULT} by hash {made.hexdigest()}", err.getvalue())


def train_and_evaluate(run: Path) -> Answer:
    """Go on with a run, which trains a step again that is damaged, and evaluate what it came to."""
    trained = call([*TRAIN, f"--run={run}"])
    if trained.code:
        return trained
    said = "\n".join(line for line in trained.printed.splitlines() if "warning" in line)
    after = call(["eval", str(run)])
    return Answer(after.code, f"{said}\n{result_of(after)}", trained.said + after.said)


def result_of(answer: Answer) -> str:
    """The line of an answer that says what was computed."""
    lines = answer.printed.splitlines()
    return "\n".join(line for line in lines if f": {RESULT}" in line)


def judge(answer: Answer, right: str, before: str) -> Kind:
    """Say what a command made of a damaged run.

    Args:
      answer: what it did.
      right: its result on the run as it was.
      before: its result with the step before.
    """
    if isinstance(answer.code, str):
        return "traceback"
    result = result_of(answer)
    words = answer.said + answer.printed
    if answer.code:
        one_line = answer.said.count("jaxpar: error:") == 1
        return "refused in a line" if answer.code == 2 and one_line else "wrong"
    if result == right and "it was moved" in words:
        return "the step before, said"
    if result == right:
        return "warned" if "warning" in words or "no manifest" in words else "right, nothing to say"
    if result == before and ("warning" in words or "it was moved" in words):
        return "the step before, said"
    return "wrong"


def make_run(folder: Path) -> Results:
    """Train a run with two checkpoints; return what it gives."""
    made = call([*TRAIN, f"--run={folder}"])
    assert made.code == 0, made
    evaluated = (call(["eval", str(folder)]), call(["eval", str(folder), "--step=3"]))
    loaded = (load(folder), load(folder, 3))
    results = {
        "eval": (result_of(evaluated[0]), result_of(evaluated[1])),
        "load": (result_of(loaded[0]), result_of(loaded[1])),
    }
    for right, before in results.values():
        assert right.startswith("step 6: ") and before.startswith("step 3: ")
    return results | {"train": results["eval"]}


def trials(whole: Path, counts: dict[Damage, int], seed: int, results: Results) -> list[Trial]:
    """Damage copies of a run, each once, over all kinds of files in turn, and evaluate each."""
    draw = random.Random(seed)
    files = [path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file()]
    # of the step that would be used
    files = [file for file in files if not file.startswith("checkpoints/3/")]
    by_kind: dict[str, list[str]] = {}
    for file in sorted(files):
        by_kind.setdefault(kind_of(file), []).append(file)
    # most of a run's bytes are arrays
    kinds = sorted(by_kind) + ["arrays"] * (len(by_kind) // 2)
    found = []
    copy = whole.with_name("copy")
    for damage, count in counts.items():
        for number in range(count):
            file = draw.choice(by_kind[kinds[number % len(kinds)]])
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(whole, copy)
            if not (copy / file).stat().st_size:
                continue
            damage_file(copy / file, damage, draw)
            command = COMMANDS[number % len(COMMANDS)]
            if command == "train":
                answer = train_and_evaluate(copy)
            elif command == "load":
                answer = load(copy)
            else:
                answer = call(["eval", str(copy)])
            kind = judge(answer, *results[command])
            found.append(Trial(damage, file, command, kind, answer))
            if number % 10 == 9:
                print(f"{damage}: {number + 1} tries", flush=True)
    return found


def test_damage_is_caught_or_does_no_harm(tmp_path: Path) -> None:
    results = make_run(tmp_path / "run")
    counts: dict[Damage, int] = {"flip": 6, "cut": 2, "delete": 2}
    found = trials(tmp_path / "run", counts, 0, results)
    assert not [trial for trial in found if trial.kind in BAD]
    assert any(trial.kind == "the step before, said" for trial in found)


def run_long() -> int:
    """The long form; returns the number of trials that ended badly."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, count in (("flips", 200), ("cuts", 40), ("deletions", 40), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=count)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "run"
        results = make_run(whole)
        counts: dict[Damage, int] = {
            "flip": args.flips,
            "cut": args.cuts,
            "delete": args.deletions,
        }
        found = trials(whole, counts, args.seed, results)
    for damage in counts:
        kinds = Counter(trial.kind for trial in found if trial.damage == damage)
        print(f"{damage}: {sum(kinds.values())} tries: {dict(kinds)}")
    bad = [trial for trial in found if trial.kind in BAD]
    for trial in bad:
        print(trial)
    return len(bad)


if __name__ == "__main__":
    sys.exit(run_long() > 0)
