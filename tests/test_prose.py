"""Docstrings stand by themselves: no riddles, and no argument's line that only repeats its name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jaxpar"
DONE = (
    "hlo",
    "data",
    "rehearse",
    "plan",
    "verify",
    "show",
    "bench",
    "launch",
    "base",
    "train",
    "cli",
    "parallel",
    "kernels",
    "../models",
    "__init__.py",
)
"""The wings that are held to this."""

REFERENCES = re.compile(r"\b(as for|see there)\b", re.IGNORECASE)
RIDDLES = ("That of", "Those of", "The same")
SECTIONS = ("Args:", "Attributes:")
ENTRY = re.compile(r"  (?P<name>\w+): (?:(?:the|a|an|its) )?(?P<says>[\w ]+)\.$")

FILES = [
    file
    for wing in DONE
    for file in sorted(PACKAGE.glob(wing if wing.endswith(".py") else f"{wing}/**/*.py"))
]


def texts_of(source: str) -> Iterator[str]:
    """Yield the docstrings of a module, and the texts below its values and fields."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():  # a lambda's is an expression
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    # the first line has no indent of its own
                    first, _, rest = text.partition("\n")
                    yield f"{first}\n{_without_indent(rest)}"


def _without_indent(text: str) -> str:
    lines = text.splitlines()
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join(line[margin:] for line in lines)


def faults(text: str) -> list[str]:
    """List what is wrong with a docstring."""
    words = " ".join(text.split())
    found = REFERENCES.findall(words)
    found += [start for start in RIDDLES if words.startswith(start)]
    section = ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            section = line
        entry = ENTRY.match(line) if section in SECTIONS else None
        if entry and entry["says"].lower() == entry["name"].replace("_", " ").lower():
            found.append(line.strip())
    return found


@pytest.mark.parametrize(
    "text",
    [
        "That of the weight.",
        "Those of a step.",
        "The same, with an account of the process's time.",
        "Do it.\n\nArgs:\n  target: as for `rehearse`.\n",
        "Do it.\n\nArgs:\n  target: see there.\n",
        "Do it.\n\nArgs:\n  config: the config.\n",
        "Do it.\n\nArgs:\n  batch_size: the batch size.\n",
    ],
)
def test_a_riddle_is_found(text: str) -> None:
    assert faults(text)


@pytest.mark.parametrize(
    "text",
    [
        "Count the bytes of a step.",
        "It was for a while.",
        "Do it.\n\nArgs:\n  config: the config, which has no budget.\n",
        "Do it.\n\nArgs:\n  folder: the run folder.\n",
        "The config.\n\nAs\n  config: the config.\n",
    ],
)
def test_plain_words_pass(text: str) -> None:
    assert not faults(text)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_docstrings_stand_by_themselves(file: Path) -> None:
    found = [fault for text in texts_of(file.read_text("utf-8")) for fault in faults(text)]
    assert not found
