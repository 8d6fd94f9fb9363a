"""`jaxpar bench foresight`: what is compiled once and priced again, the figures and what is
written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench.foresight.published import LLAMA, row_of, text_of
from tiers import MARKS

from jaxpar.base.errors import UserError
from jaxpar.base.machine import versions
from jaxpar.bench.foresight import board as subject
from jaxpar.bench.foresight.programs import Priced, StoredProgram, program_name
from jaxpar.bench.foresight.rows import parse_rows, published_rows
from jaxpar.bench.foresight.translate import translate
from jaxpar.cli.main import main

LINE = {"scope": "block/mlp", "phase": "backward", "compute": 1.0, "exposed": 0.5}
ROWS = parse_rows(
    text_of(
        LLAMA,
        LLAMA | {"name": "twice", "measured_step_seconds": 4},
        LLAMA | {"name": "other", "model": "mistral-7b", "layers": 16, "measured_step_seconds": 2},
        LLAMA | {"name": "moon", "model": "deepseek3-671b"},
    ),
    "FILE.csv",
)


def stored(folder: Path, row: Any, refused: str = "") -> None:
    """A program of a row in the folder, as compiling leaves it; nobody reads its text here."""
    report = {
        "time": {"step": 3.0, "mfu": 0.25},
        "memory": {"total": 2**34, "fits": True},
        "kernels": [{"priced": "pallas_gpu", "runs": "cuDNN"}],
    }
    kept = {"refused": refused, "report": {} if refused else report, "versions": versions()}
    (folder / f"{program_name(translate(row))}.json").write_text(json.dumps(kept))


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose programs were priced, each at 3.6 seconds; compiling fails the test."""
    files = list[str]()

    def price(step: Any, stored: StoredProgram) -> Priced:
        files.append(stored.text.name)
        return Priced(3.6, 0.36, [LINE])  # pyright: ignore[reportArgumentType]

    def compile_it(step: Any, folder: Path) -> None:
        raise AssertionError("it is in the folder")

    monkeypatch.setattr(subject, "price_program", price)
    monkeypatch.setattr(subject, "compile_program", compile_it)
    return files


def test_what_the_folder_has_is_priced_again_and_judged(tmp_path: Path, priced: list[str]) -> None:
    stored(tmp_path, ROWS[0])
    stored(tmp_path, ROWS[2], refused="takes 40 GiB of 32")
    said = list[str]()
    board = subject.make_board(ROWS, tmp_path, "a command", said.append)
    first, twice, other, moon = board["rows"]
    assert len(priced) == 2 and len(set(priced)) == 1  # one program is that of two rows
    assert first["predicted"] == 3.6 and first["counted"] == 0.75
    assert first["lines"] == [{"scope": "block/mlp", "phase": "backward", "seconds": 1.5}]
    assert "attention is pallas_gpu, not cuDNN" in first["differences"]
    assert twice["program"] == first["program"]
    assert other["refused"] == "takes 40 GiB of 32" and not other["predicted"]
    assert "latent attention" in moon["not_built"]
    assert [line.partition(":")[0] for line in said] == ["1/4", "2/4", "3/4", "4/4"]
    # 3.6 s for both, and 3.4 measured for one and 4 for the other
    assert board["figures"]["v6e"]["one_step"] == pytest.approx((0.6 / 3.4 + 0.6 / 4) / 2)
    found = board["figures"]["v6e"]["rehearsed"]
    assert found is not None and found["rows"] == 2
    assert found["worst"] == pytest.approx(0.1)
    assert board["figures"]["v6e"]["counted"] is None  # no other model was judged


def test_each_chip_is_held_against_a_count_of_flops_on_the_same_rows() -> None:
    def row(model: str, measured: float, predicted: float, counted: float) -> Any:
        return {
            "chip": "v6e",
            "model": model,
            "measured": measured,
            "predicted": predicted,
            "counted": counted,
            "name": model,
            "memory": 21,
            "chips": 8,
            "family": "llama",
            "stated_memory": 20 if model == "a" else 0,
            "fits": predicted > 0,
            "refused": "" if predicted else "no memory",
        }

    rows = [row("a", 2.0, 1.9, 1.0), row("b", 3.3, 3.3, 1.5), row("c", 1.0, 0.0, 0.0)]
    found = subject.figures_of(rows)
    assert found["v6e"] == found["all"]
    figures = found["v6e"]
    assert figures["rehearsed"]["rows"] == 2  # pyright: ignore[reportOptionalSubscript]
    # a is predicted by b's 2.2 and b by a's 2.0
    assert figures["counted"]["median"] == pytest.approx(  # pyright: ignore[reportOptionalSubscript]
        (0.1 + 0.3 / 3.3) / 2
    )
    assert figures["one_constant"]["worst"] == pytest.approx(0.05263, abs=1e-5)  # pyright: ignore[reportOptionalSubscript]
    assert figures["counted_on"] == 2
    assert figures["memory"]["worst"] == pytest.approx(0.05)  # pyright: ignore[reportOptionalSubscript]
    assert figures["refused"] == ["c"]


def test_what_is_written_can_be_read(tmp_path: Path, priced: list[str]) -> None:
    stored(tmp_path, ROWS[0])
    board = subject.make_board(ROWS[:2], tmp_path)
    assert json.loads(subject.write_board(board)) == board
    (first, second) = json.loads(subject.write_errors(board))
    assert first == {
        "name": LLAMA["name"],
        "chip": "v6e",
        "chips": 8,
        "model": "llama3.1-8b",
        "family": "llama",
        "measured": 3.4,
        "predicted": 3.6,
    }
    assert second["name"] == "twice"
    assert json.loads(subject.write_errors(subject.make_board(ROWS[3:], tmp_path))) == []
    (worst, _) = subject.worst_lines(board)
    assert "backward 42 %" in worst and "10 % waits" in worst
    assert subject.chip_rows(board)[0]["median"] == "7.9 %"  # of 3.6 against 3.4 and 4


def test_rows_are_chosen_by_the_begin_of_their_names() -> None:
    assert [row.name for row in subject.choose_rows(ROWS, ["MO", "tw"])] == ["twice", "moon"]
    assert len(subject.choose_rows(ROWS, [])) == 4
    with pytest.raises(UserError, match="no row begins with"):
        subject.choose_rows(ROWS, ["nothing"])


def test_the_quick_rows_are_the_cheapest_of_each_chip() -> None:
    large = row_of(name="large", chips=16, global_batch_seqs=48)
    assert [row.name for row in subject.quick_rows([large, *ROWS])] == ["other"]
    assert len(subject.quick_rows(published_rows())) == 7


def test_the_command_writes_a_board_where_nothing_can_be_built(tmp_path, capsys) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(text_of(LLAMA | {"model": "deepseek3-671b"}))
    out = tmp_path / "out"
    assert main(["bench", "foresight", "--rows", str(file), "--out", str(out)]) == 0
    assert "latent attention" in capsys.readouterr().out
    assert json.loads((out / "board.json").read_text())["rows"][0]["predicted"] == 0
    assert main(["bench", "foresight", "--rows", str(tmp_path / "no.csv")]) == 2
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("platform", [pytest.param("tpu", marks=MARKS["tpu"])])
def test_a_quick_board_of_small_steps(tmp_path: Path, platform: str, capsys) -> None:
    """A tiny model stands for a published one: it is compiled, stored, and priced from the folder
    the second time.
    """
    small = LLAMA | {"layers": 2, "embed": 256, "heads": 2, "kv_heads": 2, "mlp": 512}
    small |= {"vocab": 512, "seq_len": 512, "measured_step_seconds": 0.001}
    file = tmp_path / "rows.csv"
    file.write_text(text_of(small, small | {"name": "large", "chips": 16, "global_batch_seqs": 48}))
    words = ["bench", "foresight", "--rows", str(file), "--out", str(tmp_path), "--quick"]
    assert main(words) == 0
    first = json.loads((tmp_path / "board.json").read_text())
    assert "compiling for v6e-8" in capsys.readouterr().out
    assert main(words) == 0
    assert "compiling" not in capsys.readouterr().out
    second = json.loads((tmp_path / "board.json").read_text())
    assert first["rows"] == second["rows"] and len(first["rows"]) == 1
    assert first["rows"][0]["predicted"] > 0 and first["rows"][0]["fits"]
    assert (tmp_path / "foresight.png").stat().st_size > 1000


@pytest.mark.parametrize("platform", [pytest.param("cuda", marks=MARKS["cuda"])])
def test_the_quick_row_of_an_h100(tmp_path: Path, platform: str) -> None:
    """The cheapest published row there is, a step of GPT-2 124M that was measured on one H100."""
    (row,) = subject.quick_rows(subject.choose_rows(published_rows(), ["jaxpar-gpt2_124m"]))
    board = subject.make_board([row], tmp_path, anew=True)
    (found,) = board["rows"]
    assert found["fits"] and list(tmp_path.glob(f"{found['program']}.hlo.xz"))
    assert abs(found["predicted"] / found["measured"] - 1) < 0.2  # the worst of ten is 11 %
    assert abs(found["memory"] / found["stated_memory"] - 1) < 0.1  # the worst of ten is 8 %
