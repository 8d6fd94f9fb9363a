"""Plans drawn at random, each through `jaxpar verify` in a process of its own, or through `jaxpar
rehearse`.

    python tests/random_plans.py [--count N] [--seed N] [--jobs N] [--target NAME ...] [--timeout
    SECONDS] [--json FILE]

A plan is a preset on a mesh of up to eight devices, with a schedule, forms of overlap, remat,
offload, dtypes and such; one in eight is a pipeline and nothing else. Every outcome is a line:
equal, differs, refused (with the reason), crashed or hung. The exit code is 1 where one differs,
crashed or hung. With `--target` the plans are cut to two layers, spread over all chips by the data
axis and compiled for these machines in turn, and a finding that the plan has not asked for counts
like a difference.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from jaxpar.rehearse.report.lint import LINTS

AXES = ("stage", "data", "fsdp", "context", "expert", "tensor")
PRESETS = ("gpt2_124m", "llama32_1b", "llama3_8b", "mixtral_8x7b")
FORMS = ("xla", "ring", "bidirectional")
# true of some plans, and no fault of the program
_OF_THE_PLAN = ("large-copy", "replicated-parameter")
POLICIES = ("none", "full", "block_inputs", "attention_out", "selective", "dots")


def draw(random: random.Random) -> list[str]:
    """The words of a plan."""
    preset = random.choice(PRESETS)
    mesh: dict[str, int] = dict.fromkeys(AXES, 1)
    if random.random() < 1 / 8:
        mesh["stage"] = random.choice((2, 4, 8))
    else:
        axes = [axis for axis in AXES if axis != "expert" or preset == "mixtral_8x7b"]
        for axis in random.sample(axes, len(axes)):
            room = 8 // math.prod(mesh.values())
            mesh[axis] = random.choice([size for size in (1, 2, 4) if size <= room])
    plan: dict[str, Any] = {f"mesh.{axis}": size for axis, size in mesh.items()}
    plan["train.accumulation"] = random.choice((1, 2, 4))
    plan["memory.policy"] = random.choice(POLICIES)
    if mesh["stage"] > 1:
        schedule = random.choice(("gpipe", "1f1b", "interleaved", "looped"))
        plan |= {
            "pipeline.schedule": schedule,
            "pipeline.stash": random.choice(("blocks", "stage")),
        }
        plan["pipeline.microbatches"] = mesh["stage"] * random.choice((1, 2))
        if schedule in ("interleaved", "looped"):
            plan["pipeline.virtual"] = 2
    if mesh["context"] > 1:
        plan["context.strategy"] = random.choice(("ring", "ulysses"))
    if mesh["tensor"] > 1:
        plan |= {"overlap.gather": random.choice(FORMS), "overlap.scatter": random.choice(FORMS)}
    seldom = {
        "overlap.domino": "on",
        "memory.optimizer": "offload",
        "memory.parameters": "offload",
        "precision.params": "bfloat16",
        "precision.gradients": "bfloat16",
        "data.pack": True,
    }
    plan |= {key: value for key, value in seldom.items() if random.random() < 1 / 4}
    if plan["train.accumulation"] == 1:
        # refused: nothing is summed, so it would have no effect
        plan.pop("precision.gradients", None)
    return [
        preset,
        *(
            word
            for key, value in plan.items()
            for word in (f"--{key.replace('_', '-')}", str(value))
        ),
    ]


def small(words: list[str], target: str) -> list[str]:
    """The words that make a plan fill a target, with one sequence a microbatch and two layers, or
    one a stage.
    """
    plan = dict(
        zip(
            words[1::2],
            words[2::2],
            strict=True,
        )
    )
    sizes = {axis: int(plan[f"--mesh.{axis}"]) for axis in AXES}
    chips = int(re.findall(r"\d+", target)[-1])
    sizes["data"] *= max(chips // math.prod(sizes.values()), 1)
    rows = (
        sizes["data"] * sizes["fsdp"] * sizes["expert"] * (2 if "--overlap.domino" in plan else 1)
    )
    sequences = (
        rows * int(plan["--train.accumulation"]) * int(plan.get("--pipeline.microbatches", 1))
    )
    layers = max(2, sizes["stage"] * int(plan.get("--pipeline.virtual", 1)))
    seq_len = 1024 if words[0].startswith("gpt2") else 2048
    return [
        "--mesh.data",
        str(sizes["data"]),
        "--train.batch",
        str(sequences),
        "--model.layers",
        str(layers),
        "--data.seq-len",
        str(seq_len),
    ]


def run(
    words: list[str],
    target: str,
    timeout: float,
) -> tuple[str, str, float]:
    """The outcome, a line that says more, and the seconds it took."""
    command = ["verify"]
    if target:
        findings = ",".join(rule for rule in LINTS.names() if rule not in _OF_THE_PLAN)
        command = ["rehearse", "--target", target, "--fail-on", findings]
        words = [*words, *small(words, target)]
    began = time.perf_counter()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jaxpar.cli.main",
            *command[:1],
            *words,
            *command[1:],
        ],
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "400"},
    )
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "hung", f"after {timeout:.0f} s", timeout
    lines = said.strip().splitlines() or [""]
    last = next(
        (line for line in reversed(lines) if line.startswith("jaxpar: error:")),
        lines[-1],
    )
    outcome = {0: "equal", 1: "differs", 2: "refused"}.get(process.returncode, "crashed")
    if "Traceback (most recent call last)" in said:
        outcome = "crashed"
    return outcome, last.strip(), time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--target", nargs="*", default=[""])
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    plans = [draw(random.Random(f"{args.seed} {n}")) for n in range(args.count)]
    targets = [args.target[n % len(args.target)] for n in range(args.count)]
    outcomes = collections.Counter[str]()
    found = []
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {
            pool.submit(run, plan, target, args.timeout): n
            for n, (plan, target) in enumerate(zip(plans, targets, strict=True))
        }
        for done in as_completed(running):
            n = running[done]
            (outcome, said, seconds) = done.result()
            outcomes[outcome] += 1
            plan = {"plan": plans[n], "target": targets[n]}
            found.append(
                plan
                | {
                    "outcome": outcome,
                    "said": said,
                    "seconds": round(seconds, 1),
                }
            )
            words = " ".join([*plans[n], targets[n]])
            print(
                f"{sum(outcomes.values())}/{args.count} {outcome:<8} {seconds:4.0f} s  {words}",
                flush=True,
            )
            if outcome != "equal":
                print(f"    {said}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(found, indent=1))
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    return int(any(outcomes[bad] for bad in ("differs", "crashed", "hung")))


if __name__ == "__main__":
    sys.exit(main())
