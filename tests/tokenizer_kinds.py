"""A tokenizer.json of Hugging Face of every kind, with all that may stand beside its model, and what
reads the whole of one.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

TEXT = (
    "Hello  world! upon a time, 3.5 caf\u00e9s \u4f60\u597d \U0001f600\n\ttab <s>x</s> ''q'' aaaa"
)

_BYTES = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
_PIECES = ("\u2581", "h", "e", "l", "o", "w", "r", "d", "\u2581hello", "\u2581world", "a", "t")
_ADDED: list[dict[str, Any]] = [
    {
        "id": place,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": place == 1,
        "normalized": False,
        "special": True,
    }
    for place, content in enumerate(("<unk>", "<s>", "</s>"))
]
_METASPACE = {
    "type": "Metaspace",
    "replacement": "\u2581",
    "prepend_scheme": "first",
    "split": True,
}
_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def _template(first: str, last: str) -> dict[str, Any]:
    begin, end = ({"SpecialToken": {"id": one, "type_id": 0}} for one in (first, last))
    text, other = ({"Sequence": {"id": one, "type_id": 0}} for one in ("A", "B"))
    return {
        "type": "TemplateProcessing",
        "single": [begin, text, end],
        "pair": [begin, text, end, other, end],
        "special_tokens": {
            one: {"id": one, "ids": [id], "tokens": [one]} for one, id in ((first, 1), (last, 2))
        },
    }


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _sequence(key: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", key: list(parts)}


_KINDS: dict[str, dict[str, Any]] = {
    "WordLevel": {
        "normalizer": _sequence(
            "normalizers",
            {"type": "NFD"},
            {"type": "Lowercase"},
            {"type": "StripAccents"},
            _replace({"Regex": " {2,}"}, " "),
            {"type": "Strip", "strip_left": True, "strip_right": True},
        ),
        "pre_tokenizer": _sequence(
            "pretokenizers",
            {"type": "Whitespace"},
            {"type": "Digits", "individual_digits": True},
        ),
        "post_processor": _template("<s>", "</s>"),
        "truncation": {
            "direction": "Right",
            "max_length": 512,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "padding": {
            "strategy": {"Fixed": 16},
            "direction": "Right",
            "pad_to_multiple_of": 8,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<unk>",
        },
        "model": {
            "type": "WordLevel",
            "vocab": {"<unk>": 0, "<s>": 1, "</s>": 2, "hello": 3, "world": 4, "!": 5},
            "unk_token": "<unk>",
        },
    },
    "WordPiece": {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "<unk>",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {"<unk>": 0, "<s>": 1, "</s>": 2, "h": 3, "##ello": 4, "world": 5, "##s": 6},
        },
    },
    "BPE of bytes": {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": _sequence(
            "pretokenizers",
            {
                "type": "Split",
                "pattern": {"Regex": "\\p{N}{1,3}|[^\\r\\n\\p{N}]+"},
                "behavior": "Isolated",
                "invert": False,
            },
            {**_BYTE_LEVEL, "use_regex": False},
        ),
        "post_processor": _sequence("processors", _BYTE_LEVEL, _template("<s>", "</s>")),
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {"<unk>": 0, "<s>": 1, "</s>": 2, "h": 3, "e": 4, "l": 5, "he": 6, "hel": 7},
            "merges": [["h", "e"], ["he", "l"]],
        },
    },
    "BPE of pieces": {
        "normalizer": _sequence(
            "normalizers",
            {"type": "Prepend", "prepend": "\u2581"},
            _replace({"String": " "}, "\u2581"),
        ),
        "post_processor": _template("<s>", "</s>"),
        "decoder": _sequence(
            "decoders",
            _replace({"String": "\u2581"}, " "),
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {
                "<unk>": 0,
                "<s>": 1,
                "</s>": 2,
                **_BYTES,
                "\u2581": 259,
                "a": 260,
                "aa": 261,
                "\u2581a": 262,
            },
            "merges": ["a a", "\u2581 a"],
        },
    },
    "Unigram": {
        "normalizer": _sequence(
            "normalizers",
            {"type": "Nmt"},
            {"type": "NFKC"},
            _replace({"Regex": " {2,}"}, "\u2581"),
        ),
        "pre_tokenizer": _METASPACE,
        "post_processor": {
            "type": "RobertaProcessing",
            "sep": ["</s>", 2],
            "cls": ["<s>", 1],
            "trim_offsets": True,
            "add_prefix_space": True,
        },
        "decoder": _METASPACE,
        "model": {
            "type": "Unigram",
            "unk_id": 0,
            "byte_fallback": False,
            "vocab": [
                ["<unk>", 0.0],
                ["<s>", 0.0],
                ["</s>", 0.0],
                *([piece, -1.0 - place] for place, piece in enumerate(_PIECES)),
            ],
        },
    },
}

KINDS = tuple(_KINDS)
_OTHERS: dict[str, tuple[Any, ...]] = {
    "normalizer": (
        _sequence("normalizers", *[_replace({"String": "a"}, "aa")] * 40),
        _sequence("normalizers", *[_replace({"Regex": "(?=a)|a"}, "aa")] * 40),
        _sequence("normalizers", *[{"type": "ByteLevel"}] * 40),
        _replace({"Regex": "(a+)+$"}, "b"),
        _replace({"String": ""}, "b"),
        {"type": "Prepend", "prepend": ""},
        {"type": "Precompiled", "precompiled_charsmap": ""},
    ),
    "pre_tokenizer": (
        _sequence("pretokenizers", *[_BYTE_LEVEL] * 40),
        {"type": "FixedLength", "length": 0},
        {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Removed", "invert": True},
        {"type": "CharDelimiterSplit", "delimiter": "a"},
    ),
    "post_processor": (
        _template("<s>", "X"),
        {**_template("<s>", "</s>"), "single": [{"Sequence": {"id": "B", "type_id": 0}}]},
        {**_template("<s>", "</s>"), "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 3},
        {**_template("<s>", "</s>"), "single": [], "special_tokens": {}},
        _sequence("processors", *[_template("<s>", "</s>")] * 3),
    ),
    "decoder": (
        _sequence("decoders", *[_replace({"String": "a"}, "aa")] * 40),
        _replace({"Regex": "(a+)+$"}, "b"),
        {"type": "Strip", "content": " ", "start": 2**40, "stop": 2**40},
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
        {"type": "BPEDecoder", "suffix": ""},
    ),
    "added_tokens": ([], [{**_ADDED[0], "content": ""}], [{**_ADDED[0], "id": 2**32 - 1}]),
    "truncation": (
        {"direction": "Left", "max_length": 0, "strategy": "OnlySecond", "stride": 0},
        {"direction": "Left", "max_length": 1, "strategy": "LongestFirst", "stride": 1},
    ),
}
"""Parts that the package loads, or panics over, and that no good file has."""
_UNKNOWN: tuple[tuple[str, Any], ...] = (("unk_token", "none"), ("unk_token", ""), ("unk_id", None))


def change_part(content: bytes, draw: random.Random) -> bytes:
    """Put a part of another kind into a tokenizer.json, or one that no good file has, or take its
    token of unknown text away.
    """
    whole = json.loads(content)
    for _ in range(draw.choice((1, 1, 2))):
        part = draw.choice((*_OTHERS, "model", "unknown", "unknown"))
        if part == "unknown":
            key, value = draw.choice(_UNKNOWN)
            whole["model"][key] = value
            whole["added_tokens"] = draw.choice((whole["added_tokens"], []))
            if isinstance(whole["model"]["vocab"], dict):
                whole["model"]["vocab"].pop("<unk>", None)
        else:
            others = [kind[part] for kind in _KINDS.values() if part in kind]
            whole[part] = draw.choice((*others, *_OTHERS.get(part, ()) * 2))
    return json.dumps(whole).encode()


def make_kinds(folder: Path) -> None:
    """Write a tokenizer.json of each kind into a folder of its name."""
    for name, parts in _KINDS.items():
        whole = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": _ADDED,
            "normalizer": None,
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": None,
            **parts,
        }
        place = folder / name / "tokenizer.json"
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps(whole))


def use_tokenizer(file: Path) -> None:
    """Load a tokenizer, and do with it all that the library does with one."""
    import numpy as np

    from jaxpar.data.chat.examples import _with_places
    from jaxpar.data.vocabulary.stranger import put_before
    from jaxpar.data.vocabulary.text_bytes import count_bytes, unknown_id
    from jaxpar.data.vocabulary.tokenizer import (
        HFTokenizer,
        encode_document,
        encode_prompt,
        load_tokenizer,
    )

    tokenizer = load_tokenizer(file)
    for text in (TEXT, "hello world", "a"):
        ids = encode_document(text, tokenizer)
        tokenizer.decode(ids)
        count_bytes(tokenizer, ids[:-1], ids[1:])
        encode_prompt(text, tokenizer)
        _with_places(text, tokenizer)
    some = np.arange(min(tokenizer.vocab_size + 2, 300), dtype=np.int32)
    tokenizer.decode(some)
    count_bytes(tokenizer, some[:-1], some[1:])
    unknown_id(tokenizer)
    tokenizer.to_json()
    if isinstance(tokenizer, HFTokenizer):
        put_before(tokenizer.inner, tokenizer.end_of_text)
