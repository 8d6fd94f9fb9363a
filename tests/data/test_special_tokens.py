"""What a tokenizer's folder declares decides which ids begin and end its texts, in shapes of real folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxpar.data.chat import ChatTemplate
from jaxpar.data.end_of_turn import end_of_turn
from jaxpar.data.special_tokens import read_special_tokens
from jaxpar.data.tokenizer import HFTokenizer, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")
DEEPSEEK_BEGIN, DEEPSEEK = (f"<\uff5c{word}\u2581of\u2581sentence\uff5c>" for word in ("begin", "end"))


def write_folder(
    folder: Path, special: Sequence[str], plain: Sequence[str] = (), begins: str = "", **files: dict[str, Any]
) -> Path:
    """Write a byte-level tokenizer.json, which puts `begins` before a text, with JSON files beside it."""
    folder.mkdir(parents=True)
    words = [*special, *plain, *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(list(special))
    made.add_tokens([tokenizers.AddedToken(word, special=False) for word in plain])
    if begins:
        place = [(begins, special.index(begins))]
        made.post_processor = tokenizers.processors.TemplateProcessing(single=f"{begins} $A", special_tokens=place)
    made.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def open_folder(folder: Path, vocab_size: int = 0, **more: Any) -> HFTokenizer:
    found = load_tokenizer(folder / "tokenizer.json", vocab_size, **more)
    assert isinstance(found, HFTokenizer)
    return found


def added(content: str) -> dict[str, Any]:
    return {"__type": "AddedToken", "content": content, "lstrip": False, "normalized": False, "single_word": False}


LLAMA3 = [f"<|{name}|>" for name in ("begin_of_text", "end_of_text", "start_header", "end_header", "eom_id", "eot_id")]
SHAPES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    # What write_folder takes; the token that closes a document; those that end what is generated.
    "gemma": (
        {"special": ["<pad>", "<eos>", "<bos>"], "plain": ["<s>", "</s>"], "begins": "<bos>",
         "tokenizer_config": {"add_bos_token": True, "bos_token": added("<bos>"), "eos_token": added("<eos>")},
         "config": {"eos_token_id": 1, "bos_token_id": 2}},
        "<eos>", ["<eos>"],
    ),
    "gemma 3, tuned on chats": (
        {"special": ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"], "plain": ["</s>"],
         "tokenizer_config": {"eos_token": "<eos>", "bos_token": "<bos>", "added_tokens_decoder": {}},
         "special_tokens_map": {"eos_token": "<pad>"},
         "config": {"text_config": {"eos_token_id": [1, 4]}}},
        "<eos>", ["<eos>", "<end_of_turn>"],
    ),
    "llama 3, tuned on chats": (
        {"special": LLAMA3, "begins": "<|begin_of_text|>",
         "tokenizer_config": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
         "generation_config": {"eos_token_id": [1, 4, 5]}, "config": {"eos_token_id": 1}},
        "<|eot_id|>", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    ),
    "llama 3, numbers only": (
        {"special": LLAMA3, "config": {"eos_token_id": [5, 1]}},
        "<|eot_id|>", ["<|eot_id|>", "<|end_of_text|>"],
    ),
    "qwen": (
        {"special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
         "tokenizer_config": {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False},
         "generation_config": {"eos_token_id": [2, 0]}, "config": {"bos_token_id": 0, "eos_token_id": 2}},
        "<|im_end|>", ["<|im_end|>", "<|endoftext|>"],
    ),
    "mistral, by its map": (
        {"special": ["<unk>", "<s>", "</s>"], "begins": "<s>",
         "special_tokens_map": {"bos_token": {"content": "<s>"}, "eos_token": {"content": "</s>"}}},
        "</s>", [],
    ),
    "deepseek's distilled models": (
        {"special": [DEEPSEEK_BEGIN, DEEPSEEK, "<|endoftext|>"],
         "tokenizer_config": {"add_bos_token": True, "bos_token": added(DEEPSEEK_BEGIN),
                              "eos_token": added(DEEPSEEK)}},
        DEEPSEEK, [],
    ),
    "an id beyond the vocabulary": (
        {"special": ["<a>", "<b>"], "generation_config": {"eos_token_id": [9999, -1, True, "1", None, 1]}},
        "<b>", ["<b>"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_a_document_ends_as_the_folder_declares(shape: str, tmp_path: Path) -> None:
    files, end, stops = SHAPES[shape]
    folder = write_folder(tmp_path / "hf", **files)
    found = open_folder(folder)
    assert found.inner.id_to_token(found.end_of_text or 0) == end
    assert found.notes == ()
    declared = read_special_tokens(folder / "tokenizer.json").ends
    assert [found.inner.id_to_token(id) for id in declared if 0 <= id < found.vocab_size] == stops


@pytest.mark.parametrize("shape", [name for name in SHAPES if "tokenizer_config" in SHAPES[name][0]])
def test_the_end_is_that_of_transformers(shape: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="NOT compared with transformers: install extra parity")
    folder = write_folder(tmp_path / "hf", **SHAPES[shape][0])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert open_folder(folder).end_of_text == theirs.eos_token_id


def test_alone_a_special_token_is_guessed_and_said_and_never_a_word(tmp_path: Path) -> None:
    found = open_folder(write_folder(tmp_path / "gemma", ["<pad>", "<eos>"], ["</s>", "<|endoftext|>"]))
    assert found.end_of_text == 1
    (note,) = found.notes
    assert "no file beside it says what ends a text; its special token '<eos>' (id 1) is taken" in note
    found = open_folder(write_folder(tmp_path / "words", ["<pad>"], ["</s>", "<eos>"]))
    assert found.end_of_text is None
    assert "documents are not closed" in found.notes[0]


def test_what_the_model_lacks_is_not_used_and_said(tmp_path: Path) -> None:
    config = {"eos_token": "<|gone|>"}
    folder = write_folder(tmp_path / "hf", ["</s>", "<eos>"], tokenizer_config=config, config={"eos_token_id": 1})
    found = open_folder(folder)
    assert found.end_of_text == 1
    (note,) = found.notes
    assert note == f"{folder}/tokenizer.json: its eos_token '<|gone|>' is no token of the model, and is not used"
    # A special token that the tokenizer has and the model does not, as Gemma 3's for images.
    made = open_folder(folder).inner
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
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '' if loop.last else '<|im_end|>' }}{% endfor %}",
        "<|im_end|>",
    ),
    "the next speaker": ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}", "<|user|>"),
    "a word, which any text may have": ("{% for m in messages %}{{ m.role }}: {{ m.content }} END {% endfor %}", None),
    "it refuses an answer": (
        "{% if messages[1] %}{{ raise_exception('no answers') }}{% endif %}{{ messages[0].content }}",
        None,
    ),
}


@pytest.mark.parametrize("shape", TURNS)
def test_the_end_of_a_turn_is_found_in_the_template(shape: str, tmp_path: Path) -> None:
    text, end = TURNS[shape]
    folder = write_folder(tmp_path / "hf", ["</s>", "<|im_start|>", "<|im_end|>", "<|user|>"], ["<|im"])
    template = ChatTemplate(text, {"eos_token": "</s>"}, "template")
    found = end_of_turn(template, open_folder(folder))
    assert (None if found is None else open_folder(folder).inner.id_to_token(found)) == end
