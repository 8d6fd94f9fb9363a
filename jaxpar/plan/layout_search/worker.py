"""A process of its own that rehearses or verifies one config: `python -m
jaxpar.plan.layout_search.worker rehearse CONFIG TARGET FOLDER ANSWER`.

A compiler that ends its process ends no search, and two processes rehearse two plans at once.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from jaxpar.base.atomic_write import write_whole
from jaxpar.base.config import load_config
from jaxpar.plan.layout_search.processes import outcome_of, verdict_on
from jaxpar.plan.rehearsal_cache import rehearse_point
from jaxpar.rehearse.targets import load_target


def main(words: list[str]) -> int:
    """Do what the words say, and write the answer as JSON into their last one, a file."""
    kind, file, target, folder, answer = words
    config = load_config(file)
    if kind == "rehearse":
        outcome = outcome_of(lambda: rehearse_point(config, load_target(target), Path(folder)))
        figures = None if outcome.figures is None else asdict(outcome.figures)
        found = outcome._asdict() | {"figures": figures}
    else:
        found = verdict_on(config)._asdict()
    write_whole(Path(answer), json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
