"""What a tokenizer's folder declares decides which ids begin and end its texts, in shapes of real
folders.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest

from jaxpar.base.config import RESOLVED, Config, DataConfig, parse
from jaxpar.base.errors import UserError
from jaxpar.base.toml import to_toml
from jaxpar.data.chat import load_examples
from jaxpar.data.chat.answers import ConversationWriter
from jaxpar.data.chat.end_of_turn import end_of_turn
from jaxpar.data.chat.template.files import ChatTemplate, load_template
from jaxpar.data.corpus import load_corpus
from jaxpar.data.documents.tokenized import Documents
from jaxpar.data.streams.token_files import tokenize
from jaxpar.data.streams.tokens import Tokens, read_windows
from jaxpar.data.vocabulary.special_tokens import read_special_tokens
from jaxpar.data.vocabulary.tokenizer import (
    HFTokenizer,
    encode_document,
    encode_prompt,
    load_tokenizer,
    make_tokenizer,
)

tokenizers = pytest.importorskip("tokenizers")
DEEPSEEK_BEGIN, DEEPSEEK = (
    f"<\uff5c{word}\u2581of\u2581sentence\uff5c>" for word in ("begin", "end")
)


def write_folder(
    folder: Path,
    special: Sequence[str],
    plain: Sequence[str] = (),
    begins: str = "",
    **files: dict[str, Any],
) -> Path:
    """Write a byte-level tokenizer.json, which puts `begins` before a text, with JSON files
    beside it.
    """
    folder.mkdir(parents=True)
    words = [*special, *plain, *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=[],
        )
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(list(special))
    made.add_tokens([tokenizers.AddedToken(word, special=False) for word in plain])
    if begins:
        place = [(begins, special.index(begins))]
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{begins} $A", special_tokens=place
        )
    made.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def open_folder(folder: Path, vocab_size: int = 0, **more: Any) -> HFTokenizer:
    found = load_tokenizer(folder / "tokenizer.json", vocab_size, **more)
    assert isinstance(found, HFTokenizer)
    return found


def added(content: str) -> dict[str, Any]:
    return {
        "__type": "AddedToken",
        "content": content,
        "lstrip": False,
        "normalized": False,
        "single_word": False,
    }


LLAMA3 = [
    f"<|{name}|>"
    for name in ("begin_of_text", "end_of_text", "start_header", "end_header", "eom_id", "eot_id")
]
SHAPES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    # What write_folder takes; the token that closes a document; those that end what is generated.
    "gemma": (
        {
            "special": ["<pad>", "<eos>", "<bos>"],
            "plain": ["<s>", "</s>"],
            "begins": "<bos>",
            "tokenizer_config": {
                "add_bos_token": True,
                "bos_token": added("<bos>"),
                "eos_token": added("<eos>"),
            },
            "config": {"eos_token_id": 1, "bos_token_id": 2},
        },
        "<eos>",
        ["<eos>"],
    ),
    "gemma 3, tuned on chats": (
        {
            "special": ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
            "plain": ["</s>"],
            "tokenizer_config": {
                "eos_token": "<eos>",
                "bos_token": "<bos>",
                "added_tokens_decoder": {},
            },
            "special_tokens_map": {"eos_token": "<pad>"},
            "config": {"text_config": {"eos_token_id": [1, 4]}},
        },
        "<eos>",
        ["<eos>", "<end_of_turn>"],
    ),
    "llama 3, tuned on chats": (
        {
            "special": LLAMA3,
            "begins": "<|begin_of_text|>",
            "tokenizer_config": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
            "generation_config": {"eos_token_id": [1, 4, 5]},
            "config": {"eos_token_id": 1},
        },
        "<|eot_id|>",
        ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    ),
    "llama 3, numbers only": (
        {"special": LLAMA3, "config": {"eos_token_id": [5, 1]}},
        "<|eot_id|>",
        ["<|eot_id|>", "<|end_of_text|>"],
    ),
    "qwen": (
        {
            "special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            "tokenizer_config": {
                "bos_token": None,
                "eos_token": "<|im_end|>",
                "add_bos_token": False,
            },
            "generation_config": {"eos_token_id": [2, 0]},
            "config": {"bos_token_id": 0, "eos_token_id": 2},
        },
        "<|im_end|>",
        ["<|im_end|>", "<|endoftext|>"],
    ),
    "mistral, by its map": (
        {
            "special": ["<unk>", "<s>", "</s>"],
            "begins": "<s>",
            "special_tokens_map": {
                "bos_token": {"content": "<s>"},
                "eos_token": {"content": "</s>"},
            },
        },
        "</s>",
        [],
    ),
    "deepseek's distilled models": (
        {
            "special": [DEEPSEEK_BEGIN, DEEPSEEK, "<|endoftext|>"],
            "begins": DEEPSEEK_BEGIN,
            "tokenizer_config": {
                "add_bos_token": True,
                "bos_token": added(DEEPSEEK_BEGIN),
                "eos_token": added(DEEPSEEK),
            },
        },
        DEEPSEEK,
        [],
    ),
    "an id beyond the vocabulary": (
        {
            "special": ["<a>", "<b>"],
            "generation_config": {"eos_token_id": [9999, -1, 1]},
        },
        "<b>",
        ["<b>"],
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_document_ends_as_the_folder_declares(shape: str, tmp_path: Path) -> None:
    files, end, stops = SHAPES[shape]
    folder = write_folder(tmp_path / "hf", **files)
    found = open_folder(folder)
    assert found.inner.id_to_token(found.end_of_text or 0) == end
    assert found.notes == ()
    declared = read_special_tokens(folder / "tokenizer.json").ends
    assert [found.inner.id_to_token(id) for id in declared if 0 <= id < found.vocab_size] == stops


@pytest.mark.parametrize(
    "shape", [name for name in SHAPES if "tokenizer_config" in SHAPES[name][0]]
)
def test_the_end_is_that_of_transformers(shape: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="NOT compared with transformers: install extra parity"
    )
    folder = write_folder(tmp_path / "hf", **SHAPES[shape][0])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert open_folder(folder).end_of_text == theirs.eos_token_id


def test_alone_a_special_token_is_guessed_and_said_and_never_a_word(tmp_path: Path) -> None:
    found = open_folder(
        write_folder(tmp_path / "gemma", ["<pad>", "<eos>"], ["</s>", "<|endoftext|>"])
    )
    assert found.end_of_text == 1
    (note,) = found.notes
    assert (
        "no file beside it says what ends a text; its special token '<eos>' (id 1) is taken" in note
    )
    found = open_folder(write_folder(tmp_path / "words", ["<pad>"], ["</s>", "<eos>"]))
    assert found.end_of_text is None
    assert "documents are not closed" in found.notes[0]


def test_what_the_model_lacks_is_not_used_and_said(tmp_path: Path) -> None:
    config = {"eos_token": "<|gone|>"}
    folder = write_folder(
        tmp_path / "hf", ["</s>", "<eos>"], tokenizer_config=config, config={"eos_token_id": 1}
    )
    found = open_folder(folder, vocab_size=258)
    assert found.end_of_text == 1
    assert found.notes[-1] == (
        f"{folder}/tokenizer.json: its eos_token '<|gone|>' is no token of the model, and is "
        "not used"
    )
    # A special token that the tokenizer has and the model does not, as Gemma 3's for images.
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens(["<|late|>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|late|>"}))
    assert open_folder(folder).end_of_text == made.token_to_id("<|late|>") == 258
    assert open_folder(folder, vocab_size=258).end_of_text == 1


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TURNS = {
    "chatml": (CHATML, "<|im_end|>"),
    "a line's end before it": (CHATML.replace("<|im_end|>", "\n<|im_end|>"), "<|im_end|>"),
    "stripped": (CHATML.replace("m.content", "m.content | trim"), "<|im_end|>"),
    "the eos token": (CHATML.replace("<|im_end|>", "{{ eos_token }}"), "</s>"),
    "nothing after the last turn": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '' if loop.last else "
        "'<|im_end|>' }}{% endfor %}",
        "<|im_end|>",
    ),
    "the next speaker": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}",
        "<|user|>",
    ),
    "a word, which any text may have": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }} END {% endfor %}",
        None,
    ),
    "contents in parts": (CHATML.replace("m.content", "m.content[0]['text']"), "<|im_end|>"),
    "parts of an assistant alone": (
        "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'user' %}{{ m.content "
        "}}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>{% endfor %}",
        "<|im_end|>",
    ),
    "by a name that it is given": (
        CHATML.replace("<|im_end|>", "{% if closed %}<|im_end|>{% endif %}"),
        "<|im_end|>",
    ),
    "it refuses an answer": (
        "{% if messages[1] %}{{ raise_exception('no answers') }}{% endif %}{{ "
        "messages[0].content }}",
        None,
    ),
}


@pytest.mark.parametrize("shape", TURNS)
def test_the_end_of_a_turn_is_found_in_the_template(shape: str, tmp_path: Path) -> None:
    text, end = TURNS[shape]
    folder = write_folder(
        tmp_path / "hf", ["</s>", "<|im_start|>", "<|im_end|>", "<|user|>"], ["<|im"]
    )
    template = ChatTemplate(text, {"eos_token": "</s>"}, "template")
    found = end_of_turn(ConversationWriter(template, {"closed": True}), open_folder(folder))
    assert (None if found is None else open_folder(folder).inner.id_to_token(found)) == end


# The begin of a text.


BEGINS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    # What write_folder takes; whether texts begin with <s> by themselves, and whether they can be
    # asked to.
    "the post-processor puts it": ({"special": ["</s>", "<s>"], "begins": "<s>"}, True, True),
    "and names it": (
        {
            "special": ["</s>", "<s>"],
            "begins": "<s>",
            "tokenizer_config": {"bos_token": added("<s>")},
        },
        True,
        True,
    ),
    "the config asks for it": (
        {
            "special": ["</s>", "<s>"],
            "tokenizer_config": {"bos_token": "<s>", "add_bos_token": True},
        },
        True,
        True,
    ),
    "the config forbids it": (
        {
            "special": ["</s>", "<s>"],
            "begins": "<s>",
            "tokenizer_config": {"bos_token": "<s>", "add_bos_token": False},
        },
        False,
        True,
    ),
    "it is named only": (
        {"special": ["</s>", "<s>"], "tokenizer_config": {"bos_token": "<s>"}},
        False,
        True,
    ),
    "its number is named only": (
        {"special": ["</s>", "<s>"], "config": {"bos_token_id": 1}},
        False,
        True,
    ),
    "there is none": ({"special": ["</s>", "<s>"]}, False, False),
}


@pytest.mark.parametrize("shape", BEGINS)
def test_a_text_begins_as_the_tokenizer_says_or_as_it_is_asked_to(
    shape: str, tmp_path: Path
) -> None:
    files, by_itself, on_request = BEGINS[shape]
    folder = write_folder(tmp_path / "hf", **files)
    assert open_folder(folder).begin_of_text == (1 if by_itself else None)
    assert open_folder(folder, bos=False).begin_of_text is None
    if on_request:
        assert open_folder(folder, bos=True).begin_of_text == 1
    else:
        with pytest.raises(
            UserError, match=r"data\.bos=true: no file beside .* names a bos_token that it has"
        ):
            open_folder(folder, bos=True)


@pytest.mark.parametrize("shape", BEGINS)
def test_a_config_that_its_post_processor_contradicts_is_told(shape: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", **BEGINS[shape][0])
    said = [note for note in open_folder(folder).notes if "what ends a text" not in note]
    contradicting = {
        "the config asks for it": ("with", "false"),
        "the config forbids it": ("without", "true"),
    }
    expected = [
        f"{folder}/tokenizer.json: texts begin {what} '<s>', as add_bos_token of "
        "tokenizer_config.json says; its "
        f"post-processor, which transformers 5 obeys, does otherwise, as data.bos={other} does"
        for name, (what, other) in contradicting.items()
        if name == shape
    ]
    assert said == expected
    assert not any("add_bos_token" in note for note in open_folder(folder, bos=False).notes)


@pytest.mark.parametrize("shape", BEGINS)
def test_a_prompt_has_the_ids_of_transformers(shape: str, tmp_path: Path) -> None:
    """Where its config and post-processor contradict each other, with the `data.bos` that the note
    names.
    """
    transformers = pytest.importorskip(
        "transformers", reason="NOT compared with transformers: install extra parity"
    )
    folder = write_folder(tmp_path / "hf", **BEGINS[shape][0])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    bos = {"the config asks for it": False, "the config forbids it": True}.get(shape, "auto")
    assert (
        encode_prompt("ab c", open_folder(folder, bos=bos)).tolist() == theirs("ab c")["input_ids"]
    )


def test_a_tokenizer_without_one_is_told() -> None:
    with pytest.raises(UserError, match=r"data\.bos=true: the tokenizer bytes"):
        make_tokenizer("bytes", bos=True)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A folder whose tokenizer puts <s>, id 1, before a text; </s>, id 0, ends it."""
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    return write_folder(tmp_path / "begun", ["</s>", "<s>"], begins="<s>", tokenizer_config=config)


def test_a_document_begins_once_and_ends(begun: Path) -> None:
    tokenizer = open_folder(begun)
    plain = tokenizer.encode("ab").tolist()
    assert encode_document("ab", tokenizer).tolist() == [1, *plain, 0]
    assert encode_document("<s>ab", tokenizer).tolist() == [1, *plain, 0]
    assert encode_prompt("<s>ab", tokenizer).tolist() == [1, *plain]
    assert encode_document("ab", open_folder(begun, bos=False)).tolist() == [*plain, 0]


@pytest.mark.parametrize("pack", [False, True])
def test_windows_begin_so_and_each_token_is_one_label(
    begun: Path, tmp_path: Path, pack: bool
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/1.txt").write_text("abcdefgh")
    (tmp_path / "texts/2.txt").write_text("ijk")
    data = DataConfig(
        "text",
        str(tmp_path / "texts"),
        val_fraction=0,
        tokenizer=str(begun / "tokenizer.json"),
        seq_len=4,
        pack=pack,
    )
    corpus = load_corpus(data, 300)
    assert isinstance(corpus.train, Tokens) and isinstance(corpus.tokenizer, HFTokenizer)
    stream = corpus.train.tokens.tolist()
    first, second = (corpus.tokenizer.encode(text).tolist() for text in ("abcdefgh", "ijk"))
    assert stream == [1, *first, 0, 1, *second, 0]
    windows = read_windows(
        corpus.train,
        np.array([0, 4, 8]),
        4,
        pack,
        300,
    )
    assert windows["tokens"].tolist() == [
        stream[0:4],
        [1, *stream[5:8]],
        [1, 0, 1, stream[11]],
    ]
    # All but the two that begin a text: the second of them, at 10, is label 2 of the last window.
    assert windows["labels"].tolist() == [
        stream[1:5],
        stream[5:9],
        [0, -1, *stream[11:13]],
    ]
    if pack:
        assert windows["segments"].tolist() == [
            [1, 1, 1, 1],
            [1, 1, 1, 1],
            [1, 1, 2, 2],
        ]


def test_rows_of_documents_begin_so(begun: Path) -> None:
    tokenizer = open_folder(begun)
    texts = ["abc", "de", "fghijk"]
    ids = [encode_document(text, tokenizer) for text in texts]
    source = grain.MapDataset.source(ids)
    documents = Documents(source, lambda found: found, "here", 3, ids[0], begin_of_text=1)
    data = DataConfig("hf", seq_len=5, prefetch=0)
    rows = list(documents.rows(data, 0, endless=False))
    a, d, f = (tokenizer.encode(text).tolist() for text in texts)
    assert rows[0]["tokens"].tolist() == [1, *a, 0] and rows[0]["labels"].tolist() == [*a, 0, -1]
    assert rows[1]["tokens"].tolist() == [1, d[1], 0, 1, f[0]] and rows[1]["labels"].tolist() == [
        d[1],
        0,
        -1,
        *f[:2],
    ]
    assert [row["tokens"][0] for row in rows] == [1] * len(rows)


def test_a_prompt_of_an_example_begins_so_and_does_not_count(begun: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "ab", "completion": "c"}, {"prompt": "<s>ab", "completion": "c"}]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DataConfig(
        "chat", str(tmp_path / "talks.jsonl"), tokenizer=str(begun / "tokenizer.json"), seq_len=8
    )
    (examples,), tokenizer = load_examples([data.path], data, 300)
    a, b, c = tokenizer.encode("abc").tolist()
    assert examples.ids.tolist() == [1, a, b, c] * 2
    assert examples.labels.tolist() == [-1, -1, c, 0] * 2


def test_a_token_file_brings_what_its_tokenizer_declares(begun: Path, tmp_path: Path) -> None:
    (begun / "config.json").write_text(json.dumps({"eos_token_id": [0, 7], "hidden_size": 4}))
    (begun / "chat_template.jinja").write_text("{{ eos_token }}")
    (tmp_path / "text.txt").write_text("abcdefgh")
    text = DataConfig("text", str(tmp_path / "text.txt"), tokenizer=str(begun / "tokenizer.json"))
    out = "out.bin"
    tokenize(text, tmp_path / out)
    data = DataConfig("tokens", str(tmp_path / out), seq_len=4, val_fraction=0)
    corpus = load_corpus(data, 300)
    assert isinstance(corpus.train, Tokens) and isinstance(corpus.tokenizer, HFTokenizer)
    assert (
        corpus.tokenizer.begin_of_text,
        corpus.tokenizer.end_of_text,
        corpus.tokenizer.notes,
    ) == (1, 0, ())
    assert corpus.train.tokens[[0, -1]].tolist() == [1, 0]
    assert corpus.train.begin_of_text == 1
    assert corpus.tokenizer.file is not None
    assert read_special_tokens(corpus.tokenizer.file).ends == (0, 7)
    assert load_template(corpus.tokenizer.file).text == "{{ eos_token }}"
    with pytest.raises(
        UserError, match=r"was written with id 1 before each document, .*set data\.bos=true, or"
    ):
        load_corpus(replace(data, bos=False), 300)
    tokenize(replace(text, bos=False), tmp_path / out)
    with pytest.raises(UserError, match=r"was written without .*data\.bos=false"):
        load_corpus(data, 300)
    found = load_corpus(replace(data, bos=False), 300).train
    assert isinstance(found, Tokens) and found.begin_of_text is None
    # An older version did not say how it wrote; its documents do.
    described = tmp_path / "out.bin.json"
    described.write_text(json.dumps({"dtype": "uint16", "tokens": found.size, "documents": 1}))
    with pytest.raises(UserError, match="was written without"):
        load_corpus(data, 300)


def test_a_token_file_that_is_written_again_has_what_its_new_tokenizer_declares_alone(
    begun: Path, tmp_path: Path
) -> None:
    (begun / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (begun / "chat_template.jinja").write_text("{{ eos_token }}")
    bare = tmp_path / "bare/tokenizer.json"
    bare.parent.mkdir()
    bare.write_bytes((begun / "tokenizer.json").read_bytes())
    (tmp_path / "text.txt").write_text("abcdefgh")
    text = DataConfig("text", str(tmp_path / "text.txt"), tokenizer=str(begun / "tokenizer.json"))
    tokenize(text, tmp_path / "out/a.bin")
    written = {file.name for file in (tmp_path / "out").iterdir()}
    tokenize(
        replace(text, tokenizer=str(tmp_path / "out/a.bin.tokenizer.json")), tmp_path / "out/a.bin"
    )
    assert {file.name for file in (tmp_path / "out").iterdir()} == written, (
        "those of the file itself stay"
    )
    for tokenizer in (str(bare), "bytes"):
        tokenize(replace(text, tokenizer=tokenizer), tmp_path / "out/a.bin")
        left = {file.name for file in (tmp_path / "out").iterdir()}
        assert left == {"a.bin", "a.bin.json", "a.bin.docs", "a.bin.tokenizer.json"}
    assert len(written) == 7


def test_a_run_that_was_made_before_there_was_the_key_goes_on_without(begun: Path) -> None:
    config = Config(data=DataConfig("text", "texts", tokenizer=str(begun / "tokenizer.json")))
    text = to_toml(config, RESOLVED)
    assert parse(text).data.bos == "auto"
    older = text.replace('bos = "auto"\n', "")
    assert older != text
    assert parse(older).data.bos is False
    assert parse(older.replace(RESOLVED, "Mine.")).data.bos == "auto"


def test_advice_on_the_vocabulary_counts_special_tokens_that_the_model_lacks(
    tmp_path: Path,
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a")
    made = tokenizers.Tokenizer(words)
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("a b c")
    data = DataConfig(
        source="text", path=str(tmp_path / "text.txt"), tokenizer=str(tmp_path / "tokenizer.json")
    )
    with pytest.raises(UserError, match=r"has 4 tokens, .*try model.vocab_size=4,"):
        load_corpus(data, 2)
