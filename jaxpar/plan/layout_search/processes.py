"""Rehearsals and verifications of a search: in processes of their own, several at a time, or in
this one where a model is of a program's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.base.config import Config
from jaxpar.base.errors import UserError
from jaxpar.base.toml import to_toml
from jaxpar.plan.engine import Outcome
from jaxpar.plan.figures import Figures
from jaxpar.rehearse.of_config import rehearse
from jaxpar.rehearse.report.memory import DoesNotFit
from jaxpar.rehearse.targets import Target
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import with_config
from jaxpar.verify.of_config import verify

_WORKER = "jaxpar.plan.layout_search.worker"
_LAST = 3  # lines of what a process said before it ended


class Verified(NamedTuple):
    """The verdict on a config, and what it says in a line."""

    equal: bool
    says: str


def rehearse_all(
    configs: Sequence[Config], target: Target, folder: Path, workers: int
) -> list[Outcome]:
    """Rehearse configs, several at a time; what is remembered in the folder is read.

    Args:
      folder: the folder of remembered rehearsals.
      workers: how many processes there are at a time.

    Returns:
      What became of each, in order.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def one(config: Config) -> Outcome:
        answer = _ask("rehearse", config, target.name, str(folder.absolute()))
        figures = answer.get("figures")
        return Outcome(
            None if figures is None else Figures(**figures),
            answer.get("refused", ""),
            answer.get("too_large", False),
        )

    with ThreadPoolExecutor(max_workers=workers) as pool:
        return list(pool.map(one, configs))


def outcome_of(rehearsal: Callable[[], Figures]) -> Outcome:
    """Rehearse, and say what became of it."""
    try:
        return Outcome(rehearsal())
    except DoesNotFit as refused:
        return Outcome(refused=str(refused), too_large=True)
    except UserError as refused:
        return Outcome(refused=str(refused))


def rehearse_own(
    experiment: Experiment, configs: Sequence[Config], target: Target
) -> list[Outcome]:
    """Rehearse an experiment under several configs, one after another in this process."""

    def rehearsal(config: Config) -> Figures:
        return Figures.of(rehearse(with_config(experiment, config, target.devices()), target))

    return [outcome_of(partial(rehearsal, config)) for config in configs]


def verdict_on(experiment: Config | Experiment) -> Verified:
    """Verify a config, or an experiment, in this process."""
    try:
        found = verify(experiment)
    except UserError as refused:
        return Verified(False, str(refused))
    return Verified(found.equal, str(found))


def verify_own(experiment: Experiment, config: Config, target: Target) -> Verified:
    """Verify an experiment under a config in this process."""
    return verdict_on(with_config(experiment, config, target.devices()))


def verify_apart(config: Config) -> Verified:
    """Verify a config in a process of its own, which simulates as many devices as it needs."""
    answer = _ask("verify", config, "-", "-")
    return Verified(answer.get("equal", False), answer.get("says") or answer["refused"])


def _ask(kind: str, config: Config, target: str, folder: str) -> dict[str, Any]:
    """Have a process answer; where it ends without an answer, its last lines are the reason."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "plan.toml"
        answer = Path(place) / "answer.json"
        file.write_text(to_toml(config), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", _WORKER, kind, str(file), target, folder, str(answer)],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.exists():
            return json.loads(answer.read_text(encoding="utf-8"))
    last = " ".join(done.stderr.strip().splitlines()[-_LAST:])
    return {"refused": f"its process ended with {done.returncode}: {last}"}
