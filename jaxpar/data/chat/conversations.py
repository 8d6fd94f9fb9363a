"""The forms in which people have conversations, read into one: messages, and what else a template
may read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxpar.base.errors import UserError, parse_json, short
from jaxpar.data.chat.template.render import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function": "tool",
}
_OLDER_CALL = "function_call"
"""In ShareGPT's form, the role of an assistant's turn that is a call, as JSON; in OpenAI's older
form, a key of a turn.
"""
_SAID_OTHERWISE = ("tool_calls", "tool_responses", "reasoning_content", "thinking", "reasoning")
"""The keys that a message may have in place of a content."""
_TALKS = ("messages", "conversations", "prompt", "completion")


class Conversation(NamedTuple):
    """The messages of a conversation, as the line of a file has them."""

    messages: list[Message]
    names: dict[str, Any]
    """The line's other values: `tools`, `documents`, and names that a template may read."""
    learned_from: int = 0
    """The number of the first message that may be learned from; those before are a prompt."""
    without_weight: frozenset[int] = frozenset()
    """The numbers of the answers that are not to be learned, as their `weight` is 0."""

    def is_learned(self, number: int) -> bool:
        """Return whether a message, counted from 0, is an answer to learn."""
        is_answer = self.messages[number]["role"] == "assistant"
        return is_answer and number >= self.learned_from and number not in self.without_weight


def read_conversation(row: Mapping[str, Any]) -> Conversation | None:
    """Read the conversation of a line; None where it has none.

    A line has `messages`, with roles and contents as in OpenAI's and Hugging Face's formats; or
    `conversations`, which may be in ShareGPT's form, of `from` and `value`; or a `prompt` and a
    `completion` that are lists of messages. A `system` message may stand beside them. OpenAI's
    older calls and `functions` become those that templates know. A null is as if it were not there.

    Raises:
      UserError: the line has no valid conversation; the message says which of its messages is
        wrong.
    """
    learned_from = 0
    talk = row.get("messages")
    if talk is None:
        talk = row.get("conversations")
    if talk is None and isinstance(row.get("prompt"), list):
        completion = row.get("completion") or []
        if not isinstance(completion, list):
            raise UserError("prompt is a list of messages, and completion is none")
        learned_from = len(row["prompt"])
        talk = [*row["prompt"], *completion]
    if talk is None:
        return None
    if not isinstance(talk, list) or not talk:
        raise UserError("messages is no list with a message in it")
    names = {key: value for key, value in row.items() if key not in _TALKS and value is not None}
    system = names.pop("system", None)  # as LLaMA-Factory has it, beside the turns
    if system and not _begins_with_system(talk, system):
        talk = [{"role": "system", "content": system}, *talk]
        learned_from += learned_from > 0
    messages = [_read_message(number, message) for number, message in enumerate(talk, 1)]
    more = names.pop("chat_template_kwargs", {})
    if not isinstance(more, dict):
        raise UserError("chat_template_kwargs is no object")
    names |= more
    if functions := _listed("functions", names.pop("functions", None)):
        names.setdefault("tools", [{"type": "function", "function": one} for one in functions])
    for key in ("tools", "documents"):
        if key in names:
            names[key] = _listed(key, names[key])
    names = {
        key: value for key, value in names.items() if value or key not in ("tools", "documents")
    }
    without_weight = {i for i, message in enumerate(messages) if _weight(i, message) == 0}
    return Conversation(messages, names, learned_from, frozenset(without_weight))


def _begins_with_system(talk: Sequence[Any], system: Any) -> bool:
    """Return whether messages begin with the system's text that stands beside them.

    Raises:
      UserError: they begin with another system's text.
    """
    first = _read_message(1, talk[0])
    if first["role"] != "system":
        return False
    if first.get("content") == system:
        return True
    raise UserError(
        "a system text stands beside messages that begin with another system message: keep one of "
        "the two"
    )


def _weight(i: int, message: Message) -> int:
    """Return OpenAI's weight of an answer: 1 = it is learned, 0 = it is not."""
    weight = message.get("weight")
    if message["role"] != "assistant" or weight is None:
        return 1
    if isinstance(weight, (int, float)) and weight in (0, 1):
        return int(weight)
    raise UserError(
        f"message {i + 1} has the weight {short(weight)}, where an answer has 1, which counts, "
        "or 0, which does not"
    )


def _listed(key: str, value: Any) -> Any:
    """Read a list of objects, which may be given as JSON text."""
    if isinstance(value, str) and value.strip():
        value = parse_json(value, f"the text of {key}")
    if value and not (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        raise UserError(f"{key} is no list of objects")
    return value


def _read_message(number: int, message: Any) -> Message:
    if not isinstance(message, dict):
        raise _no_message(number)
    if message.get("role") is None and message.get("from") is not None:
        message = _from_sharegpt(message)
    message = _with_tool_calls(number, message)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(
            f"message {number} has the role {str(role)[:40]!r}, not one of {', '.join(ROLES)}"
        )
    content = message.get("content")
    if isinstance(content, list):
        _require_text_parts(number, content)
    elif content is None:
        if not any(message.get(key) for key in _SAID_OTHERWISE):
            raise _no_message(number)
    elif not isinstance(content, str):
        raise _no_message(number)
    calls = message.get("tool_calls")
    if calls is not None and not (
        isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    ):
        raise UserError(f"message {number} has tool_calls that are no list of objects")
    return message


def _with_tool_calls(number: int, message: Message) -> Message:
    """Convert a message of OpenAI's older form, with a `function_call` or a function's result, to
    the form that templates know.

    Raises:
      UserError: its call is no object, or stands beside other calls.
    """
    others = {key: value for key, value in message.items() if key != _OLDER_CALL}
    if others.get("role") == "function":
        others["role"] = "tool"
    call = message.get(_OLDER_CALL)
    if not call:
        return others
    functions = _functions(call)
    if functions is None:
        raise UserError(f"message {number} has a {_OLDER_CALL} that is no object, nor JSON of one")
    made = [{"type": "function", "function": one} for one in functions]
    calls = others.get("tool_calls")
    if not calls:
        others["tool_calls"] = made
    elif not isinstance(calls, list) or any(one not in map(_function, calls) for one in functions):
        raise UserError(f"message {number} has a {_OLDER_CALL} beside other tool_calls")
    return others


def _functions(call: Any) -> list[dict[str, Any]] | None:
    """List the functions of an older call, which may be one or several, as objects or as JSON text;
    None where the value is no call.
    """
    if isinstance(call, str):
        try:
            call = parse_json(call, _OLDER_CALL)
        except UserError:
            return None
    if isinstance(call, list):
        listed = call
    else:
        listed = [call]
    if all(isinstance(one, dict) for one in listed):
        return listed
    return None


def _function(call: Any) -> Any:
    """Return the function of a call, which may be OpenAI's or the function alone."""
    if isinstance(call, dict):
        return call.get("function", call)
    return call


def _no_message(number: int) -> UserError:
    return UserError(f"message {number} is no object with a role and a content that is text")


def _require_text_parts(number: int, parts: Sequence[Any]) -> None:
    for part in parts:
        if (
            isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
        ):
            continue
        if isinstance(part, dict):
            kind = part.get("type")
        else:
            kind = part
        raise UserError(
            f"message {number} has a part {str(kind)[:40]!r}, where only parts of text can be read"
        )


def _from_sharegpt(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message of ShareGPT's form to one with a role and a content; a call becomes
    `tool_calls`.
    """
    others = {
        key: value
        for key, value in message.items()
        if key not in ("from", "value") and value is not None
    }
    said = message["from"]
    value = message.get("value")
    if said == _OLDER_CALL:
        functions = _functions(value)
        if functions is None:
            return {"role": "assistant", "content": value, **others}
        return {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": one} for one in functions],
            **others,
        }
    if isinstance(said, str):
        role = _SHAREGPT_ROLES.get(said, said)
    else:
        role = said
    return {"role": role, "content": value, **others}
