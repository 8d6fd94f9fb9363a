"""Finds what of a conversation its chat template does not write: a thought, a call, the message of
a role.

Words that are long and stand in the text are written. All others are tried: the conversation is
written once more with ▮, a character that no text has, in their place. Where the text stays the
same, the template has not written them:

    message     {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    text        <bot>4</s>
    content     with ▮ it is <bot>▮</s>, so it is written
    reasoning   with ▮ it is <bot>4</s>, so it is not: "reasoning_content of assistant messages"
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxpar.base.errors import UserError
from jaxpar.data.chat.template.render import REASONING, Message
from jaxpar.data.chat.turns import STAND_IN, Write

_LONG = 16
"""So many characters do not stand in a text by chance."""
_CALL = "a call of a tool"
_END_OF_THOUGHT = "</think>"
_ARGUMENTS = {STAND_IN: STAND_IN}


class _Said(NamedTuple):
    """Something that a message says."""

    number: int
    """That of the message, from 0."""
    what: str
    words: str
    """The words that a template writes; empty where they might stand elsewhere too."""
    changed: Message
    """The message with other words."""


def find_unwritten(
    messages: Sequence[Message], learned: Sequence[int], text: str, write: Write, origin: str
) -> set[str]:
    """Return what a template does not write of a conversation, such as "reasoning_content of
    assistant messages".

    A template does not write what may be anything else, and the text remains the same.

    Args:
      messages: the conversation, as the template is given it.
      learned: the numbers of those that are learned from.
      text: what the template writes.
      write: writes others.
      origin: the template's file, for messages.

    Raises:
      UserError: of a message that is learned from it writes nothing, or not a call.
    """
    said = [one for number, message in enumerate(messages) for one in _all_said(number, message)]
    doubtful = [one for one in said if len(one.words) < _LONG or one.words not in text]
    asked = [
        (
            [
                *messages[: one.number],
                one.changed,
                *messages[one.number + 1 :],
            ],
            False,
        )
        for one in doubtful
    ]
    found = write(asked) if asked else []
    lost = [one for one, other in zip(doubtful, found, strict=True) if other == text]
    for one in lost:
        everything = [other for other in said if other.number == one.number]
        nothing_left = all(other in lost for other in everything)
        if one.number in learned and (one.what == _CALL or nothing_left):
            raise UserError(
                f"message {one.number + 1} has {one.what}, which the chat template {origin} "
                "does not write there, so "
                "that the model would learn to answer without it: take a template that does, or "
                "leave the message out"
            )
    return {f"{one.what} of {messages[one.number]['role']} messages" for one in lost}


def _all_said(number: int, message: Message) -> Iterator[_Said]:
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        yield _Said(number, "the content", content.strip(), {**message, "content": STAND_IN})
        thought, end, _ = content.removeprefix("<think>").rpartition(_END_OF_THOUGHT)
        if thought.strip():
            changed = content.replace(thought + end, STAND_IN + end)
            yield _Said(
                number,
                "the thought in the content",
                thought.strip(),
                {**message, "content": changed},
            )
    elif isinstance(content, list):
        words = "".join(part["text"] for part in content)
        changed = [{"type": "text", "text": STAND_IN}]
        yield _Said(number, "the content", words.strip(), {**message, "content": changed})
    names = [
        name for name in REASONING if isinstance(message.get(name), str) and message[name].strip()
    ]
    if names:
        changed = dict.fromkeys(names, STAND_IN)
        yield _Said(
            number,
            REASONING[0],
            message[names[0]].strip(),
            {**message, **changed},
        )
    calls = list(message.get("tool_calls") or ())
    for i, call in enumerate(calls):
        yield _Said(
            number,
            _CALL,
            "",
            {
                **message,
                "tool_calls": [
                    *calls[:i],
                    _other_call(call),
                    *calls[i + 1 :],
                ],
            },
        )


def _other_call(call: Any) -> dict[str, Any]:
    """Return a call, which may be OpenAI's or the function alone, of another function with other
    arguments.
    """
    if isinstance(call.get("function"), dict):
        return {**call, "function": _other_call(call["function"])}
    if isinstance(call.get("arguments"), str):
        arguments = json.dumps(_ARGUMENTS)
    else:
        arguments = _ARGUMENTS
    return {**call, "name": STAND_IN, "arguments": arguments}
