"""Prompts as people write them: read from files, written by a chat template, turned into token ids,
and new tokens turned back into text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.base.errors import UserError, parse_json
from jaxpar.data.chat.conversations import Conversation, read_conversation
from jaxpar.data.chat.end_of_turn import ends_of_turn
from jaxpar.data.chat.template.files import find_template
from jaxpar.data.rows import read_text
from jaxpar.data.vocabulary.special_tokens import TOKENIZER, read_special_tokens
from jaxpar.data.vocabulary.tokenizer import Tokenizer, encode_prompt
from jaxpar.train.generation.trained import Trained, require_tokenizer
from jaxpar.train.restore import adapters_of

Given = str | Conversation
"""A text, or a conversation with the other names that its template may read."""


class Prompt(NamedTuple):
    """A prompt as the model reads it: its text, and its token ids."""

    text: str
    ids: list[int]
    undefined: tuple[str, ...] = ()
    """The names that its chat template wrote and that nothing defines."""


def read_prompts(file: Path) -> list[Given]:
    """Read one prompt a line; in a .jsonl file each line is an object with `prompt`, a text, or
    with a conversation.

    Conversations have the forms of a training's (`conversations.read_conversation`). What is to be
    written is left out: a completion, or the answers with which messages end.

    Raises:
      UserError: the file cannot be read or has no prompt, or a line is not such an object or has
        answers alone.
    """
    all_lines = enumerate(read_text(file).split("\n"), 1)
    lines = [(number, line) for number, line in all_lines if line.strip()]
    if not lines:
        raise UserError(f"{file} has no prompt in it: it has one a line")
    if file.suffix != ".jsonl":
        return [line.removesuffix("\r") for _, line in lines]
    found: list[Given] = []
    for number, line in lines:
        value = parse_json(line, f"{file} line {number}")
        try:
            given = _read_prompt(value)
        except UserError as error:
            raise UserError(f"{file} line {number}: {error}") from error
        if given is None:
            raise UserError(
                f'{file} line {number} has neither "prompt", a text or messages, nor "messages" '
                'or "conversations", '
                "lists of objects"
            )
        found.append(given)
    return found


def _read_prompt(value: Any) -> Given | None:
    if not isinstance(value, dict):
        return None
    prompt = value.get("prompt")
    if isinstance(prompt, str):
        return prompt
    conversation = read_conversation(value)
    if conversation is None:
        return None
    return _without_answer(conversation)


def _without_answer(conversation: Conversation) -> Conversation:
    """Leave out a completion, or where there is none the assistant's turns at the end, so that the
    model writes new ones.
    """
    kept = conversation.messages
    if conversation.learned_from:
        kept = kept[: conversation.learned_from]
    else:
        while kept and kept[-1]["role"] == "assistant":
            kept = kept[:-1]
    if not kept:
        raise UserError("it has an answer, and nothing that is answered")
    return conversation._replace(messages=kept)


def encode_prompts(trained: Trained, given: Sequence[Given], chat: bool) -> list[Prompt]:
    """Turn prompts into token ids. `chat` takes a text as the user's message.

    Conversations are written by the folder's chat template, with its names of `data.template_args`,
    and any other text is encoded with special tokens. A UserError says that there is no tokenizer
    or no chat template, that the template refuses a conversation, or that a prompt is empty.
    """
    writer = cache(trained.writer)
    found: list[Prompt] = []
    for number, prompt in enumerate(given, 1):
        if chat and isinstance(prompt, str):
            talk = Conversation([{"role": "user", "content": prompt}], {})
        else:
            talk = prompt
        if isinstance(talk, str):
            made = Prompt(talk, encode_text(trained, talk, special=True))
        else:
            written = writer().prompt(talk)
            made = Prompt(
                written.text, encode_text(trained, written.text, special=False), written.undefined
            )
        if not made.text:
            raise UserError(f"prompt {number} is empty: give at least one character")
        found.append(made)
    return found


def encode_text(trained: Trained, text: str, special: bool) -> list[int]:
    """Turn a text into token ids.

    With `special` the ids begin as a document in training does: with the begin-of-text token where
    the tokenizer of a Hugging Face folder says so, or `data.bos` of a run. A text that is written
    with that token does not get another. A UserError says that there is no tokenizer, that it does
    not know a character, or that the text is not Unicode.
    """
    tokenizer = require_tokenizer(trained)
    try:
        text.encode()
    # half of a surrogate pair, from JSON or from a terminal that is not UTF-8
    except UnicodeError as error:
        raise UserError(f"a prompt is not Unicode text: {error}") from error
    if special:
        ids = encode_prompt(text, tokenizer)
    else:
        ids = tokenizer.encode(text)
    return ids.tolist()


def stop_ids(trained: Trained, chat: bool) -> list[int]:
    """Return the ids that end a text: the tokenizer's end of text, the ids that the folder's files
    declare, and for a `chat` the tokens with which the template closes a turn. The template is the
    one that `data.template_args` names, or the default, if there is one.

    Raises:
      UserError: there is no tokenizer, one of the files cannot be read, or `data.template_args`
        asks for a template that does not exist, or for a name that the template does not read.
    """
    tokenizer = require_tokenizer(trained)
    found = {tokenizer.end_of_text}
    # an adapter may have a tokenizer of its own, beside none of the model's files
    for folder in (trained.folder, *adapters_of(trained.folder)[1:]):
        found.update(read_special_tokens(folder / TOKENIZER).ends)
    if chat and (trained.config.data.template_args or find_template(trained.folder / TOKENIZER)):
        found.update(ends_of_turn(trained.writer(), tokenizer))
    return sorted(
        id for id in found if id is not None and 0 <= id < trained.config.model.vocab_size
    )


def continuation(
    tokenizer: Tokenizer, prompt: Sequence[int], new: Sequence[int], ended: bool = True
) -> str:
    """Decode new tokens as the text that follows the prompt; unless it has ended, without half a
    character at its end, or half a line end.

    The prompt is decoded too, because a tokenizer may decode the first token of a text in another
    way than a later one.
    """
    before = tokenizer.decode(list(prompt))
    text = tokenizer.decode([*prompt, *new])
    if text.startswith(before):
        text = text[len(before) :]
    else:
        text = tokenizer.decode(list(new))
    return text if ended else text.rstrip("\ufffd\r")
