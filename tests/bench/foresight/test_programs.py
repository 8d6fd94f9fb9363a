"""The programs of published rows that come with the library, and how they are priced again."""

from __future__ import annotations

import json
import lzma
from importlib import resources
from pathlib import Path

import pytest

from jaxpar.base.errors import UserError
from jaxpar.bench.foresight import board as subject
from jaxpar.bench.foresight.programs import (
    StoredProgram,
    find_program,
    kept_program,
    price_program,
    without_places,
)
from jaxpar.bench.foresight.rows import PublishedRow, published_rows
from jaxpar.bench.foresight.translate import translate

TEXT = """HloModule jit_step, is_scheduled=true

FileNames
1 "/home/someone/model.py"

StackFrames
1 {file_location_id=1}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0), metadata={op_name="x"}
  ROOT %y = f32[8]{0} custom-call(%x), custom_call_target="k", frontend_attributes={kernel_metadata={"a": 1}}, metadata={op_name="jit(step)/block" stack_frame_id=1}
}
"""


def kept_rows(prefix: str = "") -> list[PublishedRow]:
    """The published rows whose programs come with the library."""
    found = []
    for row in subject.choose_rows(published_rows(), [prefix]):
        try:
            step = translate(row)
        except UserError:
            continue
        if kept_program(step) is not None:
            found.append(row)
    return found


def test_a_program_loses_its_places_and_keeps_its_scopes_and_kernels() -> None:
    bare = without_places(TEXT)
    assert "someone" not in bare and "stack_frame_id" not in bare and "StackFrames" not in bare
    assert 'metadata={op_name="jit(step)/block"}' in bare
    assert 'kernel_metadata={"a": 1}' in bare
    assert bare.startswith("HloModule") and "ENTRY %main" in bare


def test_every_program_that_is_kept_belongs_to_a_row() -> None:
    """A change of a translation would leave its program behind, and the row would be compiled."""
    folder = resources.files("jaxpar.bench.foresight").joinpath("published", "programs")
    files = {file.name for file in folder.iterdir() if file.name.endswith(".json")}
    steps = [kept_program(translate(row)) for row in kept_rows()]
    assert files == {step.text.with_suffix("").stem + ".json" for step in steps if step}
    assert (len(files), len(steps)) == (28, 30)  # three rows of v6e are of one step


def test_a_program_that_is_kept_is_priced_without_a_compiler(tmp_path: Path) -> None:
    """The board that rehearsals take their intervals from is what these programs say today."""
    (row,) = kept_rows("jaxpar-gpt2_124m-8-H100")
    said = list[str]()
    (found,) = subject.make_board([row], tmp_path, say=said.append)["rows"]
    assert not list(tmp_path.iterdir())
    assert not any("compiling" in line for line in said)
    board = json.loads(resources.files("jaxpar.rehearse").joinpath("board.json").read_text())
    (known,) = [one for one in board if one["name"] == row.name]
    assert found["predicted"] == pytest.approx(known["predicted"], rel=1e-6)


def test_a_program_by_other_compilers_is_named_and_a_damaged_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = kept_rows("jaxpar-gpt2_124m-8-H100")
    step = translate(row)
    monkeypatch.setattr(subject, "versions", lambda: {"jax": "99"})
    said = list[str]()
    subject.make_board([row], tmp_path, say=said.append)
    assert any("--anew" in line and "jax 0.11.2" in line for line in said)
    assert find_program(step, tmp_path) is None
    file = tmp_path / "x.hlo.xz"
    file.write_bytes(lzma.compress(b"HloModule")[:-3])
    with pytest.raises(UserError, match="is damaged"):
        price_program(step, StoredProgram({}, "", file, (), {}))


@pytest.mark.slow
def test_the_programs_that_are_kept_say_what_the_board_says(tmp_path: Path) -> None:
    """A change of prices shows here: the board is to be written anew, and to be no worse.

    Medians: 4.3 % over all rows, and 1.9 % over those that were measured by this project.
    """
    board = subject.make_board(kept_rows(), tmp_path)
    text = resources.files("jaxpar.rehearse").joinpath("board.json").read_text()
    known = {row["name"]: row["predicted"] for row in json.loads(text)}
    for row in board["rows"]:
        assert row["predicted"] == pytest.approx(known[row["name"]], rel=1e-6), row["name"]
        assert row["fits"], row["name"]
    figures = board["figures"][subject.ALL]["rehearsed"]
    assert figures is not None and figures["median"] < 0.05
