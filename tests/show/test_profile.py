"""A trace by line of the model: the planes of TPUs, GPUs and CPUs, and a real run's, which XProf
reads too.
"""

import json
from pathlib import Path

import pytest
from jax.profiler import ProfileData
from rich.console import Console

from jaxpar.base.config import Config, ModelConfig, override
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.cli.main import main
from jaxpar.show.profile import measured_lines, profile_parts
from jaxpar.train.loop import run

MLP = ("block/mlp", "models/transformer.py:173", "backward")
LOSS = ("loss", "models/model.py:181", "forward")
FACTS = {
    "steps": [20, 21],
    "trace": "x.xplane.pb",
    "module": "jit_step",
    "device_kind": "TPU v5 lite",
    "devices": 8,
    "traced": 1,
    "lines": {
        "fusion.3": list(MLP),
        "all-gather-done.1": list(MLP),
        "dot.7": list(LOSS),
    },
}


def plane(name: str, lines: dict[str, list[tuple[str, int, dict[str, str]]]]) -> str:
    """The text of a plane whose lines have events of a name, a duration in nanoseconds and
    stats.
    """
    events = [event for line in lines.values() for event in line]
    stats = ["hlo_op", "hlo_module"]
    text = [f'name: "{name}"']
    for number, (event, _, _) in enumerate(events):
        text.append(f'event_metadata {{ key: {number} value {{ id: {number} name: "{event}" }} }}')
    for number, stat in enumerate(stats):
        text.append(f'stat_metadata {{ key: {number} value {{ id: {number} name: "{stat}" }} }}')
    for line, inside in lines.items():
        rows = []
        for event in inside:
            own = " ".join(
                f'stats {{ metadata_id: {stats.index(k)} str_value: "{v}" }}'
                for k, v in event[2].items()
            )
            rows.append(
                f"events {{ metadata_id: {events.index(event)} duration_ps: {event[1] * 1000} "
                f"{own} }}"
            )
        text.append(f'lines {{ name: "{line}" {" ".join(rows)} }}')
    return f"planes {{ {' '.join(text)} }}"


def measured(
    tmp_path: Path,
    *planes: str,
) -> dict[tuple[str, str, str], float]:
    (tmp_path / "x.xplane.pb").write_bytes(
        ProfileData.text_proto_to_serialized_xspace(" ".join(planes))
    )
    return {line: round(seconds * 1e9) for line, seconds in measured_lines(FACTS, tmp_path).items()}


HOST = plane(
    "/host:CPU",
    {"python": [("train", 999, {}), ("dot.7", 999, {"hlo_op": "dot.7", "hlo_module": "jit_step"})]},
)


def test_the_instructions_of_a_tpu_are_one_line_of_its_plane(tmp_path):
    chip = plane(
        "/device:TPU:0",
        {
            "XLA Modules": [("jit_step(123)", 5000, {})],
            "XLA Ops": [
                ("%while.1 = (f32[8]) while(%tuple)", 4000, {}),
                ("%fusion.3 = f32[8] fusion(%a)", 600, {}),
                ("%all-gather-done.1 = f32[8] all-gather-done(%b)", 200, {}),
                ("%dot.7 = f32[8] dot(%a)", 100, {}),
                ("%new.1 = f32[8] fusion(%a)", 20, {}),
            ],
            "Async XLA Ops": [("%all-gather-start.1 = f32[8] all-gather-start(%a)", 900, {})],
        },
    )
    nowhere = "instructions that are not in the program's text"
    assert measured(tmp_path, HOST, chip) == {MLP: 400, LOSS: 50, (nowhere, "", ""): 10}, (
        "of one of two steps"
    )


def test_the_instructions_of_a_gpu_are_on_its_streams_under_the_names_of_kernels(tmp_path):
    def kernel(op: str, module: str = "jit_step") -> dict[str, str]:
        return {"hlo_op": op, "hlo_module": module}

    chip = plane(
        "/device:GPU:0",
        {
            "Stream #13(Compute)": [
                ("loop_fusion_3", 600, kernel("fusion.3")),
                ("gemm", 100, kernel("dot.7")),
                ("other", 70, kernel("dot.7", "jit_eval")),
                ("MemcpyD2H", 9, {}),
            ],
            "XLA Ops": [("fusion.3", 600, kernel("fusion.3"))],
        },
    )
    assert measured(tmp_path, HOST, chip) == {MLP: 300, LOSS: 50}


def test_a_run_without_a_trace_is_told_how_to_make_one(tmp_path, capsys):
    assert main(["watch", str(tmp_path), "--profile"]) == 2
    assert "has no trace: train it with metrics.profile=20:25" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--target", "v5e-8"]) == 2
    assert "--target has no effect: it is what --profile predicts for" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_run_is_traced_for_its_steps_alone_by_line_and_xprof_opens_it(tmp_path, monkeypatch):
    model = ModelConfig(layers=2, embed=32, heads=4, mlp=64, max_seq_len=32)
    (tmp_path / "text.txt").write_text("the quick brown fox\n" * 500)
    config = override(
        Config(model=model, mesh=MeshSpec(data=2, fsdp=2, tensor=2)),
        {
            "data.source": "text",
            "data.path": str(tmp_path / "text.txt"),
            "data.seq_len": 32,
            "train.steps": 8,
            "train.batch": 8,
            "train.warmup_steps": 2,
            "metrics.profile": "4:6",
            "mesh.platform": "cpu",
        },
    )
    run(config, tmp_path / "run")
    profile = tmp_path / "run" / "profile"
    facts = json.loads((profile / "steps_4_6.json").read_text())
    planes = ProfileData.from_file(str(profile / facts["trace"])).planes
    events = [event for plane in planes for line in plane.lines for event in line.events]
    assert [dict(event.stats)["step_num"] for event in events if event.name == "train"] == [4, 5, 6]
    found = measured_lines(facts, profile)
    scopes = {scope for scope, _, _ in found}
    assert {"embed", "block/attention", "block/mlp", "loss", "update"} <= scopes
    nowhere = sum(
        seconds for (scope, _, _), seconds in found.items() if scope.startswith("instructions that")
    )
    assert nowhere < 0.01 * found.total()
    out = Console(width=200, record=True)
    for part in profile_parts(tmp_path / "run", "", print):
        out.print(part)
    text = out.export_text()
    assert (
        "on 8 x cpu; no prediction: these devices cannot be rehearsed" in text
        and "block/mlp" in text
    )
    with pytest.raises(UserError, match="v5e-4"):
        profile_parts(tmp_path / "run", "v5e-4", print)
    convert = pytest.importorskip("xprof.convert.raw_to_tool_data", reason="xprof is not installed")
    viewer, _ = convert.xspace_to_tool_data(
        [str(profile / facts["trace"])],
        "trace_viewer",
        {},
    )
    names: set[str] = {
        event["name"] for event in json.loads(viewer)["traceEvents"] if "name" in event
    }
    assert any(name.startswith("train") for name in names) and names & facts["lines"].keys()
