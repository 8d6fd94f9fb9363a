"""`jaxpar bench gpu`: what it calls wrong, what it does where a case fails or hangs, and all of it in a tiny form."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpar.base.errors import UserError
from jaxpar.bench import gpu as bench_gpu
from jaxpar.bench import gpu_pieces as bench_pieces
from jaxpar.bench.gpu_pieces import Piece, read_piece, report, run_case, run_piece, watch, work
from jaxpar.cli.main import main
from jaxpar.kernels.attention import chunked, dispatch
from jaxpar.kernels.attention.call import Unserved
from jaxpar.rehearse.cost.stopwatch import _durations

ROOT = Path(__file__).parents[2]
HERE = {"device": "a GPU", "platform": "gpu", "driver": "570", "jax": "0.12.0", "small": False}


def raising(error: Exception) -> Any:
    def case(small: bool, out: Path) -> Any:
        raise error

    return case


def measured(small: bool, out: Path) -> dict[str, Any]:
    return {"rows": [{"ms": 0.25}]}


CASES = {"first": measured, "second": raising(ValueError("poison")), "third": raising(Unserved("no such mask"))}


# Statuses, and going on.


def test_a_case_is_measured_refused_or_failed(tmp_path: Path) -> None:
    found = {name: run_case(lambda case=case: case(False, tmp_path)) for name, case in CASES.items()}
    assert found == {
        "first": {"status": "measured", "rows": [{"ms": 0.25}]},
        "second": {"status": "failed", "why": "ValueError: poison"},
        "third": {"status": "refused", "why": "no such mask"},
    }
    assert run_case(lambda: {"status": "wrong"}) == {"status": "wrong"}
    assert run_case(lambda: raising(UserError("no figures"))(False, tmp_path))["status"] == "refused"


@pytest.mark.parametrize(("alone", "codes"), [(False, [3, 0]), (True, [3, 3, 0])])
def test_work_leaves_a_spoiled_process_and_runs_nothing_twice(tmp_path: Path, alone: bool, codes: list[int]) -> None:
    ran: list[str] = []

    def noted(name: str) -> Any:
        return lambda small, out: (ran.append(name), CASES[name](small, out))[1]

    pieces = {"some": Piece({name: noted(name) for name in CASES}, alone=alone)}
    bench_pieces._write_piece(tmp_path, "some", {"facts": HERE, "cases": {}, "running": ""})
    assert [work(pieces, "some", str(tmp_path)) for _ in codes] == codes
    assert ran == ["first", "second", "third"]
    assert work(pieces, "some", str(tmp_path)) == 0 and len(ran) == 3
    assert [one["status"] for one in read_piece(tmp_path, "some")["cases"].values()] == [
        "measured",
        "failed",
        "refused",
    ]


def test_the_small_form_has_its_number_of_cases(tmp_path: Path) -> None:
    bench_pieces._write_piece(tmp_path, "some", {"facts": HERE | {"small": True}, "cases": {}, "running": ""})
    assert work({"some": Piece({str(i): measured for i in range(4)}, small=2)}, "some", str(tmp_path)) == 0
    assert list(read_piece(tmp_path, "some")["cases"]) == ["0", "1"]


def test_what_was_running_when_its_process_died_has_failed_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, deaths, said = {"some": Piece(CASES)}, ["exit code -6", "killed after 9 s", "exit code -11"], list[str]()

    def one_process(words: Any, environment: Any, file: Path, deadline: float, silence: float) -> str:
        found = read_piece(tmp_path, "some")
        left = [case for case in CASES if case not in found["cases"]]
        if not deaths:
            return f"exit code {work(pieces, 'some', str(tmp_path))}"
        if deaths == ["exit code -11"]:  # at its very end
            work(pieces, "some", str(tmp_path))
        else:
            bench_pieces._write_piece(tmp_path, "some", found | {"running": left[0]})
        return deaths.pop(0)

    monkeypatch.setattr(bench_pieces, "watch", one_process)
    assert run_piece(pieces["some"], "some", "here.PIECES", tmp_path, HERE, said.append)
    found = read_piece(tmp_path, "some")
    assert {name: one["why"] for name, one in found["cases"].items()} == {
        "first": "exit code -6", "second": "killed after 9 s", "third": "no such mask",
    }  # fmt: skip
    assert found["running"] == "" and found["facts"] == HERE
    assert said == ["some: first: failed: exit code -6", "some: second: failed: killed after 9 s"]


@pytest.mark.parametrize(("ended", "running"), [("out of the 480 s of a piece", "first"), ("exit code 1", "")])
def test_what_the_end_of_a_piece_cut_off_or_never_began_is_left_for_the_next_time(
    ended: str, running: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_process(*words: Any) -> str:
        bench_pieces._write_piece(tmp_path, "some", read_piece(tmp_path, "some") | {"running": running})
        return ended

    said: list[str] = []
    monkeypatch.setattr(bench_pieces, "watch", one_process)
    assert not run_piece(Piece(CASES), "some", "here.PIECES", tmp_path, HERE, said.append)
    assert read_piece(tmp_path, "some")["cases"] == {}
    assert said == [f"some: {ended}, not finished: the same command goes on with it"]


@pytest.mark.slow
def test_a_process_is_watched(tmp_path: Path) -> None:
    """It ends, crashes, is silent too long with a child of its own, or runs into the deadline."""
    file = tmp_path / "some.json"
    file.touch()

    def ends(script: str, seconds: float = 60.0) -> str:
        return watch([sys.executable, "-c", script], {"LATE": "7"}, file, time.time() + seconds, 2.0)

    assert ends("import os; raise SystemExit(int(os.environ['LATE']))") == "exit code 7"
    assert ends("import os; os.abort()") == "exit code -6"
    assert ends("import time; time.sleep(60)", 0.5) == "out of the 480 s of a piece"
    child = tmp_path / "child"
    sleeper = f"import subprocess as s, time; open({str(child)!r}, 'w').write(str(s.Popen(['sleep', '60']).pid)); "
    assert ends(sleeper + "time.sleep(60)") == "killed after 2 s"
    # The child is killed too, but nobody waits for it: it is gone, or a zombie, once the kernel has run it.
    deadline = time.time() + 30
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while " Z " not in Path(f"/proc/{child.read_text()}/stat").read_text():
            assert time.time() < deadline
            time.sleep(0.05)


# What it calls wrong.


@pytest.mark.parametrize(("spoiled", "status"), [("", "right"), ("dv", "wrong"), ("nan", "wrong")])
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

    pair = SimpleNamespace(forward=forward, backward=backward, refusal=lambda *given: "")
    monkeypatch.setattr(dispatch, "pair", lambda name: pair)
    found = bench_gpu._kernel("pallas_gpu", "odd lengths", 64, "bfloat16" if spoiled else "float32", True, tmp_path)
    assert found["status"] == status
    assert list(found["rows"][0]) == ["out", "lse", "dq", "dk", "dv"]


def test_attention_leaves_out_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {bench_gpu._kernel_name("pallas_hopper", "causal", 16): {"status": "wrong"}}
    bench_pieces._write_piece(tmp_path, "kernels", {"facts": HERE, "cases": cases, "running": ""})
    asked: list[Any] = []
    monkeypatch.setattr(bench_gpu, "bench_attention", lambda bench, say: asked.append(bench) or [])
    found = bench_gpu._attention("causal", 128, 4096, True, tmp_path)
    assert asked[0].implementations == ("cudnn", "pallas_gpu", "chunked")
    assert found["notes"] == ["not pallas_hopper: wrong, or failed, in the piece before"]


# Where it runs, and what is read.


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "",
            "bench gpu needs an NVIDIA GPU; JAX 0.12.0 finds cpu, nvidia-smi nothing: install jax's CUDA plugin where",
        ),
        ("--pieces kernel", "bench gpu has no piece 'kernel' (did you mean 'kernels'?): there are kernels, attention,"),
        ("--small", "has results of jax 0.11.0, and here it is 0.12.0: try --out DIR"),
    ],
)
def test_mistakes_are_said(
    words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = HERE | {"platform": "cpu", "device": "cpu", "driver": "", "small": words == "--small"}
    bench_pieces._write_piece(tmp_path, "step", {"facts": here | {"jax": "0.11.0"}, "cases": {}, "running": ""})
    monkeypatch.setattr(bench_gpu, "facts_here", lambda small: here)
    assert main(["bench", "gpu", "--out", str(tmp_path), *words.split()]) == 2
    assert says in capsys.readouterr().err


def test_the_report_has_a_table_a_piece_and_says_what_failed(tmp_path: Path) -> None:
    cases = {
        "a": {"status": "wrong", "rows": [{"ms": 0.25, "tokens/s": 123456.7}]},
        "b": {"status": "failed", "why": "exit code -6"},
        "c": {"status": "measured", "rows": [{"ms": 2.0, "peak, GiB": None}], "notes": ["beside nothing"]},
    }
    bench_pieces._write_piece(tmp_path, "some", {"facts": HERE, "cases": cases, "running": ""})
    assert report(tmp_path, ["some", "none"]).splitlines() == [
        "device: a GPU, platform: gpu, driver: 570, jax: 0.12.0, small: False", "", "### some", "",
        "| case | ms | tokens/s |  | peak, GiB |",
        "| --- | --- | --- | --- | --- |",
        "| a | 0.25 | 123,457 | wrong |  |",
        "| c | 2 |  |  |  |", "",
        "- b: failed: exit code -6",
        "- c: beside nothing",
    ]  # fmt: skip


def test_a_devices_own_plane_is_read_where_there_is_one() -> None:
    """The host's events of the same names are the starts of kernels."""

    def plane(name: str, duration: int) -> Any:
        event = SimpleNamespace(
            name="x", start_ns=0, duration_ns=duration, stats=[("hlo_op", "dot.1"), ("hlo_module", "jit_f")]
        )
        return SimpleNamespace(name=name, lines=[SimpleNamespace(events=[event])])

    host, device = plane("/host:CPU", 8), plane("/device:GPU:0", 4)
    assert _durations(SimpleNamespace(planes=[host, device])) == {("jit_f", "dot.1"): [4e-9]}
    assert _durations(SimpleNamespace(planes=[host])) == {("jit_f", "dot.1"): [8e-9]}


# All of it.


@pytest.mark.slow
def test_all_of_it_in_a_tiny_form(tmp_path: Path) -> None:
    """By `make gpu`, with nothing there but what it says it needs: every piece really runs, and no case fails."""
    absent = tmp_path / "absent"
    absent.mkdir()
    for name in ("matplotlib", "safetensors", "grain", "orbax", "chex", "tokenizers", "tensorstore"):
        (absent / f"{name}.py").write_text(f"raise ImportError('{name} is absent')")
    words = ["make", "--no-print-directory", "gpu", "SMALL=1", f"GPU_OUT={tmp_path}", f"VENV={sys.prefix}"]
    environment = os.environ | {"PYTHONPATH": str(absent)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, piece in bench_gpu.PIECES.items():
        cases = read_piece(tmp_path, name)["cases"]
        assert len(cases) == piece.small
        assert {one["status"] for one in cases.values()} <= {"right", "measured", "refused"}, (name, cases)
        assert any(one.get("rows") for one in cases.values()), name
    kernels = read_piece(tmp_path, "kernels")["cases"]
    assert {name.partition(",")[0]: one["status"] for name, one in kernels.items()} == {
        "cudnn": "refused", "pallas_gpu": "right", "pallas_hopper": "right",
    }  # fmt: skip
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    lines = [row["line"] for one in read_piece(tmp_path, "trace")["cases"].values() for row in one["rows"]]
    assert any(line.startswith("models/transformer.py:") for line in lines)
    assert (tmp_path / "report.md").read_text() in done.stdout + "\n"
    assert json.loads((tmp_path / "step.json").read_text())["facts"]["small"] is True
