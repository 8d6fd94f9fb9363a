"""Chat templates, rendered as `transformers` would, by a process with limits (`worker`).

template   {% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}
           {% if add_generation_prompt %}<|assistant|>{% endif %}
messages   [{"role": "user", "content": "Hi"}]
text       <|user|>Hi<|end|>                   and with a generation prompt:
           <|user|>Hi<|end|><|assistant|>
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.base.errors import UserError
from jaxpar.data.chat.template.files import ChatTemplate

SECONDS = 20
"""The seconds that a template may compute each time that it writes a conversation."""
_BATCH = 2**22
"""The characters of conversations that the process is given at once, if a single one is not
longer.
"""
_LONGEST = 2**27
"""The characters of a conversation with which the process, whose memory has a limit, can begin."""
Message = Mapping[str, Any]
"""A message: at least a `role`, and what is said, as in OpenAI's and Hugging Face's chat
formats.
"""
Span = tuple[int, int]
REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's reasoning; `transformers` gives a template the first two."""
_OUT_OF_TIME = -getattr(signal, "SIGXCPU", 0)
"""The code with which the process that renders ends at its limit of time; nobody else sends this
signal.
"""
GIVEN = ("messages", "add_generation_prompt")
"""The names that every conversation brings along."""


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    generated: tuple[Span, ...] | None
    """The characters [begin, end) that the template marks by `{% generation %}`; None where it has
    no such marks.
    """
    undefined: tuple[str, ...]
    """Names that the template wrote and that nothing defines: each has become nothing."""


def render(
    messages: Sequence[Message],
    template: ChatTemplate,
    add_generation_prompt: bool = False,
    /,
    **more: Any,
) -> str:
    """Write a conversation as `transformers.apply_chat_template(tokenize=False)` would.

    `add_generation_prompt` also writes what comes before an answer, so that the model gives one.
    `more` are other names that the template may read, such as `tools`.

    Raises:
      UserError: the template refuses the messages, is not Jinja or comes to no end, or the `hf`
        extra is missing.
    """
    (found,) = try_render(
        template, [(list(map(plain_message, messages)), add_generation_prompt)], more
    )
    if isinstance(found, str):
        raise UserError(f"the chat template {template.origin} refuses this conversation: {found}")
    return found.text


def try_render(
    template: ChatTemplate,
    asked: Sequence[tuple[Sequence[Message], bool]],
    more: Mapping[str, Any],
    today: date | None = None,
) -> list[Rendered | str]:
    """Write several conversations, each with or without a generation prompt, with the same other
    names.

    The messages are given as they are (`plain_message`). Where the template refuses a conversation,
    its own words stand in place of the text. `today` is what `strftime_now` writes; None = this
    moment.

    Raises:
      UserError: the template comes to no end, or the `hf` extra is missing.
    """
    others = {"tools": None, "documents": None, **template.special_tokens, **more}
    if template.tool_use and others["tools"] is not None:
        text = template.tool_use
    else:
        text = template.text
    names = [
        {**others, "messages": list(messages), "add_generation_prompt": prompted}
        for messages, prompted in asked
    ]
    found = _worker().ask(text, names, today or datetime.now(), template.origin)
    return [one["error"] if "error" in one else _rendered(one) for one in found]


def _rendered(answer: Mapping[str, Any]) -> Rendered:
    spans = answer["generated"]
    if spans is None:
        generated = None
    else:
        generated = tuple((begin, end) for begin, end in spans)
    return Rendered(answer["text"], generated, tuple(answer["undefined"]))


def plain_message(message: Message) -> dict[str, Any]:
    """Return a message without keys that are null, with its reasoning under each name that a
    template may read.

    The content of a turn that calls tools stays null, since there are templates that write a call
    only then.
    """
    plain = {key: value for key, value in message.items() if value is not None}
    if not message.get("tool_calls"):
        plain.pop("tool_calls", None)  # an empty list is a call to some templates
    elif "content" in message:
        plain["content"] = message["content"]
    reasoning = next((plain[key] for key in REASONING if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def names_read(template: ChatTemplate) -> frozenset[str]:
    """Find the names that a template reads and does not set itself.

    Raises:
      UserError: it is not Jinja.
    """
    return _names_in(template.text, template.origin) | _names_in(template.tool_use, template.origin)


@lru_cache
def _names_in(text: str, origin: str) -> frozenset[str]:
    (found,) = _worker().ask(text, None, datetime.now(), origin)
    if "error" in found:
        raise UserError(f"the chat template {origin} is not Jinja: {found['error']}")
    return frozenset(found["names"])


class _Worker:
    """The process that renders; it is started again after a template has ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(
        self, template: str, names: Sequence[Any] | None, now: date, origin: str
    ) -> list[dict[str, Any]]:
        """Ask the process to render a template with each of the names, and return its answers
        (`worker`).
        """
        if isinstance(now, datetime):
            moment = now
        else:
            moment = datetime(now.year, now.month, now.day)
        asked = {"template": template, "now": moment.isoformat(), "seconds": SECONDS}
        found: list[dict[str, Any]] = []
        for line in _lines(asked, names):
            found += self._answers(line, origin)
        return found

    def _answers(self, line: str, origin: str) -> list[dict[str, Any]]:
        """Return the process's answers to a line, for each of the names in it."""
        with self._lock:
            answer, code = self._exchange(line)
            if not answer and code != _OUT_OF_TIME:  # somebody has ended it, and not this template
                answer, code = self._exchange(line)
        if not answer and code == _OUT_OF_TIME:
            raise UserError(
                f"the chat template {origin} was stopped after {SECONDS} seconds of computing for "
                "one conversation: it comes to no end, or the conversation is too long for it"
            )
        if not answer:
            raise UserError(
                f"the process that renders the chat template {origin} was ended twice, with "
                f"code {code}: see whether "
                "the machine is short of memory, and try it again"
            )
        found = json.loads(answer)
        if isinstance(found, dict):
            raise UserError(
                f"the process that renders the chat template {origin} refuses a conversation: "
                f"{found['error']}"
            )
        return found

    def _exchange(self, line: str) -> tuple[str, int | None]:
        """Return the answer to a line, or nothing and the code with which the process has ended."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:  # it ended before it had read the line
            answer = ""
        # control-C: what this process would still answer, the next question would get
        except BaseException:
            self._end()
            raise
        # a part of a line is all that is left of a process that was ended
        if answer.endswith("\n"):
            return answer, None
        process.wait()
        self._end()
        return "", process.returncode

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            script = Path(__file__).with_name("worker.py")
            # Without the script's folder, whose modules could hide others; with the path of this
            # process.
            words = [sys.executable, "-P", str(script)]
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join(sys.path),
                "PYTHONIOENCODING": "utf-8",
            }
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                words,
                env=environment,
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                # control-C is for this process, which may still have to render
                start_new_session=True,
            )
        return self._process

    def _end(self) -> None:
        process = self._process
        self._process = None
        if process is None:
            return
        process.kill()
        with contextlib.suppress(OSError):  # a line that it has not read
            process.communicate()

    def close(self) -> None:
        with self._lock:
            self._end()


def _lines(asked: Mapping[str, Any], names: Sequence[Any] | None) -> Iterator[str]:
    """Yield the lines that ask the process for a template with each of the names, or for what it
    reads.

    A process that was given all at once would hold a long conversation as often as it is written.
    """
    if names is None:
        yield _to_json({**asked, "names": None})
        return
    beginning = _to_json(asked).removesuffix("}")
    batch: list[str] = []
    for i, one in enumerate(names, 1):
        batch.append(_to_json(one))
        if len(batch[-1]) > _LONGEST:
            raise UserError(
                f"a conversation of {len(batch[-1]):,} characters, as JSON, is too long for a chat "
                f"template, which takes up to {_LONGEST:,}"
            )
        if i == len(names) or sum(map(len, batch)) >= _BATCH:
            yield f'{beginning}, "names": [{", ".join(batch)}]}}'
            batch = []


def _to_json(value: Any) -> str:
    try:
        return json.dumps(value, default=lambda value: f"<{type(value).__name__}>")
    except RecursionError as error:
        raise UserError("its lists and objects are too deep") from error


@lru_cache(maxsize=1)
def _worker() -> _Worker:
    """Return this process's worker, which ends with it.

    Raises:
      UserError: the `hf` extra is missing.
    """
    try:
        import jinja2  # noqa: F401  # what the worker imports
    except ImportError as error:
        raise UserError(
            "a chat template needs the jinja2 package: pip install 'jaxpar[hf]'"
        ) from error
    made = _Worker()
    atexit.register(made.close)
    return made
