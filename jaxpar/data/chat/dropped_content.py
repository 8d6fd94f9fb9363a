"""The parts of a conversation that its chat template does not write: a thought, a call, the message
of a role.

The conversation is written once more, with a mark of its own after everything that is said. What
has its mark in that text is written, whatever else has the same words, as long as the text is the
same but for the marks:

    message     {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    text        <bot>4</s>
    marked      <bot>4▮0▮</s>, so the content is written, and the reasoning with its ▮1▮ may not be

What lost its mark is tried alone: the conversation is written with ▮, a character that no text has,
in its place. Where the text stays the same, the template has not written it:

    reasoning   with ▮ it is <bot>4</s>, so it is not: "reasoning_content of assistant messages"
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from jaxpar.base.errors import UserError
from jaxpar.data.chat.template.render import REASONING, Message
from jaxpar.data.chat.turns import STAND_IN, Write

_TOOL_CALL = "a call of a tool"
_END_OF_THOUGHT = "</think>"
_ARGUMENTS = {STAND_IN: STAND_IN}


class _Said(NamedTuple):
    """A part of a message's content: a thought, a call or other words."""

    number: int
    """The number of the message, from 0."""
    what: str
    changed: Message
    """The message with other words in place of this part."""
    add: Callable[[Message, str], Message]
    """Returns a message with a text after this part; other parts of the message may have texts
    already.
    """


def find_unwritten(
    messages: Sequence[Message], learned: Sequence[int], text: str, write: Write, origin: str
) -> set[str]:
    """Find what a template does not write of a conversation, such as "reasoning_content of
    assistant messages".

    A part is not written if it may be anything else, and the text remains the same.

    Args:
      messages: the conversation, as the template is given it.
      learned: the numbers of the messages that are learned from.
      text: what the template writes.
      write: writes other conversations by the same template.
      origin: the template's file, for messages.

    Raises:
      UserError: the template writes nothing of a message that is learned from, or leaves out its
        call.
    """
    said = [one for number, message in enumerate(messages) for one in _all_said(number, message)]
    doubtful = _without_mark(messages, said, text, write)
    asked = [
        ([*messages[: one.number], one.changed, *messages[one.number + 1 :]], False)
        for one in doubtful
    ]
    found = write(asked) if asked else []
    lost = [one for one, other in zip(doubtful, found, strict=True) if other == text]
    for one in lost:
        everything = [other for other in said if other.number == one.number]
        nothing_left = all(other in lost for other in everything)
        if one.number in learned and (one.what == _TOOL_CALL or nothing_left):
            raise UserError(
                f"message {one.number + 1} has {one.what}, which the chat template {origin} "
                "does not write there, so "
                "that the model would learn to answer without it: take a template that does, or "
                "leave the message out"
            )
    return {f"{one.what} of {messages[one.number]['role']} messages" for one in lost}


def _without_mark(
    messages: Sequence[Message], said: Sequence[_Said], text: str, write: Write
) -> list[_Said]:
    """Find the parts that do not stand, with a mark after them, in what the template writes; all
    where the template looks at words, and writes something else because of the marks.
    """
    marked = list(messages)
    marks = [f"{STAND_IN}{i}{STAND_IN}" for i in range(len(said))]
    for one, mark in zip(said, marks, strict=True):
        marked[one.number] = one.add(marked[one.number], mark)
    (found,) = write([(marked, False)])
    if found is None or re.sub(f"{STAND_IN}[0-9]+{STAND_IN}", "", found) != text:
        return list(said)
    return [one for one, mark in zip(said, marks, strict=True) if mark not in found]


def _all_said(number: int, message: Message) -> Iterator[_Said]:
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        whole = {**message, "content": STAND_IN}
        yield _Said(number, "the content", whole, _add_to_content)
        thought, end, _ = content.removeprefix("<think>").rpartition(_END_OF_THOUGHT)
        if thought.strip():
            changed = content.replace(thought + end, STAND_IN + end)
            yield _Said(
                number,
                "the thought in the content",
                {**message, "content": changed},
                partial(_add_to_thought, thought + end),
            )
    elif isinstance(content, list):
        parts = [{"type": "text", "text": STAND_IN}]
        yield _Said(number, "the content", {**message, "content": parts}, _add_to_content)
    names = [
        name for name in REASONING if isinstance(message.get(name), str) and message[name].strip()
    ]
    if names:
        changed = {**message, **dict.fromkeys(names, STAND_IN)}
        yield _Said(number, REASONING[0], changed, partial(_add_to_keys, names))
    calls = list(message.get("tool_calls") or ())
    for i, call in enumerate(calls):
        changed = {**message, "tool_calls": [*calls[:i], _other_call(call), *calls[i + 1 :]]}
        yield _Said(number, _TOOL_CALL, changed, partial(_add_to_call, i))


def _with_mark(words: str, mark: str) -> str:
    """Add a mark to words, before the white space at their end, which templates leave out."""
    kept = words.rstrip()
    return kept + mark + words[len(kept) :]


def _add_to_content(message: Message, mark: str) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": _with_mark(content, mark)}
    if not content:
        return message
    last = {**content[-1], "text": _with_mark(content[-1]["text"], mark)}
    return {**message, "content": [*content[:-1], last]}


def _add_to_thought(thought: str, message: Message, mark: str) -> Message:
    """Add a mark to a message before the `</think>` with which a thought ends."""
    marked = _with_mark(thought.removesuffix(_END_OF_THOUGHT), mark) + _END_OF_THOUGHT
    return {**message, "content": message["content"].replace(thought, marked)}


def _add_to_keys(names: Sequence[str], message: Message, mark: str) -> Message:
    return {**message, **{name: _with_mark(message[name], mark) for name in names}}


def _add_to_call(number: int, message: Message, mark: str) -> Message:
    """Add a mark to a message after the name of one of its calls."""
    calls = list(message["tool_calls"])
    calls[number] = _renamed(calls[number], mark)
    return {**message, "tool_calls": calls}


def _renamed(call: Mapping[str, Any], mark: str) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _renamed(call["function"], mark)}
    return {**call, "name": f"{call.get('name')}{mark}"}


def _other_call(call: Any) -> dict[str, Any]:
    """Make a call, OpenAI's or the function alone, into one of another function with other
    arguments.
    """
    if isinstance(call.get("function"), dict):
        return {**call, "function": _other_call(call["function"])}
    if isinstance(call.get("arguments"), str):
        arguments = json.dumps(_ARGUMENTS)
    else:
        arguments = _ARGUMENTS
    return {**call, "name": STAND_IN, "arguments": arguments}
