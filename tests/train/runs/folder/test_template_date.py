"""The date that a chat template writes is that of a run's first start, on every later day."""

import datetime
import json

import numpy as np
import pytest

from jaxpar.base.config import Config, override
from jaxpar.data.corpus import load_corpus
from jaxpar.train.runs.folder import template_date
from jaxpar.train.runs.folder.run_folder import compare_run, keep_config
from jaxpar.train.runs.folder.template_date import with_template_date

pytest.importorskip("jinja2")
TEMPLATE = (
    "{{ strftime_now('%d %b %Y') }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


@pytest.fixture
def on(monkeypatch):
    """`on(day)`: makes that day today's."""

    def set_day(day):
        fixed = type(
            "Date",
            (datetime.date,),
            {"today": classmethod(lambda cls: datetime.date.fromisoformat(day))},
        )
        monkeypatch.setattr(template_date, "date", fixed)

    return set_day


@pytest.fixture
def config(tmp_path):
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": TALK}))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "tokenizer.json").write_text('{"tokenizer": "bytes"}')
    data = {
        "source": "chat",
        "path": str(tmp_path / "talk.jsonl"),
        "tokenizer": str(tmp_path / "tokenizer.json"),
    }
    return override(
        Config(), {f"data.{key}": value for key, value in data.items()} | {"data.val_fraction": 0.0}
    )


def test_a_run_keeps_the_date_of_its_first_start(config, tmp_path, on):
    folder = tmp_path / "run"
    on("2026-01-31")
    first = with_template_date(config, folder)
    keep_config(folder, first)
    (folder / "checkpoints" / "5" / "state").mkdir(parents=True)
    on("2026-02-01")
    second = with_template_date(config, folder)
    compare_run(folder, second)  # and so it is the same experiment
    assert second.data.template_date == first.data.template_date == "2026-01-31"
    one, other = (load_corpus(made.data, 256).train.ids for made in (first, second))
    np.testing.assert_array_equal(one, other)
    assert bytes(one[:11].astype(np.uint8)) == b"31 Jan 2026"
    assert with_template_date(config, tmp_path / "another").data.template_date == "2026-02-01"


def test_an_import_that_has_not_trained_has_no_date_yet(config, tmp_path, on):
    keep_config(tmp_path / "run", config)
    (tmp_path / "run" / "checkpoints" / "0" / "state").mkdir(parents=True)
    on("2026-03-01")
    assert with_template_date(config, tmp_path / "run").data.template_date == "2026-03-01"


def test_a_date_is_set_only_where_one_is_written(config, tmp_path):
    given = override(config, {"data.template_date": "2020-01-01"})
    assert with_template_date(given, tmp_path / "run") == given
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert with_template_date(config, tmp_path / "run") == config
    assert with_template_date(Config(), tmp_path / "run") == Config()
