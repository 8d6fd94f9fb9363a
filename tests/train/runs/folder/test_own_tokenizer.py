"""A run's tokenizer is its own copy, and what its folder declares survives an import and an
export.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpar.base.config import RESOLVED, Bos, Config, DataConfig, ModelConfig, override
from jaxpar.base.errors import UserError
from jaxpar.base.toml import to_toml
from jaxpar.data.vocabulary.special_tokens import read_special_tokens
from jaxpar.data.vocabulary.tokenizer import BytesTokenizer, encode_prompt, load_tokenizer
from jaxpar.launch import local
from jaxpar.models import Model
from jaxpar.models.hf.export import export_hf
from jaxpar.train import evaluate, loop, run_data
from jaxpar.train.restore import config_of, export_run, import_run
from jaxpar.train.runs.folder.own_tokenizer import (
    export_tokenizer,
    exported_ids,
    keep_tokenizer,
    with_own_tokenizer,
)

pytestmark = pytest.mark.usefixtures("keeps_programs")

CHARS = {"tokenizer": "chars", "chars": "abc"}


def write_run(
    folder: Path, tokenizer: str, own: dict[str, Any], steps: tuple[int, ...] = (3,)
) -> DataConfig:
    """Write what a run folder has, but for its weights, and return how its data were asked for."""
    data = DataConfig("text", "texts", tokenizer=tokenizer)
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(Config(data=data), RESOLVED))
    (folder / "tokenizer.json").write_text(json.dumps(own))
    for step in steps:
        (folder / "checkpoints" / str(step) / "state").mkdir(parents=True)
    return data


def test_another_file_under_the_same_path_is_not_used_and_said(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    data = write_run(tmp_path / "run", str(file), CHARS)
    own = str(tmp_path / "run/tokenizer.json")
    said = list[str]()
    file.write_text(json.dumps(CHARS))
    assert with_own_tokenizer(data, tmp_path / "run", said.append).tokenizer == own
    file.unlink()
    assert with_own_tokenizer(data, tmp_path / "run", said.append).tokenizer == own
    assert said == []
    file.write_text(json.dumps(CHARS | {"chars": "bca"}))
    assert with_own_tokenizer(data, tmp_path / "run", said.append).tokenizer == own
    assert said == [
        f"data.tokenizer={file} has changed since this run began: its own copy, {own}, is used"
    ]


def test_the_characters_of_a_text_stay_those_of_the_run(tmp_path: Path) -> None:
    data = write_run(tmp_path / "run", "chars", CHARS)
    assert with_own_tokenizer(data, tmp_path / "run").tokenizer == str(
        tmp_path / "run/tokenizer.json"
    )


def test_another_tokenizer_is_refused_and_never_replaces_the_runs(tmp_path: Path) -> None:
    data = write_run(tmp_path / "run", "chars", CHARS, steps=(0,))
    other = override(Config(data=data), {"data.tokenizer": "bytes"}).data
    with pytest.raises(UserError, match=r"data\.tokenizer=bytes is not"):
        with_own_tokenizer(other, tmp_path / "run")
    (tmp_path / "other.json").write_text('{"tokenizer": "bytes"}')
    with pytest.raises(UserError, match="tokenizer of the data"):
        keep_tokenizer(load_tokenizer(tmp_path / "other.json"), tmp_path / "run")
    assert json.loads((tmp_path / "run/tokenizer.json").read_text()) == CHARS


def test_a_run_without_weights_takes_another(tmp_path: Path) -> None:
    data = write_run(tmp_path / "run", "chars", CHARS, steps=())
    assert with_own_tokenizer(data, tmp_path / "run") == data
    (tmp_path / "other.json").write_text('{"tokenizer": "bytes"}')
    keep_tokenizer(load_tokenizer(tmp_path / "other.json"), tmp_path / "run")
    assert json.loads((tmp_path / "run/tokenizer.json").read_text()) == {"tokenizer": "bytes"}


def write_beside(folder: Path, **files: str) -> Path:
    """Write the tokenizer of `write_run` with other files beside it:
    `chat_template_jinja="..."`.
    """
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(CHARS))
    for name, text in files.items():
        stem, _, ending = name.rpartition("_")
        (folder / f"{stem}.{ending}").write_text(text)
    return folder / "tokenizer.json"


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()} - {
        "config.toml",
        "checkpoints",
        "tokenizer.json",
    }


def test_an_import_takes_the_template_that_it_is_to_be_tuned_with(tmp_path: Path) -> None:
    """And what it was imported with goes; but beside a tokenizer.json alone there is nothing to
    take.
    """
    run = tmp_path / "run"
    data = write_run(run, str(run / "tokenizer.json"), CHARS, steps=(0,))
    (run / "token_ids.json").write_text('{"eos_token_id": 1}')
    bare = write_beside(tmp_path / "bare")
    said = list[str]()
    asked = override(Config(data=data), {"data.tokenizer": str(bare)}).data
    assert with_own_tokenizer(asked, run, said.append) == data and said == []
    keep_tokenizer(load_tokenizer(bare), run)
    assert names(run) == {"token_ids.json"}
    given = write_beside(
        tmp_path / "given",
        chat_template_jinja="{{ messages }}",
        tokenizer_config_json='{"eos_token": "a"}',
    )
    asked = override(Config(data=data), {"data.tokenizer": str(given)}).data
    assert with_own_tokenizer(asked, run, said.append) == asked
    assert said == [
        f"data.tokenizer={given}: the chat templates and special tokens beside it are taken in "
        "place of those that "
        "were imported"
    ]
    keep_tokenizer(load_tokenizer(given), run)
    assert names(run) == {"chat_template.jinja", "tokenizer_config.json"}
    assert with_own_tokenizer(asked, run, said.append) == data and len(said) == 1, (
        "they are the run's now"
    )


def test_a_run_that_has_trained_keeps_its_template_and_says_so(tmp_path: Path) -> None:
    given = write_beside(tmp_path / "given", chat_template_jinja="new", tokenizer_config_json="{}")
    run = tmp_path / "run"
    said = list[str]()
    data = write_run(run, str(given), CHARS)
    (run / "chat_template.jinja").write_text("old")
    assert with_own_tokenizer(data, run, said.append).tokenizer == str(run / "tokenizer.json")
    assert said == [
        f"data.tokenizer={given}: the chat templates beside it are not those of this run, whose "
        "own are used"
    ]
    keep_tokenizer(load_tokenizer(given), run)
    assert (run / "chat_template.jinja").read_text() == "old"
    given.with_name("chat_template.jinja").write_text("old")
    with_own_tokenizer(data, run, said.append)
    given.with_name("tokenizer_config.json").write_text(
        '{"chat_template": "unused", "eos_token": "b"}'
    )
    with_own_tokenizer(data, run, said.append)
    assert [line.partition("the ")[2].split(" beside")[0] for line in said] == [
        "chat templates",
        "special tokens",
    ]


@pytest.mark.parametrize("later", ["bare", "bytes", "alone"])
def test_a_run_that_died_before_its_first_save_keeps_nothing_of_another_tokenizer(
    later: str, tmp_path: Path
) -> None:
    """A file of another folder, one of the kinds that are no file, and a file of another name."""
    run = tmp_path / "run"
    write_run(run, "chars", CHARS, steps=())
    declared = {"tokenizer_config_json": "{}", "generation_config_json": '{"eos_token_id": 2}'}
    first = write_beside(
        tmp_path / "first", **declared, config_json='{"eos_token_id": 2}', merges_txt="a b"
    )
    (tmp_path / "first/chat_templates").mkdir()
    (tmp_path / "first/chat_templates/rag.jinja").write_text("{{ messages }}")
    keep_tokenizer(load_tokenizer(first), run)
    assert (run / "chat_templates/rag.jinja").exists()
    assert names(run) >= {
        "tokenizer_config.json",
        "generation_config.json",
        "token_ids.json",
        "merges.txt",
    }
    file = write_beside(tmp_path / "second")
    if later == "alone":
        file = file.rename(file.with_name("mine.json"))
    keep_tokenizer(BytesTokenizer() if later == "bytes" else load_tokenizer(file), run)
    assert names(run) == {"chat_templates"} and not any((run / "chat_templates").iterdir())
    assert read_special_tokens(run / "tokenizer.json").ends == ()


def test_the_template_beside_a_tokenizer_of_ours_is_kept(tmp_path: Path) -> None:
    write_run(tmp_path / "run", "chars", CHARS, steps=())
    keep_tokenizer(
        load_tokenizer(write_beside(tmp_path / "given", chat_template_jinja="mine")),
        tmp_path / "run",
    )
    assert (tmp_path / "run/chat_template.jinja").read_text() == "mine"


def test_a_run_on_token_files_has_the_tokenizer_that_they_bring(tmp_path: Path) -> None:
    """The default of `data.tokenizer` names none there."""
    data = write_run(tmp_path / "run", "bytes", CHARS)
    said = list[str]()
    tokens = override(Config(data=data), {"data.source": "tokens"}).data
    assert with_own_tokenizer(tokens, tmp_path / "run", said.append).tokenizer == str(
        tmp_path / "run/tokenizer.json"
    )
    assert said == []
    other = tmp_path / "other.json"
    other.write_text('{"tokenizer": "bytes"}')
    with pytest.raises(UserError, match=r"data\.tokenizer=.*other\.json is not"):
        with_own_tokenizer(
            override(Config(data=tokens), {"data.tokenizer": str(other)}).data, tmp_path / "run"
        )


class Read(Exception):
    """Stops a command where it reads its data; has the tokenizer that they are read with."""


@pytest.mark.parametrize("which", ["eval", "train.run", "jaxpar train"])
def test_data_are_read_with_the_runs_own(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(CHARS | {"chars": "bca"}))
    data = write_run(tmp_path / "run", str(file), CHARS)
    config = override(Config(data=data), {"mesh.platform": "cpu", "mesh.data": 8})
    call = {
        "eval": lambda: evaluate.evaluate_folder(config, tmp_path / "run"),
        "train.run": lambda: loop.run(config, tmp_path / "run"),
        "jaxpar train": lambda: local.train_config(config, tmp_path / "run"),
    }[which]

    def read(data: DataConfig, vocab_size: int) -> None:
        raise Read(data.tokenizer)

    monkeypatch.setattr(run_data, "load_corpus", read)
    with pytest.raises(Read, match=str(tmp_path / "run/tokenizer.json")):
        call()


MODEL = ModelConfig(
    family="llama", vocab_size=260, layers=1, embed=16, heads=2, mlp=16, max_seq_len=4096
)


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    """A model with a byte-level tokenizer: <s> 0, put before a text, </s> 1, <pad> 2, <turn> 3."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path / "hf"
    special = ["<s>", "</s>", "<pad>", "<turn>"]
    model = Model(MODEL)
    export_hf(
        jax.jit(model.init)(jax.random.key(7)),
        model,
        folder,
    )
    words = [*special, *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=[],
        )
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(special)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    made.save(str(folder / "tokenizer.json"))
    return folder


DECLARED: dict[str, dict[str, dict[str, Any]]] = {
    "config.json alone": {"config": {"bos_token_id": 0, "eos_token_id": 3, "pad_token_id": 2}},
    "lists, and both files": {
        "config": {"bos_token_id": 0, "eos_token_id": [1, 3]},
        "generation_config": {"eos_token_id": [3, 1, 2], "pad_token_id": 2, "temperature": 0.6},
        "tokenizer_config": {"bos_token": {"content": "<s>"}, "eos_token": "</s>"},
        "special_tokens_map": {"eos_token": "</s>"},
        "added_tokens": {"<turn>": 3},
    },
}


@pytest.mark.parametrize("declared", DECLARED)
def test_what_a_folder_declares_comes_in_and_out_again(
    declared: str, hf_folder: Path, tmp_path: Path
) -> None:
    files = DECLARED[declared]
    sizes = json.loads((hf_folder / "config.json").read_text())
    for name, content in files.items():
        if name == "config":
            whole = {**sizes, **content}
        else:
            whole = content
        (hf_folder / f"{name}.json").write_text(json.dumps(whole))
    (hf_folder / "chat_template.jinja").write_text("{{ messages }}")
    config = override(config_of(hf_folder, tmp_path / "run"), {"mesh.platform": "cpu"})
    import_run(config, hf_folder, tmp_path / "run")
    export_run(config, tmp_path / "run", tmp_path / "out", 0, "float32")
    folders = [hf_folder, tmp_path / "run", tmp_path / "out"]
    ends = [set(read_special_tokens(folder / "tokenizer.json").ends) for folder in folders]
    assert ends[0] and ends == [ends[0]] * 3
    prompts = [
        encode_prompt("hi", load_tokenizer(folder / "tokenizer.json")).tolist()
        for folder in folders
    ]
    assert len(prompts[0]) == 3 and prompts == [prompts[0]] * 3
    exported = {
        file.stem: json.loads(file.read_text()) for file in (tmp_path / "out").glob("*.json")
    }
    for name, content in files.items():
        assert {key: exported[name][key] for key in content} == content
    assert (
        exported["generation_config"]["eos_token_id"]
        == files.get("generation_config", files["config"])["eos_token_id"]
    )
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages }}"
    assert not (tmp_path / "out/token_ids.json").exists()


@pytest.mark.parametrize(
    ("bos", "add_bos", "count"),
    [
        ("auto", None, 3),
        (True, None, 3),
        (False, None, 2),
        ("auto", False, 2),
        (True, False, 3),
    ],
)
def test_an_export_begins_a_prompt_as_the_run_does(
    bos: Bos, add_bos: bool | None, count: int, hf_folder: Path, tmp_path: Path
) -> None:
    """And its config.json has the ids of a tokenizer that came without one."""
    (hf_folder / "config.json").unlink()
    if add_bos is not None:
        (hf_folder / "tokenizer_config.json").write_text(
            json.dumps({"add_bos_token": add_bos, "bos_token": "<s>"})
        )
    (tmp_path / "out").mkdir()
    ids = exported_ids(hf_folder, bos)
    assert ids == ({"bos_token_id": 0, "eos_token_id": 1} if count == 3 else {"eos_token_id": 1})
    export_tokenizer(hf_folder, tmp_path / "out", DataConfig(bos=bos))
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == 1
    run = load_tokenizer(hf_folder / "tokenizer.json", bos=bos)
    out = load_tokenizer(tmp_path / "out/tokenizer.json")
    assert len(encode_prompt("hi", run)) == len(encode_prompt("hi", out)) == count
    import tokenizers  # what transformers 5 reads is the file itself

    assert (
        len(tokenizers.Tokenizer.from_file(str(tmp_path / "out/tokenizer.json")).encode("hi").ids)
        == count
    )


TURNS = "{% for m in messages %}{{ m.content }}{{ '' if open else 'c' }}{% endfor %}"
ENDS: dict[str, tuple[dict[str, Any], dict[str, str], Any]] = {
    # Changes of the data of a run on chats, the files beside its tokenizer, and eos_token_id of its
    # export.
    "there is none": ({}, {}, 2),
    "there is one": (
        {},
        {"generation_config_json": '{"_from_model_config": true, "eos_token_id": 0}'},
        [0, 2],
    ),
    "there are several": ({}, {"generation_config_json": '{"eos_token_id": [1, 0]}'}, [1, 0, 2]),
    "it is one of them": ({}, {"generation_config_json": '{"eos_token_id": [2, 1]}'}, [2, 1]),
    "no chats": ({"data.source": "text"}, {"generation_config_json": '{"eos_token_id": 0}'}, 0),
    "nothing closes a turn": (
        {"data.template_args": ["open=true"]},
        {"token_ids_json": '{"eos_token_id": 1}'},
        1,
    ),
    "another template": (
        {"data.template_args": ["chat_template=b"]},
        {
            "tokenizer_config_json": json.dumps(
                {"chat_template": {"a": TURNS, "b": TURNS.replace("'c'", "'b'")}}
            )
        },
        1,
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_an_export_ends_where_a_run_on_chats_has_learned_to(case: str, tmp_path: Path) -> None:
    changes, files, ends = ENDS[case]
    if "tokenizer_config_json" in files:
        template = {}
    else:
        template = {"chat_template_jinja": TURNS}
    write_beside(tmp_path / "run", **files, **template)
    (tmp_path / "out").mkdir()
    config = override(Config(), {"data.source": "chat", **changes})
    export_tokenizer(tmp_path / "run", tmp_path / "out", config.data)
    written = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert written["eos_token_id"] == ends
    assert ("_from_model_config" in written) == (case == "nothing closes a turn"), (
        "then config.json has the same"
    )


def test_an_import_has_the_settings_of_a_fine_tuning(hf_folder: Path, tmp_path: Path) -> None:
    config = config_of(hf_folder, tmp_path / "run")
    train = config.train
    assert (train.learning_rate, train.min_learning_rate_ratio) == (2e-5, 0.0)
    assert config.optimizer.weight_decay == 0.0
    assert train.warmup_steps == 30 and config.data.seq_len == 4096
    assert (config.precision.compute, config.precision.params) == ("float32", "float32")
    assert config_of(hf_folder, tmp_path / "run", lora=True).train.learning_rate == 2e-4
    file = hf_folder / "config.json"
    sizes = json.loads(file.read_text())
    file.write_text(json.dumps({**sizes, "dtype": "bfloat16", "max_position_embeddings": 131072}))
    config = config_of(hf_folder, tmp_path / "run")
    assert config.precision.compute == "bfloat16" and config.data.seq_len == 8192
