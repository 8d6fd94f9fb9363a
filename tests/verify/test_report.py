"""What a verification says: a row for each parameter, a line that names the first difference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from jaxpar.base.config import Config
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.cli.main import main
from jaxpar.models import Model
from jaxpar.verify import of_config
from jaxpar.verify.mistakes import Finding
from jaxpar.verify.of_config import Setup, Verification
from jaxpar.verify.report import GradientRow, Verdict, table

SETUP = Setup(
    Config(mesh=MeshSpec(data=2)),
    Model(Config().model),
    jax.devices()[:2],
    ("a note",),
)
RIGHT = GradientRow("embed.tokens", (4, 3), 1e-7, 1e-5)
SIGN = GradientRow(
    "blocks.up",
    (2, 3, 4),
    2.0,
    1e-5,
    Finding("sign", "minus the reference", 1e-7),
)
TWICE = GradientRow(
    "head.table", (4, 3), 1.0, 1e-5, Finding("sum doubled", "2 times the reference", 1e-7)
)


def found(
    *rows: GradientRow, loss_error: float = 0.0, origin: str = "", alone: bool = False
) -> Verification:
    check = Verdict("float32", loss_error, 1e-6, rows, True, origin, alone)
    return Verification(SETUP, (check,), 12.3)


def test_an_equal_plan() -> None:
    said = found(RIGHT)
    assert said.equal
    assert (
        str(said)
        == "EQUAL: loss and 1 gradients on data=2 (2 x cpu) as on one device; float32; 12 s"
    )


def test_the_first_difference_and_the_one_nearest_to_the_loss() -> None:
    line = str(found(RIGHT, SIGN, TWICE, origin="head.table"))
    assert line == (
        "DIFFERS on data=2 (2 x cpu), float32: 2 of 3 gradients (1 x sign, 1 x sum doubled); "
        "first blocks.up [2 x 3 x 4], off by 2.0e+00: sign, it is minus the reference; "
        "nearest to the loss: head.table, sum doubled, it is 2 times the reference"
    )


def test_where_the_loss_differs_the_backward_order_says_nothing() -> None:
    line = str(found(RIGHT, SIGN, loss_error=0.5, origin="blocks.up of layer 1", alone=True))
    assert ": the loss, by 5.0e-01 and 1 of 2 gradients (1 x sign); first blocks.up" in line
    assert "nearest" not in line
    assert line.endswith("; on one device the library's ops differ likewise")


def test_only_the_loss_differs() -> None:
    said = found(RIGHT, loss_error=0.5)
    assert not said.equal
    assert str(said).endswith("float32: the loss, by 5.0e-01")


def test_the_table_has_a_row_for_the_loss_and_each_parameter() -> None:
    rows = table(found(RIGHT, SIGN, loss_error=0.5).checks)
    columns = [list(column.cells) for column in rows.columns]
    assert columns[0] == ["loss", "embed.tokens", "blocks.up"]
    assert columns[1] == ["", "4 x 3", "2 x 3 x 4"]
    assert columns[2] == ["5.0e-01", "1.0e-07", "2.0e+00"]
    assert columns[4] == ["DIFFERS", "ok", "DIFFERS: sign"]


def test_the_verification_as_json() -> None:
    """Every error beside its limit, and what JSON does not know is null."""
    lost = GradientRow("blocks.down", (2, 4, 3), float("inf"), 1e-5)
    verification = found(RIGHT, SIGN, lost, loss_error=2e-7, origin="blocks.up")
    written = json.loads(json.dumps(verification.as_json("tiny", "a command"), allow_nan=False))
    assert (written["config"], written["command"]) == ("tiny", "a command")
    assert (written["equal"], written["says"]) == (False, str(verification))
    assert (written["mesh"], written["devices"]) == ({"data": 2}, {"count": 2, "kind": "cpu"})
    assert written["settings"]["mesh.data"] == 2 and written["notes"] == ["a note"]
    assert written["versions"]["jax"] == jax.__version__
    (check,) = written["checks"]
    assert check["loss"] == {"error": 2e-7, "limit": 1e-6, "equal": True, "tokens_agree": True}
    right, sign, nothing = check["gradients"]
    assert right == {
        "name": "embed.tokens",
        "shape": [4, 3],
        "error": 1e-7,
        "limit": 1e-5,
        "equal": True,
        "too_small": False,
        "mistake": "",
        "says": "",
        "layers": None,
    }
    assert (sign["mistake"], sign["equal"]) == ("sign", False)
    assert sign["says"] == "sign, it is minus the reference"
    assert (nothing["error"], nothing["equal"]) == (None, False)


def test_the_command_writes_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def verify(_: Config, say: Callable[[str], None]) -> Verification:
        say("note: of the verification")
        return found(RIGHT)

    monkeypatch.setattr(of_config, "verify", verify)
    file = tmp_path / "verified.json"
    assert main(["verify", "tiny", "--json", str(file)]) == 0
    assert "note: of the verification" in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["config"] == "tiny" and written["equal"]
    assert main(["verify", "tiny", "--json", "-"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["checks"] == written["checks"]
    assert main(["verify", "tiny", "--json", str(tmp_path / "no" / "file")]) == 2
    assert "there is no folder" in capsys.readouterr().err
