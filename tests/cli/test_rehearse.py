"""`jaxpar rehearse`: what it refuses, prints and writes, around reports that are made up."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace
from typing import Any

import pytest
from fake_rehearsal import fake_rehearsal
from report_types import problems

from jaxpar.base.config import Config, load_config
from jaxpar.cli import rehearse as subject
from jaxpar.cli.main import main
from jaxpar.rehearse import of_config, topologies
from jaxpar.rehearse.report.memory import DoesNotFit
from jaxpar.rehearse.report.schema import Rehearsal
from jaxpar.rehearse.targets import Target

# What is refused, each in one line.


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a refused command, which says nothing else."""
    assert main(["rehearse", *words]) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert said.out == ""
    return line.removeprefix("jaxpar: error: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "tiny",
            "rehearse needs --target: v5p-64, v5e-8, h100x64, ...: docs/targets.md lists them",
        ),
        ("tiny --target v5q-8", "no target 'v5q-8' (did you mean 'v5p-8'?): chips are a100, "),
        (
            "tiny --target v5e-7",
            "target 'v5e-7': no v5e slice has 7 chips, the nearest are v5e-4 and v5e-8",
        ),
        ("tiny --target h100x12", "target 'h100x12': GPUs come 8 to a node"),
        ("tinny --target v5e-8", "no preset 'tinny' (did you mean 'tiny'?)"),
        (
            "tiny --target v5e-8 --mesh.data 3",
            "mesh data=3 x fsdp=2 x tensor=2 needs 12 devices, v5e-8 has 8 (2x4): try mesh.data=2",
        ),
        (
            "tiny --target v5e-8 --fail-on unplaned-collective",
            "--fail-on unplaned-collective: unknown condition (did you mean "
            "'unplanned-collective'?)",
        ),
        (
            "tiny --target v5e-8 --fail-on step+3%",
            "--fail-on step+3% needs --against FILE.json, the rehearsal to hold it against",
        ),
        ("tiny --target v5e-8 --fail-on stepp>3s", "--fail-on stepp>3s: no figure 'stepp' (did"),
        ("tiny --target v5e-8 --compiler numpy==2", "--compiler numpy==2: write jax==VERSION or"),
        ("tiny --target h100x8 --against libtpu==1", "libtpu==1 has no effect on a GPU target"),
        (
            "tiny --target v5e-8 --json no/report.json",
            "cannot write no/report.json: there is no folder no",
        ),
        (
            "tiny --target v5e-8 --trace no/trace.json",
            "cannot write no/trace.json: there is no folder no",
        ),
        ("tiny --target v5e-8 --against tinny", "no preset 'tinny' (did you mean 'tiny'?)"),
        ("tiny --target v5e-8 --against no.json", "cannot read no.json: No such file"),
        (
            "tiny --target v5e-8 --against tiny --json -",
            "--against has no effect: --json - prints the report and nothing else",
        ),
        (
            "tiny --target v5e-8 --unfused",
            "--unfused has no effect without --graph FILE.json, which it adds to",
        ),
        (
            "tiny --target v5e-8 --graph no/graph.json",
            "cannot write no/graph.json: there is no folder no",
        ),
        (
            "tiny --target v5e-8 --fail-onn x",
            "jaxpar rehearse takes no --fail-onn (did you mean '--fail-on'?)",
        ),
    ],
)
def test_mistakes_are_told_in_a_line_before_anything_is_compiled(
    words, message, capsys, monkeypatch
):
    monkeypatch.setattr(
        of_config, "make_train_step", lambda *_: pytest.fail("compiled all the same")
    )
    monkeypatch.setattr(topologies, "versions", lambda names: pytest.fail("looked for a compiler"))
    assert refused(capsys, *words.split()).startswith(message)


@pytest.mark.parametrize(
    ("target", "package"), [("v5e-8", "libtpu"), ("h100x8", "jax-cuda12-plugin")]
)
def test_a_missing_compiler_is_named_with_how_to_install_it(target, package, capsys, monkeypatch):
    monkeypatch.setattr(topologies, "versions", lambda names: {})
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    line = refused(capsys, "tiny", "--target", target)
    assert line.startswith(f"target {target} needs ") and "pip install" in line and package in line


# What is printed and written.


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Config]]:
    """What is rehearsed: names, configs; each report is made up, its memory grown with the
    layers.
    """
    calls: list[tuple[str, Config]] = []

    def made_up(
        experiment: Any,
        target: Target,
        name: str,
        command: str,
        say,
        program,
        graph: bool = False,
        measured: Any = None,
    ) -> Rehearsal:
        config = experiment.config
        if measured is not None:
            say(f"{measured.seconds} s of {measured.config.model.layers} layers")
        calls.append((name, config))
        say(f"compiling for {target.name}")
        report = fake_rehearsal(layers=2, config=name, command=command)
        report["memory"]["categories"]["temporaries"] += config.model.layers * 2**20
        report["memory"]["total"] += config.model.layers * 2**20
        return report

    monkeypatch.setattr(subject, "on_target", lambda config, _: SimpleNamespace(config=config))
    monkeypatch.setattr(subject, "resolve_and_compile", lambda asked, *_: (asked, None))
    monkeypatch.setattr(subject, "rehearse", made_up)
    return calls


def run(*words: str) -> int:
    return main(["rehearse", "tiny", "--target", "v5e-8", *words])


def test_a_measured_time_is_of_the_config_without_its_flags(
    asked: list[tuple[str, Config]], capsys: pytest.CaptureFixture[str]
) -> None:
    layers = load_config("tiny").model.layers
    assert run("--model.layers", str(layers + 1), "--measured", "1.5s") == 0
    assert asked[0][1].model.layers == layers + 1
    assert f"1.5 s of {layers} layers" in capsys.readouterr().out
    assert run("--measured", "soon") == 2
    assert "nor the time of a step" in on_one_line(capsys.readouterr().err)


def test_prices_of_a_file_that_is_not_there_are_refused(
    asked: list[tuple[str, Config]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--prices", "nowhere.toml") == 2
    assert "nowhere.toml" in capsys.readouterr().err and not asked


def on_one_line(text: str) -> str:
    """Without the terminal's line breaks."""
    return text.replace("\n", "")


def test_the_terminal_has_the_report(asked, capsys):
    assert run("--model.layers", "3") == 0
    out = capsys.readouterr().out
    assert out.startswith("compiling for v5e-8\n")
    assert "memory of a device" in out and "by line of the model" in out
    ((name, config),) = asked
    assert (name, config.model.layers) == ("tiny", 3)


def test_json_alone_on_the_terminal(asked, capsys):
    assert run("--json", "-", "--model.layers", "3", "--mesh.data", "1") == 0
    report = json.loads(capsys.readouterr().out)
    assert list(problems(report)) == [] and "timeline" in report
    assert (
        report["command"]
        == "jaxpar rehearse tiny --target v5e-8 --json - --model.layers 3 --mesh.data 1"
    )


def test_files(asked, tmp_path, capsys):
    kept, trace, picture = (
        tmp_path / name for name in ("report.json", "trace.json.gz", "step.png")
    )
    assert run("--json", str(kept), "--trace", str(trace), "--picture", str(picture)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = on_one_line(capsys.readouterr().out)
    assert f"wrote {kept}" in out
    assert (
        f"wrote {trace}" in out and json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    )
    assert "timeline" in json.loads(kept.read_text())


def test_files_that_cannot_be_written(asked, tmp_path, capsys):
    assert run("--json", str(tmp_path)) == 2
    assert capsys.readouterr().err.startswith(
        f"jaxpar: error: cannot write {tmp_path}: Is a directory"
    )


def test_findings_that_fail_a_run(asked, capsys):
    assert run("--fail-on", "unplanned-collective,does-not-fit") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "jaxpar: failed: models/llama.py:133: error: unplanned-collective: all-reduce over tensor"
    )
    assert run("--fail-on", "does-not-fit", "--json", "-") == 0
    json.loads(capsys.readouterr().out)
    assert run("--fail-on", "large-copy", "--json", "-") == 1, "any rule of the linter"


def test_a_config_is_compared_with_another_and_with_a_file(asked, tmp_path, capsys):
    kept = tmp_path / "report.json"
    assert run("--model.layers", "3", "--json", str(kept)) == 0
    capsys.readouterr()
    for other in ("tiny", str(kept)):
        assert run("--model.layers", "5", "--against", other) == 0
        out = capsys.readouterr().out
        assert "and tiny, to compare with" in out or other != "tiny"
        before, after = out.partition("before ")[2].splitlines()[:2]
        assert before.strip().startswith("tiny on v5p-64"), "the target that made_up names"
        assert after.split()[1] == "tiny"
        (line,) = [line for line in out.splitlines() if line.rstrip().endswith("all")]
        assert "%" in line
    assert [config.model.layers for _, config in asked] == [3, 5, 2, 5]


def test_growth_since_another_report_fails_a_run(asked, tmp_path, capsys):
    kept = tmp_path / "report.json"
    assert run("--model.layers", "3", "--json", str(kept)) == 0
    words = ("--model.layers", "300", "--against", str(kept))
    assert run(*words, "--fail-on", "step+0%") == 0, "the made-up step takes as long"
    capsys.readouterr()
    assert run(*words, "--fail-on", "step+0%,memory+5%,memory>1GiB", "--json", "-") == 1
    said = capsys.readouterr()
    json.loads(said.out)
    grown, large = said.err.splitlines()
    assert grown.startswith("jaxpar: failed: memory+5%: 4.")
    assert grown.endswith("): temporaries +297.00 MiB")
    assert large.startswith("jaxpar: failed: memory>1GiB: 4.")


def test_the_mesh_of_a_preset(asked):
    assert main(["rehearse", "gpt2_124m", "--target", "v5e-8", "--on", "v5e-8"]) == 0
    assert asked[0][1].mesh.fsdp == 8


def test_help_names_every_switch(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["rehearse", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: jaxpar rehearse CONFIG --target T")
    own = " ".join(text.partition("Settings (")[0].split())
    for flag in "target", "on", "trace", "picture", "json", "against", "fail-on", "compiler":
        assert f"--{flag}" in own
    assert "v5p-128x4 (four slices)" in own and "  mesh " in text


def test_a_step_that_the_compiler_refuses_for_its_memory_does_not_fit(monkeypatch, capsys):
    """With `--fail-on does-not-fit` it is a condition that was found, as in a report; else it is an
    error.
    """

    def refuses(*_: object) -> Rehearsal:
        raise DoesNotFit("this step does not fit v5e-8: it needs 23.50 GiB a device")

    monkeypatch.setattr(subject, "resolve_and_compile", lambda asked, *_: (asked, None))
    monkeypatch.setattr(subject, "on_target", lambda config, _: SimpleNamespace(config=config))
    monkeypatch.setattr(subject, "rehearse", refuses)
    assert main(["rehearse", "tiny", "--target", "v5e-8", "--fail-on", "does-not-fit"]) == 1
    said = capsys.readouterr().err
    assert said == (
        "jaxpar: failed: error: does-not-fit: this step does not fit v5e-8: it needs 23.50 "
        "GiB a device\n"
    )
    assert main(["rehearse", "tiny", "--target", "v5e-8", "--fail-on", "large-copy"]) == 2
