"""`make gpu`: what it calls wrong, what it does where a case fails or hangs, and all of it in a
tiny form.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from on_gpu import measure, pieces
from on_gpu.pieces import Piece, read_line, read_piece, report, run_case, run_piece, work
from on_gpu.stopwatch import _durations

from jaxpar.base import registry
from jaxpar.base.errors import UserError
from jaxpar.kernels.attention import chunked
from jaxpar.kernels.attention.call import Unserved

ROOT = Path(__file__).parents[2]
HERE = {"device": "a GPU", "platform": "gpu", "driver": "570", "jax": "0.12.0", "form": "whole"}


def raising(error: Exception) -> Any:
    def case(*_: Any) -> Any:
        raise error

    return case


def measured(*_: Any) -> list[dict[str, Any]]:
    return [{"ms": 0.25}]


CASES = {
    "first": measured,
    "second": raising(ValueError("poison")),
    "third": raising(Unserved("no such mask")),
}
RIGHT = {"status": "measured", "rows": [{"ms": 0.25}], "notes": []}


def keep(
    out: Path,
    name: str,
    cases: dict[str, Any],
    facts: dict[str, str] = HERE,
) -> None:
    (out / f"{name}.json").write_text(json.dumps({"facts": facts, "cases": cases}))


def processes(monkeypatch: pytest.MonkeyPatch, *said: list[Any]) -> list[str]:
    """Processes that print these lines of JSON and end; returns the Python lines that they were
    given.
    """
    started: list[str] = []

    def start(words: list[str], **_: Any) -> Any:
        lines = said[len(started)]
        started.append(words[-1])
        text = "".join(json.dumps(line) + "\n" for line in lines)
        return SimpleNamespace(
            stdout=io.StringIO(text), wait=lambda: -6, kill=lambda: None, communicate=lambda: None
        )

    monkeypatch.setattr(pieces.subprocess, "Popen", start)
    return started


# Statuses, and going on.


def test_a_case_is_measured_refused_or_failed() -> None:
    found = {name: run_case(case) for name, case in CASES.items()}
    assert found == {
        "first": RIGHT,
        "second": {"status": "failed", "why": "ValueError: poison"},
        "third": {"status": "refused", "why": "no such mask"},
    }
    assert run_case(raising(UserError("no figures")))["status"] == "refused"
    assert run_case(lambda say: (say("beside nothing"), [])[1])["notes"] == ["beside nothing"]


def test_a_process_ends_with_the_case_that_spoils_it(capfd: pytest.CaptureFixture[str]) -> None:
    """What a case prints does not stand between its lines of JSON."""
    noisy = {"loud": lambda *_: print("loud") or [], **CASES}
    read, write = os.pipe()
    kept = os.dup(1)
    os.dup2(write, 1)
    try:
        work(Piece(noisy), list(noisy), True, "")
    finally:
        os.dup2(kept, 1)
        os.close(write)
    with os.fdopen(read) as lines:
        facts, *results = map(json.loads, lines)
    assert facts["platform"] == "cpu" and facts["form"] == "small"
    assert [result["status"] for result in results] == ["measured", "measured", "failed"]


def test_what_died_has_failed_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = {"status": "failed", "why": "ValueError: poison"}
    started = processes(monkeypatch, [HERE], [HERE, failed], [HERE, RIGHT])
    said: list[str] = []
    run_piece(Piece(CASES), "some", "here.PIECES", tmp_path, False, said.append)
    assert read_piece(tmp_path, "some") == {
        "facts": HERE,
        "cases": {
            "first": {"status": "failed", "why": "exit code -6"},
            "second": failed,
            "third": RIGHT,
        },
    }
    assert said == [
        "some 1/3: first: failed: exit code -6",
        "some 2/3: second: failed: ValueError: poison",
        "some 3/3: third: measured",
    ]
    assert "work(PIECES['some'], ['second', 'third'], False" in started[1]
    run_piece(Piece(CASES), "some", "here.PIECES", tmp_path, False, said.append)
    assert len(started) == 3, "what has a result is not run again"


@pytest.mark.parametrize(
    ("piece", "small", "count"),
    [
        (Piece(CASES, alone=True), False, 3),
        (Piece(CASES, 2), True, 1),
    ],
)
def test_cases_alone_have_a_process_each_and_the_small_form_its_number(
    piece: Piece, small: bool, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = HERE | {"form": "small"} if small else HERE
    started = processes(monkeypatch, *([[here, RIGHT, RIGHT]] * 3))
    run_piece(piece, "some", "here.PIECES", tmp_path, small, lambda line: None)
    assert len(started) == count
    assert list(read_piece(tmp_path, "some")["cases"]) == list(CASES)[: 2 if small else 3]


def test_a_process_that_does_not_start_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes(monkeypatch, [])
    with pytest.raises(UserError, match=r"\(exit code -6\)"):
        run_piece(Piece(CASES), "some", "here.PIECES", tmp_path, False, lambda line: None)


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("print('{\"a\": 1}', flush=True); import time; time.sleep(60)", {"a": 1}),
        ("raise SystemExit(7)", {"status": "failed", "why": "exit code 7"}),
        ("import os; os.abort()", {"status": "failed", "why": "exit code -6"}),
        ("import time; time.sleep(60)", {"status": "failed", "why": "killed after 1 s"}),
    ],
)
def test_a_process_is_read_until_it_ends_or_hangs(script: str, found: Any) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert read_line(process, 1.0 if "killed" in str(found) else 60.0) == found
    process.kill()
    process.communicate()


# What it calls wrong.


@pytest.mark.parametrize(
    ("spoiled", "status"),
    [("", "right"), ("dv", "wrong"), ("nan", "wrong")],
)
def test_a_kernel_that_is_wrong_is_called_so(
    spoiled: str, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the tiled attention in plain XLA in a kernel's place."""

    def forward(*given: Any) -> Any:
        out, lse = chunked.forward(*given)
        return out * (float("nan") if spoiled == "nan" else 1), lse

    def backward(*given: Any) -> Any:
        dq, dk, dv = chunked.backward(*given)
        return dq, dk, dv * (1.1 if spoiled == "dv" else 1)

    spoiled_kernel = replace(
        registry.KERNELS["pallas_gpu"],
        forward=forward,
        backward=backward,
        refusal=lambda *given: "",
    )
    monkeypatch.setitem(registry.KERNELS._entries, "pallas_gpu", spoiled_kernel)
    found = measure._kernel(
        "pallas_gpu", "odd lengths", 64, "bfloat16" if spoiled else "float32", True, tmp_path, print
    )
    assert found[0]["verdict"] == status
    assert list(found[0]) == ["out", "lse", "dq", "dk", "dv", "verdict"]


def test_attention_leaves_out_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"status": "measured", "rows": [{"verdict": "wrong"}]}
    right = {"status": "measured", "rows": [{"verdict": "right"}]}
    keep(
        tmp_path,
        "kernels",
        {
            measure._kernel_name("pallas_gpu", "causal", 16): wrong,
            measure._kernel_name("cudnn", "causal", 16): right,
        },
    )
    asked = list[Any]()
    said = list[str]()
    row = {"implementation": "chunked", "forward, ms": 1.0}
    monkeypatch.setattr(measure, "attention_rows", lambda *given: asked.append(given) or [row])
    found = measure._attention("causal", 128, 4096, True, tmp_path, said.append)
    assert asked[0][:4] == ("causal", 64, 16, ("cudnn", "chunked"))
    assert said == ["not pallas_gpu: wrong, or failed, in the piece before"]
    assert found == [{"implementation": "chunked", "forward, ms": 1.0}]


# Where it runs, and what is read.


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "",
            "make gpu needs an NVIDIA GPU; JAX 0.12.0 finds cpu, nvidia-smi nothing: install "
            "jax's CUDA plugin where",
        ),
        (
            "--pieces kernel",
            "make gpu has no piece 'kernel' (did you mean 'kernels'?): there are kernels, "
            "attention,",
        ),
        (
            "--small --pieces step",
            "has results of jax 0.11.0, and here it is 0.12.0: try --out DIR",
        ),
    ],
)
def test_mistakes_are_said(
    words: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    form = "small" if "--small" in words else "whole"
    here = HERE | {"platform": "cpu", "device": "cpu", "driver": "", "form": form}
    keep(tmp_path, "step", {}, here | {"jax": "0.11.0"})
    processes(monkeypatch, [here])
    assert measure.main(["--out", str(tmp_path), *words.split()]) == 2
    assert says in capsys.readouterr().err


def test_the_report_has_a_table_a_piece_and_says_what_failed(tmp_path: Path) -> None:
    keep(
        tmp_path,
        "some",
        {
            "a": {"status": "measured", "rows": [{"ms": 0.25, "tokens/s": 123456.7}]},
            "b": {"status": "failed", "why": "exit code -6"},
            "c": {
                "status": "measured",
                "rows": [{"ms": 2.0, "peak, GiB": None}],
                "notes": ["beside nothing"],
            },
        },
    )
    assert report(tmp_path, ["some", "none"]).splitlines() == [
        "device: a GPU, platform: gpu, driver: 570, jax: 0.12.0, form: whole",
        "",
        "### some",
        "",
        "| case | ms | tokens/s | peak, GiB |",
        "| --- | --- | --- | --- |",
        "| a | 0.25 | 123,457 |  |",
        "| c | 2 |  |  |",
        "",
        "- b: failed: exit code -6",
        "- c: beside nothing",
    ]


def test_a_devices_own_plane_is_read_where_there_is_one() -> None:
    """The host's events of the same names are the starts of kernels."""

    def plane(name: str, duration: int) -> Any:
        event = SimpleNamespace(
            name="x",
            start_ns=0,
            duration_ns=duration,
            stats=[("hlo_op", "dot.1"), ("hlo_module", "jit_f")],
        )
        return SimpleNamespace(name=name, lines=[SimpleNamespace(events=[event])])

    host = plane("/host:CPU", 8)
    device = plane("/device:GPU:0", 4)
    assert _durations(SimpleNamespace(planes=[host, device])) == {("jit_f", "dot.1"): [4e-9]}
    assert _durations(SimpleNamespace(planes=[host])) == {("jit_f", "dot.1"): [8e-9]}
    absent = SimpleNamespace(name="/device:TPU:0", lines=[])
    assert _durations(SimpleNamespace(planes=[absent, host])) == {("jit_f", "dot.1"): [8e-9]}


# All of it.


@pytest.fixture
def with_little(tmp_path: Path) -> dict[str, str]:
    """An environment without the packages that `make gpu` does not ask for."""
    absent = tmp_path / "absent"
    absent.mkdir()
    for name in (
        "matplotlib",
        "safetensors",
        "grain",
        "orbax",
        "chex",
        "tokenizers",
        "tensorstore",
    ):
        (absent / f"{name}.py").write_text(f"raise ImportError('{name} is absent')")
    return os.environ | {"PYTHONPATH": str(absent)}


@pytest.mark.slow
def test_it_loads_with_what_it_asks_for_alone(with_little: dict[str, str]) -> None:
    environment = with_little | {
        "PYTHONPATH": os.pathsep.join([with_little["PYTHONPATH"], str(ROOT / "tests")])
    }
    subprocess.run([sys.executable, "-c", "import on_gpu.measure"], env=environment, check=True)


@pytest.mark.slow
def test_all_of_it_in_a_tiny_form(tmp_path: Path, with_little: dict[str, str]) -> None:
    """By `make gpu`, with nothing there but what it says it needs: every piece really runs, and no
    case fails.
    """
    words = [
        "make",
        "--no-print-directory",
        "gpu",
        "SMALL=1",
        f"GPU_OUT={tmp_path}",
        f"VENV={sys.prefix}",
    ]
    done = subprocess.run(
        words, cwd=ROOT, env=with_little, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name, piece in measure.PIECES.items():
        cases = read_piece(tmp_path, name)["cases"]
        assert len(cases) == piece.small
        assert {one["status"] for one in cases.values()} <= {"measured", "refused"}, (name, cases)
        assert any(one.get("rows") for one in cases.values()), name
    kernels = read_piece(tmp_path, "kernels")["cases"]
    verdicts = {
        name.partition(",")[0]: [row["verdict"] for row in one.get("rows", ())]
        for name, one in kernels.items()
    }
    assert verdicts == {"cudnn": [], "pallas_gpu": ["right"]}
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    lines = [
        row["line"]
        for one in read_piece(tmp_path, "trace")["cases"].values()
        for row in one["rows"]
    ]
    assert any(line.startswith("models/transformer.py:") for line in lines)
    assert (tmp_path / "report.md").read_text() in done.stdout + "\n"
    assert json.loads((tmp_path / "step.json").read_text())["facts"]["form"] == "small"


@pytest.mark.slow
def test_trainings_in_a_tiny_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    said = list[str]()
    measure.measure(measure.GpuArgs(str(tmp_path), ("training",), small=True), said.append)
    cases = read_piece(tmp_path, "training")["cases"]
    assert {one["status"] for one in cases.values()} == {"measured"}, said
    assert {"the guard", "killed"} <= cases.keys()
    ends = {row["run"]: row["end"] for row in cases["killed"]["rows"]}
    assert ends == {"the same again": "equal to the bit", "killed": "equal to the bit"}
