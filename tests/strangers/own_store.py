"""A store of checkpoints as a stranger would write it: in the memory of the process.

Orbax reads and writes real files, so a step passes through the folder of the run; of those that are
kept it has the small files, and the arrays while they are read.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from jaxpar import train

Files = dict[str, bytes]


class InMemory(train.CheckpointStore):
    """Keeps the files of each step in a dictionary."""

    def __init__(self, folder: Path, kept: dict[int, Files]):
        super().__init__(folder)
        self.kept = kept
        for step, files in kept.items():
            self.bring(step, [name for name in files if not name.startswith("state/")])

    def bring(self, step: int, names: list[str]) -> None:
        """Write files of a step into its folder, unless they are there."""
        for name in names:
            file = self.folder / str(step) / name
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(self.kept[step][name])

    def steps(self) -> list[int]:
        return sorted(self.kept)

    def read(self, step: int) -> None:
        self.bring(step, list(self.kept.get(step, {})))

    def write(self, step: int) -> None:
        place = self.folder / str(step)
        files = [file for file in place.rglob("*") if file.is_file()]
        self.kept[step] = {file.relative_to(place).as_posix(): file.read_bytes() for file in files}
        shutil.rmtree(place / "state")

    def update(self, step: int) -> None:
        loss = self.folder / str(step) / "val_loss.json"
        self.kept[step][loss.name] = loss.read_bytes()

    def remove(self, step: int) -> None:
        self.kept.pop(step, None)
        shutil.rmtree(self.folder / str(step), ignore_errors=True)

    def clear_up(self, keep: int, best: int | None) -> list[str]:
        return []  # what lacks its arrays here is not damaged
