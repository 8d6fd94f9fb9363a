"""Rows beside metrics.jsonl: what a library takes, what it keeps of a resumed run, and what happens
when it fails.
"""

import json
import struct
import sys
import time
from pathlib import Path

import pytest

from jaxpar.base.config import Config, override
from jaxpar.base.config.checks import check
from jaxpar.base.errors import UserError
from jaxpar.base.registry import SINKS
from jaxpar.train.metrics import MetricsLog, read_metrics
from jaxpar.train.sinks import Sink, register_sink


def run(
    folder: Path, name: str, config: Config, first: int, last: int, says: list[str] | None = None
) -> None:
    """Write the rows after `first` as a run does that is resumed there."""
    sink = Sink(
        name,
        config,
        folder,
        first,
        (says if says is not None else []).append,
    )
    with MetricsLog(folder, first, sinks=[sink]) as log:
        for step in range(first + 1, last + 1):
            log.write(step, loss=step / 7.5, mfu=None)


@pytest.fixture
def fake():
    """A library that takes rows, except while it is `down`; and what it took."""
    taken: dict = {"rows": [], "down": False, "ended": []}

    def write(step, row):
        if taken["down"]:
            raise ConnectionError("no route to host\nand a page of advice")
        taken["rows"].append((step, dict(row)))

    register_sink("fake")(lambda *_: (write, taken["ended"].append, "an id"))
    yield taken
    SINKS.remove("fake")


def test_what_a_sink_could_not_take_is_said_kept_and_sent_again(tmp_path, fake):
    said: list[str] = []
    sink = Sink("fake", Config(), tmp_path, 0, said.append)
    with MetricsLog(tmp_path, sinks=[sink]) as log:
        for step in range(1, 7):
            fake["down"] = step in (2, 3)
            log.write(step, loss=step / 3)
            sink._thread.submit(lambda: None).result()
    assert fake["rows"] == [(step, {"loss": step / 3}) for step in range(1, 7)] and fake[
        "ended"
    ] == [False]
    assert said == [
        f"warning: fake lacks {rows} rows from step 2, metrics.jsonl has them all: no route to host"
        for rows in (1, 2)
    ]


def test_a_sink_that_stays_away_is_named_at_the_end_and_costs_no_row_of_the_file(tmp_path, fake):
    said: list[str] = []
    fake["down"] = True
    run(tmp_path, "fake", Config(), 0, 3, said)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    assert (
        said[-1]
        == "warning: fake lacks 3 rows from step 1, metrics.jsonl has them all: no route to host"
    )


def test_a_run_that_fails_is_failed_there_too(tmp_path, fake):
    with (
        pytest.raises(ZeroDivisionError),
        MetricsLog(tmp_path, sinks=[Sink("fake", Config(), tmp_path, 0, print)]),
    ):
        _ = 1 / 0
    assert fake["ended"] == [True]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_library_that_is_absent_is_named_with_its_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, {"tensorboard": "tensorboardX"}.get(name, name), None)
    with pytest.raises(UserError, match=rf"metrics.sinks={name} .*'jaxpar\[{name}\]'"):
        Sink(name, Config(), tmp_path, 0, print)


def test_a_sink_that_cannot_begin_is_one_line(tmp_path):
    def refuse(*_):
        raise RuntimeError("no API key\nand a page of advice")

    def lacks(*_):
        raise ImportError("No module named 'of_mine'")

    try:
        register_sink("refusing")(refuse)
        register_sink("lacking")(lacks)
        check(override(Config(), {"metrics.sinks": ["wandb", "refusing"]}))
        with pytest.raises(UserError, match=r"metrics.sinks=refusing .*no API"):
            Sink("refusing", Config(), tmp_path, 0, print)
        with pytest.raises(UserError, match="named 'of_m"):
            Sink("lacking", Config(), tmp_path, 0, print)
        with pytest.raises(UserError, match=r"is one of tensorboard, .*, lacking, found 'other'"):
            check(override(Config(), {"metrics.sinks": ["wandb", "other"]}))
    finally:
        SINKS.remove("refusing")
        SINKS.remove("lacking")
    with pytest.raises(UserError, match="one of them twice"):
        check(override(Config(), {"metrics.sinks": ["wandb", "wandb"]}))


def test_event_files_for_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX", reason="needs the tensorboard extra")
    run(tmp_path, "tensorboard", Config(), 0, 1)
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"loss" in content
    assert b"| train.batch | 32 |" in content and b"| mesh.tensor | 1 |" in content, (
        "the config, as the docs promise"
    )


def events_of(folder: Path):
    """The events of TensorBoard's files, in the order in which it reads them."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2", reason="needs the extra")
    for file in sorted((folder / "tensorboard").iterdir()):
        content = file.read_bytes()
        while content:
            (size,) = struct.unpack("<Q", content[:8])
            yield event_pb2.Event.FromString(content[12 : 12 + size])
            content = content[16 + size :]


def test_tensorboard_shows_the_step_that_a_run_goes_on_after(tmp_path):
    run(tmp_path, "tensorboard", Config(), 0, 6)
    time.sleep(1.01)  # the name of a file has the second
    run(tmp_path, "tensorboard", Config(), 4, 5)
    shown: list[int] = []
    for event in events_of(tmp_path):
        if event.HasField("session_log"):  # a start hides all events from its step on
            shown = [step for step in shown if step < event.step]
        shown += [event.step for value in event.summary.value if value.tag == "loss"]
    assert shown == [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_weights_and_biases_offline_a_resumed_run_is_the_same_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs the wandb extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "rings")
    run(tmp_path, "wandb", Config(), 0, 7)
    run(tmp_path, "wandb", Config(), 5, 9)
    # its own process writes the file, and may do so after the run was finished: this waits for it
    wandb.teardown()
    run_id = json.loads((tmp_path / "sinks.json").read_text())["wandb"]
    written = [
        file.read_bytes()
        for file in sorted(tmp_path.glob(f"wandb/offline-run-*/run-{run_id}.wandb"))
    ]
    assert len(written) == 2, "both parts of the run have its id"
    for text, steps in zip(
        written,
        (range(1, 8), range(6, 10)),
        strict=True,
    ):
        assert (
            b"rings" in text and b"train.learning_rate" in text and tmp_path.name.encode() in text
        )
        assert all(json.dumps(step / 7.5).encode() in text for step in steps)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_mlflow_a_resumed_run_is_the_same_run_and_says_what_changed(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs the mlflow extra")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "rings")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"file:{tmp_path}/store")
    try:
        run(tmp_path, "mlflow", Config(), 0, 7)
        run(tmp_path, "mlflow", override(Config(), {"mesh.tensor": 4}), 5, 9)
        run_id = json.loads((tmp_path / "sinks.json").read_text())["mlflow"]
        client = mlflow.MlflowClient()
        found = client.get_run(run_id)
        history = client.get_metric_history(run_id, "loss")
        assert client.get_experiment(found.info.experiment_id).name == "rings"
    finally:
        mlflow.set_tracking_uri(before)
    assert found.info.run_name == tmp_path.name and found.info.status == "FINISHED"
    assert (
        found.data.params["train.batch"] == str(Config().train.batch)
        and found.data.params["mesh.tensor"] == "1"
    )
    assert found.data.tags["mesh.tensor"] == "4" and "mesh.data" not in found.data.tags
    assert {(m.step, m.value) for m in history} == {(step, step / 7.5) for step in range(1, 10)}
