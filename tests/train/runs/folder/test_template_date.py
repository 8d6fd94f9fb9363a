"""The date that a chat template writes is that of a run's first start, on every later day."""

import json
from dataclasses import replace

import numpy as np
import pytest

from jaxpar.base.config import Config, override
from jaxpar.data.corpus import load_corpus
from jaxpar.train.experiments import make_experiment
from jaxpar.train.run_data import template_date, with_run_data
from jaxpar.train.runs.folder.run_folder import compare_run, keep_config

pytest.importorskip("jinja2")
TEMPLATE = (
    "{{ strftime_now('%d %b %Y') }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


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


def dated(config, folder, today):
    """A config with the date of a run in a folder."""
    written = template_date(config.data, folder, today)
    return replace(config, data=replace(config.data, template_date=written))


def test_a_run_keeps_the_date_of_its_first_start(config, tmp_path):
    folder = tmp_path / "run"
    first = dated(config, folder, "2026-01-31")
    keep_config(folder, first)
    (folder / "checkpoints" / "5" / "state").mkdir(parents=True)
    second = dated(config, folder, "2026-02-01")
    compare_run(folder, second)  # and so it is the same experiment
    assert second.data.template_date == first.data.template_date == "2026-01-31"
    one, other = (load_corpus(made.data, 256).train.ids for made in (first, second))
    np.testing.assert_array_equal(one, other)
    assert bytes(one[:11].astype(np.uint8)) == b"31 Jan 2026"
    assert template_date(config.data, tmp_path / "another", "2026-02-01") == "2026-02-01"


def test_an_import_that_has_not_trained_has_no_date_yet(config, tmp_path):
    keep_config(tmp_path / "run", config)
    (tmp_path / "run" / "checkpoints" / "0" / "state").mkdir(parents=True)
    assert template_date(config.data, tmp_path / "run", "2026-03-01") == "2026-03-01"


def test_a_date_is_set_only_where_one_is_written(config, tmp_path):
    given = override(config, {"data.template_date": "2020-01-01"})
    assert dated(given, tmp_path / "run", "2026-03-01") == given
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert dated(config, tmp_path / "run", "2026-03-01") == config
    assert dated(Config(), tmp_path / "run", "2026-03-01") == Config()


def test_the_date_is_kept_where_the_tokenizer_is_named_by_its_folder(config, tmp_path):
    """What lies beside a tokenizer is looked for where its file is, however it is named."""
    small = {"model.vocab_size": 256, "data.seq_len": 32, "train.batch": 1, "mesh.platform": "cpu"}
    config = override(config, small | {"data.tokenizer": str(tmp_path)})
    loaded, corpus = with_run_data(make_experiment(config), tmp_path / "run", print)
    day = loaded.config.data.template_date
    assert len(day) == len("2026-01-31")
    assert loaded.config == override(config, {"data.template_date": day})
    again, same = with_run_data(loaded, tmp_path / "run", print)
    assert again is loaded
    assert same is corpus
