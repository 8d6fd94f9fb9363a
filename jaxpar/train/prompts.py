"""Prompts as people write them: read from files, written by a chat template, turned into token ids, and text back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxpar.base.errors import UserError, parse_json
from jaxpar.data.chat import Message, find_template, load_template, render
from jaxpar.data.end_of_turn import end_of_turn
from jaxpar.data.special_tokens import TOKENIZER, read_special_tokens
from jaxpar.data.tokenizer import Tokenizer, encode_prompt, read_text
from jaxpar.models import peft
from jaxpar.train.trained import Trained, require_tokenizer

Given = str | list[Message]
"""A text, or the messages of a conversation."""


class Prompt(NamedTuple):
    """A prompt as the model sees it: its text, and its token ids."""

    text: str
    ids: list[int]


def read_prompts(file: Path) -> list[Given]:
    """Read one prompt a line; in a .jsonl file each line is an object with `prompt` or `messages`. A UserError says
    that the file cannot be read or has no prompt, or that a line is not such an object."""
    lines = [(number, line) for number, line in enumerate(read_text(file).split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"{file} has no prompt in it: it has one a line")
    if file.suffix != ".jsonl":
        return [line.removesuffix("\r") for _, line in lines]
    found: list[Given] = []
    for number, line in lines:
        value = parse_json(line, f"{file} line {number}")
        given = value.get("prompt", value.get("messages")) if isinstance(value, dict) else None
        talk = isinstance(given, list) and bool(given) and all(isinstance(turn, dict) for turn in given)
        if not isinstance(given, str | list) or (isinstance(given, list) and not talk):
            raise UserError(f'{file} line {number} has neither "prompt", a text, nor "messages", a list of objects')
        found.append(given)  # pyright: ignore[reportArgumentType]
    return found


def encode_prompts(trained: Trained, given: Sequence[Given], chat: bool) -> list[Prompt]:
    """Turn prompts into token ids. `chat` takes a text as the user's message.

    Messages are written by the folder's chat template, and any other text is encoded with special tokens. A UserError
    says that there is no tokenizer or no chat template, or that a prompt is empty.
    """
    found: list[Prompt] = []
    for number, prompt in enumerate(given, 1):
        messages = [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt
        text = messages
        if not isinstance(text, str):
            text = render(text, load_template(trained.folder / TOKENIZER), add_generation_prompt=True)
        ids = encode_text(trained, text, special=isinstance(messages, str))
        if not text:
            raise UserError(f"prompt {number} is empty: give at least one character")
        found.append(Prompt(text, ids))
    return found


def encode_text(trained: Trained, text: str, special: bool) -> list[int]:
    """Turn a text into token ids.

    With `special` it begins as a document in training does: with the begin of text where the tokenizer of a Hugging
    Face folder says so, or `data.bos` of a run. A text that is written with it does not get another. A UserError says
    that there is no tokenizer, that it does not know a character, or that the text is not Unicode.
    """
    tokenizer = require_tokenizer(trained)
    try:
        text.encode()
    except UnicodeError as error:  # half of a surrogate pair, from JSON or from a terminal that is not UTF-8
        raise UserError(f"a prompt is not Unicode text: {error}") from error
    ids = encode_prompt(text, tokenizer) if special else tokenizer.encode(text)
    return ids.tolist()


def stop_ids(trained: Trained, chat: bool) -> list[int]:
    """Return the ids that end a text: the tokenizer's end of text, those that the folder's files declare, and for a
    `chat` the token with which the template, if there is one, closes a turn.

    Raises:
      UserError: there is no tokenizer, or one of the files cannot be read.
    """
    tokenizer, file = require_tokenizer(trained), trained.folder / TOKENIZER
    found = {tokenizer.end_of_text, *read_special_tokens(file).ends}
    if peft.is_adapter(trained.folder):  # one that has a tokenizer of its own, beside none of the model's files
        found.update(read_special_tokens(peft.base_folder(trained.folder) / TOKENIZER).ends)
    if chat and (template := find_template(file)):
        found.add(end_of_turn(template, tokenizer))
    return sorted(id for id in found if id is not None and 0 <= id < trained.config.model.vocab_size)


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], new: Sequence[int], ended: bool = True) -> str:
    """Return the text of new tokens as it follows the prompt; unless it has ended, without a half character at its end,
    or half of a line end.

    The prompt is decoded along, because a tokenizer may write the first token of a text otherwise than a later one.
    """
    before, text = tokenizer.decode(list(prompt)), tokenizer.decode([*prompt, *new])
    text = text[len(before) :] if text.startswith(before) else tokenizer.decode(list(new))
    return text if ended else text.rstrip("\ufffd\r")
