"""The words of an assistant's turn in a written conversation, found where the template does not
mark them.

A turn is what its answer adds to the conversation before it, with the generation prompt, where the
template writes these alike (`Turns._added`):

    text      <user>Q</s><bot>A</s><user>R</s><bot>B</s>      the whole conversation
    prompt    <user>Q</s><bot>                                before the answer
    ended     <user>Q</s><bot>A</s>                           up to the answer
    turn      A</s>                                           `ended` without `prompt`

Many templates write an answer otherwise once others follow it, by leaving out its thought, say.
Then the conversation is written with another answer in its place, one character ▮, and the turn is
where the two texts differ (`Turns._replaced`, by `_place`):

    ended     <user>Q</s><bot><think></think>A</s>            is no beginning of the text
    replaced  <user>Q</s><bot>▮</s><user>R</s><bot>B</s>
    answer    A                                               in the text in place of ▮
    rest      </s><user>R</s><bot>B</s>                       the same in both
    turn      A</s>                                           with what closes it
                                                              (`_closing_length`)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxpar.base.errors import UserError
from jaxpar.data.chat.template.forms import Forms, shape_messages
from jaxpar.data.chat.template.render import Message, Span

STAND_IN = "\ue0ef"
"""The character for private use that stands for an answer, or for other words of a message; ▮ in
the examples.
"""
BY_MARKS = "mark its answers by {% generation %} and {% endgeneration %} in the template"
Write = Callable[[Sequence[tuple[Sequence[Message], bool]]], list[str | None]]
"""A function that writes conversations, each with or without a generation prompt; None where the
template refuses one.
"""


class Turn(NamedTuple):
    """The words of an assistant's turn in a written conversation."""

    span: Span
    """Its characters [begin, end), with what closes the turn."""
    rewritten: bool
    """Whether the template writes something else before this answer where the conversation ends
    with it.
    """
    is_open: bool
    """Whether nothing closes the turn."""


class Turns:
    """The assistant's turns of a conversation.

    Args:
      messages: the conversation, as the template is given it.
      text: what the template writes.
      write: writes other conversations by the same template.
      forms: what the template can write.
      origin: its file, for messages.
    """

    def __init__(
        self, messages: Sequence[Message], text: str, write: Write, forms: Forms, origin: str
    ):
        self.messages = messages
        self.text = text
        self.write = write
        self.closes = forms.closes
        self.origin = origin
        message = {"role": "assistant", "content": STAND_IN}
        self.other = shape_messages([message], forms, origin)[0]

    def find(self, turns: Sequence[int]) -> list[Turn]:
        """Find some turns by the numbers of their messages.

        Raises:
          UserError: what a turn has said cannot be told.
        """
        asked: list[tuple[Sequence[Message], bool]] = []
        for i in turns:
            asked += [
                (self.messages[:i], True),
                (self.messages[: i + 1], False),
            ]
        found = self.write(asked)
        return [
            self._find(*one)
            for one in zip(
                turns,
                found[::2],
                found[1::2],
                strict=True,
            )
        ]

    def _find(self, i: int, prompt: str | None, ended: str | None) -> Turn:
        """Find turn i by what is written with the generation prompt before it, and up to its
        end.
        """
        if ended is None or not self.text.startswith(ended):
            return self._replaced(i, prompt, ended)
        if prompt is not None and ended.startswith(prompt):
            return self._added(len(prompt), len(ended))
        (unprompted,) = self.write([(self.messages[:i], False)])
        begin = _Prompt(prompt, unprompted).end_in(ended)
        if begin is None:
            return self._replaced(i, prompt, ended)
        return self._added(begin, len(ended))

    def _added(self, begin: int, end: int) -> Turn:
        """Return an answer that has been added to the conversation before it."""
        if self.closes:
            closing = 0
        else:
            closing = _marker_length(self.text[end:])
        return Turn(
            (begin, end + closing), rewritten=False, is_open=not self.closes and not closing
        )

    def _replaced(self, i: int, prompt: str | None, ended: str | None) -> Turn:
        """Find an answer as what changes where another stands in its place; the rest must not
        change.
        """
        before = self.messages[:i]
        after = self.messages[i + 1 :]
        asked = [
            [*before, self.other, *after],
            [*before, self.other],
            before,
        ]
        replaced, replaced_last, unprompted = self.write([(talk, False) for talk in asked])
        prompted = _Prompt(prompt, unprompted)
        here = _place(self.text, replaced, prompted)
        if here is None:
            raise self._unknown(i)
        if not after:
            return Turn(
                (here.begin, len(self.text)),
                rewritten=False,
                is_open=not here.rest,
            )
        # the template refuses a conversation that ends here, so how one is closed is not known
        if ended is None:
            closing = _marker_length(here.rest)
            return Turn((here.begin, here.end + closing), rewritten=False, is_open=not closing)
        last = _place(ended, replaced_last, prompted)
        rewritten = last is None or here.answer != last.answer
        if last is None or (rewritten and (here.body is None or here.body != last.body)):
            raise UserError(
                f"the chat template {self.origin} writes turn {i + 1} otherwise once others "
                "follow it, so that what "
                "would be learned is not what it answers: split the conversation, into one for "
                "each answer that ends "
                f"with it, or {BY_MARKS}"
            )
        closing = _closing_length(last.rest, here.rest)
        if closing is None:
            raise self._unknown(i)
        return Turn((here.begin, here.end + closing), rewritten=rewritten, is_open=not closing)

    def _unknown(self, i: int) -> UserError:
        return UserError(
            f"what of turn {i + 1} is its answer cannot be told in what the chat template "
            f"{self.origin} writes: "
            f"{BY_MARKS}, or set data.loss_on=all"
        )


class _Prompt(NamedTuple):
    """A conversation before an answer, with the generation prompt and without; None where the
    template refuses it.
    """

    text: str | None
    unprompted: str | None

    def end_in(self, text: str) -> int | None:
        """Find where in a text the generation prompt ends, or as much of it as the text has.

        None where the text differs before that already, in an earlier turn.
        """
        if self.text is None or self.unprompted is None:
            return None
        end = _shared_length(self.text, text)
        if end < _shared_length(self.text, self.unprompted):
            return None
        if end == len(self.text):
            return end
        return len(_whole_markers(text[:end]))


class _Place(NamedTuple):
    """An answer in the text of a conversation."""

    begin: int
    """The place where the answer begins: after the generation prompt, if the text has it."""
    answer: str
    """All between the generation prompt and what closes the turn."""
    body: str | None
    """The answer without what the template writes before any answer, such as a channel or an empty
    thought; None where it does not begin with that."""
    rest: str
    """What follows the answer: the token that closes the turn, and other turns."""

    @property
    def end(self) -> int:
        return self.begin + len(self.answer)


def _place(text: str, replaced: str | None, prompt: _Prompt) -> _Place | None:
    """Find where a text differs from `replaced`, the same conversation with another answer.

    None where that cannot be told: what follows the answer may not differ, and where the generation
    prompt does not tell where it begins, nothing but white space before it.

        text                <user>Q</s><bot><think></think>A</s>
        replaced            <user>Q</s><bot><think></think>▮</s>
        prompt              <user>Q</s><bot>
        begin, answer       after <bot>, `<think></think>A`
        body, rest          `A`, `</s>`
    """
    if replaced is None or replaced.count(STAND_IN) != 1:
        return None
    before, rest = replaced.split(STAND_IN)
    begin = prompt.end_in(text)
    begin_replaced = prompt.end_in(replaced)
    if begin is None or begin_replaced is None:
        begin = _shared_length(before, text)
        if before[begin:].strip():
            return None
        header = ""
    else:
        header = before[begin_replaced:].rstrip()
    end = len(text) - len(rest)
    if not text.endswith(rest) or end < begin:
        return None
    answer = text[begin:end]
    if answer.startswith(header):
        body = answer.removeprefix(header).lstrip()
    else:
        body = None
    return _Place(begin, answer, body, rest)


def _closing_length(at_the_end: str, within: str) -> int | None:
    """Count the characters that close a turn, of what follows an answer at a conversation's end and
    within one.

    The two may differ only from where each begins another marker, such as `<|endoftext|>` and
    `<|user|>`. Where they share none, the first marker closes the turn: `<|end|>`, or `<|user|>`
    where the next turn is all that ends one. None where they share a part of something else.

        at_the_end              within                  what closes the turn
        <|end|>                 <|end|><|user|>R        <|end|>
        <|end|><|endoftext|>    <|end|><|user|>R        <|end|>
                                <|user|>R               <|user|>
        bye                     but <|user|>R           None: `b` is no marker
    """
    if at_the_end and within.startswith(at_the_end):
        return len(at_the_end)
    shared = at_the_end[: _shared_length(at_the_end, within)]
    if at_the_end.strip() and within.startswith(at_the_end.rstrip()):
        return len(shared)
    whole = len(_whole_markers(shared))
    if not shared[:whole].strip():
        return _marker_length(within)
    next_characters = {at_the_end[whole : whole + 1], within[whole : whole + 1]}
    if next_characters <= {"<", "[", ""}:
        return whole
    return None


def _whole_markers(text: str) -> str:
    """Cut off the part of a marker that a text ends with: `</s>` is left of `</s><|us`."""
    return re.sub(r"[<\[][^>\]\s]*$", "", text)


def _marker_length(text: str) -> int:
    """Return the length of the marker that a text begins with, `<|user|>` or `[INST]`; 0 where it
    has none.
    """
    found = re.match(r"\s*(<[^<>\s]+>|\[[^\[\]\s]+\])", text)
    return found.end() if found else 0


def _shared_length(left: str, right: str) -> int:
    """Count the characters that two texts have in common at their beginning."""
    differs = (i for i, (one, other) in enumerate(zip(left, right, strict=False)) if one != other)
    return next(differs, min(len(left), len(right)))
