"""Tokens that stand beside a tokenizer.json and not in it are whole, as they are in
`transformers`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxpar.base.errors import UserError
from jaxpar.data.vocabulary.tokenizer import HFTokenizer, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")
TEXT = "<s>a</s> <|end|>b<|user|> [PAD]c"
FIRST = 258
"""The id of the first token that is added."""
PLACES: dict[str, dict[str, dict[str, Any]]] = {
    "the decoder": {"tokenizer_config": {"added_tokens_decoder": {"258": {"content": "<|end|>"}}}},
    "the decoder, special": {
        "tokenizer_config": {
            "added_tokens_decoder": {"258": {"content": "<|end|>", "special": True}}
        }
    },
    "added_tokens.json": {"added_tokens": {"<|end|>": 258}},
    "the map": {"special_tokens_map": {"eos_token": {"content": "<|end|>", "lstrip": False}}},
    "the map's list": {"special_tokens_map": {"additional_special_tokens": ["<|end|>"]}},
    "a name of the config": {"tokenizer_config": {"eos_token": "<|end|>"}},
    "a name of one model": {"tokenizer_config": {"turn_token": "<|end|>"}},
    "the config's list": {
        "tokenizer_config": {
            "additional_special_tokens": [{"__type": "AddedToken", "content": "<|end|>"}]
        }
    },
    "extra tokens by name": {"tokenizer_config": {"extra_special_tokens": {"turn": "<|end|>"}}},
}


def write(folder: Path, **files: dict[str, Any]) -> Path:
    """Write a tokenizer.json of bytes and of two special tokens, with JSON files beside it."""
    folder.mkdir(parents=True)
    words = ["<s>", "</s>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(words[:2])
    made.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def load(folder: Path, vocab_size: int = 0) -> HFTokenizer:
    found = load_tokenizer(folder / "tokenizer.json", vocab_size)
    assert isinstance(found, HFTokenizer)
    return found


def by_transformers(folder: Path) -> list[int]:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    return theirs(TEXT, add_special_tokens=False).input_ids


@pytest.mark.parametrize("place", PLACES)
def test_a_token_that_one_file_alone_declares_is_whole(place: str, tmp_path: Path) -> None:
    found = load(write(tmp_path / "hf", **PLACES[place]))
    assert FIRST in found.encode(TEXT)
    assert found.decode(found.encode(TEXT)) == TEXT
    assert found.vocab_size == FIRST + 1
    assert "'<|end|>' stand in" in found.notes[0]


@pytest.mark.parametrize("place", PLACES)
def test_the_ids_are_those_of_transformers(place: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", **PLACES[place])
    assert load(folder).encode(TEXT).tolist() == by_transformers(folder)


def test_several_files_give_ids_in_the_order_of_transformers(tmp_path: Path) -> None:
    names = {"pad_token": "[PAD]", "bos_token": "<s>"}
    tokens_map = {"additional_special_tokens": ["<|user|>"], **names}
    folder = write(
        tmp_path / "three", added_tokens={"<|end|>": FIRST}, special_tokens_map=tokens_map
    )
    found = load(folder)
    ids = [found.inner.token_to_id(token) for token in ("<|end|>", "[PAD]", "<|user|>")]
    assert ids == [FIRST, FIRST + 1, FIRST + 2]
    assert found.encode(TEXT).tolist() == by_transformers(folder)


def test_how_a_token_is_found_is_as_the_decoder_says(tmp_path: Path) -> None:
    decoder = {"1": {"content": "</s>", "lstrip": True, "special": True, "normalized": False}}
    folder = write(tmp_path / "hf", tokenizer_config={"added_tokens_decoder": decoder})
    found = load(folder)
    assert found.encode("a </s>").tolist() == [*found.encode("a"), 1]  # with the space before it
    assert found.encode(TEXT).tolist() == by_transformers(folder)


def test_beside_a_decoder_the_older_files_add_nothing_and_that_is_said(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "hf",
        tokenizer_config={"added_tokens_decoder": {}},
        added_tokens={"<|end|>": FIRST},
        special_tokens_map={"pad_token": "[PAD]"},
    )
    found = load(folder)
    assert found.vocab_size == FIRST
    assert "'<|end|>', '[PAD]' of added_tokens.json and special_tokens_map.json" in found.notes[0]
    assert found.encode(TEXT).tolist() == by_transformers(folder)


def test_an_id_that_a_new_token_cannot_get_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", added_tokens={"<|end|>": 300})
    with pytest.raises(
        UserError, match=r"added_tokens.json gives '<\|end\|>' the id 300, .* get 258"
    ):
        load(folder)


def test_another_id_of_a_known_token_is_said(tmp_path: Path) -> None:
    decoder = {"7": {"content": "</s>", "special": True}}
    folder = write(tmp_path / "hf", tokenizer_config={"added_tokens_decoder": decoder})
    found = load(folder)
    assert "gives '</s>' the id 7, and" in found.notes[0]
    assert found.encode(TEXT).tolist() == by_transformers(folder)


@pytest.mark.parametrize(
    "decoder", [[], {"x": {"content": "a"}}, {"1": "a"}, {"1": {"content": 3}}, {"-1": {}}]
)
def test_a_decoder_of_another_form_is_refused(decoder: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", tokenizer_config={"added_tokens_decoder": decoder})
    with pytest.raises(UserError, match="added_tokens_decoder has"):
        load(folder)


def test_what_the_model_has_no_row_for_does_not_count(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", special_tokens_map={"pad_token": "[PAD]"})
    found = load(folder, vocab_size=FIRST)
    assert found.vocab_size == FIRST
    with pytest.raises(UserError, match=r"\[PAD\]"):
        found.encode(TEXT)
    assert len(found.encode("plain"))


def test_a_copy_that_has_them_all_says_nothing(tmp_path: Path) -> None:
    source = load(write(tmp_path / "hf", **PLACES["added_tokens.json"]))
    folder = write(tmp_path / "copy", **PLACES["added_tokens.json"])
    (folder / "tokenizer.json").write_text(source.to_json(), encoding="utf-8")
    assert not any("stand in" in note for note in load(folder).notes)
    assert load(folder).to_json() == source.to_json()
