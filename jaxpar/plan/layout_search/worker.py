"""A process of its own that rehearses or verifies one config: `python -m
jaxpar.plan.layout_search.worker rehearse CONFIG TARGET FOLDER ANSWER`.

A compiler that ends its process ends no search, and two processes rehearse two plans at once.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.config import load_config
from jaxpar.base.errors import UserError
from jaxpar.plan.rehearsal_cache import rehearse_point
from jaxpar.rehearse.report.memory import DoesNotFit
from jaxpar.rehearse.targets import load_target
from jaxpar.verify.of_config import verify


def main(words: list[str]) -> int:
    """Do what the words say, and write the answer as JSON into their last one, a file."""
    kind, config, target, folder, answer = words
    if kind == "rehearse":
        found = _rehearse(config, target, folder)
    else:
        found = _verify(config)
    write_whole(Path(answer), json.dumps(found) + "\n")
    return 0


def _rehearse(config: str, target: str, folder: str) -> dict[str, Any]:
    try:
        figures = rehearse_point(load_config(config), load_target(target), Path(folder))
    except DoesNotFit as refused:
        return {"refused": str(refused), "too_large": True}
    except UserError as refused:
        return {"refused": str(refused)}
    return {"figures": asdict(figures)}


def _verify(config: str) -> dict[str, Any]:
    try:
        found = verify(load_config(config))
    except UserError as refused:
        return {"equal": False, "says": str(refused)}
    return {"equal": found.equal, "says": str(found)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
