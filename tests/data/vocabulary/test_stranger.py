"""A tokenizer.json that the package loads, and fails in or panics over: a line, whatever is asked of
it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from limits import cost_of
from tokenizer_kinds import KINDS, make_kinds, use_tokenizer

from jaxpar.base.errors import UserError
from jaxpar.cli.main import main
from jaxpar.data.vocabulary.stranger import asking
from jaxpar.data.vocabulary.tokenizer import load_tokenizer

pytest.importorskip("tokenizers")
MIB = 2**20


def written(folder: Path, **parts: Any) -> Path:
    """A tokenizer of words, with some parts of its own."""
    words = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    keys = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    whole = {"version": "1.0", **dict.fromkeys(keys), "added_tokens": [], "model": words, **parts}
    file = folder / "stranger.json"
    file.write_text(json.dumps(whole))
    return file


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(key: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", key: list(parts)}


def template(*pieces: str) -> dict[str, Any]:
    """A post-processor, of texts A and B and special tokens."""

    def piece(id: str) -> dict[str, Any]:
        return {"Sequence" if id in "AB" else "SpecialToken": {"id": id, "type_id": 0}}

    return {
        "type": "TemplateProcessing",
        "single": list(map(piece, pieces)),
        "pair": list(map(piece, "AB")),
        "special_tokens": {},
    }


def model(kind: str, **values: Any) -> dict[str, Any]:
    return {"model": {"type": kind, **values}}


BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
FAILS_IN_A_TEXT = {
    "words without unk": model("WordLevel", vocab={"a": 0}, unk_token="[UNK]"),
    "pieces without unk": model(
        "WordPiece",
        vocab={"a": 0},
        unk_token="[UNK]",
        continuing_subword_prefix="##",
        max_input_chars_per_word=9,
    ),
    "bpe without unk": model("BPE", vocab={"b": 0}, merges=[], unk_token="z"),
    "unigram without unk": model("Unigram", vocab=[["b", -1.0]], unk_id=None),
    "regex gives up": {"normalizer": replace("(a+)+$", "b", "Regex")},
    "chunks of nothing": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
}
FAILS_AT_LOAD = {
    "no such special token": {"post_processor": template("X")},
    "second text alone": {"post_processor": template("B")},
    "no table": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
}


@pytest.mark.parametrize("parts", FAILS_IN_A_TEXT.values(), ids=FAILS_IN_A_TEXT)
def test_what_fails_in_a_text_is_a_line_that_names_the_tokenizer(
    parts: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, **parts)
    (tmp_path / "text.txt").write_text("a" * 60 + "! zebra")
    words = ["tokenize", str(tmp_path / "text.txt"), str(tmp_path / "ids.bin")]
    assert main([*words, "--tokenizer", str(file)]) == 2
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("jaxpar:")]
    assert len(said) == 1
    assert f"tokenizers cannot encode '{'a' * 60}! zebra' with {file}: " in said[0]


@pytest.mark.parametrize("parts", FAILS_AT_LOAD.values(), ids=FAILS_AT_LOAD)
def test_what_panics_at_load_is_refused(parts: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizers cannot .* with .*stranger\.json"):
        load_tokenizer(written(tmp_path, **parts))


def test_what_fails_in_decoding_is_refused(tmp_path: Path) -> None:
    words = model("WordLevel", vocab={"a" * 60 + "!": 0, "[UNK]": 1}, unk_token="[UNK]")
    parts = words | {"decoder": replace("(a+)+$", "b", "Regex")}
    tokenizer = load_tokenizer(written(tmp_path, **parts))
    with pytest.raises(UserError, match=r"tokenizers cannot decode .*stranger\.json"):
        tokenizer.decode([0])


GROWING = {
    "doubled 40 times": ({"normalizer": sequence("normalizers", *[replace("z", "zz")] * 40)}, "z"),
    "doubled in nests": (
        {
            "normalizer": sequence(
                "normalizers", *[sequence("normalizers", replace("z", "zz"))] * 40
            )
        },
        "z",
    ),
    "doubled by a regex": (
        {"normalizer": sequence("normalizers", *[replace("z", "zz", "Regex")] * 40)},
        "z",
    ),
    "a long word": ({"normalizer": replace("z", "y" * 10**6)}, "z" * 10**4),
    "bytes of bytes": ({"normalizer": sequence("normalizers", *[{"type": "ByteLevel"}] * 40)}, "é"),
    "an older form": ({"normalizer": {"normalizers": [replace("z", "zz")] * 40}}, "z"),
}


@pytest.mark.parametrize(("parts", "text"), GROWING.values(), ids=GROWING)
def test_a_text_that_would_fill_the_memory_is_refused_before(
    parts: dict[str, Any], text: str, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(written(tmp_path, **parts))

    def use() -> None:
        with pytest.raises(UserError, match="characters of a text"):
            tokenizer.encode(text)

    assert cost_of(use).more < 512 * MIB


def test_ids_whose_text_would_fill_the_memory_are_refused_before(tmp_path: Path) -> None:
    parts = {"decoder": sequence("decoders", *[replace("a", "aa")] * 40)}
    tokenizer = load_tokenizer(written(tmp_path, **parts))

    def use() -> None:
        with pytest.raises(UserError, match="characters of a text"):
            tokenizer.decode([0])

    assert cost_of(use).more < 512 * MIB


REPEATS = {
    "bytes of bytes": {"pre_tokenizer": sequence("pretokenizers", *[BYTE_LEVEL] * 40)},
    "letters put between": {"normalizer": sequence("normalizers", *[replace("", "z")] * 40)},
    "a text twice": {"post_processor": template("A", "A")},
    "the letter that is tried": {"normalizer": sequence("normalizers", *[replace("a", "aa")] * 40)},
}


@pytest.mark.parametrize("parts", REPEATS.values(), ids=REPEATS)
def test_what_repeats_any_text_is_refused_at_load(parts: dict[str, Any], tmp_path: Path) -> None:
    file = written(tmp_path, **parts)
    with pytest.raises(UserError, match=r"stranger\.json"):
        load_tokenizer(file)


def test_words_for_white_space_may_be_long(tmp_path: Path) -> None:
    """By the product of its steps a text could become a million times as long, and it does not."""
    marks = [replace(" " * count, f"<|space{count}|>") for count in range(16, 1, -1)]
    steps = sequence("normalizers", {"type": "NFKC"}, *marks, replace("\n", "<|newline|>"))
    tokenizer = load_tokenizer(written(tmp_path, normalizer=steps))
    assert tokenizer.encode("   a\n" * 300).tolist() == [1]


def test_half_of_a_surrogate_pair_is_told_as_that(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not Unicode text"):
        load_tokenizer(written(tmp_path)).encode("\ud800")


@pytest.mark.parametrize("kind", KINDS)
def test_good_tokenizers_of_every_kind_do_all(kind: str, tmp_path: Path) -> None:
    make_kinds(tmp_path)
    use_tokenizer(tmp_path / kind / "tokenizer.json")


def test_what_ends_a_process_is_no_error_of_a_file() -> None:
    with pytest.raises(KeyboardInterrupt), asking("x.json", "load a tokenizer"):
        raise KeyboardInterrupt
