"""The tokens that the files beside a tokenizer.json add to it, as when `transformers` opens the
folder.

A token is whole only where the tokenizer knows it: what one of these files alone declares would be
split into bytes, so that no turn of a chat ever ended. They are read in this order:

    tokenizer_config.json     "added_tokens_decoder", a token by its id; where it stands, the two
                              files below say nothing of which tokens there are
    added_tokens.json         ids by their token
    special_tokens_map.json   named tokens, and additional ones
    tokenizer_config.json     the same
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxpar.base.errors import UserError, read_json, short
from jaxpar.data.vocabulary.special_tokens import (
    ADDED_TOKENS,
    TOKENIZER_CONFIG,
    TOKENS_MAP,
    beside,
)
from jaxpar.data.vocabulary.stranger import asking

if TYPE_CHECKING:
    import tokenizers  # from the hf extra

_DECODER = "added_tokens_decoder"
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_MORE = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
_SHOWN = 3
"""The number of tokens that a note names."""


class _Declared(NamedTuple):
    """A token that a file declares."""

    content: str
    file: str
    """The name of the file."""
    id: int | None = None
    """The id that the file gives it; None = none."""
    flags: Mapping[str, bool] = {}
    """The flags of how it is found in a text; what is missing is as the tokenizers package has
    it.
    """


def add_declared(inner: tokenizers.Tokenizer, tokenizer: Path) -> tuple[str, ...]:
    """Add to a tokenizer the tokens that the files beside its tokenizer.json declare.

    Args:
      inner: the tokenizer, which is changed.
      tokenizer: its file.

    Returns:
      Notes, a sentence each: which tokens were added, and what the files say in vain.

    Raises:
      UserError: a file cannot be read, or gives a token an id that it cannot have.
    """
    config = _read(beside(tokenizer, TOKENIZER_CONFIG))
    added = _read(beside(tokenizer, ADDED_TOKENS))
    tokens_map = _read(beside(tokenizer, TOKENS_MAP))
    older = [*_by_token(added, _special(config, tokens_map)), *_special(config, tokens_map)]
    if _DECODER in config:
        declared = [*_by_id(config, tokenizer), *_special(config)]
        ignored = older
    else:
        declared = older
        ignored = []
    declared = _each_once(declared)
    notes = [_disagreement(one, inner, tokenizer) for one in declared]
    put = [one for one in declared if _put(inner, one, tokenizer)]
    if put:
        files = " and ".join(dict.fromkeys(one.file for one in put))
        notes.append(
            f"{tokenizer}: {_in_words(put)} stand in {files} beside it and not in it, and are "
            "added, as transformers does"
        )
    known = inner.get_vocab()
    in_vain = [one for one in _each_once(ignored) if one.content not in known]
    if in_vain:
        files = " and ".join(dict.fromkeys(one.file for one in in_vain))
        notes.append(
            f"{tokenizer}: {_in_words(in_vain)} of {files} beside it are no tokens, as "
            f"{_DECODER} of {TOKENIZER_CONFIG} lacks them: add them there if they are meant"
        )
    return tuple(note for note in notes if note)


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _by_id(config: Mapping[str, Any], tokenizer: Path) -> list[_Declared]:
    """Read the tokens of `added_tokens_decoder`, by their ids: `{"7": {"content": "<|end|>"}}`;
    those that the config names are special.

    Raises:
      UserError: an entry is no token.
    """
    decoder = config[_DECODER]
    if not isinstance(decoder, dict):
        raise _no_decoder(tokenizer, decoder)
    named = {one.content for one in _named([config])}
    found = list[_Declared]()
    for key, token in decoder.items():
        id = int(key) if key.isascii() and key.isdigit() else None
        content = token.get("content") if isinstance(token, dict) else None
        if id is None or not isinstance(content, str):
            raise _no_decoder(tokenizer, {key: token})
        flags = _flags(token)
        if content in named:
            flags["special"] = True
        found.append(_Declared(content, TOKENIZER_CONFIG, id, flags))
    return sorted(found, key=lambda one: one.id or 0)


def _no_decoder(tokenizer: Path, found: object) -> UserError:
    return UserError(
        f"{beside(tokenizer, TOKENIZER_CONFIG)}: {_DECODER} has {short(found)}, and a token there "
        'is {"7": {"content": "<|end|>"}}: correct it, or leave it out'
    )


def _by_token(added: Mapping[str, Any], special: Iterable[_Declared]) -> list[_Declared]:
    """Read the tokens of added_tokens.json, `{"<|end|>": 7}`; they are special where another file
    says so.
    """
    names = {one.content for one in special}
    found = [
        _Declared(
            content,
            ADDED_TOKENS,
            id,
            {"special": content in names, "normalized": content not in names},
        )
        for content, id in added.items()
        if isinstance(id, int)
    ]
    return sorted(found, key=lambda one: one.id or 0)


def _special(
    config: Mapping[str, Any], tokens_map: Mapping[str, Any] | None = None
) -> list[_Declared]:
    """List the special tokens that the files declare without an id.

    Args:
      config: the content of tokenizer_config.json.
      tokens_map: the content of special_tokens_map.json, which comes before it.
    """
    files = [config] if tokens_map is None else [tokens_map, config]
    return [*_named(files), *_listed(files)]


def _named(files: Sequence[Mapping[str, Any]]) -> list[_Declared]:
    """List the tokens that files give names, each name by the first that has it."""
    values = dict[str, _Declared]()
    for file in files:
        name = TOKENIZER_CONFIG if file is files[-1] else TOKENS_MAP
        given = {key: value for key, value in file.items() if key.endswith("_token")}
        for key in _MORE:
            if isinstance(more := file.get(key), dict):
                given |= more
        for key, value in given.items():
            if (one := _declared(value, name)) is not None:
                values.setdefault(key, one)
    order = [*_NAMED, *(key for key in values if key not in _NAMED)]
    return [values[key] for key in order if key in values]


def _listed(files: Sequence[Mapping[str, Any]]) -> list[_Declared]:
    """List the special tokens that stand in lists, without names."""
    found = list[_Declared | None]()
    for file in files:
        name = TOKENIZER_CONFIG if file is files[-1] else TOKENS_MAP
        for key in _MORE:
            if isinstance(more := file.get(key), list):
                found += [_declared(value, name) for value in more]
    return [one for one in found if one is not None]


def _declared(value: Any, file: str) -> _Declared | None:
    """Read a special token of a file: its text, or an object that has it as `content`."""
    match value:
        case str() if value:
            return _Declared(value, file, flags={"special": True})
        case {"content": str(content)} if content:
            return _Declared(content, file, flags={**_flags(value), "special": True})
    return None


def _flags(token: Mapping[str, Any]) -> dict[str, bool]:
    return {flag: token[flag] for flag in _FLAGS if isinstance(token.get(flag), bool)}


def _each_once(declared: Iterable[_Declared]) -> list[_Declared]:
    """Keep each token once, as the first file that declares it does."""
    found = dict[str, _Declared]()
    for one in declared:
        found.setdefault(one.content, one)
    return list(found.values())


def _disagreement(declared: _Declared, inner: tokenizers.Tokenizer, tokenizer: Path) -> str:
    """Write the note on a token of tokenizer.json to which another file gives another id."""
    with asking(tokenizer, f"find {short(declared.content)}"):
        id = inner.token_to_id(declared.content)
    if id is None or declared.id in (None, id):
        return ""
    return (
        f"{beside(tokenizer, declared.file)} gives {declared.content!r} the id {declared.id}, and "
        f"{tokenizer} {id}, which is taken, as transformers does: are both of one folder?"
    )


def _put(inner: tokenizers.Tokenizer, declared: _Declared, tokenizer: Path) -> bool:
    """Add a token, or change how one is found in a text; return whether it is new.

    Raises:
      UserError: it would get another id than the file says.
    """
    import tokenizers

    with asking(tokenizer, f"add {short(declared.content)}"):
        before = inner.token_to_id(declared.content)
        known = None if before is None else inner.get_added_tokens_decoder().get(before)
        own = declared.file == TOKENIZER_CONFIG and declared.id is not None
        token = tokenizers.AddedToken(declared.content, **declared.flags)
        if known is None or (own and repr(token) != repr(known)):
            inner.add_tokens([token])
        id = inner.token_to_id(declared.content)
    if before is None and declared.id not in (None, id):
        raise UserError(
            f"{beside(tokenizer, declared.file)} gives {declared.content!r} the id {declared.id}, "
            f"and beside the tokens of {tokenizer}, which lacks it, it would get {id}: take both "
            "files from one folder"
        )
    return before is None


def _in_words(tokens: list[_Declared]) -> str:
    named = ", ".join(repr(one.content) for one in tokens[:_SHOWN])
    more = len(tokens) - _SHOWN
    return named + (f" and {more} more" if more > 0 else "")
