"""What a program gave a run in place of what its config says, as its checkpoints have it.

A command knows the config alone. It says what is missing, since figures of the config's optimizer
are not those of the run.
"""

from __future__ import annotations

from pathlib import Path

from jaxpar.base.errors import read_json
from jaxpar.train.optimizer.given_optimizer import GIVEN
from jaxpar.train.restore.metadata import OPTIMIZER, PARTS
from jaxpar.train.runs.folder.orbax_names import DATA_FILE
from jaxpar.train.runs.folder.run_folder import finished_steps, read_run_config
from jaxpar.train.runs.folder.steps import CHECKPOINTS

_KINDS = {OPTIMIZER: str | None, PARTS: dict[str, str] | None}


def given_notes(folder: Path) -> list[str]:
    """Say what a program gave a run that a command cannot know.

    Args:
      folder: a run folder; it need not have a checkpoint, and then nothing is known.

    Returns:
      A sentence for the optimizer, and one for the parts of the model; none where all is the
      config's.

    Raises:
      UserError: the newest checkpoint or the config cannot be read.
    """
    steps = finished_steps(folder)
    if not steps:
        return []
    file = folder / CHECKPOINTS / str(steps[-1]) / DATA_FILE
    metadata = read_json(file, _KINDS) if file.exists() else {}
    config = read_run_config(folder)
    notes = []
    if metadata.get(OPTIMIZER) == GIVEN:
        notes.append(
            f"{folder} was trained with an optimizer that a program gave, and a command takes its "
            f"config's, optimizer.name={config.optimizer.name}: what is said of the optimizer's "
            "state, its memory and its update is not that run's; from Python, give make_experiment "
            "the optimizer="
        )
    parts = metadata.get(PARTS)
    if parts:
        named = ", ".join(f"{part}={name}" for part, name in parts.items())
        notes.append(
            f"{folder} was trained with parts of a model that a program gave ({named}), and a "
            f"command takes its config's, model.family={config.model.family}: what is said is not "
            "of that run's model; from Python, give make_experiment the model="
        )
    return notes
