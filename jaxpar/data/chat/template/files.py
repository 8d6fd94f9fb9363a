"""The chat templates that lie beside a tokenizer, and the special tokens that they may write.

A folder may have one template or several by name. They are looked for in this order:

    chat_template.jinja                     the default
    additional_chat_templates/NAME.jinja    others beside it
    tokenizer_config.json                   "chat_template": a text, or several with names
    chat_template.json                      the same, beside a processor

The two JSON files count only where there are no files in Jinja.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.base.errors import UserError, read_json, suggest
from jaxpar.data.vocabulary.special_tokens import (
    PROCESSOR_TEMPLATE,
    TEMPLATE,
    TEMPLATE_FOLDERS,
    TOKENIZER_CONFIG,
    beside,
    read_special_tokens,
)
from jaxpar.data.vocabulary.tokenizer import read_text


class ChatTemplate(NamedTuple):
    """A template in Jinja, the special tokens that it may write (`{"bos_token": "<s>"}`), and its
    file.
    """

    text: str
    special_tokens: dict[str, Any]
    origin: str
    tool_use: str = ""
    """The template for conversations with tools, where the folder has one of its own."""


def load_template(tokenizer: str | Path, name: str = "") -> ChatTemplate:
    """Load the chat template beside a tokenizer.json, or in tokenizer_config.json; where there are
    several, the one of a `name`.

    Raises:
      UserError: there is none, or none of that name, or a file cannot be read.
    """
    found = find_template(tokenizer, name)
    if found is not None:
        return found
    templates, origin = _named_templates(tokenizer)
    if not templates:
        places = f"{TEMPLATE}, or chat_template in {TOKENIZER_CONFIG}"
        raise UserError(
            f"{tokenizer} has no chat template beside it ({places}): take those of the model's "
            "own folder"
        )
    wanted = name or "default"
    raise UserError(
        f"{origin} has no chat template {wanted!r}{suggest(wanted, templates)}: it has "
        f"{', '.join(sorted(templates))}, "
        "of which data.template_args=chat_template=NAME takes one"
    )


def find_template(tokenizer: str | Path, name: str = "") -> ChatTemplate | None:
    """Find the chat template of a `name` beside a tokenizer.json, or the default; None where there
    is none.

    Raises:
      UserError: a file cannot be read.
    """
    templates, origin = _named_templates(tokenizer)
    text = templates.get(name or "default")
    if text is None:
        return None
    if name:
        tool_use = ""
    else:
        tool_use = templates.get("tool_use", "")
    return ChatTemplate(text, special_tokens(tokenizer), origin, tool_use)


def _named_templates(tokenizer: str | Path) -> tuple[dict[str, str], str]:
    """Read the templates of a folder by name, with the file of the default; files of templates come
    first.
    """
    found: dict[str, Any] = {}
    own = beside(tokenizer, TEMPLATE)
    folders = [beside(tokenizer, folder) for folder in TEMPLATE_FOLDERS]
    config = beside(tokenizer, TOKENIZER_CONFIG)
    processor = beside(tokenizer, PROCESSOR_TEMPLATE)
    for folder in folders:
        found |= {file.stem: read_text(file) for file in sorted(folder.glob("*.jinja"))}
    if own.exists():
        found["default"] = read_text(own)
    if found:
        return found, str(own)
    kinds = {"chat_template": str | list[dict[str, Any]] | dict[str, Any] | None}
    for file in (config, processor):
        if file.exists():
            given = read_json(file, kinds).get("chat_template")
        else:
            given = None
        if isinstance(given, str):
            given = {"default": given}
        elif isinstance(given, list):
            given = {str(item.get("name")): item.get("template") for item in given}
        if isinstance(given, dict):
            texts = {str(name): text for name, text in given.items() if isinstance(text, str)}
            if texts:
                return texts, str(file)
    return {}, str(config)


def writes_date(tokenizer: str | Path) -> bool:
    """Return whether a chat template beside a tokenizer.json writes the date of the day.

    Raises:
      UserError: a file cannot be read.
    """
    templates, _ = _named_templates(tokenizer)
    return any("strftime_now" in text for text in templates.values())


def read_templates(tokenizer: str | Path) -> dict[str, str]:
    """Read the texts of the chat templates beside a tokenizer.json by name, of which `default` is
    one.

    Raises:
      UserError: a file cannot be read.
    """
    templates, _ = _named_templates(tokenizer)
    return templates


def special_tokens(tokenizer: str | Path) -> dict[str, Any]:
    """Read the special tokens that lie beside a tokenizer.json: `{"bos_token": "<s>"}`; there may
    be none.

    Raises:
      UserError: a file that names them cannot be read.
    """
    return dict(read_special_tokens(tokenizer).names)
